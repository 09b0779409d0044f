//! A map page that cannot be read: its blocks are bad until they are written again, and nothing else stops.

use fabric_store::api::{ScrubFinding, StoreCore, StoreError, StoreOp};
use fabric_store::device::SyncDevice;
use fabric_types::block::{BLOCK_BYTES, BlockStamp, Holds};
use fabric_types::ids::Version;
use rand::Rng;

use crate::history;
use crate::map_pages::{LeafPage, MapPages};
use crate::model::{PLAIN, Range, Spot};
use crate::rig::{Moment, Rig};
use crate::seeds::{self, for_each_seed};
use crate::shard::{Block, CHUNK, LAYER, Shard};
use crate::sim_disk::{CrashKind, SimDisk};

#[path = "lost_leaf/opening.rs"]
mod opening;
#[path = "lost_leaf/refused.rs"]
mod refused;
#[path = "lost_leaf/unknown.rs"]
mod unknown;

/// Blocks of a map page.
const LEAF: u32 = 256;
/// Blocks that [`stored`] writes: of two map pages.
const STORED: [u32; 4] = [3, 7, 255, 300];

/// How a map page is damaged.
#[derive(Debug, Clone, Copy)]
enum Harm {
    Flip,
    Spoil,
}

const HARMS: [Harm; 2] = [Harm::Flip, Harm::Spoil];

fn harm(disk: &mut SimDisk, leaf: &LeafPage, how: Harm) {
    match how {
        Harm::Flip => disk.flip_bit(leaf.offset + 100, 3),
        Harm::Spoil => disk.spoil(leaf.offset),
    }
}

fn content(tag: u32) -> Block {
    let mut block = [0x6b; BLOCK_BYTES];
    block[..4].copy_from_slice(&tag.to_le_bytes());
    block
}

fn blocks_of(found: &[ScrubFinding]) -> Vec<u32> {
    found.iter().map(|found| found.block).collect()
}

/// What waits to be fetched.
fn findings(shard: &mut Shard) -> Vec<u32> {
    let found: Vec<_> = std::iter::from_fn(|| shard.core.poll_finding()).collect();
    blocks_of(&found)
}

fn healed(shard: &mut Shard) -> Vec<u32> {
    let healed = std::iter::from_fn(|| shard.core.poll_healed());
    healed.map(|(_, block)| block).collect()
}

fn first_leaf(disk: &SimDisk) -> LeafPage {
    let leaves = MapPages::of(disk).leaves;
    *leaves
        .iter()
        .find(|page| page.leaf == 0)
        .expect("it is there")
}

/// A closed store with [`STORED`].
fn stored(seed: u64) -> SimDisk {
    let mut shard = Shard::new(seed);
    for block in STORED {
        shard.write(block, 10 + u64::from(block), &content(block));
    }
    closed(shard)
}

fn closed(mut shard: Shard) -> SimDisk {
    shard.one(StoreOp::Checkpoint { clean: true }).unwrap();
    shard.disk
}

/// The same with a damaged map page, opened.
fn damaged(seed: u64, how: Harm) -> (Shard, LeafPage) {
    let mut disk = stored(seed);
    let leaf = first_leaf(&disk);
    harm(&mut disk, &leaf, how);
    (Shard::open(disk), leaf)
}

/// The store opened twice: nothing that nothing names is in use any more.
fn assert_no_leak(shard: Shard, seed: u64) {
    let mut shard = Shard::open(closed(shard));
    shard.core.check(&mut shard.disk).unwrap();
    let stamps = shard.stamps();
    let mut twice = Shard::open(closed(shard));
    twice.core.check(&mut twice.disk).unwrap();
    assert_eq!(twice.stamps(), stamps, "seed {seed}");
    let data = stamps.iter().filter(|(_, _, stamp)| {
        let is_known = !stamp.is_unknown();
        is_known && stamp.holds() == Holds::Data
    });
    let (data, pages) = (data.count() as u64, MapPages::of(&twice.disk));
    let pages = pages.leaves.len() + pages.tables.len() + 2;
    let used = twice.core.space().used_bytes / BLOCK_BYTES as u64;
    assert_eq!(used, data + pages as u64, "seed {seed}");
}

#[test]
fn blocks_of_a_damaged_map_page_are_bad_and_name_their_place() {
    for how in HARMS {
        let (mut shard, leaf) = damaged(1, how);
        // Whether they were ever written is not known either.
        for block in [3, 7, 100, 255] {
            let error = shard.try_read(block).unwrap_err();
            let found = error.finding().expect("it is the device's fault");
            assert_eq!(
                (found.layer, found.chunk, found.block),
                (LAYER, CHUNK, block)
            );
            assert_eq!(found.device_offset, leaf.offset);
            match how {
                Harm::Flip => assert!(matches!(error, StoreError::Corrupt { .. })),
                Harm::Spoil => {
                    let errno = libc::EIO;
                    assert!(matches!(error, StoreError::Unreadable { errno: e, .. } if e == errno));
                }
            }
        }
        assert_eq!(shard.read(300), content(300));
        assert_eq!(shard.read(301), [0; BLOCK_BYTES]);
        let stamps = shard.inspect(0, LEAF as usize);
        assert!(stamps.iter().all(BlockStamp::is_unknown));
        assert!(
            shard
                .inspect(LEAF, LEAF as usize)
                .iter()
                .all(|stamp| !stamp.is_unknown())
        );
    }
}

#[test]
fn overwriting_a_block_of_a_damaged_map_page_clears_it() {
    for how in HARMS {
        let (mut shard, _) = damaged(2, how);
        assert!(shard.try_read(7).is_err());
        shard.write(7, 900, &content(1));
        assert_eq!(shard.read(7), content(1));
        assert_eq!(healed(&mut shard), [7]);
        shard.zero(100, 901).unwrap();
        assert_eq!(shard.read(100), [0; BLOCK_BYTES]);
        // Its neighbours are what they were: not known.
        assert!(shard.try_read(3).is_err() && shard.try_read(101).is_err());
        let version = Version(902);
        let part = [0x11; 512];
        let iovecs = [libc::iovec {
            iov_base: part.as_ptr().cast_mut().cast(),
            iov_len: part.len(),
        }];
        let write = StoreOp::Write {
            layers: &[LAYER],
            chunk: CHUNK,
            offset: 3 * BLOCK_BYTES as u32,
            iovecs: &iovecs,
            version,
            fua: false,
            urgent: false,
        };
        // The rest of the block is not known, and not zeroes.
        let refused = shard.one(write).unwrap_err();
        assert!(
            matches!(refused, StoreError::Corrupt { block: 3, .. }),
            "{refused}"
        );
        let mut shard = shard.crashed(CrashKind::Process, 2);
        assert_eq!(shard.read(7), content(1));
        assert_eq!(shard.read(100), [0; BLOCK_BYTES]);
        assert!(shard.try_read(3).is_err());
        let mut shard = Shard::open(closed(shard));
        assert_eq!((shard.read(7), shard.read(300)), (content(1), content(300)));
        assert!(shard.try_read(3).is_err() && shard.try_read(101).is_err());
        assert_no_leak(shard, 2);
    }
}

#[test]
fn map_page_that_can_be_read_again_has_lost_nothing() {
    let (mut shard, leaf) = damaged(3, Harm::Spoil);
    assert!(shard.try_read(3).is_err());
    assert!(shard.inspect(0, 1)[0].is_unknown());
    while shard.core.poll_finding().is_some() {}
    assert_eq!(shard.scrub().len(), LEAF as usize);
    let mut shard = Shard::open(closed(shard));
    shard.disk.repair(leaf.offset);
    for block in STORED {
        assert_eq!(shard.read(block), content(block));
    }
    shard.core.check(&mut shard.disk).unwrap();
}

#[test]
fn dropping_a_layer_with_a_damaged_map_page_gives_all_its_space_back() {
    for how in HARMS {
        let (mut shard, _) = damaged(4, how);
        let empty = {
            let mut other = Shard::open(stored(4));
            other.one(StoreOp::DropLayer { layer: LAYER }).unwrap();
            let other = Shard::open(closed(Shard::open(closed(other))));
            other.core.space().used_bytes
        };
        shard.one(StoreOp::DropLayer { layer: LAYER }).unwrap();
        assert_eq!(shard.read(3), [0; BLOCK_BYTES]);
        // The units that only the damaged page named come back with the next opening.
        let before = shard.core.space().used_bytes;
        let mut shard = Shard::open(closed(Shard::open(closed(shard))));
        assert_eq!(shard.core.space().used_bytes, empty);
        assert!(before > empty);
        assert_eq!(shard.stamps(), []);
        assert_no_leak(shard, 4);
    }
}

#[test]
fn what_the_log_says_of_a_damaged_map_page_is_known() {
    for how in HARMS {
        let mut shard = Shard::open(stored(5));
        shard.write(7, 500, &content(2));
        shard.zero(255, 501).unwrap();
        shard.flush();
        let mut disk = shard.disk.crash(CrashKind::Power, 5);
        let leaf = first_leaf(&disk);
        harm(&mut disk, &leaf, how);
        let mut shard = Shard::open(disk);
        assert_eq!(
            (shard.read(7), shard.read(255)),
            (content(2), [0; BLOCK_BYTES])
        );
        assert_eq!(shard.inspect(7, 1)[0].version, 500);
        assert!(shard.try_read(3).is_err());
        assert_eq!(shard.read(300), content(300));
        // All others are reported at once.
        assert_eq!(findings(&mut shard).len(), LEAF as usize - 2);
        assert_no_leak(shard, 5);
    }
}

#[test]
fn restoring_blocks_of_a_damaged_map_page_makes_them_good() {
    for how in HARMS {
        let (mut shard, _) = damaged(6, how);
        assert!(shard.try_read(3).is_err());
        let whole = Shard::open(stored(6)).inspect(0, LEAF as usize);
        for (block, stamp) in (0..).zip(&whole) {
            let data = content(block);
            let data = (stamp.holds() == Holds::Data).then_some(&data);
            let unknown = BlockStamp::UNKNOWN;
            shard.restore(block, unknown, *stamp, data).unwrap();
        }
        for block in 0..LEAF {
            let expected = match STORED.contains(&block) {
                true => content(block),
                false => [0; BLOCK_BYTES],
            };
            assert_eq!(shard.read(block), expected, "block {block}");
        }
        assert_eq!(shard.inspect(0, LEAF as usize), whole);
        while shard.core.poll_finding().is_some() {}
        assert_eq!(shard.scrub(), []);
        assert_no_leak(shard, 6);
    }
}

/// A store with a damaged map page and a damaged space map.
fn damaged_twice(seed: u64, how: Harm) -> (SimDisk, LeafPage) {
    let mut disk = stored(seed);
    let leaf = first_leaf(&disk);
    harm(&mut disk, &leaf, how);
    for slot in [2, 3] {
        disk.flip_bit((256 + slot) * BLOCK_BYTES as u64 + 8, 1);
    }
    (disk, leaf)
}

#[test]
fn damaged_map_and_damaged_space_map_cost_no_more_than_the_map_page() {
    let (disk, _) = damaged_twice(7, Harm::Flip);
    let mut shard = Shard::open(disk);
    shard.core.check(&mut shard.disk).unwrap();
    assert!(shard.try_read(3).is_err() && shard.try_read(100).is_err());
    assert_eq!(shard.read(300), content(300));
    // What the page named is free, for nothing names it any more.
    for block in 400..600 {
        shard.write(block, u64::from(block), &content(block));
    }
    assert!(shard.try_read(3).is_err());
    assert_no_leak(shard, 7);
}

#[test]
fn every_pass_of_the_scrubber_finds_all_blocks_of_a_damaged_map_page() {
    for how in HARMS {
        let (mut shard, leaf) = damaged(8, how);
        for _ in 0..2 {
            let found = shard.scrub();
            assert_eq!(blocks_of(&found), (0..LEAF).collect::<Vec<_>>());
            assert!(found.iter().all(|f| f.device_offset == leaf.offset));
        }
    }
}

#[test]
fn cached_pages_that_the_device_has_lost_are_written_again() {
    for how in HARMS {
        let mut shard = Shard::open(stored(9));
        shard.read(3);
        let pages = MapPages::of(&shard.disk);
        let leaf = first_leaf(&shard.disk);
        harm(&mut shard.disk, &leaf, how);
        let table = LeafPage {
            offset: pages.tables[0],
            ..pages.leaves[0]
        };
        harm(&mut shard.disk, &table, how);
        assert_eq!(shard.scrub(), []);
        shard.run();
        assert_eq!(shard.core.metrics().rewritten_pages, 2);
        let mut shard = shard.crashed(CrashKind::Power, 9);
        for block in STORED {
            assert_eq!(shard.read(block), content(block));
        }
        assert_eq!(shard.scrub(), []);
        assert_eq!(shard.core.metrics().rewritten_pages, 0);
        assert_no_leak(shard, 9);
    }
}

#[test]
fn store_with_a_damaged_chunk_table_does_not_open() {
    let mut disk = stored(10);
    let table = MapPages::of(&disk).tables[0];
    disk.flip_bit(table, 1);
    let opened = crate::factory::open(&mut disk, &crate::shard::small_params(), 1);
    let error = opened.expect_err("what it names is not known");
    assert!(error.contains("damaged table page"), "{error}");
}

/// A store with a history, closed.
fn closed_history(seed: u64) -> Moment {
    let mut rng = seeds::rng(seed, 0x1e);
    let mut rig = Rig::new_small(seed);
    history::prologue(&mut rig);
    history::run(&mut rig, &mut rng, 60);
    rig.drain();
    rig.close()
}

fn is_bad(error: &StoreError) -> bool {
    let is_reported = error.finding().is_some();
    // A write of a part of a block may meet the version of what a neighbour lost.
    is_reported || matches!(error, StoreError::Renumber { .. })
}

/// Everything shows what it should, or an error.
fn assert_right_or_bad(rig: &mut Rig) -> Vec<Spot> {
    rig.drain();
    rig.check_readable()
}

#[test]
fn any_history_goes_on_after_a_map_page_is_lost() {
    for_each_seed(6, |seed| {
        let found = closed_history(seed);
        for (n, leaf) in MapPages::of(&found.disk).leaves.iter().enumerate() {
            let mut rng = seeds::rng(seed, 0x1f00 + n as u64);
            let mut harmed = found.clone();
            harm(&mut harmed.disk, leaf, HARMS[rng.random_range(0..2)]);
            let mut rig = harmed.open(seed).expect("it opens");
            rig.tolerate = is_bad;
            assert!(
                !assert_right_or_bad(&mut rig).is_empty(),
                "what the page maps is bad"
            );
            for life in 0..3 {
                history::run(&mut rig, &mut rng, 30);
                assert_right_or_bad(&mut rig);
                let kind = [CrashKind::Process, CrashKind::Power][rng.random_range(0..2)];
                let next = match rng.random_bool(0.3) {
                    true => rig.close(),
                    false => {
                        rig.flush();
                        rig.drain();
                        rig.crash(kind, seed + life)
                    }
                };
                rig = next.open(seed + life).expect("it opens");
                rig.tolerate = is_bad;
                assert_right_or_bad(&mut rig);
            }
            // Overwritten, all of it is good again.
            for spot in rig.now.model.spots() {
                rig.write(Range::blocks(spot.view, spot.chunk, spot.block, 1), false);
                rig.drain();
            }
            rig.tolerate = |_| false;
            let rig = rig.close().open(seed).expect("it opens");
            let mut rig = rig.close().open(seed).expect("it opens");
            rig.check_last_state();
        }
    });
}

#[test]
fn checkpoints_and_the_cleaner_go_on_beside_a_lost_map_page() {
    for_each_seed(2, |seed| {
        let mut found = closed_history(seed);
        let leaves = MapPages::of(&found.disk).leaves;
        let leaf = leaves.iter().find(|page| page.layer == PLAIN.layers()[0]);
        harm(&mut found.disk, leaf.expect("it has some"), Harm::Flip);
        let mut rig = found.open(seed).expect("it opens");
        rig.tolerate = is_bad;
        let mut rng = seeds::rng(seed, 0x20);
        let before = rig.metrics(0).checkpoints;
        for _ in 0..10 {
            history::run(&mut rig, &mut rng, 20);
            rig.checkpoint();
            rig.drain();
        }
        assert!(rig.metrics(0).checkpoints >= before + 10);
        for _ in 0..10_000 {
            if rig.clean_step() {
                return;
            }
            rig.drain();
        }
        panic!("the cleaner has no end");
    });
}

#[test]
fn damaged_copy_of_the_label_is_written_again_from_the_other() {
    let whole = stored(11);
    let last = crate::shard::SMALL_DISK - BLOCK_BYTES as u64;
    let label = |disk: &SimDisk, offset| {
        let mut page = [0; BLOCK_BYTES];
        disk.peek(offset, &mut page);
        page
    };
    let intact = label(&whole, 0);
    for offset in [0, last] {
        for how in HARMS {
            let mut disk = whole.clone();
            match how {
                Harm::Flip => disk.flip_bit(offset + 9, 1),
                Harm::Spoil => disk.spoil(offset),
            }
            let params = crate::shard::small_params();
            let (_, report) = crate::factory::open(&mut disk, &params, 1).unwrap();
            assert_eq!(report.mended_labels, 1);
            assert!(report.to_string().contains("copy of the label"), "{report}");
            assert_eq!((label(&disk, 0), label(&disk, last)), (intact, intact));
            assert_eq!(disk.spoilt(), []);
            let (_, report) = crate::factory::open(&mut disk, &params, 2).unwrap();
            assert_eq!(report.mended_labels, 0);
        }
    }
    // A label of somebody else is nobody's to overwrite.
    let mut disk = whole.clone();
    let mut other = intact;
    other[32] ^= 1;
    fabric_store::format::seal(&mut other);
    disk.write_at(last, &other).unwrap();
    let (_, report) = crate::factory::open(&mut disk, &crate::shard::small_params(), 1).unwrap();
    assert_eq!((report.mended_labels, label(&disk, last)), (0, other));
}
