//! Blocks of which nothing is known: what may take their place, and when they are reported.

use super::*;

/// A store whose log has a newer write of block 7 than its first map page, which is damaged.
fn with_a_log(seed: u64, how: Harm) -> Shard {
    let mut shard = Shard::open(stored(seed));
    shard.write(7, 500, &content(2));
    shard.flush();
    let mut disk = shard.disk.crash(CrashKind::Power, seed);
    let leaf = first_leaf(&disk);
    harm(&mut disk, &leaf, how);
    Shard::open(disk)
}

#[test]
fn late_copy_of_an_older_write_is_not_taken_for_the_newest() {
    for how in HARMS {
        let mut shard = with_a_log(21, how);
        // Of block 3 it is not known whether it was written under a newer number: somebody in the chunk was.
        let old = content(9);
        let iovecs = [crate::shard::iovec(&old)];
        let write = |version| crate::shard::write_op(3, version, &iovecs);
        let newest = Version(500);
        let refused = Err(StoreError::Renumber { newest });
        assert_eq!(shard.one(write(499)), refused);
        assert_eq!(shard.zero(3, 499), refused);
        assert!(shard.try_read(3).is_err());
        // Where it is known, all is as ever.
        let iovecs = [crate::shard::iovec(&old)];
        let stale = shard.one(crate::shard::write_op(7, 499, &iovecs));
        assert_eq!(stale, Err(StoreError::Stale { newest }));
        assert_eq!(shard.read(7), content(2));
        shard.write(3, 501, &content(4));
        shard.zero(100, 502).unwrap();
        assert_eq!(
            shard.one(write(499)),
            Err(StoreError::Stale {
                newest: Version(501)
            })
        );
        let mut shard = shard.crashed(CrashKind::Power, 21);
        assert_eq!(shard.read(3), content(4));
        assert_eq!(shard.read(100), [0; BLOCK_BYTES]);
    }
}

#[test]
fn discard_that_came_too_late_does_not_become_newer_by_a_lost_map_page() {
    for how in HARMS {
        let mut shard = Shard::open(stored(22));
        // Blocks 7 and 255 hold newer data, the others between do not.
        let refused = shard.one(StoreOp::Zero {
            layers: &[LAYER],
            chunk: CHUNK,
            offset: 3 * BLOCK_BYTES as u32,
            len: 253 * BLOCK_BYTES as u32,
            version: Version(14),
            fua: false,
        });
        assert_eq!(
            refused,
            Err(StoreError::Stale {
                newest: Version(265)
            })
        );
        shard.flush();
        assert_eq!(
            (shard.read(3), shard.read(7)),
            ([0; BLOCK_BYTES], content(7))
        );
        let mut disk = shard.disk.crash(CrashKind::Power, 22);
        let leaf = first_leaf(&disk);
        harm(&mut disk, &leaf, how);
        let mut shard = Shard::open(disk);
        assert_eq!(shard.read(3), [0; BLOCK_BYTES]);
        assert!(shard.try_read(7).is_err() && shard.try_read(255).is_err());
    }
}

#[test]
fn restoration_over_what_is_not_known_holds_though_the_page_can_be_read_again() {
    let (mut shard, leaf) = damaged(23, Harm::Spoil);
    let old = BlockStamp {
        version: 5,
        crc: fabric_types::checksum::crc32c(&content(9)),
        holds: Holds::Data as u32,
    };
    let unknown = BlockStamp::UNKNOWN;
    shard.restore(3, unknown, old, Some(&content(9))).unwrap();
    shard
        .restore(7, unknown, BlockStamp::default(), None)
        .unwrap();
    // That nobody knows a block is for good as well.
    shard.restore(255, unknown, unknown, None).unwrap();
    shard.flush();
    shard.disk.repair(leaf.offset);
    let again = [
        shard.crashed(CrashKind::Power, 23),
        Shard::open(closed(shard)),
    ];
    for mut shard in again {
        assert_eq!((shard.read(3), shard.inspect(3, 1)[0]), (content(9), old));
        assert_eq!(shard.read(7), [0; BLOCK_BYTES]);
        assert!(shard.try_read(255).is_err() && shard.inspect(255, 1)[0].is_unknown());
        assert!(
            !shard.inspect(100, 1)[0].is_unknown(),
            "its page says what it is"
        );
        shard.core.check(&mut shard.disk).unwrap();
        let shard = Shard::open(closed(shard));
        assert_no_leak(shard, 23);
    }
}

#[test]
fn who_compares_replicas_reports_what_is_not_known_once() {
    for how in HARMS {
        let (mut shard, _) = damaged(24, how);
        assert!(shard.inspect(5, 1)[0].is_unknown());
        assert_eq!(findings(&mut shard), (0..LEAF).collect::<Vec<_>>());
        shard.inspect(0, LEAF as usize);
        assert!(shard.try_read(9).is_err());
        assert_eq!(findings(&mut shard), []);
        // A leaf takes the page's place; after the next opening it is a page as any other.
        shard.write(7, 900, &content(1));
        shard.inspect(0, LEAF as usize);
        assert_eq!(findings(&mut shard), []);
        let mut shard = Shard::open(closed(shard));
        shard.inspect(0, 10);
        assert_eq!(findings(&mut shard), [0, 1, 2, 3, 4, 5, 6, 8, 9]);
        shard.inspect(0, 10);
        assert_eq!(findings(&mut shard), []);
    }
}

#[test]
fn only_what_has_changed_is_struck_from_the_findings() {
    for how in HARMS {
        let (mut shard, _) = damaged(25, how);
        assert!(shard.try_read(3).is_err());
        shard.write(7, 900, &content(1));
        shard.zero(9, 901).unwrap();
        let unknown = BlockStamp::UNKNOWN;
        // It stays as bad as it was.
        shard.restore(11, unknown, unknown, None).unwrap();
        let stamp = BlockStamp {
            version: 10,
            crc: 77,
            holds: Holds::Data as u32,
        };
        shard.restore(12, unknown, stamp, None).unwrap();
        assert_eq!(healed(&mut shard), [7, 9]);
        let left = findings(&mut shard);
        let expected: Vec<u32> = (0..LEAF).filter(|block| ![7, 9].contains(block)).collect();
        assert_eq!(left, expected);
    }
    // A block that is newer than a discard that covers it stays, and stays bad.
    let mut shard = Shard::open(stored(25));
    let offset = shard.find(&content(7));
    shard.disk.flip_bit(offset, 1);
    assert!(shard.try_read(7).is_err());
    assert!(shard.zero(7, 11).is_err());
    assert_eq!(healed(&mut shard), []);
    shard.zero(7, 300).unwrap();
    assert_eq!(healed(&mut shard), [7]);
}

/// After power loss a header of the log may be there without its data.
#[test]
fn block_is_not_given_up_for_data_that_are_torn() {
    let restored = |version| BlockStamp {
        version,
        crc: fabric_types::checksum::crc32c(&content(9)),
        holds: Holds::Data as u32,
    };
    let (mut torn, mut whole) = ([0; 2], 0);
    for seed in 0..200 {
        let is_unknown = seed % 2 == 0;
        let (mut shard, expect) = match is_unknown {
            true => (damaged(26, Harm::Flip).0, BlockStamp::UNKNOWN),
            false => {
                let mut shard = Shard::open(stored(26));
                let stamp = shard.inspect(7, 1)[0];
                (shard, stamp)
            }
        };
        // Older than what is there, as far as that is known.
        let stamp = restored(5);
        shard.restore(7, expect, stamp, Some(&content(9))).unwrap();
        let mut disk = shard.disk.crash(CrashKind::Power, seed);
        let params = crate::shard::small_params();
        let (_, report) = crate::factory::open(&mut disk.clone(), &params, 1).unwrap();
        let mut shard = Shard::open(std::mem::replace(&mut disk, SimDisk::new(1 << 20, 0)));
        let now = shard.inspect(7, 1)[0];
        match now == stamp {
            true => assert_eq!(shard.read(7), content(9)),
            false if is_unknown => {
                assert_eq!(now, expect);
                assert!(shard.try_read(7).is_err(), "it is not zeroes");
            }
            false => assert_eq!((now, shard.read(7)), (expect, content(7))),
        }
        whole += u32::from(now == stamp);
        torn[usize::from(is_unknown)] += report.torn_blocks;
        shard.core.check(&mut shard.disk).unwrap();
        if !is_unknown {
            assert_no_leak(shard, 26);
        }
    }
    assert!(torn.iter().all(|torn| *torn > 0) && whole > 0, "{torn:?}");
}

/// What the log says of a block after data that are torn came after them, whatever its version.
#[test]
fn write_after_a_torn_restoration_is_newer_than_what_that_replaced() {
    let mut seen = [0; 2];
    for seed in 0..300 {
        let mut shard = Shard::open(stored(27));
        let expect = shard.inspect(7, 1)[0];
        let old = BlockStamp {
            version: 5,
            crc: fabric_types::checksum::crc32c(&content(9)),
            holds: Holds::Data as u32,
        };
        shard.restore(7, expect, old, Some(&content(9))).unwrap();
        shard.write(7, 6, &content(8));
        let mut disk = shard.disk.crash(CrashKind::Power, seed);
        let params = crate::shard::small_params();
        let (mut cores, report) = crate::factory::open(&mut disk, &params, 1).unwrap();
        let (core, before_writes) = (cores.remove(0), None);
        let mut shard = Shard {
            disk,
            core,
            before_writes,
        };
        let found = shard.read(7);
        assert!([7, 8, 9].map(content).contains(&found), "seed {seed}");
        if report.batches == 2 && report.torn_blocks == 1 {
            // One of the two; the other decides.
            let version = shard.inspect(7, 1)[0].version;
            assert_eq!(found, content([9, 8][usize::from(version == 6)]));
            seen[usize::from(version == 6)] += 1;
        }
        shard.core.check(&mut shard.disk).unwrap();
    }
    assert!(seen.iter().all(|times| *times > 0), "{seen:?}");
}
