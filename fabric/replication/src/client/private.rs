//! Copies of what guests write, for when their own buffers will not do: they changed while they were being
//! sent, or have to be sent once more when some replica may hold what was in them before.

use fabric_types::iov::{IoVecs, copy_from};

use super::Client;

/// Bytes of copies at which a data thread makes no more of them: writes that need one wait until others are
/// done.
const PRIVATE_BYTES_MAX: usize = 256 << 20;

/// The data of a write, out of the guest's reach.
pub(super) struct PrivateCopy {
    /// Only named by `iov`.
    _bytes: Box<[u8]>,
    iov: Box<libc::iovec>,
}

// SAFETY: the iovec points into memory that the copy owns.
unsafe impl Send for PrivateCopy {}

impl PrivateCopy {
    /// Bytes that it takes.
    pub(super) fn len(&self) -> usize {
        self.iov.iov_len
    }

    /// Names it, for as long as it lives.
    pub(super) fn as_iovecs(&self) -> IoVecs {
        IoVecs {
            ptr: &raw const *self.iov,
            len: 1,
        }
    }

    /// Copies what the list names.
    ///
    /// # Safety
    /// The list and the memory are valid. The memory may change meanwhile.
    pub(super) unsafe fn of(list: &IoVecs) -> Self {
        // SAFETY: the caller's promise.
        let list = unsafe { std::slice::from_raw_parts(list.ptr, list.len as usize) };
        let len = list.iter().map(|iov| iov.iov_len).sum();
        let mut bytes = vec![0; len].into_boxed_slice();
        // SAFETY: the caller's promise; there is room for all of it.
        unsafe { copy_from(list, 0, &mut bytes) };
        let iov = Box::new(libc::iovec {
            iov_base: bytes.as_mut_ptr().cast(),
            iov_len: len,
        });
        Self { _bytes: bytes, iov }
    }
}

impl Client {
    /// Makes the data of a piece private, and everybody is asked; false if that has to wait for a tick.
    #[cold]
    pub(super) fn copy_piece(&mut self, piece: u32) -> bool {
        if self.private_bytes >= PRIVATE_BYTES_MAX {
            self.pieces[piece].answers.put_off();
            self.ticks.retry();
            return false;
        }
        self.private_bytes += self.pieces[piece].make_private();
        true
    }

    /// Whether a piece is to be copied before it is sent once more. A single replica has the data of the last
    /// time it was sent, whatever it had before.
    #[inline]
    pub(super) fn needs_copy(&self, piece: u32) -> bool {
        let slot = &self.pieces[piece];
        slot.is_spread() && self.groups.set(slot.group).members().len() > 1
    }
}
