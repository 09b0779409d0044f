//! The driver of the `blkio` crate: a whole virtio-blk front end that we did not write.

use blkio::{Blkio, Completion, ReqFlags};
use fabric_testing::OpKind;

use super::support::*;

const REGION_BYTES: usize = 1 << 20;
const DEPTH: usize = 32;

fn finish(queue: &mut blkio::Blkioq, count: usize) {
    // SAFETY: completions are plain numbers and a pointer that may be null; `do_io` fills them.
    let mut done: Vec<Completion> = (0..count).map(|_| unsafe { std::mem::zeroed() }).collect();
    // SAFETY: the same memory, given as uninitialised for the call to fill.
    let room = unsafe {
        &mut *(std::ptr::from_mut(done.as_mut_slice())
            as *mut [std::mem::MaybeUninit<Completion>])
    };
    let got = queue.do_io(room, count, None, None).unwrap();
    assert_eq!(got, count);
    assert!(done.iter().all(|completion| completion.ret == 0));
}

#[test]
fn another_driver_reads_what_it_wrote() {
    let bench = Bench::new();
    let mut driver = Blkio::new("virtio-blk-vhost-user").unwrap();
    driver
        .set_str("path", bench.path.to_str().unwrap())
        .unwrap();
    driver.connect().unwrap();
    assert_eq!(driver.get_u64("capacity").unwrap(), DISK_BYTES);
    driver.set_i32("num-queues", 1).unwrap();
    let mut queue = driver.start().unwrap().queues.remove(0);
    let region = driver.alloc_mem_region(REGION_BYTES).unwrap();
    driver.map_mem_region(&region).unwrap();
    // SAFETY: the region was allocated with this length and lives until the end of the test.
    let memory = unsafe { std::slice::from_raw_parts_mut(region.addr as *mut u8, REGION_BYTES) };

    for turn in 0..4_u8 {
        for at in 0..DEPTH {
            memory[at * 4096..][..4096].fill(turn * 40 + at as u8 + 1);
            let from = memory[at * 4096..].as_ptr();
            queue.write((at * 4096) as u64, from, 4096, at, ReqFlags::empty());
        }
        finish(&mut queue, DEPTH);
        queue.flush(0, ReqFlags::empty());
        finish(&mut queue, 1);
        let far = DEPTH * 4096;
        for at in 0..DEPTH {
            let to = memory[far + at * 4096..].as_mut_ptr();
            queue.read((at * 4096) as u64, to, 4096, at, ReqFlags::empty());
        }
        finish(&mut queue, DEPTH);
        let (written, read) = memory.split_at(far);
        assert_eq!(written, &read[..far]);
        assert_eq!(bench.volume.peek(0, far), written);
    }
    queue.discard(0, 4096, 0, ReqFlags::empty());
    queue.write_zeroes(4096, 4096, 0, ReqFlags::empty());
    finish(&mut queue, 2);
    assert_eq!(bench.volume.peek(4096, 4096), [0; 4096]);
    assert_eq!(bench.volume.done(OpKind::Discard), 1);
    drop((queue, driver));
    bench.wait_for("disconnected", |state| !state.connected);
    bench.assert_serves();
}
