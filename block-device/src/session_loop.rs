//! What the threads of block devices share, whichever interface of the kernel they serve: waiting for events,
//! and trying to reach the daemon again.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, Timespec, poll};
use rustix::io::Errno;
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use crate::frontend::SessionError;

/// Between two attempts to connect to the daemon.
pub const RETRY: Duration = Duration::from_millis(50);
/// Between two log lines about a daemon that cannot be reached.
const LOG_INTERVAL: Duration = Duration::from_secs(60);

/// A new eventfd.
pub fn event() -> io::Result<EventFd> {
    EventFd::new(EFD_CLOEXEC | EFD_NONBLOCK)
}

/// The descriptor of an eventfd.
pub fn borrow(event: &EventFd) -> BorrowedFd<'_> {
    // SAFETY: the eventfd is open for as long as it is borrowed.
    unsafe { BorrowedFd::borrow_raw(event.as_raw_fd()) }
}

/// Waits for events, at most for [`RETRY`] if `is_retrying`. Returns which of `fds` have one; nothing if a
/// signal came.
pub fn wait(mut fds: Vec<PollFd<'_>>, is_retrying: bool) -> io::Result<Vec<bool>> {
    let limit = is_retrying.then_some(Timespec {
        tv_sec: 0,
        tv_nsec: i64::from(RETRY.subsec_nanos()),
    });
    match poll(&mut fds, limit.as_ref()) {
        Ok(_) => Ok(fds.iter().map(|fd| !fd.revents().is_empty()).collect()),
        Err(Errno::INTR) => Ok(vec![false; fds.len()]),
        Err(error) => Err(error.into()),
    }
}

/// Logs failures to reach the daemon, the first at once and then one a minute.
#[derive(Debug, Default)]
pub struct FailureLog(Option<Instant>);

impl FailureLog {
    /// The session failed.
    pub fn failed(&mut self, error: &SessionError) {
        if self.0.is_none_or(|at| at.elapsed() > LOG_INTERVAL) {
            self.0 = Some(Instant::now());
            tracing::warn!(%error, "no session with the daemon; trying again");
        }
    }

    /// The daemon serves the device.
    pub fn succeeded(&mut self) {
        self.0 = None;
    }
}
