//! Bytes between a socket and the machines: scatter and gather without copying when plain, through TLS
//! otherwise.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use super::caller::LinkError;
use super::handshake::HANDSHAKE_BYTES_MAX;
use super::queue::SendQueue;
use super::reader::{IOVECS_MAX, Reader};
use super::session::{PLAINTEXT_BYTES, RECORD_BYTES_MAX, Session, State};

/// Bytes that are read from a socket at once under TLS, a few records. What the handshake left over fits,
/// too.
const INCOMING_BYTES: usize = HANDSHAKE_BYTES_MAX;

/// Bytes that are encrypted before they are written.
const OUTGOING_BYTES: usize = 256 << 10;

const _: () = assert!(INCOMING_BYTES >= 2 * RECORD_BYTES_MAX);

/// What TLS keeps for a connection.
struct Tls {
    session: Session,
    incoming: Box<[u8]>,
    start: usize,
    end: usize,
    outgoing: Vec<u8>,
    sent: usize,
    /// Small pieces are joined here, so that a frame is one record and not two.
    joined: Vec<u8>,
}

/// A connected socket, non-blocking.
pub struct Socket {
    fd: OwnedFd,
    tls: Option<Box<Tls>>,
    list: Vec<libc::iovec>,
}

// SAFETY: `list` is only used within a call.
unsafe impl Send for Socket {}

impl Socket {
    /// A socket behind its handshake; `rest` are bytes that came with it, of TLS if there is a session.
    pub fn new(fd: OwnedFd, session: Option<Session>, rest: &[u8]) -> Self {
        let tls = session.map(|session| {
            let mut incoming = vec![0; INCOMING_BYTES].into_boxed_slice();
            incoming[..rest.len()].copy_from_slice(rest);
            Box::new(Tls {
                session,
                incoming,
                start: 0,
                end: rest.len(),
                outgoing: Vec::new(),
                sent: 0,
                joined: Vec::with_capacity(PLAINTEXT_BYTES),
            })
        });
        let list = Vec::new();
        Self { fd, tls, list }
    }

    /// The socket.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Receives once; false if there is nothing. Under TLS not more than a record, after which every complete
    /// frame must be taken out of the reader.
    pub fn receive(&mut self, reader: &mut Reader) -> Result<bool, LinkError> {
        if let Some(tls) = &mut self.tls {
            return tls.receive(&self.fd, reader);
        }
        self.list.clear();
        reader.space(&mut self.list);
        // SAFETY: the list is the reader's memory, or memory that whoever placed a payload keeps valid.
        let got = unsafe { receive(&self.fd, &mut self.list)? };
        if let Some(bytes) = got {
            reader.received(bytes);
        }
        Ok(got.is_some())
    }

    /// Sends what is queued; false if the socket takes no more for now.
    pub fn send(&mut self, queue: &mut SendQueue) -> Result<bool, LinkError> {
        if let Some(tls) = &mut self.tls {
            return tls.send(&self.fd, queue, &mut self.list);
        }
        while !queue.is_empty() {
            self.list.clear();
            queue.gather(&mut self.list, IOVECS_MAX);
            // SAFETY: whoever queued keeps the memory valid.
            match unsafe { send(&self.fd, &mut self.list)? } {
                Some(bytes) => queue.advance(bytes),
                None => return Ok(false),
            }
        }
        Ok(true)
    }
}

impl Tls {
    fn receive(&mut self, fd: &OwnedFd, reader: &mut Reader) -> Result<bool, LinkError> {
        loop {
            let incoming = &mut self.incoming[self.start..self.end];
            let processed = self
                .session
                .process(incoming, &mut self.outgoing, &mut |data| reader.push(data))?;
            self.start += processed.used;
            match processed.state {
                State::Data => return Ok(true),
                State::PeerClosed => return Err(LinkError::Closed),
                State::Open | State::Handshake => {}
            }
            self.incoming.copy_within(self.start..self.end, 0);
            self.end -= self.start;
            self.start = 0;
            let free = &mut self.incoming[self.end..];
            let mut list = [libc::iovec {
                iov_base: free.as_mut_ptr().cast(),
                iov_len: free.len(),
            }];
            // SAFETY: the list is our own buffer.
            match unsafe { receive(fd, &mut list)? } {
                Some(bytes) => self.end += bytes,
                None => return Ok(false),
            }
        }
    }

    fn send(
        &mut self,
        fd: &OwnedFd,
        queue: &mut SendQueue,
        list: &mut Vec<libc::iovec>,
    ) -> Result<bool, LinkError> {
        loop {
            while self.sent < self.outgoing.len() {
                let rest = &mut self.outgoing[self.sent..];
                let mut list = [libc::iovec {
                    iov_base: rest.as_mut_ptr().cast(),
                    iov_len: rest.len(),
                }];
                // SAFETY: the list is our own buffer.
                match unsafe { send(fd, &mut list)? } {
                    Some(bytes) => self.sent += bytes,
                    None => return Ok(false),
                }
            }
            self.outgoing.clear();
            self.sent = 0;
            if queue.is_empty() {
                return Ok(true);
            }
            list.clear();
            queue.gather(list, IOVECS_MAX);
            let taken = self.encrypt(list)?;
            queue.advance(taken);
        }
    }

    /// Encrypts the beginning of what the list names, as much as is to be written at once; returns how many
    /// bytes.
    fn encrypt(&mut self, list: &[libc::iovec]) -> Result<usize, LinkError> {
        let mut taken = 0;
        self.joined.clear();
        'full: for iov in list {
            // SAFETY: whoever queued keeps the memory valid; a change meanwhile only spoils its checksum.
            let mut rest =
                unsafe { std::slice::from_raw_parts(iov.iov_base.cast::<u8>(), iov.iov_len) };
            while !rest.is_empty() {
                let alone = self.joined.is_empty() && rest.len() >= PLAINTEXT_BYTES;
                let (now, later) =
                    rest.split_at(rest.len().min(PLAINTEXT_BYTES - self.joined.len()));
                if alone {
                    self.session.encrypt(now, &mut self.outgoing)?;
                } else {
                    self.joined.extend_from_slice(now);
                    self.flush_joined(PLAINTEXT_BYTES)?;
                }
                taken += now.len();
                rest = later;
                if self.outgoing.len() >= OUTGOING_BYTES {
                    break 'full;
                }
            }
        }
        self.flush_joined(1)?;
        Ok(taken)
    }

    fn flush_joined(&mut self, least: usize) -> Result<(), LinkError> {
        if self.joined.len() >= least {
            self.session.encrypt(&self.joined, &mut self.outgoing)?;
            self.joined.clear();
        }
        Ok(())
    }
}

fn message(list: &mut [libc::iovec]) -> libc::msghdr {
    // SAFETY: all zeroes is a valid message header.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = list.as_mut_ptr();
    message.msg_iovlen = list.len() as _;
    message
}

/// `None`: nothing for now.
///
/// # Safety
/// The list names writable memory.
unsafe fn receive(fd: &OwnedFd, list: &mut [libc::iovec]) -> Result<Option<usize>, LinkError> {
    let mut message = message(list);
    loop {
        // SAFETY: the message names the list, which names writable memory.
        let got = unsafe { libc::recvmsg(fd.as_raw_fd(), &mut message, libc::MSG_DONTWAIT) };
        match outcome(got)? {
            Outcome::Bytes(0) => return Err(LinkError::Closed),
            Outcome::Bytes(bytes) => return Ok(Some(bytes)),
            Outcome::Blocked => return Ok(None),
            Outcome::Again => {}
        }
    }
}

/// `None`: the socket takes nothing for now.
///
/// # Safety
/// The list names readable memory.
unsafe fn send(fd: &OwnedFd, list: &mut [libc::iovec]) -> Result<Option<usize>, LinkError> {
    let message = message(list);
    let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
    loop {
        // SAFETY: the message names the list, which names readable memory.
        let sent = unsafe { libc::sendmsg(fd.as_raw_fd(), &message, flags) };
        match outcome(sent)? {
            Outcome::Bytes(bytes) => return Ok(Some(bytes)),
            Outcome::Blocked => return Ok(None),
            Outcome::Again => {}
        }
    }
}

enum Outcome {
    Bytes(usize),
    Blocked,
    Again,
}

fn outcome(result: isize) -> Result<Outcome, LinkError> {
    if let Ok(bytes) = usize::try_from(result) {
        return Ok(Outcome::Bytes(bytes));
    }
    let error = io::Error::last_os_error();
    match error.kind() {
        io::ErrorKind::WouldBlock => Ok(Outcome::Blocked),
        io::ErrorKind::Interrupted => Ok(Outcome::Again),
        _ => Err(LinkError::Socket(error)),
    }
}
