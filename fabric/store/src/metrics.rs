//! Counters of one shard. Plain numbers: the shard is not shared, whoever reads them holds it.

/// Bytes of RAM a shard holds, by purpose.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RamBytes {
    /// Chunk records and their index: grows with the chunks stored.
    pub chunks: u64,
    /// Space bitmaps and region counts: grows with the capacity.
    pub bitmaps: u64,
    /// Map page cache, at its bound.
    pub leaf_cache: u64,
    /// Map pages of it that were ever filled, and its index; part of the figure above.
    pub leaves: u64,
    /// Data buffers, at their bound.
    pub buffers: u64,
    /// Operation and device request tables, and units waiting for the next checkpoint.
    pub tables: u64,
}

impl RamBytes {
    /// What the shard now holds of its map: chunks, bitmaps and map pages.
    #[must_use]
    pub fn map(&self) -> u64 {
        self.chunks + self.bitmaps + self.leaves
    }

    /// Sum of all, at their bounds.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.chunks + self.bitmaps + self.leaf_cache + self.buffers + self.tables
    }
}

/// Counters since the shard was opened, and current sizes.
///
/// A flat record of more fields than other types have: it has no behaviour to divide, every field is one
/// exported figure, and whoever adds shards up takes them one by one.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct StoreMetrics {
    /// RAM by purpose.
    pub ram: RamBytes,
    /// Operations completed.
    pub ops: u64,
    /// Bytes that write operations asked to store.
    pub write_op_bytes: u64,
    /// Bytes that read operations asked for.
    pub read_op_bytes: u64,
    /// Device reads issued.
    pub device_reads: u64,
    /// Bytes of them.
    pub device_read_bytes: u64,
    /// Device writes issued.
    pub device_writes: u64,
    /// Bytes of them.
    pub device_write_bytes: u64,
    /// Device flushes issued.
    pub device_flushes: u64,
    /// Log batches written.
    pub log_batches: u64,
    /// Blocks that went through log batches.
    pub log_blocks: u64,
    /// Checkpoints made durable.
    pub checkpoints: u64,
    /// Bytes written by checkpoints (map pages, tables, bitmaps, superblocks).
    pub checkpoint_bytes: u64,
    /// Map page cache hits.
    pub leaf_hits: u64,
    /// Map page cache misses: each cost a device read.
    pub leaf_misses: u64,
    /// Blocks read by the scrubber.
    pub scrubbed_blocks: u64,
    /// Bytes that the cleaner moved.
    pub moved_bytes: u64,
    /// Map pages that the cleaner has looked at.
    pub cleaned_leaves: u64,
    /// Map pages whose data changed since the cleaner looked at them, or wait for room to be put in order.
    pub leaves_to_clean: u64,
    /// Reads whose first checksum failed.
    pub checksum_retries: u64,
    /// Checksum failures that remained.
    pub checksum_errors: u64,
    /// Map pages that could not be read and were replaced: of the blocks that they mapped only what was
    /// written since is known.
    pub lost_leaves: u64,
    /// Pages of the map and the chunk table that the device had lost and that were written again from memory.
    pub rewritten_pages: u64,
    /// Operations refused for want of room.
    pub refused_for_room: u64,
    /// Chunks known.
    pub chunks: u64,
    /// Dirty map pages that the next checkpoint writes.
    pub dirty_leaves: u64,
    /// Units freed that the next checkpoint gives back.
    pub quarantined_units: u64,
}

impl StoreMetrics {
    /// Bytes written to the device per byte written by operations, times 1000; 0 before the first write.
    #[must_use]
    pub fn write_amplification_milli(&self) -> u64 {
        (self.device_write_bytes * 1000)
            .checked_div(self.write_op_bytes)
            .unwrap_or(0)
    }
}
