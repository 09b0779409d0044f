//! Figures of devices, stores and the network.

use api::metrics::{Family, Page, families};
use fabric::Fabric;
use fabric_store::metrics::StoreMetrics;
use fabric_transport::counts::Count;
use fabric_types::block::BLOCK_BYTES;

use crate::storage::{LocalDevice, Storage};

/// Puts all of them.
pub(crate) fn put(page: &mut Page, storage: &Storage) {
    let devices = storage.local();
    put_devices(page, &devices);
    put_stores(page, &devices);
    put_peers(page, storage.fabric());
    put_network(page, storage.fabric());
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
