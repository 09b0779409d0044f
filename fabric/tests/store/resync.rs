//! A round of comparison between two stores, one of which comes back.

use fabric::core::groups::Groups;
use fabric::core::membership::Standing;
use fabric::core::replica::outcome;
use fabric::core::replica::store_op::failure;
use fabric::core::resync::{Action, Call, Progress, Resync, Why};
use fabric::proto::ids::ChunkKey;
use fabric::proto::{
    Command, Epoch, Generation, NodeId, PgId, Refusal, Request, RequestId, Sequence,
};
use fabric::store::api::{StoreError, StoreOp, Version};
use fabric::store::device::{BLOCK_BYTES, IoVecs};
use rand::Rng;
use rand_chacha::ChaCha8Rng;

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

impl Pair {
    fn new(seed: u64) -> Self {
        let groups = Groups::default();
        groups.set(PG, Standing::Syncing, SINCE);
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
        let whom = rng.random_range(0..10);
        let (source, here) = (whom != 0, whom != 1);
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
        let request = Request {
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
            },
        };
        self.groups.admit(&request).unwrap();
        self.groups.note(&request);
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
        mut meanwhile: impl FnMut(&mut Self, &mut ChaCha8Rng),
    ) -> Option<Why> {
        let mut asked: Vec<(Call, Command, bool)> = Vec::new();
        loop {
            while let Some(action) = self.round.poll(&self.groups) {
                match action {
                    Action::Ask(call, command) => asked.push((call, command, true)),
                    Action::Local(call, command) => asked.push((call, command, false)),
                    Action::Promote => return None,
                    Action::Failed(why) => return Some(why),
                }
            }
            assert!(!asked.is_empty(), "a round that waits for nothing");
            let (call, command, remote) = asked.swap_remove(rng.random_range(0..asked.len()));
            meanwhile(self, rng);
            if remote {
                let result = match command {
                    Command::Join => Ok(()),
                    _ => self.source.execute(&command, Version(0)),
                };
                let result = outcome(result.map_err(|e| failure(e, &Request::NOTHING)));
                self.round.on_reply(call, result, &self.groups);
            } else {
                let result = self.here.execute(&command, Version(0));
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
        pair.groups.set(PG, Standing::Syncing, Epoch(SINCE.0 + 1));
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
        Some(Action::Failed(Why::Source(Refusal::Unreachable)))
    ));
    assert!(pair.round.is_over() && pair.round.calls_due() == 0);
    // The data are damaged at the source: this side does not take them.
    pair.round = Resync::new(PG, SINCE, NodeId(1));
    let block = pair.source.find(&content(version));
    pair.source.disk.flip_bit(block + 17, 3);
    let failed = pair.run(&mut rng, |_, _| ());
    assert_eq!(failed, Some(Why::Source(Refusal::Corrupt)));
    assert!(pair.here.stamps().is_empty());
}
