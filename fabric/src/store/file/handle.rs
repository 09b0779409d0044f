//! A device handle for one thread, which keeps several reads in flight.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::time::Duration;

use super::super::device::{DeviceAction, IoId, IoVecs, ReadAt, SyncDevice};
use super::super::uring::Uring;
use super::DeviceFile;

/// How long a wait for the device lasts before it is looked at again.
const WAIT: Duration = Duration::from_secs(1);
/// Pause after a wait that the kernel refused: the buffers must stay until it has let go of them.
const WAIT_PAUSE: Duration = Duration::from_millis(1);

/// See the module.
pub struct Handle {
    file: File,
    capacity_bytes: u64,
    uring: Uring,
}

impl Handle {
    /// One more handle on an open device; it shares the lock with the first.
    pub fn new(device: &DeviceFile) -> io::Result<Self> {
        let file = device.try_clone()?;
        let uring = Uring::new(&[file.as_fd()])?;
        Ok(Self {
            file,
            capacity_bytes: device.capacity_bytes,
            uring,
        })
    }
}

impl SyncDevice for Handle {
    fn capacity_bytes(&self) -> u64 {
        self.capacity_bytes
    }

    fn read_at(&mut self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        self.file.read_exact_at(buf, offset)
    }

    fn write_at(&mut self, offset: u64, buf: &[u8]) -> io::Result<()> {
        self.file.write_all_at(buf, offset)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.sync_data()
    }

    fn read_many(&mut self, reads: &mut [ReadAt<'_>]) -> io::Result<()> {
        let iovecs: Vec<libc::iovec> = reads
            .iter_mut()
            .map(|read| libc::iovec {
                iov_base: read.buf.as_mut_ptr().cast(),
                iov_len: read.buf.len(),
            })
            .collect();
        let (mut next, mut failed) = (0, None);
        // After an error nothing more is started, but what was is waited for.
        while self.uring.in_flight() > 0 || (next < reads.len() && failed.is_none()) {
            while next < reads.len() && self.uring.room() > 0 && failed.is_none() {
                let action = DeviceAction::Read {
                    id: IoId(next as u64),
                    offset: reads[next].offset,
                    iovecs: IoVecs {
                        ptr: &iovecs[next],
                        len: 1,
                    },
                };
                // SAFETY: lists and buffers live until this function returns, which it does with nothing in flight.
                unsafe { self.uring.start(0, 0, &action) };
                next += 1;
            }
            if let Err(error) = self.uring.wait(WAIT) {
                tracing::warn!(%error, "cannot wait for device reads");
                std::thread::sleep(WAIT_PAUSE);
            }
            self.uring.reap(|finished| {
                failed = failed.or(finished.result.err());
            });
        }
        failed.map_or(Ok(()), |errno| Err(io::Error::from_raw_os_error(errno)))
    }
}
