//! Recalls that were not answered yet.

use std::collections::{BTreeMap, BTreeSet};

use namespace::{Ino, SessionId};

use crate::kind::Kind;
use crate::time::Instant;

#[derive(Debug, Clone, Copy)]
struct Recall {
    /// What the holder may keep.
    keep: Option<Kind>,
    since: Instant,
    late_at: Instant,
}

#[derive(Debug, Default)]
pub(super) struct Recalls {
    recalls: BTreeMap<(SessionId, Ino), Recall>,
    /// Those that were not reported as late.
    deadlines: BTreeSet<(Instant, SessionId, Ino)>,
    /// Those that were. Sessions decide how many recalls there are, so nobody may have to search them.
    late: BTreeSet<(SessionId, Ino)>,
}

impl Recalls {
    pub(super) fn count(&self) -> usize {
        self.recalls.len()
    }

    pub(super) fn is_recalled(&self, session: SessionId, ino: Ino) -> bool {
        self.recalls.contains_key(&(session, ino))
    }

    /// Returns what may be kept of an inode that is recalled; `None` if it is not recalled.
    pub(super) fn keep(&self, session: SessionId, ino: Ino) -> Option<Option<Kind>> {
        let recall = self.recalls.get(&(session, ino));
        recall.map(|recall| recall.keep)
    }

    /// Begins a recall, or lowers what may be kept. Whether the holder has to be told.
    pub(super) fn begin(
        &mut self,
        session: SessionId,
        ino: Ino,
        keep: Option<Kind>,
        since: Instant,
        late_at: Instant,
    ) -> bool {
        let recall = Recall {
            keep,
            since,
            late_at,
        };
        match self.recalls.get_mut(&(session, ino)) {
            Some(before) if before.keep.is_none() || before.keep == keep => false,
            Some(before) => {
                before.keep = keep;
                true
            }
            None => {
                self.recalls.insert((session, ino), recall);
                self.deadlines.insert((late_at, session, ino));
                true
            }
        }
    }

    /// The holder has so much left: the recall is over if that is what it may keep.
    pub(super) fn answer(&mut self, session: SessionId, ino: Ino, left: Option<Kind>) {
        let recall = self.recalls.get(&(session, ino));
        if left.is_none() || recall.is_some_and(|recall| recall.keep == left) {
            self.remove(session, ino);
        }
    }

    fn remove(&mut self, session: SessionId, ino: Ino) {
        if let Some(recall) = self.recalls.remove(&(session, ino)) {
            self.deadlines.remove(&(recall.late_at, session, ino));
            self.late.remove(&(session, ino));
        }
    }

    pub(super) fn next_deadline(&self) -> Option<Instant> {
        self.deadlines.first().map(|(at, ..)| *at)
    }

    /// The session of a recall that is late and not answered yet.
    pub(super) fn late(&self, now: Instant) -> Option<SessionId> {
        let reported = self.late.first().map(|(session, _)| *session);
        let due = self.deadlines.first().filter(|(at, ..)| *at <= now);
        reported.or(due.map(|(_, session, _)| *session))
    }

    /// A recall that has become late: session, inode and since when. Each is given out once.
    pub(super) fn take_late(&mut self, now: Instant) -> Option<(SessionId, Ino, Instant)> {
        let (at, session, ino) = *self.deadlines.first()?;
        if now < at {
            return None;
        }
        self.deadlines.remove(&(at, session, ino));
        let recall = self.recalls.get(&(session, ino))?;
        self.late.insert((session, ino));
        Some((session, ino, recall.since))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn session_is_late_from_the_deadline_until_its_last_answer() {
        const HOLDER: SessionId = SessionId(7);
        let at = |ms| Instant::default() + std::time::Duration::from_millis(ms);
        let mut recalls = Recalls::default();
        for (ino, late_at) in [(Ino(1), at(10)), (Ino(2), at(20))] {
            assert!(recalls.begin(HOLDER, ino, None, at(0), late_at));
        }
        assert_eq!(recalls.late(at(9)), None);
        assert_eq!(recalls.late(at(10)), Some(HOLDER), "before it is reported");
        assert_eq!(recalls.take_late(at(10)), Some((HOLDER, Ino(1), at(0))));
        assert_eq!(recalls.take_late(at(10)), None);
        assert_eq!(recalls.late(at(10)), Some(HOLDER));
        recalls.answer(HOLDER, Ino(1), None);
        assert_eq!(recalls.late(at(10)), None);
        assert_eq!(recalls.late(at(20)), Some(HOLDER));
        recalls.answer(HOLDER, Ino(2), None);
        assert_eq!(recalls.late(at(20)), None);
    }
}
