//! The *feature level* of a cluster: what all its nodes understand, whatever versions of the software they
//! run.
//!
//! Every node applies a command with the program that it runs, and the records must come out the same on all.
//! So a change of what a command does, a new command, event or field of a record waits until no node runs a
//! program that does not know it. The cluster's record holds the level that is in force. Each node tells the
//! leader with its heartbeats up to which level it knows; once every node of the map has told a higher one,
//! the leader raises the cluster's ([`Command::RaiseLevel`]). From then on a program that does not know that
//! level is turned away: when it joins, when it registers a start, when it opens its metadata, and when it
//! comes upon the command in the log. Nothing lowers a level.
//!
//! **To change the state machine:** add a level below, and let the old behaviour be what happens as long as
//! the cluster's record is lower (`cluster.level >= Level(n)`). A command that older programs cannot read is
//! proposed only from that level on.
//!
//! | level | what begins with it |
//! |---|---|
//! | 1 | everything before levels were counted |
//! | 2 | the level itself: [`Command::RaiseLevel`], [`Cluster::level`] and its event |
//! | 3 | groups move between devices of one node while it serves: [`Level::WITHIN_NODES`] |
//! | 4 | join tokens grant roles, and commands are checked against the sender's: [`Level::ROLES`] |
//! | 5 | attachments move between nodes: [`Level::MIGRATION`] |
//! | 6 | volumes are exported over NFS: [`Level::EXPORTS`] |
//! | 7 | metadata go on after a disaster: [`Level::RECOVERY`] |
//! | 8 | there are filesystems, on Raft groups of their own: [`Level::FILESYSTEMS`] |
//! | 9 | hosts buffer writes of files, and filesystems can be lost: [`Level::BUFFERED_WRITES`] |
//! | 10 | volumes are renamed, and join tokens revoked: [`Level::RENAMES`] |
//! | 11 | events tell who changed what: [`Level::AUDIT`] |
//! | 12 | pools get other numbers of replicas, writes wait for space: [`Level::SETTINGS`] |
//! | 13 | nodes tell the leader how much data volumes hold: [`Level::STORED_BYTES`] |
//! | 14 | events tell who added a device, and of over-committed pools: [`Level::DEVICE_AUTHORS`] |
//! | 15 | nodes ask whose files damaged blocks are, events tell what was forced: [`Level::FILE_SEARCH`] |
//! | 16 | a node that was alone with several devices is the first of a cluster: [`Level::SETTLED`] |
//! | 17 | attachments move only where they were offered, nodes are evicted: [`Level::OFFERS`] |
//! | 18 | renames leave whiteouts, and files are made without a name: [`Level::OVERLAYS`] |
//!
//! [`Command::RaiseLevel`]: crate::Command::RaiseLevel
//! [`Cluster::level`]: crate::Cluster::level

use std::fmt;

use serde::{Deserialize, Serialize};

/// A feature level. Who says none is of the first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Level(pub u32);

impl Level {
    /// That of programs which know of no levels.
    pub const FIRST: Self = Self(1);
    /// The highest that this program knows.
    pub const KNOWN: Self = Self::OVERLAYS;
    /// From this one on a node may have two members of a group, of which one takes the other's place
    /// (`state/within.rs`).
    pub const WITHIN_NODES: Self = Self(3);
    /// From this one on a join token grants roles, a node has no others, and the leader refuses commands that
    /// the sender's roles do not allow (`authority.rs`).
    pub const ROLES: Self = Self(4);
    /// From this one on an attachment may be incoming ([`crate::Incoming`]), and take the place of one on
    /// another node.
    pub const MIGRATION: Self = Self(5);
    /// From this one on there are NFS exports ([`crate::Export`]).
    pub const EXPORTS: Self = Self(6);
    /// From this one on the cluster's record may tell of a recovery ([`crate::Recovery`]). The recovery
    /// itself raises the level.
    pub const RECOVERY: Self = Self(7);
    /// From this one on there are filesystems ([`crate::Filesystem`]).
    pub const FILESYSTEMS: Self = Self(8);
    /// From this one on hosts may buffer writes of files: every leader has them written back before it tells
    /// others of these files. A recovery raises the level to this one if there are filesystems, which may be
    /// lost by it ([`crate::FilesystemState::Lost`]).
    pub const BUFFERED_WRITES: Self = Self(9);
    /// From this one on volumes are renamed ([`crate::Command::RenameVolume`]) and join tokens revoked
    /// ([`crate::Command::RevokeToken`]).
    pub const RENAMES: Self = Self(10);
    /// From this one on events tell what people change ([`crate::Command::Authored`]), and what nodes notice
    /// ([`crate::Command::RecordNotice`]).
    pub const AUDIT: Self = Self(11);
    /// From this one on pools get other numbers of replicas ([`crate::Command::SetPool`]), and a volume says
    /// how long its writes wait for space ([`crate::Command::SetVolume`]).
    pub const SETTINGS: Self = Self(12);
    /// From this one on nodes tell the leader what volumes store ([`crate::NodeStored`]), and ask it: no
    /// record is touched by it, but an older leader could not read the requests.
    pub const STORED_BYTES: Self = Self(13);
    /// From this one on a device may be registered in somebody's name ([`crate::Command::Authored`]): an
    /// older leader refuses that.
    pub const DEVICE_AUTHORS: Self = Self(14);
    /// From this one on events tell of pools whose volumes may grow to more than their devices hold
    /// ([`crate::Notice::PoolOverCommitted`]).
    pub const COMMITMENT: Self = Self(14);
    /// From this one on nodes ask which files name blocks of segments ([`namespace::Query::FilesAt`]): no
    /// record is touched by it, but an older leader could not read the question.
    pub const FILE_SEARCH: Self = Self(15);
    /// From this one on events tell that an attachment of a node that was down was forgotten
    /// ([`crate::Author::forced`]).
    pub const FORCED_EVENTS: Self = Self(15);
    /// From this one on the log may tell that a node which was alone has put its data where their placement
    /// groups are ([`crate::Command::SettleGroups`]). That command itself raises the level.
    pub const SETTLED: Self = Self(16);
    /// From this one on
    /// - an attachment comes in only where it was offered ([`crate::Offer`]), and not for ever, and the lease
    ///   of an attached volume goes to no host that does not serve it;
    /// - nodes are evicted ([`crate::Command::EvictNode`]);
    /// - refusals name nodes ([`crate::refusal`]), nodes ask each other who leads, and hosts split what they
    ///   claim to cache: no record is touched by that, but older programs could not read it.
    pub const OFFERS: Self = Self(17);
    /// From this one on filesystems have what overlay filesystems need of an upper layer:
    /// [`namespace::RenameMode::Whiteout`] and [`namespace::Operation::MakeTemporary`]. Older replicas cannot
    /// read log entries with these. Freed space of files is discarded at once: from this one on hosts do not
    /// take the zeros that they then find for a file's content.
    pub const OVERLAYS: Self = Self(18);

    /// Whether it goes without saying: then it is left out, as programs of that level would.
    pub(crate) fn is_first(&self) -> bool {
        *self == Self::FIRST
    }
}

impl Default for Level {
    fn default() -> Self {
        Self::FIRST
    }
}

impl fmt::Display for Level {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}
