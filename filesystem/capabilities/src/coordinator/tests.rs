mod limits;

use namespace::{
    Batch, FilesystemId, Make, Namespace, NewNode, Openers, Operation, RenameMode, Request, Time,
};
use records::Txn;

use super::*;
use crate::footprint::{Part, footprint};
use crate::kind::{Access, Kind};
use crate::message::{Claim, GrantId};

const FILESYSTEM: FilesystemId = FilesystemId(1);
const ALICE: SessionId = SessionId(1);
const BOB: SessionId = SessionId(2);
const LINK: Link = Link { term: 5, round: 1 };
const NOW: Instant = Instant::from_nanos(1_000);

type Records = BTreeMap<Vec<u8>, Vec<u8>>;

impl Coordinator {
    /// Takes messages whose files are in the directories that they name.
    fn take_anywhere(
        &mut self,
        now: Instant,
        session: SessionId,
        link: Link,
        first: u64,
        messages: Vec<ToManager>,
    ) -> Result<(), Gone> {
        self.take(now, session, link, first, messages, |_, parent| {
            Some(parent)
        })
    }
}

fn apply(records: &mut Records, session: SessionId, sequence: u64, operation: Operation) -> Ino {
    let request = Request {
        session,
        slot: 0,
        sequence,
        at: Time::default(),
        operation,
    };
    let mut txn = Txn::over(records);
    let batch = Batch {
        operations: vec![request],
    };
    let reply = namespace::apply(&mut txn, FILESYSTEM, &batch)
        .unwrap()
        .remove(0);
    for (key, value) in txn.into_writes() {
        match value {
            Some(value) => records.insert(key, value),
            None => records.remove(&key),
        };
    }
    match reply.unwrap() {
        namespace::Outcome::Inode(attributes) => attributes.ino,
        _ => Ino(0),
    }
}

fn make(parent: Ino, name: &[u8], node: NewNode) -> Operation {
    Operation::Make(Make {
        parent,
        name: name.to_vec(),
        mode: 0o644,
        uid: 0,
        gid: 0,
        node,
    })
}

fn unlink(name: &[u8]) -> Operation {
    Operation::Unlink {
        parent: Ino::ROOT,
        name: name.to_vec(),
        openers: Openers::Named(Vec::new()),
    }
}

/// A tree with /a and /d/f.
fn tree() -> (Records, [Ino; 3]) {
    let mut records = Records::new();
    let create = Operation::CreateFilesystem {
        mode: 0o755,
        uid: 0,
        gid: 0,
    };
    apply(&mut records, SessionId::NONE, 0, create);
    for node in [1, 2] {
        let open = Operation::OpenSession {
            node,
            incarnation: 1,
        };
        apply(&mut records, SessionId::NONE, 0, open);
    }
    let a = apply(&mut records, ALICE, 1, make(Ino::ROOT, b"a", NewNode::File));
    let d = apply(
        &mut records,
        ALICE,
        2,
        make(Ino::ROOT, b"d", NewNode::Directory),
    );
    let f = apply(&mut records, ALICE, 3, make(d, b"f", NewNode::File));
    (records, [a, d, f])
}

fn of(records: &Records, operation: &Operation) -> Footprint {
    footprint(&Namespace::new(records, FILESYSTEM), operation).unwrap()
}

fn events(coordinator: &mut Coordinator) -> Vec<Event> {
    std::iter::from_fn(|| coordinator.next_event()).collect()
}

fn leader(sessions: &[SessionId]) -> Coordinator {
    let mut coordinator = Coordinator::new(NOW, LINK.term, [], Settings::default());
    for session in sessions {
        coordinator.session_opened(*session);
        let claims = vec![ToManager::Claims(Vec::new())];
        coordinator
            .take_anywhere(NOW, *session, LINK, 1, claims)
            .unwrap();
    }
    coordinator.lead_until(NOW, Instant::from_nanos(u64::MAX));
    events(&mut coordinator);
    coordinator
}

fn request(ino: Ino) -> ToManager {
    ToManager::Request {
        ino,
        kind: Kind::DirectoryRead,
        parent: None,
    }
}

#[test]
fn footprints_name_what_operations_change() {
    let (mut records, [a, d, f]) = tree();
    let touch = |ino, access| Touch { ino, access };
    let touches = |records: &Records, operation| of(records, &operation).touches;
    let root = touch(Ino::ROOT, Access::ChangeDirectory);
    assert_eq!(
        touches(&records, make(Ino::ROOT, b"b", NewNode::File)),
        [root].into()
    );
    // It is refused.
    assert!(touches(&records, make(Ino::ROOT, b"a", NewNode::File)).is_empty());
    assert!(touches(&records, unlink(b"b")).is_empty());
    let of_a = [
        touch(a, Access::MoveFile),
        touch(Ino::ROOT, Access::ChangeChild(a)),
    ];
    assert_eq!(
        touches(&records, unlink(b"a")),
        [root, of_a[0], of_a[1]].into()
    );
    let rename = Operation::Rename(namespace::Rename {
        parent: d,
        name: b"f".to_vec(),
        new_parent: Ino::ROOT,
        new_name: b"a".to_vec(),
        mode: RenameMode::Replace,
        openers: Openers::Named(Vec::new()),
    });
    let of_d = touch(d, Access::ChangeDirectory);
    let of_f = [touch(f, Access::MoveFile), touch(d, Access::ChangeChild(f))];
    let all = [root, of_d, of_a[0], of_a[1], of_f[0], of_f[1]];
    assert_eq!(touches(&records, rename.clone()), all.into());
    let parts = of(&records, &rename).changes;
    assert!(parts.contains(&Part::Place(f)) && parts.contains(&Part::Name(d, b"f".to_vec())));

    let write = Operation::SetAttributes(namespace::SetAttributes {
        ino: f,
        mode: Some(0o600),
        ..Default::default()
    });
    let of_f = [
        touch(f, Access::ChangeFile),
        touch(d, Access::ChangeChild(f)),
    ];
    assert_eq!(touches(&records, write.clone()), of_f.into());
    let link = Operation::Link {
        ino: f,
        parent: Ino::ROOT,
        name: b"l".to_vec(),
    };
    apply(&mut records, ALICE, 4, link);
    assert_eq!(
        touches(&records, write),
        [touch(f, Access::ChangeFile)].into()
    );
}

#[test]
fn whiteouts_touch_what_the_rename_does_and_files_without_a_name_nothing() {
    let (mut records, [_, d, _]) = tree();
    let rename = |mode| {
        Operation::Rename(namespace::Rename {
            parent: d,
            name: b"f".to_vec(),
            new_parent: Ino::ROOT,
            new_name: b"a".to_vec(),
            mode,
            openers: Openers::Named(Vec::new()),
        })
    };
    let whiteout = |no_replace| {
        RenameMode::Whiteout(namespace::Whiteout {
            no_replace,
            uid: 0,
            gid: 0,
        })
    };
    let replaces = of(&records, &rename(RenameMode::Replace));
    assert_eq!(of(&records, &rename(whiteout(false))), replaces);
    let refused = of(&records, &rename(whiteout(true)));
    assert!(refused.touches.is_empty());
    let make = Operation::MakeTemporary(namespace::MakeTemporary {
        parent: d,
        mode: 0o600,
        uid: 0,
        gid: 0,
    });
    assert_eq!(of(&records, &make), Footprint::default());
    let ino = apply(&mut records, ALICE, 4, make);
    let link = Operation::Link {
        ino,
        parent: d,
        name: b"l".to_vec(),
    };
    let linked = of(&records, &link);
    let touch = |ino, access| Touch { ino, access };
    let right = [
        touch(d, Access::ChangeDirectory),
        touch(ino, Access::MoveFile),
    ];
    assert_eq!(linked.touches, right.into());
    assert!(linked.changes.contains(&Part::Place(ino)));
}

#[test]
fn a_change_waits_until_others_gave_up_what_it_touches() {
    let (records, _) = tree();
    let mut leader = leader(&[ALICE, BOB]);
    leader
        .take_anywhere(NOW, BOB, LINK, 2, vec![request(Ino::ROOT)])
        .unwrap();
    let [grant] = leader.messages(BOB, LINK, 0).unwrap().try_into().unwrap();
    let ToHolder::Grant { grant, .. } = grant else {
        panic!("{grant:?}");
    };
    assert_eq!(leader.sent(BOB, LINK), Some(1));
    events(&mut leader);

    let operation = OperationId(7);
    leader.begin(NOW, operation, ALICE, of(&records, &unlink(b"a")));
    assert_eq!(events(&mut leader), [Event::Messages { session: BOB }]);
    let patience = Settings::default().answer_within;
    assert_eq!(leader.late(NOW), None);
    assert_eq!(leader.late(NOW + patience), Some(BOB));
    let recall = leader.messages(BOB, LINK, 1).unwrap();
    assert!(matches!(
        recall[..],
        [ToHolder::Recall { ino: Ino::ROOT, .. }]
    ));
    let dropped = ToManager::Dropped {
        ino: Ino::ROOT,
        grant,
        kept: None,
    };
    leader
        .take_anywhere(NOW, BOB, LINK, 3, vec![dropped])
        .unwrap();
    assert_eq!(leader.late(NOW + patience), None);
    assert_eq!(events(&mut leader), [Event::Proceed { operation }]);
    leader.end(NOW, operation);
}

#[test]
fn messages_are_taken_once_and_in_order() {
    let mut leader = leader(&[ALICE]);
    let first = vec![request(Ino::ROOT), request(Ino(9))];
    leader
        .take_anywhere(NOW, ALICE, LINK, 2, first.clone())
        .unwrap();
    leader.take_anywhere(NOW, ALICE, LINK, 2, first).unwrap();
    assert_eq!(leader.sent(ALICE, LINK), Some(2), "each was granted once");
    let late = vec![request(Ino(10))];
    assert_eq!(leader.take_anywhere(NOW, ALICE, LINK, 5, late), Err(Gone));
    assert_eq!(leader.messages(ALICE, LINK, 0).unwrap().len(), 2);
    assert_eq!(leader.messages(ALICE, LINK, 1).unwrap().len(), 1);
    assert_eq!(
        leader.messages(ALICE, LINK, 0),
        Err(Gone),
        "it was acknowledged"
    );
    assert_eq!(
        leader.messages(ALICE, LINK, 3),
        Err(Gone),
        "it was never sent"
    );

    let next = Link { round: 2, ..LINK };
    assert_eq!(leader.sent(ALICE, next), None);
    let claims = vec![ToManager::Claims(Vec::new())];
    leader
        .take_anywhere(NOW, ALICE, next, 1, claims.clone())
        .unwrap();
    assert_eq!(
        leader.take_anywhere(NOW, ALICE, LINK, 1, claims.clone()),
        Err(Gone)
    );
    assert_eq!(leader.sent(ALICE, LINK), None);
    assert_eq!(leader.sent(ALICE, next), Some(0));
    let other_term = Link { term: 4, round: 9 };
    assert_eq!(
        leader.take_anywhere(NOW, ALICE, other_term, 1, claims),
        Err(Gone)
    );
    assert_eq!(leader.sent(ALICE, next), Some(0), "the link is still there");
}

#[test]
fn operations_on_one_name_are_under_way_one_after_the_other() {
    let (records, _) = tree();
    let mut leader = leader(&[ALICE, BOB]);
    let footprint = of(&records, &unlink(b"a"));
    let (first, second) = (OperationId(1), OperationId(2));
    leader.begin(NOW, first, ALICE, footprint.clone());
    leader.begin(NOW, second, BOB, footprint);
    assert_eq!(events(&mut leader), [Event::Proceed { operation: first }]);
    leader.end(NOW, first);
    assert_eq!(events(&mut leader), [Event::Proceed { operation: second }]);
    leader.end(NOW, second);
}

#[test]
fn a_link_that_breaks_lets_no_operation_be_forgotten() {
    let (records, _) = tree();
    let mut leader = leader(&[ALICE, BOB]);
    leader
        .take_anywhere(NOW, BOB, LINK, 2, vec![request(Ino::ROOT)])
        .unwrap();
    let (waits, behind) = (OperationId(1), OperationId(2));
    leader.begin(NOW, waits, ALICE, of(&records, &unlink(b"a")));
    leader.begin(NOW, behind, ALICE, of(&records, &unlink(b"a")));
    events(&mut leader);
    let next = Link { round: 2, ..LINK };
    let claims = || vec![ToManager::Claims(Vec::new())];
    leader.take_anywhere(NOW, ALICE, next, 1, claims()).unwrap();
    assert_eq!(events(&mut leader), []);
    // Its holder connects anew and holds nothing any more.
    leader.take_anywhere(NOW, BOB, next, 1, claims()).unwrap();
    assert_eq!(events(&mut leader), [Event::Proceed { operation: waits }]);
    leader.end(NOW, waits);
    assert_eq!(events(&mut leader), [Event::Proceed { operation: behind }]);
    leader.end(NOW, behind);
}

#[test]
fn what_is_refused_lets_others_go_on() {
    let (records, _) = tree();
    let mut leader = leader(&[ALICE, BOB]);
    leader
        .take_anywhere(NOW, BOB, LINK, 2, vec![request(Ino::ROOT)])
        .unwrap();
    events(&mut leader);
    let (first, second) = (OperationId(1), OperationId(2));
    leader.begin(NOW, first, ALICE, of(&records, &unlink(b"a")));
    leader.begin(NOW, second, BOB, of(&records, &unlink(b"a")));
    events(&mut leader);
    leader.session_ended(NOW, ALICE, SessionEnd::LeaseEnded);
    let refusal = Refusal::SessionEnded;
    let events = events(&mut leader);
    let refused = Event::Refuse {
        operation: first,
        refusal,
    };
    assert!(events.contains(&refused), "{events:?}");
    // BOB has the directory itself.
    assert!(
        events.contains(&Event::Proceed { operation: second }),
        "{events:?}"
    );
}

#[test]
fn a_new_leader_waits_for_what_sessions_claim() {
    let (records, _) = tree();
    let mut leader = Coordinator::new(NOW, 6, [ALICE, BOB], Settings::default());
    leader.lead_until(NOW, Instant::from_nanos(u64::MAX));
    let link = Link { term: 6, round: 2 };
    let claims = vec![ToManager::Claims(Vec::new())];
    leader.take_anywhere(NOW, ALICE, link, 1, claims).unwrap();
    let operation = OperationId(1);
    leader.begin(NOW, operation, ALICE, of(&records, &unlink(b"a")));
    assert_eq!(events(&mut leader), []);
    let grant = GrantId { term: 5, number: 1 };
    let claim = Claim {
        ino: Ino::ROOT,
        grant,
        kind: Kind::DirectoryRead,
    };
    let claims = vec![ToManager::Claims(vec![claim])];
    leader.take_anywhere(NOW, BOB, link, 1, claims).unwrap();
    let found = events(&mut leader);
    assert!(
        found.contains(&Event::Messages { session: BOB }),
        "{found:?}"
    );
    assert!(!found.contains(&Event::Proceed { operation }), "{found:?}");
    leader.session_ended(NOW, BOB, SessionEnd::LeaseEnded);
    assert!(events(&mut leader).contains(&Event::Proceed { operation }));
}

fn exclusive(ino: Ino, parent: Option<Ino>) -> ToManager {
    let kind = Kind::FileExclusive;
    ToManager::Request { ino, kind, parent }
}

/// Takes messages as a leader does that looks at its records.
fn take(
    leader: &mut Coordinator,
    records: &Records,
    session: SessionId,
    first: u64,
    message: ToManager,
) {
    let namespace = Namespace::new(records, FILESYSTEM);
    let place_of = |ino, _| namespace.inode(ino).ok().map(|inode| inode.parent);
    let taken = leader.take(NOW, session, LINK, first, vec![message], place_of);
    taken.unwrap();
}

#[test]
fn who_names_a_wrong_directory_gets_no_file_as_exclusive() {
    let (records, [_, d, f]) = tree();
    let mut leader = leader(&[ALICE]);
    for (first, ino, parent) in [(2, f, Some(Ino::ROOT)), (3, f, None), (4, Ino(99), Some(d))] {
        take(&mut leader, &records, ALICE, first, exclusive(ino, parent));
        let (kind, refusal) = (Kind::FileExclusive, Refusal::Moved);
        let refused = ToHolder::Refuse { ino, kind, refusal };
        assert_eq!(
            leader.messages(ALICE, LINK, first - 2).unwrap(),
            [refused],
            "{parent:?}"
        );
    }
    take(&mut leader, &records, ALICE, 5, exclusive(f, Some(d)));
    let granted = leader.messages(ALICE, LINK, 3).unwrap();
    assert!(matches!(
        granted[..],
        [ToHolder::Grant {
            kind: Kind::FileExclusive,
            ..
        }]
    ));
}

#[test]
fn what_one_buffers_is_written_back_before_others_are_told() {
    let (records, [a, d, f]) = tree();
    let mut leader = leader(&[ALICE, BOB]);
    take(&mut leader, &records, ALICE, 2, exclusive(f, Some(d)));
    let [grant] = leader.messages(ALICE, LINK, 0).unwrap().try_into().unwrap();
    let ToHolder::Grant { grant, .. } = grant else {
        panic!("{grant:?}");
    };
    events(&mut leader);
    let (told, moment) = ([a, f].into(), leader.moment());
    assert_eq!(leader.tell(ALICE, &told, moment), Told::Now);
    let Told::Buffered(parts) = leader.tell(BOB, &told, moment) else {
        panic!("it is told");
    };
    let [(files, footprint)] = parts.try_into().unwrap();
    assert_eq!(files, [f]);
    let operation = OperationId(7);
    leader.begin(NOW, operation, BOB, footprint);
    let keep = Some(Kind::FileRead);
    let recall = ToHolder::Recall {
        ino: f,
        grant,
        keep,
    };
    assert_eq!(leader.messages(ALICE, LINK, 1).unwrap(), [recall]);
    events(&mut leader);
    let kept = ToManager::Dropped {
        ino: f,
        grant,
        kept: keep,
    };
    leader
        .take_anywhere(NOW, ALICE, LINK, 3, vec![kept])
        .unwrap();
    assert_eq!(events(&mut leader), [Event::Proceed { operation }]);
    assert_eq!(leader.tell(BOB, &told, moment), Told::Anew);
    assert_eq!(leader.tell(BOB, &[a].into(), moment), Told::Now);
    assert_eq!(leader.tell(BOB, &told, leader.moment()), Told::Now);
    // While it is told, nobody buffers.
    take(&mut leader, &records, ALICE, 4, exclusive(f, Some(d)));
    assert!(leader.messages(ALICE, LINK, 2).unwrap().is_empty());
    leader.end(NOW, operation);
    assert_eq!(leader.messages(ALICE, LINK, 2).unwrap().len(), 1);
}

#[test]
fn until_all_have_claimed_anybody_may_buffer_anything() {
    let (_, [a, _, f]) = tree();
    let sessions = [ALICE, BOB];
    let mut leader = Coordinator::new(NOW, LINK.term, sessions, Settings::default());
    leader.lead_until(NOW, Instant::from_nanos(u64::MAX));
    let claims = |claims| vec![ToManager::Claims(claims)];
    let claim = Claim {
        ino: f,
        grant: GrantId { term: 4, number: 9 },
        kind: Kind::FileExclusive,
    };
    leader
        .take_anywhere(NOW, ALICE, LINK, 1, claims(vec![claim]))
        .unwrap();
    let told = |leader: &Coordinator, session| {
        let told = leader.tell(session, &[a, f].into(), leader.moment());
        let Told::Buffered(parts) = told else {
            return Vec::new();
        };
        let parts = parts.into_iter();
        parts.flat_map(|(files, _)| files).collect::<Vec<Ino>>()
    };
    assert_eq!(told(&leader, ALICE), [a]);
    assert_eq!(told(&leader, BOB), [a, f]);
    leader
        .take_anywhere(NOW, BOB, LINK, 1, claims(Vec::new()))
        .unwrap();
    assert_eq!(told(&leader, ALICE), []);
    assert_eq!(told(&leader, BOB), [f]);
}

#[test]
fn what_its_holder_changes_is_told_and_not_cached_with_its_directory() {
    let (records, [a, d, f]) = tree();
    let mut leader = leader(&[ALICE, BOB]);
    take(&mut leader, &records, ALICE, 2, exclusive(f, Some(d)));
    let [grant] = leader.messages(ALICE, LINK, 0).unwrap().try_into().unwrap();
    let ToHolder::Grant { grant, .. } = grant else {
        panic!("{grant:?}");
    };
    // The directory is cached elsewhere, and is not recalled for this.
    take(&mut leader, &records, BOB, 2, request(d));
    let write = Operation::SetAttributes(namespace::SetAttributes {
        ino: f,
        mode: Some(0o600),
        ..Default::default()
    });
    let operation = OperationId(7);
    leader.begin(NOW, operation, ALICE, of(&records, &write));
    assert!(events(&mut leader).contains(&Event::Proceed { operation }));
    let kept = ToManager::Dropped {
        ino: f,
        grant,
        kept: Some(Kind::FileRead),
    };
    leader
        .take_anywhere(NOW, ALICE, LINK, 3, vec![kept])
        .unwrap();
    let (told, moment) = ([a, f].into(), leader.moment());
    assert_eq!(leader.tell(BOB, &told, moment), Told::Now);
    assert!(!leader.may_cache(BOB, &told, moment));
    assert!(leader.may_cache(BOB, &[a].into(), moment));
    leader.end(NOW, operation);
    assert!(!leader.may_cache(BOB, &told, moment), "it was read before");
    assert!(leader.may_cache(BOB, &told, leader.moment()));
}
