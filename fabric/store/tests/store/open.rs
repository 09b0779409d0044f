//! What opening asks of the device.

use fabric_store::api::{CoreParams, StoreOp};
use fabric_store::device::SyncDevice;
use fabric_store::format::{is_sealed, seal};
use fabric_types::block::BLOCK_BYTES;

use crate::factory;
use crate::model::{PLAIN, Range};
use crate::rig::{Moment, Rig};
use crate::seeds::for_each_seed;
use crate::shard::{Shard, small_params};
use crate::sim_disk::{CrashKind, IoKind, SimDisk};

/// A device whose log windows have several regions.
const DISK: u64 = 200 << 20;
/// Map pages that the log changes.
const LEAVES: u32 = 120;
/// Reads that opening makes before it knows where anything is: the label and four superblocks.
const FIXED_READS: u64 = 5;

fn write_blocks(rig: &mut Rig, block: u32) {
    for leaf in 0..LEAVES {
        let range = Range::blocks(PLAIN, leaf / 4, leaf % 4 * 256 + block, 1);
        rig.write(range, false);
        while rig.in_flight() > 20 {
            rig.step();
        }
    }
    rig.drain();
}

/// A store with map pages on the device and a log that changes them all.
fn crashed(seed: u64) -> Moment {
    // A cache that is not half dirty by then: no checkpoint ends the log.
    let params = CoreParams {
        leaf_cache_bytes: 4 * u64::from(LEAVES) * 4096,
        ..small_params()
    };
    let mut rig = Rig::create(DISK, 1, params, seed);
    write_blocks(&mut rig, 0);
    rig.checkpoint();
    rig.drain();
    for block in 1..4 {
        write_blocks(&mut rig, block * 2);
    }
    rig.crash(CrashKind::Process, seed)
}

#[test]
fn neighbours_are_read_together() {
    for_each_seed(1, |seed| {
        let found = crashed(seed);
        let before = found.disk.counts().of(IoKind::Read);
        let rig = found.open(seed).expect("opens");
        let reads = rig.now.disk.counts().of(IoKind::Read) - before;
        assert!(rig.report.blocks >= u64::from(LEAVES), "{}", rig.report);
        assert!(
            reads < u64::from(LEAVES) / 4,
            "{reads} reads for {} log blocks and {LEAVES} map pages",
            rig.report.blocks
        );
    });
}

#[test]
fn a_sector_that_cannot_be_read_matters_only_to_who_needs_it() {
    for_each_seed(1, |seed| {
        let found = crashed(seed);
        let before = found.disk.counts().of(IoKind::Read);
        let rig = found.clone().open(seed).expect("opens");
        let reads = rig.now.disk.counts().of(IoKind::Read) - before;
        assert!(reads > FIXED_READS);
        let mut rebuilt = 0;
        for nth in FIXED_READS..reads {
            let mut once = found.clone();
            once.disk.fail(IoKind::Read, nth, libc::EIO);
            let opened = once.open(seed);
            let mut rig = opened.unwrap_or_else(|e| panic!("read {nth} failed once: {e}"));
            rig.check_last_state();
            let mut twice = found.clone();
            twice.disk.fail(IoKind::Read, nth, libc::EIO);
            twice.disk.fail(IoKind::Read, nth + 1, libc::EIO);
            match twice.open(seed) {
                Err(error) => assert!(error.contains("cannot read"), "{error}"),
                // What it says stands elsewhere, too, or it is a map page, which is read once more.
                Ok(mut rig) => {
                    assert_eq!(rig.report.lost_leaves, 0, "read {nth} failed twice");
                    rebuilt += rig.report.rebuilt_shards;
                    rig.check_last_state();
                }
            }
        }
        assert!(rebuilt > 0);
    });
}

/// Makes a device one of another version: labels and superblocks say so.
fn of_version(shard: &Shard, version: u32) -> SimDisk {
    let mut disk = shard.disk.crash(CrashKind::Process, 1);
    let mut changed = 0;
    for unit in disk.written_blocks() {
        let (mut page, offset) = ([0; BLOCK_BYTES], unit * BLOCK_BYTES as u64);
        disk.peek(offset, &mut page);
        if is_sealed(&page)
            && [b"PENSTOCK", b"PENSTKSB"].contains(&page[..8].first_chunk().unwrap())
        {
            page[8..12].copy_from_slice(&version.to_le_bytes());
            seal(&mut page);
            disk.write_at(offset, &page).unwrap();
            changed += 1;
        }
    }
    assert!(changed >= 4, "two labels, one superblock twice");
    disk
}

#[test]
fn device_of_the_previous_version_opens_and_a_newer_is_refused() {
    let mut shard = Shard::new(9);
    let content = [0x5a; BLOCK_BYTES];
    shard.write(7, 3, &content);
    shard.one(StoreOp::Checkpoint { clean: true }).unwrap();
    let mut older = Shard::open(of_version(&shard, 1));
    assert!(older.read(7) == content);
    older.write(8, 4, &content);
    // A program that knows only that version would take the superblock before for the newest.
    let mut label = [0; BLOCK_BYTES];
    older.disk.peek(0, &mut label);
    assert_eq!(label[8..12], 2u32.to_le_bytes());
    let newer = factory::open(&mut of_version(&shard, 3), &small_params(), 1);
    let Err(refusal) = newer else {
        panic!("it was opened")
    };
    assert!(refusal.contains("version 3"), "{refusal}");
}
