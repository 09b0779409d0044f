//! What guests see.

use fabric_types::io::{Engine, IoError, Op, Request, Submit, Tag, Volume};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::rig::{Guest, MIB, Rig, params, wait};

#[test]
fn data_survive_a_clean_close_and_a_crash() {
    let rig = Rig::new(256 * MIB);
    let mut generation = 0;
    for clean in [true, false, true] {
        generation += 1;
        let fabric = rig.open();
        let mut guest = Guest::open(&fabric, 1, generation, 64 * MIB);
        if generation > 1 {
            assert!(
                guest
                    .read_vec(MIB, 8192)
                    .iter()
                    .all(|&b| u64::from(b) == generation - 1)
            );
            assert!(
                guest
                    .read_vec(9 * MIB, 512)
                    .iter()
                    .all(|&b| u64::from(b) == generation - 1)
            );
        }
        guest.write(MIB, &[generation as u8; 8192]).unwrap();
        guest.write(9 * MIB, &[generation as u8; 512]).unwrap();
        guest.flush().unwrap();
        drop(guest);
        if clean {
            fabric.close().unwrap();
        }
        drop(fabric);
        let report = rig.open().devices()[0].report;
        assert_eq!(report.clean_shards == report.shards, clean, "{report}");
    }
}

#[test]
fn unaligned_buffers_sectors_and_chunk_boundaries() {
    let rig = Rig::new(256 * MIB);
    let fabric = rig.open();
    let mut guest = Guest::open(&fabric, 1, 1, 64 * MIB);
    let mut rng = ChaCha8Rng::seed_from_u64(3);
    let mut model = vec![0u8; 12 << 20];
    for _ in 0..300 {
        // Half of the requests near a chunk boundary, at any sector, from any address.
        let base = if rng.random() {
            4 * MIB
        } else {
            rng.random_range(1..8) * MIB
        };
        let offset = base - 512 * rng.random_range(0..64);
        let len = 512 * rng.random_range(1..200usize);
        let shift = rng.random_range(0..16usize);
        let range = offset as usize..offset as usize + len;
        if rng.random() {
            let mut bytes = vec![0u8; len + shift];
            rng.fill(&mut bytes[..]);
            guest.write(offset, &bytes[shift..]).unwrap();
            model[range].copy_from_slice(&bytes[shift..]);
        } else if rng.random_ratio(1, 4) {
            guest.discard(offset, len as u64).unwrap();
            model[range].fill(0);
        } else {
            let mut bytes = vec![0u8; len + shift];
            guest.read(offset, &mut bytes[shift..]).unwrap();
            assert!(bytes[shift..] == model[range]);
        }
    }
    assert!(guest.read_vec(0, 12 << 20) == model);
}

#[test]
fn one_mebibyte_in_256_segments_goes_both_ways() {
    let rig = Rig::new(256 * MIB);
    let fabric = rig.open();
    let mut guest = Guest::open(&fabric, 1, 1, 64 * MIB);
    let mut pages: Vec<Vec<u8>> = (0..256).map(|n| vec![n as u8; 4096]).collect();
    let mut list: Vec<_> = pages
        .iter_mut()
        .map(|p| libc::iovec {
            iov_base: p.as_mut_ptr().cast(),
            iov_len: p.len(),
        })
        .collect();
    let offset = 4 * MIB - 100 * 4096;
    guest
        .run(Op::Write { fua: true }, offset, MIB, &list)
        .unwrap();
    list.reverse();
    guest.run(Op::Read, offset, MIB, &list).unwrap();
    for (n, page) in pages.iter().enumerate() {
        assert!(page.iter().all(|&b| usize::from(b) == 255 - n));
    }
}

#[test]
fn full_store_answers_no_space_and_recovers_when_space_is_freed() {
    let rig = Rig::new(128 * MIB);
    let fabric = rig.open();
    let mut guest = Guest::open(&fabric, 1, 1, 1024 * MIB);
    let data = vec![0x33; MIB as usize];
    let mut written = 0;
    let error = loop {
        match guest.write(written, &data) {
            Ok(()) => written += MIB,
            Err(error) => break error,
        }
    };
    assert_eq!(error, IoError::NoSpace);
    assert!(written > 64 * MIB, "{written}");
    assert!(
        guest
            .read_vec(written - MIB, 4096)
            .iter()
            .all(|&b| b == 0x33)
    );
    guest.discard(0, written / 2).unwrap();
    for offset in (0..written / 4).step_by(MIB as usize) {
        guest.write(offset, &data).unwrap();
    }
    guest.flush().unwrap();
    drop(guest);
    fabric.close().unwrap();
    drop(fabric);
    let fabric = rig.open();
    let mut guest = Guest::open(&fabric, 1, 2, 1024 * MIB);
    assert!(guest.read_vec(0, 4096).iter().all(|&b| b == 0x33));
    assert!(
        guest
            .read_vec(written / 2 - MIB, 4096)
            .iter()
            .all(|&b| b == 0)
    );
    assert!(
        guest
            .read_vec(written - MIB, 4096)
            .iter()
            .all(|&b| b == 0x33)
    );
}

#[test]
fn volume_shrinks_and_grows_and_the_cut_range_reads_as_zeroes() {
    let rig = Rig::new(256 * MIB);
    let fabric = rig.open();
    let mut guest = Guest::open(&fabric, 1, 1, 16 * MIB);
    guest.write(0, &vec![5; 16 << 20]).unwrap();
    fabric.checkpoint().unwrap();
    let before = fabric.devices()[0].used_bytes;
    fabric.resize_volume(&guest.volume, 8 * MIB).unwrap();
    assert_eq!(guest.volume.size_bytes(), 8 * MIB);
    assert_eq!(guest.write(8 * MIB, &[1; 512]), Err(IoError::OutOfRange));
    fabric.resize_volume(&guest.volume, 32 * MIB).unwrap();
    assert!(guest.read_vec(8 * MIB, 24 << 20).iter().all(|&b| b == 0));
    assert!(guest.read_vec(0, 8 << 20).iter().all(|&b| b == 5));
    fabric.checkpoint().unwrap();
    let freed = before.saturating_sub(fabric.devices()[0].used_bytes);
    assert!(freed > 6 * MIB, "{freed}");
}

#[test]
fn discarded_space_shows_at_once_and_is_freed_without_a_write() {
    /// Looks before the space counts as never freed; 10 ms lie between them.
    const LOOKS: u32 = 6000;
    let rig = Rig::new(256 * MIB);
    let fabric = rig.open();
    let mut guest = Guest::open(&fabric, 1, 1, 64 * MIB);
    let empty = fabric.devices()[0].used_bytes;
    guest.write(0, &vec![5; 16 << 20]).unwrap();
    assert!(fabric.devices()[0].used_bytes >= empty + 16 * MIB);
    guest.discard(0, 16 * MIB).unwrap();
    let used = fabric.devices()[0].used_bytes;
    assert!(used < empty + MIB, "{used} of {empty}");
    for _ in 0..LOOKS {
        if fabric.devices()[0].shards[0].quarantined_units == 0 {
            return;
        }
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    panic!("an idle store keeps what was discarded");
}

#[test]
fn import_and_export_in_large_blocks() {
    let rig = Rig::new(256 * MIB);
    let fabric = rig.open();
    let volume = fabric.open_volume(&params(1, 1, 64 * MIB)).unwrap();
    let mut io = fabric.volume_io(&volume).unwrap();
    let mut image = vec![0u8; 20 << 20];
    ChaCha8Rng::seed_from_u64(1).fill(&mut image[..]);
    io.write_at(3 * MIB, &image).unwrap();
    io.zero(5 * MIB, MIB).unwrap();
    image[2 << 20..3 << 20].fill(0);
    io.flush().unwrap();
    let mut back = vec![1u8; 20 << 20];
    io.read_at(3 * MIB, &mut back).unwrap();
    assert!(back == image);
    assert_eq!(io.read_at(60 * MIB, &mut back), Err(IoError::OutOfRange));
    assert_eq!(volume.counters().errors, 1);
}

/// Every thread writes blocks of its own and checks them against its model, and all write the same few
/// blocks, which must always be one writer's whole block.
#[test]
fn blocking_io_moves_between_threads() {
    let rig = Rig::new(256 * MIB);
    let fabric = rig.open();
    let volume = fabric.open_volume(&params(1, 1, 16 * MIB)).unwrap();
    let mut io = fabric.volume_io(&volume).unwrap();
    io.write_at(0, &[1; 4096]).expect("the first thread writes");
    // As a runtime's pool of blocking threads does with one import after another block.
    let mut io = std::thread::spawn(move || {
        io.write_at(4096, &[2; 4096])
            .expect("the second thread writes");
        io.flush().expect("the second thread flushes");
        io
    })
    .join()
    .expect("the second thread ends");
    let mut back = [0; 8192];
    io.read_at(0, &mut back).expect("the first thread reads");
    assert!(back[..4096].iter().all(|&b| b == 1) && back[4096..].iter().all(|&b| b == 2));
}

#[test]
fn four_threads_on_a_volume_see_own_writes_and_never_a_mix() {
    const THREADS: u64 = 4;
    const OWN_BLOCKS: u64 = 400;
    const ROUNDS: usize = 1500;
    let rig = Rig::new(512 * MIB);
    let fabric = rig.open();
    let volume = fabric.open_volume(&params(1, 1, 64 * MIB)).unwrap();
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let mut guest = Guest::new(&fabric, &volume);
            scope.spawn(move || {
                let mut rng = ChaCha8Rng::seed_from_u64(thread);
                let mut model = [0u8; OWN_BLOCKS as usize];
                for round in 0..ROUNDS {
                    let own = rng.random_range(0..OWN_BLOCKS);
                    // Threads' blocks lie side by side: they share chunks, map pages and log batches.
                    let offset = 4096 * (64 + own * THREADS + thread);
                    let stamp = (round % 251 + 1) as u8;
                    match rng.random_range(0..10) {
                        0..5 => {
                            guest.write(offset, &[stamp; 4096]).unwrap();
                            model[own as usize] = stamp;
                        }
                        5..8 => {
                            let expected = model[own as usize];
                            assert!(guest.read_vec(offset, 4096).iter().all(|&b| b == expected));
                        }
                        8 => guest
                            .write(4096 * rng.random_range(0..4u64), &[stamp; 4096])
                            .unwrap(),
                        _ => {
                            let block = guest.read_vec(4096 * rng.random_range(0..4u64), 4096);
                            assert!(block.iter().all(|&b| b == block[0]), "two writers mixed");
                        }
                    }
                }
                guest.flush().unwrap();
            });
        }
    });
    let counters = volume.counters();
    let total = counters.reads + counters.writes + counters.flushes;
    assert_eq!(total, THREADS * (ROUNDS as u64 + 1));
    assert_eq!(counters.errors, 0);
}

#[test]
fn many_requests_in_flight_all_come_back_once() {
    let rig = Rig::new(512 * MIB);
    let fabric = rig.open();
    let mut guest = Guest::open(&fabric, 1, 1, 64 * MIB);
    let mut pages: Vec<Vec<u8>> = (0..2000).map(|n| vec![(n % 255) as u8; 4096]).collect();
    for op in [Op::Write { fua: false }, Op::Read] {
        let mut returned = vec![0u32; pages.len()];
        let mut started = 0;
        while returned.contains(&0) {
            while started < pages.len() {
                let page = &mut pages[started];
                let buffers = [libc::iovec {
                    iov_base: page.as_mut_ptr().cast(),
                    iov_len: 4096,
                }];
                let request = Request {
                    tag: Tag(started as u64),
                    op,
                    offset: 4096 * started as u64,
                    len: 4096,
                    buffers: &buffers,
                };
                // SAFETY: the pages outlive the loop, which waits for all completions.
                match unsafe { guest.engine.submit(&guest.volume, &request) } {
                    Submit::Pending => started += 1,
                    Submit::Busy => break,
                    Submit::Done(result) => panic!("{result:?}"),
                }
            }
            guest.engine.kick();
            let done = guest.engine.reap(&mut |tag, result| {
                result.unwrap();
                returned[tag.0 as usize] += 1;
            });
            if done == 0 && returned.contains(&0) {
                wait(&guest.engine);
            }
        }
        assert!(returned.iter().all(|&n| n == 1));
        if op == Op::Read {
            for (n, page) in pages.iter().enumerate() {
                assert!(page.iter().all(|&b| usize::from(b) == n % 255), "page {n}");
            }
        } else {
            pages.iter_mut().for_each(|page| page.fill(0xff));
        }
    }
}

#[test]
fn write_queued_behind_an_idle_threads_write_still_completes() {
    /// Looks at both engines before the write counts as lost; each takes a millisecond.
    const LOOKS: u32 = 10_000;
    let rig = Rig::new(512 * MIB);
    let fabric = rig.open();
    let volume = fabric.open_volume(&params(1, 1, 64 * MIB)).unwrap();
    let mut guests = [Guest::new(&fabric, &volume), Guest::new(&fabric, &volume)];
    let mut pages = [[1u8; 4096], [2u8; 4096]];
    let mut done = [false, false];
    for (guest, page) in guests.iter_mut().zip(&mut pages) {
        let buffers = [libc::iovec {
            iov_base: page.as_mut_ptr().cast(),
            iov_len: page.len(),
        }];
        let request = Request {
            tag: Tag(1),
            op: Op::Write { fua: false },
            offset: 0,
            len: 4096,
            buffers: &buffers,
        };
        // SAFETY: the pages outlive both requests, which end below or with the engines.
        let submitted = unsafe { guest.engine.submit(&guest.volume, &request) };
        assert_eq!(submitted, Submit::Pending);
        guest.engine.kick();
    }
    for _ in 0..LOOKS {
        for (guest, done) in guests.iter_mut().zip(&mut done) {
            if guest.engine.must_reap() {
                guest.engine.reap(&mut |_, result| *done = result.is_ok());
            }
        }
        if done == [true, true] {
            return;
        }
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    panic!("writes that ended: {done:?}");
}

#[test]
fn a_discard_of_many_chunks_ends_with_one_kick() {
    const CHUNKS: u64 = 300;
    let rig = Rig::new(512 * MIB);
    let fabric = rig.open();
    let mut guest = Guest::open(&fabric, 1, 1, CHUNKS * 4 * MIB);
    for chunk in (0..CHUNKS).step_by(7) {
        guest.write(chunk * 4 * MIB, &[7; 4096]).unwrap();
    }
    guest.discard(0, CHUNKS * 4 * MIB).unwrap();
    for chunk in (0..CHUNKS).step_by(7) {
        assert_eq!(guest.read_vec(chunk * 4 * MIB, 4096), [0; 4096]);
    }
}
