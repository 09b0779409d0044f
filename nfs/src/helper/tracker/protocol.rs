//! The kernel's messages about clients, version 1: `include/uapi/linux/nfsd/cld.h`.
//!
//! | bytes | what |
//! |---|---|
//! | 0 | version of the message |
//! | 1 | command |
//! | 2–3 | status, of an answer; negative error numbers |
//! | 4–7 | number of the question, repeated by the answer |
//! | 8–9 | length of the client's name; or 8: a version |
//! | 10–1033 | the name |

use crate::records::{CLIENT_BYTES_MAX, ClientId};

/// Length of a message.
pub const MESSAGE_BYTES: usize = 10 + CLIENT_BYTES_MAX;
/// The version that is understood here. The next one adds who a client is by Kerberos.
const VERSION: u8 = 1;

/// What the kernel wants.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Command {
    /// Remember a client.
    Create,
    /// Forget a client.
    Remove,
    /// Whether a client may reclaim; asked by older kernels.
    Check,
    /// The grace period is over.
    GraceDone,
    /// The server starts: all clients that may reclaim.
    GraceStart,
    /// The highest version of messages.
    GetVersion,
}

/// A message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Message(Box<[u8; MESSAGE_BYTES]>);

impl Message {
    #[cfg(test)]
    pub fn new(command: u8, name: &[u8]) -> Self {
        let mut message = Self(Box::new([0; MESSAGE_BYTES]));
        message.0[0] = VERSION;
        message.0[1] = command;
        message.set_name(name);
        message
    }

    /// Of bytes that the kernel sent.
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        let bytes = <[u8; MESSAGE_BYTES]>::try_from(bytes).ok()?;
        Some(Self(Box::new(bytes)))
    }

    /// As it is sent.
    pub fn bytes(&self) -> [u8; MESSAGE_BYTES] {
        *self.0
    }

    pub fn command(&self) -> Option<Command> {
        Some(match self.0[1] {
            0 => Command::Create,
            1 => Command::Remove,
            2 => Command::Check,
            3 => Command::GraceDone,
            4 => Command::GraceStart,
            5 => Command::GetVersion,
            _ => return None,
        })
    }

    /// The client that it is about.
    pub fn client(&self) -> Option<ClientId> {
        let length = usize::from(u16::from_ne_bytes([self.0[8], self.0[9]]));
        ClientId::new(self.0.get(10..10 + length)?)
    }

    fn set_name(&mut self, name: &[u8]) {
        let length = u16::try_from(name.len()).expect("names of clients are bounded");
        self.0[8..10].copy_from_slice(&length.to_ne_bytes());
        self.0[10..10 + name.len()].copy_from_slice(name);
    }

    /// The answer to it with this status.
    pub fn status(&self, status: i32) -> Self {
        let mut answer = self.clone();
        let status = i16::try_from(status).unwrap_or(i16::MIN);
        answer.0[2..4].copy_from_slice(&status.to_ne_bytes());
        answer
    }

    /// A client that may reclaim; more follow.
    pub fn in_progress(&self, client: &ClientId) -> Self {
        let mut answer = self.status(-libc::EINPROGRESS);
        answer.set_name(client.bytes());
        answer
    }

    /// The highest version.
    pub fn version(&self) -> Self {
        let mut answer = self.status(0);
        answer.0[8] = VERSION;
        answer
    }

    #[cfg(test)]
    pub fn told_status(&self) -> i16 {
        i16::from_ne_bytes([self.0[2], self.0[3]])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_is_as_long_as_the_kernels() {
        assert_eq!(MESSAGE_BYTES, 1034);
    }

    #[test]
    fn a_name_longer_than_the_message_is_none() {
        let mut message = Message::new(0, b"abc");
        assert_eq!(message.client(), ClientId::new(b"abc"));
        for length in [0u16, 1025, u16::MAX] {
            message.0[8..10].copy_from_slice(&length.to_ne_bytes());
            assert_eq!(message.client(), None, "{length}");
        }
    }
}
