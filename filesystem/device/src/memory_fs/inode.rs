//! Inodes and their attributes.

use std::collections::BTreeMap;
use std::time::{SystemTime, UNIX_EPOCH};

use fuse_codec::{Attr, DeviceNumber, Kind, NodeId, SetTime, Timestamp};

use super::content::{BLOCK_BYTES, Content};
use super::directory::Directory;

const SET_USER_ID: u32 = 0o4000;
pub const SET_GROUP_ID: u32 = 0o2000;
const GROUP_EXECUTE: u32 = 0o0010;

/// What an inode is, with what only that has.
#[derive(Debug)]
pub enum Body {
    File(Content),
    Directory(Directory),
    Symlink(Vec<u8>),
    Special(Kind, DeviceNumber),
}

/// Who an inode belongs to, and who may do what.
#[derive(Debug, Clone, Copy)]
pub struct Ownership {
    pub permissions: u32,
    pub uid: u32,
    pub gid: u32,
}

/// An inode.
#[derive(Debug)]
pub struct Inode {
    pub body: Body,
    pub owner: Ownership,
    pub nlink: u32,
    /// It never had a name, and may get one.
    pub is_temporary: bool,
    pub atime: Timestamp,
    pub mtime: Timestamp,
    pub ctime: Timestamp,
    btime: Timestamp,
    pub xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
    /// What the kernel has to forget.
    pub lookups: u64,
    /// Open files and directories of it.
    pub handles: u32,
}

pub fn now() -> Timestamp {
    let since = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    Timestamp {
        secs: since.as_secs() as i64,
        nanos: since.subsec_nanos(),
    }
}

impl Inode {
    /// A new one with one name; a directory has that and its `.`.
    pub fn new(body: Body, owner: Ownership) -> Self {
        let now = now();
        Self {
            nlink: if matches!(body, Body::Directory(_)) {
                2
            } else {
                1
            },
            is_temporary: false,
            body,
            owner,
            atime: now,
            mtime: now,
            ctime: now,
            btime: now,
            xattrs: BTreeMap::new(),
            lookups: 0,
            handles: 0,
        }
    }

    pub fn kind(&self) -> Kind {
        match &self.body {
            Body::File(_) => Kind::Regular,
            Body::Directory(_) => Kind::Directory,
            Body::Symlink(_) => Kind::Symlink,
            Body::Special(kind, _) => *kind,
        }
    }

    pub fn is_directory(&self) -> bool {
        self.kind() == Kind::Directory
    }

    pub fn attr(&self, node: NodeId) -> Attr {
        let (size, allocated_bytes) = match &self.body {
            Body::File(content) => (content.size(), content.allocated_bytes()),
            Body::Directory(_) => (BLOCK_BYTES, BLOCK_BYTES),
            Body::Symlink(target) => (target.len() as u64, 0),
            Body::Special(..) => (0, 0),
        };
        let rdev = match self.body {
            Body::Special(_, device) => device,
            _ => DeviceNumber::default(),
        };
        Attr {
            ino: node.0,
            kind: self.kind(),
            permissions: self.owner.permissions,
            nlink: self.nlink,
            uid: self.owner.uid,
            gid: self.owner.gid,
            rdev,
            size,
            allocated_bytes,
            atime: self.atime,
            mtime: self.mtime,
            ctime: self.ctime,
            btime: Some(self.btime),
            block_bytes: BLOCK_BYTES as u32,
        }
    }

    /// Its data or entries changed.
    pub fn modified(&mut self) {
        self.mtime = now();
        self.ctime = self.mtime;
    }

    /// Its attributes changed.
    pub fn changed(&mut self) {
        self.ctime = now();
    }

    /// Takes set-user-id away, set-group-id of what a group may run, and file capabilities.
    pub fn kill_privileges(&mut self) {
        if self.is_directory() {
            return;
        }
        self.owner.permissions &= !SET_USER_ID;
        if self.owner.permissions & GROUP_EXECUTE != 0 {
            self.owner.permissions &= !SET_GROUP_ID;
        }
        self.xattrs.remove(b"security.capability".as_slice());
    }
}

/// The time that SETATTR means.
pub fn time_of(set: SetTime) -> Timestamp {
    match set {
        SetTime::Now => now(),
        SetTime::At(time) => time,
    }
}
