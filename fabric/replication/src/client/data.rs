//! Reads and writes: cut into pieces, which are sent as the window allows ([`super::shares`]). What waits for
//! the window is sent in turns, a piece of each volume at a time.

use fabric_types::Command;
use fabric_types::ids::{CHUNK_BYTES, ChunkKey};
use fabric_types::io::{self, IoResult, Op, Tag};
use fabric_types::iov::IoVecs;

use super::ios::GuestIo;
use super::link::NONE;
use super::piece::Stage;
use super::unsent::Unsent;
use super::window::SMALL_BYTES;
use super::{Client, Transport};
use crate::segments::{Cutter, ListRefusal};
use crate::volume::VolumeState;

/// What became of the turn of a volume.
enum Turn {
    /// A piece was sent.
    Sent,
    /// The window has no room for its next piece.
    Waits,
    /// It has nothing to send.
    Done,
}

/// Pieces of at most `piece_bytes` that a request is cut into; at least one.
#[inline]
pub(super) fn pieces_of(request: &io::Request<'_>, piece_bytes: u64) -> usize {
    match request.op {
        Op::Read | Op::Write { .. } => {
            let first = request.offset / piece_bytes;
            let end = (request.offset + request.len).div_ceil(piece_bytes);
            (end - first).max(1) as usize
        }
        Op::Flush | Op::Discard | Op::WriteZeroes { .. } => 1,
    }
}

impl Client {
    /// Cuts a read or write into pieces. None is kept on an error.
    #[inline]
    pub(super) fn cut(
        &mut self,
        io: u32,
        volume: &VolumeState,
        request: &io::Request<'_>,
        piece_bytes: u64,
    ) -> Result<(), ListRefusal> {
        let mut cutter = Cutter::new(request.buffers);
        let (mut at, end) = (request.offset, request.offset + request.len);
        let mut last = NONE;
        self.volumes[volume.slot()].held.arrays.begin_request();
        while at < end {
            // A chunk is a multiple of a piece: none lies in two of them.
            let len = (end - at).min(piece_bytes - at % piece_bytes);
            let outcome = self.cut_piece(io, volume, at, len, &mut cutter);
            let piece = match outcome {
                Ok(piece) => piece,
                Err(refusal) => {
                    self.drop_unsent(io);
                    return Err(refusal);
                }
            };
            match last {
                NONE => self.ios[io].unsent = Unsent::Pieces(piece),
                last => self.pieces[last].stage = Stage::Unsent { next: piece },
            }
            last = piece;
            at += len;
        }
        Ok(())
    }

    #[inline]
    fn cut_piece(
        &mut self,
        io: u32,
        volume: &VolumeState,
        at: u64,
        len: u64,
        cutter: &mut Cutter<'_>,
    ) -> Result<u32, ListRefusal> {
        let piece = self.take_piece(io).ok_or(ListRefusal::Busy)?;
        let list = &mut self.pieces[piece].segments;
        let held = &mut self.volumes[volume.slot()].held;
        if let Err(refusal) = self
            .segments
            .fill(list, cutter, len as usize, &mut held.arrays)
        {
            self.free_piece(piece);
            return Err(refusal);
        }
        let buffers = self.pieces[piece].segments.as_iovecs();
        let chunk = volume.chunk_at(at).expect("check() bounds the offset");
        let command = data_command(&self.ios[io], chunk, at, len, buffers);
        self.fill_piece(piece, io, self.groups.group_of(chunk), command);
        Ok(piece)
    }

    /// Forgets what of a request was not sent.
    pub(super) fn drop_unsent(&mut self, io: u32) {
        while let Some(piece) = self.next_unsent(io) {
            self.take_unsent(io, piece);
            self.free_piece(piece);
        }
    }

    #[inline]
    fn next_unsent(&self, io: u32) -> Option<u32> {
        self.ios[io].unsent.first_piece()
    }

    /// Takes the first piece off those that are not sent.
    #[inline]
    fn take_unsent(&mut self, io: u32, piece: u32) {
        self.ios[io].unsent = Unsent::Pieces(self.pieces[piece].next_unsent());
    }

    /// Sends what the window has room for; the rest has its turn when others' data have been answered.
    #[inline]
    pub(super) fn send_unsent<T: Transport>(&mut self, io: u32, transport: &mut T) {
        let volume = self.ios[io].volume;
        while let Some(piece) = self.next_unsent(io) {
            let is_small = self.pieces[piece].data_bytes() <= SMALL_BYTES;
            let first = is_small || self.volumes[volume].unsent.is_empty();
            if !first || !self.is_admitted(piece) {
                let key = self.ios.key(io);
                self.volumes.wait_for_window(volume, key);
                return;
            }
            self.send_piece(io, piece, transport);
        }
    }

    #[inline]
    fn send_piece<T: Transport>(&mut self, io: u32, piece: u32, transport: &mut T) {
        self.take_unsent(io, piece);
        self.start(piece, io, transport);
    }

    /// Some data were answered, or wait for a map: sends what waits for the window, a piece of each volume at
    /// a time, until none has room.
    pub(super) fn send_waiting<T: Transport>(
        &mut self,
        transport: &mut T,
        done: &mut dyn FnMut(Tag, IoResult),
    ) {
        let mut waits = 0;
        while waits < self.volumes.senders() {
            let Some(volume) = self.volumes.next_sender() else {
                return;
            };
            match self.take_turn(volume, transport, done) {
                Turn::Sent => waits = 0,
                Turn::Waits => waits += 1,
                Turn::Done => {
                    self.volumes.ends_sending(volume);
                    continue;
                }
            }
            self.volumes.sends_again(volume);
        }
    }

    fn take_turn<T: Transport>(
        &mut self,
        volume: u32,
        transport: &mut T,
        done: &mut dyn FnMut(Tag, IoResult),
    ) -> Turn {
        loop {
            let Some(&key) = self.volumes[volume].unsent.front() else {
                return Turn::Done;
            };
            // One that has failed has nothing left to send, or is over.
            let next = self.ios.find(key).map(|io| (io, self.next_unsent(io)));
            let Some((io, Some(piece))) = next else {
                self.volumes[volume].unsent.pop_front();
                continue;
            };
            if !self.is_admitted(piece) {
                return Turn::Waits;
            }
            self.send_piece(io, piece, transport);
            if self.next_unsent(io).is_none() {
                self.volumes[volume].unsent.pop_front();
            }
            self.report_if_done(io, done);
            return Turn::Sent;
        }
    }
}

/// What a read or write of `len` bytes at byte `at` asks of a replica.
#[inline]
fn data_command(io: &GuestIo, chunk: ChunkKey, at: u64, len: u64, buffers: IoVecs) -> Command {
    let (offset, len) = ((at % CHUNK_BYTES) as u32, len as u32);
    match io.op {
        Op::Read => Command::Read {
            chunk,
            offset,
            buffers,
            len,
        },
        _ => Command::Write {
            chunk,
            offset,
            buffers,
            len,
            fua: io.fua,
            urgent: false,
        },
    }
}
