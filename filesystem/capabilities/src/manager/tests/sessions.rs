//! Sessions that end, connections that break, and leaders that come and go.

use super::*;

#[test]
fn a_silent_holder_is_reported_and_waited_for_until_its_session_has_ended() {
    let mut manager = leader();
    granted(&mut manager, A, D, Kind::DirectoryRead);
    begin(&mut manager, 1, B, D, Access::ChangeDirectory);
    all(&mut manager);
    let late_at = manager.next_wakeup().expect("the recall has a deadline");
    assert_eq!(late_at, at(5002));
    manager.tick(late_at);
    let late = Action::Late {
        session: A,
        ino: Some(D),
        since: at(2),
    };
    assert_eq!(all(&mut manager), [late]);
    manager.tick(at(100_000));
    assert_eq!(all(&mut manager), []);
    manager.session_ended(at(100_001), A, SessionEnd::LeaseEnded);
    let actions = all(&mut manager);
    assert_eq!(actions, [Action::Fenced { session: A }, proceed(1)]);
}

#[test]
fn guests_of_a_daemon_that_was_started_anew_are_waited_out() {
    let mut manager = leader();
    granted(&mut manager, A, D, Kind::DirectoryRead);
    begin(&mut manager, 1, B, D, Access::ChangeDirectory);
    all(&mut manager);
    manager.session_ended(at(1000), A, SessionEnd::Restarted);
    let until = manager.next_wakeup().expect("it ends");
    assert_eq!(until, at(1000) + Settings::default().promise());
    manager.tick(Instant::from_nanos(until.as_nanos() - 1));
    assert_eq!(all(&mut manager), []);
    manager.tick(until);
    let actions = all(&mut manager);
    assert_eq!(actions, [Action::Fenced { session: A }, proceed(1)]);
}

#[test]
fn an_ended_session_is_refused_and_not_heard() {
    let mut manager = leader();
    let grant = granted(&mut manager, B, D, Kind::DirectoryRead);
    begin(&mut manager, 1, A, D, Access::ChangeDirectory);
    all(&mut manager);
    manager.session_ended(at(3), A, SessionEnd::Restarted);
    let refuse = |number| Action::Refuse {
        operation: OperationId(number),
        refusal: Refusal::SessionEnded,
    };
    assert_eq!(all(&mut manager), [refuse(1)]);
    begin(&mut manager, 2, A, D, Access::ChangeDirectory);
    assert_eq!(all(&mut manager), [refuse(2)]);
    manager.receive(at(4), A, link(2), ToManager::Claims(vec![]));
    request(&mut manager, A, F, Kind::FileRead);
    assert_eq!(all(&mut manager), []);
    dropped(&mut manager, at(5), B, D, grant);
}

/// A new leader, which knows the sessions A and B.
fn new_leader() -> Manager {
    let mut manager = Manager::new(at(0), TERM, [A, B], Settings::default());
    manager.lead_until(at(0), FAR);
    manager
}

fn claim(manager: &mut Manager, session: SessionId, ino: Ino, kind: Kind) -> GrantId {
    let grant = GrantId {
        term: TERM - 1,
        number: session.0,
    };
    let claims = ToManager::Claims(vec![Claim { ino, grant, kind }]);
    manager.receive(at(1), session, link(1), claims);
    grant
}

#[test]
fn a_new_leader_waits_for_all_claims() {
    let mut manager = new_leader();
    manager.begin(
        at(0),
        OperationId(1),
        A,
        &[Touch {
            ino: D,
            access: Access::ChangeDirectory,
        }],
    );
    assert_eq!(all(&mut manager), []);
    assert!(!manager.may_cache_child(A, F));
    let grant = claim(&mut manager, B, D, Kind::DirectoryRead);
    // B is recalled at once. The request of A was lost with its connection, and A has not claimed.
    assert_eq!(
        sent(&mut manager, B),
        [ToHolder::Recall {
            ino: D,
            grant,
            keep: None
        }]
    );
    dropped(&mut manager, at(2), B, D, grant);
    assert_eq!(all(&mut manager), []);
    assert!(manager.is_reclaiming());
    manager.session_ended(at(3), A, SessionEnd::LeaseEnded);
    let actions = all(&mut manager);
    assert!(actions.contains(&Action::Reclaimed), "{actions:?}");
    assert!(!manager.is_reclaiming());
}

#[test]
fn what_a_claim_covers_goes_on_before_all_have_claimed() {
    let mut manager = new_leader();
    claim(&mut manager, A, F, Kind::FileExclusive);
    begin(&mut manager, 1, A, F, Access::ChangeFile);
    assert_eq!(all(&mut manager), [proceed(1)]);
    begin(&mut manager, 2, A, Ino(21), Access::ChangeFile);
    request(&mut manager, A, Ino(21), Kind::FileRead);
    assert_eq!(all(&mut manager), []);
    // Nothing that anybody holds conflicts with this.
    granted(&mut manager, A, D, Kind::DirectoryRead);
    manager.receive(at(2), B, link(1), ToManager::Claims(vec![]));
    let actions = all(&mut manager);
    assert!(actions.contains(&proceed(2)) && actions.contains(&Action::Reclaimed));
}

#[test]
fn sessions_that_do_not_claim_are_reported() {
    let mut manager = new_leader();
    claim(&mut manager, A, F, Kind::FileRead);
    manager.tick(manager.next_wakeup().expect("claims have a deadline"));
    let late = Action::Late {
        session: B,
        ino: None,
        since: at(0),
    };
    assert_eq!(all(&mut manager), [late]);
}

#[test]
fn claims_of_what_another_one_claimed_are_recalled() {
    let mut manager = new_leader();
    claim(&mut manager, A, F, Kind::FileExclusive);
    all(&mut manager);
    let grant = claim(&mut manager, B, F, Kind::FileRead);
    assert_eq!(
        sent(&mut manager, B),
        [ToHolder::Recall {
            ino: F,
            grant,
            keep: None
        }]
    );
    assert_eq!(manager.table.get(B, F).map(|held| held.kind), None);
}

#[test]
fn a_leader_whose_lease_ended_decides_nothing() {
    let mut manager = leader();
    manager.lead_until = at(10);
    manager.begin(
        at(10),
        OperationId(1),
        A,
        &[Touch {
            ino: D,
            access: Access::ChangeDirectory,
        }],
    );
    let message = ToManager::Request {
        ino: F,
        kind: Kind::FileRead,
        parent: None,
    };
    manager.receive(at(11), B, link(1), message);
    assert_eq!(all(&mut manager), []);
    manager.lead_until(at(12), at(20));
    let actions = all(&mut manager);
    assert_eq!(actions.len(), 2, "{actions:?}");
    assert!(actions.contains(&proceed(1)));
}

#[test]
fn a_reconnected_session_has_what_it_claims_and_is_recalled_again() {
    let mut manager = leader();
    let kept = granted(&mut manager, A, D, Kind::DirectoryRead);
    granted(&mut manager, A, F, Kind::FileRead);
    begin(&mut manager, 1, B, D, Access::ChangeDirectory);
    begin(&mut manager, 2, B, F, Access::ChangeFile);
    all(&mut manager);
    manager.disconnected(at(3), A);
    // The answer of the file was lost.
    let claims = vec![Claim {
        ino: D,
        grant: kept,
        kind: Kind::DirectoryRead,
    }];
    manager.receive(at(4), A, link(2), ToManager::Claims(claims));
    let actions = all(&mut manager);
    let message = ToHolder::Recall {
        ino: D,
        grant: kept,
        keep: None,
    };
    assert!(actions.contains(&Action::Send {
        session: A,
        link: link(2),
        message
    }));
    assert!(actions.contains(&proceed(2)) && !actions.contains(&proceed(1)));
    // What comes late from the old connection changes nothing.
    dropped(&mut manager, at(5), A, D, kept);
    assert_eq!(all(&mut manager), []);
    manager.receive(at(5), A, link(1), ToManager::Claims(vec![]));
    assert_eq!(manager.table.count_of(A), 1);
}

#[test]
fn a_grant_that_was_lost_leaves_the_one_that_it_replaced() {
    let mut manager = leader();
    let read = granted(&mut manager, A, F, Kind::FileRead);
    granted(&mut manager, A, F, Kind::FileExclusive);
    manager.disconnected(at(3), A);
    begin(&mut manager, 1, B, F, Access::ChangeFile);
    let claims = vec![Claim {
        ino: F,
        grant: read,
        kind: Kind::FileRead,
    }];
    manager.receive(at(4), A, link(2), ToManager::Claims(claims));
    let message = ToHolder::Recall {
        ino: F,
        grant: read,
        keep: None,
    };
    let recall = Action::Send {
        session: A,
        link: link(2),
        message,
    };
    assert_eq!(all(&mut manager), [recall]);
    let message = ToManager::Dropped {
        ino: F,
        grant: read,
        kept: None,
    };
    manager.receive(at(5), A, link(2), message);
    assert_eq!(all(&mut manager), [proceed(1)]);
}

#[test]
fn what_is_asked_for_again_is_a_new_grant() {
    let mut manager = leader();
    let first = granted(&mut manager, A, F, Kind::FileExclusive);
    request(&mut manager, A, F, Kind::FileRead);
    let [ToHolder::Grant { grant, kind, .. }] = sent(&mut manager, A)[..] else {
        panic!("it is not granted");
    };
    assert_eq!(kind, Kind::FileExclusive);
    // The holder gave up the first one before it heard of the second.
    dropped(&mut manager, at(3), A, F, first);
    let held = manager.table.get(A, F).expect("it has the second");
    assert_eq!((held.grant, held.kind), (grant, kind));
}

#[test]
fn claims_that_make_no_sense_do_no_harm() {
    let mut manager = new_leader();
    let grant = GrantId {
        term: TERM - 1,
        number: 1,
    };
    let claim = |ino| Claim {
        ino,
        grant,
        kind: Kind::FileRead,
    };
    let claims = vec![claim(F), claim(Ino(21)), claim(F)];
    manager.receive(at(1), A, link(1), ToManager::Claims(claims));
    assert_eq!(
        sent(&mut manager, A),
        [ToHolder::Recall {
            ino: Ino(21),
            grant,
            keep: None
        }]
    );
    assert_eq!(manager.table.count_of(A), 1);
}

#[test]
fn what_waits_of_a_lost_connection_is_forgotten() {
    let mut manager = leader();
    let grant = granted(&mut manager, B, F, Kind::FileRead);
    request(&mut manager, A, F, Kind::FileExclusive);
    begin(&mut manager, 1, A, F, Access::ChangeFile);
    request(&mut manager, C, F, Kind::FileRead);
    all(&mut manager);
    manager.disconnected(at(3), A);
    // C is not behind anybody now.
    assert_eq!(sent(&mut manager, C).len(), 1);
    dropped(&mut manager, at(4), B, F, grant);
    assert_eq!(all(&mut manager), []);
    assert_eq!(manager.counts().waiting, 0);
}

#[test]
fn nothing_is_granted_anew_before_an_old_recall_is_answered() {
    let mut manager = leader();
    let grant = granted(&mut manager, A, F, Kind::FileRead);
    begin(&mut manager, 1, B, F, Access::ChangeFile);
    manager.disconnected(at(3), B);
    all(&mut manager);
    // Nobody waits for A any more, but its answer is on its way.
    request(&mut manager, A, F, Kind::FileExclusive);
    assert_eq!(all(&mut manager), []);
    dropped(&mut manager, at(4), A, F, grant);
    assert_eq!(sent(&mut manager, A).len(), 1);
}
