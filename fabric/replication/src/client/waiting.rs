//! Requests of a replicated volume that wait until nothing overlaps them, see [`crate::overlap`].

use std::ops::Range;

use fabric_types::io::{IoResult, Op, Tag};

use super::answers::Answers;
use super::ios::GuestIo;
use super::link::NONE;
use super::{Client, Transport};
use crate::overlap::{Access, Conflict};

/// Requests of a volume that wait on a data thread at a time. Who has as many is answered busy: its queue
/// stands still until one has begun.
pub(super) const WAITING_MAX: usize = 64;

/// Bytes of requests that tried to begin in vain, after which the others wait for the next answer or tick.
const TRIED_BYTES_MAX: u64 = 16 << 20;

/// A request that has not begun. Pieces that it was cut into are [unsent](GuestIo::unsent).
pub(super) struct Waiting {
    io: u32,
    met: Conflict,
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
    /// Lets the request begin, or tells what it has to wait for.
    #[inline]
    pub(super) fn enter(&mut self, io: u32) -> Result<(), Conflict> {
        let state = self.ios[io];
        let Some((access, bytes)) = access_of(&state) else {
            return Ok(());
        };
        let volume = &self.volumes[state.volume].state;
        let overlap = volume.overlap.get_or_init(Default::default);
        overlap.enter(self.lane, access, &bytes)?;
        // Whoever overlaps it was done before, or waits. A version that one of those drew, and that is newer
        // than this one's, would make this one pass for overwritten.
        let version = state.number;
        let renumbers = access != Access::Read && !volume.watermark.is_newest(version);
        let number = renumbers.then(|| volume.watermark.draw(self.lane, false));
        self.ios[io].entered = true;
        // A lease without a number left is about to be renewed, and with it all is numbered anew.
        self.ios[io].number = number.flatten().unwrap_or(version);
        Ok(())
    }

    /// The request is over: others may begin.
    #[inline]
    pub(super) fn leave(&mut self, io: u32) {
        let state = self.ios[io];
        if !state.entered {
            return;
        }
        let overlap = self.volumes[state.volume].state.overlap.get();
        if let (Some((access, bytes)), Some(overlap)) = (access_of(&state), overlap) {
            overlap.leave(self.lane, access, &bytes);
        }
    }

    /// Keeps a request until it may begin; false if its volume has too many that wait.
    pub(super) fn wait(&mut self, io: u32, met: Conflict) -> bool {
        let volume = self.ios[io].volume;
        self.volumes.wait(volume, Waiting { io, met })
    }

    /// Begins those of a volume's requests that may begin now: what one of them had met has left.
    pub(super) fn begin_waiting<T: Transport>(
        &mut self,
        volume: u32,
        transport: &mut T,
        done: &mut dyn FnMut(Tag, IoResult),
    ) {
        let mut tried_bytes = 0;
        // Those that cannot begin are put back in order.
        for _ in 0..self.volumes[volume].waiting.len() {
            // A guest can have each of them meet another conflict at its end.
            if tried_bytes > TRIED_BYTES_MAX {
                return;
            }
            let Some(mut waiting) = self.volumes[volume].waiting.pop_front() else {
                return;
            };
            match self.try_begin(&waiting) {
                Ok(()) => {}
                Err(met) => {
                    if met != waiting.met {
                        tried_bytes += self.ios[waiting.io].len;
                    }
                    waiting.met = met;
                    self.volumes[volume].waiting.push_back(waiting);
                    continue;
                }
            }
            self.volumes.note_begun();
            self.begin(waiting.io, transport);
            self.report_if_done(waiting.io, done);
        }
    }

    /// Lets a request begin that waited. It costs one look while what it met is still there.
    fn try_begin(&mut self, waiting: &Waiting) -> Result<(), Conflict> {
        let state = &self.ios[waiting.io];
        // Zeroes take their pieces when they begin; without one they would look as if they had ended.
        let lacks_piece = state.unsent.first_piece().is_none() && self.pieces.free() == 0;
        let overlap = self.volumes[state.volume].state.overlap.get();
        let is_over = overlap
            .zip(access_of(state))
            .is_none_or(|(overlap, (access, bytes))| overlap.is_over(waiting.met, access, &bytes));
        match is_over && !lacks_piece {
            true => self.enter(waiting.io),
            false => Err(waiting.met),
        }
    }

    pub(super) fn begin<T: Transport>(&mut self, io: u32, transport: &mut T) {
        let (generation, sequence) = self.ios[io].number.parts();
        let Some(mut piece) = self.ios[io].unsent.first_piece() else {
            self.pump(io, transport);
            return;
        };
        while piece != NONE {
            let slot = &mut self.pieces[piece];
            (slot.request.generation, slot.request.sequence) = (generation, sequence);
            piece = slot.next_unsent();
        }
        self.send_unsent(io, transport);
    }

    /// The same for all volumes.
    pub(super) fn begin_all_waiting<T: Transport>(
        &mut self,
        transport: &mut T,
        done: &mut dyn FnMut(Tag, IoResult),
    ) {
        for volume in 0..self.volumes.slots() {
            if self.volumes.waiting() > 0 && self.volumes.get(volume).is_some() {
                self.begin_waiting(volume, transport, done);
            }
        }
        self.send_waiting(transport, done);
    }

    /// Some milliseconds have passed: asks again whoever could not answer, and begins what had to wait for
    /// another thread's requests. To be called about every [`TICK`](super::TICK) while
    /// [`needs_tick`](Self::needs_tick).
    pub fn on_tick<T: Transport>(
        &mut self,
        transport: &mut T,
        done: &mut dyn FnMut(Tag, IoResult),
    ) {
        let due = self.ticks.pass();
        if due.pieces {
            for piece in 0..self.pieces.capacity() {
                let slot = &self.pieces[piece];
                let waits = self.pieces.is_taken(piece) && slot.is_idle() && !slot.space.is_held();
                let asks = |answers: &mut Answers| {
                    answers.take_retry() || (due.parked && answers.has_unreachable())
                };
                if waits && asks(&mut self.pieces[piece].answers) {
                    self.ask_again(piece);
                    self.go_on(piece, transport, done);
                }
            }
        }
        self.retry_held(transport, done);
        self.begin_all_waiting(transport, done);
        self.let_all_try();
        self.hedge(transport, done);
        self.report_grey();
    }

    /// Whether something waits for the next tick.
    #[inline]
    pub fn needs_tick(&self) -> bool {
        let waits = self.volumes.waiting() > 0 || self.full.has_held();
        waits || !self.ticks.is_idle() || !self.hedging.is_idle()
    }
}
