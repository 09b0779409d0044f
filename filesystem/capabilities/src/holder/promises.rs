//! Until when guests may use what they were told under one capability.

use crate::holder::GuestId;
use crate::time::Instant;

/// The latest end of a validity, of one guest exactly and of all others together. A capability is mostly
/// used by one guest, and a guest's own changes need not wait for what it was told itself.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Promises {
    guest: GuestId,
    guest_until: Instant,
    /// For whichever guest is not `guest`; it may be longer than true.
    others_until: Instant,
}

impl Promises {
    pub(super) fn give(&mut self, now: Instant, guest: GuestId, until: Instant) {
        if guest != self.guest && self.guest_until <= now {
            self.guest = guest;
            self.guest_until = now;
        }
        if guest == self.guest {
            self.guest_until = self.guest_until.max(until);
        } else {
            self.others_until = self.others_until.max(until);
        }
    }

    /// When no guest uses any of it.
    pub(super) fn end(&self) -> Instant {
        self.guest_until.max(self.others_until)
    }

    /// When this guest uses nothing of it; it may be later than true.
    pub(super) fn end_of(&self, guest: GuestId) -> Instant {
        if guest == self.guest {
            self.guest_until
        } else {
            self.others_until
        }
    }

    /// When no guest but this one does.
    pub(super) fn end_beside(&self, guest: GuestId) -> Instant {
        if guest == self.guest {
            self.others_until
        } else {
            self.end()
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn at(seconds: u64) -> Instant {
        Instant::START + Duration::from_secs(seconds)
    }

    #[test]
    fn a_guest_waits_for_others_alone() {
        let mut promises = Promises::default();
        promises.give(at(10), GuestId(1), at(11));
        assert_eq!(promises.end_beside(GuestId(1)), Instant::START);
        assert_eq!(promises.end_beside(GuestId(2)), at(11));
        promises.give(at(10), GuestId(2), at(12));
        assert_eq!(promises.end_beside(GuestId(1)), at(12));
        assert_eq!(promises.end(), at(12));
        assert_eq!(promises.end_of(GuestId(1)), at(11));
        assert_eq!(promises.end_of(GuestId(2)), at(12));
    }

    #[test]
    fn the_place_of_a_guest_goes_on_once_its_promise_ended() {
        let mut promises = Promises::default();
        promises.give(at(10), GuestId(1), at(11));
        promises.give(at(11), GuestId(2), at(12));
        assert_eq!(promises.end_beside(GuestId(2)), Instant::START);
        assert_eq!(promises.end_beside(GuestId(1)), at(12));
    }
}
