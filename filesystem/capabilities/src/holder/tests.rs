//! Each rule of the holder by itself.

use super::*;

const D: Ino = Ino(2);
const F: Ino = Ino(20);
const ONE: GuestId = GuestId(1);
const TWO: GuestId = GuestId(2);
const LINK: Link = Link { term: 7, round: 1 };

fn at(milliseconds: u64) -> Instant {
    Instant::START + Duration::from_millis(milliseconds)
}

fn grant_id(number: u64) -> GrantId {
    GrantId { term: 7, number }
}

fn all(holder: &mut Holder) -> Vec<HolderAction> {
    std::iter::from_fn(|| holder.next_action()).collect()
}

fn send(message: ToManager) -> HolderAction {
    HolderAction::Send {
        link: LINK,
        message,
    }
}

fn dropped(ino: Ino, number: u64, kept: Option<Kind>) -> HolderAction {
    send(ToManager::Dropped {
        ino,
        grant: grant_id(number),
        kept,
    })
}

/// A connected holder with a lease of an hour.
fn connected() -> Holder {
    let mut holder = Holder::new(at(0), at(3_600_000), Settings::default());
    assert_eq!(holder.connected(at(0), 7), Some(LINK));
    assert_eq!(all(&mut holder), [send(ToManager::Claims(vec![]))]);
    holder
}

fn grant(holder: &mut Holder, now: Instant, ino: Ino, number: u64, kind: Kind) {
    let grant = grant_id(number);
    holder.receive(now, LINK, ToHolder::Grant { ino, grant, kind });
    assert_eq!(all(holder)[0], HolderAction::Granted { ino, kind });
}

fn recall(holder: &mut Holder, now: Instant, ino: Ino, number: u64, keep: Option<Kind>) {
    let grant = grant_id(number);
    holder.receive(now, LINK, ToHolder::Recall { ino, grant, keep });
}

#[test]
fn a_capability_is_asked_for_once_and_used_once_granted() {
    let mut holder = connected();
    assert!(!holder.acquire(at(1), F, Kind::FileRead, None));
    assert!(!holder.acquire(at(1), F, Kind::FileRead, None));
    let request = ToManager::Request {
        ino: F,
        kind: Kind::FileRead,
        parent: None,
    };
    assert_eq!(all(&mut holder), [send(request)]);
    assert_eq!(holder.may(at(2), F), None);
    grant(&mut holder, at(3), F, 1, Kind::FileRead);
    assert_eq!(holder.may(at(4), F), Some(Kind::FileRead));
    assert!(holder.acquire(at(4), F, Kind::FileRead, None));
    assert!(!holder.acquire(at(4), F, Kind::FileExclusive, Some(D)));
    assert_eq!(holder.may(at(4), F), Some(Kind::FileRead));
}

#[test]
fn guests_are_promised_something_only_on_what_was_quiet() {
    let mut holder = connected();
    grant(&mut holder, at(0), D, 1, Kind::DirectoryRead);
    assert_eq!(
        holder.validity(at(9_999), D, Scope::Itself, ONE),
        Duration::ZERO
    );
    assert_eq!(
        holder.validity(at(10_000), D, Scope::Itself, ONE),
        Duration::from_secs(1)
    );
    holder.begin_change(at(20_000), D, Scope::Itself, ONE);
    assert_eq!(
        holder.validity(at(20_000), D, Scope::Itself, ONE),
        Duration::ZERO
    );
    holder.end_change(at(20_001), D, Scope::Itself);
    assert_eq!(
        holder.validity(at(30_000), D, Scope::Itself, ONE),
        Duration::ZERO
    );
    assert_eq!(
        holder.validity(at(30_001), D, Scope::Itself, ONE),
        Duration::from_secs(1)
    );
}

#[test]
fn a_recall_is_answered_when_the_last_promise_has_passed() {
    let mut holder = connected();
    grant(&mut holder, at(0), D, 1, Kind::DirectoryRead);
    holder.validity(at(10_000), D, Scope::Itself, ONE);
    holder.validity(at(10_500), D, Scope::Itself, TWO);
    recall(&mut holder, at(10_600), D, 1, None);
    assert_eq!(all(&mut holder), [HolderAction::Invalidate { ino: D }]);
    assert_eq!(holder.may(at(10_600), D), None);
    assert_eq!(
        holder.validity(at(10_600), D, Scope::Itself, ONE),
        Duration::ZERO
    );
    let end = at(10_500) + Settings::default().promise();
    assert!(holder.next_wakeup().is_some_and(|wakeup| wakeup <= end));
    holder.tick(Instant::from_nanos(end.as_nanos() - 1));
    assert_eq!(all(&mut holder), []);
    holder.tick(end);
    assert_eq!(all(&mut holder), [dropped(D, 1, None)]);
    assert_eq!(holder.count(), 0);
}

#[test]
fn without_promises_a_recall_is_answered_at_once() {
    let mut holder = connected();
    grant(&mut holder, at(0), D, 1, Kind::DirectoryRead);
    recall(&mut holder, at(1), D, 1, None);
    assert_eq!(
        all(&mut holder),
        [HolderAction::Invalidate { ino: D }, dropped(D, 1, None)]
    );
}

#[test]
fn an_exclusive_file_is_written_back_before_the_answer() {
    let mut holder = connected();
    grant(&mut holder, at(0), F, 1, Kind::FileExclusive);
    recall(&mut holder, at(1), F, 1, None);
    assert_eq!(all(&mut holder), [HolderAction::WriteBack { ino: F }]);
    assert_eq!(holder.may(at(2), F), None);
    holder.tick(at(60_000));
    assert_eq!(all(&mut holder), []);
    holder.written_back(at(60_001), F);
    assert_eq!(
        all(&mut holder),
        [HolderAction::Invalidate { ino: F }, dropped(F, 1, None)]
    );
}

#[test]
fn for_a_reader_a_writer_goes_on_reading_and_keeps_its_promises() {
    let mut holder = connected();
    grant(&mut holder, at(0), F, 1, Kind::FileExclusive);
    assert_eq!(
        holder.validity(at(10_000), F, Scope::Itself, ONE),
        Duration::from_secs(1)
    );
    recall(&mut holder, at(10_000), F, 1, Some(Kind::FileRead));
    assert_eq!(holder.may(at(10_000), F), Some(Kind::FileRead));
    holder.written_back(at(10_001), F);
    let kept = dropped(F, 1, Some(Kind::FileRead));
    assert_eq!(all(&mut holder), [HolderAction::WriteBack { ino: F }, kept]);
    // What was promised still holds, and is waited out when the rest is recalled.
    recall(&mut holder, at(10_002), F, 1, None);
    assert_eq!(all(&mut holder), [HolderAction::Invalidate { ino: F }]);
    holder.tick(at(10_000) + Settings::default().promise());
    assert_eq!(all(&mut holder), [dropped(F, 1, None)]);
}

#[test]
fn a_recall_that_goes_further_is_answered_once() {
    let mut holder = connected();
    grant(&mut holder, at(0), F, 1, Kind::FileExclusive);
    recall(&mut holder, at(1), F, 1, Some(Kind::FileRead));
    recall(&mut holder, at(2), F, 1, None);
    holder.written_back(at(3), F);
    let actions = all(&mut holder);
    assert_eq!(
        actions[1..],
        [HolderAction::Invalidate { ino: F }, dropped(F, 1, None)]
    );
}

#[test]
fn a_recall_of_what_is_not_held_is_answered_at_once() {
    let mut holder = connected();
    grant(&mut holder, at(0), F, 2, Kind::FileRead);
    recall(&mut holder, at(1), F, 1, None);
    assert_eq!(all(&mut holder), [dropped(F, 1, None)]);
    assert_eq!(holder.may(at(1), F), Some(Kind::FileRead));
}

#[test]
fn messages_of_an_old_connection_are_ignored() {
    let mut holder = connected();
    holder.disconnected();
    let new = holder.connected(at(1), 8).expect("a later leader");
    assert_eq!(new, Link { term: 8, round: 2 });
    all(&mut holder);
    let grant = grant_id(1);
    holder.receive(
        at(2),
        LINK,
        ToHolder::Grant {
            ino: F,
            grant,
            kind: Kind::FileRead,
        },
    );
    assert_eq!(holder.may(at(2), F), None);
    assert_eq!(holder.connected(at(3), 7), None);
}

#[test]
fn what_is_held_and_wanted_goes_to_the_next_leader() {
    let mut holder = connected();
    grant(&mut holder, at(0), F, 1, Kind::FileExclusive);
    holder.acquire(at(1), D, Kind::DirectoryRead, None);
    all(&mut holder);
    holder.disconnected();
    assert_eq!(holder.may(at(2), F), Some(Kind::FileExclusive));
    let link = holder.connected(at(3), 8).expect("a later leader");
    let claim = Claim {
        ino: F,
        grant: grant_id(1),
        kind: Kind::FileExclusive,
    };
    let request = ToManager::Request {
        ino: D,
        kind: Kind::DirectoryRead,
        parent: None,
    };
    let messages = [ToManager::Claims(vec![claim]), request];
    assert_eq!(
        all(&mut holder),
        messages.map(|message| HolderAction::Send { link, message })
    );
}

#[test]
fn what_is_wanted_again_is_asked_for_after_it_was_given_up() {
    let mut holder = connected();
    grant(&mut holder, at(0), F, 1, Kind::FileExclusive);
    recall(&mut holder, at(1), F, 1, None);
    assert!(!holder.acquire(at(2), F, Kind::FileRead, None));
    assert_eq!(all(&mut holder), [HolderAction::WriteBack { ino: F }]);
    holder.written_back(at(3), F);
    let request = ToManager::Request {
        ino: F,
        kind: Kind::FileRead,
        parent: None,
    };
    let actions = [
        HolderAction::Invalidate { ino: F },
        dropped(F, 1, None),
        send(request),
    ];
    assert_eq!(all(&mut holder), actions);
}

#[test]
fn a_change_waits_for_other_guests_alone() {
    let mut holder = connected();
    grant(&mut holder, at(0), D, 1, Kind::DirectoryRead);
    holder.validity(at(10_000), D, Scope::Itself, ONE);
    assert_eq!(
        holder.begin_change(at(10_001), D, Scope::Itself, ONE),
        at(10_001)
    );
    let end = at(10_000) + Settings::default().promise();
    assert_eq!(holder.begin_change(at(10_001), D, Scope::Itself, TWO), end);
    holder.end_change(at(10_002), D, Scope::Itself);
    assert!(holder.is_changing(D, Scope::Itself));
    holder.end_change(at(12_000), D, Scope::Itself);
    assert!(!holder.is_changing(D, Scope::Itself));
}

#[test]
fn what_a_change_does_not_touch_stays_quiet_and_is_not_waited_for() {
    let mut holder = connected();
    grant(&mut holder, at(0), D, 1, Kind::DirectoryRead);
    let (a, b, valid) = (Scope::name(b"a"), Scope::name(b"b"), Duration::from_secs(1));
    let child = Scope::Child(F);
    for scope in [a, b, child] {
        assert_eq!(holder.validity(at(10_000), D, scope, ONE), valid);
    }
    let end = at(10_000) + Settings::default().promise();
    assert_eq!(holder.begin_change(at(10_001), D, a, TWO), end);
    assert_eq!(
        holder.begin_change(at(10_001), D, Scope::Itself, TWO),
        at(10_001)
    );
    assert_eq!(holder.validity(at(10_002), D, a, ONE), Duration::ZERO);
    assert_eq!(
        holder.validity(at(10_002), D, Scope::Itself, ONE),
        Duration::ZERO
    );
    assert_eq!(holder.validity(at(10_002), D, child, ONE), valid);
    holder.end_change(end, D, a);
    holder.end_change(end, D, Scope::Itself);
    assert_eq!(holder.validity(at(21_000), D, a, ONE), Duration::ZERO);
    assert_eq!(holder.validity(at(21_000), D, b, ONE), valid);
    assert_eq!(holder.validity(at(21_300), D, a, ONE), valid);
}

#[test]
fn what_a_guest_was_told_goes_with_what_it_renames() {
    let other = Ino(3);
    let mut holder = connected();
    grant(&mut holder, at(0), D, 1, Kind::DirectoryRead);
    let (a, b) = (Scope::name(b"a"), Scope::name(b"b"));
    holder.validity(at(10_000), D, a, ONE);
    let end = at(10_000) + Settings::default().promise();
    let now = at(10_001);
    assert_eq!(
        holder.carry(now, (D, b), (D, a), ONE),
        now,
        "it was told nothing"
    );
    assert_eq!(holder.carry(now, (D, a), (D, b), TWO), now);
    assert_eq!(holder.begin_change(now, D, b, TWO), now);
    assert_eq!(holder.carry(now, (D, a), (D, b), ONE), now);
    assert_eq!(holder.begin_change(now, D, b, TWO), end);
    assert_eq!(
        holder.carry(now, (D, a), (other, b), ONE),
        end,
        "it is not held"
    );
    assert_eq!(holder.carry(now, (D, Scope::All), (other, b), ONE), end);
    grant(&mut holder, now, other, 2, Kind::DirectoryRead);
    assert_eq!(holder.carry(now, (D, a), (other, b), ONE), now);
    recall(&mut holder, now, other, 2, None);
    assert_eq!(all(&mut holder), [HolderAction::Invalidate { ino: other }]);
    holder.tick(end);
    assert_eq!(all(&mut holder), [dropped(other, 2, None)]);
}

#[test]
fn a_change_of_unknown_scope_touches_all() {
    let mut holder = connected();
    grant(&mut holder, at(0), D, 1, Kind::DirectoryRead);
    let a = Scope::name(b"a");
    holder.validity(at(10_000), D, a, ONE);
    let end = at(10_000) + Settings::default().promise();
    assert_eq!(holder.begin_change(at(10_001), D, Scope::All, TWO), end);
    assert_eq!(holder.validity(at(10_002), D, a, ONE), Duration::ZERO);
    holder.end_change(at(12_000), D, Scope::All);
    assert_eq!(holder.validity(at(21_999), D, a, ONE), Duration::ZERO);
    assert_eq!(
        holder.validity(at(22_000), D, a, ONE),
        Duration::from_secs(1)
    );
}

#[test]
fn what_was_told_of_unknown_scope_is_waited_for_by_each_change() {
    let mut holder = connected();
    grant(&mut holder, at(0), D, 1, Kind::DirectoryRead);
    holder.validity(at(10_000), D, Scope::All, ONE);
    let end = at(10_000) + Settings::default().promise();
    assert_eq!(holder.begin_change(at(10_001), D, Scope::Itself, TWO), end);
}

#[test]
fn nothing_is_held_or_promised_beyond_the_lease() {
    let mut holder = Holder::new(at(0), at(12_000), Settings::default());
    holder.connected(at(0), 7);
    all(&mut holder);
    grant(&mut holder, at(0), F, 1, Kind::FileExclusive);
    assert_eq!(
        holder.validity(at(10_500), F, Scope::Itself, ONE),
        Duration::from_secs(1)
    );
    assert_eq!(
        holder.validity(at(11_000), F, Scope::Itself, ONE),
        Duration::ZERO
    );
    assert_eq!(holder.may(at(11_999), F), Some(Kind::FileExclusive));
    recall(&mut holder, at(11_999), F, 1, None);
    assert_eq!(holder.may(at(12_000), F), None);
    assert_eq!(all(&mut holder), [HolderAction::SessionOver]);
    holder.lease_until(at(12_001), at(20_000));
    holder.written_back(at(12_001), F);
    assert_eq!(holder.connected(at(12_001), 8), None);
    assert!(!holder.acquire(at(12_001), F, Kind::FileRead, None));
    let (kind, refusal) = (Kind::FileRead, Refusal::SessionEnded);
    assert_eq!(
        all(&mut holder),
        [HolderAction::Refused {
            ino: F,
            kind,
            refusal
        }]
    );
    assert_eq!(holder.next_wakeup(), None);
}

#[test]
fn what_was_not_used_is_given_back() {
    let mut holder = connected();
    grant(&mut holder, at(0), D, 1, Kind::DirectoryRead);
    grant(&mut holder, at(0), F, 2, Kind::FileRead);
    holder.may(at(500_000), D);
    holder.tick(at(599_999));
    assert_eq!(all(&mut holder), []);
    holder.tick(at(601_000));
    assert_eq!(
        all(&mut holder),
        [HolderAction::Invalidate { ino: F }, dropped(F, 2, None)]
    );
}

#[test]
fn of_too_many_the_least_recently_used_is_given_up() {
    let settings = Settings {
        capabilities_max: 16,
        ..Settings::default()
    };
    let mut holder = Holder::new(at(0), at(3_600_000), settings);
    holder.connected(at(0), 7);
    all(&mut holder);
    for number in 1..=15 {
        grant(&mut holder, at(number), Ino(number), number, Kind::FileRead);
    }
    holder.may(at(100), Ino(1));
    let kind = Kind::FileRead;
    holder.receive(
        at(101),
        LINK,
        ToHolder::Grant {
            ino: Ino(16),
            grant: grant_id(16),
            kind,
        },
    );
    let actions = all(&mut holder);
    assert_eq!(
        actions[1..],
        [
            HolderAction::Invalidate { ino: Ino(2) },
            dropped(Ino(2), 2, None)
        ]
    );
}

#[test]
fn a_session_that_outlives_its_lease_begins_anew_with_nothing() {
    let mut holder = connected();
    grant(&mut holder, at(0), D, 1, Kind::DirectoryRead);
    holder.begin_change(at(1), D, Scope::Itself, ONE);
    holder.tick(at(3_600_000));
    assert_eq!(all(&mut holder), [HolderAction::SessionOver]);
    assert_eq!(holder.connected(at(3_600_001), 7), None);
    holder.restart(at(3_600_001), at(7_200_000));
    let link = Link { term: 7, round: 2 };
    assert_eq!(holder.connected(at(3_600_001), 7), Some(link));
    let message = ToManager::Claims(vec![]);
    assert_eq!(all(&mut holder), [HolderAction::Send { link, message }]);
    assert_eq!(holder.may(at(3_600_002), D), None);
    assert!(holder.is_changing(D, Scope::Itself));
    holder.end_change(at(3_600_003), D, Scope::Itself);
}

#[test]
fn a_refusal_is_of_what_was_asked_for() {
    let mut holder = connected();
    holder.acquire(at(1), F, Kind::FileRead, None);
    holder.acquire(at(1), F, Kind::FileExclusive, Some(D));
    let (kind, refusal) = (Kind::FileRead, Refusal::TooMany);
    holder.receive(
        at(2),
        LINK,
        ToHolder::Refuse {
            ino: F,
            kind,
            refusal,
        },
    );
    all(&mut holder);
    // The other request is on its way, and is not sent twice.
    holder.acquire(at(3), F, Kind::FileExclusive, Some(D));
    assert_eq!(all(&mut holder), []);
}

#[test]
fn no_more_is_wanted_than_the_leader_lets_wait() {
    let mut holder = connected();
    for number in 0..WANTED_MAX as u64 {
        holder.acquire(at(1), Ino(100 + number), Kind::FileRead, None);
    }
    all(&mut holder);
    assert!(!holder.acquire(at(2), F, Kind::FileRead, None));
    let (kind, refusal) = (Kind::FileRead, Refusal::TooMany);
    assert_eq!(
        all(&mut holder),
        [HolderAction::Refused {
            ino: F,
            kind,
            refusal
        }]
    );
}

#[test]
fn claims_are_split_into_messages_that_the_leader_accepts() {
    let settings = Settings {
        claims_at_once: 2,
        ..Settings::default()
    };
    let mut holder = Holder::new(at(0), at(1_000_000), settings);
    let first = holder.connected(at(0), LINK.term).expect("it is alive");
    for number in 1..=4 {
        let message = ToHolder::Grant {
            ino: Ino(number),
            grant: grant_id(number),
            kind: Kind::FileRead,
        };
        holder.receive(at(0), first, message);
    }
    all(&mut holder);
    let claims = |numbers: &[u64]| {
        let claims = numbers.iter().map(|number| Claim {
            ino: Ino(*number),
            grant: grant_id(*number),
            kind: Kind::FileRead,
        });
        claims.collect()
    };
    let send = |link, message| HolderAction::Send { link, message };
    let next = holder.connected(at(1), LINK.term).expect("it is alive");
    let some = ToManager::SomeClaims(claims(&[1, 2]));
    let last = ToManager::Claims(claims(&[3, 4]));
    assert_eq!(all(&mut holder), [send(next, some), send(next, last)]);
}
