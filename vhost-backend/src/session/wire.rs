//! Messages over a unix socket: exact reads, descriptors in ancillary data, waits that a wake-up interrupts.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::cmsg_space;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use zerocopy::{FromZeros, IntoBytes};

use super::codec::{Frame, FramingError, check_header};
use super::message::{Header, MAX_FDS};

/// Why a connection ended, or a wait for it.
#[derive(Debug, thiserror::Error)]
pub enum WireError {
    /// The front end hung up between two messages.
    #[error("front end closed the connection")]
    Closed,
    /// The front end hung up within a message.
    #[error("front end closed the connection within a message")]
    Truncated,
    /// The stream cannot be understood.
    #[error(transparent)]
    Framing(#[from] FramingError),
    /// The operating system reported an error.
    #[error("socket: {0}")]
    Os(#[from] Errno),
    /// The owner of the attachment wants the thread to end.
    #[error("attachment is being closed")]
    Stopping,
}

/// Decides, while a connection waits, whether to go on.
pub trait Waiter {
    /// Waits until `socket` is ready for `events`. An error ends the connection.
    fn wait(&mut self, socket: BorrowedFd<'_>, events: PollFlags) -> Result<(), WireError>;
}

/// Waits for `socket` or `wake`; returns whether each is ready.
pub fn wait_either(
    socket: BorrowedFd<'_>,
    events: PollFlags,
    wake: BorrowedFd<'_>,
) -> io::Result<(bool, bool)> {
    let mut fds = [
        PollFd::from_borrowed_fd(socket, events),
        PollFd::from_borrowed_fd(wake, PollFlags::IN),
    ];
    loop {
        match poll(&mut fds, None) {
            Ok(_) => break,
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok((!fds[0].revents().is_empty(), !fds[1].revents().is_empty()))
}

/// Receives one message.
///
/// Header and payload are read with their exact lengths: a longer read could run into the next message and
/// take the descriptors that belong to it.
pub fn receive(socket: BorrowedFd<'_>, waiter: &mut impl Waiter) -> Result<Frame, WireError> {
    let mut fds = Vec::new();
    let mut header = Header::new_zeroed();
    fill(socket, header.as_mut_bytes(), &mut fds, true, waiter)?;
    check_header(&header)?;
    let mut payload = vec![0; header.size as usize];
    fill(socket, &mut payload, &mut fds, false, waiter)?;
    Ok(Frame {
        header,
        payload,
        fds,
    })
}

fn fill(
    socket: BorrowedFd<'_>,
    buffer: &mut [u8],
    fds: &mut Vec<OwnedFd>,
    may_end: bool,
    waiter: &mut impl Waiter,
) -> Result<(), WireError> {
    let mut filled = 0;
    while filled < buffer.len() {
        match receive_some(socket, &mut buffer[filled..], fds)? {
            None => waiter.wait(socket, PollFlags::IN)?,
            Some(0) if filled == 0 && may_end => return Err(WireError::Closed),
            Some(0) => return Err(WireError::Truncated),
            Some(count) => filled += count,
        }
    }
    Ok(())
}

/// What there is, up to the length of `buffer`; `None` if there is nothing yet.
fn receive_some(
    socket: BorrowedFd<'_>,
    buffer: &mut [u8],
    fds: &mut Vec<OwnedFd>,
) -> Result<Option<usize>, WireError> {
    let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(MAX_FDS))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    let got = match recvmsg(socket, &mut [IoSliceMut::new(buffer)], &mut control, flags) {
        Ok(got) => got,
        Err(Errno::AGAIN) => return Ok(None),
        Err(Errno::INTR) => return Ok(None),
        Err(Errno::CONNRESET) => return Ok(Some(0)),
        Err(error) => return Err(error.into()),
    };
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            fds.extend(rights);
        }
    }
    if got.flags.contains(ReturnFlags::CTRUNC) || fds.len() > MAX_FDS {
        return Err(FramingError::TooManyFds.into());
    }
    Ok(Some(got.bytes))
}

/// Sends one message, waiting as long as the front end does not read.
pub fn send(
    socket: BorrowedFd<'_>,
    bytes: &[u8],
    fd: Option<&OwnedFd>,
    waiter: &mut impl Waiter,
) -> Result<(), WireError> {
    let mut sent = 0;
    while sent < bytes.len() {
        let fd = fd.filter(|_| sent == 0);
        match send_some(socket, &bytes[sent..], fd) {
            Ok(count) => sent += count,
            Err(Errno::AGAIN | Errno::INTR) => waiter.wait(socket, PollFlags::OUT)?,
            Err(Errno::PIPE | Errno::CONNRESET) => return Err(WireError::Closed),
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

/// Sends what the socket takes without waiting.
pub fn send_some(
    socket: BorrowedFd<'_>,
    bytes: &[u8],
    fd: Option<&OwnedFd>,
) -> Result<usize, Errno> {
    let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let rights = fd.map(|fd| [fd.as_fd()]);
    if let Some(rights) = &rights {
        control.push(SendAncillaryMessage::ScmRights(rights));
    }
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    sendmsg(socket, &[IoSlice::new(bytes)], &mut control, flags)
}
