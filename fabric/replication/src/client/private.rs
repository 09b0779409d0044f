//! Copies of what guests write, for when their own buffers will not do: they changed while they were being
//! sent, or have to be sent once more when some replica may hold what was in them before.

use super::Client;

/// Bytes of copies at which a data thread makes no more of them: writes that need one wait until others are
/// done.
const PRIVATE_BYTES_MAX: usize = 256 << 20;

impl Client {
    /// Makes the data of a piece private, and everybody is asked; false if that has to wait for a tick.
    #[cold]
    pub(super) fn copy_piece(&mut self, piece: u32) -> bool {
        if self.private_bytes >= PRIVATE_BYTES_MAX {
            self.pieces[piece].put_off();
            self.retrying = true;
            return false;
        }
        self.pieces[piece].make_private();
        self.private_bytes += self.pieces[piece].private_bytes();
        true
    }

    /// The piece is done: what was copied for it is let go.
    #[inline]
    pub(super) fn drop_copy(&mut self, piece: u32) {
        if self.pieces[piece].copy.is_some() {
            self.private_bytes -= self.pieces[piece].private_bytes();
            self.pieces[piece].copy = None;
        }
    }

    /// Whether a piece is to be copied before it is sent once more. A single replica has the data of the last
    /// time it was sent, whatever it had before.
    #[inline]
    pub(super) fn needs_copy(&self, piece: u32) -> bool {
        let slot = &self.pieces[piece];
        slot.is_spread() && self.groups[usize::from(slot.group)].set.members().len() > 1
    }
}
