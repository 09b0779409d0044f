//! What was true when, by the records themselves: whatever a guest sees must have been true while it looked.

use std::collections::{BTreeMap, BTreeSet};

use namespace::{Attributes, BLOCK, Ino, Kind, Namespace, Time};

use crate::world::{FILESYSTEM, State};

/// Names that are looked at.
pub const NAMES: [&str; 4] = ["a", "b", "c", "d"];

/// The extended attribute that is looked at.
pub const XATTR: &str = "user.x";

/// Something that a guest can see.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Fact {
    /// What a name leads to.
    Name(u64, String),
    /// The attributes of an inode.
    Inode(u64),
    /// The bytes of a file.
    Content(u64),
    /// An extended attribute of an inode.
    Xattr(u64),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Value {
    Gone,
    Leads(u64),
    Attributes(Seen),
    Bytes(Vec<u8>),
}

impl Value {
    fn leads(&self) -> Option<u64> {
        match self {
            Self::Leads(ino) => Some(*ino),
            _ => None,
        }
    }
}

/// Attributes but for the access time, which may be old.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Seen {
    pub kind: String,
    pub permissions: u32,
    pub nlink: u32,
    pub size: u64,
    pub mtime: (i64, u32),
    pub ctime: (i64, u32),
}

impl Seen {
    fn of(attributes: &Attributes) -> Self {
        let time = |time: Time| (time.seconds, time.nanoseconds);
        let is_directory = attributes.kind == Kind::Directory;
        Self {
            kind: format!("{:?}", fuse_kind(attributes.kind)),
            permissions: attributes.mode.into(),
            nlink: attributes.nlink,
            size: if is_directory { BLOCK } else { attributes.size },
            mtime: time(attributes.mtime),
            ctime: time(attributes.ctime),
        }
    }

    /// Without what a host may have buffered.
    pub fn unbuffered(self) -> Self {
        let is_directory = self.kind == format!("{:?}", fuse_codec::Kind::Directory);
        match is_directory {
            true => self,
            false => Self {
                size: 0,
                mtime: (0, 0),
                ctime: (0, 0),
                ..self
            },
        }
    }

    pub fn by_guest(attr: &fuse_codec::Attr) -> Self {
        Self {
            kind: format!("{:?}", attr.kind),
            permissions: attr.permissions,
            nlink: attr.nlink,
            size: attr.size,
            mtime: (attr.mtime.secs, attr.mtime.nanos),
            ctime: (attr.ctime.secs, attr.ctime.nanos),
        }
    }
}

fn fuse_kind(kind: Kind) -> fuse_codec::Kind {
    match kind {
        Kind::File => fuse_codec::Kind::Regular,
        Kind::Directory => fuse_codec::Kind::Directory,
        Kind::Symlink => fuse_codec::Kind::Symlink,
        Kind::Fifo => fuse_codec::Kind::Fifo,
        Kind::Socket => fuse_codec::Kind::Socket,
        Kind::CharacterDevice => fuse_codec::Kind::CharDevice,
        Kind::BlockDevice => fuse_codec::Kind::BlockDevice,
    }
}

/// A moment: how many requests had been applied.
pub type Moment = u64;

/// The values that facts had.
#[derive(Default)]
pub struct History {
    now: Moment,
    /// Sizes, times and data of files are not in the records at once.
    is_buffered: bool,
    inodes: BTreeSet<u64>,
    directories: BTreeSet<u64>,
    values: BTreeMap<Fact, Vec<(Moment, Value)>>,
}

impl History {
    pub fn new(is_buffered: bool) -> Self {
        Self {
            is_buffered,
            ..Self::default()
        }
    }

    pub fn now(&self) -> Moment {
        self.now
    }

    /// Something was applied.
    pub fn record(&mut self, state: &State) {
        self.now += 1;
        let namespace = Namespace::new(&state.records, FILESYSTEM);
        let mut found = Vec::new();
        let mut to_list: Vec<u64> = self.directories.iter().copied().collect();
        if self.directories.insert(Ino::ROOT.0) {
            to_list.push(Ino::ROOT.0);
        }
        while let Some(dir) = to_list.pop() {
            let names = namespace.readdir(Ino(dir), 0, 1000).unwrap_or_default();
            for name in &names {
                self.inodes.insert(name.ino.0);
                let is_directory = name.kind == Kind::Directory;
                if is_directory && self.directories.insert(name.ino.0) {
                    to_list.push(name.ino.0);
                }
            }
            let names: BTreeMap<String, u64> = names
                .into_iter()
                .map(|entry| (String::from_utf8(entry.name).unwrap(), entry.ino.0))
                .collect();
            for name in NAMES {
                let value = names
                    .get(name)
                    .map_or(Value::Gone, |ino| Value::Leads(*ino));
                found.push((Fact::Name(dir, name.into()), value));
            }
        }
        for ino in self.inodes.iter().chain([&Ino::ROOT.0]) {
            let attributes = namespace.attributes(Ino(*ino)).ok();
            let seen = attributes.as_ref().map(Seen::of);
            let seen = seen.map(|seen| match self.is_buffered {
                true => seen.unbuffered(),
                false => seen,
            });
            let value = seen.map(Value::Attributes);
            found.push((Fact::Inode(*ino), value.unwrap_or(Value::Gone)));
            let xattr = namespace.xattr(Ino(*ino), XATTR.as_bytes()).ok();
            let value = xattr.map_or(Value::Gone, Value::Bytes);
            found.push((Fact::Xattr(*ino), value));
            let content = attributes.and_then(|attributes| state.content(&attributes));
            let value = content.map_or(Value::Gone, Value::Bytes);
            found.push((Fact::Content(*ino), value));
        }
        for (fact, value) in found {
            let values = self.values.entry(fact).or_default();
            if values.last().is_none_or(|(_, last)| *last != value) {
                values.push((self.now, value));
            }
        }
    }

    /// Whether a fact had this value at some moment of a span.
    pub fn was(&self, fact: &Fact, value: &Value, (from, to): (Moment, Moment)) -> bool {
        let value = &match value {
            // `registers.rs` looks at these.
            Value::Bytes(_) if self.is_buffered && matches!(fact, Fact::Content(_)) => return true,
            Value::Attributes(seen) if self.is_buffered => {
                Value::Attributes(seen.clone().unbuffered())
            }
            value => value.clone(),
        };
        let Some(values) = self.values.get(fact) else {
            return *value == Value::Gone;
        };
        let first = values.partition_point(|(at, _)| *at <= from);
        // Before the first record, it was not there.
        if first == 0 && *value == Value::Gone {
            return true;
        }
        let values = values[first.saturating_sub(1)..].iter();
        let mut values = values.take_while(|(at, _)| *at <= to);
        values.any(|(_, had)| had == value)
    }

    /// All that a name has ever led to.
    pub fn leads(&self, name: &Fact) -> BTreeSet<u64> {
        let values = self.values.get(name).into_iter().flatten();
        values.filter_map(|(_, value)| value.leads()).collect()
    }

    /// Whether a name led somewhere at some moment of a span.
    pub fn led(&self, name: &Fact, span: (Moment, Moment)) -> bool {
        let mut leads = self.leads(name).into_iter();
        leads.any(|ino| self.was(name, &Value::Leads(ino), span))
    }

    /// What a name led to before and after each of its changes within a span.
    pub fn changes(
        &self,
        name: &Fact,
        (from, to): (Moment, Moment),
    ) -> Vec<(Option<u64>, Option<u64>)> {
        let mut before = None;
        let mut changes = Vec::new();
        for (at, value) in self.values.get(name).into_iter().flatten() {
            let after = value.leads();
            if from < *at && *at <= to && before != after {
                changes.push((before, after));
            }
            before = after;
        }
        changes
    }

    /// What a fact was, for whoever reads a violation.
    pub fn tell(&self, fact: &Fact) -> String {
        format!("{:?}", self.values.get(fact))
    }
}
