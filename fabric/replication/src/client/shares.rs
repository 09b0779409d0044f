//! What a volume holds of what all volumes of a data thread share (slots, pieces, scatter lists, bytes in
//! flight), and what it may take, so that a guest that asks for everything slows nobody else down. How tables
//! are shared: [`crate::share`].

use fabric_types::ids::CHUNK_BYTES;
use fabric_types::io::{self, Op};

use super::piece::InWindow;
use super::window::{InFlight, WindowSizes};
use super::{Client, IOS_MAX, changes_data};
use crate::segments::ArraysHeld;
use crate::share::may_take;
use crate::volume::VolumeState;

/// Pieces of writes that have begun and wait for a map or for space, all volumes together, at which no more
/// writes are taken for groups that cannot commit: the rest of the tables is for those that can.
const IDLE_PIECES_MAX: usize = IOS_MAX as usize / 4;

/// What a volume holds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Holdings {
    pub(super) pieces: u32,
    pub(super) arrays: ArraysHeld,
    /// Data that replicas have to answer.
    in_flight: InFlight,
    /// A request found no room, and nothing of this volume has ended since.
    refused: bool,
}

impl Client {
    /// Other windows than the default, before the first request.
    pub fn set_window(&mut self, sizes: WindowSizes) {
        self.window.set_sizes(sizes);
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
        let commits = self.idle_pieces < IDLE_PIECES_MAX
            || (self.can_commit(volume, request) && !self.lacks_space(volume, request));
        let local = &mut self.volumes[volume.slot()];
        let has_share = may_take(local.in_flight as usize, 1, ios)
            && may_take(local.held.pieces as usize, pieces, free_pieces)
            && commits;
        local.held.refused = !has_share;
        if !has_share {
            self.ticks.note_refused();
        }
        has_share
    }

    /// A request found no room although its volume has a share left: of scatter lists, or of places to wait.
    pub(super) fn note_refused(&mut self, volume: u32) {
        self.volumes[volume].held.refused = true;
        self.ticks.note_refused();
    }

    /// Whether it is worth its while to submit a request again for which there was no room.
    #[inline]
    pub fn has_room(&self, volume: &VolumeState) -> bool {
        let local = self.volumes.find(volume);
        local.is_none_or(|local| !local.held.refused || local.in_flight == 0)
    }

    /// Time has passed: whoever found no room may look again, for others may have left some.
    pub(super) fn let_all_try(&mut self) {
        if self.ticks.take_refused() {
            let volumes = self.volumes.iter_mut();
            volumes.for_each(|local| local.held.refused = false);
        }
    }

    /// Whether what the request changes can be committed under the present map: enough replicas of each of
    /// its chunks are in sync.
    fn can_commit(&self, volume: &VolumeState, request: &io::Request<'_>) -> bool {
        if request.op == Op::Flush || !changes_data(request.op) {
            return true;
        }
        let end = request.offset + request.len;
        let chunks = request.offset / CHUNK_BYTES..end.div_ceil(CHUNK_BYTES);
        let chunk_at = |index| volume.chunk_at(index * CHUNK_BYTES);
        self.groups.can_commit(volume.layer(), chunks, chunk_at)
    }

    /// Takes a piece for a request; the caller saw a free one.
    #[inline]
    pub(super) fn take_piece(&mut self, io: u32) -> Option<u32> {
        let piece = self.pieces.take()?;
        self.pieces[piece].io = io;
        let volume = self.ios[io].volume;
        self.volumes[volume].held.pieces += 1;
        Some(piece)
    }

    /// Gives a piece back, and all that it holds.
    #[inline]
    pub(super) fn free_piece(&mut self, piece: u32) {
        let volume = self.ios[self.pieces[piece].io].volume;
        let held = &mut self.volumes[volume].held;
        held.pieces -= 1;
        held.refused = false;
        let list = &mut self.pieces[piece].segments;
        self.segments.clear(list, &mut held.arrays);
        self.private_bytes -= self.pieces[piece].drop_copy();
        self.pieces.give_back(piece);
    }

    /// Whether the window has room for a piece that was not sent.
    #[inline]
    pub(super) fn is_admitted(&self, piece: u32) -> bool {
        let volume = self.ios[self.pieces[piece].io].volume;
        let bytes = self.pieces[piece].data_bytes();
        self.window
            .admits(&self.volumes[volume].held.in_flight, bytes)
    }

    /// A piece is sent: until replicas have answered its data count against the window.
    #[inline]
    pub(super) fn enter_window(&mut self, piece: u32) {
        let slot = &mut self.pieces[piece];
        let (bytes, since_us) = (slot.data_bytes(), self.now_us);
        let volume = self.ios[slot.io].volume;
        let asked = slot.asked_mut().expect("replicas are asked for it");
        if asked.in_window.is_none() {
            asked.in_window = Some(InWindow { bytes, since_us });
            self.volumes[volume].held.in_flight.add(bytes);
            self.window.in_flight.add(bytes);
        }
    }

    /// Nobody has anything of the piece to answer.
    #[inline]
    pub(super) fn leave_window(&mut self, piece: u32) {
        let slot = &mut self.pieces[piece];
        let in_window = slot.asked_mut().and_then(|asked| asked.in_window.take());
        if let Some(InWindow { bytes, since_us }) = in_window {
            let us = self.now_us.saturating_sub(since_us);
            let volume = self.ios[slot.io].volume;
            self.window.adapt(bytes, us);
            self.volumes[volume].held.in_flight.remove(bytes);
            self.window.in_flight.remove(bytes);
        }
    }

    /// Whether the client wants to be told what time it is.
    #[inline]
    pub fn wants_time(&self) -> bool {
        self.window.is_shared()
    }
}

#[cfg(test)]
mod tests;
