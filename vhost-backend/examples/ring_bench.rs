//! Measures the data thread alone: a polling driver on one processor, a data thread with an engine that does
//! nothing on another, and a ring in shared memory between them.
//!
//! ```text
//! cargo run -p vhost-backend --example ring_bench [-- --poll adaptive|always|never] [--seconds N] [--packed]
//! ```
//! Memory-bound figures change severalfold with the distance of the two processors, so the time that a cache
//! line takes from one to the other is printed before and after each figure; compare only figures with the
//! same one.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use fabric_types::io::{Engine, IoResult, Request, Submit, Tag, Volume};
use vhost_backend::blk::{BlkDevice, BlkOptions};
use vhost_backend::data_thread::{PollMode, ThreadOptions, Threads};
use vhost_backend::memory::GuestAddr;
use vhost_backend::testing::{FakeGuest, FakeQueue, QueueOptions};

/// Entries of the queue.
const QUEUE_SIZE: u16 = 512;
/// Feature bit of packed rings.
const RING_PACKED: u64 = 1 << 34;
/// Bytes of a request's header and status, packed as a simple driver has them.
const REQUEST_BYTES: u64 = 33;
/// Bytes of data per request.
const DATA_BYTES: u32 = 4096;
/// Processors of the driver and of the data thread.
const CPUS: [usize; 2] = [0, 1];

#[derive(Clone)]
struct NullVolume;

impl Volume for NullVolume {
    fn size_bytes(&self) -> u64 {
        1 << 40
    }
}

struct NullEngine(OwnedFd);

impl Engine for NullEngine {
    type Volume = NullVolume;

    unsafe fn submit(&mut self, _volume: &NullVolume, _request: &Request<'_>) -> Submit {
        Submit::Done(Ok(()))
    }

    fn kick(&mut self) {}

    fn reap(&mut self, _done: &mut dyn FnMut(Tag, IoResult)) -> usize {
        0
    }

    fn in_flight(&self) -> usize {
        0
    }

    fn wait_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// The driver: `depth` requests of three descriptors each, submitted again as soon as they are answered.
struct Driver {
    queue: FakeQueue,
    header: Vec<(GuestAddr, *mut u8)>,
    data: GuestAddr,
    sector: u64,
    /// Of a packed ring: the slot of each buffer.
    slots: Option<Vec<u16>>,
}

impl Driver {
    fn new(features: u64) -> Self {
        let guest = Arc::new(FakeGuest::new(16 << 20));
        let queue = FakeQueue::new(
            &guest,
            QueueOptions {
                size: QUEUE_SIZE,
                features,
            },
        );
        let slots = u64::from(QUEUE_SIZE / 3);
        let requests = guest.alloc(slots * REQUEST_BYTES, 64);
        let header = (0..slots)
            .map(|i| GuestAddr(requests.0 + i * REQUEST_BYTES))
            .map(|at| (at, guest.host(at, REQUEST_BYTES)))
            .collect();
        let data = guest.alloc(slots * u64::from(DATA_BYTES), 4096);
        Self {
            queue,
            header,
            data,
            sector: 0,
            slots: (features & RING_PACKED != 0).then(|| vec![0; usize::from(QUEUE_SIZE)]),
        }
    }

    fn submit(&mut self, slot: u16) {
        let (at, host) = self.header[usize::from(slot)];
        let head = slot * 3;
        self.sector = self
            .sector
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        let sector = (self.sector >> 33) & !7;
        // SAFETY: the slot has `REQUEST_BYTES` bytes of mapped memory.
        unsafe {
            host.cast::<u64>().write_unaligned(0);
            host.add(8).cast::<u64>().write_unaligned(sector);
            host.add(16).write(0xff);
        }
        let data = GuestAddr(self.data.0 + u64::from(slot) * u64::from(DATA_BYTES));
        let status = GuestAddr(at.0 + 16);
        if let Some(slots) = &mut self.slots {
            let chain = [(at, 16, false), (data, DATA_BYTES, true), (status, 1, true)];
            let id = self.queue.add(&chain);
            slots[usize::from(id)] = slot;
            return self.queue.publish();
        }
        self.queue.write_desc(head, at, 16, 1, head + 1);
        self.queue
            .write_desc(head + 1, data, DATA_BYTES, 3, head + 2);
        self.queue.write_desc(head + 2, status, 1, 2, 0);
        self.queue.offer(head);
        self.queue.publish();
    }

    fn answered(&mut self) -> Option<u16> {
        let (head, _) = self.queue.next_used()?;
        let slot = match &self.slots {
            Some(slots) => {
                self.queue.recycle(head);
                slots[usize::from(head)]
            }
            None => head / 3,
        };
        // SAFETY: as in `submit`.
        let status = unsafe { self.header[usize::from(slot)].1.add(16).read_volatile() };
        assert_eq!(status, 0, "request failed");
        Some(slot)
    }

    /// Runs for `seconds`; returns requests per second.
    fn run(&mut self, depth: u16, seconds: f64, kick: bool) -> f64 {
        for slot in 0..depth {
            self.submit(slot);
        }
        self.queue.submit();
        let (start, mut count) = (Instant::now(), 0u64);
        let limit = Duration::from_secs_f64(seconds);
        loop {
            for _ in 0..256 {
                let mut any = false;
                while let Some(slot) = self.answered() {
                    self.submit(slot);
                    count += 1;
                    any = true;
                }
                if any && kick {
                    self.queue.submit();
                }
            }
            if start.elapsed() > limit {
                break;
            }
        }
        let rate = count as f64 / start.elapsed().as_secs_f64();
        let mut open = depth;
        while open > 0 {
            self.queue.submit();
            open -= u16::from(self.answered().is_some());
        }
        rate
    }
}

fn pin(cpu: usize) {
    let mut set = rustix::thread::CpuSet::new();
    set.set(cpu);
    rustix::thread::sched_setaffinity(None, &set).expect("the machine has two processors");
}

/// Nanoseconds for a cache line to go from one processor to the other.
fn ping_pong_ns() -> f64 {
    const ROUNDS: u64 = 50_000;
    let ball = Arc::new(AtomicU64::new(0));
    let other = Arc::clone(&ball);
    let (ready, started) = std::sync::mpsc::channel();
    let thread = std::thread::spawn(move || {
        pin(CPUS[1]);
        ready.send(()).expect("the other side waits");
        for round in 0..ROUNDS {
            while other.load(Ordering::Acquire) != 2 * round + 1 {
                std::hint::spin_loop();
            }
            other.store(2 * round + 2, Ordering::Release);
        }
    });
    started.recv().expect("the thread starts");
    let mut start = Instant::now();
    for round in 0..ROUNDS {
        ball.store(2 * round + 1, Ordering::Release);
        while ball.load(Ordering::Acquire) != 2 * round + 2 {
            std::hint::spin_loop();
        }
        if round == 1000 {
            start = Instant::now();
        }
    }
    let ns = start.elapsed().as_nanos() as f64 / (2 * (ROUNDS - 1001)) as f64;
    thread.join().expect("the other side only counts");
    ns
}

fn main() {
    let args: Vec<String> = std::env::args().collect();
    let value = |name: &str| {
        args.iter()
            .position(|a| a == name)
            .and_then(|at| args.get(at + 1))
            .cloned()
    };
    let poll = match value("--poll").as_deref() {
        None | Some("always") => PollMode::Always,
        Some("adaptive") => PollMode::default(),
        Some("never") => PollMode::Never,
        Some(other) => panic!("unknown poll mode {other:?}: give adaptive, always or never"),
    };
    let seconds =
        value("--seconds").map_or(0.5, |text| text.parse().expect("--seconds takes a number"));
    pin(CPUS[0]);
    let options = ThreadOptions {
        threads: 1,
        poll,
        pin: Some(vec![CPUS[1]]),
    };
    let engine = |_| {
        Ok(NullEngine(rustix::event::eventfd(
            0,
            rustix::event::EventfdFlags::CLOEXEC,
        )?))
    };
    let threads = Threads::start(&options, engine).expect("threads start");
    let layout = match args.iter().any(|arg| arg == "--packed") {
        true => RING_PACKED,
        false => 0,
    };
    for features in [1u64 << 28, 1 << 28 | 1 << 29] {
        for depth in [1, 32, 128] {
            let device = BlkDevice::new(NullVolume, BlkOptions::default()).expect("a device");
            let mut driver = Driver::new(features | layout | 1 << 9 | 1 << 32);
            driver.queue.want_interrupt(0x8000, false);
            let config = driver.queue.config(0);
            let before = ping_pong_ns();
            let handle = threads.start_queue(&device, config).expect("a queue");
            let rate = driver.run(depth, seconds, poll != PollMode::Always);
            handle.stop().expect("it stops");
            let after = ping_pong_ns();
            println!(
                "event_idx={} depth={depth:3} {:6.3} M/s {:6.1} ns/request ping-pong {before:.0}/{after:.0} \
                 ns",
                u8::from(features & 1 << 29 != 0),
                rate / 1e6,
                1e9 / rate,
            );
        }
    }
}
