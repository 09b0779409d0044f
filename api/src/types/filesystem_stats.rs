//! What an attachment of a filesystem did.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::{AttachmentState, RequestStats};

/// What an attachment of a filesystem did in a period.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct FilesystemStats {
    /// Name of the filesystem it serves.
    pub filesystem: String,
    /// The vhost-user socket.
    pub socket: String,
    /// State word.
    pub state: AttachmentState,
    /// Milliseconds that the values cover: since the attachment began, or the daemon if it started later.
    pub period_ms: u64,
    /// Requests that the daemon has taken and not answered yet.
    pub in_flight: u64,
    /// Bytes that the guest read.
    pub read_bytes: u64,
    /// Bytes that the guest wrote.
    pub written_bytes: u64,
    /// Requests by kind; kinds that never came are left out.
    pub requests: Vec<OperationStats>,
    /// Read requests and their latencies. A latency begins when the daemon takes the request off the guest's
    /// ring, and ends when the guest can see its answer.
    pub reads: RequestStats,
    /// Write requests.
    pub writes: RequestStats,
    /// Requests that wait until data are durable: fsync and syncfs.
    pub syncs: RequestStats,
    /// All other requests that the guest waits for.
    pub metadata: RequestStats,
    /// What this node did for the filesystem.
    pub host: FilesystemHostStats,
}

/// Requests of one kind.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct OperationStats {
    /// The kind: lookup, read, write and so on.
    pub operation: String,
    /// How many were answered.
    pub answered: u64,
    /// How many of them with an error number, a name that does not exist among them.
    pub failed: u64,
}

/// What a node did for a filesystem, for all its attachments on that node together, since the daemon opened
/// the filesystem.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct FilesystemHostStats {
    /// Lookups of names and attributes that the cache answered.
    pub cache_hits: u64,
    /// Lookups that it did not answer.
    pub cache_misses: u64,
    /// Questions to the leader of the namespace.
    pub questions: u64,
    /// Changes of the namespace.
    pub operations: u64,
    /// Directories and files that may be cached now.
    pub capabilities: u64,
    /// Capabilities that were recalled.
    pub recalls: u64,
    /// Bytes of file data that were read from the cache.
    pub data_hit_bytes: u64,
    /// Bytes of file data that were read from the pool.
    pub data_miss_bytes: u64,
    /// Bytes of file data that were read ahead.
    pub read_ahead_bytes: u64,
    /// Bytes that are buffered now, and not durable yet.
    pub buffered_bytes: u64,
    /// Bytes that were buffered and became durable.
    pub written_back_bytes: u64,
    /// Files of which something could not be written back.
    pub write_back_failures: u64,
    /// Bytes that were lost by that.
    pub lost_bytes: u64,
}

impl FilesystemStats {
    /// What was done since `earlier`. If the attachment began again in between, that is all that it did.
    pub fn since(&self, earlier: &Self) -> Self {
        if self.period_ms < earlier.period_ms {
            return self.clone();
        }
        let requests = self.requests.iter().filter_map(|now| {
            let before = earlier
                .requests
                .iter()
                .find(|one| one.operation == now.operation);
            let (answered, failed) = before.map_or((0, 0), |one| (one.answered, one.failed));
            let answered = now.answered.saturating_sub(answered);
            (answered > 0).then(|| OperationStats {
                operation: now.operation.clone(),
                answered,
                failed: now.failed.saturating_sub(failed),
            })
        });
        Self {
            period_ms: self.period_ms - earlier.period_ms,
            read_bytes: self.read_bytes.saturating_sub(earlier.read_bytes),
            written_bytes: self.written_bytes.saturating_sub(earlier.written_bytes),
            requests: requests.collect(),
            reads: self.reads.since(&earlier.reads),
            writes: self.writes.since(&earlier.writes),
            syncs: self.syncs.since(&earlier.syncs),
            metadata: self.metadata.since(&earlier.metadata),
            host: self.host.since(&earlier.host),
            ..self.clone()
        }
    }

    /// Requests of a kind, and those that failed.
    pub fn requests_of(&self, operation: &str) -> (u64, u64) {
        let found = self.requests.iter().find(|one| one.operation == operation);
        found.map_or((0, 0), |one| (one.answered, one.failed))
    }

    /// Requests of all kinds, and those that failed.
    pub fn requests_in_all(&self) -> (u64, u64) {
        let all = self.requests.iter();
        all.fold((0, 0), |sum, one| {
            (sum.0 + one.answered, sum.1 + one.failed)
        })
    }
}

impl FilesystemHostStats {
    fn since(&self, earlier: &Self) -> Self {
        let count = |of: fn(&Self) -> u64| of(self).saturating_sub(of(earlier));
        Self {
            cache_hits: count(|one| one.cache_hits),
            cache_misses: count(|one| one.cache_misses),
            questions: count(|one| one.questions),
            operations: count(|one| one.operations),
            capabilities: self.capabilities,
            recalls: count(|one| one.recalls),
            data_hit_bytes: count(|one| one.data_hit_bytes),
            data_miss_bytes: count(|one| one.data_miss_bytes),
            read_ahead_bytes: count(|one| one.read_ahead_bytes),
            buffered_bytes: self.buffered_bytes,
            written_back_bytes: count(|one| one.written_back_bytes),
            write_back_failures: count(|one| one.write_back_failures),
            lost_bytes: count(|one| one.lost_bytes),
        }
    }
}

/// The share of `hits` in percent; none if nothing was looked for.
pub fn hit_percent(hits: u64, misses: u64) -> Option<u64> {
    let all = u128::from(hits) + u128::from(misses);
    (all > 0).then(|| (u128::from(hits) * 100 / all) as u64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::LatencyBucket;

    fn stats(period_ms: u64, reads: (u64, u64), buffered: u64, lost: u64) -> FilesystemStats {
        FilesystemStats {
            filesystem: "home".into(),
            socket: "/s".into(),
            state: AttachmentState::Connected,
            period_ms,
            in_flight: 2,
            read_bytes: reads.0 * 4096,
            written_bytes: 0,
            requests: vec![OperationStats {
                operation: "read".into(),
                answered: reads.0,
                failed: reads.1,
            }],
            reads: RequestStats::new(
                reads.0 * 4096,
                reads.0 * 1000,
                vec![LatencyBucket {
                    from_ns: 1000,
                    to_ns: Some(1125),
                    count: reads.0,
                }],
            ),
            writes: RequestStats::default(),
            syncs: RequestStats::default(),
            metadata: RequestStats::default(),
            host: FilesystemHostStats {
                buffered_bytes: buffered,
                lost_bytes: lost,
                ..FilesystemHostStats::default()
            },
        }
    }

    #[test]
    fn an_interval_is_the_difference_of_two_samples() {
        let (before, after) = (
            stats(5000, (7, 1), 100, 4096),
            stats(7000, (10, 2), 50, 8192),
        );
        let between = after.since(&before);
        assert_eq!((between.period_ms, between.in_flight), (2000, 2));
        assert_eq!(between.requests_of("read"), (3, 1));
        assert_eq!(between.requests_in_all(), (3, 1));
        assert_eq!(between.read_bytes, 3 * 4096);
        assert_eq!(
            (between.reads.requests, between.reads.mean_ns),
            (3, Some(1000))
        );
        assert_eq!(
            (between.host.buffered_bytes, between.host.lost_bytes),
            (50, 4096)
        );
        assert_eq!(after.since(&after).requests, []);
        // A daemon that was restarted counts from zero.
        assert_eq!(before.since(&after), before);
    }

    #[test]
    fn without_lookups_there_is_no_hit_ratio() {
        assert_eq!(hit_percent(0, 0), None);
        assert_eq!(hit_percent(1, 3), Some(25));
        assert_eq!(hit_percent(u64::MAX, 0), Some(100));
    }
}
