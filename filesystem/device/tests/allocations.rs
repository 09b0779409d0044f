//! The device allocates nothing once it runs: counted with an allocator of our own, so this test has a binary
//! alone.

use std::alloc::{GlobalAlloc, Layout, System};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use fabric_types::io::Tag;
use fs_device::testing::{FsGuest, options};
use fs_device::{Filesystem, FsRequest, Reply, Service, Submit};
use fuse_codec::wire::{self, OutHeader};
use fuse_codec::{Agreed, Attr, DeviceNumber, Kind, NodeId, Opcode, Operation, Timestamp};
use vhost_backend::memory::GuestAddr;
use vhost_backend::testing::{FakeQueue, QueueOptions};
use zerocopy::{FromBytes, IntoBytes};

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

/// Requests that the service holds at a time.
const HELD_MAX: usize = 6;
/// Requests of one round; each has three descriptors.
const SLOTS: u16 = 16;
/// Bytes of the data of each second request.
const DATA_BYTES: u32 = 4096;

struct Nothing;

impl Filesystem for Nothing {
    fn begin_session(&self, _: &Agreed) {}

    fn end_session(&self) {}
}

/// Answers GETATTR at once, or later if it has room, and READ later.
struct HalfDeferred {
    held: Vec<(Tag, Reply<'static>)>,
    count: usize,
    wait: OwnedFd,
}

fn attr() -> Attr {
    let time = Timestamp::default();
    Attr {
        ino: 1,
        kind: Kind::Directory,
        permissions: 0o755,
        nlink: 2,
        uid: 0,
        gid: 0,
        rdev: DeviceNumber::default(),
        size: 0,
        allocated_bytes: 0,
        atime: time,
        mtime: time,
        ctime: time,
        btime: None,
        block_bytes: 4096,
    }
}

impl HalfDeferred {
    fn new() -> io::Result<Self> {
        Ok(Self {
            held: Vec::with_capacity(HELD_MAX),
            count: 0,
            wait: rustix::event::eventfd(0, rustix::event::EventfdFlags::NONBLOCK)?,
        })
    }
}

impl Service for HalfDeferred {
    type Filesystem = Nothing;

    fn submit<'s>(&'s mut self, _: &Arc<Nothing>, request: &FsRequest<'_>) -> Submit<'s> {
        self.count += 1;
        let reply = match request.operation {
            Operation::Read(read) => {
                request.data.write_at(0, &[7; DATA_BYTES as usize]);
                Reply::Data(read.size)
            }
            _ => Reply::Attr(attr(), Duration::from_secs(1)),
        };
        if self.count % 3 == 0 {
            return Submit::Done(reply);
        }
        if self.held.len() == HELD_MAX {
            return Submit::Busy;
        }
        self.held.push((request.tag, reply));
        Submit::Pending
    }

    fn kick(&mut self) {
        rustix::io::write(&self.wait, &1u64.to_ne_bytes()).expect("an eventfd can be written");
    }

    fn reap(&mut self, done: &mut dyn FnMut(Tag, Reply<'_>)) -> usize {
        let count = self.held.len();
        self.held
            .drain(..)
            .for_each(|(tag, reply)| done(tag, reply));
        count
    }

    fn in_flight(&self) -> usize {
        self.held.len()
    }

    fn wait_fd(&self) -> BorrowedFd<'_> {
        self.wait.as_fd()
    }
}

/// A request of one piece, and a reply of two.
fn lay_out(guest: &mut FsGuest<HalfDeferred>, slot: u16, bytes: &[u8], body: u32) -> GuestAddr {
    let (request, header) = (guest.place(bytes), guest.place(&[0; 16]));
    let body_at = guest.place(&vec![0; body as usize]);
    let queue = &mut guest.queues[1];
    let first = slot * 3;
    queue.write_desc(first, request, bytes.len() as u32, 1, first + 1);
    queue.write_desc(first + 1, header, 16, 3, first + 2);
    queue.write_desc(first + 2, body_at, body, 2, 0);
    header
}

/// All requests, once.
fn round(queue: &mut FakeQueue) {
    (0..SLOTS).for_each(|slot| queue.offer(slot * 3));
    queue.submit();
    let mut open = SLOTS;
    while open > 0 {
        match queue.next_used() {
            Some((id, used)) => {
                let is_read = id % 2 == 1;
                assert_eq!(used, if is_read { 16 + DATA_BYTES } else { 16 + 104 });
                open -= 1;
            }
            None => std::thread::yield_now(),
        }
    }
}

#[test]
fn steady_state_allocates_nothing() {
    let rings = QueueOptions::default();
    let make = |_| HalfDeferred::new();
    let mut guest = FsGuest::new(&Arc::new(Nothing), options(1, false), rings, make);
    guest.init().expect("it can be mounted");
    let getattr = wire::GetattrIn::default();
    let getattr = guest.request(Opcode::Getattr.number(), NodeId::ROOT, getattr.as_bytes());
    let read = guest.read_request(NodeId::ROOT, 0, 0, DATA_BYTES);
    let headers: Vec<GuestAddr> = (0..SLOTS)
        .map(|slot| match slot % 2 {
            0 => lay_out(&mut guest, slot, &getattr, 104),
            _ => lay_out(&mut guest, slot, &read, DATA_BYTES),
        })
        .collect();
    (0..100).for_each(|_| round(&mut guest.queues[1]));
    let before = ALLOCATIONS.load(Ordering::Relaxed);
    (0..1000).for_each(|_| round(&mut guest.queues[1]));
    assert_eq!(
        ALLOCATIONS.load(Ordering::Relaxed) - before,
        0,
        "allocations in 16000 requests"
    );
    for at in headers {
        let header = OutHeader::read_from_bytes(&guest.guest.read(at, 16)).expect("16 bytes");
        assert_eq!(header.error.get(), 0);
    }
}
