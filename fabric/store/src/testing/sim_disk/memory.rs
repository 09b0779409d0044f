//! The memory that requests name.

use std::sync::Arc;

use fabric_types::iov::IoVecs;

use super::image::{Image, SECTOR_BYTES};

/// The list of a request.
pub(super) fn iovec_slice(iovecs: &IoVecs) -> &[libc::iovec] {
    // SAFETY: the store promises the array until the completion, which the caller has not delivered yet.
    unsafe { std::slice::from_raw_parts(iovecs.ptr, iovecs.len as usize) }
}

/// What a write stores.
///
/// # Panics
/// If its memory is not aligned as O_DIRECT wants it.
pub(super) fn gather(iovecs: &IoVecs) -> Arc<[u8]> {
    let mut bytes = Vec::new();
    for iovec in iovec_slice(iovecs) {
        assert_eq!(
            iovec.iov_len % SECTOR_BYTES,
            0,
            "iovec length breaks O_DIRECT"
        );
        assert_eq!(
            iovec.iov_base as usize % SECTOR_BYTES,
            0,
            "iovec address breaks O_DIRECT"
        );
        // SAFETY: the store promises the memory until the completion.
        bytes.extend_from_slice(unsafe {
            std::slice::from_raw_parts(iovec.iov_base.cast::<u8>(), iovec.iov_len)
        });
    }
    bytes.into()
}

/// Fills the memory of a read.
pub(super) fn scatter(iovecs: &IoVecs, image: &Image, offset: u64) {
    let mut at = offset;
    for iovec in iovec_slice(iovecs) {
        // SAFETY: the store promises the memory until the completion, and that nobody else uses it meanwhile.
        let part =
            unsafe { std::slice::from_raw_parts_mut(iovec.iov_base.cast::<u8>(), iovec.iov_len) };
        image.read(at, part);
        at += iovec.iov_len as u64;
    }
}
