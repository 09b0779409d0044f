//! Sizes of volumes.

use api::metrics::{Page, families};
use service::view::{View, is_listed};
use storage::Used;

/// Puts the size of each volume, and what it stores.
pub(crate) fn put(page: &mut Page, view: &View, used: &Used) {
    for volume in view.volumes.iter().filter(|v| is_listed(v)) {
        let labels = [volume.name.as_str(), volume.pool.as_str()];
        page.put(&families::VOLUME_SIZE, &labels, volume.size_bytes);
    }
    put_used(page, view, used);
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
