//! What filesystems tell Prometheus.

use fs_client::ClientCounters;
use fs_device::{FsCounters, OpClass};

use super::attachments::Figures;
use crate::api::metrics::{Family, Page, families};
use crate::serve::node::Node;

/// Whoever reads metrics waits for nothing for longer.
const LOCK_WAIT_MAX: std::time::Duration = std::time::Duration::from_secs(1);

/// A value of an attachment.
type OfServed = fn(&Figures<'_>) -> u64;
/// A value of a class of requests.
type OfClass = fn(&FsCounters, OpClass) -> u64;
/// A value of a client.
type OfClient = fn(&ClientCounters) -> u64;

impl Node {
    /// The attachments and clients of this node.
    pub(in crate::serve) async fn put_filesystems(&self, page: &mut Page) {
        // While attachments are changed, which may wait for metadata, there are no figures.
        let live = self.filesystems.live.lock();
        let Ok(live) = tokio::time::timeout(LOCK_WAIT_MAX, live).await else {
            return;
        };
        let cache = self.data_cache();
        page.put(&families::FS_DATA_CACHE, &[], cache.used_bytes());
        page.put(&families::FS_DATA_CACHE_MAX, &[], cache.capacity_bytes());
        let served = live.attachments.values();
        let served: Vec<_> = served.filter_map(|one| one.figures()).collect();
        put_requests(page, &served);
        let values: [(&'static Family, OfServed); 4] = [
            (&families::FS_READ_BYTES, |one| one.counters.read_bytes),
            (&families::FS_WRITTEN_BYTES, |one| {
                one.counters.written_bytes
            }),
            (&families::FS_IN_FLIGHT, |one| one.counters.in_flight),
            (&families::FS_CONNECTED, |one| u64::from(one.is_connected)),
        ];
        for (family, value) in values {
            for one in &served {
                page.put(family, &[one.filesystem, one.socket], value(one));
            }
        }
        let values: [(&'static Family, OfClient); 16] = [
            (&families::FS_QUESTIONS, |c| c.questions),
            (&families::FS_LISTED, |c| c.listed_names),
            (&families::FS_HITS, |c| c.hits),
            (&families::FS_MISSES, |c| c.misses),
            (&families::FS_CAPABILITIES, |c| c.capabilities),
            (&families::FS_RECALLS, |c| c.recalls),
            (&families::FS_OPERATIONS, |c| c.operations),
            (&families::FS_CHANGED, |c| c.changed_meanwhile),
            (&families::FS_FLUSHES, |c| c.flushes),
            (&families::FS_DATA_HITS, |c| c.data_hit_bytes),
            (&families::FS_DATA_MISSES, |c| c.data_miss_bytes),
            (&families::FS_READ_AHEAD, |c| c.read_ahead_bytes),
            (&families::FS_DIRTY, |c| c.dirty_bytes),
            (&families::FS_WRITTEN_BACK, |c| c.written_back_bytes),
            (&families::FS_WRITE_BACK_FAILURES, |c| c.write_back_failures),
            (&families::FS_LOST, |c| c.lost_bytes),
        ];
        for (family, value) in values {
            for client in live.clients.values() {
                let name = client.backend().name();
                page.put(family, &[name], value(&client.counters()));
            }
        }
    }
}

fn put_requests(page: &mut Page, served: &[Figures<'_>]) {
    let values: [(&'static Family, OfClass); 2] = [
        (&families::FS_REQUESTS, |counters, class| {
            counters.finished(class)
        }),
        (&families::FS_FAILED, |counters, class| {
            counters.failed(class)
        }),
    ];
    for (family, value) in values {
        for one in served {
            for class in OpClass::ALL {
                let labels = [one.filesystem, one.socket, class.name()];
                page.put(family, &labels, value(&one.counters, *class));
            }
        }
    }
}
