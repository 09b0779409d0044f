//! How much data chunks store: told at once, and the same after a crash. What programs without counts have
//! left is unknown until it is counted, and never wrong.

use std::collections::BTreeMap;

use fabric_store::api::{StoreCore, StoreError, StoreOp, Version};
use fabric_types::block::BLOCK_BYTES;
use rand::Rng;

use crate::history;
use crate::map_pages::MapPages;
use crate::model::{PLAIN, Range};
use crate::rig::{Moment, Rig};
use crate::seeds::{self, for_each_seed};
use crate::shard::{Block, CHUNK, LAYER, SMALL_DISK, Shard, small_params};
use crate::sim_disk::{CrashKind, SimDisk};
use crate::uncounted::uncount;

const KINDS: [CrashKind; 2] = [CrashKind::Process, CrashKind::Power];

/// What the chunk of the tests stores, in blocks.
fn blocks(shard: &Shard) -> Option<u64> {
    let (chunk, bytes, _) = shard.core.next_stored(0).expect("there is a chunk");
    assert_eq!((chunk.layer, chunk.index), (LAYER, CHUNK));
    bytes.map(|bytes| bytes / BLOCK_BYTES as u64)
}

fn content(tag: u32) -> Block {
    let mut block = [0x3c; BLOCK_BYTES];
    block[..4].copy_from_slice(&tag.to_le_bytes());
    block
}

/// As a daemon does that has nothing to do, until nothing more comes of it.
fn rest(shard: &mut Shard) {
    for _ in 0..20 {
        shard.core.on_idle();
        shard.run();
    }
}

#[test]
fn writes_and_discards_are_counted_at_once_and_crashes_change_nothing() {
    for_each_seed(4, |seed| {
        let mut shard = Shard::new(seed);
        for (at, block) in [5, 6, 7, 255, 256, 900].into_iter().enumerate() {
            shard.write(block, 10 + at as u64, &content(block));
            assert_eq!(blocks(&shard), Some(at as u64 + 1));
        }
        shard.write(5, 30, &content(50));
        assert_eq!(blocks(&shard), Some(6), "the same block");
        shard.one(StoreOp::Checkpoint { clean: false }).unwrap();
        assert_eq!(blocks(&shard), Some(6));
        shard.zero(6, 40).unwrap();
        assert_eq!(blocks(&shard), Some(5));
        shard.zero(8, 41).unwrap();
        assert_eq!(blocks(&shard), Some(5), "nothing was there");
        shard.flush();
        for kind in KINDS {
            let after = shard.crashed(kind, seed);
            assert_eq!(blocks(&after), Some(5));
            after.core.check(&mut after.disk.clone()).unwrap();
        }
        for block in [5, 7, 255, 256, 900] {
            shard.zero(block, 50 + u64::from(block)).unwrap();
        }
        assert_eq!(blocks(&shard), Some(0));
    });
}

#[test]
fn zeroes_that_hide_an_older_layer_store_nothing() {
    let mut shard = Shard::new(1);
    shard.write(3, 10, &content(3));
    let hide = StoreOp::Zero {
        layers: &[LAYER, fabric_types::ids::LayerId(77)],
        chunk: CHUNK,
        offset: 3 * BLOCK_BYTES as u32,
        len: 5 * BLOCK_BYTES as u32,
        version: Version(11),
        fua: false,
    };
    shard.one(hide).unwrap();
    assert_eq!(blocks(&shard), Some(0));
    // The page is there, and it is counted: none is not the same as unknown.
    shard.one(StoreOp::Checkpoint { clean: true }).unwrap();
    let shard = Shard::open(shard.disk);
    assert_eq!(MapPages::of(&shard.disk).leaves.len(), 1);
    assert_eq!(blocks(&shard), Some(0));
}

/// What is known of each chunk must be right, and all of it is known in the end.
fn counts_up(mut rig: Rig, right: &BTreeMap<(u64, u32), Option<u64>>) -> Rig {
    for _ in 0..100 {
        for (chunk, bytes) in rig.stored() {
            let is_right = bytes.is_none() || Some(&bytes) == right.get(&chunk);
            assert!(is_right, "{chunk:?} stores {bytes:?}");
        }
        rig.idle();
    }
    // In between some chunks may have gone that store nothing.
    let kept = |counts: &BTreeMap<(u64, u32), Option<u64>>| {
        let counts = counts.iter().filter(|(_, bytes)| **bytes != Some(0));
        counts.map(|(chunk, bytes)| (*chunk, *bytes)).collect()
    };
    let (now, right): (BTreeMap<_, _>, BTreeMap<_, _>) = (kept(&rig.stored()), kept(right));
    let wrong = right
        .iter()
        .find(|(chunk, bytes)| now.get(chunk) != Some(bytes));
    assert_eq!((wrong, now.len()), (None, right.len()));
    rig
}

/// A store after a history, and what its chunks store.
fn history(seed: u64) -> (Moment, BTreeMap<(u64, u32), Option<u64>>) {
    let mut rng = seeds::rng(seed, 0x57);
    let mut rig = Rig::new_small(seed);
    history::prologue(&mut rig);
    history::run(&mut rig, &mut rng, 60);
    rig.checkpoint();
    rig.drain();
    history::run(&mut rig, &mut rng, 10);
    rig.flush();
    rig.drain();
    rig.check_space();
    let right = rig.stored();
    (rig.crash(CrashKind::Process, seed), right)
}

#[test]
fn a_store_without_counts_is_counted_in_idle_moments_and_stays_so() {
    for_each_seed(6, |seed| {
        let (mut old, right) = history(seed);
        let mut had = 0;
        uncount(&mut old.disk, &mut |counts| {
            had += u32::from(counts != 0);
            0
        });
        assert!(had > 0, "there was something to forget");
        let rig = old.open(seed).expect("it opens");
        assert!(rig.stored().values().any(Option::is_none));
        let mut rig = counts_up(rig, &right);
        rig.check_last_state();
        // The next one has nothing to count, however this one ends.
        rig.checkpoint();
        rig.drain();
        let mut rig = rig
            .crash(CrashKind::Power, seed)
            .open(seed)
            .expect("it opens");
        rig.check_space();
    });
}

#[test]
fn counts_that_a_program_without_them_has_carried_along_are_not_believed() {
    for_each_seed(6, |seed| {
        let (mut old, right) = history(seed);
        let mut rng = seeds::rng(seed, 0x58);
        uncount(&mut old.disk, &mut |_| {
            let mut count = || u64::from(rng.random_range(0..=257_u16));
            [0, 16, 32, 48].map(|shift| count() << shift).iter().sum()
        });
        // A crash at any write of the opening: the next one believes them no more than this one.
        let writes = |disk: &SimDisk| disk.counts().of(crate::sim_disk::IoKind::Write);
        let opened = old.clone().open(seed).expect("it opens");
        let most = writes(&opened.now.disk) - writes(&old.disk);
        for nth in 1..=most {
            let mut dying = old.clone();
            dying.disk.set_fuse(nth);
            let Err((dead, _)) = dying.try_open(seed) else {
                panic!("opening went on without power");
            };
            let crashed = dead.crashed(KINDS[nth as usize % 2], seed + nth);
            counts_up(crashed.open(seed + 1).expect("it opens"), &right);
        }
        let rig = counts_up(opened, &right);
        counts_up(rig.reopen(seed), &right).check_last_state();
    });
}

#[test]
fn scrubbing_counts_what_is_not_counted() {
    for_each_seed(2, |seed| {
        let mut shard = Shard::new(seed);
        for block in [1, 300, 301, 800] {
            shard.write(block, u64::from(block), &content(block));
        }
        shard.one(StoreOp::Checkpoint { clean: true }).unwrap();
        uncount(&mut shard.disk, &mut |_| 0);
        let mut shard = Shard::open(shard.disk);
        assert_eq!(blocks(&shard), None);
        shard.read(1);
        assert_eq!(blocks(&shard), None, "two of the three pages were not read");
        assert_eq!(shard.scrub(), []);
        assert_eq!(blocks(&shard), Some(4));
    });
}

#[test]
fn a_page_that_cannot_be_read_keeps_its_count_until_it_is_replaced() {
    for_each_seed(2, |seed| {
        let mut shard = Shard::new(seed);
        for block in [1, 2, 3, 300] {
            shard.write(block, u64::from(block), &content(block));
        }
        shard.lose_map_page(CHUNK, 0);
        assert!(shard.try_read(1).is_err());
        assert_eq!(blocks(&shard), Some(4), "as far as anybody knows");
        shard.write(2, 400, &content(2));
        assert_eq!(blocks(&shard), Some(2), "of the others nothing is known");
        shard.one(StoreOp::Checkpoint { clean: true }).unwrap();
        let shard = Shard::open(shard.disk);
        assert_eq!(blocks(&shard), Some(2));
        shard.core.check(&mut shard.disk.clone()).unwrap();
    });
}

#[test]
fn a_page_that_was_not_counted_and_cannot_be_read_stays_unknown() {
    for_each_seed(2, |seed| {
        let mut shard = Shard::new(seed);
        for block in [1, 2, 300] {
            shard.write(block, u64::from(block), &content(block));
        }
        shard.one(StoreOp::Checkpoint { clean: true }).unwrap();
        uncount(&mut shard.disk, &mut |_| 0);
        let pages = MapPages::of(&shard.disk).leaves;
        let page = pages.iter().find(|page| page.leaf == 0).unwrap();
        shard.disk.flip_bit(page.offset + 9, 2);
        let mut shard = Shard::open(shard.disk);
        rest(&mut shard);
        assert_eq!(blocks(&shard), None);
        let reads = shard.core.metrics().device_reads;
        rest(&mut shard);
        assert_eq!(shard.core.metrics().device_reads, reads, "it is tried once");
        // What makes the blocks good again makes them known.
        for block in [1, 2] {
            shard.write(block, 500, &content(block));
        }
        assert_eq!(blocks(&shard), Some(3));
    });
}

fn no_space(error: &StoreError) -> bool {
    matches!(error, StoreError::NoSpace { .. })
}

#[test]
fn a_full_store_is_counted_and_its_checkpoints_still_fit() {
    for_each_seed(2, |seed| {
        let mut rig = Rig::create(SMALL_DISK, 1, small_params(), seed);
        rig.tolerate = no_space;
        rig.keep_done();
        // Chunk after chunk, one block each: many table pages beside few data.
        for chunk in 0.. {
            rig.write(Range::blocks(PLAIN, chunk, 7, 1), false);
            rig.drain();
            if rig.take_done().iter().any(|done| done.result.is_err()) {
                break;
            }
        }
        rig.check_space();
        let (right, mut old) = (rig.stored(), rig.close());
        uncount(&mut old.disk, &mut |counts| counts ^ 1 << 3);
        let rig = old.open(seed).expect("a full store opens");
        let mut rig = counts_up(rig, &right);
        for _ in 0..3 {
            rig.checkpoint();
            rig.drain();
        }
        rig.check_live();
        rig.check_space();
        let rig = rig.reopen(seed);
        counts_up(rig, &right);
    });
}
