//! Every family of values that a daemon tells.

use super::{Family, Kind};

macro_rules! families {
    ($($const:ident: $kind:ident $name:literal [$($label:literal),*] $unit:literal $help:literal;)*) => {
        $(
            #[doc = $help]
            pub const $const: Family = Family {
                name: $name,
                kind: Kind::$kind,
                labels: &[$($label),*],
                unit: $unit,
                help: $help,
            };
        )*

        /// All, in the order in which they are told.
        #[cfg(test)]
        pub const ALL: &[&Family] = &[$(&$const),*];
    };
}

families! {
    BUILD_INFO: Gauge "penstock_build_info" ["version"] "1"
        "Always 1; the version is in its label.";
    START_TIME: Gauge "process_start_time_seconds" [] "seconds"
        "When the process started, since 1970.";
    CPU: Counter "process_cpu_seconds_total" [] "seconds"
        "Processor time that the process used.";
    RESIDENT: Gauge "process_resident_memory_bytes" [] "bytes"
        "Memory of the process in RAM, including the guests' memory that it touched.";
    OPEN_FDS: Gauge "process_open_fds" [] "1"
        "Files that the process has open.";
    MAX_FDS: Gauge "process_max_fds" [] "1"
        "Files that the process may have open.";
    THREAD_CPU: Counter "penstock_thread_cpu_seconds_total" ["thread"] "seconds"
        "Processor time of each data thread and of the maintenance thread. Polling counts, too.";
    PROBLEMS: Gauge "penstock_problems" [] "1"
        "Problems that `penstock health` lists; 0 when all is well.";
    UNDER_WAY: Gauge "penstock_background_jobs" [] "1"
        "What goes on without being wrong: nodes and devices being emptied, pools whose data move.";
    VOLUME_READS: Counter "penstock_volume_reads_total" ["volume", "socket"] "1"
        "Completed read requests of guests.";
    VOLUME_WRITES: Counter "penstock_volume_writes_total" ["volume", "socket"] "1"
        "Completed write requests of guests.";
    VOLUME_READ_BYTES: Counter "penstock_volume_read_bytes_total" ["volume", "socket"] "bytes"
        "Bytes that guests read.";
    VOLUME_WRITTEN_BYTES: Counter "penstock_volume_written_bytes_total" ["volume", "socket"] "bytes"
        "Bytes that guests wrote.";
    VOLUME_FLUSHES: Counter "penstock_volume_flushes_total" ["volume", "socket"] "1"
        "Completed flush requests of guests.";
    VOLUME_DISCARDS: Counter "penstock_volume_discards_total" ["volume", "socket"] "1"
        "Completed discard and write-zeroes requests of guests.";
    VOLUME_ERRORS: Counter "penstock_volume_errors_total" ["volume", "socket"] "1"
        "Failed requests of guests.";
    VOLUME_LATENCY: Histogram "penstock_volume_latency_seconds" ["volume", "socket", "operation"] "seconds"
        "Time from taking a guest's request to its answer, of requests that succeeded, by operation: read, \
         write, flush, discard (write-zeroes among them). `penstock attachment stats` has finer buckets.";
    IN_FLIGHT: Gauge "penstock_attachment_requests_in_flight" ["volume", "socket"] "1"
        "Requests that were taken from the guest and not answered yet.";
    CONNECTED: Gauge "penstock_attachment_connected" ["volume", "socket"] "1"
        "1 while a guest is connected to the attachment.";
    QUEUES: Gauge "penstock_attachment_queues_running" ["volume", "socket"] "1"
        "Virtqueues that the guest runs.";
    FS_REQUESTS: Counter "penstock_filesystem_requests_total" ["filesystem", "socket", "operation"] "1"
        "Requests of guests that were answered, by kind: lookup, read, write, make and so on.";
    FS_FAILED: Counter "penstock_filesystem_failed_total" ["filesystem", "socket", "operation"] "1"
        "Requests of guests that were answered with an error number, a name that is not there among them.";
    FS_LATENCY: Histogram "penstock_filesystem_latency_seconds" ["filesystem", "socket", "operation"]
        "seconds"
        "Time from taking a guest's request to its answer, by operation: read, write, sync, metadata (all \
         others that the guest waits for). `penstock attachment stats` has finer buckets.";
    FS_READ_BYTES: Counter "penstock_filesystem_read_bytes_total" ["filesystem", "socket"] "bytes"
        "Bytes that guests read.";
    FS_WRITTEN_BYTES: Counter "penstock_filesystem_written_bytes_total" ["filesystem", "socket"] "bytes"
        "Bytes that guests wrote.";
    FS_IN_FLIGHT: Gauge "penstock_filesystem_requests_in_flight" ["filesystem", "socket"] "1"
        "Requests that were taken from the guest and not answered yet.";
    FS_CONNECTED: Gauge "penstock_filesystem_connected" ["filesystem", "socket"] "1"
        "1 while a guest is connected to the attachment.";
    FS_QUESTIONS: Counter "penstock_filesystem_questions_total" ["filesystem"] "1"
        "Questions of this node to the namespace's leader.";
    FS_LISTED: Counter "penstock_filesystem_listed_names_total" ["filesystem"] "1"
        "Names of directories in the answers to these questions.";
    FS_OPERATIONS: Counter "penstock_filesystem_operations_total" ["filesystem"] "1"
        "Changes of the namespace that this node asked its leader for.";
    FS_HITS: Counter "penstock_filesystem_cache_hits_total" ["filesystem"] "1"
        "Looks at what this node has cached of a namespace that found what was looked for.";
    FS_MISSES: Counter "penstock_filesystem_cache_misses_total" ["filesystem"] "1"
        "Looks at what this node has cached of a namespace that did not find it.";
    FS_CAPABILITIES: Gauge "penstock_filesystem_capabilities" ["filesystem"] "1"
        "Directories and files that this node may answer about without asking the namespace's leader.";
    FS_RECALLS: Counter "penstock_filesystem_recalls_total" ["filesystem"] "1"
        "Capabilities that this node was asked to give up, as another node changed what they cover.";
    FS_CHANGED: Counter "penstock_filesystem_changed_meanwhile_total" ["filesystem"] "1"
        "Changes that were made once more, as another host had changed the file meanwhile.";
    FS_THROTTLED: Counter "penstock_filesystem_throttled_total" ["filesystem"] "1"
        "Pauses of 100 ms of writes that waited for freed space to come back to the pool.";
    FS_FLUSHES: Counter "penstock_filesystem_flushes_total" ["filesystem"] "1"
        "Flushes of file data; writes that come together share one.";
    FS_DATA_HITS: Counter "penstock_filesystem_data_cache_hit_bytes_total" ["filesystem"] "bytes"
        "Bytes of file data that guests read, or had completed, out of this node's memory, in whole blocks.";
    FS_DATA_MISSES: Counter "penstock_filesystem_data_cache_miss_bytes_total" ["filesystem"] "bytes"
        "Bytes of file data that were read from the pool, as they were not cached.";
    FS_READ_AHEAD: Counter "penstock_filesystem_read_ahead_bytes_total" ["filesystem"] "bytes"
        "Bytes of file data that were read before a guest asked for them.";
    FS_DIRTY: Gauge "penstock_filesystem_dirty_bytes" ["filesystem"] "bytes"
        "Bytes that guests wrote and that are not durable yet; fsync waits for those of a file.";
    FS_WRITTEN_BACK: Counter "penstock_filesystem_written_back_bytes_total" ["filesystem"] "bytes"
        "Bytes that were buffered and are durable now, in whole blocks.";
    FS_WRITE_BACK_FAILURES: Counter "penstock_filesystem_write_back_failures_total" ["filesystem"] "1"
        "Files of which something could not be written back: close, fsync or the next write fails.";
    FS_LOST: Counter "penstock_filesystem_lost_bytes_total" ["filesystem"] "bytes"
        "Bytes that were lost by that, in whole blocks.";
    FS_DATA_CACHE: Gauge "penstock_filesystem_data_cache_bytes" [] "bytes"
        "Memory that file data take which are cached, of all filesystems of this node.";
    FS_DATA_CACHE_MAX: Gauge "penstock_filesystem_data_cache_max_bytes" [] "bytes"
        "Memory that they may take.";
    VOLUME_SIZE: Gauge "penstock_volume_size_bytes" ["volume", "pool"] "bytes"
        "Size of each volume of the cluster, as guests see it.";
    VOLUME_USED: Gauge "penstock_volume_used_bytes" ["volume", "pool"] "bytes"
        "Bytes of it that hold data: one copy, at most 12 minutes old. Left out where it is not known.";
    DEVICE_CAPACITY: Gauge "penstock_device_capacity_bytes" ["device"] "bytes"
        "Bytes that a device of this node can hold.";
    DEVICE_USED: Gauge "penstock_device_used_bytes" ["device"] "bytes"
        "Bytes in use on the device.";
    DEVICE_MEMORY: Gauge "penstock_device_memory_bytes" ["device"] "bytes"
        "Memory in the daemon that the device's map takes.";
    SCRUB_PASSES: Counter "penstock_scrub_passes_total" ["device"] "1"
        "Passes over the whole device that the scrub completed.";
    SCRUB_BLOCKS: Counter "penstock_scrub_blocks_total" ["device"] "1"
        "Blocks of 4 KiB that the scrub compared with their checksum.";
    SCRUB_BAD: Counter "penstock_scrub_bad_blocks_total" ["device"] "1"
        "Blocks that failed this comparison.";
    SCRUB_REPAIRED: Counter "penstock_scrub_repaired_blocks_total" ["device"] "1"
        "Bad blocks that were written again from another replica.";
    DEVICE_BAD: Gauge "penstock_device_bad_blocks" ["device"] "1"
        "Bad blocks that are not repaired yet, 1,024 at most.";
    STORE_OPS: Counter "penstock_store_ops_total" ["device"] "1"
        "Operations that the store completed: reads, writes, discards and flushes, including those of the \
         cleaner and of copies.";
    STORE_WRITE_OP_BYTES: Counter "penstock_store_write_bytes_total" ["device"] "bytes"
        "Bytes that write operations asked to store. Divide penstock_store_device_written_bytes_total by it \
         for the write amplification.";
    STORE_READ_OP_BYTES: Counter "penstock_store_read_bytes_total" ["device"] "bytes"
        "Bytes that read operations asked for.";
    STORE_DEVICE_READS: Counter "penstock_store_device_reads_total" ["device"] "1"
        "Reads that the store issued to its device.";
    STORE_DEVICE_READ_BYTES: Counter "penstock_store_device_read_bytes_total" ["device"] "bytes"
        "Bytes of these reads.";
    STORE_DEVICE_WRITES: Counter "penstock_store_device_writes_total" ["device"] "1"
        "Writes that the store issued to its device.";
    STORE_DEVICE_WRITTEN_BYTES: Counter "penstock_store_device_written_bytes_total" ["device"] "bytes"
        "Bytes of these writes.";
    STORE_DEVICE_FLUSHES: Counter "penstock_store_device_flushes_total" ["device"] "1"
        "Flushes that the store issued to its device.";
    STORE_LOG_BATCHES: Counter "penstock_store_log_batches_total" ["device"] "1"
        "Batches written to the log.";
    STORE_LOG_BLOCKS: Counter "penstock_store_log_blocks_total" ["device"] "1"
        "Blocks of 4 KiB in these batches.";
    STORE_CHECKPOINTS: Counter "penstock_store_checkpoints_total" ["device"] "1"
        "Checkpoints made durable.";
    STORE_CHECKPOINT_BYTES: Counter "penstock_store_checkpoint_bytes_total" ["device"] "bytes"
        "Bytes that checkpoints wrote.";
    STORE_MAP_HITS: Counter "penstock_store_map_cache_hits_total" ["device"] "1"
        "Map pages that were found in memory.";
    STORE_MAP_MISSES: Counter "penstock_store_map_cache_misses_total" ["device"] "1"
        "Map pages that had to be read from the device.";
    STORE_MOVED_BYTES: Counter "penstock_store_moved_bytes_total" ["device"] "bytes"
        "Bytes that the cleaner moved to put data in order.";
    STORE_CHECKSUM_RETRIES: Counter "penstock_store_checksum_retries_total" ["device"] "1"
        "Reads whose first checksum failed and that were repeated.";
    STORE_CHECKSUM_ERRORS: Counter "penstock_store_checksum_errors_total" ["device"] "1"
        "Checksum failures that remained: data that cannot be read from this device.";
    STORE_NO_ROOM: Counter "penstock_store_enospc_total" ["device"] "1"
        "Operations that the store refused for want of room.";
    STORE_CHUNKS: Gauge "penstock_store_chunks" ["device"] "1"
        "Chunks that the store knows.";
    STORE_PAGES_TO_CLEAN: Gauge "penstock_store_pages_to_clean" ["device"] "1"
        "Map pages that wait for the cleaner.";
    STORE_DIRTY_PAGES: Gauge "penstock_store_dirty_pages" ["device"] "1"
        "Map pages that the next checkpoint writes.";
    STORE_FREED_UNITS: Gauge "penstock_store_freed_units" ["device"] "1"
        "Units of 4 KiB that are free once the next checkpoint is durable.";
    PEER_ASKED: Counter "penstock_peer_requests_total" [] "1"
        "Requests for data that this node sent to other nodes. Each is one round trip.";
    PEER_SERVED: Counter "penstock_peer_served_total" [] "1"
        "Requests for data that this node executed for other nodes.";
    NET_SENT: Counter "penstock_network_sent_bytes_total" ["transport"] "bytes"
        "Bytes of data sent to other nodes, over `tcp` or `rdma`.";
    NET_RECEIVED: Counter "penstock_network_received_bytes_total" ["transport"] "bytes"
        "Bytes of data received from other nodes, over `tcp` or `rdma`.";
    RDMA_MESSAGES: Counter "penstock_rdma_messages_total" [] "1"
        "Messages sent over RDMA: requests and replies.";
    RDMA_INSIDE: Counter "penstock_rdma_inside_total" [] "1"
        "RDMA messages that carry their data inside.";
    RDMA_READS: Counter "penstock_rdma_reads_total" [] "1"
        "READs of other nodes' memory: one for each piece of memory that a request's data come from.";
    RDMA_WRITES: Counter "penstock_rdma_writes_total" [] "1"
        "WRITEs to other nodes' memory: one for each piece of memory that a reply's data go to.";
    RDMA_WINDOWS: Counter "penstock_rdma_windows_total" [] "1"
        "Memory windows that this node opened, each to one node and for one request.";
    RDMA_COPIED: Counter "penstock_rdma_copied_bytes_total" [] "bytes"
        "Bytes of data that this node copied to send them over RDMA, because their memory is not pinned or \
         is in too many pieces.";
    RDMA_NO_CREDIT: Counter "penstock_rdma_credits_exhausted_total" [] "1"
        "Requests that went over TCP although RDMA works, because too many were in flight there.";
    RDMA_TORN: Counter "penstock_rdma_qp_failures_total" [] "1"
        "RDMA connections that failed; their requests went on over TCP.";
    RDMA_REGIONS: Gauge "penstock_rdma_regions" [] "1"
        "Pieces of memory that are registered with the card: guests' memory, and buffers of data threads.";
    RDMA_PINNED: Gauge "penstock_rdma_pinned_bytes" [] "bytes"
        "Bytes of registered memory. They cannot be swapped or given back.";
    RDMA_REGISTRATIONS: Counter "penstock_rdma_registrations_total" [] "1"
        "Registrations of memory. Guests' memory is registered once; no request registers any.";
    RESYNC_ROUNDS: Counter "penstock_resync_rounds_total" [] "1"
        "Resyncs that brought a replica on this node up to date.";
    RESYNC_FAILED: Counter "penstock_resync_failed_rounds_total" [] "1"
        "Resyncs that failed.";
    RESYNC_BYTES: Counter "penstock_resync_bytes_total" [] "bytes"
        "Bytes that resyncs copied to this node's replicas.";
    RESYNC_PAGES: Counter "penstock_resync_compared_pages_total" [] "1"
        "Map pages that resyncs compared, 4 KiB for each MiB of data.";
    RESYNC_LOST: Counter "penstock_resync_lost_blocks_total" [] "1"
        "Blocks that no replica in sync could read during a resync. This node has them without their data.";
    EPOCH: Gauge "penstock_cluster_epoch" [] "1"
        "Version of the cluster map on this node.";
    NODES: Gauge "penstock_cluster_nodes" ["state"] "1"
        "Nodes of the cluster by state: up, down, or not_started for one that joined and never ran.";
    NODES_DRAINING: Gauge "penstock_cluster_nodes_draining" [] "1"
        "Nodes that are being emptied.";
    DEVICES: Gauge "penstock_cluster_devices" ["state"] "1"
        "Devices of the cluster by state: online, offline, failed. Devices of a node that is down are \
         offline.";
    GROUPS: Gauge "penstock_pool_groups" ["pool", "state"] "1"
        "Placement groups of a pool by state. in_sync and degraded make up all; waiting, syncing and moving \
         ones are among them.";
    POOL_VOLUMES: Gauge "penstock_pool_volumes" ["pool"] "1"
        "Volumes in a pool.";
    POOL_PROVISIONED: Gauge "penstock_pool_provisioned_bytes" ["pool"] "bytes"
        "Sizes of a pool's volumes in all their copies: what they may come to take.";
    POOL_CAPACITY: Gauge "penstock_pool_capacity_bytes" ["pool"] "bytes"
        "What the devices of a pool hold, all copies counted. Pools may share devices.";
    POOL_USED: Gauge "penstock_pool_used_bytes" ["pool"] "bytes"
        "What is in use on these devices, by whatever pool, as far as their nodes were heard of lately.";
    POOL_FULLEST: Gauge "penstock_pool_fullest_device_percent" ["pool"] "1"
        "How much of a pool's fullest device is in use. Writes wait once it is full.";
    META_LEADER: Gauge "penstock_meta_is_leader" [] "1"
        "1 if this node leads the metadata service.";
    META_SILENT: Gauge "penstock_meta_leader_silent_seconds" [] "seconds"
        "Time since a leader with a majority last heard of this node; well below a second when all is well.";
    META_TERM: Gauge "penstock_meta_term" [] "1"
        "Term of the metadata service; it grows with every election.";
    META_APPLIED: Gauge "penstock_meta_applied_index" [] "1"
        "Last entry of the metadata log that this node has applied.";
    META_LAST: Gauge "penstock_meta_last_index" [] "1"
        "Last entry in this node's metadata log.";
    META_VOTERS: Gauge "penstock_meta_voters" [] "1"
        "Nodes that vote in the metadata service.";
}

/// What stands before the list.
#[cfg(test)]
const HEAD: &str = "\
# Metrics

A daemon tells these values to Prometheus, as text, at `GET /metrics`. They are on its admin socket,
and over plain HTTP at the address that `metrics_listen = \"ADDR:PORT\"` in its configuration names.
That address is off by default. Whoever reaches it can read names of volumes and sockets and how
busy they are, and can do nothing else there. Let only your monitoring reach it.

```yaml
scrape_configs:
  - job_name: penstock
    static_configs:
      - targets: [\"10.0.0.1:9180\", \"10.0.0.2:9180\"]
```

Counters begin at 0 with each start of a daemon, those of a volume with each start of its
attachment. Values of nodes, pools, volumes' sizes and data, and the metadata service are of the
whole cluster, as the asked node knows it; every node tells them. All others are of the node itself.

Each entry names the metric, its type, its unit (1 is a plain number) and its labels. The list is
made from the code, and a test compares both. A histogram has the series NAME_bucket, with a label
`le` more, NAME_sum and NAME_count.
";

/// Longest line of a document.
#[cfg(test)]
const COLUMNS_MAX: usize = 110;

/// The list as `docs/METRICS.md` has it.
#[cfg(test)]
pub fn document() -> String {
    let mut text = HEAD.to_owned();
    for family in ALL {
        let labels: Vec<String> = family.labels.iter().map(|l| format!("`{l}`")).collect();
        let labels = match labels.is_empty() {
            true => String::new(),
            false => format!("; labels {}", labels.join(", ")),
        };
        let (name, kind, unit) = (family.name, family.kind.word(), family.unit);
        text.push_str(&format!("\n- `{name}` — {kind}, {unit}{labels}\n"));
        let mut line = String::from(" ");
        for word in family.help.split(' ') {
            if line.chars().count() + 1 + word.chars().count() > COLUMNS_MAX {
                text.push_str(&line);
                text.push('\n');
                line = String::from(" ");
            }
            line.push(' ');
            line.push_str(word);
        }
        text.push_str(&line);
        text.push('\n');
    }
    text
}
