//! What filesystems did, for Prometheus and for people.

use api::failure::{Failure, Kind, Result};
use api::metrics::{Family, Page, families};
use api::types::{FilesystemHostStats, FilesystemStats, OperationStats};
use fs_client::ClientCounters;
use fs_device::{FsCounters, LatencyClass, OpClass};
use service::failures::meta_failure;

use crate::filesystems::FilesystemService;
use ::attachments::sockets::attached_on;
use service::metrics::put_latency;

use crate::attachments::Figures;
use crate::detach::{is_meant, not_attached};

/// Whoever reads metrics waits for nothing for longer.
const LOCK_WAIT_MAX: std::time::Duration = std::time::Duration::from_secs(1);

/// A value of an attachment.
type OfServed = fn(&Figures<'_>) -> u64;
/// A value of a class of requests.
type OfClass = fn(&FsCounters, OpClass) -> u64;
/// A value of a client.
type OfClient = fn(&ClientCounters) -> u64;

impl FilesystemService {
    /// What the attachment of this node did that has this socket or serves the filesystem of this name.
    pub async fn stats(&self, target: &str) -> Result<FilesystemStats> {
        let all = self
            .cluster
            .list_reader()
            .list_filesystem_attachments()
            .await;
        let attachment = self.one_here(all.map_err(meta_failure)?, target)?;
        let live = self.live.lock().await;
        let served = live.attachments.get(&attachment.id);
        let figures = served.and_then(|served| Some((served.figures()?, served.show().0)));
        let (figures, state) = figures.ok_or_else(|| {
            Failure::new(
                Kind::Conflict,
                format!("attachment {} is not served", attachment.socket),
                "`penstock health` says why",
            )
        })?;
        let clients = live.clients.values();
        let mut clients = clients.filter(|one| one.backend().name() == figures.filesystem);
        let client = clients.next().map(|client| client.counters());
        let counters = &figures.counters;
        let [reads, writes, syncs, metadata] = figures.latencies.clone();
        let requests = OpClass::ALL.iter().map(|class| OperationStats {
            operation: class.name().to_owned(),
            answered: counters.finished(*class),
            failed: counters.failed(*class),
        });
        Ok(FilesystemStats {
            filesystem: figures.filesystem.to_owned(),
            socket: figures.socket.to_owned(),
            state,
            period_ms: u64::try_from(figures.age.as_millis()).unwrap_or(u64::MAX),
            in_flight: counters.in_flight,
            read_bytes: counters.read_bytes,
            written_bytes: counters.written_bytes,
            requests: requests.filter(|one| one.answered > 0).collect(),
            reads,
            writes,
            syncs,
            metadata,
            host: client.as_ref().map(host_stats).unwrap_or_default(),
        })
    }

    /// The only attachment of this node that `target` names.
    fn one_here(
        &self,
        all: Vec<meta::FilesystemAttachment>,
        target: &str,
    ) -> Result<meta::FilesystemAttachment> {
        let meant = all.into_iter().filter(|one| is_meant(one, target));
        let (mut here, elsewhere): (Vec<_>, Vec<_>) =
            meant.partition(|one| one.node == self.cluster.node_id());
        match (here.len(), elsewhere.first()) {
            (1, _) => Ok(here.remove(0)),
            (0, None) => Err(not_attached(target)),
            (0, Some(other)) => {
                let node = self.cluster.meta.map().node_name(other.node);
                Err(attached_on(target, &node))
            }
            (n, _) => Err(Failure::new(
                Kind::Conflict,
                format!("filesystem '{target}' has {n} attachments"),
                "name the socket of the one that is meant",
            )),
        }
    }

    /// The attachments and clients of this node.
    pub(crate) async fn put_figures(&self, page: &mut Page) {
        // While attachments are changed, which may wait for metadata, there are no figures.
        let live = self.live.lock();
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
        let values: [(&'static Family, OfClient); 17] = [
            (&families::FS_QUESTIONS, |c| c.questions),
            (&families::FS_LISTED, |c| c.listed_names),
            (&families::FS_HITS, |c| c.hits),
            (&families::FS_MISSES, |c| c.misses),
            (&families::FS_CAPABILITIES, |c| c.capabilities),
            (&families::FS_RECALLS, |c| c.recalls),
            (&families::FS_OPERATIONS, |c| c.operations),
            (&families::FS_CHANGED, |c| c.changed_meanwhile),
            (&families::FS_THROTTLED, |c| c.throttled),
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

fn host_stats(counters: &ClientCounters) -> FilesystemHostStats {
    FilesystemHostStats {
        cache_hits: counters.hits,
        cache_misses: counters.misses,
        questions: counters.questions,
        operations: counters.operations,
        capabilities: counters.capabilities,
        recalls: counters.recalls,
        data_hit_bytes: counters.data_hit_bytes,
        data_miss_bytes: counters.data_miss_bytes,
        read_ahead_bytes: counters.read_ahead_bytes,
        buffered_bytes: counters.dirty_bytes,
        written_back_bytes: counters.written_back_bytes,
        write_back_failures: counters.write_back_failures,
        lost_bytes: counters.lost_bytes,
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
    for one in served {
        for (class, requests) in LatencyClass::ALL.iter().zip(&one.latencies) {
            let labels = [one.filesystem, one.socket, class.name()];
            put_latency(page, &families::FS_LATENCY, &labels, requests);
        }
    }
}
