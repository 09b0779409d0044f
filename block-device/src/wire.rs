//! What the daemon and the helper say to each other: one message a packet, as JSON, with at most one
//! descriptor. On a stream, which has no packets, only where each end waits for the other's message before it
//! sends one.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::cmsg_space;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType, recvmsg, sendmsg, socketpair,
};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// Longest message in bytes.
const MESSAGE_BYTES_MAX: usize = 64 << 10;

/// What the daemon asks of the helper. Each question comes with a socket of its own for its answer, so that
/// one that takes long holds no other up.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Asked {
    /// Whether block devices can be made here.
    Probe,
    /// Make the socket by which the device's front end connects. The answer brings it along, listening.
    Listen {
        /// Which device.
        key: String,
    },
    /// Make the device, or go on with one that is there.
    Serve {
        /// Which device.
        key: String,
        /// Link to it (`/dev/penstock/NAME`).
        link: String,
    },
    /// Remove the device.
    Remove {
        /// Which device.
        key: String,
        /// Though it is mounted.
        force: bool,
    },
}

/// The answer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Answer {
    /// Done.
    Done,
    /// How this kernel makes block devices: `vduse` or `nbd`.
    Interface(String),
    /// The device, as the kernel calls it (`/dev/vdb`).
    Device(String),
    /// Not done.
    Failed {
        /// Why.
        error: String,
        /// Somebody uses it.
        in_use: bool,
    },
}

/// A pair of connected sockets for messages.
pub fn pair() -> io::Result<(OwnedFd, OwnedFd)> {
    let flags = SocketFlags::CLOEXEC;
    Ok(socketpair(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        flags,
        None,
    )?)
}

/// Sends a message.
pub fn send<T: Serialize>(
    socket: BorrowedFd<'_>,
    message: &T,
    fd: Option<BorrowedFd<'_>>,
) -> io::Result<()> {
    let bytes = serde_json::to_vec(message)?;
    let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let rights = fd.map(|fd| [fd]);
    if let Some(rights) = &rights {
        control.push(SendAncillaryMessage::ScmRights(rights));
    }
    sendmsg(
        socket,
        &[IoSlice::new(&bytes)],
        &mut control,
        SendFlags::NOSIGNAL,
    )?;
    Ok(())
}

/// Receives a message; `None` once the other side has gone.
pub fn receive<T: DeserializeOwned>(
    socket: BorrowedFd<'_>,
) -> io::Result<Option<(T, Option<OwnedFd>)>> {
    let mut bytes = vec![0; MESSAGE_BYTES_MAX];
    let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::CMSG_CLOEXEC;
    let got = loop {
        match recvmsg(
            socket,
            &mut [IoSliceMut::new(&mut bytes)],
            &mut control,
            flags,
        ) {
            Err(rustix::io::Errno::INTR) => {}
            Err(rustix::io::Errno::CONNRESET) => return Ok(None),
            other => break other?,
        }
    };
    if got.bytes == 0 {
        return Ok(None);
    }
    let mut fd = None;
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(mut rights) = message {
            fd = rights.next();
        }
    }
    Ok(Some((serde_json::from_slice(&bytes[..got.bytes])?, fd)))
}

/// Asks the helper at the other end of `socket`, and waits for its answer.
pub fn ask(socket: BorrowedFd<'_>, asked: &Asked) -> io::Result<(Answer, Option<OwnedFd>)> {
    let (ours, theirs) = pair()?;
    send(socket, asked, Some(theirs.as_fd()))?;
    drop(theirs);
    let answer = receive(ours.as_fd())?;
    answer.ok_or_else(|| io::Error::other("the helper for block devices has ended"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn questions_are_answered_each_by_itself() {
        let (daemon, helper) = pair().unwrap();
        let answering = std::thread::spawn(move || {
            let mut waiting = Vec::new();
            while let Some((asked, reply)) = receive::<Asked>(helper.as_fd()).unwrap() {
                waiting.push((asked, reply.unwrap()));
                // The later one is answered first.
                if waiting.len() == 2 {
                    while let Some((asked, reply)) = waiting.pop() {
                        let answer = Answer::Device(format!("{asked:?}"));
                        send(reply.as_fd(), &answer, None).unwrap();
                    }
                }
            }
        });
        let asked = [Asked::Probe, Asked::Listen { key: "a".into() }];
        std::thread::scope(|scope| {
            let daemon = daemon.as_fd();
            for one in &asked {
                scope.spawn(move || {
                    let (answer, fd) = ask(daemon, one).unwrap();
                    assert_eq!(answer, Answer::Device(format!("{one:?}")));
                    assert!(fd.is_none());
                });
            }
        });
        drop(daemon);
        answering.join().unwrap();
    }

    #[test]
    fn a_helper_that_ends_is_told() {
        let (daemon, helper) = pair().unwrap();
        let ending = std::thread::spawn(move || drop(receive::<Asked>(helper.as_fd())));
        let told = ask(daemon.as_fd(), &Asked::Probe).unwrap_err();
        assert!(told.to_string().contains("has ended"), "{told}");
        ending.join().unwrap();
    }
}
