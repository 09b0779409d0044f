//! Each rule of the cache by itself, with a leader that is played by hand.

use fs_capabilities::{GrantId, ToHolder};
use namespace::{
    Answer, Error, Make, NewNode, Openers, Query, Rename, RenameMode, SetAttributes, Time,
};

use super::answers::Question;
use super::store::tests::file;
use super::*;
use crate::backend::Reader;
use crate::buffer::Buffer;

const SESSION: SessionId = SessionId(5);
const DIR: Ino = Ino(1);
const FILE: Ino = Ino(7);
const ONE: GuestId = GuestId(1);
const TWO: GuestId = GuestId(2);
/// When nothing has changed for long.
const QUIET: u64 = 20_000;

fn at(milliseconds: u64) -> Instant {
    Instant::START + Duration::from_millis(milliseconds)
}

/// A cache, and the leader's side of its link.
struct Rig {
    cache: Arc<Cache>,
    reader: Reader,
    sent: u64,
}

impl Rig {
    fn new() -> Self {
        let limits = Limits {
            names_max: 1000,
            inodes_max: 1000,
            settings: Settings::default(),
            #[cfg(feature = "testing")]
            mistake: None,
        };
        let cache = Cache::new(limits, Buffer::new(0));
        let reader = cache.connect(at(0), SESSION, at(3_600_000), 1).unwrap();
        Self {
            cache,
            reader,
            sent: 0,
        }
    }

    /// One that holds the directory.
    fn holding() -> Self {
        let mut rig = Self::new();
        rig.grant(1);
        rig
    }

    fn say(&mut self, message: ToHolder) {
        let behind = self.sent;
        self.sent += 1;
        let came = self
            .cache
            .receive(at(0), self.reader, behind, vec![message]);
        assert_eq!(came, self.sent);
    }

    fn grant(&mut self, number: u64) {
        self.say(ToHolder::Grant {
            ino: DIR,
            grant: GrantId { term: 1, number },
            kind: Kind::DirectoryRead,
        });
    }

    fn recall(&mut self, number: u64) {
        self.say(ToHolder::Recall {
            ino: DIR,
            grant: GrantId { term: 1, number },
            keep: None,
        });
    }

    fn ask(&self) -> Question {
        self.cache.ask()
    }

    /// The answer to a lookup: a name leads to an inode. The leader had sent `sent` messages.
    fn told(&self, question: Question, name: &str, ino: Ino, sent: u64) {
        let query = Query::Lookup {
            parent: DIR,
            name: name.into(),
        };
        let answer = Ok(Answer::Inode(ino, Box::new(file(DIR))));
        question.answered(at(0), Some(sent), &query, &answer);
    }

    fn told_inode(&self, question: Question, ino: Ino) {
        let answer = Ok(Answer::Inode(ino, Box::new(file(DIR))));
        question.answered(at(0), Some(self.sent), &Query::Inode(ino), &answer);
    }

    fn is_name_cached(&self, name: &str) -> bool {
        self.cache.named(at(0), DIR, name.as_bytes()).is_some()
    }

    fn is_cached(&self, ino: Ino) -> bool {
        self.cache.inode(at(0), ino).is_some()
    }

    fn begin(&self, guest: GuestId, now: Instant, operation: &Operation) -> (Change, Instant) {
        self.cache.begin_change(now, guest, operation).unwrap()
    }
}

fn unlink(name: &str) -> Operation {
    Operation::Unlink {
        parent: DIR,
        name: name.into(),
        openers: Openers::All { own: true },
    }
}

fn rename(name: &str, to: &str) -> Operation {
    Operation::Rename(Rename {
        parent: DIR,
        name: name.into(),
        new_parent: DIR,
        new_name: to.into(),
        mode: RenameMode::Replace,
        openers: Openers::All { own: true },
    })
}

fn make(name: &str) -> Operation {
    Operation::Make(Make {
        parent: DIR,
        name: name.into(),
        mode: 0,
        uid: 0,
        gid: 0,
        node: NewNode::File,
    })
}

fn set(ino: Ino) -> Operation {
    Operation::SetAttributes(SetAttributes {
        ino,
        ..SetAttributes::default()
    })
}

#[test]
fn an_answer_is_cached_if_it_was_given_after_the_grant() {
    let mut rig = Rig::new();
    let before = rig.ask();
    rig.grant(1);
    rig.told(before, "a", FILE, 0);
    assert!(!rig.is_name_cached("a"), "it was given before");
    rig.told(rig.ask(), "a", FILE, 1);
    assert!(rig.is_name_cached("a") && rig.is_cached(FILE));
    let late = rig.ask();
    rig.recall(1);
    assert!(!rig.is_name_cached("a") && !rig.is_cached(FILE));
    rig.grant(2);
    rig.told(late, "a", FILE, 1);
    assert!(
        !rig.is_name_cached("a"),
        "it was changed in between, perhaps"
    );
}

#[test]
fn an_answer_on_another_link_is_not_cached() {
    let mut rig = Rig::holding();
    let question = rig.ask();
    let reader = rig.cache.connect(at(0), SESSION, at(3_600_000), 2).unwrap();
    rig.told(question, "a", FILE, 1);
    assert!(!rig.is_name_cached("a"));
    // The directory is claimed. The claim is refused by a message that has not come.
    let question = rig.ask();
    assert_eq!(question.reader(), Some(reader));
    rig.told(question, "a", FILE, 1);
    assert!(!rig.is_name_cached("a"));
    rig.told(rig.ask(), "a", FILE, 0);
    assert!(rig.is_name_cached("a"));
    rig.sent = 0;
    rig.reader = reader;
    rig.recall(1);
    assert!(!rig.is_name_cached("a"));
}

#[test]
fn a_lease_that_ends_ends_the_cache() {
    let rig = Rig::holding();
    rig.told(rig.ask(), "a", FILE, 1);
    assert!(rig.cache.inode(at(3_599_999), FILE).is_some());
    assert!(rig.cache.inode(at(3_600_000), FILE).is_none());
    assert!(
        rig.cache
            .connect(at(3_600_001), SESSION, at(3_600_001), 1)
            .is_none()
    );
    let reader = rig.cache.connect(at(3_600_001), SESSION, at(7_200_000), 1);
    assert!(reader.is_some_and(|reader| reader.link.round > rig.reader.link.round));
    assert!(rig.cache.inode(at(3_600_002), FILE).is_none());
}

#[test]
fn what_a_change_touches_is_neither_answered_nor_cached_until_it_is_over() {
    let rig = Rig::holding();
    for (name, ino) in [("a", FILE), ("b", Ino(8))] {
        rig.told(rig.ask(), name, ino, 1);
    }
    let before = rig.ask();
    let (change, _) = rig.begin(ONE, at(0), &unlink("a"));
    assert!(!rig.is_name_cached("a") && !rig.is_cached(FILE));
    assert!(rig.is_name_cached("b") && rig.is_cached(Ino(8)));
    rig.told(rig.ask(), "a", FILE, 1);
    assert!(!rig.is_name_cached("a") && !rig.is_cached(FILE));
    let during = rig.ask();
    drop(change);
    for question in [before, during] {
        rig.told(question, "a", FILE, 1);
        assert!(!rig.is_name_cached("a") && !rig.is_cached(FILE));
    }
    let query = Query::Lookup {
        parent: DIR,
        name: "a".into(),
    };
    let after = rig.ask();
    after.answered(at(0), Some(1), &query, &Err(Error::NotFound));
    assert_eq!(rig.cache.named(at(0), DIR, b"a"), Some(None));
}

#[test]
fn a_name_that_is_not_cached_may_lead_to_any_inode() {
    let rig = Rig::holding();
    rig.told(rig.ask(), "a", FILE, 1);
    let (change, _) = rig.begin(ONE, at(0), &unlink("b"));
    assert!(!rig.is_cached(FILE));
    rig.told_inode(rig.ask(), FILE);
    assert!(!rig.is_cached(FILE));
    drop(change);
    rig.told_inode(rig.ask(), FILE);
    assert!(rig.is_cached(FILE));
}

#[test]
fn of_two_changes_of_a_name_either_may_come_first() {
    let rig = Rig::holding();
    for (name, ino) in [("a", FILE), ("b", Ino(8)), ("c", Ino(9))] {
        rig.told(rig.ask(), name, ino, 1);
    }
    let (unlinked, _) = rig.begin(ONE, at(0), &unlink("a"));
    assert!(rig.is_cached(Ino(8)) && rig.is_cached(Ino(9)));
    let (renamed, _) = rig.begin(TWO, at(0), &rename("b", "a"));
    drop(renamed);
    // The unlink may remove what was b.
    rig.told_inode(rig.ask(), Ino(8));
    assert!(!rig.is_cached(Ino(8)));
    drop(unlinked);
    rig.told_inode(rig.ask(), Ino(8));
    assert!(rig.is_cached(Ino(8)));
}

#[test]
fn a_name_that_others_may_change_before_a_change_is_done_may_lead_anywhere() {
    let mut rig = Rig::holding();
    rig.told(rig.ask(), "a", FILE, 1);
    let (change, _) = rig.begin(ONE, at(0), &unlink("a"));
    rig.recall(1);
    rig.grant(2);
    rig.told_inode(rig.ask(), Ino(8));
    assert!(!rig.is_cached(Ino(8)));
    drop(change);
    rig.told_inode(rig.ask(), Ino(8));
    assert!(rig.is_cached(Ino(8)));
}

#[test]
fn a_change_waits_for_what_other_guests_were_told_though_it_is_forgotten() {
    let rig = Rig::holding();
    rig.told(rig.ask(), "a", FILE, 1);
    let now = at(QUIET);
    let told = rig.cache.attributes(now, ONE, FILE).unwrap();
    assert!(!told.attr_valid.is_zero());
    let (own, until) = rig.begin(ONE, now, &set(FILE));
    assert_eq!(until, now, "its own kernel knows");
    let (others, until) = rig.begin(TWO, now, &set(FILE));
    assert!(until >= now + told.attr_valid);
    drop((own, others));
    let (other, until) = rig.begin(TWO, at(QUIET + 5000), &set(FILE));
    assert_eq!(until, at(QUIET + 5000), "the validity has passed");
    drop(other);
}

/// For how long a guest may use what it is told of a name, and of the inode.
fn valid(rig: &Rig, now: Instant, guest: GuestId, name: &str) -> (bool, bool) {
    match rig.cache.lookup(now, guest, DIR, name.as_bytes()) {
        Some(Found::Inode(told)) => (!told.entry_valid.is_zero(), !told.attr_valid.is_zero()),
        other => panic!("{other:?}"),
    }
}

#[test]
fn what_a_change_does_not_touch_stays_quiet() {
    let rig = Rig::holding();
    for (name, ino) in [("a", FILE), ("b", Ino(8))] {
        rig.told(rig.ask(), name, ino, 1);
    }
    let now = at(QUIET);
    assert_eq!(valid(&rig, now, ONE, "a"), (true, true));
    let (made, until) = rig.begin(TWO, now, &make("new"));
    assert_eq!(until, now, "nobody was told that it is not there");
    let (written, until) = rig.begin(ONE, now, &set(Ino(8)));
    assert_eq!(until, now);
    assert_eq!(valid(&rig, now, ONE, "a"), (true, true));
    drop((made, written));
    rig.told_inode(rig.ask(), Ino(8));
    assert_eq!(valid(&rig, at(QUIET + 1), ONE, "a"), (true, true));
    assert_eq!(valid(&rig, at(QUIET + 1), ONE, "b"), (true, false));
    assert_eq!(valid(&rig, at(2 * QUIET + 1), ONE, "b"), (true, true));
}

#[test]
fn a_name_that_a_guest_renames_goes_on_with_what_it_was_told() {
    let rig = Rig::holding();
    rig.told(rig.ask(), "a", FILE, 1);
    let now = at(QUIET);
    assert_eq!(valid(&rig, now, ONE, "a"), (true, true));
    let (renamed, until) = rig.begin(ONE, now, &rename("a", "b"));
    assert_eq!(until, now);
    drop(renamed);
    let promised = Duration::from_secs(1);
    let (removed, until) = rig.begin(TWO, now, &make("b"));
    assert!(until >= now + promised, "its kernel has it as b");
    drop(removed);
    let (made, until) = rig.begin(TWO, now, &make("c"));
    assert_eq!(until, now);
    drop(made);
}

#[test]
fn a_change_of_a_name_that_another_guest_changes_waits_for_its_own_guest() {
    let rig = Rig::holding();
    for (name, ino) in [("a", FILE), ("b", Ino(8))] {
        rig.told(rig.ask(), name, ino, 1);
    }
    let now = at(QUIET);
    assert_eq!(valid(&rig, now, ONE, "b"), (true, true));
    let (removed, until) = rig.begin(TWO, now, &unlink("a"));
    assert_eq!(until, now);
    // It may be removed right after it is renamed.
    let (renamed, until) = rig.begin(ONE, now, &rename("b", "a"));
    assert!(until >= now + Duration::from_secs(1));
    drop((removed, renamed));
    rig.told(rig.ask(), "b", Ino(8), 1);
    let (removed, _) = rig.begin(ONE, at(QUIET + 5000), &unlink("a"));
    let (renamed, until) = rig.begin(ONE, at(QUIET + 5000), &rename("b", "a"));
    assert_eq!(
        until,
        at(QUIET + 5000),
        "its own kernel has one change after the other"
    );
    drop((removed, renamed));
}

#[test]
fn a_new_session_waits_for_what_was_told_in_the_former_one() {
    let rig = Rig::holding();
    rig.told(rig.ask(), "a", FILE, 1);
    let now = at(QUIET);
    let told = rig.cache.attributes(now, ONE, FILE).unwrap();
    let (change, _) = rig.begin(ONE, now, &make("new"));
    rig.cache.session_ended(SESSION);
    assert!(!rig.is_cached(FILE));
    let (early, until) = rig.begin(TWO, now, &make("early"));
    assert!(until >= now + told.attr_valid);
    drop(early);
    let next = rig.cache.connect(now, SessionId(6), at(3_600_000), 1);
    assert!(next.is_some());
    let (other, until) = rig.begin(TWO, now, &make("other"));
    assert!(until >= now + told.attr_valid);
    drop((change, other));
}

#[test]
fn an_access_time_is_noted_where_the_record_is_cached() {
    let rig = Rig::holding();
    rig.told(rig.ask(), "a", FILE, 1);
    let atime = Time {
        seconds: 9,
        nanoseconds: 0,
    };
    rig.cache.set_access_time(FILE, atime);
    assert_eq!(rig.cache.inode(at(0), FILE).unwrap().atime, atime);
}
