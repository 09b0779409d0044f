//! Messages of one session increase neither the leader's work for others nor its memory without bound.

use super::*;

/// Settings with this limit of capabilities per session.
fn holding(capabilities_max: usize) -> Settings {
    Settings {
        capabilities_max,
        ..Settings::default()
    }
}

/// Creates a leader with these settings and the sessions A, B and C, which have claimed nothing.
fn leader_with(settings: Settings) -> Manager {
    let mut manager = Manager::new(at(0), TERM, [], settings);
    manager.lead_until(at(0), FAR);
    for session in [A, B, C] {
        manager.session_opened(session);
        manager.receive(at(0), session, link(1), ToManager::Claims(vec![]));
    }
    all(&mut manager);
    manager
}

fn claim(ino: u64, number: u64) -> Claim {
    Claim {
        ino: Ino(ino),
        grant: GrantId {
            term: TERM - 1,
            number,
        },
        kind: Kind::FileRead,
    }
}

/// Claims of this number of files.
fn claims(count: u64) -> Vec<Claim> {
    (1..=count)
        .map(|number| claim(100 + number, number))
        .collect()
}

/// Creates a new leader that waits for the claims of A.
fn awaiting(settings: Settings) -> Manager {
    let mut manager = Manager::new(at(0), TERM, [A], settings);
    manager.lead_until(at(0), FAR);
    manager
}

/// Ticks until the manager has done all deferred work.
fn settle(manager: &mut Manager) {
    while manager.next_wakeup() == Some(manager.now) {
        manager.tick(manager.now);
    }
}

/// Returns the number of steps for `count` requests, the second half of which exceeds the session's limit.
fn steps_for(count: u64) -> u64 {
    let mut manager = leader_with(holding(count as usize / 2));
    let before = manager.steps;
    for number in 0..count {
        request(&mut manager, A, Ino(100 + number), Kind::FileRead);
    }
    assert_eq!(manager.table.count_of(A), count as usize);
    assert_eq!(manager.counts().recalls, count as usize / 2);
    manager.steps - before
}

#[test]
fn the_work_for_requests_is_linear() {
    let (few, many) = (steps_for(1024), steps_for(4096));
    assert!(
        many <= 4 * few + 16,
        "{few} steps for 1024 requests, {many} for 4096"
    );
}

#[test]
fn a_session_waits_once_for_an_inode() {
    let mut manager = leader();
    granted(&mut manager, B, F, Kind::FileExclusive);
    for _ in 0..100 {
        request(&mut manager, A, F, Kind::FileRead);
        request(&mut manager, A, F, Kind::FileExclusive);
    }
    assert_eq!(manager.counts().waiting, 1);
}

/// Returns the number of steps to grant A a file while `waiting` operations wait for its directory.
fn steps_beside(waiting: u64) -> u64 {
    let mut manager = leader();
    granted(&mut manager, C, D, Kind::DirectoryRead);
    for number in 1..=waiting {
        begin(&mut manager, number, B, D, Access::ChangeDirectory);
    }
    all(&mut manager);
    assert_eq!(manager.counts().waiting, waiting as usize);
    let before = manager.steps;
    granted(&mut manager, A, F, Kind::FileRead);
    begin(&mut manager, waiting + 1, A, F, Access::ChangeFile);
    begin(&mut manager, waiting + 2, A, D, Access::ReadFile);
    all(&mut manager);
    manager.end(at(3), OperationId(waiting + 1));
    manager.steps - before
}

#[test]
fn waiting_operations_are_not_checked_for_unrelated_changes() {
    assert_eq!(steps_beside(10), steps_beside(1000));
}

#[test]
fn a_session_that_ends_gives_up_a_few_capabilities_at_a_time() {
    let count = 3000;
    let mut manager = leader_with(holding(count));
    for number in 0..count as u64 {
        request(&mut manager, A, Ino(100 + number), Kind::FileRead);
    }
    all(&mut manager);
    let before = manager.steps;
    manager.session_ended(at(1), A, SessionEnd::LeaseEnded);
    assert!(manager.steps - before <= 256, "one call is short");
    assert_eq!(all(&mut manager), []);
    assert_eq!(manager.next_wakeup(), Some(at(1)), "work is left");
    settle(&mut manager);
    assert_eq!(all(&mut manager), [Action::Fenced { session: A }]);
    assert_eq!(manager.table.count(), 0);
    assert!(manager.chores.is_empty());
}

#[test]
fn unclaimed_capabilities_are_removed_a_few_at_a_time() {
    let count = 3000;
    let mut manager = leader_with(holding(count));
    for number in 0..count as u64 {
        request(&mut manager, A, Ino(100 + number), Kind::FileRead);
    }
    // New connections do not accumulate work.
    for round in 2..100 {
        let before = manager.steps;
        manager.receive(at(1), A, link(round), ToManager::Claims(vec![]));
        assert!(manager.steps - before <= 256, "one call is short");
        assert!(manager.chores.len() <= 2);
    }
    settle(&mut manager);
    assert_eq!(manager.table.count(), 0);
}

#[test]
fn a_recall_waits_for_the_last_claim() {
    let mut manager = leader();
    let read = granted(&mut manager, A, F, Kind::FileRead);
    granted(&mut manager, A, F, Kind::FileExclusive);
    manager.disconnected(at(3), A);
    // The second grant was lost: A goes by the first one.
    let part = |claims, is_last| ToManager::claims(claims, is_last);
    manager.receive(at(4), A, link(2), part(vec![], false));
    begin(&mut manager, 1, B, F, Access::ChangeFile);
    assert_eq!(
        all(&mut manager),
        [],
        "A would answer that it holds no such grant"
    );
    let held = Claim {
        ino: F,
        grant: read,
        kind: Kind::FileRead,
    };
    manager.receive(at(4), A, link(2), part(vec![held], false));
    assert_eq!(all(&mut manager), []);
    manager.receive(at(4), A, link(2), part(vec![], true));
    let recall = ToHolder::Recall {
        ino: F,
        grant: read,
        keep: None,
    };
    assert_eq!(sent(&mut manager, A), [recall]);
    manager.receive(
        at(5),
        A,
        link(2),
        ToManager::Dropped {
            ino: F,
            grant: read,
            kept: None,
        },
    );
    assert!(has_proceeded(&mut manager, 1));
}

#[test]
fn a_new_leader_waits_for_the_last_claim() {
    let mut manager = awaiting(Settings::default());
    manager.session_opened(B);
    manager.receive(at(0), B, link(1), ToManager::Claims(vec![]));
    begin(&mut manager, 1, B, F, Access::ChangeFile);
    let parts = [(claims(2), false), (vec![], false)];
    for (claims, is_last) in parts {
        manager.receive(at(1), A, link(1), ToManager::claims(claims, is_last));
        assert!(!has_proceeded(&mut manager, 1));
    }
    manager.receive(at(1), A, link(1), ToManager::Claims(vec![]));
    assert!(has_proceeded(&mut manager, 1));
    assert_eq!(manager.table.count_of(A), 2);
}

fn is_closed(manager: &mut Manager, limit: Limit) -> bool {
    let closed = Action::Close { session: A, limit };
    let is_closed = all(manager).contains(&closed);
    assert_eq!(manager.link(A).is_none(), is_closed);
    is_closed
}

#[test]
fn a_session_that_claims_more_than_it_can_hold_loses_its_link() {
    let settings = holding(10);
    let max = settings.held_max() as u64;
    let mut manager = awaiting(settings);
    let all_but_one = ToManager::SomeClaims(claims(max));
    manager.receive(at(1), A, link(1), all_but_one);
    assert!(!is_closed(&mut manager, Limit::Claims));
    let more = claim(99, max + 1);
    manager.receive(at(1), A, link(1), ToManager::Claims(vec![more]));
    assert!(is_closed(&mut manager, Limit::Claims));
    // The limit also holds for claims of other files on several links.
    for round in 2..5 {
        let others = (1..=max).map(|number| claim(round << 32 | number, round << 32 | number));
        let claims = others.collect();
        let is_last = false;
        manager.receive(at(1), A, link(round), ToManager::claims(claims, is_last));
        assert_eq!(manager.table.count_of(A) as u64, max);
    }
}

#[test]
fn a_session_that_claims_out_of_order_loses_its_link() {
    let mut manager = leader();
    let is_last = false;
    let first = |claims| ToManager::claims(claims, is_last);
    manager.receive(at(1), A, link(2), first(vec![]));
    let kind = Kind::FileRead;
    let parent = None;
    let ino = F;
    let request = ToManager::Request { ino, kind, parent };
    manager.receive(at(1), A, link(2), request);
    assert!(is_closed(&mut manager, Limit::Claims));
    manager.receive(at(1), A, link(3), ToManager::Claims(vec![]));
    manager.receive(at(1), A, link(3), first(vec![]));
    assert!(is_closed(&mut manager, Limit::Claims));
}

#[test]
fn a_claim_of_an_unknown_grant_is_harmless() {
    let mut manager = leader();
    let held = granted(&mut manager, A, F, Kind::FileRead);
    let forged = Claim {
        ino: F,
        grant: GrantId {
            number: held.number + 1,
            ..held
        },
        kind: Kind::FileRead,
    };
    manager.receive(at(1), A, link(2), ToManager::Claims(vec![forged]));
    all(&mut manager);
    // The next grant has that number.
    let message = ToManager::Request {
        ino: Ino(21),
        kind: Kind::FileRead,
        parent: None,
    };
    manager.receive(at(1), A, link(2), message);
    assert!(matches!(
        sent(&mut manager, A)[..],
        [ToHolder::Grant { .. }]
    ));
}
