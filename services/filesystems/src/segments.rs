//! Segments that this node reads: their volumes, opened without a lease.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use fs_client::DataError;
use namespace::{FilesystemId, SegmentId};

use crate::backend::Parts;
use storage::Handle;

/// Segments of a filesystem that are open for reading; the one that was used least recently is closed for a
/// further one. The fabric opens 4,096 volumes in all.
const OPEN_MAX: usize = 64;

#[derive(Default)]
struct Open {
    by_segment: BTreeMap<SegmentId, (Handle, u64)>,
    /// Counts uses.
    clock: u64,
}

/// The segments of a filesystem, for reading.
pub struct Readers {
    parts: Parts,
    filesystem: FilesystemId,
    open: Mutex<Open>,
}

impl Readers {
    pub fn new(parts: Parts, filesystem: FilesystemId) -> Self {
        Self {
            parts,
            filesystem,
            open: Mutex::default(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Open> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A segment's volume.
    pub async fn get(&self, segment: SegmentId) -> Result<Handle, DataError> {
        if let Some(handle) = self.lock().get(segment) {
            return Ok(handle);
        }
        let meta = &self.parts.meta;
        let volume = match meta.segment_volume(self.filesystem, segment).await {
            Ok(Some(volume)) => volume,
            // It was empty, and is gone: nothing names it any more.
            Ok(None) => return Err(DataError::Io),
            Err(error) => {
                tracing::warn!(?segment, %error, "find a segment");
                return Err(DataError::Io);
            }
        };
        let epoch = meta.map().epoch();
        let opened = self.parts.storage.open_for_reading(&volume, epoch).await;
        let handle = opened.map_err(|failure| {
            tracing::warn!(?segment, %failure, "open a segment");
            DataError::Io
        })?;
        self.lock().put(segment, handle.clone());
        Ok(handle)
    }

    /// It is opened anew the next time.
    pub fn forget(&self, segment: SegmentId) {
        self.lock().by_segment.remove(&segment);
    }
}

impl Open {
    fn get(&mut self, segment: SegmentId) -> Option<Handle> {
        self.clock += 1;
        let clock = self.clock;
        let (handle, used) = self.by_segment.get_mut(&segment)?;
        *used = clock;
        Some(handle.clone())
    }

    fn put(&mut self, segment: SegmentId, handle: Handle) {
        self.clock += 1;
        if self.by_segment.len() >= OPEN_MAX {
            let oldest = self.by_segment.iter().min_by_key(|(_, (_, used))| *used);
            let oldest = oldest.map(|(segment, _)| *segment);
            oldest.map(|segment| self.by_segment.remove(&segment));
        }
        self.by_segment.insert(segment, (handle, self.clock));
    }
}
