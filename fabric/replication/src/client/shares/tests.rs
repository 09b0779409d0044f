//! A volume that asks for everything, and one beside it. The rig is [`crate::client::tests`]'s.

use std::sync::Arc;

use fabric_types::ids::{ChunkKey, PgId};
use fabric_types::membership::ReplicaSet;
use fabric_types::message::PIECES_MAX;
use fabric_types::{Command, Epoch, Refusal, placement};

use super::*;
use crate::client::tests::{Bench, CHUNK, IN, OUT, set, volume_params};
use crate::client::waiting::WAITING_MAX;
use crate::client::{Submit, VolumeState};

/// A second volume on the same thread.
fn neighbour() -> Arc<VolumeState> {
    Arc::new(VolumeState::new(2, 1, &volume_params()))
}

/// Submits for another volume than the rig's.
fn submit_for(
    bench: &mut Bench,
    volume: &Arc<VolumeState>,
    tag: u64,
    op: Op,
    at: (u64, u64),
) -> Submit {
    let own = std::mem::replace(&mut bench.volume, Arc::clone(volume));
    let outcome = bench.submit(tag, op, at.0, at.1);
    bench.volume = own;
    outcome
}

const WRITE: Op = Op::Write { fua: false };

/// What a volume has in flight that is alone on its thread.
fn alone_bytes() -> u64 {
    WindowSizes::default().window_bytes / 2
}

#[test]
fn slots_are_left_for_a_neighbour_of_a_greedy_volume() {
    let mut bench = Bench::new(set(1, 1, &[IN]));
    let mut taken = 0;
    while bench.submit(taken, Op::Read, taken * 512 % CHUNK, 512) == Submit::Pending {
        taken += 1;
    }
    assert_eq!(taken, u64::from(IOS_MAX) / 2);
    assert!(!bench.client.has_room(&bench.volume));
    let quiet = neighbour();
    assert!(bench.client.has_room(&quiet));
    let outcome = submit_for(&mut bench, &quiet, 9999, WRITE, (0, 4096));
    assert_eq!(outcome, Submit::Pending);
    // The greedy one has room once something of its own has ended, not before.
    bench.answer(bench.script.sent.len() - 1, Ok(()));
    assert!(!bench.client.has_room(&bench.volume));
    bench.answer(0, Ok(()));
    assert!(bench.client.has_room(&bench.volume));
}

#[test]
fn pieces_are_left_for_a_neighbour_of_a_greedy_volume() {
    let mut bench = Bench::new(set(1, 1, &[IN]));
    let mut taken = 0;
    while bench.submit(taken, Op::Read, 0, 8 << 20) == Submit::Pending {
        taken += 1;
    }
    let left = bench.client.pieces.free();
    assert!(left >= PIECES_MAX as usize / 2, "{left} after {taken}");
    let quiet = neighbour();
    let outcome = submit_for(&mut bench, &quiet, 9999, Op::Read, (0, 8 << 20));
    assert_eq!(outcome, Submit::Pending);
}

fn sent_bytes(bench: &Bench) -> u64 {
    let sent = bench.script.sent.iter();
    sent.map(|(_, request)| match request.command {
        Command::Read { len, .. } | Command::Write { len, .. } => u64::from(len),
        _ => 0,
    })
    .sum()
}

#[test]
fn long_requests_go_in_a_window_and_small_ones_beside_them() {
    let mut bench = Bench::new(set(1, 1, &[IN]));
    for tag in 0..4 {
        assert_eq!(bench.submit(tag, Op::Read, 0, 8 << 20), Submit::Pending);
    }
    assert_eq!(sent_bytes(&bench), alone_bytes());
    // A small one of the same volume does not wait behind them.
    bench.submit(4, Op::Read, 0, 4096);
    assert_eq!(sent_bytes(&bench), alone_bytes() + 4096);
    let mut answered = 0;
    while answered < bench.script.sent.len() {
        bench.answer(answered, Ok(()));
        answered += 1;
    }
    assert_eq!(sent_bytes(&bench), (32 << 20) + 4096);
    assert_eq!(bench.done.len(), 5);
    bench.assert_idle();
}

#[test]
fn with_a_neighbour_in_use_the_window_and_the_pieces_are_small() {
    let mut bench = Bench::new(set(1, 1, &[IN]));
    let quiet = neighbour();
    submit_for(&mut bench, &quiet, 1, Op::Read, (0, 4096));
    bench.submit(2, Op::Read, 0, 8 << 20);
    let sent = &bench.script.sent[1..];
    let bytes: Vec<u64> = sent
        .iter()
        .map(|(_, request)| match request.command {
            Command::Read { len, .. } => u64::from(len),
            other => panic!("{other:?}"),
        })
        .collect();
    assert_eq!(bytes, [WindowSizes::default().shared_piece_bytes]);
    // Both have their turns.
    submit_for(&mut bench, &quiet, 3, Op::Read, (0, 8 << 20));
    let mut next = 0;
    while next < bench.script.sent.len() {
        bench.answer(next, Ok(()));
        next += 1;
    }
    assert_eq!(bench.done.len(), 3);
    bench.assert_idle();
}

#[test]
fn volumes_that_wait_for_the_window_take_turns() {
    let mut bench = Bench::new(set(1, 1, &[IN]));
    let second = neighbour();
    submit_for(&mut bench, &second, 1, Op::Read, (0, 32 << 20));
    bench.submit(2, Op::Read, 0, 8 << 20);
    let mut nth = 0;
    while bench.done.is_empty() {
        bench.answer(nth, Ok(()));
        nth += 1;
    }
    // The shorter one is done although all of the longer one was there before.
    assert!(bench.done.contains_key(&2), "{:?}", bench.done);
    while nth < bench.script.sent.len() {
        bench.answer(nth, Ok(()));
        nth += 1;
    }
    assert_eq!(bench.done.len(), 2);
    bench.assert_idle();
}

#[test]
fn a_failed_request_sends_nothing_more() {
    let mut bench = Bench::new(set(1, 1, &[IN]));
    bench.submit(1, Op::Read, 0, 8 << 20);
    bench.submit(2, Op::Read, 0, 8 << 20);
    let sent = bench.script.sent.len();
    bench.answer(0, Err(Refusal::Corrupt));
    for nth in 1..sent {
        bench.answer(nth, Ok(()));
    }
    assert_eq!(bench.done[&1], Err(io::IoError::Corrupt));
    let mut nth = sent;
    while nth < bench.script.sent.len() {
        bench.answer(nth, Ok(()));
        nth += 1;
    }
    assert_eq!(bench.done[&2], Ok(()));
    assert_eq!(sent_bytes(&bench), (8 << 20) + alone_bytes());
    bench.assert_idle();
}

#[test]
fn writes_that_cannot_commit_leave_the_window_and_most_slots() {
    let mut bench = Bench::new(set(1, 2, &[IN, OUT, OUT]));
    let mut tag = 0;
    for volume in 0..4 {
        bench.volume = Arc::new(VolumeState::new(
            volume + 1,
            volume as u32,
            &volume_params(),
        ));
        for nth in 0..1024 {
            if bench.submit(tag, WRITE, nth * 4096, 4096) == Submit::Pending {
                tag += 1;
            }
        }
    }
    assert!(bench.script.sent.is_empty());
    assert_eq!(tag as usize, IDLE_PIECES_MAX);
    assert_eq!(
        bench.client.window.in_flight,
        InFlight::default(),
        "nobody has to answer them"
    );
    // Reads go on.
    assert_eq!(bench.submit(9999, Op::Read, 1 << 24, 4096), Submit::Pending);
    bench.answer(0, Ok(()));
    assert_eq!(bench.done[&9999], Ok(()));
    // So does everything with a map that lets them commit.
    bench.map(set(2, 2, &[IN, IN, OUT]));
    let mut nth = 1;
    while nth < bench.script.sent.len() {
        bench.answer(nth, Ok(()));
        nth += 1;
    }
    assert_eq!(bench.done.len(), tag as usize + 1);
    assert_eq!(bench.client.idle_pieces, 0);
    bench.assert_idle();
}

#[test]
fn no_chunk_of_a_long_write_is_one_that_cannot_commit() {
    // Of eight groups the second is below its least number.
    const GROUPS: u32 = 8;
    let group = |index| {
        let layer = volume_params().layer;
        placement::group_of(ChunkKey { layer, index }, GROUPS)
    };
    // Two chunks in a row, by whether they can commit.
    let find = |wanted: [bool; 2]| {
        let mut all = 0..volume_params().size_bytes / CHUNK - 1;
        let found = all.find(|at| [0, 1].map(|next| group(*at as u32 + next) != 1) == wanted);
        found.expect("an even spread") * CHUNK
    };
    let mut bench = Bench::new(set(1, 1, &[IN]));
    let sets = (0..GROUPS).map(|pg| {
        let members = set(1, 1, &[IN, OUT]).members().to_vec();
        let min_in_sync = if pg == 1 { 2 } else { 1 };
        ReplicaSet::new(PgId(pg.into()), Epoch(1), min_in_sync, members)
    });
    bench.client = Client::new(0, sets.collect());
    let (stuck, mut tag) = (find([false, true]), 0);
    for volume in 0..4 {
        bench.volume = Arc::new(VolumeState::new(
            volume + 1,
            volume as u32,
            &volume_params(),
        ));
        for nth in 0..1024 {
            if bench.submit(tag, WRITE, stuck + nth * 4096, 4096) == Submit::Pending {
                tag += 1;
            }
        }
    }
    assert_eq!(tag as usize, IDLE_PIECES_MAX);
    bench.volume = Arc::new(VolumeState::new(9, 9, &volume_params()));
    let end = CHUNK - 4096;
    let later = find([true, false]) + end;
    assert_eq!(bench.submit(9000, WRITE, later, 8192), Submit::Busy);
    assert_eq!(bench.submit(9001, Op::Discard, 0, 90 * CHUNK), Submit::Busy);
    let sound = find([true, true]) + end;
    assert_eq!(bench.submit(9002, WRITE, sound, 8192), Submit::Pending);
}

#[test]
fn waiting_requests_of_a_volume_are_bounded_and_begin_in_order() {
    let mut bench = Bench::new(set(1, 1, &[IN, IN]));
    let overlapping = WAITING_MAX as u64 + 1;
    for tag in 0..overlapping {
        assert_eq!(bench.submit(tag, WRITE, 0, 4096), Submit::Pending);
    }
    assert_eq!(bench.submit(9999, WRITE, 0, 4096), Submit::Busy);
    assert!(!bench.client.has_room(&bench.volume));
    assert_eq!(bench.client.left_over(), 2 + 2 * overlapping - 1);
    for tag in 0..overlapping {
        let nth = 2 * tag as usize;
        assert_eq!(bench.script.sent.len(), nth + 2, "one at a time");
        bench.answer(nth, Ok(()));
        bench.answer(nth + 1, Ok(()));
        assert_eq!(bench.done[&tag], Ok(()));
        assert!(bench.client.has_room(&bench.volume));
    }
    bench.assert_idle();
}
