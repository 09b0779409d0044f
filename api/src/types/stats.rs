//! What an attachment did, and how long it took.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::AttachmentState;

/// What an attachment did in a period, and how long its requests took. A request's latency begins when the
/// daemon takes it off the guest's ring, and ends when the guest can see its answer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct AttachmentStats {
    /// Name of the volume it serves.
    pub volume: String,
    /// The vhost-user socket.
    pub socket: String,
    /// State word.
    pub state: AttachmentState,
    /// Virtqueues offered.
    pub queues: u16,
    /// Virtqueues that a guest has started.
    pub queues_running: u16,
    /// Milliseconds that the values cover: since the attachment began, or the daemon if it started later.
    pub period_ms: u64,
    /// Requests that the daemon has taken and not answered yet.
    pub in_flight: u64,
    /// Requests that failed; they are not counted below.
    pub errors: u64,
    /// Read requests.
    pub reads: RequestStats,
    /// Write requests.
    pub writes: RequestStats,
    /// Flush requests.
    pub flushes: RequestStats,
    /// Discard and write-zeroes requests.
    pub discards: RequestStats,
}

/// Requests of one kind. Those of a volume succeeded; those of a filesystem were answered, also with an error
/// number.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct RequestStats {
    /// How many.
    pub requests: u64,
    /// Bytes that they read or wrote; 0 for all others.
    pub bytes: u64,
    /// Mean latency in nanoseconds; absent if there were no requests.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mean_ns: Option<u64>,
    /// Median latency. This and the other percentiles are estimated within a bucket.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub p50_ns: Option<u64>,
    /// Latency that 95 % of the requests did not exceed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub p95_ns: Option<u64>,
    /// Latency that 99 % did not exceed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub p99_ns: Option<u64>,
    /// Latency that 99.9 % did not exceed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub p999_ns: Option<u64>,
    /// All latencies together, in nanoseconds.
    pub sum_ns: u64,
    /// The histogram: buckets that hold any requests, shortest latency first.
    pub buckets: Vec<LatencyBucket>,
}

/// Requests whose latency lies between two bounds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct LatencyBucket {
    /// Least latency in nanoseconds.
    pub from_ns: u64,
    /// Where the next bucket begins; absent for the last, which has no end.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub to_ns: Option<u64>,
    /// Requests.
    pub count: u64,
}

impl AttachmentStats {
    /// What was done since `earlier`. If the attachment began anew in between, that is all that it did.
    pub fn since(&self, earlier: &Self) -> Self {
        if self.period_ms < earlier.period_ms {
            return self.clone();
        }
        Self {
            period_ms: self.period_ms - earlier.period_ms,
            errors: self.errors.saturating_sub(earlier.errors),
            reads: self.reads.since(&earlier.reads),
            writes: self.writes.since(&earlier.writes),
            flushes: self.flushes.since(&earlier.flushes),
            discards: self.discards.since(&earlier.discards),
            ..self.clone()
        }
    }
}

impl RequestStats {
    /// Of a histogram; what is derived is filled in.
    pub fn new(bytes: u64, sum_ns: u64, buckets: Vec<LatencyBucket>) -> Self {
        let requests = buckets.iter().map(|bucket| bucket.count).sum();
        let at = |per_mille| percentile(&buckets, requests, per_mille);
        Self {
            requests,
            bytes,
            mean_ns: sum_ns.checked_div(requests),
            p50_ns: at(500),
            p95_ns: at(950),
            p99_ns: at(990),
            p999_ns: at(999),
            sum_ns,
            buckets,
        }
    }

    pub(super) fn since(&self, earlier: &Self) -> Self {
        let before = |bucket: &LatencyBucket| {
            let same = earlier.buckets.iter().find(|b| b.from_ns == bucket.from_ns);
            same.map_or(0, |b| b.count)
        };
        let buckets = self.buckets.iter().filter_map(|bucket| {
            let count = bucket.count.saturating_sub(before(bucket));
            (count > 0).then_some(LatencyBucket { count, ..*bucket })
        });
        Self::new(
            self.bytes.saturating_sub(earlier.bytes),
            self.sum_ns.saturating_sub(earlier.sum_ns),
            buckets.collect(),
        )
    }

    /// Requests that took less than `bound_ns`, which is a bound of a bucket.
    pub fn below(&self, bound_ns: u64) -> u64 {
        let below = |b: &&LatencyBucket| b.to_ns.is_some_and(|to_ns| to_ns <= bound_ns);
        self.buckets.iter().filter(below).map(|b| b.count).sum()
    }
}

/// The latency that so many of a thousand requests do not exceed, as if those of a bucket were spread evenly
/// over it. Of the last bucket its beginning.
fn percentile(buckets: &[LatencyBucket], requests: u64, per_mille: u64) -> Option<u64> {
    let rank = (u128::from(requests) * u128::from(per_mille)).div_ceil(1000) as u64;
    let mut before = 0;
    for bucket in buckets {
        if before + bucket.count >= rank {
            let width = bucket.to_ns.map_or(0, |to_ns| to_ns - bucket.from_ns);
            let part = u128::from(width) * u128::from(rank - before) / u128::from(bucket.count);
            return Some(bucket.from_ns + part as u64);
        }
        before += bucket.count;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bucket(from_ns: u64, to_ns: u64, count: u64) -> LatencyBucket {
        LatencyBucket {
            from_ns,
            to_ns: Some(to_ns),
            count,
        }
    }

    fn reads(buckets: &[LatencyBucket]) -> RequestStats {
        let sum_ns = buckets.iter().map(|b| b.from_ns * b.count).sum();
        RequestStats::new(4096, sum_ns, buckets.to_vec())
    }

    #[test]
    fn percentiles_lie_within_their_bucket() {
        let told = reads(&[
            bucket(1000, 2000, 900),
            bucket(8000, 9000, 99),
            LatencyBucket {
                from_ns: 64_000,
                to_ns: None,
                count: 1,
            },
        ]);
        assert_eq!(told.requests, 1000);
        assert_eq!(told.p50_ns, Some(1555));
        assert_eq!(told.p95_ns, Some(8505));
        assert_eq!(told.p99_ns, Some(8909));
        assert_eq!(told.p999_ns, Some(9000));
        assert_eq!(told.mean_ns, Some(900 + 792 + 64));
        assert_eq!((told.below(2000), told.below(9000)), (900, 999));
        let last = reads(&[told.buckets[2]]);
        assert_eq!(last.p50_ns, Some(64_000));
    }

    #[test]
    fn without_requests_there_are_no_percentiles() {
        let told = RequestStats::default();
        assert_eq!(RequestStats::new(0, 0, Vec::new()), told);
        let json = serde_json::to_value(&told).unwrap();
        assert_eq!(json.get("p50_ns"), None);
    }

    #[test]
    fn an_interval_is_the_difference_of_two_samples() {
        let stats = |period_ms, errors, reads: RequestStats| AttachmentStats {
            volume: "a".into(),
            socket: "/a".into(),
            state: AttachmentState::Connected,
            queues: 4,
            queues_running: 4,
            period_ms,
            in_flight: 3,
            errors,
            reads,
            writes: RequestStats::default(),
            flushes: RequestStats::default(),
            discards: RequestStats::default(),
        };
        let before = stats(5000, 1, reads(&[bucket(0, 125, 7), bucket(1000, 1125, 1)]));
        let mut after = before.clone();
        after.period_ms = 7000;
        after.errors = 3;
        after.reads = RequestStats::new(
            4096 * 3,
            before.reads.sum_ns + 2 * 2000,
            vec![
                bucket(0, 125, 7),
                bucket(1000, 1125, 2),
                bucket(3000, 3250, 1),
            ],
        );
        let told = after.since(&before);
        assert_eq!(
            (told.period_ms, told.errors, told.in_flight),
            (2000, 2, 3),
            "what is in flight is in flight now"
        );
        assert_eq!((told.reads.requests, told.reads.bytes), (2, 8192));
        assert_eq!(told.reads.mean_ns, Some(2000));
        assert_eq!(
            told.reads.buckets,
            [bucket(1000, 1125, 1), bucket(3000, 3250, 1)]
        );
        // A daemon that was restarted counts anew.
        let anew = stats(300, 0, reads(&[bucket(0, 125, 2)]));
        assert_eq!(anew.since(&after), anew);
    }
}
