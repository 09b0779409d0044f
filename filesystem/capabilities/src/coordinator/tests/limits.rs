//! Limits on the messages that a session sends and on those that wait for it.

use super::*;
use crate::holder::{Holder, HolderAction};
use crate::limits::ANSWERS_MAX;
use crate::message::GrantId;

/// Requests for this number of inodes.
fn requests(count: u64) -> Vec<ToManager> {
    (0..count)
        .map(|number| request(Ino(100 + number)))
        .collect()
}

fn closed(coordinator: &mut Coordinator) -> Vec<Limit> {
    let events = events(coordinator).into_iter();
    let closed = events.filter_map(|event| match event {
        Event::LinkClosed { session, limit } if session == ALICE => Some(limit),
        _ => None,
    });
    closed.collect()
}

#[test]
fn a_session_that_sends_too_much_in_one_call_loses_its_link() {
    let mut coordinator = leader(&[ALICE, BOB]);
    let fits = requests(MESSAGES_MAX as u64);
    assert_eq!(coordinator.check(NOW, ALICE, &fits), Ok(()));
    let too_many = requests(MESSAGES_MAX as u64 + 1);
    assert_eq!(coordinator.check(NOW, ALICE, &too_many), Err(Gone));
    assert_eq!(closed(&mut coordinator), [Limit::Messages]);
    let taken = coordinator.take_anywhere(NOW, ALICE, LINK, 2, requests(1));
    assert_eq!(taken, Err(Gone));
    assert_eq!(coordinator.messages(ALICE, LINK, 0), Err(Gone));
    assert_eq!(coordinator.messages(BOB, LINK, 0), Ok(vec![]));
    // Each claim counts as a message.
    let claim = Claim {
        ino: Ino(7),
        grant: GrantId { term: 4, number: 1 },
        kind: Kind::FileRead,
    };
    let claims = vec![ToManager::Claims(vec![claim; MESSAGES_MAX + 1])];
    assert_eq!(coordinator.check(NOW, ALICE, &claims), Err(Gone));
    // It goes on on another link.
    let next = Link { round: 2, ..LINK };
    let claims = vec![ToManager::Claims(vec![])];
    let taken = coordinator.take_anywhere(NOW, ALICE, next, 1, claims);
    assert_eq!(taken, Ok(()));
}

#[test]
fn a_link_is_closed_once_however_often_too_much_is_sent() {
    let mut coordinator = leader(&[ALICE]);
    let too_many = requests(MESSAGES_MAX as u64 + 1);
    let mut closings = Vec::new();
    for _ in 0..100 {
        for session in [ALICE, BOB] {
            assert_eq!(coordinator.check(NOW, session, &too_many), Err(Gone));
            let events = events(&mut coordinator).into_iter();
            let closing = |event: &Event| matches!(event, Event::LinkClosed { .. });
            closings.extend(events.filter(closing));
        }
    }
    let (session, limit) = (ALICE, Limit::Messages);
    let once = [Event::LinkClosed { session, limit }];
    assert_eq!(closings, once, "the other session has no link");
}

#[test]
fn who_does_not_fetch_its_answers_loses_its_link() {
    let mut coordinator = leader(&[ALICE]);
    let mut first = 2;
    // The wrong directory makes the leader refuse each request at once.
    let refused = vec![exclusive(Ino(7), Some(Ino(99))); 1000];
    let mut taken = Ok(());
    while taken.is_ok() {
        assert!(first < 1_000_000, "the outbox grows without limit");
        let messages = refused.clone();
        taken = coordinator.take(NOW, ALICE, LINK, first, messages, |_, _| Some(None));
        first += 1000;
    }
    assert!(first > ANSWERS_MAX as u64, "it has {ANSWERS_MAX}");
    assert_eq!(closed(&mut coordinator), [Limit::Outbox]);
    assert_eq!(coordinator.messages(ALICE, LINK, 0), Err(Gone));
}

#[test]
fn recalls_do_not_count_as_answers() {
    let max = ANSWERS_MAX + 100;
    let settings = Settings {
        capabilities_max: max,
        ..Settings::default()
    };
    let mut coordinator = Coordinator::new(NOW, LINK.term, [ALICE], settings);
    coordinator.lead_until(NOW, Instant::from_nanos(u64::MAX));
    // The session claims twice its limit. Other sessions recall the first half of the rest.
    let held: Vec<u64> = (1..=2 * max as u64).collect();
    for (first, numbers) in (1..).zip(held.chunks(256)) {
        let claims = numbers.iter().map(|number| Claim {
            ino: Ino(100 + number),
            grant: GrantId {
                term: 4,
                number: *number,
            },
            kind: Kind::DirectoryRead,
        });
        let claims = claims.collect();
        let is_last = numbers.last() == held.last();
        let message = ToManager::claims(claims, is_last);
        let taken = coordinator.take_anywhere(NOW, ALICE, LINK, first, vec![message]);
        assert_eq!(taken, Ok(()));
    }
    while coordinator.next_wakeup() == Some(NOW) {
        coordinator.tick(NOW);
    }
    assert_eq!(coordinator.counts().recalls, max);
    assert_eq!(closed(&mut coordinator), []);
    let (mut received, mut behind) = (0, 0);
    loop {
        let messages = coordinator.messages(ALICE, LINK, behind).unwrap();
        assert!(messages.len() <= MESSAGES_MAX);
        if messages.is_empty() {
            break;
        }
        received += messages.len();
        behind += messages.len() as u64;
    }
    assert_eq!(received, max);
}

#[test]
fn operations_of_a_session_that_wait_for_each_other_are_bounded() {
    let mut coordinator = leader(&[ALICE]);
    let (records, _) = tree();
    let unlink = of(&records, &unlink(b"a"));
    let count = WAITING_MAX as u64 + 10;
    for number in 1..=count {
        coordinator.begin(NOW, OperationId(number), ALICE, unlink.clone());
    }
    let refused = events(&mut coordinator).into_iter();
    let refused = refused.filter(|event| {
        let refusal = Refusal::TooMany;
        matches!(event, Event::Refuse { refusal: why, .. } if *why == refusal)
    });
    // One operation is under way.
    assert_eq!(refused.count(), 9);
}

/// Removes and returns the first messages of a holder, as many as one call may have.
fn sent_at_once(outgoing: &mut Vec<ToManager>) -> Vec<ToManager> {
    let mut weight = 0;
    let fits = outgoing.iter().take_while(|message| {
        weight += message.weight();
        weight <= MESSAGES_MAX
    });
    let count = fits.count();
    outgoing.drain(..count).collect()
}

#[test]
fn a_full_host_connects_within_the_limits() {
    let settings = Settings::default();
    let far = Instant::from_nanos(u64::MAX);
    let mut holder = Holder::new(NOW, far, settings.clone());
    let former = holder.connected(NOW, 4).expect("it is alive");
    let max = settings.capabilities_max as u64 / 16;
    for number in 1..=max {
        let message = ToHolder::Grant {
            ino: Ino(100 + number),
            grant: GrantId { term: 4, number },
            kind: Kind::FileRead,
        };
        holder.receive(NOW, former, message);
    }
    // The host requests as many more as it may.
    for number in 1..=crate::WANTED_MAX as u64 {
        holder.acquire(NOW, Ino(number << 32), Kind::DirectoryRead, None);
    }
    while holder.next_action().is_some() {}
    let mut coordinator = Coordinator::new(NOW, LINK.term, [ALICE], settings);
    coordinator.lead_until(NOW, far);
    let link = holder.connected(NOW, LINK.term).expect("it is alive");
    let actions = std::iter::from_fn(|| holder.next_action());
    let messages = actions.filter_map(|action| match action {
        HolderAction::Send { message, .. } => Some(message),
        _ => None,
    });
    let mut outgoing: Vec<ToManager> = messages.collect();
    let mut first = 1;
    while !outgoing.is_empty() {
        let messages = sent_at_once(&mut outgoing);
        let next = first + messages.len() as u64;
        assert_eq!(coordinator.check(NOW, ALICE, &messages), Ok(()));
        let taken = coordinator.take_anywhere(NOW, ALICE, link, first, messages);
        assert_eq!(taken, Ok(()));
        first = next;
    }
    let wanted = crate::WANTED_MAX;
    assert_eq!(coordinator.counts().capabilities, max as usize + wanted);
    let granted = coordinator.messages(ALICE, link, 0).unwrap();
    assert_eq!(granted.len(), wanted);
}
