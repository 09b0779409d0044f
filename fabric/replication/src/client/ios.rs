//! The table of guest requests in flight.

use std::sync::Arc;

use fabric_types::ids::Version;
use fabric_types::io::{self, IoError, IoResult, Op, SECTOR_BYTES, Tag};
use fabric_types::{Epoch, Sequence};

use super::link::{Link, NONE};
use super::unsent::{Rest, Unsent};
use super::{Client, ClientAction, TRANSFER_BYTES_MAX, changes_data};
use crate::volume::{Finished, VolumeState};

/// A guest request in flight.
#[derive(Clone, Copy)]
pub(super) struct GuestIo {
    pub(super) tag: Tag,
    pub(super) op: Op,
    /// Index into `Client::volumes`.
    pub(super) volume: u32,
    pub(super) offset: u64,
    pub(super) len: u64,
    pub(super) fua: bool,
    /// What its pieces are numbered with.
    pub(super) number: Version,
    /// Of what changes data: its place among the lane's writes of this volume.
    pub(super) link: Link,
    /// It keeps others that overlap it away.
    pub(super) entered: bool,
    /// It kept others away before, does not now, and will before a piece of it is sent.
    pub(super) has_stepped_aside: bool,
    /// Pieces that wait for space, and of which nobody has anything.
    pub(super) untouched: u32,
    pub(super) unsent: Unsent,
    /// Pieces in flight.
    pub(super) open: u32,
    /// Newest loss of power known when the first of several pieces was done; with none done yet the largest
    /// epoch.
    pub(super) begun: Epoch,
    pub(super) error: Option<IoError>,
}

pub(super) const NO_IO: GuestIo = GuestIo {
    tag: Tag(0),
    op: Op::Read,
    volume: 0,
    offset: 0,
    len: 0,
    fua: false,
    number: Version(0),
    link: Link::NONE,
    entered: false,
    has_stepped_aside: false,
    untouched: 0,
    unsent: Unsent::Pieces(NONE),
    open: 0,
    begun: Epoch(u64::MAX),
    error: None,
};

impl GuestIo {
    /// No piece of it waits for an answer, or to be sent.
    #[inline]
    pub(super) fn is_sent(&self) -> bool {
        self.open == 0 && self.unsent.first_piece().is_none()
    }
}

impl Client {
    /// Takes a slot for the request and numbers it. `None`: the lease has no number left.
    #[inline]
    pub(super) fn open_io(
        &mut self,
        volume: &Arc<VolumeState>,
        request: &io::Request<'_>,
    ) -> Option<u32> {
        let unsent = match request.op {
            Op::Flush => Unsent::Groups(self.begin_flush(volume)),
            Op::Discard | Op::WriteZeroes { .. } => Unsent::Bytes(Rest {
                at: request.offset,
                end: request.offset + request.len,
            }),
            Op::Read | Op::Write { .. } => Unsent::Pieces(NONE),
        };
        let local = &mut self.volumes[volume.slot()];
        let mutates = changes_data(request.op);
        let number = if mutates {
            volume.watermark.draw(self.lane, local.writes.is_empty())?
        } else {
            Version::of(volume.generation(), Sequence(0))
        };
        let io = self.ios.take().expect("the caller saw a free slot");
        local.in_flight += 1;
        let asks = matches!(request.op, Op::Write { fua: true });
        let durable = volume.durable_writes() && request.op != Op::Discard;
        self.ios[io] = GuestIo {
            tag: request.tag,
            op: request.op,
            volume: volume.slot(),
            offset: request.offset,
            len: request.len,
            fua: mutates && (asks || durable),
            number,
            link: Link::NONE,
            entered: false,
            has_stepped_aside: false,
            untouched: 0,
            unsent,
            open: 0,
            begun: Epoch(u64::MAX),
            error: None,
        };
        if mutates {
            local.writes.push(io, number, &mut self.ios);
        }
        Some(io)
    }

    /// A request ends, well as far as replicas are concerned or not: notes what is not flushed now, or finds
    /// that a flush was in vain.
    #[inline]
    pub(super) fn conclude(&mut self, io: u32) {
        let state = self.ios[io];
        if state.error.is_some() || state.op == Op::Read {
            return;
        }
        let volume = &self.volumes[state.volume].state;
        let known = self.groups.power_lost(volume.layer());
        let Unsent::Groups(flush) = state.unsent else {
            if !state.fua {
                let begun = known.min(state.begun);
                volume.unflushed.acknowledge(begun, known);
            }
            return;
        };
        if !volume.unflushed.end(flush.mark(), known) {
            let layer = volume.layer();
            self.actions
                .push_back(ClientAction::UnflushedLost { layer });
            self.ios[io].error = Some(IoError::Device(libc::EIO));
        }
    }

    /// One of several pieces of a request is done.
    #[inline]
    pub(super) fn note_begun(&mut self, io: u32) {
        let state = self.ios[io];
        let is_last = state.is_sent() && state.unsent.next_cut().is_none();
        if is_last || state.fua || !changes_data(state.op) {
            return;
        }
        let layer = self.volumes[state.volume].state.layer();
        let known = self.groups.power_lost(layer);
        let begun = &mut self.ios[io].begun;
        *begun = known.min(*begun);
    }

    #[inline]
    pub(super) fn count_finished(&self, io: u32) {
        let state = self.ios[io];
        let finished = match (state.error, state.op) {
            (Some(_), _) => Finished::Error,
            (None, Op::Read) => Finished::Read(state.len),
            (None, Op::Write { .. }) => Finished::Write(state.len),
            (None, Op::Flush) => Finished::Flush,
            (None, Op::Discard | Op::WriteZeroes { .. }) => Finished::Discard,
        };
        self.volumes[state.volume].state.count(self.lane, finished);
    }

    /// Ends a guest request: frees its slot and resolves its version.
    #[inline]
    pub(super) fn close_io(&mut self, io: u32) -> IoResult {
        self.leave(io);
        let state = self.ios[io];
        let local = &mut self.volumes[state.volume];
        local.in_flight -= 1;
        if changes_data(state.op)
            && let Some(oldest) = local.writes.remove(io, &mut self.ios)
        {
            local.state.watermark.set_oldest(self.lane, oldest);
        }
        self.ios.give_back(io);
        state.error.map_or(Ok(()), Err)
    }
}

/// Refuses what no replica need be asked for.
#[inline]
pub(super) fn check(volume: &VolumeState, request: &io::Request<'_>) -> IoResult {
    if volume.is_revoked() {
        return Err(IoError::Fenced);
    }
    if request.op == Op::Flush {
        return Ok(());
    }
    if changes_data(request.op) && volume.read_only() {
        return Err(IoError::ReadOnly);
    }
    let aligned = (request.offset | request.len) % SECTOR_BYTES == 0;
    let end = request.offset.checked_add(request.len);
    let inside = end.is_some_and(|end| end <= volume.size_bytes());
    let moves_data = matches!(request.op, Op::Read | Op::Write { .. });
    let too_long = moves_data && request.len > TRANSFER_BYTES_MAX;
    if !aligned || !inside || too_long || volume.chunk_at(request.offset + request.len).is_none() {
        return Err(IoError::OutOfRange);
    }
    Ok(())
}
