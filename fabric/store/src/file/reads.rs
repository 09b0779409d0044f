//! Several reads of a device in flight at a time, for one thread.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::time::Duration;

use super::super::device::{DeviceAction, IoId, IoVecs, ReadAt};
use super::super::uring::Uring;

/// How long a wait for the device lasts before it is looked at again.
const WAIT: Duration = Duration::from_secs(1);
/// Pause after a wait that the kernel refused: the buffers must stay until it has let go of them.
const WAIT_PAUSE: Duration = Duration::from_millis(1);

/// See the module.
pub(super) struct Reads(Uring);

impl std::fmt::Debug for Reads {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Reads").finish_non_exhaustive()
    }
}

impl Reads {
    /// Reads of this file.
    pub(super) fn new(file: &File) -> io::Result<Self> {
        Ok(Self(Uring::new(&[file.as_fd()])?))
    }

    /// Makes these reads and waits for all of them.
    pub(super) fn make(&mut self, reads: &mut [ReadAt<'_>]) -> io::Result<()> {
        let iovecs: Vec<libc::iovec> = reads
            .iter_mut()
            .map(|read| libc::iovec {
                iov_base: read.buf.as_mut_ptr().cast(),
                iov_len: read.buf.len(),
            })
            .collect();
        let (mut next, mut failed) = (0, None);
        // After an error nothing more is started, but what was is waited for.
        while self.0.in_flight() > 0 || (next < reads.len() && failed.is_none()) {
            while next < reads.len() && self.0.room() > 0 && failed.is_none() {
                let action = DeviceAction::Read {
                    id: IoId(next as u64),
                    offset: reads[next].offset,
                    iovecs: IoVecs {
                        ptr: &iovecs[next],
                        len: 1,
                    },
                };
                // SAFETY: lists and buffers live until this function returns, which it does with nothing in
                // flight.
                unsafe { self.0.start(0, 0, &action) };
                next += 1;
            }
            if let Err(error) = self.0.wait(WAIT) {
                tracing::warn!(%error, "cannot wait for device reads");
                std::thread::sleep(WAIT_PAUSE);
            }
            self.0.reap(|finished| {
                failed = failed.or(finished.result.err());
            });
        }
        failed.map_or(Ok(()), |errno| Err(io::Error::from_raw_os_error(errno)))
    }
}
