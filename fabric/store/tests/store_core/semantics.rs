//! Versions, fences, layers, order of overlapping operations, bounds.

use fabric_store::api::{Fence, OpId, StoreCore, StoreError, StoreOp, Submitted};
use fabric_store::device::DeviceAction;
use fabric_types::ids::{LayerId, Version};

use crate::rig::{BLOCK, Rig};

const LAYER: LayerId = LayerId(7);

/// Writes one block of `byte`s with a given version.
fn write_as(
    rig: &mut Rig,
    layers: &[LayerId],
    block: u32,
    byte: u8,
    version: Version,
) -> Result<(), StoreError> {
    let memory = vec![byte; BLOCK];
    let iovecs = [libc::iovec {
        iov_base: memory.as_ptr().cast_mut().cast(),
        iov_len: BLOCK,
    }];
    let offset = block * BLOCK as u32;
    let id = rig.submit_raw(StoreOp::Write {
        layers,
        chunk: 0,
        offset,
        iovecs: &iovecs,
        version,
        fua: false,
        urgent: false,
    });
    rig.run(id)
}

fn read_chain(rig: &mut Rig, layers: &[LayerId], block: u32) -> Vec<u8> {
    let mut memory = vec![0xcc; BLOCK];
    let iovecs = [libc::iovec {
        iov_base: memory.as_mut_ptr().cast(),
        iov_len: BLOCK,
    }];
    let id = rig.submit_raw(StoreOp::Read {
        layers,
        chunk: 0,
        offset: block * BLOCK as u32,
        iovecs: &iovecs,
    });
    rig.run(id).expect("read");
    memory
}

#[test]
fn older_version_is_refused_even_after_a_discard_and_a_reopen() {
    let mut rig = Rig::new(8 << 20, 1);
    let newest = Version::new(3, 10);
    assert_eq!(write_as(&mut rig, &[LAYER], 0, 1, newest), Ok(()));
    let stale = Err(StoreError::Stale { newest });
    assert_eq!(
        write_as(&mut rig, &[LAYER], 0, 2, Version::new(3, 9)),
        stale
    );
    assert_eq!(
        write_as(&mut rig, &[LAYER], 0, 2, Version::new(2, 99)),
        stale
    );
    assert_eq!(read_chain(&mut rig, &[LAYER], 0), [1; BLOCK]);
    assert_eq!(
        write_as(&mut rig, &[LAYER], 0, 3, newest),
        Ok(()),
        "the same write again"
    );

    let newer = Version::new(3, 11);
    let zero = StoreOp::Zero {
        layers: &[LAYER],
        chunk: 0,
        offset: 0,
        len: BLOCK as u32,
        version: newer,
        fua: true,
    };
    let id = rig.submit_raw(zero);
    assert_eq!(rig.run(id), Ok(()));
    for _ in 0..2 {
        assert_eq!(
            write_as(&mut rig, &[LAYER], 0, 4, newest),
            Err(StoreError::Renumber { newest: newer })
        );
        assert_eq!(read_chain(&mut rig, &[LAYER], 0), [0; BLOCK]);
        rig.process_crash();
    }
}

#[test]
fn fence_is_durable_on_completion_and_refuses_older_generations() {
    let mut rig = Rig::new(8 << 20, 2);
    assert_eq!(
        write_as(&mut rig, &[LAYER], 0, 1, Version::new(4, 1)),
        Ok(())
    );
    let fence = Fence {
        generation: 5,
        epoch: 77,
    };
    let id = rig.submit_raw(StoreOp::SetFence {
        layer: LAYER,
        fence,
    });
    assert_eq!(rig.run(id), Ok(()));
    for round in 0..3 {
        assert_eq!(rig.core.fence(LAYER), fence);
        assert_eq!(rig.core.fence(LayerId(8)), Fence::default());
        let refused = Err(StoreError::Fenced { generation: 5 });
        assert_eq!(
            write_as(&mut rig, &[LAYER], 0, 2, Version::new(4, 2)),
            refused
        );
        assert_eq!(
            write_as(&mut rig, &[LAYER], 1, 9, Version::new(5, round)),
            Ok(())
        );
        rig.power_loss();
    }
    let lower = Fence {
        generation: 3,
        epoch: 80,
    };
    let id = rig.submit_raw(StoreOp::SetFence {
        layer: LAYER,
        fence: lower,
    });
    assert_eq!(rig.run(id), Ok(()));
    assert_eq!(
        rig.core.fence(LAYER),
        Fence {
            generation: 5,
            epoch: 80
        },
        "a fence only rises"
    );
}

#[test]
fn a_block_comes_from_the_first_layer_of_the_chain_that_maps_it() {
    let mut rig = Rig::new(12 << 20, 3);
    let chain = [LayerId(30), LayerId(20), LayerId(10)];
    let version = |n| Version::new(1, n);
    for block in 0..4 {
        write_as(&mut rig, &chain[2..], block, 10, version(1)).expect("oldest");
    }
    write_as(&mut rig, &chain[1..], 1, 20, version(2)).expect("middle");
    write_as(&mut rig, &chain, 2, 30, version(3)).expect("newest");
    let (offset, len) = (3 * BLOCK as u32, BLOCK as u32);
    let id = rig.submit_raw(StoreOp::Zero {
        layers: &chain,
        chunk: 0,
        offset,
        len,
        version: version(4),
        fua: false,
    });
    assert_eq!(rig.run(id), Ok(()));

    // Part of a block: the rest comes from below.
    let memory = [31u8; 512];
    let iovecs = [libc::iovec {
        iov_base: memory.as_ptr().cast_mut().cast(),
        iov_len: 512,
    }];
    let id = rig.submit_raw(StoreOp::Write {
        layers: &chain,
        chunk: 0,
        offset: 512,
        iovecs: &iovecs,
        version: version(5),
        fua: false,
        urgent: false,
    });
    assert_eq!(rig.run(id), Ok(()));

    for round in 0..3 {
        let first = read_chain(&mut rig, &chain, 0);
        assert_eq!(
            (first[0], first[512], first[1023], first[1024]),
            (10, 31, 31, 10),
            "round {round}"
        );
        assert_eq!(read_chain(&mut rig, &chain[1..], 0), [10; BLOCK]);
        assert_eq!(read_chain(&mut rig, &chain, 1), [20; BLOCK]);
        assert_eq!(read_chain(&mut rig, &chain, 2), [30; BLOCK]);
        assert_eq!(
            read_chain(&mut rig, &chain, 3),
            [0; BLOCK],
            "a discard hides what is below"
        );
        assert_eq!(read_chain(&mut rig, &chain[1..], 3), [10; BLOCK]);
        assert_eq!(read_chain(&mut rig, &chain, 4), [0; BLOCK]);
        if round == 0 {
            rig.process_crash()
        } else {
            rig.power_loss()
        };
    }
}

#[test]
fn a_dropped_layer_gives_all_its_space_back() {
    let mut rig = Rig::new(16 << 20, 4);
    for checkpoints in 0..2 {
        let id = rig.other(StoreOp::Checkpoint { clean: false });
        assert_eq!(rig.run(id), Ok(()));
        let before = rig.core.space().used_bytes;
        for chunk in 0..3 {
            rig.write(chunk, 0, 1024, false);
            rig.write(chunk, 7000, 64, false);
        }
        let id = rig.submit_raw(StoreOp::SetFence {
            layer: LAYER,
            fence: Fence {
                generation: 1,
                epoch: 1,
            },
        });
        assert_eq!(rig.run(id), Ok(()));
        rig.drain();
        if checkpoints == 1 {
            let id = rig.other(StoreOp::Checkpoint { clean: false });
            assert_eq!(rig.run(id), Ok(()));
        }
        let id = rig.submit_raw(StoreOp::DropLayer { layer: LAYER });
        assert_eq!(rig.run(id), Ok(()));
        rig.forget();
        for block in [0, 5, 880] {
            assert_eq!(rig.read_block((7, 1, block)), [0; BLOCK]);
        }
        // One checkpoint drops the map pages, the next the chunk records.
        for _ in 0..3 {
            let id = rig.other(StoreOp::Checkpoint { clean: false });
            assert_eq!(rig.run(id), Ok(()));
        }
        rig.drain();
        assert_eq!(rig.core.metrics().chunks, 0);
        assert_eq!(rig.core.fence(LAYER), Fence::default());
        assert!(
            rig.core.space().used_bytes <= before + 3 * BLOCK as u64,
            "a table page and its directories remain"
        );
        rig.check();
        rig.power_loss();
    }
}

/// Actions by hand: a read behind a write in flight is not even started before the write is done.
#[test]
fn a_read_that_overlaps_a_write_in_flight_waits_for_it() {
    let mut rig = Rig::new(8 << 20, 5);
    assert_eq!(
        write_as(&mut rig, &[LAYER], 0, 1, Version::new(1, 1)),
        Ok(())
    );
    let new = vec![2u8; BLOCK];
    let mut read = vec![0u8; 2 * BLOCK];
    let source = [libc::iovec {
        iov_base: new.as_ptr().cast_mut().cast(),
        iov_len: BLOCK,
    }];
    let target = [libc::iovec {
        iov_base: read.as_mut_ptr().cast(),
        iov_len: 2 * BLOCK,
    }];
    let (layers, version) = ([LAYER], Version::new(1, 2));
    let write = StoreOp::Write {
        layers: &layers,
        chunk: 0,
        offset: 0,
        iovecs: &source,
        version,
        fua: false,
        urgent: false,
    };
    let behind = StoreOp::Read {
        layers: &layers,
        chunk: 0,
        offset: 0,
        iovecs: &target,
    };
    // SAFETY: both buffers live to the end of the test.
    let accepted = unsafe {
        [
            rig.core.submit(OpId(900), write),
            rig.core.submit(OpId(901), behind),
        ]
    };
    assert_eq!(accepted, [Submitted::Accepted; 2]);
    let action = rig.core.poll_action().expect("the write");
    assert!(rig.core.poll_action().is_none(), "the read waits");
    let DeviceAction::Write { id, offset, iovecs } = action else {
        panic!("a write was expected")
    };
    rig.disk
        .write(offset, crate::disk::gather(&iovecs))
        .expect("disk works");
    assert!(rig.core.poll_completion().is_none());
    rig.core.on_device(id, Ok(()));
    assert_eq!(rig.core.poll_completion(), Some((OpId(900), Ok(()))));
    assert_eq!(rig.run(901), Ok(()));
    assert_eq!(read[..BLOCK], [2; BLOCK]);
    assert_eq!(read[BLOCK..], [0; BLOCK]);
}

#[test]
fn small_writes_of_a_turn_become_one_device_write_at_any_depth() {
    let mut rig = Rig::new(16 << 20, 6);
    for depth in [1u64, 8, 32, 64] {
        let before = rig.core.metrics();
        for i in 0..depth as u32 {
            // Scattered blocks: nothing but the log brings them together.
            rig.write(i % 2, (i * 37 % 900) * 8, 8, false);
        }
        rig.collect();
        let after = rig.core.metrics();
        assert_eq!(
            after.device_writes - before.device_writes,
            1,
            "depth {depth}"
        );
        assert_eq!(
            after.device_write_bytes - before.device_write_bytes,
            (depth + 1) * BLOCK as u64
        );
        rig.drain();
    }
}

#[test]
fn writes_go_on_during_a_checkpoint() {
    let mut rig = Rig::new(16 << 20, 7);
    for i in 0..200 {
        rig.write(i % 3, i * 40, 8, false);
    }
    rig.drain();
    let before = rig.core.metrics().checkpoints;
    let id = rig.other(StoreOp::Checkpoint { clean: false });
    let mut during = 0;
    while !rig.results.contains_key(&id) {
        let write = rig.write(during % 3, during * 24 % 8000, 8, false);
        rig.step();
        rig.step();
        rig.step();
        during += u32::from(rig.results.contains_key(&write));
        assert!(during < 10_000, "the checkpoint ends");
    }
    assert!(
        during > 2,
        "{during} writes completed while the checkpoint ran"
    );
    assert!(rig.core.metrics().checkpoints > before);
    rig.compare_all();
    rig.check();
    rig.power_loss();
    rig.compare_all();
}

#[test]
fn ram_stays_bounded_and_excess_operations_are_refused() {
    let mut rig = Rig::new(24 << 20, 8);
    let start = rig.core.metrics().ram;
    for round in 0..400u32 {
        // 150 leaves, more than twice the cache of 64.
        for i in 0..20 {
            let at = round * 20 + i;
            rig.write(at % 38, at / 38 % 4 * 2048 + at % 7 * 8, 8, false);
        }
    }
    rig.drain();
    let end = rig.core.metrics().ram;
    assert_eq!(
        (end.leaf_cache, end.buffers, end.bitmaps),
        (start.leaf_cache, start.buffers, start.bitmaps)
    );
    assert!(
        end.chunks < start.chunks + 38 * 1024,
        "chunk records cost {}",
        end.chunks - start.chunks
    );
    assert!(end.tables < start.tables + (1 << 20));
    assert!(rig.core.metrics().leaf_misses > 0);
    rig.compare_all();

    let memory = vec![1u8; BLOCK];
    let iovecs = [libc::iovec {
        iov_base: memory.as_ptr().cast_mut().cast(),
        iov_len: BLOCK,
    }];
    let mut accepted = 0;
    for i in 0..200 {
        let version = Version::new(2, i);
        let write = StoreOp::Write {
            layers: &[LAYER],
            chunk: 1,
            offset: 0,
            iovecs: &iovecs,
            version,
            fua: false,
            urgent: false,
        };
        // SAFETY: the buffer lives to the end of the test.
        accepted +=
            u32::from(unsafe { rig.core.submit(OpId(5000 + i), write) } == Submitted::Accepted);
    }
    assert_eq!(accepted, crate::rig::params().ops_max);
    rig.drain();
}

#[test]
fn nonsense_is_refused() {
    let mut rig = Rig::new(8 << 20, 9);
    let memory = vec![1u8; BLOCK];
    let iov = |len| libc::iovec {
        iov_base: memory.as_ptr().cast_mut().cast(),
        iov_len: len,
    };
    let version = Version::new(1, 1);
    let too_long = [LAYER; 17];
    let cases: [(&[LayerId], u32, usize); 6] = [
        (&[LAYER], 0, 0),
        (&[LAYER], 7, BLOCK),
        (&[LAYER], 0, 100),
        (&[LAYER], (4 << 20) - 512, 1024),
        (&[], 0, BLOCK),
        (&too_long, 0, BLOCK),
    ];
    for (layers, offset, len) in cases {
        let iovecs = [iov(len)];
        let id = rig.submit_raw(StoreOp::Read {
            layers,
            chunk: 0,
            offset,
            iovecs: &iovecs,
        });
        assert_eq!(rig.run(id), Err(StoreError::OutOfRange));
        let id = rig.submit_raw(StoreOp::Write {
            layers,
            chunk: 0,
            offset,
            iovecs: &iovecs,
            version,
            fua: false,
            urgent: false,
        });
        assert_eq!(rig.run(id), Err(StoreError::OutOfRange));
    }
}
