//! A data thread allocates nothing per request in steady state.
//!
//! The store grows a list now and then (a batch larger than any before, a new chunk's record): that is
//! allowed once in a hundred requests, and not on the way of a request through client and replica.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::path::Path;

use fabric::{DeviceConfig, Fabric, FabricConfig, FabricEngine, Missing, StoreKind, VolumeHandle};
use fabric_replication::volume::{Durability, OnFull, VolumeParams};
use fabric_store::file::Allocation;
use fabric_types::ids::LayerId;
use fabric_types::io::{Engine, Op, Request, Submit, Tag};
use fabric_types::{Epoch, Generation};
use rustix::event::{PollFd, PollFlags, poll};

#[path = "common/single_node.rs"]
mod single_node;

thread_local! {
    /// Allocations of this thread: the tests' other threads do not count.
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

struct Counting;

// SAFETY: everything is passed on to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // A thread that is ending has no counter any more.
        let _ = ALLOCATIONS.try_with(|n| n.set(n.get() + 1));
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const DEPTH: usize = 32;
const VOLUME_BYTES: u64 = 64 << 20;

fn open(store: StoreKind) -> (Fabric, VolumeHandle) {
    let mut config = FabricConfig::new(single_node::NODE, single_node::INCARNATION, [1; 16], store);
    config.scrub.enabled = false;
    let fabric = single_node::open(config);
    let params = VolumeParams {
        layer: LayerId(1),
        size_bytes: VOLUME_BYTES,
        generation: Generation(1),
        epoch: Epoch(1),
        read_only: false,
        durability: Durability::Flush,
        on_full: OnFull::default(),
    };
    let volume = fabric.open_volume(&params).unwrap();
    single_node::wait_until_served(&volume);
    (fabric, volume)
}

fn file_store(path: &Path) -> StoreKind {
    StoreKind::Devices(vec![DeviceConfig {
        path: path.to_owned(),
        missing: Missing::CreateFile {
            size_bytes: 512 << 20,
            allocation: Allocation::Sparse,
        },
    }])
}

/// Keeps `DEPTH` random requests in flight, a few flushes and discards among them.
fn run(
    engine: &mut FabricEngine,
    volume: &VolumeHandle,
    memory: &mut [[u8; 4096]],
    requests: usize,
) {
    let mut idle = [0usize; DEPTH];
    (0..DEPTH).for_each(|n| idle[n] = n);
    let mut idle_count = DEPTH;
    let (mut started, mut random) = (0, 1u64);
    while started < requests || engine.in_flight() > 0 {
        while idle_count > 0 && started < requests {
            let slot = idle[idle_count - 1];
            random = random.wrapping_mul(6364136223846793005).wrapping_add(1);
            let offset = (random >> 33) % (VOLUME_BYTES / 4096) * 4096;
            let (op, len) = match started % 100 {
                98 => (Op::Flush, 0),
                99 => (Op::Discard, 4096),
                n if n % 2 == 0 => (Op::Read, 4096),
                _ => (Op::Write { fua: false }, 4096),
            };
            let list = [libc::iovec {
                iov_base: memory[slot].as_mut_ptr().cast(),
                iov_len: 4096,
            }];
            let data = matches!(op, Op::Read | Op::Write { .. });
            let request = Request {
                tag: Tag(slot as u64),
                op,
                offset: if op == Op::Flush { 0 } else { offset },
                len,
                buffers: if data { &list } else { &[] },
            };
            // SAFETY: the memory outlives this call, which waits for all completions.
            match unsafe { engine.submit(volume, &request) } {
                Submit::Done(result) => result.unwrap(),
                Submit::Pending => idle_count -= 1,
                Submit::Busy => break,
            }
            started += 1;
        }
        engine.kick();
        let done = engine.reap(&mut |tag, result| {
            result.unwrap();
            idle[idle_count] = tag.0 as usize;
            idle_count += 1;
        });
        if done == 0 && engine.in_flight() > 0 {
            let fd = engine.wait_fd();
            poll(&mut [PollFd::new(&fd, PollFlags::IN)], None).unwrap();
        }
    }
}

fn allocations_of(store: StoreKind, requests: usize) -> u64 {
    let (fabric, volume) = open(store);
    let mut engine = fabric.engine().unwrap();
    let mut memory = vec![[1u8; 4096]; DEPTH];
    // Tables reach their size, chunks and map pages come into being.
    run(&mut engine, &volume, &mut memory, requests);
    let before = ALLOCATIONS.get();
    run(&mut engine, &volume, &mut memory, requests);
    ALLOCATIONS.get() - before
}

#[test]
fn the_client_and_replica_machines_allocate_nothing_per_request() {
    assert_eq!(allocations_of(StoreKind::Null, 100_000), 0);
}

#[test]
fn a_data_thread_on_a_file_allocates_only_to_grow() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let requests = 20_000;
    let allocations = allocations_of(file_store(&dir.path().join("device")), requests);
    assert!(
        allocations < requests as u64 / 100,
        "{allocations} in {requests} requests"
    );
}
