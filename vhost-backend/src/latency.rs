//! Latencies of requests: one histogram for each kind of request and queue. A device numbers its kinds.
//!
//! The buckets are fixed and log-linear: [`LINEAR`] of [`UNIT_NS`] each up to a microsecond, then as many in
//! every doubling. So a bucket is at most an eighth wide of what it holds, and any power of two microseconds
//! is a bound. One thread writes a queue's histograms, any may read them, and a request is counted without a
//! lock.

mod timing;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use crate::counter::add;

pub use crate::clock::Stamp;
pub use timing::Timing;

/// Nanoseconds that are told apart at least.
const UNIT_NS: u64 = 125;
/// Buckets in the first microsecond, and in each doubling after it; a power of two.
const LINEAR: usize = 8;
const LINEAR_BITS: u32 = LINEAR.trailing_zeros();
/// Doublings of a microsecond. What takes longer (67 s) is in the last bucket, which has no end.
const DOUBLINGS: usize = 26;
/// Buckets of one histogram.
const BUCKETS: usize = LINEAR * (1 + DOUBLINGS) + 1;

/// Which bucket counts a request that took so long.
#[inline]
fn bucket_of(ns: u64) -> usize {
    let units = ns / UNIT_NS;
    if units < LINEAR as u64 {
        return units as usize;
    }
    let doubling = units.ilog2() - LINEAR_BITS;
    let within = (units >> doubling) as usize & (LINEAR - 1);
    let bucket = (doubling as usize + 1) * LINEAR + within;
    bucket.min(BUCKETS - 1)
}

/// Where a bucket begins, in nanoseconds. It ends where the next begins.
fn begin_ns(bucket: usize) -> u64 {
    let (row, within) = (bucket / LINEAR, (bucket % LINEAR) as u64);
    match row.checked_sub(1) {
        None => within * UNIT_NS,
        Some(doubling) => ((LINEAR as u64 + within) << doubling) * UNIT_NS,
    }
}

#[derive(Debug)]
struct Histogram {
    sum_ns: AtomicU64,
    buckets: [AtomicU64; BUCKETS],
}

impl Histogram {
    fn new() -> Self {
        Self {
            sum_ns: AtomicU64::new(0),
            buckets: [const { AtomicU64::new(0) }; BUCKETS],
        }
    }

    fn add_to(&self, sum: &mut Latencies) {
        sum.sum_ns = sum.sum_ns.wrapping_add(self.sum_ns.load(Ordering::Relaxed));
        for (bucket, count) in self.buckets.iter().enumerate() {
            sum.counts[bucket] += count.load(Ordering::Relaxed);
        }
    }
}

/// Latencies of one queue's requests, and how many it has in flight. One thread writes, any may read.
#[derive(Debug)]
struct QueueLatency<const KINDS: usize> {
    in_flight: AtomicU64,
    kinds: [Histogram; KINDS],
}

impl<const KINDS: usize> QueueLatency<KINDS> {
    /// Of a queue that has done nothing yet.
    fn new() -> Self {
        Self {
            in_flight: AtomicU64::new(0),
            kinds: std::array::from_fn(|_| Histogram::new()),
        }
    }

    /// `count` requests of one kind took `ns` nanoseconds each.
    #[inline]
    fn took(&self, kind: usize, ns: u64, count: u32) {
        let histogram = &self.kinds[kind];
        let count = u64::from(count);
        add(&histogram.buckets[bucket_of(ns)], count);
        add(&histogram.sum_ns, ns.wrapping_mul(count));
    }

    /// Requests that are between the ring and their answer now.
    #[inline]
    fn set_in_flight(&self, requests: u64) {
        self.in_flight.store(requests, Ordering::Relaxed);
    }

    /// Requests in flight when the queue's thread last looked.
    fn in_flight(&self) -> u64 {
        self.in_flight.load(Ordering::Relaxed)
    }

    /// Adds the histogram of one kind.
    fn add_to(&self, kind: usize, sum: &mut Latencies) {
        self.kinds[kind].add_to(sum);
    }
}

/// Latencies of a device whose requests are of `KINDS` kinds.
#[derive(Debug)]
pub struct DeviceLatency<const KINDS: usize>(
    /// One per queue, made when the queue first starts: most of many queues never do.
    Box<[OnceLock<Arc<QueueLatency<KINDS>>>]>,
);

impl<const KINDS: usize> DeviceLatency<KINDS> {
    /// Of a device with so many queues.
    pub fn new(queues: u16) -> Self {
        Self((0..queues).map(|_| OnceLock::new()).collect())
    }

    /// Latencies of one kind of requests, of all queues together.
    pub fn of(&self, kind: usize) -> Latencies {
        let mut sum = Latencies::default();
        for queue in self.started() {
            queue.add_to(kind, &mut sum);
        }
        sum
    }

    /// Requests taken off the rings and not answered yet, of all queues together.
    pub fn in_flight(&self) -> u64 {
        self.started().map(|queue| queue.in_flight()).sum()
    }

    /// The same of one queue.
    pub fn in_flight_of(&self, index: u16) -> u64 {
        let queue = self.0.get(usize::from(index)).and_then(OnceLock::get);
        queue.map_or(0, |queue| queue.in_flight())
    }

    /// Times the requests of a queue of `size` entries, for the thread that serves it.
    pub fn timing(&self, index: u16, size: u16) -> Timing<KINDS> {
        let made = &self.0[usize::from(index)];
        let latency = made.get_or_init(|| Arc::new(QueueLatency::new()));
        Timing::new(Arc::clone(latency), usize::from(size))
    }

    fn started(&self) -> impl Iterator<Item = &Arc<QueueLatency<KINDS>>> {
        self.0.iter().filter_map(OnceLock::get)
    }
}

/// A histogram at one moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Latencies {
    /// All latencies together, in nanoseconds.
    pub sum_ns: u64,
    counts: Vec<u64>,
}

impl Default for Latencies {
    fn default() -> Self {
        Self {
            sum_ns: 0,
            counts: vec![0; BUCKETS],
        }
    }
}

/// Requests whose latency lies between two bounds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LatencyBucket {
    /// Least latency, in nanoseconds.
    pub from_ns: u64,
    /// Where the next bucket begins; none for the last.
    pub to_ns: Option<u64>,
    /// Requests.
    pub count: u64,
}

impl Latencies {
    /// The buckets that hold any requests, shortest latency first.
    pub fn buckets(&self) -> impl Iterator<Item = LatencyBucket> {
        let filled = self.counts.iter().enumerate().filter(|(_, n)| **n > 0);
        filled.map(|(bucket, count)| LatencyBucket {
            from_ns: begin_ns(bucket),
            to_ns: (bucket + 1 < BUCKETS).then(|| begin_ns(bucket + 1)),
            count: *count,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_latency_is_in_the_bucket_around_it() {
        let mut tried = 0;
        for shift in 0..60 {
            for near in [-1_i64, 0, 1] {
                let ns = (1_u64 << shift).saturating_add_signed(near * 60);
                let bucket = bucket_of(ns);
                assert!(begin_ns(bucket) <= ns, "{ns}");
                if bucket + 1 < BUCKETS {
                    let end = begin_ns(bucket + 1);
                    assert!(ns < end, "{ns}");
                    let width = end - begin_ns(bucket);
                    assert!(width == UNIT_NS || width * 8 <= begin_ns(bucket), "{ns}");
                    tried += 1;
                }
            }
        }
        assert!(tried > 90, "{tried}");
        for doubling in 0..=DOUBLINGS as u32 {
            let ns = 1000 << doubling;
            assert_eq!(begin_ns(bucket_of(ns)), ns, "a bound");
        }
        assert_eq!(bucket_of(u64::MAX), BUCKETS - 1);
    }

    #[test]
    fn requests_are_counted_by_kind_and_latency() {
        let latency = QueueLatency::<3>::new();
        latency.took(0, 90, 3);
        latency.took(0, 1_100_000, 1);
        latency.took(2, u64::MAX, 1);
        let of = |kind| {
            let mut sum = Latencies::default();
            latency.add_to(kind, &mut sum);
            latency.add_to(kind, &mut sum);
            sum
        };
        let reads = of(0);
        assert_eq!(reads.sum_ns, 2 * (3 * 90 + 1_100_000));
        let buckets: Vec<LatencyBucket> = reads.buckets().collect();
        let bucket = |from_ns, to_ns, count| LatencyBucket {
            from_ns,
            to_ns,
            count,
        };
        assert_eq!(
            buckets,
            [
                bucket(0, Some(125), 6),
                bucket(1_024_000, Some(1_152_000), 2)
            ]
        );
        let last = of(2).buckets().last().unwrap();
        assert_eq!((last.to_ns, last.count), (None, 2));
        assert_eq!(of(1), Latencies::default());
    }
}
