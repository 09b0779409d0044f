//! Operations of sessions, as log entries hold them, and their replies.

mod outcome;

use serde::{Deserialize, Serialize};

use crate::ids::{Ino, SegmentId, SessionId, Time};
use crate::record::Extent;

pub use outcome::{Attributes, Outcome, Removed, Reply};

/// Operations that one log entry holds, applied in order.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Batch {
    /// The operations.
    pub operations: Vec<Request>,
}

/// Version of an encoded [`Batch`].
const BATCH_VERSION: u8 = 1;

/// A log entry is damaged, or newer than this program.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DecodeError {
    /// Another version than this program's.
    #[error("namespace operations of version {0}: they are damaged, or newer")]
    Version(u8),
    /// Not the bytes of a batch.
    #[error("damaged namespace operations: {0}")]
    Damaged(String),
}

impl Batch {
    /// The bytes of a log entry: a version, then postcard.
    pub fn encode(&self) -> Vec<u8> {
        postcard::to_extend(self, vec![BATCH_VERSION]).expect("a vector takes any batch")
    }

    /// The operations of a log entry.
    ///
    /// # Errors
    /// Bytes that [`Batch::encode`] of this version did not make.
    pub fn decode(bytes: &[u8]) -> Result<Self, DecodeError> {
        let damaged = |detail: &dyn std::fmt::Display| DecodeError::Damaged(detail.to_string());
        let (version, rest) = bytes.split_first().ok_or_else(|| damaged(&"empty"))?;
        if *version != BATCH_VERSION {
            return Err(DecodeError::Version(*version));
        }
        match postcard::take_from_bytes(rest) {
            Ok((batch, [])) => Ok(batch),
            Ok(_) => Err(damaged(&"bytes left over")),
            Err(error) => Err(damaged(&error)),
        }
    }
}

/// An operation, with the session, slot and sequence number by which retries are recognised.
///
/// Each slot of a session counts its requests from 1. A repeated request gets the reply that was kept and
/// changes nothing. The leader's own requests have session [`SessionId::NONE`], slot and sequence 0; those
/// operations may be repeated by their nature ([`Operation::is_of_leader`]).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Request {
    /// Who asks.
    pub session: SessionId,
    /// Its slot, below [`SLOTS_MAX`](crate::SLOTS_MAX).
    pub slot: u16,
    /// The request's number within the slot.
    pub sequence: u64,
    /// When it was proposed.
    pub at: Time,
    /// What to do.
    pub operation: Operation,
}

/// What to do. Names are 1 to 255 bytes, neither "." nor "..", without 0 and '/'.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Operation {
    /// Makes the filesystem with its root directory. Done if it is there.
    CreateFilesystem {
        /// Permission bits of the root.
        mode: u16,
        /// Owner of the root.
        uid: u32,
        /// Group of the root.
        gid: u32,
    },
    /// Opens the session of a node's incarnation, or finds it.
    OpenSession {
        /// The node.
        node: u64,
        /// One start of its daemon.
        incarnation: u128,
    },
    /// Removes all records of the filesystem, in bounded steps. From the first one on nothing else is done,
    /// and it is not made again before the last one.
    DropFilesystem {
        /// About how many records to remove.
        limit: u32,
    },
    /// Ends a session in bounded steps: seals its segments, lets go of its orphans, forgets its slots.
    EndSession {
        /// The session.
        session: SessionId,
    },
    /// Makes an inode that is no symbolic link.
    Make(Make),
    /// Makes a symbolic link.
    Symlink {
        /// The directory.
        parent: Ino,
        /// The name.
        #[serde(with = "crate::bytes")]
        name: Vec<u8>,
        /// What it refers to: 1 to 4,095 bytes without 0.
        #[serde(with = "crate::bytes")]
        target: Vec<u8>,
        /// Owner.
        uid: u32,
        /// Group, unless the directory's set-group-id bit gives its own.
        gid: u32,
    },
    /// Gives an inode another name.
    Link {
        /// The inode.
        ino: Ino,
        /// The directory.
        parent: Ino,
        /// The name.
        #[serde(with = "crate::bytes")]
        name: Vec<u8>,
    },
    /// Removes a name of what is no directory.
    Unlink {
        /// The directory.
        parent: Ino,
        /// The name.
        #[serde(with = "crate::bytes")]
        name: Vec<u8>,
        /// Who may have the inode open.
        openers: Openers,
    },
    /// Removes an empty directory.
    Rmdir {
        /// The directory that it is in.
        parent: Ino,
        /// Its name.
        #[serde(with = "crate::bytes")]
        name: Vec<u8>,
        /// Who may have it open.
        openers: Openers,
    },
    /// Moves a name.
    Rename(Rename),
    /// Changes attributes and ctime; a smaller size, in bounded steps.
    SetAttributes(SetAttributes),
    /// Sets an extended attribute.
    SetXattr {
        /// The inode.
        ino: Ino,
        /// The attribute's name.
        #[serde(with = "crate::bytes")]
        name: Vec<u8>,
        /// Its value.
        #[serde(with = "crate::bytes")]
        value: Vec<u8>,
        /// Whether it must be new, or must be there.
        mode: XattrMode,
    },
    /// Removes an extended attribute.
    RemoveXattr {
        /// The inode.
        ino: Ino,
        /// The attribute's name.
        #[serde(with = "crate::bytes")]
        name: Vec<u8>,
    },
    /// Names data that were written and flushed.
    Commit(Commit),
    /// Makes a hole, in bounded steps.
    Punch(Punch),
    /// Names the data of one file in another too, in bounded steps.
    CopyRange(CopyRange),
    /// A session has closed an orphan.
    ReleaseOrphan {
        /// The orphan.
        ino: Ino,
        /// Who had it open.
        session: SessionId,
    },
    /// Empties an orphan that nobody has open, in bounded steps, and removes it.
    Reap {
        /// The orphan.
        ino: Ino,
        /// About how many extents or attributes to remove.
        limit: u32,
    },
    /// Makes a segment for the session to write.
    NewSegment,
    /// Ends a segment. Of what was written, the ranges that no extent named are freed.
    SealSegment {
        /// The segment.
        segment: SegmentId,
        /// Bytes written, of which the last may not have been named.
        length: u64,
    },
    /// Freed space was given back.
    Reclaimed {
        /// The segment, which is sealed.
        segment: SegmentId,
        /// Where the freed range begins.
        address: u64,
        /// The whole freed range, in bytes.
        length: u64,
    },
    /// Forgets a sealed segment in which nothing is named, with what is to be given back of it.
    DropSegment {
        /// The segment.
        segment: SegmentId,
    },
    /// Notes that an inode was read, and changes nothing else: neither ctime nor the change counter. What
    /// utimensat(2) sets is for [`Operation::SetAttributes`].
    SetAccessTime {
        /// The inode.
        ino: Ino,
        /// Last access.
        atime: Time,
    },
    /// Gives none of the numbers that may have been given unseen: after a recovery from the log of one node,
    /// which need not have had the last entries.
    RaiseNumbers,
    /// Makes a regular file without a name, for O_TMPFILE and overlay filesystems.
    MakeTemporary(MakeTemporary),
}

impl Operation {
    /// Whether it gives something back, or ends what does: taken also where space is short.
    pub fn frees_space(&self) -> bool {
        matches!(
            self,
            Self::OpenSession { .. }
                | Self::EndSession { .. }
                | Self::DropFilesystem { .. }
                | Self::Unlink { .. }
                | Self::Rmdir { .. }
                | Self::RemoveXattr { .. }
                | Self::Punch(_)
                | Self::ReleaseOrphan { .. }
                | Self::Reap { .. }
                | Self::SealSegment { .. }
                | Self::Reclaimed { .. }
                | Self::DropSegment { .. }
                | Self::RaiseNumbers
        )
    }

    /// Whether only the leader may ask this, without a session. A session is refused with EINVAL, but may
    /// release an orphan that it holds itself.
    pub fn is_of_leader(&self) -> bool {
        matches!(
            self,
            Self::CreateFilesystem { .. }
                | Self::DropFilesystem { .. }
                | Self::OpenSession { .. }
                | Self::EndSession { .. }
                | Self::ReleaseOrphan { .. }
                | Self::Reap { .. }
                | Self::Reclaimed { .. }
                | Self::DropSegment { .. }
                | Self::RaiseNumbers
        )
    }
}

/// Makes an inode that is no symbolic link.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Make {
    /// The directory.
    pub parent: Ino,
    /// The name.
    #[serde(with = "crate::bytes")]
    pub name: Vec<u8>,
    /// Permission bits, the creator's umask applied.
    pub mode: u16,
    /// Owner.
    pub uid: u32,
    /// Group, unless the directory's set-group-id bit gives its own.
    pub gid: u32,
    /// What to make.
    pub node: NewNode,
}

/// What [`Make`] makes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum NewNode {
    /// An empty regular file.
    File,
    /// An empty directory.
    Directory,
    /// A named pipe.
    Fifo,
    /// A socket of the Unix domain.
    Socket,
    /// A character device of this number.
    CharacterDevice(u32),
    /// A block device of this number.
    BlockDevice(u32),
}

/// Makes a regular file without a name: O_TMPFILE. It is an orphan that the session holds, until that session
/// gives it its first name by [`Operation::Link`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MakeTemporary {
    /// The directory that it is made for, in which it has no entry.
    pub parent: Ino,
    /// Permission bits, the creator's umask applied.
    pub mode: u16,
    /// Owner.
    pub uid: u32,
    /// Group, unless the directory's set-group-id bit gives its own.
    pub gid: u32,
}

/// Moves a name.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rename {
    /// The directory that the name is in.
    pub parent: Ino,
    /// The name.
    #[serde(with = "crate::bytes")]
    pub name: Vec<u8>,
    /// The directory to move it to.
    pub new_parent: Ino,
    /// Its new name.
    #[serde(with = "crate::bytes")]
    pub new_name: Vec<u8>,
    /// What to do if the new name is there.
    pub mode: RenameMode,
    /// Who may have the replaced inode open.
    pub openers: Openers,
}

/// Sessions that may have an inode open which loses its last name. It stays as long as one of them holds it:
/// each lets go of what it does not have open ([`Query::Held`](crate::Query::Held),
/// [`Operation::ReleaseOrphan`]).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Openers {
    /// Every session that is open when the operation is applied: whoever asks knows of nobody else's open
    /// files. With capabilities, whose leader knows who may have the inode open, this list becomes short.
    All {
        /// Whether the asking session is among them: it knows what it has open itself.
        own: bool,
    },
    /// These sessions. Who is not there, or ends, is left out.
    Named(Vec<SessionId>),
}

/// What a rename does if the new name is there.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum RenameMode {
    /// Replaces it.
    Replace,
    /// Is refused: RENAME_NOREPLACE.
    NoReplace,
    /// Exchanges the two: RENAME_EXCHANGE.
    Exchange,
    /// Leaves a whiteout at the old name: RENAME_WHITEOUT, for overlay filesystems.
    Whiteout(Whiteout),
}

/// A whiteout that a rename leaves at the old name: a character device with the number 0:0 and no permission
/// bits, as overlay filesystems expect it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Whiteout {
    /// The rename is refused if the new name is there: RENAME_NOREPLACE.
    pub no_replace: bool,
    /// Owner.
    pub uid: u32,
    /// Group, unless the directory's set-group-id bit gives its own.
    pub gid: u32,
}

/// Changes attributes.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SetAttributes {
    /// The inode.
    pub ino: Ino,
    /// The change counter that the inode must have, else EAGAIN. A `tail` is made from what the file held: it
    /// must hold that still.
    pub expected: Option<u64>,
    /// Permission bits.
    pub mode: Option<u16>,
    /// Owner.
    pub uid: Option<u32>,
    /// Group.
    pub gid: Option<u32>,
    /// Length in bytes, of a regular file.
    pub size: Option<u64>,
    /// The data of the last block, zero behind the new size. Must be given when, and only when, the file gets
    /// smaller and ends within a block that has data: what was behind the new end must never be seen again.
    pub tail: Option<Tail>,
    /// Time of the last access.
    pub atime: Option<SetTime>,
    /// Time of the last change of the content; by default, a new size sets it to now.
    pub mtime: Option<SetTime>,
    /// Clears set-user-id, and set-group-id of what the group may execute, as Linux does when an owner
    /// changes, or when a process without CAP_FSETID changes content. `security.capability` is removed in
    /// any case when owner or content of what is no directory change (FUSE_HANDLE_KILLPRIV_V2 in
    /// `linux/fuse.h`).
    pub clear_privileges: bool,
}

/// Where the data of one block are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tail {
    /// A segment that the session writes.
    pub segment: SegmentId,
    /// Where the block begins in it.
    pub address: u64,
    /// Epoch of the cluster map in which it was flushed.
    pub epoch: u64,
}

/// A time to set.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum SetTime {
    /// When the request was proposed.
    Now,
    /// This time.
    To(Time),
}

/// What to do about an extended attribute of that name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum XattrMode {
    /// Makes or replaces it.
    Set,
    /// It must be new: XATTR_CREATE.
    Create,
    /// It must be there: XATTR_REPLACE.
    Replace,
}

/// Names data that were written and flushed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Commit {
    /// The file.
    pub ino: Ino,
    /// The change counter that the inode must have, else EAGAIN. Whoever completes a block with what the file
    /// held, or appends at its end, says so: between the look and the commit another host may have written.
    pub expected: Option<u64>,
    /// Where its new data are: in ascending order, not overlapping, at most
    /// [`COMMIT_BYTES_MAX`](crate::COMMIT_BYTES_MAX) in all, in segments that the session writes, each
    /// with the epoch in which it was flushed. The file's last block is zero behind its end.
    pub extents: Vec<Extent>,
    /// Length of the file in bytes; a smaller one than now is ignored.
    pub size: u64,
    /// When it was written.
    pub mtime: Time,
    /// As in [`SetAttributes`].
    pub clear_privileges: bool,
}

/// Makes a hole of whole blocks; the last may be cut by the end of the file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Punch {
    /// The file.
    pub ino: Ino,
    /// Where the hole begins.
    pub offset: u64,
    /// Bytes.
    pub length: u64,
    /// The file ends behind the hole at least: FALLOC_FL_ZERO_RANGE without FALLOC_FL_KEEP_SIZE.
    pub extend: bool,
    /// As in [`SetAttributes`].
    pub clear_privileges: bool,
}

/// Names the data of one file in another too. Offsets are multiples of the block, and so is the length unless
/// it reaches the end of the source, and the end of the destination too.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CopyRange {
    /// The source.
    pub from: Ino,
    /// Where to begin in it.
    pub from_offset: u64,
    /// The destination.
    pub to: Ino,
    /// Where to begin in it.
    pub to_offset: u64,
    /// Bytes.
    pub length: u64,
    /// As in [`SetAttributes`].
    pub clear_privileges: bool,
}
