//! Failed device writes and flushes: nobody knows what is on the device then. Writing stops, reading goes on.

use super::super::api::{LayerId, StoreError, StoreResult};

/// What has failed since the shard was opened.
#[derive(Debug)]
pub(super) struct Faults {
    shard: u32,
    /// Errno of the device write or flush that failed.
    errno: Option<i32>,
    /// It was a flush: no later one proves anything.
    flush_lost: bool,
    /// Blocks whose last write failed: it may or may not be on the device (layer, chunk, byte range).
    poisoned: Vec<(u64, u32, u32, u32)>,
}

impl Faults {
    pub(super) fn new(shard: u32) -> Self {
        Self {
            shard,
            errno: None,
            flush_lost: false,
            poisoned: Vec::new(),
        }
    }

    /// A device write or flush failed.
    pub(super) fn fail(&mut self, errno: i32) {
        if self.errno.is_none() {
            tracing::error!(
                shard = self.shard,
                errno,
                "device write or flush failed, shard is read-only until restart"
            );
            self.errno = Some(errno);
        }
    }

    /// A flush failed.
    pub(super) fn fail_flush(&mut self, errno: i32) {
        self.flush_lost = true;
        self.fail(errno);
    }

    /// Errno of what failed first, if writing has stopped.
    pub(super) fn errno(&self) -> Option<i32> {
        self.errno
    }

    pub(super) fn has_failed(&self) -> bool {
        self.errno.is_some()
    }

    /// Refuses whatever would write.
    pub(super) fn refuse_if_failed(&self) -> StoreResult {
        self.errno
            .map_or(Ok(()), |errno| Err(StoreError::ReadOnly(errno)))
    }

    /// Refuses whoever wants to know what is durable.
    pub(super) fn refuse_if_flush_lost(&self) -> StoreResult {
        match self.errno {
            Some(errno) if self.flush_lost => Err(StoreError::ReadOnly(errno)),
            _ => Ok(()),
        }
    }

    /// The write of a byte range failed.
    pub(super) fn poison(&mut self, layer: LayerId, chunk: u32, (start, end): (u32, u32)) {
        self.poisoned.push((layer.0, chunk, start, end));
    }

    /// Whether it is unknown what the device has of the byte range.
    pub(super) fn is_poisoned(&self, layer: LayerId, chunk: u32, (start, end): (u32, u32)) -> bool {
        self.poisoned
            .iter()
            .any(|&(l, c, from, to)| l == layer.0 && c == chunk && from < end && start < to)
    }
}
