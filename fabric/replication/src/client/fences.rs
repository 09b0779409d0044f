//! What a request is fenced by: lease, map and watermark, and the number of a write under its lease.

use fabric_types::io::{IoResult, Tag};
use fabric_types::{Generation, Sequence};

use super::{Client, Transport};

/// How often a write is numbered anew; one that is still refused then fails. Each time a discard of
/// everything near it has to overtake it together with a checkpoint, so once is rare.
pub(super) const RENUMBERS_MAX: u8 = 64;

impl Client {
    /// Puts the present lease, map and watermark into a piece's request; false if nothing is newer, or if the
    /// lease has no number left.
    ///
    /// A write that goes on under a newer lease is numbered anew: the lease counts from one, and under its
    /// old number the write would pass for newer than what is written under the lease later, which would then
    /// be dropped as stale.
    #[inline]
    pub(super) fn refresh_fences(&mut self, piece: u32) -> bool {
        let slot = &self.pieces[piece];
        let request = &slot.request;
        let volume = &self.volumes[self.ios[slot.io].volume].state;
        let generation = volume.generation();
        let (mut version, newer_lease) = (None, generation > request.generation);
        if newer_lease && request.command.mutates() {
            version = volume.watermark.draw(self.lane, false);
            if version.is_none() {
                return false;
            }
        }
        let (generation, sequence) = match version {
            Some(version) => version.parts(),
            None => (request.generation.max(generation), request.sequence),
        };
        let epoch = volume.epoch().max(self.map_of(piece));
        let resolved = volume.watermark.resolved();
        let request = &mut self.pieces[piece].request;
        let newer = newer_lease || epoch > request.epoch;
        (request.epoch, request.generation, request.sequence) = (epoch, generation, sequence);
        let (marked, watermark) = resolved.parts();
        // Before the first look at the lanes of a renewed lease nothing of it is known to be resolved.
        request.watermark = if marked == request.generation {
            watermark
        } else {
            Sequence(0)
        };
        newer
    }

    /// Prepares a piece that waited for going on: under the present lease and map, asking whoever failed once
    /// more. Under a newer lease it is another write, and everybody is asked.
    pub(super) fn ask_again(&mut self, piece: u32) {
        let version = self.pieces[piece].request.sequence;
        let generation = self.pieces[piece].request.generation;
        self.pieces[piece].answers.ask_failed_again();
        self.refresh_fences(piece);
        let request = &self.pieces[piece].request;
        if (request.generation, request.sequence) != (generation, version) {
            self.pieces[piece].answers.forget();
        }
    }

    /// Numbers a piece's write anew; false if it has been often enough, or the lease has no number left.
    #[cold]
    pub(super) fn renumber(&mut self, piece: u32) -> bool {
        let slot = &self.pieces[piece];
        let volume = &self.volumes[self.ios[slot.io].volume].state;
        if slot.renumbered >= RENUMBERS_MAX {
            return false;
        }
        let Some(version) = volume.watermark.draw(self.lane, false) else {
            return false;
        };
        let slot = &mut self.pieces[piece];
        slot.renumbered += 1;
        (slot.request.generation, slot.request.sequence) = version.parts();
        // The lease may be newer than the map and the watermark in the request.
        self.refresh_fences(piece);
        true
    }

    /// Whether the piece's volume is another's by now.
    #[inline]
    pub(super) fn is_revoked(&self, piece: u32) -> bool {
        let io = self.pieces[piece].io;
        self.volumes[self.ios[io].volume].state.is_revoked()
    }

    /// Ends what waits for a map or for a moment, of volumes that were
    /// [revoked](crate::volume::VolumeState::revoke).
    pub fn end_revoked<T: Transport>(
        &mut self,
        transport: &mut T,
        done: &mut dyn FnMut(Tag, IoResult),
    ) {
        for piece in 0..self.pieces.capacity() {
            let waits = self.pieces.is_taken(piece) && self.pieces[piece].is_idle();
            if waits && self.is_revoked(piece) {
                self.go_on(piece, transport, done);
            }
        }
        self.begin_all_waiting(transport, done);
    }

    pub(super) fn reaches(&self, piece: u32, generation: Generation) -> bool {
        self.pieces[piece].request.generation >= generation
    }
}
