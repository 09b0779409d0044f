//! The data path allocates nothing once it runs: counted with an allocator of our own, so this test has a
//! binary alone.

use std::alloc::{GlobalAlloc, Layout, System};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use fabric_types::io::{Engine, IoResult, Request, Submit, Tag, Volume};
use vhost_backend::blk::{BlkDevice, BlkOptions};
use vhost_backend::data_thread::{PollMode, ThreadOptions, Threads};
use vhost_backend::memory::GuestAddr;
use vhost_backend::testing::{FakeGuest, FakeQueue, QueueOptions};

static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

struct Counting;

// SAFETY: passes everything on to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's promise is passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise is passed on.
        unsafe { System.dealloc(at, layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's promise is passed on.
        unsafe { System.realloc(at, layout, size) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

/// Requests the engine holds at a time.
const ENGINE_REQUESTS: usize = 16;

#[derive(Clone)]
struct Disk;

impl Volume for Disk {
    fn size_bytes(&self) -> u64 {
        1 << 30
    }
}

/// Finishes every second request at once and the others in `reap`; has no room for more than a few.
struct HalfDeferredEngine {
    pending: Vec<Tag>,
    count: usize,
    wait: OwnedFd,
}

impl Engine for HalfDeferredEngine {
    type Volume = Disk;

    unsafe fn submit(&mut self, _volume: &Disk, request: &Request<'_>) -> Submit {
        self.count += 1;
        if self.count % 2 == 0 {
            return Submit::Done(Ok(()));
        }
        if self.pending.len() == ENGINE_REQUESTS {
            return Submit::Busy;
        }
        self.pending.push(request.tag);
        Submit::Pending
    }

    fn kick(&mut self) {
        rustix::io::write(&self.wait, &1u64.to_ne_bytes()).expect("an eventfd can be written");
    }

    fn reap(&mut self, done: &mut dyn FnMut(Tag, IoResult)) -> usize {
        let count = self.pending.len();
        self.pending.drain(..).for_each(|tag| done(tag, Ok(())));
        count
    }

    fn in_flight(&self) -> usize {
        self.pending.len()
    }

    fn wait_fd(&self) -> BorrowedFd<'_> {
        self.wait.as_fd()
    }
}

/// Sixteen writes of three descriptors, offered again and again.
fn round(queue: &mut FakeQueue, is_packed: bool, [header, data, status]: [GuestAddr; 3]) {
    for slot in 0..16 {
        if is_packed {
            queue.add(&[(header, 16, false), (data, 4096, false), (status, 1, true)]);
        } else {
            queue.offer(slot * 3);
        }
    }
    queue.submit();
    let mut open = 16;
    while open > 0 {
        match queue.next_used() {
            Some((id, _)) => {
                open -= 1;
                if is_packed {
                    queue.recycle(id);
                }
            }
            None => std::thread::yield_now(),
        }
    }
    // SAFETY: one mapped byte of the fake guest.
    assert_eq!(unsafe { queue.guest().host(status, 1).read_volatile() }, 0);
}

#[test]
fn steady_state_allocates_nothing() {
    allocates_nothing(QueueOptions::default(), u32::from((1100u32 * 16) as u16));
    // Three descriptors for each, in a ring of 64: 825 whole laps, after which the wrap counters are 0.
    allocates_nothing(QueueOptions::default().packed(), 0);
}

fn allocates_nothing(queue_options: QueueOptions, base: u32) {
    let is_packed = queue_options.features & 1 << 34 != 0;
    for poll in [PollMode::default(), PollMode::Always, PollMode::Never] {
        let options = ThreadOptions {
            threads: 1,
            poll,
            pin: None,
        };
        let threads = Threads::start(&options, |_| {
            let wait = rustix::event::eventfd(0, rustix::event::EventfdFlags::NONBLOCK)?;
            Ok(HalfDeferredEngine {
                pending: Vec::with_capacity(ENGINE_REQUESTS),
                count: 0,
                wait,
            })
        })
        .expect("threads start");
        let device = BlkDevice::new(Disk, BlkOptions::default()).expect("a device");
        let guest = Arc::new(FakeGuest::new(1 << 20));
        let mut queue = FakeQueue::new(&guest, queue_options);
        let header = guest.place(&[&1u32.to_le_bytes()[..], &[0; 12]].concat());
        let (data, status) = (guest.alloc(4096, 4096), guest.place(&[9]));
        for slot in (0..16u16).filter(|_| !is_packed) {
            queue.write_desc(slot * 3, header, 16, 1, slot * 3 + 1);
            queue.write_desc(slot * 3 + 1, data, 4096, 1, slot * 3 + 2);
            queue.write_desc(slot * 3 + 2, status, 1, 2, 0);
        }
        let handle = threads
            .start_queue(&device, queue.config(0))
            .expect("a queue");
        let parts = [header, data, status];
        (0..100).for_each(|_| round(&mut queue, is_packed, parts));
        let before = ALLOCATIONS.load(Ordering::Relaxed);
        (0..1000).for_each(|_| round(&mut queue, is_packed, parts));
        assert_eq!(
            ALLOCATIONS.load(Ordering::Relaxed) - before,
            0,
            "allocations in 16000 requests, {poll:?}"
        );
        assert_eq!(handle.stop().expect("it stops"), base);
    }
}
