//! Room in a guest's memory for what a READ reads.

use fs_client::ReadData;
use fs_device::GuestData;

/// The list of pieces is copied: the device's own is overwritten by the next request.
#[derive(Debug)]
pub struct Room {
    pieces: Vec<libc::iovec>,
    bytes: usize,
}

// SAFETY: the addresses are those of mapped memory, which is the same for every thread.
unsafe impl Send for Room {}

impl Room {
    /// The room of a request.
    pub fn new(data: &GuestData<'_>) -> Self {
        Self {
            pieces: data.pieces().to_vec(),
            bytes: data.len(),
        }
    }

    /// Bytes that it has room for.
    pub fn len(&self) -> usize {
        self.bytes
    }

    /// Copies data to its begin; there are not more than it has room for.
    ///
    /// # Safety
    /// The request has not been answered: its memory is mapped.
    pub unsafe fn fill(&self, read: &ReadData) {
        // SAFETY: the caller's promise; the pieces have as many bytes as the request's data.
        let data = unsafe { GuestData::new(&self.pieces, self.bytes) };
        let mut at = 0;
        for bytes in read.slices() {
            data.write_at(at, bytes);
            at += bytes.len();
        }
    }
}
