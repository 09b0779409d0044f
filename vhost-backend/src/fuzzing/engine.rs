//! An engine that checks every request and answers as a seed says.

use std::collections::HashSet;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use fabric_types::io::{Engine, IoError, IoResult, Op, Request, SECTOR_BYTES, Submit, Tag, Volume};

use super::{FuzzVolume, check_pieces};
use crate::testing::{FakeGuest, FakeQueue};

/// Requests it holds before it has no room.
const IN_FLIGHT_MAX: usize = 3;

pub(super) struct HostileEngine<'a> {
    guest: &'a FakeGuest,
    pending: Vec<Tag>,
    tags: HashSet<u64>,
    state: u32,
    accepted: usize,
    half_way: bool,
    /// Hardly anything is finished, so that there is soon no room.
    slow: bool,
    wait: OwnedFd,
}

impl<'a> HostileEngine<'a> {
    pub(super) fn new(guest: &'a FakeGuest, seed: u8) -> Self {
        Self {
            guest,
            pending: Vec::new(),
            tags: HashSet::new(),
            state: u32::from(seed),
            accepted: 0,
            half_way: false,
            slow: seed % 2 == 1,
            wait: FakeQueue::event(),
        }
    }

    pub(super) fn reseed(&mut self, seed: u8) {
        self.state ^= u32::from(seed) << 8;
        self.slow = seed % 2 == 1;
    }

    pub(super) fn pending(&self) -> usize {
        self.pending.len()
    }

    /// Requests that were not turned away.
    pub(super) fn accepted(&self) -> usize {
        self.accepted
    }

    /// Whether the last request was turned away though it has pieces in flight.
    pub(super) fn half_way(&self) -> bool {
        self.half_way
    }

    fn roll(&mut self, sides: u32) -> u32 {
        self.state = self
            .state
            .wrapping_mul(1_664_525)
            .wrapping_add(1_013_904_223);
        (self.state >> 16) % sides
    }
}

impl Engine for HostileEngine<'_> {
    type Volume = FuzzVolume;

    unsafe fn submit(&mut self, volume: &FuzzVolume, request: &Request<'_>) -> Submit {
        let moves = matches!(request.op, Op::Read | Op::Write { .. });
        check_pieces(
            self.guest,
            request.buffers,
            if moves { request.len } else { 0 },
        );
        assert!(request.offset % SECTOR_BYTES == 0 && request.len % SECTOR_BYTES == 0);
        assert!(
            request
                .offset
                .checked_add(request.len)
                .is_some_and(|end| end <= volume.size_bytes())
        );
        assert_eq!(request.len == 0, request.op == Op::Flush);
        self.half_way = false;
        match self.roll(8) {
            0 | 1 => {
                self.accepted += 1;
                Submit::Done(Ok(()))
            }
            2 => {
                self.accepted += 1;
                Submit::Done(Err(IoError::NoSpace))
            }
            _ if self.pending.len() >= IN_FLIGHT_MAX => {
                let head = request.tag.0 as u16;
                self.half_way = self.tags.iter().any(|&tag| tag as u16 == head);
                Submit::Busy
            }
            _ => {
                self.accepted += 1;
                assert!(self.tags.insert(request.tag.0), "a tag is used twice");
                self.pending.push(request.tag);
                Submit::Pending
            }
        }
    }

    fn kick(&mut self) {}

    fn reap(&mut self, done: &mut dyn FnMut(Tag, IoResult)) -> usize {
        let count = if self.slow {
            usize::from(self.roll(16) == 0)
        } else {
            self.roll(3) as usize
        };
        for _ in 0..count.min(self.pending.len()) {
            let at = self.roll(self.pending.len() as u32) as usize;
            let tag = self.pending.swap_remove(at);
            self.tags.remove(&tag.0);
            done(
                tag,
                if self.roll(3) == 0 {
                    Err(IoError::Corrupt)
                } else {
                    Ok(())
                },
            );
        }
        count
    }

    fn in_flight(&self) -> usize {
        self.pending.len()
    }

    fn wait_fd(&self) -> BorrowedFd<'_> {
        self.wait.as_fd()
    }
}
