//! The space that is left in the file systems under sparse device files. Guests do not take the last of it:
//! metadata and logs may lie there, too.

use std::fs::Metadata;
use std::os::unix::fs::MetadataExt;

use fabric_store::api::StoreCore;

use super::stores::{Device, Stores};

/// Bytes that guests leave, at most and at least, and which share of the file system between that.
const LEFT_MAX: u64 = 128 << 20;
const LEFT_MIN: u64 = 4 << 20;
const LEFT_SHARE: u64 = 64;
/// Bytes of a block by which files tell how much they take.
const STAT_BLOCK_BYTES: u64 = 512;

/// Looks after all devices. There is enough everywhere, until it is looked.
#[derive(Debug, Default)]
pub struct HostSpace {
    /// Of each device: whether writes are refused.
    is_short: Vec<bool>,
}

impl HostSpace {
    /// Looks, and tells the stores what has changed.
    pub fn look(&mut self, stores: &Stores) {
        self.is_short.resize(stores.device_count() as usize, false);
        for (index, device) in stores.devices() {
            let was_short = &mut self.is_short[index as usize];
            let path = device.path.as_path();
            let (Ok(file), Ok(space)) = (std::fs::metadata(path), rustix::fs::statvfs(path)) else {
                // A device without a name is still one; its writes tell.
                continue;
            };
            let (total, free) = (
                space.f_blocks.saturating_mul(space.f_frsize),
                space.f_bavail.saturating_mul(space.f_frsize),
            );
            let is_short = is_sparse(&file)
                && is_short(total, free, *was_short)
                // What was deleted is written again before the file takes more.
                && taken(&file) < used(stores, device) + left(total);
            if is_short == *was_short {
                continue;
            }
            *was_short = is_short;
            for shard in device.shard_indexes() {
                stores.lock(shard).core.leave_host_space(is_short);
            }
            match is_short {
                true => tracing::warn!(
                    device = %path.display(), free_bytes = free,
                    "the file system under the device is nearly full: guests' writes are refused"
                ),
                false => tracing::info!(
                    device = %path.display(), free_bytes = free,
                    "the file system under the device has space again"
                ),
            }
        }
    }
}

/// Bytes that the file has taken.
fn taken(file: &Metadata) -> u64 {
    file.blocks().saturating_mul(STAT_BLOCK_BYTES)
}

/// Bytes that its stores use of them.
fn used(stores: &Stores, device: &Device) -> u64 {
    let shards = device.shard_indexes();
    let used = shards.map(|shard| stores.lock(shard).core.space().used_bytes);
    used.sum()
}

/// Bytes that guests leave to others on a file system of this size.
fn left(total: u64) -> u64 {
    (total / LEFT_SHARE).clamp(LEFT_MIN, LEFT_MAX)
}

/// Whether writes may need space that the file has not taken yet.
fn is_sparse(file: &Metadata) -> bool {
    file.is_file() && taken(file) < file.len()
}

/// Whether what is free is left to others. Twice as much has to be there before it is not any more.
fn is_short(total: u64, free: u64, was_short: bool) -> bool {
    let left = left(total);
    match was_short {
        true => free < 2 * left,
        false => free < left,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    #[test]
    fn guests_leave_a_share_of_the_file_system() {
        assert!(is_short(100 * GIB, LEFT_MAX - 1, false));
        assert!(!is_short(100 * GIB, LEFT_MAX, false));
        // On a small one less.
        assert!(!is_short(GIB, 16 << 20, false));
        assert!(is_short(GIB, (16 << 20) - 1, false));
        assert!(is_short(64 << 20, LEFT_MIN - 1, false));
        // No flapping at the limit.
        assert!(is_short(100 * GIB, 2 * LEFT_MAX - 1, true));
        assert!(!is_short(100 * GIB, 2 * LEFT_MAX, true));
    }

    #[test]
    fn a_file_with_holes_may_need_space() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        let file = std::fs::File::create(&path).unwrap();
        file.set_len(1 << 20).unwrap();
        assert!(is_sparse(&std::fs::metadata(&path).unwrap()));
        std::fs::write(&path, vec![1; 1 << 20]).unwrap();
        file.sync_all().unwrap();
        assert!(!is_sparse(&std::fs::metadata(&path).unwrap()));
    }
}
