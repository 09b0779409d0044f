//! Stable reads, versions and fences.

use fabric_store::api::{Fence, LAYER_CHAIN_MAX, OpId, StoreCore, StoreError, StoreOp, Submitted};
use fabric_types::ids::{LayerId, Version};
use rand::Rng;

use crate::model::{OTHER, PLAIN, Range, Spot};
use crate::rig::{Done, Rig};
use crate::seeds::{self, for_each_seed};
use crate::sim_disk::{CrashKind, IoKind};

fn stale_or_fenced(error: &StoreError) -> bool {
    matches!(
        error,
        StoreError::Stale { .. } | StoreError::Renumber { .. } | StoreError::Fenced { .. }
    )
}

fn result_of(done: &[Done], id: OpId) -> Option<Result<(), StoreError>> {
    done.iter().find(|d| d.id == id).map(|d| d.result)
}

/// Delivers everything but the device writes.
fn turn_without_writes(rig: &mut Rig) {
    for _ in 0..50 {
        rig.pump();
        for kind in [IoKind::Read, IoKind::Flush, IoKind::Discard] {
            while let Some(outcome) = rig.now.disk.complete_kind(kind) {
                rig.deliver(outcome);
            }
        }
        rig.reap();
    }
}

#[test]
fn a_read_waits_for_the_write_that_it_overlaps() {
    for_each_seed(4, |seed| {
        let mut rig = Rig::new_small(seed);
        rig.keep_done();
        rig.write(Range::blocks(PLAIN, 0, 0, 8), false);
        rig.idle();
        let write = rig.write(Range::blocks(PLAIN, 0, 2, 4), false);
        rig.pump();
        let overlapping = rig.read(Range::blocks(PLAIN, 0, 5, 2));
        let beside = rig.read(Range::blocks(PLAIN, 0, 6, 2));
        turn_without_writes(&mut rig);
        let done = rig.take_done();
        assert_eq!(result_of(&done, overlapping), None, "the read did not wait");
        assert_eq!(
            result_of(&done, write),
            None,
            "acknowledged before the device had it"
        );
        assert_eq!(
            result_of(&done, beside),
            Some(Ok(())),
            "a read beside it waited too"
        );
        rig.drain();
        assert_eq!(result_of(&rig.take_done(), overlapping), Some(Ok(())));
        rig.check_last_state();
    });
}

#[test]
fn overlapping_writes_apply_in_version_order_in_any_io_order() {
    for_each_seed(10, |seed| {
        let mut rng = seeds::rng(seed, 0x0d);
        let mut rig = Rig::new_small(seed);
        for _ in 0..40 {
            for _ in 0..rng.random_range(2..8) {
                let sector = rng.random_range(0..40);
                let sectors = rng.random_range(1..24);
                let range = Range {
                    view: PLAIN,
                    chunk: 0,
                    sector,
                    sectors,
                };
                match rng.random_range(0..5) {
                    0 => rig.zero(range, false),
                    1 => rig.read(range),
                    _ => rig.write(range, false),
                };
                if rng.random_bool(0.4) {
                    rig.pump();
                }
            }
            while let Some(outcome) = rig.now.disk.complete_newest(IoKind::Write) {
                rig.deliver(outcome);
                rig.pump();
            }
            rig.check_last_state();
        }
    });
}

/// A write of an older version where newer content is; nothing of it may show.
fn assert_refused_as_stale(rig: &mut Rig, range: Range, version: Version) {
    let error = refusal_of(rig, range, version);
    assert!(
        matches!(error, StoreError::Stale { newest } if newest > version),
        "{error}"
    );
}

/// A write of an older version where a newer discard left nothing; nothing of it may show under this version.
fn assert_refused_for_a_newer_number(rig: &mut Rig, range: Range, version: Version) {
    let error = refusal_of(rig, range, version);
    assert!(
        matches!(error, StoreError::Renumber { newest } if newest > version),
        "{error}"
    );
}

fn refusal_of(rig: &mut Rig, range: Range, version: Version) -> StoreError {
    rig.keep_done();
    rig.take_done();
    rig.tolerate = stale_or_fenced;
    let model = rig.now.model.clone();
    let id = rig.write_version(range, false, version);
    rig.drain();
    let result = result_of(&rig.take_done(), id).expect("it is done");
    rig.now.model = model;
    rig.check_last_state();
    result.expect_err("an older write is refused")
}

#[test]
fn an_older_version_is_refused_across_checkpoints_and_restarts() {
    for_each_seed(3, |seed| {
        let range = Range::blocks(PLAIN, 0, 10, 4);
        let mut rig = Rig::new_small(seed);
        let old = rig.next_version();
        rig.write(range, false);
        rig.drain();
        assert_refused_as_stale(&mut rig, range, old);
        rig.checkpoint();
        rig.drain();
        assert_refused_as_stale(&mut rig, range, old);
        rig = rig
            .crash(CrashKind::Process, seed)
            .recover(CrashKind::Process, seed);
        assert_refused_as_stale(&mut rig, range, old);
        rig = rig.reopen(seed);
        assert_refused_as_stale(&mut rig, range, old);
    });
}

#[test]
fn a_discard_is_not_undone_by_an_older_write() {
    for_each_seed(3, |seed| {
        let range = Range::blocks(PLAIN, 0, 0, 16);
        let mut rig = Rig::new_small(seed);
        rig.write(range, false);
        let old = rig.next_version();
        rig.zero(range, true);
        rig.drain();
        assert_refused_for_a_newer_number(&mut rig, range, old);
        rig = rig
            .crash(CrashKind::Power, seed)
            .recover(CrashKind::Power, seed);
        assert_refused_for_a_newer_number(&mut rig, range, old);
        rig = rig.reopen(seed);
        assert_refused_for_a_newer_number(&mut rig, range, old);
    });
}

#[test]
fn an_older_discard_is_refused_like_an_older_write() {
    for_each_seed(3, |seed| {
        let mut rig = Rig::new_small(seed);
        rig.keep_done();
        let range = Range::blocks(PLAIN, 0, 0, 16);
        let (old, layers) = (rig.next_version(), PLAIN.layers());
        rig.write(Range::blocks(PLAIN, 0, 3, 2), false);
        rig.drain();
        let (offset, len) = (range.offset(), range.len());
        let op = StoreOp::Zero {
            layers,
            chunk: 0,
            offset,
            len,
            version: old,
            fua: false,
        };
        let result = rig.run_raw(op);
        assert!(
            matches!(result, Err(StoreError::Stale { newest }) if newest > old),
            "{result:?}"
        );
        rig.check_last_state();
    });
}

#[test]
fn older_write_to_another_part_of_a_block_is_not_skipped() {
    for_each_seed(3, |seed| {
        let mut rig = Rig::new_small(seed);
        let sector = |sector| Range {
            view: PLAIN,
            chunk: 0,
            sector,
            sectors: 1,
        };
        rig.write(sector(0), false);
        rig.drain();
        let old = rig.next_version();
        rig.write(sector(1), false);
        rig.drain();
        assert_refused_for_a_newer_number(&mut rig, sector(2), old);
        rig.check_last_state();
    });
}

#[test]
fn an_older_write_behind_a_newer_one_under_way_is_refused() {
    for_each_seed(3, |seed| {
        let mut rig = Rig::new_small(seed);
        rig.keep_done();
        rig.tolerate = stale_or_fenced;
        let old = rig.next_version();
        let range = Range::blocks(PLAIN, 0, 0, 2);
        rig.write(range, false);
        let model = rig.now.model.clone();
        let late = rig.write_version(range, false, old);
        rig.drain();
        let result = result_of(&rig.take_done(), late).expect("it is done");
        assert!(
            matches!(result, Err(StoreError::Stale { .. })),
            "{result:?}"
        );
        rig.now.model = model;
        rig.check_last_state();
    });
}

#[test]
fn a_partly_stale_write_stores_the_other_blocks() {
    for_each_seed(2, |seed| {
        let mut rig = Rig::new_small(seed);
        rig.tolerate = stale_or_fenced;
        let old = rig.next_version();
        rig.write(Range::blocks(PLAIN, 0, 5, 1), false);
        rig.drain();
        rig.write_version(Range::blocks(PLAIN, 0, 4, 3), false, old);
        rig.drain();
        let shown = |rig: &mut Rig, block| {
            rig.read_raw(
                Spot {
                    view: PLAIN,
                    chunk: 0,
                    block,
                },
                1,
            )
            .unwrap()
        };
        let blank = vec![0; 4096];
        assert_ne!(shown(&mut rig, 4), blank);
        assert_ne!(shown(&mut rig, 6), blank);
        let tag = |bytes: Vec<u8>| u32::from_le_bytes(bytes[..4].try_into().unwrap());
        assert_eq!((tag(shown(&mut rig, 4)), tag(shown(&mut rig, 5))), (2, 1));
    });
}

#[test]
fn a_fence_refuses_older_generations_and_survives_power_loss() {
    for_each_seed(3, |seed| {
        let mut rig = Rig::new_small(seed);
        let (range, layer) = (Range::blocks(PLAIN, 0, 0, 1), PLAIN.layers()[0]);
        let old = rig.next_version();
        rig.raise_fence(PLAIN);
        rig.drain();
        let fence = rig.cores()[0].fence(layer);
        assert_eq!(
            fence,
            Fence {
                generation: 1,
                epoch: 7
            }
        );
        let lower = StoreOp::SetFence {
            layer,
            fence: Fence {
                generation: 0,
                epoch: 3,
            },
        };
        assert_eq!(rig.run_raw(lower), Ok(()));
        assert_eq!(rig.cores()[0].fence(layer), fence, "a fence went down");
        let mut rig = rig
            .crash(CrashKind::Power, seed)
            .recover(CrashKind::Power, seed);
        assert_eq!(rig.cores()[0].fence(layer), fence);
        rig.tolerate = stale_or_fenced;
        rig.keep_done();
        let model = rig.now.model.clone();
        let late = rig.write_version(range, false, old);
        rig.drain();
        let refused = Err(StoreError::Fenced { generation: 1 });
        assert_eq!(result_of(&rig.take_done(), late), Some(refused));
        rig.now.model = model;
        rig.write(range, false);
        rig.write(Range::blocks(OTHER, 0, 0, 1), false);
        rig.idle();
        rig.check_last_state();
        let mut rig = rig.reopen(seed);
        assert_eq!(rig.cores()[0].fence(layer), fence);
        rig.drop_layer(PLAIN);
        assert_eq!(
            rig.cores()[0].fence(layer),
            Fence::default(),
            "a dropped layer has no fence"
        );
    });
}

#[test]
fn operations_outside_their_chunk_are_refused() {
    let mut rig = Rig::new_small(1);
    let mut memory = vec![0u8; 8192];
    let mut expect_refused = |layers: &[LayerId], offset: u32, len: usize| {
        let iovec = libc::iovec {
            iov_base: memory.as_mut_ptr().cast(),
            iov_len: len,
        };
        let iovecs = [iovec];
        let version = Version::new(0, 1);
        let ops = [
            StoreOp::Read {
                layers,
                chunk: 0,
                offset,
                iovecs: &iovecs,
            },
            StoreOp::Write {
                layers,
                chunk: 0,
                offset,
                iovecs: &iovecs,
                version,
                fua: false,
                urgent: false,
            },
            StoreOp::Zero {
                layers,
                chunk: 0,
                offset,
                len: len as u32,
                version,
                fua: false,
            },
        ];
        for op in ops {
            let core = &mut rig.cores()[0];
            // SAFETY: the memory lives until the end of the test.
            assert_eq!(unsafe { core.submit(OpId(7), op) }, Submitted::Accepted);
            assert!(core.poll_action().is_none(), "{op:?} reached the device");
            let refused = Some((OpId(7), Err(StoreError::OutOfRange)));
            assert_eq!(core.poll_completion(), refused, "{op:?}");
        }
    };
    let one = [LayerId(1)];
    expect_refused(&one, 100, 512);
    expect_refused(&one, 512, 100);
    expect_refused(&one, (4 << 20) - 512, 1024);
    expect_refused(&one, 4 << 20, 512);
    expect_refused(&one, u32::MAX - 511, 1024);
    expect_refused(&one, 0, 0);
    expect_refused(&[], 0, 512);
    expect_refused(&[LayerId(1); LAYER_CHAIN_MAX + 1], 0, 512);
}

#[test]
fn a_guest_that_changes_its_buffer_in_flight_harms_no_checksum() {
    for_each_seed(4, |seed| {
        let mut rig = Rig::new_small(seed);
        let mut memory = vec![1u8; 64 * 4096];
        let iovecs = [libc::iovec {
            iov_base: memory.as_mut_ptr().cast(),
            iov_len: memory.len(),
        }];
        let version = rig.next_version();
        let layers = PLAIN.layers();
        let op = StoreOp::Write {
            layers,
            chunk: 0,
            offset: 0,
            iovecs: &iovecs,
            version,
            fua: true,
            urgent: false,
        };
        // SAFETY: the memory lives until the end of the test.
        let submitted = unsafe { rig.cores()[0].submit(OpId(9), op) };
        assert_eq!(submitted, Submitted::Accepted);
        for turn in 0..200 {
            rig.pump();
            // SAFETY: the store only reads what it got, and nothing runs beside this thread.
            unsafe {
                iovecs[0]
                    .iov_base
                    .cast::<u8>()
                    .write_bytes(turn as u8, 64 * 4096)
            };
            let outcome = rig.now.disk.complete_any();
            outcome.into_iter().for_each(|o| rig.deliver(o));
            if let Some(done) = rig.cores()[0].poll_completion() {
                assert_eq!(done, (OpId(9), Ok(())));
                break;
            }
            assert!(turn < 199, "the write is not done");
        }
        for block in 0..64 {
            let spot = Spot {
                view: PLAIN,
                chunk: 0,
                block,
            };
            rig.read_raw(spot, 1)
                .unwrap_or_else(|e| panic!("{spot:?}: {e}"));
        }
        drop(memory);
    });
}
