//! Room for bytes: what is buffered is bounded.

use std::collections::VecDeque;
use std::ops::Deref;
use std::sync::{Arc, Mutex};

use futures_channel::oneshot::{Sender, channel};

use crate::sync::lock;

/// A number of bytes that writers share, in order of arrival.
#[derive(Clone)]
pub(crate) struct Room(Arc<Mutex<State>>);

struct State {
    max: u64,
    free: u64,
    waiting: VecDeque<(u64, Sender<Reservation>)>,
}

/// Room that is not filled yet. It is given back when this is dropped.
pub(crate) struct Reservation {
    room: Room,
    bytes: u64,
}

/// Bytes in memory, with their room.
pub(crate) struct BlockData {
    bytes: Vec<u8>,
    _room: Reservation,
}

impl Room {
    pub(super) fn new(max: u64) -> Self {
        Self(Arc::new(Mutex::new(State {
            max,
            free: max,
            waiting: VecDeque::new(),
        })))
    }

    /// Whether so many bytes fit at all, beside others.
    pub(super) fn may_hold(&self, bytes: u64) -> bool {
        bytes.saturating_mul(2) <= lock(&self.0).max
    }

    /// Bytes that are used.
    pub(crate) fn used(&self) -> u64 {
        let state = lock(&self.0);
        state.max - state.free
    }

    /// Whether little is free, or some wait.
    pub(super) fn is_short(&self) -> bool {
        let state = lock(&self.0);
        !state.waiting.is_empty() || state.free < state.max / 4
    }

    /// Waits for room.
    pub(super) async fn reserve(&self, bytes: u64, is_short: impl Fn()) -> Reservation {
        loop {
            let turn = {
                let mut state = lock(&self.0);
                if state.waiting.is_empty() && state.free >= bytes {
                    state.free -= bytes;
                    return self.reservation(bytes);
                }
                let (sender, receiver) = channel();
                state.waiting.push_back((bytes, sender));
                receiver
            };
            is_short();
            if let Ok(reservation) = turn.await {
                return reservation;
            }
        }
    }

    fn reservation(&self, bytes: u64) -> Reservation {
        Reservation {
            room: self.clone(),
            bytes,
        }
    }

    fn give(&self, bytes: u64) {
        let mut admitted = Vec::new();
        {
            let mut state = lock(&self.0);
            state.free += bytes;
            while let Some((wanted, _)) = state.waiting.front() {
                // One that does not wait any more is let through: it gives its room back at once.
                if state.free < *wanted {
                    break;
                }
                let (wanted, next) = state.waiting.pop_front().expect("there is one");
                state.free -= wanted;
                admitted.push((wanted, next));
            }
        }
        for (wanted, next) in admitted {
            drop(next.send(self.reservation(wanted)));
        }
    }
}

impl Reservation {
    /// Fills as much of the room as there are bytes.
    pub(super) fn fill(&mut self, bytes: Vec<u8>) -> Arc<BlockData> {
        let length = bytes.len() as u64;
        assert!(length <= self.bytes, "room is reserved before it is filled");
        self.bytes -= length;
        Arc::new(BlockData {
            bytes,
            _room: self.room.reservation(length),
        })
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        if self.bytes > 0 {
            self.room.give(self.bytes);
        }
    }
}

impl Deref for BlockData {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;

    use futures_util::{FutureExt, poll};

    use super::*;

    #[test]
    fn who_writes_more_than_there_is_room_for_waits_in_order() {
        let room = Room::new(100);
        let body = async {
            let mut first = room.reserve(80, || {}).await;
            let mut large = pin!(room.reserve(60, || {}));
            let mut small = pin!(room.reserve(10, || {}));
            assert!(poll!(&mut large).is_pending());
            assert!(poll!(&mut small).is_pending(), "it came later");
            let block = first.fill(vec![1; 30]);
            drop(first);
            assert_eq!(room.used(), 30 + 60 + 10);
            let large = large.await;
            drop(small.await);
            drop((large, block));
            assert_eq!(room.used(), 0);
        };
        body.now_or_never().unwrap();
    }

    #[test]
    fn who_does_not_wait_any_more_takes_no_room() {
        let room = Room::new(100);
        let body = async {
            let first = room.reserve(100, || {}).await;
            let mut gone = Box::pin(room.reserve(50, || {}));
            let mut next = pin!(room.reserve(100, || {}));
            assert!(poll!(&mut gone).is_pending());
            assert!(poll!(&mut next).is_pending());
            drop(gone);
            drop(first);
            drop(next.await);
            assert_eq!(room.used(), 0);
        };
        body.now_or_never().unwrap();
    }
}
