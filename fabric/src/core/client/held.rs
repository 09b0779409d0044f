//! Requests of a replicated volume that wait until nothing overlaps them, see [`crate::core::overlap`].

use std::ops::Range;

use super::ios::GuestIo;
use super::piece::Piece;
use super::{Client, Transport};
use crate::core::overlap::Access;
use crate::io::{IoResult, Op, Tag};

/// Ticks after which a replica that could not be reached is asked again, if the map still has it.
pub(super) const PARKED_TICKS: u32 = 100;

/// A request that has not begun, with the pieces that it is cut into.
pub(super) struct Held {
    io: u32,
    pieces: Vec<u32>,
}

/// What keeps others away while the request is in flight.
fn access_of(io: &GuestIo) -> Option<(Access, Range<u64>)> {
    let access = match io.op {
        Op::Read => Access::Read,
        Op::Write { .. } => Access::Write,
        Op::Discard | Op::WriteZeroes { .. } => Access::Zero,
        Op::Flush => return None,
    };
    Some((access, io.offset..io.offset + io.len))
}

impl Client {
    /// Whether the volumes have more than one replica: a store keeps the requests to itself in order.
    #[inline]
    pub(super) fn is_replicated(&self) -> bool {
        self.replicated
    }

    /// Lets the request begin; false if it has to wait.
    #[inline]
    pub(super) fn enter(&mut self, io: u32) -> bool {
        if !self.is_replicated() {
            return true;
        }
        let state = self.ios[io];
        let Some((access, bytes)) = access_of(&state) else {
            return true;
        };
        let volume = &self.local(state.volume).state;
        let overlap = volume.overlap.get_or_init(Default::default);
        let entered = overlap.enter(self.lane, access, &bytes);
        // Whoever overlaps it was done before, or waits. A version that one of those drew, and that is newer
        // than this one's, would make this one pass for overwritten.
        let version = state.number;
        let renumbers = entered && access != Access::Read && !volume.watermark.is_newest(version);
        let number = renumbers.then(|| volume.watermark.draw(self.lane, false));
        self.ios[io].entered = entered;
        // A lease without a number left is about to be renewed, and with it all is numbered anew.
        self.ios[io].number = number.flatten().unwrap_or(version);
        entered
    }

    /// The request is over: others may begin.
    #[inline]
    pub(super) fn leave(&mut self, io: u32) {
        let state = self.ios[io];
        if !state.entered {
            return;
        }
        let overlap = self.local(state.volume).state.overlap.get();
        if let (Some((access, bytes)), Some(overlap)) = (access_of(&state), overlap) {
            overlap.leave(self.lane, access, &bytes);
        }
    }

    /// Keeps a request, cut into `pieces`, until it may begin.
    pub(super) fn hold(&mut self, io: u32, pieces: Vec<u32>) {
        self.held.push_back(Held { io, pieces });
    }

    /// Begins what may begin now.
    #[inline]
    pub(super) fn release_held<T: Transport>(
        &mut self,
        transport: &mut T,
        done: &mut dyn FnMut(Tag, IoResult),
    ) {
        // Those that cannot begin are put back in order.
        for _ in 0..self.held.len() {
            let Some(held) = self.held.pop_front() else {
                return;
            };
            // Zeroes take their pieces when they begin; without one they would look as if they had ended.
            let lacks_piece = held.pieces.is_empty() && self.pieces.free() == 0;
            if lacks_piece || !self.enter(held.io) {
                self.held.push_back(held);
                continue;
            }
            let (generation, sequence) = self.ios[held.io].number.parts();
            for &piece in &held.pieces {
                let request = &mut self.pieces[piece].request;
                (request.generation, request.sequence) = (generation, sequence);
                self.start(piece, held.io, transport);
            }
            if held.pieces.is_empty() {
                self.pump(held.io, transport);
            }
            self.report_if_done(held.io, done);
        }
    }

    /// Some milliseconds have passed: asks again whoever could not answer, and begins what had to wait for
    /// another thread's requests. To be called about every [`TICK`](super::TICK) while
    /// [`needs_tick`](Self::needs_tick).
    pub fn on_tick<T: Transport>(
        &mut self,
        transport: &mut T,
        done: &mut dyn FnMut(Tag, IoResult),
    ) {
        // Meta never takes the last in-sync replica out: no newer map will tell that it is back.
        self.parked_ticks += u32::from(self.parked);
        let look = self.parked_ticks >= PARKED_TICKS;
        if look {
            (self.parked, self.parked_ticks) = (false, 0);
        }
        if std::mem::take(&mut self.retrying) || look {
            for piece in 0..self.pieces.capacity() {
                let waits = self.pieces.is_taken(piece) && self.pieces[piece].waiting.is_empty();
                let asks = |piece: &mut Piece| piece.take_retry() || (look && piece.is_parked());
                if waits && asks(&mut self.pieces[piece]) {
                    self.ask_again(piece);
                    self.go_on(piece, transport, done);
                }
            }
        }
        self.release_held(transport, done);
        self.hedge(transport, done);
        self.report_grey();
    }

    /// Whether something waits for the next tick.
    #[inline]
    pub fn needs_tick(&self) -> bool {
        self.retrying || self.parked || !self.held.is_empty() || !self.sent.is_empty()
    }
}
