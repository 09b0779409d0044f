//! Frames on a connection between metadata nodes.
//!
//! | offset | size | field |
//! |---|---|---|
//! | 0 | 4 | length of the body, big-endian, at most [`FRAME_BYTES_MAX`] |
//! | 4 | 8 | number of the request that it is or answers, big-endian |
//! | 12 | | body: JSON, or a version byte and postcard ([`Body`]) |
//!
//! Raft messages and all messages about namespace groups are postcard, everything else is JSON. JSON begins
//! with no version byte.
//!
//! The first frame of each side is a [`Hello`] with the number 0 and at most [`HELLO_BYTES_MAX`]. What
//! follows is of the protocol version that the hellos agree on.

use std::io;

use raft_host::RaftMessage;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::sync::Semaphore;
use uuid::Uuid;

use super::enrol::{Answer, Question};
use super::{PeerReply, PeerRequest};
use crate::command::check_command;
use crate::groups::{GroupCall, GroupReply, GroupRequest, check_operations};
use crate::ids::{Incarnation, NodeId};

/// Largest body; a larger one ends the connection. The largest messages are those with log entries of a
/// namespace group, up to 8 MiB.
pub(super) const FRAME_BYTES_MAX: u32 = 16 << 20;
/// Largest hello: all that is read of who is not known yet.
pub(super) const HELLO_BYTES_MAX: u32 = 1 << 10;
/// Says that this is metadata's protocol.
const MAGIC: &str = "penstock-meta";
/// Largest body that is decoded by the task that received it. JSON of [`FRAME_BYTES_MAX`] takes long, and a
/// worker of the runtime answers no heartbeat meanwhile. A longer body is decoded on a thread for blocking
/// work.
const INLINE_BYTES_MAX: usize = 64 << 10;
/// Longer bodies that are decoded at a time, in all; more wait. The threads for blocking work are needed for
/// the log.
const DECODED_AT_ONCE_MAX: usize = 2;
static DECODING: Semaphore = Semaphore::const_new(DECODED_AT_ONCE_MAX);
/// Versions of the protocol that this program speaks.
pub(super) const PROTOCOLS: std::ops::RangeInclusive<u16> = 1..=1;

/// Version of the messages about namespace groups: postcard has no field names. A variant that is added at
/// the end of an enum is sent from a feature level on; any other change is a new version.
const GROUPS_VERSION: u8 = 1;
/// Version of the Raft messages of the cluster map's group. Like [`GROUPS_VERSION`].
const RAFT_VERSION: u8 = 1;

/// What a connection is for. A flood of one kind of requests does not hold up the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Purpose {
    /// The cluster map: [`PeerRequest`].
    Map,
    /// What is asked of namespace groups: [`GroupCall`].
    Groups,
    /// Raft messages of namespace groups, which must not wait for what they are to commit.
    GroupRaft,
    /// What is said about capabilities: operations wait for it.
    GroupLinks,
}

impl Purpose {
    pub(super) const ALL: [Self; 4] = [Self::Map, Self::Groups, Self::GroupRaft, Self::GroupLinks];
}

/// The connection that a request about a namespace group goes by.
pub(super) fn purpose_of(request: &GroupRequest) -> Purpose {
    match request {
        GroupRequest::Raft(_) => Purpose::GroupRaft,
        GroupRequest::Link(..) => Purpose::GroupLinks,
        GroupRequest::Apply(_) | GroupRequest::Read(_) | GroupRequest::ReadAs(..) => {
            Purpose::Groups
        }
    }
}

/// Requests of one purpose, and their replies.
pub(super) trait Protocol: Send + Sync + 'static {
    type Request: Body + Send + 'static;
    type Reply: Body + Send + 'static;
    const PURPOSE: Purpose;

    /// Whether the reply may be long, so that only some of them are made at a time.
    fn has_long_reply(_: &Self::Request) -> bool {
        false
    }
}

/// See [`Purpose::Map`].
pub(super) struct AboutMap;

impl Protocol for AboutMap {
    type Request = PeerRequest;
    type Reply = PeerReply;
    const PURPOSE: Purpose = Purpose::Map;

    fn has_long_reply(request: &PeerRequest) -> bool {
        matches!(request, PeerRequest::Report | PeerRequest::Stored)
    }
}

/// See [`Purpose::Groups`].
pub(super) struct AboutGroups;

impl Protocol for AboutGroups {
    type Request = GroupCall;
    type Reply = GroupReply;
    const PURPOSE: Purpose = Purpose::Groups;

    fn has_long_reply(call: &GroupCall) -> bool {
        matches!(
            call.request,
            GroupRequest::Read(_) | GroupRequest::ReadAs(..)
        )
    }
}

/// See [`Purpose::GroupRaft`].
pub(super) struct AboutGroupRaft;

impl Protocol for AboutGroupRaft {
    type Request = GroupCall;
    type Reply = GroupReply;
    const PURPOSE: Purpose = Purpose::GroupRaft;
}

/// See [`Purpose::GroupLinks`].
pub(super) struct AboutGroupLinks;

impl Protocol for AboutGroupLinks {
    type Request = GroupCall;
    type Reply = GroupReply;
    const PURPOSE: Purpose = Purpose::GroupLinks;
}

/// What a frame holds.
pub(super) trait Body: Sized {
    /// Appends it to a frame.
    fn write(&self, frame: &mut Vec<u8>) -> io::Result<()>;
    /// Reads it from the bytes of a frame's body.
    fn read(bytes: &[u8]) -> io::Result<Self>;
}

impl Body for PeerRequest {
    fn write(&self, frame: &mut Vec<u8>) -> io::Result<()> {
        match self {
            Self::Raft(message) => write_postcard(RAFT_VERSION, message, frame),
            other => write_json(other, frame),
        }
    }

    fn read(bytes: &[u8]) -> io::Result<Self> {
        let Some((&RAFT_VERSION, bytes)) = bytes.split_first() else {
            return read_json(bytes);
        };
        let message: RaftMessage = read_postcard(bytes)?;
        message.check_commands(check_command).map_err(invalid)?;
        Ok(Self::Raft(message))
    }
}

impl Body for PeerReply {
    fn write(&self, frame: &mut Vec<u8>) -> io::Result<()> {
        match self {
            Self::Raft(reply) => write_postcard(RAFT_VERSION, reply, frame),
            other => write_json(other, frame),
        }
    }

    fn read(bytes: &[u8]) -> io::Result<Self> {
        match bytes.split_first() {
            Some((&RAFT_VERSION, bytes)) => read_postcard(bytes).map(Self::Raft),
            _ => read_json(bytes),
        }
    }
}

impl Body for GroupCall {
    fn write(&self, frame: &mut Vec<u8>) -> io::Result<()> {
        write_postcard(GROUPS_VERSION, self, frame)
    }

    fn read(bytes: &[u8]) -> io::Result<Self> {
        let call: Self = read_postcard(of_groups(bytes)?)?;
        if let GroupRequest::Raft(message) = &call.request {
            message.check_commands(check_operations).map_err(invalid)?;
        }
        Ok(call)
    }
}

impl Body for GroupReply {
    fn write(&self, frame: &mut Vec<u8>) -> io::Result<()> {
        write_postcard(GROUPS_VERSION, self, frame)
    }

    fn read(bytes: &[u8]) -> io::Result<Self> {
        read_postcard(of_groups(bytes)?)
    }
}

macro_rules! json {
    ($($body:ty),*) => {$(
        impl Body for $body {
            fn write(&self, frame: &mut Vec<u8>) -> io::Result<()> {
                write_json(self, frame)
            }

            fn read(bytes: &[u8]) -> io::Result<Self> {
                read_json(bytes)
            }
        }
    )*};
}
json!(Hello, Question, Answer);

/// Returns the postcard of a message about namespace groups.
fn of_groups(bytes: &[u8]) -> io::Result<&[u8]> {
    match bytes.split_first() {
        Some((&GROUPS_VERSION, bytes)) => Ok(bytes),
        Some((version, _)) => Err(invalid(format!(
            "a message about namespace groups of version {version}, and this program knows \
             {GROUPS_VERSION}"
        ))),
        None => Err(invalid("an empty frame")),
    }
}

fn write_json(body: &impl Serialize, frame: &mut Vec<u8>) -> io::Result<()> {
    serde_json::to_writer(frame, body).map_err(invalid)
}

fn read_json<T: DeserializeOwned>(bytes: &[u8]) -> io::Result<T> {
    serde_json::from_slice(bytes).map_err(invalid)
}

fn write_postcard(version: u8, body: &impl Serialize, frame: &mut Vec<u8>) -> io::Result<()> {
    frame.push(version);
    *frame = postcard::to_extend(body, std::mem::take(frame)).map_err(invalid)?;
    Ok(())
}

fn read_postcard<T: DeserializeOwned>(bytes: &[u8]) -> io::Result<T> {
    match postcard::take_from_bytes(bytes) {
        Ok((body, [])) => Ok(body),
        Ok(_) => Err(invalid("bytes are left over")),
        Err(error) => Err(invalid(error)),
    }
}

/// Encodes and decodes a body, as on its way to another node.
pub(super) fn transcode<T: Body>(body: &T) -> io::Result<T> {
    let mut bytes = Vec::new();
    body.write(&mut bytes)?;
    T::read(&bytes)
}

/// Who speaks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Hello {
    magic: String,
    /// Oldest and newest version of the protocol that is spoken.
    protocols: (u16, u16),
    pub(super) cluster: Uuid,
    pub(super) node: NodeId,
    /// The start of its process; 0 if it is not said.
    pub(super) incarnation: Incarnation,
    /// The history of the metadata that it has, if that is not the first one (`recovery.rs`).
    pub(super) history: Option<Uuid>,
    /// What the connection is for.
    pub(super) purpose: Purpose,
    /// Why the connection ends here, from who accepts it.
    pub(super) refused: Option<String>,
    /// Whether it ends because the node that connects was removed from the cluster.
    pub(super) removed: bool,
    /// Address at which the metadata service of whoever speaks is reached; empty if it serves nobody.
    pub(super) address: String,
}

impl Hello {
    pub(super) fn new(cluster: Uuid, node: NodeId, incarnation: Incarnation) -> Self {
        Self {
            magic: MAGIC.to_owned(),
            protocols: (*PROTOCOLS.start(), *PROTOCOLS.end()),
            cluster,
            node,
            incarnation,
            history: None,
            purpose: Purpose::Map,
            refused: None,
            removed: false,
            address: String::new(),
        }
    }

    /// The version to speak with this peer, or why none.
    pub(super) fn agree(&self, cluster: Uuid, history: Option<Uuid>) -> Result<u16, String> {
        if let Some(reason) = &self.refused {
            return Err(format!("it refuses: {reason}"));
        }
        if self.magic != MAGIC {
            return Err("it does not speak the metadata protocol".to_owned());
        }
        if self.cluster != cluster {
            return Err(format!("it is of cluster {}, not {cluster}", self.cluster));
        }
        if self.history != history {
            return Err(format!(
                "its metadata are of history {}, and here they are of {}: on a node that is to follow a \
                 recovery, run `penstock cluster rejoin HISTORY`, with the history that `penstock cluster \
                 recover` has told",
                named(self.history),
                named(history)
            ));
        }
        let newest = self.protocols.1.min(*PROTOCOLS.end());
        if newest < self.protocols.0.max(*PROTOCOLS.start()) {
            return Err(format!(
                "it speaks versions {} to {} of the protocol, and this program {} to {}",
                self.protocols.0,
                self.protocols.1,
                PROTOCOLS.start(),
                PROTOCOLS.end()
            ));
        }
        Ok(newest)
    }
}

fn named(history: Option<Uuid>) -> String {
    history.map_or_else(|| "none".to_owned(), |history| history.to_string())
}

fn invalid(detail: impl ToString) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, detail.to_string())
}

/// A frame ready to be sent.
pub(super) fn encode(number: u64, body: &impl Body) -> io::Result<Vec<u8>> {
    let mut frame = vec![0; 12];
    body.write(&mut frame)?;
    let length = u32::try_from(frame.len() - 12).unwrap_or(u32::MAX);
    if length > FRAME_BYTES_MAX {
        return Err(invalid(format!("a message of {length} bytes is too long")));
    }
    frame[..4].copy_from_slice(&length.to_be_bytes());
    frame[4..12].copy_from_slice(&number.to_be_bytes());
    Ok(frame)
}

/// Receives a frame whose body has at most `bytes_max`.
pub(super) async fn receive<T: Body + Send + 'static>(
    stream: &mut (impl AsyncRead + Unpin),
    bytes_max: u32,
) -> io::Result<(u64, T)> {
    let head = receive_head(stream, bytes_max).await?;
    let body = receive_body(stream, head).await?;
    Ok((head.number, decode(body).await?))
}

/// What a frame begins with.
#[derive(Debug, Clone, Copy)]
pub(super) struct Head {
    /// Of the request that it is or answers.
    pub(super) number: u64,
    /// Length of its body.
    pub(super) bytes: u32,
}

/// Receives the beginning of a frame whose body has at most `bytes_max`.
pub(super) async fn receive_head(
    stream: &mut (impl AsyncRead + Unpin),
    bytes_max: u32,
) -> io::Result<Head> {
    let mut header = [0; 12];
    stream.read_exact(&mut header).await?;
    let [a, b, c, d, number @ ..] = header;
    let bytes = u32::from_be_bytes([a, b, c, d]);
    if bytes > bytes_max {
        return Err(invalid(format!(
            "a frame of {bytes} bytes, and at most {bytes_max} are allowed"
        )));
    }
    let number = u64::from_be_bytes(number);
    Ok(Head { number, bytes })
}

/// Receives the body of a frame that has begun.
pub(super) async fn receive_body(
    stream: &mut (impl AsyncRead + Unpin),
    head: Head,
) -> io::Result<Vec<u8>> {
    // Memory follows what came in, not what was announced.
    let mut body = Vec::new();
    let read = stream
        .take(u64::from(head.bytes))
        .read_to_end(&mut body)
        .await?;
    if read < head.bytes as usize {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    Ok(body)
}

/// Decodes the body of a frame.
pub(super) async fn decode<T: Body + Send + 'static>(body: Vec<u8>) -> io::Result<T> {
    if body.len() <= INLINE_BYTES_MAX {
        return T::read(&body);
    }
    let _turn = DECODING.acquire().await.map_err(io::Error::other)?;
    let decoded = tokio::task::spawn_blocking(move || T::read(&body)).await;
    decoded.map_err(io::Error::other)?
}

/// Sends a frame at once.
pub(super) async fn send(
    stream: &mut (impl AsyncWrite + Unpin),
    number: u64,
    body: &impl Body,
) -> io::Result<()> {
    stream.write_all(&encode(number, body)?).await?;
    stream.flush().await
}

#[cfg(test)]
mod tests;
