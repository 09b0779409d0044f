//! A round of comparison between two stores, one of which comes back.

use std::collections::BTreeSet;

use fabric_replication::groups::Groups;
use fabric_replication::replica::outcome;
use fabric_replication::replica::store_op::failure;
use fabric_replication::resync::{Action, Call, Progress, Resync, RoundFailure, Unreadable};
use fabric_store::api::{StoreCore, StoreError, StoreOp};
use fabric_types::block::BLOCK_BYTES;
use fabric_types::ids::{ChunkKey, Version};
use fabric_types::iov::IoVecs;
use fabric_types::membership::ReplicaState;
use fabric_types::{
    Command, Epoch, Generation, NodeId, PgId, Refusal, Request, RequestId, Sequence,
};
use rand::Rng;
use rand_chacha::ChaCha8Rng;

use crate::execute::execute;
use crate::seeds::{self, for_each_seed};
use crate::shard::{Block, LAYER, Shard, iovec};

const PG: PgId = PgId(4);
const SINCE: Epoch = Epoch(9);
/// Chunks written, and blocks of each.
const CHUNKS: u32 = 3;
const BLOCKS: u32 = 1024;

/// The two sides, and what is under way between them.
struct Pair {
    source: Shard,
    here: Shard,
    groups: Groups,
    round: Resync,
    next: u64,
}

fn content(version: u64) -> Block {
    let mut block = [0; BLOCK_BYTES];
    block[..8].copy_from_slice(&version.to_le_bytes());
    block[4000] = 1;
    block
}

fn write(shard: &mut Shard, chunk: u32, block: u32, version: u64) {
    let content = content(version);
    let op = StoreOp::Write {
        layers: &[LAYER],
        chunk,
        offset: block * BLOCK_BYTES as u32,
        iovecs: &[iovec(&content)],
        version: Version(version),
        fua: false,
        urgent: false,
    };
    match shard.one(op) {
        Ok(()) | Err(StoreError::Stale { .. } | StoreError::Renumber { .. }) => {}
        Err(error) => panic!("{error}"),
    }
}

fn discard(shard: &mut Shard, chunk: u32, block: u32, count: u32, version: u64) {
    let zeroed = shard.one(StoreOp::Zero {
        layers: &[LAYER],
        chunk,
        offset: block * BLOCK_BYTES as u32,
        len: count * BLOCK_BYTES as u32,
        version: Version(version),
        fua: false,
    });
    match zeroed {
        Ok(()) | Err(StoreError::Stale { .. } | StoreError::Renumber { .. }) => {}
        Err(error) => panic!("{error}"),
    }
}

/// It is known who may write the layer, as if the source had been asked.
fn know_writers(groups: &Groups) {
    groups.get(PG).unwrap().fenced(LAYER);
}

/// A client's write.
fn whole_block(chunk: u32, block: u32, version: u64) -> Request {
    Request {
        id: RequestId(0),
        pg: PG,
        epoch: SINCE,
        generation: Generation(1),
        sequence: Sequence(version & 0xffff),
        watermark: Sequence(0),
        command: Command::Write {
            chunk: ChunkKey {
                layer: LAYER,
                index: chunk,
            },
            offset: block * BLOCK_BYTES as u32,
            buffers: IoVecs {
                ptr: std::ptr::null(),
                len: 0,
            },
            len: BLOCK_BYTES as u32,
            fua: false,
            urgent: false,
        },
    }
}

impl Pair {
    fn new(seed: u64) -> Self {
        let groups = Groups::default();
        groups.set(PG, ReplicaState::Syncing, SINCE);
        know_writers(&groups);
        groups.applied(SINCE);
        Self {
            source: Shard::new(seed),
            here: Shard::new(seed + 1),
            groups,
            round: Resync::new(PG, SINCE, NodeId(1)),
            next: 1,
        }
    }

    fn version(&mut self) -> u64 {
        self.next += 1;
        1 << 40 | self.next
    }

    /// A change of a random place, on one or both sides, as it happened before the round.
    fn diverge(&mut self, rng: &mut ChaCha8Rng) {
        let version = self.version();
        let (chunk, block) = (rng.random_range(0..CHUNKS), rng.random_range(0..BLOCKS));
        let asked = rng.random_range(0..10);
        let (source, here) = (asked != 0, asked != 1);
        if rng.random_bool(0.1) {
            let count = rng.random_range(1..=(BLOCKS - block).min(64));
            if source {
                discard(&mut self.source, chunk, block, count, version);
            }
            if here {
                discard(&mut self.here, chunk, block, count, version);
            }
            return;
        }
        if source {
            write(&mut self.source, chunk, block, version);
        }
        if here {
            write(&mut self.here, chunk, block, version);
        }
    }

    /// A guest's write during the round: to this side at once, to the source at once or later.
    fn guest_writes(&mut self, rng: &mut ChaCha8Rng, late: &mut Vec<(u32, u32, u64)>) {
        let version = self.version();
        let (chunk, block) = (rng.random_range(0..CHUNKS), rng.random_range(0..BLOCKS));
        let request = whole_block(chunk, block, version);
        self.groups.admit(&request).unwrap();
        let since = self.groups.note(&request).expect("it is syncing");
        self.groups.stored(PG, &request.command, since);
        if rng.random_bool(0.5) {
            write(&mut self.here, chunk, block, version);
            late.push((chunk, block, version));
        } else {
            write(&mut self.source, chunk, block, version);
            write(&mut self.here, chunk, block, version);
        }
    }

    /// Runs the round, with `meanwhile` before each answer. `None`: promoted.
    fn run(
        &mut self,
        rng: &mut ChaCha8Rng,
        meanwhile: impl FnMut(&mut Self, &mut ChaCha8Rng),
    ) -> Option<RoundFailure> {
        self.run_ticking(rng, &mut 0, meanwhile)
    }

    /// The same, and counts the ticks that the round asks for.
    fn run_ticking(
        &mut self,
        rng: &mut ChaCha8Rng,
        ticks: &mut u32,
        mut meanwhile: impl FnMut(&mut Self, &mut ChaCha8Rng),
    ) -> Option<RoundFailure> {
        let mut asked: Vec<(Call, Command, bool)> = Vec::new();
        loop {
            while let Some(action) = self.round.poll(&self.groups) {
                match action {
                    Action::Ask(call, command) => asked.push((call, command, true)),
                    Action::Local(call, command) => asked.push((call, command, false)),
                    Action::Fence(..) => unreachable!("no write waits for its layer"),
                    Action::Promote => return None,
                    Action::Failed(why) => return Some(why),
                }
            }
            if asked.is_empty() {
                assert!(self.round.needs_tick(), "a round that waits for nothing");
                *ticks += 1;
                self.round.on_tick();
                continue;
            }
            let (call, command, remote) = asked.swap_remove(rng.random_range(0..asked.len()));
            meanwhile(self, rng);
            if remote {
                let result = match command {
                    // The replica machine answers these: nobody is fenced, nothing unresolved.
                    Command::Join | Command::TellFence { .. } => Ok(()),
                    _ => execute(&mut self.source, &command, Version(0)),
                };
                let result = outcome(result.map_err(|e| failure(e, &Request::NOTHING)));
                self.round.on_reply(call, result, &self.groups);
            } else {
                let result = execute(&mut self.here, &command, Version(0));
                let result = result.map_err(|e| failure(e, &Request::NOTHING));
                self.round.on_local(call, result, &self.groups);
            }
        }
    }

    fn assert_equal(&mut self) {
        let (source, here) = (self.source.stamps(), self.here.stamps());
        for (a, b) in source.iter().zip(&here) {
            assert_eq!(a, b);
        }
        assert_eq!(source.len(), here.len());
    }
}

#[test]
fn whatever_differs_is_taken_over_and_nothing_else() {
    for_each_seed(12, |seed| {
        let mut rng = seeds::rng(seed, 0xe1);
        let mut pair = Pair::new(seed);
        for _ in 0..400 {
            pair.diverge(&mut rng);
        }
        assert_eq!(pair.run(&mut rng, |_, _| ()), None);
        pair.assert_equal();
        let Progress {
            blocks, dropped, ..
        } = pair.round.progress();
        assert!(blocks > 20 && blocks < 160, "{blocks} blocks copied");
        assert!(
            dropped > 0 && dropped < blocks,
            "{dropped} of {blocks} dropped"
        );
        // A second round finds nothing to do.
        pair.groups
            .set(PG, ReplicaState::Syncing, Epoch(SINCE.0 + 1));
        know_writers(&pair.groups);
        pair.round = Resync::new(PG, Epoch(SINCE.0 + 1), NodeId(1));
        assert_eq!(pair.run(&mut rng, |_, _| ()), None);
        assert_eq!(pair.round.progress().blocks, 0);
    });
}

#[test]
fn a_write_that_nobody_else_has_is_gone_after_the_round() {
    let mut rng = seeds::rng(1, 0xe2);
    let mut pair = Pair::new(1);
    let (acknowledged, alone) = (pair.version(), pair.version());
    write(&mut pair.source, 0, 5, acknowledged);
    write(&mut pair.here, 0, 5, acknowledged);
    write(&mut pair.here, 0, 5, alone);
    // A chunk that the source does not have at all.
    let other = pair.version();
    write(&mut pair.here, 7, 0, other);
    assert_eq!(pair.run(&mut rng, |_, _| ()), None);
    pair.assert_equal();
    assert_eq!(pair.round.progress().dropped, 2);
}

#[test]
fn guests_that_write_during_the_round_lose_nothing() {
    for_each_seed(12, |seed| {
        let mut rng = seeds::rng(seed, 0xe3);
        let mut pair = Pair::new(seed);
        for _ in 0..200 {
            pair.diverge(&mut rng);
        }
        let mut late = Vec::new();
        let outcome = pair.run(&mut rng, |pair, rng| {
            if rng.random_bool(0.3) {
                pair.guest_writes(rng, &mut late);
            }
            if rng.random_bool(0.2) && !late.is_empty() {
                let (chunk, block, version) = late.swap_remove(0);
                write(&mut pair.source, chunk, block, version);
            }
        });
        assert_eq!(outcome, None);
        for (chunk, block, version) in late {
            write(&mut pair.source, chunk, block, version);
        }
        pair.assert_equal();
    });
}

#[test]
fn partial_write_waits_until_the_block_matches_the_source() {
    let mut rng = seeds::rng(5, 0xe5);
    let mut pair = Pair::new(5);
    let (stale, good) = (pair.version(), pair.version());
    write(&mut pair.here, 0, 3, stale);
    write(&mut pair.source, 0, 3, good);
    let version = pair.version();
    let sector = [0xc7u8; 512];
    let iov = [libc::iovec {
        iov_base: sector.as_ptr().cast_mut().cast(),
        iov_len: 512,
    }];
    let part = |shard: &mut Shard| {
        shard.one(StoreOp::Write {
            layers: &[LAYER],
            chunk: 0,
            offset: 3 * BLOCK_BYTES as u32 + 512,
            iovecs: &iov,
            version: Version(version),
            fua: false,
            urgent: false,
        })
    };
    let request = Request {
        pg: PG,
        epoch: SINCE,
        command: Command::Write {
            chunk: ChunkKey {
                layer: LAYER,
                index: 0,
            },
            offset: 3 * BLOCK_BYTES as u32 + 512,
            buffers: IoVecs {
                ptr: iov.as_ptr(),
                len: 1,
            },
            len: 512,
            fua: false,
            urgent: false,
        },
        ..Request::NOTHING
    };
    // The source has it at once; this side puts it off until it is ready for it.
    part(&mut pair.source).unwrap();
    let (mut put_off, mut done) = (0, false);
    let outcome = pair.run(&mut rng, |pair, _| match pair.groups.admit(&request) {
        Err(refusal) => {
            assert_eq!(refusal, Refusal::Behind(SINCE));
            put_off += 1;
        }
        Ok(()) if !done => {
            pair.groups.note(&request);
            part(&mut pair.here).unwrap();
            done = true;
        }
        Ok(()) => {}
    });
    assert_eq!(outcome, None);
    assert!(put_off > 0 && done, "put off {put_off} times");
    pair.assert_equal();
}

#[test]
fn failed_write_does_not_exempt_its_block_from_comparison() {
    let mut rng = seeds::rng(6, 0xe6);
    let mut pair = Pair::new(6);
    let (stale, good) = (pair.version(), pair.version());
    write(&mut pair.here, 0, 3, stale);
    write(&mut pair.source, 0, 3, good);
    // Its data did not fit their checksums, say, and its client is gone.
    let request = whole_block(0, 3, pair.version());
    assert!(pair.groups.note(&request).is_some());
    let mut ticks = 0;
    let outcome = pair.run_ticking(&mut rng, &mut ticks, |_, _| ());
    assert_eq!(outcome, Some(RoundFailure::Busy));
    assert!(ticks > 100, "it might have come later");
    // A new stay: whatever this side holds is from before.
    let since = Epoch(SINCE.0 + 1);
    pair.groups.set(PG, ReplicaState::Syncing, since);
    know_writers(&pair.groups);
    pair.groups.applied(since);
    pair.round = Resync::new(PG, since, NodeId(1));
    assert_eq!(pair.run(&mut rng, |_, _| ()), None);
    pair.assert_equal();
}

#[test]
fn a_write_that_is_stored_late_is_waited_for() {
    let mut rng = seeds::rng(7, 0xe7);
    let mut pair = Pair::new(7);
    let stale = pair.version();
    write(&mut pair.here, 0, 3, stale);
    let version = pair.version();
    let request = whole_block(0, 3, version);
    let since = pair.groups.note(&request).expect("it is syncing");
    write(&mut pair.source, 0, 3, version);
    let mut looks = 0;
    let outcome = pair.run_ticking(&mut rng, &mut 0, |pair, _| {
        looks += 1;
        if looks == 40 {
            write(&mut pair.here, 0, 3, version);
            pair.groups.stored(PG, &request.command, since);
        }
    });
    assert_eq!(outcome, None);
    assert!(looks > 40);
    pair.assert_equal();
}

#[test]
fn a_round_ends_when_the_source_or_the_store_fails() {
    let mut rng = seeds::rng(3, 0xe4);
    let mut pair = Pair::new(3);
    let version = pair.version();
    write(&mut pair.source, 0, 0, version);
    let Some(Action::Ask(call, Command::Join)) = pair.round.poll(&pair.groups) else {
        panic!("a round begins by joining")
    };
    pair.round
        .on_reply(call, Err(Refusal::Unreachable), &pair.groups);
    assert!(matches!(
        pair.round.poll(&pair.groups),
        Some(Action::Failed(RoundFailure::Source(Refusal::Unreachable)))
    ));
    assert!(pair.round.is_over() && pair.round.calls_due() == 0);
    // The data are damaged at the source: this side does not take them.
    pair.round = Resync::new(PG, SINCE, NodeId(1));
    let block = pair.source.find(&content(version));
    pair.source.disk.flip_bit(block + 17, 3);
    let failed = pair.run(&mut rng, |_, _| ());
    assert_eq!(failed, Some(RoundFailure::Unread));
    assert!(pair.here.stamps().is_empty());
}

#[test]
fn what_no_source_can_read_is_lost_here_too_and_nothing_else() {
    for_each_seed(6, |seed| {
        let mut rng = seeds::rng(seed, 0xe8);
        let mut pair = Pair::new(seed);
        for _ in 0..200 {
            pair.diverge(&mut rng);
        }
        // Neighbours of one run, and one elsewhere.
        let versions: Vec<u64> = (0..8).map(|_| pair.version()).collect();
        for (block, version) in (100..).zip(&versions) {
            write(&mut pair.source, 1, block, *version);
        }
        let bad = [versions[0], versions[3], versions[4]];
        for version in bad {
            let place = pair.source.find(&content(version));
            pair.source.disk.flip_bit(place + 17, 3);
        }
        assert_eq!(pair.run(&mut rng, |_, _| ()), Some(RoundFailure::Unread));
        let unread = pair.round.take_unread();
        let found: BTreeSet<u64> = unread.values().map(|stamp| stamp.version).collect();
        assert_eq!(found, bad.into());
        assert_eq!(
            pair.here.stamps().len() + bad.len(),
            pair.source.stamps().len()
        );
        pair.round = Resync::new(PG, SINCE, NodeId(1)).knowing(Unreadable {
            lost: unread,
            ..Unreadable::default()
        });
        assert_eq!(pair.run(&mut rng, |_, _| ()), None);
        pair.assert_equal();
        assert_eq!(pair.round.progress().lost, bad.len() as u64);
        let found: BTreeSet<u64> = pair.here.scrub().iter().map(|f| f.version.0).collect();
        assert_eq!(found, bad.into());
    });
}

#[test]
fn what_clients_wait_for_is_not_held_back() {
    let mut pair = Pair::new(5);
    // A layer whose writers are not known, and in it a write of a part of a block.
    pair.groups = Groups::default();
    pair.groups.set(PG, ReplicaState::Syncing, SINCE);
    pair.groups.applied(SINCE);
    for chunk in 0..CHUNKS {
        let version = pair.version();
        write(&mut pair.source, chunk, 0, version);
    }
    let Some(Action::Ask(join, Command::Join)) = pair.round.poll_urgent(&pair.groups) else {
        panic!("a round begins by joining, which is not held back")
    };
    pair.round.on_reply(join, Ok(()), &pair.groups);
    assert!(
        pair.round.poll_urgent(&pair.groups).is_none(),
        "comparing is"
    );
    let mut part = whole_block(1, 3, 1 << 40);
    if let Command::Write { len, .. } = &mut part.command {
        *len /= 2;
    }
    assert!(pair.groups.admit(&part).is_err());
    let mut told = Vec::new();
    while let Some(action) = pair.round.poll_urgent(&pair.groups) {
        match action {
            Action::Ask(call, Command::TellFence { .. }) => {
                told.push("writers");
                pair.round.on_reply(call, Ok(()), &pair.groups);
                assert!(pair.groups.admit(&part).is_err(), "its page is asked for");
            }
            Action::Ask(_, Command::Inspect { chunk, .. }) => {
                assert_eq!(chunk.index, 1);
                told.push("page");
            }
            Action::Local(_, Command::Inspect { .. }) => told.push("page here"),
            other => panic!("{other:?}"),
        }
    }
    assert!(told.starts_with(&["writers"]), "{told:?}");
    assert!(
        told.contains(&"page") && told.contains(&"page here"),
        "{told:?}"
    );
}

#[test]
fn damaged_map_page_is_filled_again_from_the_source() {
    for_each_seed(6, |seed| {
        let mut rng = seeds::rng(seed, 0xe9);
        let mut pair = Pair::new(seed);
        for _ in 0..300 {
            pair.diverge(&mut rng);
        }
        // Beside what is written the page has what was never written, and what was discarded.
        let versions = [pair.version(), pair.version()];
        for shard in [&mut pair.source, &mut pair.here] {
            write(shard, 1, 300, versions[0]);
            discard(shard, 1, 310, 20, versions[1]);
        }
        pair.here.lose_map_page(1, 1);
        let outcome = pair.run(&mut rng, |pair, rng| {
            if rng.random_bool(0.1) {
                pair.guest_writes(rng, &mut Vec::new());
            }
        });
        assert_eq!(outcome, None);
        // What guests wrote to this side only is newer there.
        let source = pair.source.stamps();
        let mut here = pair.here.stamps().into_iter();
        for (chunk, block, stamp) in &source {
            let found = here.find(|(c, b, _)| (c, b) == (chunk, block));
            assert!(found.is_some_and(|(_, _, found)| found.version >= stamp.version));
        }
        assert!(
            pair.here
                .stamps()
                .iter()
                .all(|(_, _, stamp)| !stamp.is_unknown())
        );
        while pair.here.core.poll_finding().is_some() {}
        assert_eq!(pair.here.scrub(), []);
    });
}

#[test]
fn what_a_source_does_not_know_is_lost_only_if_it_is_not_known_here_either() {
    for_each_seed(4, |seed| {
        let mut rng = seeds::rng(seed, 0xea);
        let mut pair = Pair::new(seed);
        for _ in 0..200 {
            pair.diverge(&mut rng);
        }
        let version = pair.version();
        write(&mut pair.source, 1, 300, version);
        let knows_here = seed % 2 == 0;
        write(&mut pair.here, 1, 301, version);
        pair.source.lose_map_page(1, 1);
        if !knows_here {
            pair.here.lose_map_page(1, 1);
        }
        // Nothing is given up for what the source does not know.
        assert_eq!(pair.run(&mut rng, |_, _| ()), Some(RoundFailure::Unread));
        let unread = pair.round.take_unread();
        assert_eq!(unread.len(), 256);
        assert!(unread.values().all(|stamp| stamp.is_unknown()));
        let mut found = pair.here.stamps().into_iter();
        let kept = found.find(|(chunk, block, _)| (chunk.index, *block) == (1, 301));
        assert_eq!(kept.expect("it was written").2.is_unknown(), !knows_here);
        // No source knows more.
        pair.round = Resync::new(PG, SINCE, NodeId(1)).knowing(Unreadable {
            lost: unread,
            ..Unreadable::default()
        });
        let outcome = pair.run(&mut rng, |_, _| ());
        if !knows_here {
            assert_eq!(outcome, None);
            pair.assert_equal();
            let lost = pair.here.stamps().into_iter();
            let lost = lost.filter(|(_, _, stamp)| stamp.is_unknown());
            assert_eq!(lost.count(), 256);
            return;
        }
        // What is known here stays, and the comparison does not end before the source has something to say.
        assert_eq!(outcome, Some(RoundFailure::Unread));
        let mut found = pair.here.stamps().into_iter();
        let kept = found.find(|(chunk, block, _)| (chunk.index, *block) == (1, 301));
        assert_eq!(kept.map(|(_, _, stamp)| stamp.version), Some(version));
        for block in 256..512 {
            let version = pair.version();
            write(&mut pair.source, 1, block, version);
        }
        pair.round = Resync::new(PG, SINCE, NodeId(1));
        assert_eq!(pair.run(&mut rng, |_, _| ()), None);
        pair.assert_equal();
    });
}
