//! Parts that can go on or wait for something.
//!
//! Whatever lacks a resource is put in a list and tried again in order. Nothing that waits holds what another
//! one waits for: a part that may be waiting for a checkpoint (for a leaf slot in `stalled`, for space in
//! `ready`, for a place among the buffers of old content in `old`) holds no units back, because the
//! checkpoint ends only when nobody reads freed units any more. A part that does read them (it is a *reader*,
//! see `alloc/quarantine.rs`) waits only for what comes back by itself: request slots and buffers, in
//! `starved`.

use std::collections::VecDeque;

/// One in so many buffers may hold old content of partly covered blocks; writes that need more wait.
const OLD_SHARE: u32 = 4;

/// The lists of one shard. A part is in at most one of them.
#[derive(Debug)]
pub(super) struct Waiting {
    runnable: VecDeque<u32>,
    stalled: VecDeque<u32>,
    starved: VecDeque<u32>,
    old: OldContent,
    ready: VecDeque<u32>,
}

/// Buffers promised to old content, which a write may hold until the next checkpoint. They are bounded: with
/// all buffers waiting for a checkpoint, no read could end, and with it no checkpoint.
#[derive(Debug)]
struct OldContent {
    promised: u32,
    promised_max: u32,
    waiting: VecDeque<u32>,
}

impl Waiting {
    /// For so many parts, and a shard with so many buffers.
    pub(super) fn new(parts: u32, buffers: u32) -> Self {
        let list = || VecDeque::with_capacity(parts as usize);
        Self {
            runnable: list(),
            stalled: list(),
            starved: list(),
            old: OldContent {
                promised: 0,
                promised_max: buffers / OLD_SHARE,
                waiting: list(),
            },
            ready: list(),
        }
    }

    /// Invariant *Bounded*: whether so many parts account for all that wait.
    pub(super) fn is_bounded(&self, parts: usize) -> bool {
        let waiting = self.stalled.len() + self.starved.len() + self.old.waiting.len();
        waiting + self.ready.len() <= parts
    }

    /// The part can go on.
    pub(super) fn run(&mut self, part: u32) {
        self.runnable.push_back(part);
    }

    /// The part can go on, before all others.
    pub(super) fn run_first(&mut self, part: u32) {
        self.runnable.push_front(part);
    }

    pub(super) fn next_runnable(&mut self) -> Option<u32> {
        self.runnable.pop_front()
    }

    /// The part lacks something.
    pub(super) fn wait(&mut self, part: u32, is_reader: bool) {
        if is_reader {
            self.starved.push_back(part);
        } else {
            self.stalled.push_back(part);
        }
    }

    pub(super) fn next_starved(&mut self) -> Option<u32> {
        self.starved.pop_front()
    }

    /// What the first of the starved parts lacks is still not there.
    pub(super) fn starve_on(&mut self, part: u32) {
        self.starved.push_front(part);
    }

    pub(super) fn next_stalled(&mut self) -> Option<u32> {
        self.stalled.pop_front()
    }

    /// What the first of the stalled parts lacks is still not there.
    pub(super) fn stall_on(&mut self, part: u32) {
        self.stalled.push_front(part);
    }

    /// Sets buffers aside for the old content that a write needs, which it keeps until it is in a batch;
    /// `false` if it has to wait for others to return theirs.
    pub(super) fn promise_old(&mut self, buffers: u32) -> bool {
        if self.old.promised + buffers > self.old.promised_max {
            return false;
        }
        self.old.promised += buffers;
        true
    }

    pub(super) fn wait_for_old(&mut self, part: u32) {
        self.old.waiting.push_back(part);
    }

    /// A write holds its old content no more.
    pub(super) fn return_old(&mut self, promised: u32) {
        self.old.promised -= promised;
        // Each needs one or two.
        for _ in 0..promised {
            self.runnable.extend(self.old.waiting.pop_front());
        }
    }

    /// Parts that are ready for a log batch, in order.
    pub(super) fn ready(&self) -> &VecDeque<u32> {
        &self.ready
    }

    /// The part joins the next log batch that has room.
    pub(super) fn push_ready(&mut self, part: u32) {
        self.ready.push_back(part);
    }

    pub(super) fn pop_ready(&mut self) -> Option<u32> {
        self.ready.pop_front()
    }
}
