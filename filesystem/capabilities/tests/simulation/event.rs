//! What happens, and what is sent.

use fs_capabilities::{Link, OperationId, ToHolder, ToManager};
use namespace::{Ino, SessionId};

#[derive(Debug, Clone)]
pub enum Event {
    HostTick {
        host: usize,
    },
    RunTasks {
        host: usize,
    },
    LeaderTick {
        term: u64,
    },
    LeadLease {
        term: u64,
    },
    OwnRead {
        term: u64,
    },
    ToLeader {
        host: usize,
        session: SessionId,
        link: Link,
        packet: ToLeader,
    },
    ToHost {
        host: usize,
        session: SessionId,
        link: Link,
        packet: ToHost,
    },
    /// A log entry is committed.
    Commit {
        term: u64,
        operation: OperationId,
    },
    RemoveSession {
        term: u64,
        session: SessionId,
    },
    GuestAct {
        host: usize,
        guest: usize,
    },
    GuestReply {
        host: usize,
        guest: usize,
        reply: GuestReply,
    },
    Heartbeat {
        host: usize,
    },
    HeartbeatHeard {
        host: usize,
        session: SessionId,
        sent: u64,
    },
    HeartbeatAnswered {
        host: usize,
        session: SessionId,
        sent: u64,
    },
    Watch,
    OpenSession {
        host: usize,
    },
    Connect {
        host: usize,
    },
    Break {
        host: usize,
        link: Option<Link>,
    },
    /// The leader notices that a connection broke.
    Noticed {
        session: SessionId,
        link: Link,
    },
    Depose,
    Elect,
    Crash,
    Restart {
        host: usize,
    },
    Cut,
    Heal {
        host: usize,
    },
    BreakOne,
    HealAll,
}

#[derive(Debug, Clone)]
pub enum ToLeader {
    Capabilities(ToManager),
    Request(Request),
}

#[derive(Debug, Clone)]
pub enum ToHost {
    Capabilities(ToHolder),
    Reply { id: u64, outcome: Outcome },
}

/// An operation of a host. A retry has the same number.
#[derive(Debug, Clone, Copy)]
pub struct Request {
    pub id: u64,
    pub body: Body,
}

#[derive(Debug, Clone, Copy)]
pub enum Body {
    /// Reads a directory, and attributes of its children.
    Names(Ino),
    /// Reads a file.
    File(Ino),
    /// Changes a directory's names, or a file's attributes, for a guest.
    Change { ino: Ino, value: u64, guest: usize },
    /// Commits what was buffered.
    WriteBack { ino: Ino, value: u64 },
}

#[derive(Debug, Clone)]
pub enum Outcome {
    Names {
        value: u64,
        children: Vec<(Ino, u64)>,
    },
    File {
        value: u64,
        is_cacheable: bool,
    },
    Done,
    Failed,
}

/// What a guest is told, and for how long it may use it.
#[derive(Debug, Clone, Copy)]
pub enum GuestReply {
    Read {
        ino: Ino,
        value: u64,
        began: u64,
        is_valid: bool,
    },
    Changed {
        ino: Ino,
    },
}
