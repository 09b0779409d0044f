//! A map page that an opening cannot read at first, and then can: the log that was replayed meanwhile is
//! older than the page, or younger.

use super::*;
use crate::sim_disk::IoKind;

/// Chunks whose map pages a checkpoint has to write beside the one that counts, so that it takes its time.
const OTHERS: std::ops::Range<u32> = 10..40;

/// A checkpoint runs; when so many of its requests are done, block 7 is written with these, one after
/// another. Then the power goes. `None`: the checkpoint had ended before.
fn written_amid_a_checkpoint(seed: u64, requests: u32, tags: &[u32]) -> Option<SimDisk> {
    let mut shard = Shard::open(stored(seed));
    shard.write(3, 300, &content(30));
    shard.write(300, 400, &content(31));
    for chunk in OTHERS {
        refused::write_chunk(&mut shard, chunk, 300).unwrap();
    }
    // What is under way in the log holds the checkpoint up before it writes the first page.
    let slow = content(31);
    let slow = [crate::shard::iovec(&slow)];
    shard.submit(3, crate::shard::write_op(300, 401, &slow));
    while let Some(action) = shard.core.poll_action() {
        shard.disk.submit(0, action);
    }
    shard.submit(1, StoreOp::Checkpoint { clean: false });
    let contents: Vec<Block> = tags.iter().map(|tag| content(*tag)).collect();
    let iovecs: Vec<_> = contents.iter().map(|c| [crate::shard::iovec(c)]).collect();
    let (mut done, mut written, mut has_ended, mut writing) = (0, 0, false, false);
    loop {
        while let Some(action) = shard.core.poll_action() {
            shard.disk.submit(0, action);
        }
        while let Some((id, result)) = shard.core.poll_completion() {
            result.unwrap();
            has_ended |= id.0 == 1;
            writing &= id.0 != 2;
        }
        let due = requests + written as u32 * (seed as u32 % 5);
        if done >= due && written < tags.len() && !writing {
            if written == 0 && has_ended {
                return None;
            }
            let version = 500 + written as u64;
            shard.submit(2, crate::shard::write_op(7, version, &iovecs[written]));
            (written, writing) = (written + 1, true);
            continue;
        }
        match shard.disk.complete_any() {
            Some((key, result)) => {
                done += 1;
                shard.core.on_device(key.id, result);
            }
            None if has_ended && written == tags.len() && !writing => break,
            None if has_ended => done = u32::MAX / 2,
            None => assert!(shard.core.device_in_flight() == 0, "stuck"),
        }
    }
    shard.flush();
    Some(shard.disk.crash(CrashKind::Power, seed))
}

/// The unit that the first map page names for block 7.
fn named(disk: &SimDisk) -> Block {
    let mut page = [0; BLOCK_BYTES];
    disk.peek(first_leaf(disk).offset, &mut page);
    let unit = u32::from_le_bytes(page[7 * 16..][..4].try_into().unwrap());
    let mut block = [0; BLOCK_BYTES];
    let base = fabric_store::format::SHARDS_START_UNIT;
    disk.peek((base + u64::from(unit)) * BLOCK_BYTES as u64, &mut block);
    block
}

/// Opens the disk, whose reads fail from one on for a moment; whether the first map page was among them.
fn opens_with_a_stand_in(disk: &SimDisk, nth: u64, last: u32, seed: u64) -> bool {
    let mut disk = disk.clone();
    // In a piece with others, alone, and once more.
    for again in 0..3 {
        disk.fail(IoKind::Read, nth + again, libc::EIO);
    }
    let params = crate::shard::small_params();
    let Ok((mut cores, report)) = crate::factory::open(&mut disk, &params, 1) else {
        return false;
    };
    assert_eq!(report.lost_leaves, 0, "it could be read after all");
    disk.forget_faults();
    let core = cores.remove(0);
    let mut shard = Shard {
        disk,
        core,
        before_writes: None,
    };
    let stood_in = healed(&mut shard).contains(&3);
    assert_eq!(findings(&mut shard), []);
    shard.core.check(&mut shard.disk).unwrap();
    for round in 0..2 {
        for block in 400..440 {
            shard.write(block, 600 + round, &content(block));
        }
        shard.one(StoreOp::Checkpoint { clean: false }).unwrap();
        shard.core.check(&mut shard.disk).unwrap();
    }
    assert_eq!((shard.read(3), shard.read(7)), (content(30), content(last)));
    assert_eq!(shard.read(255), content(255));
    assert_no_leak(shard, seed);
    stood_in
}

#[test]
fn page_that_is_read_again_after_the_log_was_replayed_frees_only_what_is_in_use() {
    let mut seen = std::collections::BTreeSet::new();
    for tags in [&[70][..], &[70, 71]] {
        for seed in 0..150 {
            let requests = seed as u32 / 3;
            let Some(disk) = written_amid_a_checkpoint(seed, requests, tags) else {
                continue;
            };
            let last = *tags.last().unwrap();
            let (page, log) = (named(&disk), [content(70), content(71)]);
            let page = log.iter().position(|block| *block == page);
            let stood_in = (0..100).any(|nth| opens_with_a_stand_in(&disk, nth, last, seed));
            if stood_in {
                seen.insert((tags.len(), page));
            }
        }
    }
    // The page may be as it was before the log, as the log, and in between.
    let expected = [
        (1, None),
        (1, Some(0)),
        (2, None),
        (2, Some(0)),
        (2, Some(1)),
    ];
    assert_eq!(seen, expected.into());
}
