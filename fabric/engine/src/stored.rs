//! How much data each layer stores on this node's devices.

use std::collections::HashMap;

use fabric_store::api::StoreCore;
use fabric_types::ids::{ChunkKey, LayerId};

use super::Fabric;
use super::control::Control;
use super::stores::Stores;

/// Chunks looked at under one lock, for a tenth of a millisecond at most: half a microsecond each if all
/// their map pages have changed since the last checkpoint.
const LISTED_MAX: usize = 256;

/// What a layer stores.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct StoredBytes {
    /// Bytes of data, in blocks of 4 KiB, as they are now: what was written and not discarded since.
    pub bytes: u64,
    /// Chunks that are not counted yet, because a program of an earlier version has stored them. The stores
    /// count some of them whenever they have nothing else to do.
    pub uncounted_chunks: u64,
}

impl Stores {
    /// Shows all chunks with the device that they lie on and the bytes that they store, `None` if those are
    /// not counted. Called without a lock.
    fn each_stored(&self, mut show: impl FnMut(u32, ChunkKey, Option<u64>)) {
        let mut listed = Vec::with_capacity(LISTED_MAX);
        for shard in self.shard_indexes() {
            let device = self.device_of(shard);
            let mut cursor = Some(0);
            while let Some(from) = cursor {
                cursor = self.list_stored(shard, from, &mut listed);
                for (chunk, bytes) in listed.drain(..) {
                    show(device, chunk, bytes);
                }
            }
        }
    }

    /// The next chunks of a shard, from a position on; the position behind them unless it is the end.
    fn list_stored(
        &self,
        shard: u32,
        mut from: u32,
        listed: &mut Vec<(ChunkKey, Option<u64>)>,
    ) -> Option<u32> {
        let state = self.lock(shard);
        while listed.len() < LISTED_MAX {
            let (chunk, bytes, next) = state.core.next_stored(from)?;
            listed.push((chunk, bytes));
            from = next;
        }
        Some(from)
    }
}

impl Control {
    fn stored(
        &self,
        mut counts: impl FnMut(&[u8; 16], ChunkKey) -> bool,
    ) -> HashMap<LayerId, StoredBytes> {
        let mut found: HashMap<LayerId, StoredBytes> = HashMap::new();
        let stores = self.stores();
        stores.each_stored(|device, chunk, bytes| {
            let label = &stores.device(device).label;
            if counts(&label.device, chunk) {
                let layer = found.entry(chunk.layer).or_default();
                layer.bytes += bytes.unwrap_or(0);
                layer.uncounted_chunks += u64::from(bytes.is_none());
            }
        });
        found
    }
}

impl Fabric {
    /// What each layer stores on this node, of the chunks that `counts` says to count on the device of this
    /// identity; a layer without any is left out. It goes by what is in memory, and takes well below a
    /// microsecond for each chunk.
    pub fn stored(
        &self,
        counts: impl FnMut(&[u8; 16], ChunkKey) -> bool,
    ) -> HashMap<LayerId, StoredBytes> {
        let control = self.control.as_ref();
        control.map_or_else(HashMap::new, |control| control.stored(counts))
    }
}
