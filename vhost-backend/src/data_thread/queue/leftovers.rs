//! Requests that were taken off the ring and wait for room in the engine: one at most of those that this
//! daemon took, and those of an earlier one.

/// A request that the engine had no room for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Stalled {
    pub(super) id: u16,
    /// It is the one that was taken off the ring last.
    pub(super) is_newest: bool,
    /// A part of it was carried out, or the engine has it.
    pub(super) has_begun: bool,
}

/// What was taken and waits.
#[derive(Debug)]
pub(super) struct Leftovers {
    stalled: Option<Stalled>,
    /// Requests of an earlier daemon to be done again, last first.
    replay: Vec<u16>,
}

impl Leftovers {
    /// With the requests of an earlier daemon, in the order in which it took them.
    pub(super) fn new(mut replay: Vec<u16>) -> Self {
        replay.reverse();
        Self {
            stalled: None,
            replay,
        }
    }

    /// Requests of an earlier daemon, last first.
    pub(super) fn replay(&self) -> &[u16] {
        &self.replay
    }

    #[inline(always)]
    pub(super) fn is_empty(&self) -> bool {
        self.stalled.is_none() && self.replay.is_empty()
    }

    #[inline(always)]
    pub(super) fn is_stalled(&self) -> bool {
        self.stalled.is_some()
    }

    /// How many there are of which the engine has nothing.
    #[inline(always)]
    pub(super) fn count_not_begun(&self) -> usize {
        let stalled = self.stalled.is_some_and(|stalled| !stalled.has_begun);
        usize::from(stalled) + self.replay.len()
    }

    /// The engine had no room for a request.
    pub(super) fn stall(&mut self, stalled: Stalled) {
        self.stalled = Some(stalled);
    }

    /// The request to try next; [`Self::stall`] puts it back.
    pub(super) fn next(&mut self) -> Option<Stalled> {
        self.stalled.take().or_else(|| {
            Some(Stalled {
                id: self.replay.pop()?,
                is_newest: false,
                has_begun: false,
            })
        })
    }

    /// The queue is to stop. Gives up what the engine has seen nothing of and what need not be waited for:
    /// the request that was taken last, which is returned and goes back on the ring, and if the front end
    /// has `gone`, those of an earlier daemon.
    pub(super) fn give_up(&mut self, gone: bool) -> Option<u16> {
        let given_up = self
            .stalled
            .take_if(|stalled| !stalled.has_begun && (stalled.is_newest || gone));
        if gone {
            self.replay.clear();
        }
        given_up
            .filter(|stalled| stalled.is_newest)
            .map(|stalled| stalled.id)
    }

    /// The ring is broken: nothing is submitted any more. Returns the request that had begun.
    pub(super) fn clear(&mut self) -> Option<u16> {
        self.replay.clear();
        let stalled = self.stalled.take();
        stalled
            .filter(|stalled| stalled.has_begun)
            .map(|stalled| stalled.id)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stalled(id: u16, is_newest: bool, has_begun: bool) -> Stalled {
        Stalled {
            id,
            is_newest,
            has_begun,
        }
    }

    #[test]
    fn earlier_requests_come_in_their_order_behind_the_stalled_one() {
        let mut leftovers = Leftovers::new(vec![4, 2]);
        let first = leftovers.next().unwrap();
        assert_eq!(first, stalled(4, false, false));
        leftovers.stall(Stalled {
            has_begun: true,
            ..first
        });
        assert_eq!(leftovers.count_not_begun(), 1);
        assert_eq!(leftovers.next(), Some(stalled(4, false, true)));
        assert_eq!(leftovers.next(), Some(stalled(2, false, false)));
        assert!(leftovers.is_empty() && leftovers.next().is_none());
    }

    #[test]
    fn a_stop_gives_up_only_what_has_not_begun() {
        for (waiting, gone, given_up, stays) in [
            (stalled(7, true, false), false, Some(7), false),
            (stalled(7, true, false), true, Some(7), false),
            (stalled(7, true, true), true, None, true),
            (stalled(7, false, false), false, None, true),
            (stalled(7, false, false), true, None, false),
        ] {
            let mut leftovers = Leftovers::new(vec![3]);
            leftovers.stall(waiting);
            assert_eq!(leftovers.give_up(gone), given_up, "{waiting:?}, {gone}");
            assert_eq!(leftovers.is_stalled(), stays, "{waiting:?}, {gone}");
            assert_eq!(leftovers.replay().is_empty(), gone);
        }
    }

    #[test]
    fn of_a_broken_ring_only_what_has_begun_is_still_answered() {
        for has_begun in [false, true] {
            let mut leftovers = Leftovers::new(vec![3]);
            leftovers.stall(stalled(7, true, has_begun));
            assert_eq!(leftovers.clear(), has_begun.then_some(7));
            assert!(leftovers.is_empty());
        }
    }
}
