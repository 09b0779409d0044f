//! Map pages that the device refuses to give: that may pass, so that it is no proof of loss.

use super::*;
use crate::sim_disk::IoKind;

/// Chunks with a map page each: more than may be given up because the device refuses them.
const CHUNKS: u32 = 20;
const GIVEN_UP_MAX: u32 = 16;

#[test]
fn page_that_can_be_read_before_a_checkpoint_replaces_it_has_lost_nothing() {
    let (mut shard, leaf) = damaged(31, Harm::Spoil);
    assert!(shard.try_read(3).is_err());
    shard.write(7, 900, &content(1));
    shard.zero(255, 901).unwrap();
    while shard.core.poll_finding().is_some() {}
    shard.disk.repair(leaf.offset);
    shard.one(StoreOp::Checkpoint { clean: false }).unwrap();
    assert_eq!(shard.core.metrics().lost_leaves, 0);
    assert_eq!((shard.read(3), shard.read(7)), (content(3), content(1)));
    assert_eq!([shard.read(255), shard.read(100)], [[0; BLOCK_BYTES]; 2]);
    // None of its blocks is bad any more, and what was overwritten is free again.
    assert_eq!(healed(&mut shard).len(), LEAF as usize);
    assert_eq!(shard.scrub(), []);
    shard.core.check(&mut shard.disk).unwrap();
    assert_no_leak(shard, 31);
}

#[test]
fn page_that_the_device_refuses_for_a_moment_at_an_opening_has_lost_nothing() {
    let mut shard = Shard::open(stored(32));
    shard.write(7, 500, &content(2));
    shard.flush();
    let found = shard.disk.crash(CrashKind::Power, 32);
    let mut given_up = 0;
    for nth in 0..100 {
        let mut disk = found.clone();
        // In a piece with others, alone, and once more.
        for again in 0..3 {
            disk.fail(IoKind::Read, nth + again, libc::EIO);
        }
        let opened = crate::factory::open(&mut disk, &crate::shard::small_params(), 1);
        let Ok((mut cores, report)) = opened else {
            continue;
        };
        assert_eq!(report.lost_leaves, 0, "the last look saved it");
        // None of its blocks was reported; those that are none any more are told.
        assert!(cores[0].poll_finding().is_none());
        given_up += u32::from(cores[0].poll_healed().is_some());
        disk.forget_faults();
        let mut shard = Shard::open(disk);
        assert_eq!((shard.read(3), shard.read(7)), (content(3), content(2)));
        assert_no_leak(shard, 32);
    }
    assert!(given_up > 0, "a map page was among what was refused");
}

#[test]
fn page_is_not_given_up_for_an_error_if_the_space_map_is_damaged_too() {
    let (mut disk, leaf) = damaged_twice(33, Harm::Spoil);
    let opened = crate::factory::open(&mut disk, &crate::shard::small_params(), 1);
    let error = opened.expect_err("what the page names may be in use");
    assert!(error.contains("cannot read"), "{error}");
    // The device has come to its senses.
    disk.repair(leaf.offset);
    let mut shard = Shard::open(disk);
    for block in STORED {
        assert_eq!(shard.read(block), content(block));
    }
    assert_no_leak(shard, 33);
}

pub(super) fn write_chunk(shard: &mut Shard, chunk: u32, version: u64) -> Result<(), StoreError> {
    let content = content(chunk);
    let iovecs = [crate::shard::iovec(&content)];
    shard.one(StoreOp::Write {
        layers: &[LAYER],
        chunk,
        offset: 0,
        iovecs: &iovecs,
        version: Version(version),
        fua: false,
        urgent: false,
    })
}

fn many_chunks(seed: u64) -> SimDisk {
    let mut shard = Shard::new(seed);
    for chunk in 0..CHUNKS {
        write_chunk(&mut shard, chunk, 10).unwrap();
    }
    closed(shard)
}

fn refuse_all(disk: &mut SimDisk) -> Vec<LeafPage> {
    let leaves = MapPages::of(disk).leaves;
    assert_eq!(leaves.len(), CHUNKS as usize);
    leaves.iter().for_each(|leaf| disk.spoil(leaf.offset));
    leaves
}

#[test]
fn device_that_refuses_many_pages_does_not_lose_them_one_by_one() {
    let mut disk = many_chunks(34);
    let leaves = refuse_all(&mut disk);
    let mut shard = Shard::open(disk);
    for chunk in 0..CHUNKS {
        let written = write_chunk(&mut shard, chunk, 11);
        if chunk < GIVEN_UP_MAX {
            assert_eq!(written, Ok(()));
            continue;
        }
        let errno = libc::EIO;
        let refused = written.unwrap_err();
        assert!(matches!(refused, StoreError::Unreadable { errno: e, .. } if e == errno));
        if chunk == GIVEN_UP_MAX {
            // Those that were replaced count on.
            shard.one(StoreOp::Checkpoint { clean: false }).unwrap();
        }
    }
    assert_eq!(shard.core.metrics().lost_leaves, u64::from(GIVEN_UP_MAX));
    let mut disk = closed(shard);
    leaves.iter().for_each(|leaf| disk.repair(leaf.offset));
    let mut shard = Shard::open(disk);
    for chunk in 0..CHUNKS {
        write_chunk(&mut shard, chunk, 12).unwrap();
    }
    shard.core.check(&mut shard.disk).unwrap();
}

#[test]
fn device_that_refuses_all_pages_that_the_log_touches_does_not_open() {
    let mut shard = Shard::open(many_chunks(35));
    for chunk in 0..CHUNKS {
        write_chunk(&mut shard, chunk, 11).unwrap();
    }
    shard.flush();
    let mut disk = shard.disk.crash(CrashKind::Power, 35);
    let leaves = refuse_all(&mut disk);
    let params = crate::shard::small_params();
    let error = crate::factory::open(&mut disk, &params, 1).expect_err("it is the device");
    assert!(error.contains("cannot read"), "{error}");
    // As many as may be given up are.
    let (refused, well) = leaves.split_at(GIVEN_UP_MAX as usize);
    well.iter().for_each(|leaf| disk.repair(leaf.offset));
    let (_, report) = crate::factory::open(&mut disk, &params, 2).unwrap();
    assert_eq!(report.lost_leaves as usize, refused.len());
}

#[test]
fn page_that_is_read_after_what_stood_for_it_was_evicted_has_no_bad_blocks() {
    // More map pages than the cache holds.
    let chunks = 10..120;
    let mut shard = Shard::open(stored(36));
    for chunk in chunks.clone() {
        write_chunk(&mut shard, chunk, 10).unwrap();
    }
    let mut disk = closed(shard);
    let leaf = first_leaf(&disk);
    disk.spoil(leaf.offset);
    let mut shard = Shard::open(disk);
    // A write of a part of a block needs a leaf, and changes nothing in it.
    let data = content(9);
    let part = [libc::iovec {
        iov_len: 512,
        ..crate::shard::iovec(&data)
    }];
    let refused = shard.one(crate::shard::write_op(3, 900, &part));
    assert!(refused.is_err());
    while shard.core.poll_finding().is_some() {}
    shard.disk.repair(leaf.offset);
    for chunk in chunks {
        let mut found = [0; BLOCK_BYTES];
        let iovecs = [crate::shard::iovec_mut(&mut found)];
        let read = shard.one(StoreOp::Read {
            layers: &[LAYER],
            chunk,
            offset: 0,
            iovecs: &iovecs,
        });
        read.unwrap();
        assert_eq!(found, content(chunk));
    }
    assert_eq!(shard.read(3), content(3));
    assert_eq!(healed(&mut shard), (0..LEAF).collect::<Vec<_>>());
    assert_eq!(shard.scrub(), []);
    shard.core.check(&mut shard.disk).unwrap();
}
