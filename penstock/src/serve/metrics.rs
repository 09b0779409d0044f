//! Gathers what the daemon tells Prometheus, and serves it where the configuration says.

mod listener;
mod process;

use std::collections::BTreeMap;

use api::failure::Result;
use api::metrics::{Family, Page, families};
use api::types::{Attachment, AttachmentState, AttachmentStats, Health, RequestStats};
use fabric::Fabric;
use fabric_store::metrics::StoreMetrics;
use fabric_transport::counts::Count;
use fabric_types::block::BLOCK_BYTES;
use meta::{AdminState, ClusterMap, DeviceId, DeviceReport, DeviceState, LeaderReport, NodeState};
use service::view::{View, is_listed};

use super::node::Node;
use super::storage::LocalDevice;
use super::used::Used;

pub use listener::{Listening, listen};

impl Node {
    /// The page that Prometheus reads. Waits for no leader.
    pub async fn metrics(&self) -> Result<String> {
        let health = self.health().await?;
        let view = self.view_as_applied(LeaderReport::default())?;
        let attachments = self.attachments_as_applied().await?;
        let mut page = Page::default();
        page.put(&families::BUILD_INFO, &[env!("CARGO_PKG_VERSION")], 1);
        process::put(&mut page);
        put_health(&mut page, &health);
        put_attachments(&mut page, &attachments);
        put_latencies(&mut page, &self.stats_as_applied().await?);
        self.put_filesystems(&mut page).await;
        for volume in view.volumes.iter().filter(|v| is_listed(v)) {
            let labels = [volume.name.as_str(), volume.pool.as_str()];
            page.put(&families::VOLUME_SIZE, &labels, volume.size_bytes);
        }
        let used = self.used_as_heard().await;
        put_used(&mut page, &view, &used);
        let devices: Vec<LocalDevice> = self.storage.local();
        put_devices(&mut page, &devices);
        put_stores(&mut page, &devices);
        put_peers(&mut page, self.storage.fabric());
        put_network(&mut page, self.storage.fabric());
        put_map(&mut page, &view.map);
        put_pools(&mut page, &view);
        put_space(&mut page, &view, &self.monitor.device_words());
        self.put_meta(&mut page);
        Ok(page.into_text())
    }

    fn put_meta(&self, page: &mut Page) {
        let raft = self.meta.raft_status();
        let leads = raft.leader == Some(self.meta.node_id());
        page.put(&families::META_LEADER, &[], u64::from(leads));
        let silent = self.leader_silent_for().as_secs_f64();
        page.put_f64(&families::META_SILENT, &[], silent);
        page.put(&families::META_TERM, &[], raft.term);
        page.put(&families::META_APPLIED, &[], raft.applied_index);
        page.put(&families::META_LAST, &[], raft.last_index);
        page.put(&families::META_VOTERS, &[], raft.voters.len() as u64);
    }
}

fn put_used(page: &mut Page, view: &View, used: &Used) {
    for volume in view.volumes.iter().filter(|v| is_listed(v)) {
        // What is not known is left out: it is not 0.
        if let Some(bytes) = used.bytes(volume, &view.map) {
            let labels = [volume.name.as_str(), volume.pool.as_str()];
            page.put(&families::VOLUME_USED, &labels, bytes);
        }
    }
}

fn put_health(page: &mut Page, health: &Health) {
    page.put(&families::PROBLEMS, &[], health.problems.len() as u64);
    page.put(
        &families::UNDER_WAY,
        &[],
        health.background_jobs.len() as u64,
    );
}

/// A value of an attachment.
type OfAttachment = fn(&Attachment) -> u64;

fn put_attachments(page: &mut Page, attachments: &[Attachment]) {
    let values: [(&'static Family, OfAttachment); 9] = [
        (&families::VOLUME_READS, |a| a.counters.reads),
        (&families::VOLUME_WRITES, |a| a.counters.writes),
        (&families::VOLUME_READ_BYTES, |a| a.counters.read_bytes),
        (&families::VOLUME_WRITTEN_BYTES, |a| a.counters.write_bytes),
        (&families::VOLUME_FLUSHES, |a| a.counters.flushes),
        (&families::VOLUME_DISCARDS, |a| a.counters.discards),
        (&families::VOLUME_ERRORS, |a| a.counters.errors),
        (&families::CONNECTED, |a| {
            u64::from(a.state == AttachmentState::Connected)
        }),
        (&families::QUEUES, |a| u64::from(a.queues_running)),
    ];
    for (family, value) in values {
        for attachment in attachments {
            let labels = [attachment.volume.as_str(), attachment.socket.as_str()];
            page.put(family, &labels, value(attachment));
        }
    }
}

/// Bounds of a histogram's buckets in nanoseconds: few, as every operation of every attachment has them. Each
/// is a bound of the finer buckets that a data thread counts in.
const LATENCY_BOUNDS_NS: [u64; 11] = {
    let mut bounds = [16_000; 11];
    let mut at = 1;
    while at < bounds.len() {
        bounds[at] = bounds[at - 1] * 4;
        at += 1;
    }
    bounds
};
const NS_PER_S: f64 = 1e9;

/// Puts one histogram.
pub(super) fn put_latency(
    page: &mut Page,
    family: &'static Family,
    labels: &[&str],
    requests: &RequestStats,
) {
    let buckets = LATENCY_BOUNDS_NS.map(|ns| (ns as f64 / NS_PER_S, requests.below(ns)));
    let sum = requests.sum_ns as f64 / NS_PER_S;
    page.put_histogram(family, labels, &buckets, sum, requests.requests);
}

fn put_latencies(page: &mut Page, all: &[AttachmentStats]) {
    for stats in all {
        for (operation, requests) in [
            ("read", &stats.reads),
            ("write", &stats.writes),
            ("flush", &stats.flushes),
            ("discard", &stats.discards),
        ] {
            let labels = [stats.volume.as_str(), stats.socket.as_str(), operation];
            put_latency(page, &families::VOLUME_LATENCY, &labels, requests);
        }
    }
    for stats in all {
        let labels = [stats.volume.as_str(), stats.socket.as_str()];
        page.put(&families::IN_FLIGHT, &labels, stats.in_flight);
    }
}

/// A value of a device.
type OfDevice = fn(&LocalDevice) -> u64;

fn put_devices(page: &mut Page, devices: &[LocalDevice]) {
    let values: [(&'static Family, OfDevice); 8] = [
        (&families::DEVICE_CAPACITY, |d| d.capacity_bytes),
        (&families::DEVICE_USED, |d| d.used_bytes),
        (&families::DEVICE_MEMORY, |d| d.memory_bytes),
        (&families::SCRUB_PASSES, |d| d.scrub.passes),
        (&families::SCRUB_BLOCKS, |d| d.scrub.blocks),
        (&families::SCRUB_BAD, |d| d.scrub.errors),
        (&families::SCRUB_REPAIRED, |d| d.scrub.repaired),
        (&families::DEVICE_BAD, |d| d.scrub.bad),
    ];
    for (family, value) in values {
        for device in devices {
            page.put(family, &[&device.path], value(device));
        }
    }
}

/// A value of a shard of a store.
type OfShard = fn(&StoreMetrics) -> u64;

fn put_stores(page: &mut Page, devices: &[LocalDevice]) {
    let values: [(&'static Family, OfShard); 22] = [
        (&families::STORE_OPS, |m| m.ops),
        (&families::STORE_WRITE_OP_BYTES, |m| m.write_op_bytes),
        (&families::STORE_READ_OP_BYTES, |m| m.read_op_bytes),
        (&families::STORE_DEVICE_READS, |m| m.device_reads),
        (&families::STORE_DEVICE_READ_BYTES, |m| m.device_read_bytes),
        (&families::STORE_DEVICE_WRITES, |m| m.device_writes),
        (&families::STORE_DEVICE_WRITTEN_BYTES, |m| {
            m.device_write_bytes
        }),
        (&families::STORE_DEVICE_FLUSHES, |m| m.device_flushes),
        (&families::STORE_LOG_BATCHES, |m| m.log_batches),
        (&families::STORE_LOG_BLOCKS, |m| m.log_blocks),
        (&families::STORE_CHECKPOINTS, |m| m.checkpoints),
        (&families::STORE_CHECKPOINT_BYTES, |m| m.checkpoint_bytes),
        (&families::STORE_MAP_HITS, |m| m.leaf_hits),
        (&families::STORE_MAP_MISSES, |m| m.leaf_misses),
        (&families::STORE_MOVED_BYTES, |m| m.moved_bytes),
        (&families::STORE_CHECKSUM_RETRIES, |m| m.checksum_retries),
        (&families::STORE_CHECKSUM_ERRORS, |m| m.checksum_errors),
        (&families::STORE_NO_ROOM, |m| m.refused_for_room),
        (&families::STORE_CHUNKS, |m| m.chunks),
        (&families::STORE_PAGES_TO_CLEAN, |m| m.leaves_to_clean),
        (&families::STORE_DIRTY_PAGES, |m| m.dirty_leaves),
        (&families::STORE_FREED_UNITS, |m| m.quarantined_units),
    ];
    for (family, value) in values {
        for device in devices.iter().filter(|device| !device.is_null) {
            let sum = device.shards.iter().map(value).sum();
            page.put(family, &[&device.path], sum);
        }
    }
}

fn put_peers(page: &mut Page, fabric: &Fabric) {
    let (traffic, resynced) = (fabric.traffic(), fabric.resynced());
    let bytes = resynced.progress.blocks * BLOCK_BYTES as u64;
    for (family, value) in [
        (&families::PEER_ASKED, traffic.asked),
        (&families::PEER_SERVED, traffic.served),
        (&families::RESYNC_ROUNDS, resynced.rounds),
        (&families::RESYNC_FAILED, resynced.failed),
        (&families::RESYNC_BYTES, bytes),
        (&families::RESYNC_PAGES, resynced.progress.leaves),
        (&families::RESYNC_LOST, resynced.progress.lost),
    ] {
        page.put(family, &[], value);
    }
}

fn put_network(page: &mut Page, fabric: &Fabric) {
    for (family, transport, count) in [
        (&families::NET_SENT, "tcp", Count::TcpBytesOut),
        (&families::NET_SENT, "rdma", Count::RdmaBytesOut),
        (&families::NET_RECEIVED, "tcp", Count::TcpBytesIn),
        (&families::NET_RECEIVED, "rdma", Count::RdmaBytesIn),
    ] {
        page.put(family, &[transport], fabric.network_count(count));
    }
    for (family, count) in [
        (&families::RDMA_MESSAGES, Count::MessagesOut),
        (&families::RDMA_INSIDE, Count::Inside),
        (&families::RDMA_READS, Count::Reads),
        (&families::RDMA_WRITES, Count::Writes),
        (&families::RDMA_WINDOWS, Count::Windows),
        (&families::RDMA_COPIED, Count::CopiedBytes),
        (&families::RDMA_NO_CREDIT, Count::CreditsExhausted),
        (&families::RDMA_TORN, Count::FailedPair),
    ] {
        page.put(family, &[], fabric.network_count(count));
    }
    let open = fabric.open_memory();
    page.put(&families::RDMA_REGIONS, &[], open.regions);
    page.put(&families::RDMA_PINNED, &[], open.bytes);
    page.put(&families::RDMA_REGISTRATIONS, &[], open.registrations);
}

fn put_map(page: &mut Page, map: &ClusterMap) {
    page.put(&families::EPOCH, &[], map.epoch().0);
    let (mut up, mut down, mut not_started) = (0, 0, 0);
    for node in map.nodes() {
        match node.state {
            _ if !node.incarnation.has_begun() => not_started += 1,
            NodeState::Up => up += 1,
            NodeState::Down => down += 1,
        }
    }
    page.put(&families::NODES, &["up"], up);
    page.put(&families::NODES, &["down"], down);
    page.put(&families::NODES, &["not_started"], not_started);
    let draining = map
        .nodes()
        .filter(|node| node.admin_state == AdminState::Draining);
    page.put(&families::NODES_DRAINING, &[], draining.count() as u64);
    let is_up = |device: &meta::Device| {
        let node = map.node(device.node);
        node.is_some_and(|node| node.state == NodeState::Up)
    };
    let (mut online, mut offline, mut failed) = (0, 0, 0);
    for device in map.devices() {
        match device.state {
            DeviceState::Failed => failed += 1,
            DeviceState::Online if is_up(device) => online += 1,
            DeviceState::Online | DeviceState::Offline => offline += 1,
        }
    }
    page.put(&families::DEVICES, &["online"], online);
    page.put(&families::DEVICES, &["offline"], offline);
    page.put(&families::DEVICES, &["failed"], failed);
}

fn put_pools(page: &mut Page, view: &View) {
    for pool in view.map.pools() {
        let groups = view.groups_of(pool);
        let states = [
            ("in_sync", groups.in_sync),
            ("degraded", groups.degraded),
            ("waiting", groups.waiting),
            ("syncing", groups.syncing),
            ("moving", groups.moving),
        ];
        for (state, count) in states {
            page.put(&families::GROUPS, &[&pool.name, state], count as u64);
        }
    }
    for pool in view.map.pools() {
        let of_pool = |v: &&meta::Volume| v.pool == pool.name && is_listed(v);
        let volumes = view.volumes.iter().filter(of_pool).count();
        page.put(&families::POOL_VOLUMES, &[&pool.name], volumes as u64);
    }
}

fn put_space(page: &mut Page, view: &View, words: &BTreeMap<DeviceId, DeviceReport>) {
    let pools: Vec<&meta::Pool> = view.map.pools().collect();
    for pool in &pools {
        let (provisioned, _) = view.provisioned(pool);
        page.put(&families::POOL_PROVISIONED, &[&pool.name], provisioned);
    }
    for pool in &pools {
        let (_, capacity) = view.provisioned(pool);
        page.put(&families::POOL_CAPACITY, &[&pool.name], capacity);
    }
    // What nobody has said yet is left out: it is not 0.
    let heard = pools
        .iter()
        .filter_map(|pool| Some((pool, view.fullest(pool, words)?)));
    let heard: Vec<_> = heard.collect();
    for (pool, _) in &heard {
        let words = view.usable(pool).filter_map(|device| words.get(&device.id));
        let used = words.fold(0, |sum: u64, word| sum.saturating_add(word.used_bytes));
        page.put(&families::POOL_USED, &[&pool.name], used);
    }
    for (pool, fullest) in &heard {
        let percent = u64::from(fullest.percent);
        page.put(&families::POOL_FULLEST, &[&pool.name], percent);
    }
}
