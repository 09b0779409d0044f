//! What our split ring and our view of guest memory save over rust-vmm's `virtio-queue` and `vm-memory`, on
//! the same ring in the same memory.
//!
//! ```text
//! cargo run -p vhost-backend --example ring_compare [-- ROUNDS]
//! ```
//! One thread is driver and device in turn: it offers 1, 32 or 128 reads of 4 KiB, and takes, parses and
//! answers them. The driver's part is the same for all and is measured alone, too. Each round runs every way
//! once, in another order each time; the medians of all rounds are printed. So the figures are of the
//! device's work without the transfer of cache lines between processors, of which our ring, which prefetches,
//! saves more.

use std::hint::black_box;
use std::sync::Arc;
use std::time::{Duration, Instant};

use fabric_types::io::Op;
use vhost_backend::blk::request::{Action, Limits, Ranges, parse};
use vhost_backend::memory::{GuestAddr, GuestMemory, MemoryView};
use vhost_backend::ring::{Chain, Ring, SplitRing, SplitRingConfig};
use vhost_backend::testing::{FakeGuest, FakeQueue, QueueOptions};
use virtio_queue::desc::split::Descriptor;
use virtio_queue::{Queue, QueueT};
use vm_memory::GuestMemoryBackend;

/// Entries of the queue.
const QUEUE_SIZE: u16 = 512;
/// Descriptors of a request: header, data, status.
const REQUEST_DESCS: u16 = 3;
const DATA_BYTES: u32 = 4096;
/// Ring events, as all drivers have them.
const EVENT_IDX: u64 = 1 << 29;
const ROUNDS: usize = 31;
/// How long one way runs in one round.
const ROUND: Duration = Duration::from_millis(10);

/// The ways to serve a ring.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    /// Nobody does: the driver alone.
    Driver,
    /// Our ring and our view of memory.
    Ours,
    /// `virtio-queue`'s ring, and our view for the buffers.
    TheirRing,
    /// `virtio-queue` and `vm-memory`.
    Theirs,
}

const WAYS: [Way; 4] = [Way::Driver, Way::Ours, Way::TheirRing, Way::Theirs];

/// Both sides of one queue.
struct Bench {
    driver: FakeQueue,
    memory: Arc<GuestMemory>,
    view: MemoryView,
    ours: SplitRing,
    theirs: Queue,
    chain: Chain,
    ranges: Ranges,
}

impl Bench {
    fn new() -> Self {
        let guest = Arc::new(FakeGuest::new(8 << 20));
        let options = QueueOptions {
            size: QUEUE_SIZE,
            features: EVENT_IDX,
        };
        let mut driver = FakeQueue::new(&guest, options);
        for slot in 0..QUEUE_SIZE / REQUEST_DESCS {
            let header = [0_u64, u64::from(slot) * 8].map(u64::to_le_bytes).concat();
            let (header, status) = (guest.place(&header), guest.place(&[0xff]));
            let data = guest.alloc(u64::from(DATA_BYTES), 4096);
            let head = slot * REQUEST_DESCS;
            driver.write_desc(head, header, 16, 1, head + 1);
            driver.write_desc(head + 1, data, DATA_BYTES, 3, head + 2);
            driver.write_desc(head + 2, status, 1, 2, 0);
        }
        let mut view = MemoryView::new(Arc::clone(guest.memory()));
        let config = SplitRingConfig {
            size: QUEUE_SIZE,
            desc: driver.desc,
            avail: driver.avail,
            used: driver.used,
            event_idx: true,
            indirect: false,
        };
        let ours = SplitRing::new(config, 0, &mut view).expect("the ring is in memory");
        Self {
            theirs: their_queue(&config, guest.memory()),
            memory: Arc::clone(guest.memory()),
            driver,
            view,
            ours,
            chain: Chain::default(),
            ranges: Ranges::default(),
        }
    }

    /// Nanoseconds per request.
    fn run(&mut self, way: Way, depth: u16) -> f64 {
        let (from, answered) = (self.driver.used_index(), self.ours.next_used());
        assert_eq!(from, answered, "all rings stand at the same place");
        let (start, mut requests) = (Instant::now(), 0_u64);
        while start.elapsed() < ROUND {
            for _ in 0..16 {
                self.offer(depth);
                match way {
                    Way::Driver => self.skip(depth),
                    Way::Ours => self.serve_ours(depth),
                    Way::TheirRing => self.serve_theirs(Self::push_by_view),
                    Way::Theirs => self.serve_theirs(Self::push_by_memory),
                }
                requests += u64::from(depth);
            }
        }
        let ns = start.elapsed().as_nanos() as f64 / requests as f64;
        self.catch_up(way);
        ns
    }

    fn offer(&mut self, depth: u16) {
        for slot in 0..depth {
            self.driver.offer(slot * REQUEST_DESCS);
        }
        self.driver.publish();
    }

    fn skip(&mut self, depth: u16) {
        let next = self.theirs.next_avail().wrapping_add(depth);
        self.theirs.set_next_avail(next);
    }

    fn serve_ours(&mut self, depth: u16) {
        let count = self.ours.available().expect("an honest driver");
        assert_eq!(count, depth);
        self.ours.prefetch(count, &mut self.view);
        for _ in 0..count {
            let id = self.ours.take().expect("an honest driver");
            let walked = self.ours.walk(id, &mut self.view, &mut self.chain);
            walked.expect("an honest driver");
            let written = self.finish();
            self.ours.answer(id, written);
        }
        self.ours.publish();
        black_box(self.ours.interrupt_due());
    }

    fn serve_theirs(&mut self, push: fn(&mut Self, &Descriptor)) {
        let memory = Arc::clone(&self.memory);
        while let Some(chain) = self.theirs.pop_descriptor_chain(&*memory) {
            let head = chain.head_index();
            self.chain.clear();
            for desc in chain {
                push(self, &desc);
            }
            let written = self.finish();
            let outcome = self.theirs.add_used(&*memory, head, written);
            outcome.expect("the ring is in memory");
        }
        let due = self.theirs.needs_notification(&*memory);
        black_box(due.expect("the ring is in memory"));
    }

    fn push_by_view(&mut self, desc: &Descriptor) {
        let host = self.view.translate(desc.addr(), u64::from(desc.len()));
        self.push(desc, host.expect("in memory"));
    }

    fn push_by_memory(&mut self, desc: &Descriptor) {
        let slice = self.memory.get_slice(desc.addr(), desc.len() as usize);
        let host = slice.expect("in memory").ptr_guard_mut().as_ptr();
        self.push(desc, host);
    }

    fn push(&mut self, desc: &Descriptor, host: *mut u8) {
        let piece = libc::iovec {
            iov_base: host.cast(),
            iov_len: desc.len() as usize,
        };
        if desc.is_write_only() {
            self.chain.writable.push(piece);
            self.chain.writable_bytes += u64::from(desc.len());
        } else {
            self.chain.readable.push(piece);
            self.chain.readable_bytes += u64::from(desc.len());
        }
    }

    /// Parses the request and writes its status; returns the bytes written.
    fn finish(&mut self) -> u32 {
        let limits = Limits {
            size_bytes: 1 << 40,
            read_only: false,
            fua: false,
        };
        let parsed = parse(&mut self.chain, &limits, &mut self.ranges);
        let (action, status) = parsed.expect("an honest driver");
        let Action::Submit(range) = action else {
            panic!("a read, and not {action:?}");
        };
        assert_eq!(range.op, Op::Read);
        black_box(&self.chain.writable);
        // SAFETY: one byte of the fake guest, translated with the chain.
        unsafe { status.write_volatile(0) };
        range.len as u32 + 1
    }

    /// Brings the rings to where the one stands that served.
    fn catch_up(&mut self, way: Way) {
        let used = self.driver.used_index();
        match way {
            Way::Driver => {
                // Answers for what nobody served.
                let next = self.theirs.next_avail();
                self.ours.set_next_available(next);
                while self.ours.next_used() != next {
                    self.ours.answer(0, 0);
                }
                self.ours.publish();
                self.theirs.set_next_used(next);
            }
            Way::Ours => {
                self.theirs.set_next_avail(used);
                self.theirs.set_next_used(used);
            }
            Way::TheirRing | Way::Theirs => {
                self.ours.set_next_available(used);
                while self.ours.next_used() != used {
                    self.ours.answer(0, 0);
                }
                self.ours.publish();
            }
        }
        self.ours.interrupt_due();
    }
}

fn their_queue(config: &SplitRingConfig, memory: &GuestMemory) -> Queue {
    let mut queue = Queue::new(config.size).expect("a power of two");
    queue
        .try_set_desc_table_address(config.desc)
        .and_then(|()| queue.try_set_avail_ring_address(config.avail))
        .and_then(|()| queue.try_set_used_ring_address(config.used))
        .expect("the parts are aligned");
    queue.set_event_idx(config.event_idx);
    queue.set_ready(true);
    assert!(queue.is_valid(memory));
    queue
}

/// Nanoseconds of one translation of a buffer, by our view and by `vm-memory`.
fn translations(bench: &mut Bench) -> [f64; 2] {
    const COUNT: u32 = 1 << 18;
    let base = bench.driver.desc.0;
    let at = |i: u32| GuestAddr(base + u64::from(i % 512) * 4096);
    let start = Instant::now();
    for i in 0..COUNT {
        black_box(bench.view.translate(black_box(at(i)), 4096));
    }
    let ours = start.elapsed();
    let start = Instant::now();
    for i in 0..COUNT {
        let slice = bench.memory.get_slice(black_box(at(i)), 4096);
        black_box(slice.map(|slice| slice.ptr_guard_mut().as_ptr()).ok());
    }
    let theirs = start.elapsed();
    [ours, theirs].map(|time| time.as_nanos() as f64 / f64::from(COUNT))
}

fn median(mut figures: Vec<f64>) -> f64 {
    figures.sort_by(f64::total_cmp);
    figures[figures.len() / 2]
}

fn main() {
    let rounds = std::env::args().nth(1);
    let rounds = rounds.map_or(ROUNDS, |text| text.parse().expect("a number of rounds"));
    let mut bench = Bench::new();
    for depth in [1, 32, 128] {
        let mut figures = WAYS.map(|_| Vec::new());
        for round in 0..rounds {
            for turn in 0..WAYS.len() {
                let way = (turn + round) % WAYS.len();
                figures[way].push(bench.run(WAYS[way], depth));
            }
        }
        let [driver, ours, their_ring, theirs] = figures.map(median);
        println!(
            "depth={depth:3} ns/request: ours {:6.1}  virtio-queue {:6.1}  with vm-memory {:6.1}  (driver \
             {driver:.1})",
            ours - driver,
            their_ring - driver,
            theirs - driver,
        );
    }
    let pairs: Vec<[f64; 2]> = (0..rounds).map(|_| translations(&mut bench)).collect();
    let [ours, theirs] = [0, 1].map(|at| median(pairs.iter().map(|pair| pair[at]).collect()));
    println!("ns/translation: view {ours:.1}  vm-memory {theirs:.1}");
}
