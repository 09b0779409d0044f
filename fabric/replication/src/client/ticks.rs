//! What waits for the next tick.

/// Ticks after which a replica that could not be reached is asked again, if the map still has it.
pub(super) const PARKED_TICKS: u32 = 100;

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Ticks {
    /// Some pieces are to be looked at again.
    has_retries: bool,
    /// Some wait for a replica that could not be reached: ticks since they were looked at.
    parked: Option<u32>,
    /// A request found no room.
    has_refused: bool,
}

/// What is to be done at a tick.
#[derive(Debug, Clone, Copy)]
pub(super) struct Due {
    /// Pieces are to be looked at again.
    pub(super) pieces: bool,
    /// So are those that wait for a replica that could not be reached.
    pub(super) parked: bool,
}

impl Ticks {
    /// A piece is to be looked at again.
    pub(super) fn retry(&mut self) {
        self.has_retries = true;
    }

    /// A piece waits for a replica that could not be reached.
    pub(super) fn park(&mut self) {
        self.parked.get_or_insert(0);
    }

    /// A request found no room.
    pub(super) fn note_refused(&mut self) {
        self.has_refused = true;
    }

    /// Whether a request found no room since it was asked last.
    pub(super) fn take_refused(&mut self) -> bool {
        std::mem::take(&mut self.has_refused)
    }

    /// A tick has passed.
    pub(super) fn pass(&mut self) -> Due {
        // Meta never takes the last in-sync replica out: no newer map will tell that it is back.
        if let Some(ticks) = &mut self.parked {
            *ticks += 1;
        }
        let is_due = |ticks: &mut u32| *ticks >= PARKED_TICKS;
        let parked = self.parked.take_if(is_due).is_some();
        let retries = std::mem::take(&mut self.has_retries);
        Due {
            pieces: retries || parked,
            parked,
        }
    }

    /// Nothing waits.
    #[inline]
    pub(super) fn is_idle(&self) -> bool {
        !self.has_retries && self.parked.is_none() && !self.has_refused
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_could_not_be_reached_is_looked_at_after_a_while() {
        let mut ticks = Ticks::default();
        ticks.park();
        for _ in 1..PARKED_TICKS {
            assert!(!ticks.pass().pieces);
        }
        ticks.park();
        let due = ticks.pass();
        assert!(due.pieces && due.parked, "counted from the first");
        assert!(ticks.is_idle());
        ticks.retry();
        let due = ticks.pass();
        assert!(due.pieces && !due.parked);
    }
}
