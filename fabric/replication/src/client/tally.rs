//! Which members of a set were asked, and who has done it.

use fabric_types::membership::Members;

/// Who was asked for a piece since all were asked last, and how that went.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Tally {
    /// Asked, not answered.
    waiting: Members,
    /// Not to be asked again before all are, or before a newer map.
    asked: Members,
    /// Of them: those that have done it.
    done: Members,
    /// Asked under an older map: stale answers are ignored, and the members are asked again.
    void: Members,
}

impl Tally {
    /// Asked, not answered.
    #[inline]
    pub(super) fn waiting(&self) -> Members {
        self.waiting
    }

    /// Members that are not to be asked again before all are, or before a newer map.
    #[inline]
    pub(super) fn asked(&self) -> Members {
        self.asked
    }

    /// Those that have done it.
    #[inline]
    pub(super) fn done(&self) -> Members {
        self.done
    }

    /// Those that have not, with no answer outstanding.
    pub(super) fn failed(&self) -> Members {
        self.asked.without(self.done)
    }

    /// Asks members that have no answer outstanding.
    #[inline]
    pub(super) fn ask(&mut self, to: Members) {
        assert!(self.waiting.and(to).is_empty(), "asked twice");
        self.waiting = self.waiting.or(to);
        self.asked = self.asked.or(to);
    }

    /// An answer is there, or none will come any more; false if none was awaited.
    #[inline]
    pub(super) fn receive(&mut self, member: usize) -> bool {
        self.waiting.remove(member)
    }

    /// Whether what a member has answered counts: it is what it was when it was asked. If not, it is to be
    /// asked again.
    #[inline]
    pub(super) fn counts(&mut self, member: usize) -> bool {
        let is_void = self.void.remove(member);
        if is_void {
            self.asked.remove(member);
        }
        !is_void
    }

    /// A member has done it.
    #[inline]
    pub(super) fn note_done(&mut self, member: usize) {
        self.done.insert(member);
    }

    /// A member is to be asked again.
    pub(super) fn ask_again(&mut self, member: usize) {
        self.asked.remove(member);
    }

    /// These began anew: nothing that they answered, or will, counts.
    pub(super) fn renew(&mut self, members: Members) {
        self.done = self.done.without(members);
        self.asked = self.asked.without(members);
        self.void = self.void.or(self.waiting.and(members));
    }

    /// Nobody was asked, with no answer outstanding.
    #[inline]
    pub(super) fn forget(&mut self) {
        (self.asked, self.done) = (Members::NONE, Members::NONE);
    }

    /// The same but for those that have done it.
    pub(super) fn forget_failed(&mut self) {
        self.asked = self.done;
    }

    /// Takes these for asked, so that others come first.
    pub(super) fn skip(&mut self, members: Members) {
        self.asked = self.asked.or(members);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_member_answers_as_what_it_was_before_does_not_count() {
        let mut tally = Tally::default();
        let (one, two) = (Members::only(0), Members::only(1));
        tally.ask(one.or(two));
        tally.renew(two);
        assert_eq!(tally.asked(), one, "it is to be asked again");
        assert!(tally.receive(0) && tally.counts(0));
        tally.note_done(0);
        assert!(tally.receive(1) && !tally.counts(1));
        assert!(!tally.receive(1), "it was asked once");
        tally.ask(two);
        assert!(tally.receive(1) && tally.counts(1));
        assert_eq!(tally.failed(), two);
    }
}
