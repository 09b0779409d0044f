//! A block device that the daemon may not open, handed over as an open descriptor by somebody who may.
//!
//! HTTP cannot carry a descriptor, so the connection is upgraded. After that both ends send messages of
//! [`block_device::wire`]: the daemon says that it listens (before, HTTP might read the client's message and
//! lose the descriptor), the client sends the path with the descriptor, and the daemon says what came of it.
//! It keeps the descriptor for as long as the connection is open.

use std::os::unix::net::UnixStream;
use std::time::Duration;

/// Protocol that a connection is upgraded to.
pub const PROTOCOL: &str = "penstock-device";
/// How long either end waits for the other's next message.
pub const STEP_WAIT: Duration = Duration::from_secs(10);

/// The stream as one whose calls wait, for [`STEP_WAIT`] at most.
pub fn blocking(stream: tokio::net::UnixStream) -> std::io::Result<UnixStream> {
    let stream = stream.into_std()?;
    stream.set_nonblocking(false)?;
    stream.set_read_timeout(Some(STEP_WAIT))?;
    stream.set_write_timeout(Some(STEP_WAIT))?;
    Ok(stream)
}
