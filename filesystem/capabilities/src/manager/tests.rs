//! Each rule of the manager by itself.

mod limits;
mod sessions;

use std::time::Duration;

use super::*;
use crate::message::Claim;

const D: Ino = Ino(2);
const F: Ino = Ino(20);
const A: SessionId = SessionId(1);
const B: SessionId = SessionId(2);
const C: SessionId = SessionId(3);
const TERM: u64 = 7;
const FAR: Instant = Instant::from_nanos(u64::MAX);

fn at(milliseconds: u64) -> Instant {
    Instant::START + Duration::from_millis(milliseconds)
}

fn link(round: u64) -> Link {
    Link { term: TERM, round }
}

fn all(manager: &mut Manager) -> Vec<Action> {
    std::iter::from_fn(|| manager.next_action()).collect()
}

/// Messages to one session.
fn sent(manager: &mut Manager, to: SessionId) -> Vec<ToHolder> {
    let actions = all(manager).into_iter();
    let sent = actions.filter_map(|action| match action {
        Action::Send {
            session, message, ..
        } if session == to => Some(message),
        _ => None,
    });
    sent.collect()
}

/// A leader with the sessions A, B and C connected, and nothing held.
fn leader() -> Manager {
    let mut manager = Manager::new(at(0), TERM, [], Settings::default());
    manager.lead_until(at(0), FAR);
    for session in [A, B, C] {
        manager.session_opened(session);
        manager.receive(at(0), session, link(1), ToManager::Claims(vec![]));
    }
    all(&mut manager);
    manager
}

fn request(manager: &mut Manager, session: SessionId, ino: Ino, kind: Kind) {
    let parent = (kind == Kind::FileExclusive).then_some(D);
    let message = ToManager::Request { ino, kind, parent };
    manager.receive(at(1), session, link(1), message);
}

/// Asks, and gets it at once.
fn granted(manager: &mut Manager, session: SessionId, ino: Ino, kind: Kind) -> GrantId {
    request(manager, session, ino, kind);
    match sent(manager, session)[..] {
        [
            ToHolder::Grant {
                ino: of,
                grant,
                kind: as_kind,
            },
        ] if (of, as_kind) == (ino, kind) => grant,
        ref other => panic!("no grant but {other:?}"),
    }
}

fn dropped(manager: &mut Manager, now: Instant, session: SessionId, ino: Ino, grant: GrantId) {
    let message = ToManager::Dropped {
        ino,
        grant,
        kept: None,
    };
    manager.receive(now, session, link(1), message);
}

fn begin(manager: &mut Manager, number: u64, session: SessionId, ino: Ino, access: Access) {
    manager.begin(
        at(2),
        OperationId(number),
        session,
        &[Touch { ino, access }],
    );
}

fn proceed(number: u64) -> Action {
    Action::Proceed {
        operation: OperationId(number),
    }
}

fn has_proceeded(manager: &mut Manager, number: u64) -> bool {
    all(manager).contains(&proceed(number))
}

#[test]
fn readers_share_and_a_change_waits_for_their_answers() {
    let mut manager = leader();
    let a = granted(&mut manager, A, D, Kind::DirectoryRead);
    let b = granted(&mut manager, B, D, Kind::DirectoryRead);
    begin(&mut manager, 1, C, D, Access::ChangeDirectory);
    let recall = |session, grant| {
        let message = ToHolder::Recall {
            ino: D,
            grant,
            keep: None,
        };
        Action::Send {
            session,
            link: link(1),
            message,
        }
    };
    assert_eq!(all(&mut manager), [recall(A, a), recall(B, b)]);
    dropped(&mut manager, at(3), A, D, a);
    assert_eq!(all(&mut manager), []);
    dropped(&mut manager, at(3), B, D, b);
    assert_eq!(all(&mut manager), [proceed(1)]);
}

#[test]
fn a_session_keeps_its_capability_in_its_own_operation() {
    let mut manager = leader();
    let grant = granted(&mut manager, A, D, Kind::DirectoryRead);
    begin(&mut manager, 1, A, D, Access::ChangeDirectory);
    assert_eq!(all(&mut manager), [proceed(1)]);
    assert_eq!(manager.table.get(A, D).map(|held| held.grant), Some(grant));
}

#[test]
fn nothing_is_granted_while_an_operation_that_conflicts_is_under_way() {
    let mut manager = leader();
    begin(&mut manager, 1, A, D, Access::ChangeDirectory);
    all(&mut manager);
    request(&mut manager, B, D, Kind::DirectoryRead);
    assert_eq!(all(&mut manager), []);
    manager.end(at(3), OperationId(1));
    assert_eq!(sent(&mut manager, B).len(), 1);
}

#[test]
fn operations_wait_for_no_operations() {
    let mut manager = leader();
    begin(&mut manager, 1, A, D, Access::ChangeDirectory);
    begin(&mut manager, 2, B, D, Access::ChangeDirectory);
    assert_eq!(all(&mut manager), [proceed(1), proceed(2)]);
}

#[test]
fn a_writer_becomes_a_reader_for_a_reader() {
    let mut manager = leader();
    let grant = granted(&mut manager, A, F, Kind::FileExclusive);
    begin(&mut manager, 1, B, F, Access::ReadFile);
    let keep = Some(Kind::FileRead);
    assert_eq!(
        sent(&mut manager, A),
        [ToHolder::Recall {
            ino: F,
            grant,
            keep
        }]
    );
    let message = ToManager::Dropped {
        ino: F,
        grant,
        kept: keep,
    };
    manager.receive(at(3), A, link(1), message);
    assert!(has_proceeded(&mut manager, 1));
    assert_eq!(manager.table.get(A, F).map(|held| held.kind), keep);
}

#[test]
fn a_recall_goes_further_when_more_is_in_the_way() {
    let mut manager = leader();
    let grant = granted(&mut manager, A, F, Kind::FileExclusive);
    begin(&mut manager, 1, B, F, Access::ReadFile);
    begin(&mut manager, 2, C, F, Access::ChangeFile);
    let recall = |keep| ToHolder::Recall {
        ino: F,
        grant,
        keep,
    };
    let both = [recall(Some(Kind::FileRead)), recall(None)];
    assert_eq!(sent(&mut manager, A), both);
    let kept = Some(Kind::FileRead);
    manager.receive(
        at(3),
        A,
        link(1),
        ToManager::Dropped {
            ino: F,
            grant,
            kept,
        },
    );
    assert_eq!(all(&mut manager), [proceed(1)]);
    assert_eq!(manager.counts().recalls, 1);
    dropped(&mut manager, at(4), A, F, grant);
    assert_eq!(all(&mut manager), [proceed(2)]);
    assert_eq!(manager.counts().recalls, 0);
}

#[test]
fn a_writer_that_is_recalled_can_write_back() {
    let mut manager = leader();
    let grant = granted(&mut manager, A, F, Kind::FileExclusive);
    request(&mut manager, B, F, Kind::FileExclusive);
    all(&mut manager);
    let touches = [
        Touch {
            ino: F,
            access: Access::ChangeFile,
        },
        Touch {
            ino: D,
            access: Access::ChangeChild(F),
        },
    ];
    manager.begin(at(2), OperationId(1), A, &touches);
    assert_eq!(all(&mut manager), [proceed(1)]);
    // Even if it is given up meanwhile, what is under way comes first.
    dropped(&mut manager, at(3), A, F, grant);
    assert_eq!(all(&mut manager), []);
    manager.end(at(4), OperationId(1));
    assert!(matches!(
        sent(&mut manager, B)[..],
        [ToHolder::Grant { .. }]
    ));
}

#[test]
fn a_writer_recalls_its_directory_from_others_and_its_children_are_not_told() {
    let mut manager = leader();
    let directory = granted(&mut manager, B, D, Kind::DirectoryRead);
    assert!(manager.may_cache_child(B, F));
    request(&mut manager, A, F, Kind::FileExclusive);
    let recall = ToHolder::Recall {
        ino: D,
        grant: directory,
        keep: None,
    };
    assert_eq!(sent(&mut manager, B), [recall]);
    dropped(&mut manager, at(3), B, D, directory);
    assert_eq!(sent(&mut manager, A).len(), 1);
    // The names may be cached again at once, but not the attributes of this child.
    granted(&mut manager, B, D, Kind::DirectoryRead);
    assert!(!manager.may_cache_child(B, F));
    assert!(manager.may_cache_child(A, F));
    // A change under the capability is no change for those who have only the names.
    manager.begin(
        at(4),
        OperationId(1),
        A,
        &[Touch {
            ino: D,
            access: Access::ChangeChild(F),
        }],
    );
    assert_eq!(all(&mut manager), [proceed(1)]);
}

#[test]
fn attributes_that_change_just_now_are_not_cached_as_a_childs() {
    let mut manager = leader();
    begin(&mut manager, 1, A, F, Access::ChangeFile);
    assert!(!manager.may_cache_child(B, F));
    manager.end(at(3), OperationId(1));
    assert!(manager.may_cache_child(B, F));
}

#[test]
fn a_request_that_names_the_directory_of_before_a_move_is_refused() {
    let mut manager = leader();
    begin(&mut manager, 1, A, F, Access::MoveFile);
    all(&mut manager);
    // Also that of the session that moves it itself.
    request(&mut manager, A, F, Kind::FileExclusive);
    request(&mut manager, B, F, Kind::FileExclusive);
    request(&mut manager, C, F, Kind::FileRead);
    assert_eq!(all(&mut manager), []);
    manager.end(at(3), OperationId(1));
    let (kind, refusal) = (Kind::FileExclusive, Refusal::Moved);
    let refuse = |session| Action::Send {
        session,
        link: link(1),
        message: ToHolder::Refuse {
            ino: F,
            kind,
            refusal,
        },
    };
    let actions = all(&mut manager);
    assert_eq!(actions[..2], [refuse(A), refuse(B)]);
    // Who only reads names no directory.
    assert_eq!((actions.len(), manager.counts().capabilities), (3, 1));
    assert_eq!(manager.counts().waiting, 0);
}

#[test]
fn who_came_first_goes_first() {
    let mut manager = leader();
    let a = granted(&mut manager, A, D, Kind::DirectoryRead);
    begin(&mut manager, 1, B, D, Access::ChangeDirectory);
    // It could be granted now, if others did not wait.
    request(&mut manager, C, D, Kind::DirectoryRead);
    begin(&mut manager, 2, B, D, Access::ChangeDirectory);
    all(&mut manager);
    dropped(&mut manager, at(3), A, D, a);
    // The second change waits behind the grant, and has it recalled.
    let actions = all(&mut manager);
    assert_eq!(actions, [proceed(1)]);
    manager.end(at(4), OperationId(1));
    assert!(matches!(
        sent(&mut manager, C)[..],
        [ToHolder::Grant { .. }, ToHolder::Recall { .. }]
    ));
    assert_eq!(manager.counts().waiting, 1);
}

#[test]
fn two_readers_that_both_want_to_write_get_it_one_after_the_other() {
    let mut manager = leader();
    let a = granted(&mut manager, A, F, Kind::FileRead);
    let b = granted(&mut manager, B, F, Kind::FileRead);
    request(&mut manager, A, F, Kind::FileExclusive);
    request(&mut manager, B, F, Kind::FileExclusive);
    assert_eq!(
        sent(&mut manager, B),
        [ToHolder::Recall {
            ino: F,
            grant: b,
            keep: None
        }]
    );
    dropped(&mut manager, at(3), B, F, b);
    let sent_a = sent(&mut manager, A);
    let [
        ToHolder::Grant { grant, .. },
        ToHolder::Recall {
            grant: recalled, ..
        },
    ] = sent_a[..]
    else {
        panic!("not granted and recalled but {sent_a:?}");
    };
    assert_eq!(grant, recalled);
    assert_ne!(grant, a);
    // An answer to something older is not taken for one to this recall.
    dropped(&mut manager, at(4), A, F, a);
    assert_eq!(all(&mut manager), []);
    dropped(&mut manager, at(4), A, F, grant);
    assert!(matches!(
        sent(&mut manager, B)[..],
        [ToHolder::Grant { .. }]
    ));
}

#[test]
fn a_session_with_too_much_loses_the_oldest_and_is_refused_at_twice_as_much() {
    let settings = Settings {
        capabilities_max: 2,
        ..Settings::default()
    };
    let mut manager = leader();
    manager.settings = settings;
    let first = granted(&mut manager, A, Ino(20), Kind::FileRead);
    granted(&mut manager, A, Ino(21), Kind::FileRead);
    request(&mut manager, A, Ino(22), Kind::FileRead);
    let recall = ToHolder::Recall {
        ino: Ino(20),
        grant: first,
        keep: None,
    };
    assert_eq!(sent(&mut manager, A)[1..], [recall]);
    request(&mut manager, A, Ino(23), Kind::FileRead);
    all(&mut manager);
    request(&mut manager, A, Ino(24), Kind::FileRead);
    let (ino, kind, refusal) = (Ino(24), Kind::FileRead, Refusal::TooMany);
    assert_eq!(
        sent(&mut manager, A),
        [ToHolder::Refuse { ino, kind, refusal }]
    );
    assert_eq!(manager.counts().capabilities, 4);
}

#[test]
fn an_operation_waits_for_all_of_its_inodes_and_recalls_them_together() {
    let mut manager = leader();
    let one = granted(&mut manager, A, D, Kind::DirectoryRead);
    let two = granted(&mut manager, B, Ino(3), Kind::DirectoryRead);
    let touches = [D, Ino(3)].map(|ino| Touch {
        ino,
        access: Access::ChangeDirectory,
    });
    manager.begin(at(2), OperationId(1), C, &touches);
    assert_eq!(all(&mut manager).len(), 2);
    dropped(&mut manager, at(3), A, D, one);
    // The first one is not given away again meanwhile.
    request(&mut manager, A, D, Kind::DirectoryRead);
    assert_eq!(all(&mut manager), []);
    dropped(&mut manager, at(4), B, Ino(3), two);
    assert_eq!(all(&mut manager), [proceed(1)]);
}
