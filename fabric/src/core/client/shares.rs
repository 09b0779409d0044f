//! What a volume holds of what all volumes of a data thread share (slots, pieces, scatter lists, bytes in
//! flight), and what it may take, so that a guest that asks for everything slows nobody else down. How tables
//! are shared: [`crate::core::share`].

use super::{Client, IOS_MAX, changes_data};
use crate::core::segments::ArraysHeld;
use crate::core::share::may_take;
use crate::core::volume::VolumeState;
use crate::io::{self, Op};
use crate::store::device::BLOCK_BYTES;

/// Requests up to this size have a window of their own: they do not wait behind long ones of the same volume.
pub(super) const SMALL_BYTES: u64 = 16 << 10;

/// How much data a thread has in flight, in bytes. A volume that is alone on its thread has half of a window.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WindowSizes {
    /// All volumes together, without requests up to 16 KiB. A local NVMe drive or a network of 100 Gbit/s is
    /// busy with less than the half.
    pub window_bytes: u64,
    /// The same while several volumes of the thread are in use: what comes next waits for so much of others'
    /// data.
    pub shared_window_bytes: u64,
    /// Requests up to 16 KiB.
    pub small_window_bytes: u64,
    /// Largest piece of a read or write: a power of two from a block to a chunk.
    pub piece_bytes: u64,
    /// The same while several volumes of the thread are in use: others' requests come between two of them.
    pub shared_piece_bytes: u64,
}

impl Default for WindowSizes {
    fn default() -> Self {
        Self {
            window_bytes: 8 << 20,
            shared_window_bytes: 1 << 20,
            small_window_bytes: 4 << 20,
            piece_bytes: 1 << 20,
            shared_piece_bytes: 256 << 10,
        }
    }
}

/// A volume counts as in use for so many requests of the thread after its last.
const IN_USE_REQUESTS: u64 = 1024;
/// Pieces of writes that have begun and wait for a map, all volumes together, at which no more writes are
/// taken for groups that cannot commit: the rest of the tables is for those that can.
const IDLE_PIECES_MAX: usize = IOS_MAX as usize / 4;

/// What a volume holds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Holdings {
    pub(super) pieces: u32,
    pub(super) arrays: ArraysHeld,
    /// Bytes that replicas have to answer, of pieces longer than [`SMALL_BYTES`] and of others.
    long_bytes: u64,
    small_bytes: u64,
    /// A request found no room, and nothing of this volume has ended since.
    refused: bool,
}

/// Bytes in flight of all volumes, and whether there are several.
#[derive(Debug, Default)]
pub(super) struct Window {
    pub(super) sizes: WindowSizes,
    long_bytes: u64,
    small_bytes: u64,
    /// Requests so far, the volume of the last one, and how many there were when another one's was the last.
    requests: u64,
    last: u32,
    alternated_at: Option<u64>,
}

impl Window {
    /// A request of this volume is taken.
    #[inline]
    pub(super) fn note(&mut self, volume: u32) {
        self.requests += 1;
        if self.last != volume {
            if self.requests > 1 {
                self.alternated_at = Some(self.requests);
            }
            self.last = volume;
        }
    }

    #[inline]
    fn is_shared(&self) -> bool {
        self.alternated_at
            .is_some_and(|at| self.requests - at < IN_USE_REQUESTS)
    }

    /// How long the pieces of a request are that this volume has come with.
    #[inline]
    pub(super) fn piece_bytes(&self, volume: u32) -> u64 {
        let alternates = self.last != volume && self.requests > 0;
        match alternates || self.is_shared() {
            true => self.sizes.shared_piece_bytes,
            false => self.sizes.piece_bytes,
        }
    }

    /// Whether a volume that holds this may send `bytes` more.
    #[inline]
    fn admits(&self, held: &Holdings, bytes: u64) -> bool {
        let (mine, all, size) = if bytes <= SMALL_BYTES {
            (
                held.small_bytes,
                self.small_bytes,
                self.sizes.small_window_bytes,
            )
        } else if self.is_shared() {
            (
                held.long_bytes,
                self.long_bytes,
                self.sizes.shared_window_bytes,
            )
        } else {
            (held.long_bytes, self.long_bytes, self.sizes.window_bytes)
        };
        let free = size.saturating_sub(all);
        // Who has nothing in flight may always send one piece.
        mine == 0 || may_take(mine as usize, bytes as usize, free as usize)
    }
}

impl Client {
    /// Other windows than the default, before the first request.
    pub fn set_window(&mut self, sizes: WindowSizes) {
        let whole = |bytes: u64| bytes.is_power_of_two() && bytes >= BLOCK_BYTES as u64;
        assert!(whole(sizes.piece_bytes) && whole(sizes.shared_piece_bytes));
        self.window.sizes = sizes;
    }

    /// Whether the volume may have one more request, of `pieces` pieces. If not, it is noted until something
    /// of the volume ends.
    #[inline]
    pub(super) fn has_share(
        &mut self,
        volume: &VolumeState,
        request: &io::Request<'_>,
        pieces: usize,
    ) -> bool {
        let (ios, free_pieces) = (self.ios.free(), self.pieces.free());
        let commits = self.idle_pieces < IDLE_PIECES_MAX || self.can_commit(volume, request);
        let local = self.local_mut(volume.slot());
        let has_share = may_take(local.in_flight as usize, 1, ios)
            && may_take(local.held.pieces as usize, pieces, free_pieces)
            && commits;
        local.held.refused = !has_share;
        self.refused |= !has_share;
        has_share
    }

    /// A request found no room although its volume has a share left: of scatter lists, or of places to wait.
    pub(super) fn note_refused(&mut self, volume: u32) {
        self.local_mut(volume).held.refused = true;
        self.refused = true;
    }

    /// Whether it is worth its while to submit a request again for which there was no room.
    #[inline]
    pub fn has_room(&self, volume: &VolumeState) -> bool {
        let local = self.volumes.get(volume.slot() as usize);
        let local = local
            .and_then(Option::as_ref)
            .filter(|l| l.id == volume.id());
        local.is_none_or(|local| !local.held.refused || local.in_flight == 0)
    }

    /// Time has passed: whoever found no room may look again, for others may have left some.
    pub(super) fn let_all_try(&mut self) {
        if std::mem::take(&mut self.refused) {
            let volumes = self.volumes.iter_mut().flatten();
            volumes.for_each(|local| local.held.refused = false);
        }
    }

    /// Whether what the request changes can be committed under the present map: enough replicas are in sync.
    /// Of a long one its first chunk is looked at.
    fn can_commit(&self, volume: &VolumeState, request: &io::Request<'_>) -> bool {
        if request.op == Op::Flush || !changes_data(request.op) {
            return true;
        }
        let chunk = volume.chunk_at(request.offset);
        chunk.is_none_or(|chunk| {
            let set = &self.groups[usize::from(self.group_of(chunk))].set;
            set.in_sync().len() >= set.min_in_sync()
        })
    }

    /// Takes a piece for a request; the caller saw a free one.
    #[inline]
    pub(super) fn take_piece(&mut self, io: u32) -> Option<u32> {
        let piece = self.pieces.take()?;
        self.pieces[piece].io = io;
        let volume = self.ios[io].volume;
        self.local_mut(volume).held.pieces += 1;
        Some(piece)
    }

    /// Gives a piece back, and all that it holds.
    #[inline]
    pub(super) fn free_piece(&mut self, piece: u32) {
        let volume = self.ios[self.pieces[piece].io].volume;
        let held = &mut self.volumes[volume as usize]
            .as_mut()
            .expect("a volume stays while it has requests")
            .held;
        held.pieces -= 1;
        held.refused = false;
        let list = &mut self.pieces[piece].segments;
        self.segments.clear(list, &mut held.arrays);
        self.drop_copy(piece);
        self.pieces.give_back(piece);
    }

    /// Whether the window has room for a piece that was not sent.
    #[inline]
    pub(super) fn is_admitted(&self, piece: u32) -> bool {
        let volume = self.ios[self.pieces[piece].io].volume;
        let bytes = self.pieces[piece].data_bytes();
        self.window.admits(&self.local(volume).held, bytes)
    }

    /// A piece is sent: until replicas have answered its data count against the window.
    #[inline]
    pub(super) fn enter_window(&mut self, piece: u32) {
        if self.pieces[piece].in_window == 0 {
            let bytes = self.pieces[piece].data_bytes();
            self.pieces[piece].in_window = bytes;
            self.count_in_window(piece, bytes, u64::wrapping_add);
        }
    }

    /// Nobody has anything of the piece to answer.
    #[inline]
    pub(super) fn leave_window(&mut self, piece: u32) {
        let bytes = std::mem::take(&mut self.pieces[piece].in_window);
        if bytes > 0 {
            self.count_in_window(piece, bytes, u64::wrapping_sub);
        }
    }

    #[inline]
    fn count_in_window(&mut self, piece: u32, bytes: u64, count: fn(u64, u64) -> u64) {
        let volume = self.ios[self.pieces[piece].io].volume;
        let local = self.volumes[volume as usize]
            .as_mut()
            .expect("a volume stays while it has requests");
        let (mine, all) = match bytes <= SMALL_BYTES {
            true => (&mut local.held.small_bytes, &mut self.window.small_bytes),
            false => (&mut local.held.long_bytes, &mut self.window.long_bytes),
        };
        *mine = count(*mine, bytes);
        *all = count(*all, bytes);
    }

    /// Nobody has anything of the piece to answer, and it is not over: it waits for a map, or for a moment.
    #[inline]
    pub(super) fn note_idle(&mut self, piece: u32, idle: bool) {
        if std::mem::replace(&mut self.pieces[piece].idle, idle) != idle {
            match idle {
                true => self.idle_pieces += 1,
                false => self.idle_pieces -= 1,
            }
        }
    }
}

#[cfg(test)]
mod tests;
