//! The entries of a directory, by name and in the order in which they were made.

use std::collections::BTreeMap;

use fuse_codec::{Cookie, NodeId};

/// Cookies of `.` and `..`; those of entries follow.
pub const DOT_COOKIE: u64 = 1;
pub const DOT_DOT_COOKIE: u64 = 2;

/// A directory.
#[derive(Debug)]
pub struct Directory {
    /// The directory that it is in; the root is in itself.
    pub parent: NodeId,
    entries: BTreeMap<Vec<u8>, (NodeId, u64)>,
    by_cookie: BTreeMap<u64, Vec<u8>>,
    last_cookie: u64,
}

impl Directory {
    /// An empty one.
    pub fn new(parent: NodeId) -> Self {
        Self {
            parent,
            entries: BTreeMap::new(),
            by_cookie: BTreeMap::new(),
            last_cookie: DOT_DOT_COOKIE,
        }
    }

    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    pub fn get(&self, name: &[u8]) -> Option<NodeId> {
        self.entries.get(name).map(|(node, _)| *node)
    }

    /// Adds a name, or has it name another inode. A name that was there keeps its cookie.
    pub fn set(&mut self, name: &[u8], node: NodeId) {
        if let Some((known, _)) = self.entries.get_mut(name) {
            *known = node;
            return;
        }
        self.last_cookie += 1;
        self.entries.insert(name.to_vec(), (node, self.last_cookie));
        self.by_cookie.insert(self.last_cookie, name.to_vec());
    }

    pub fn remove(&mut self, name: &[u8]) {
        if let Some((_, cookie)) = self.entries.remove(name) {
            self.by_cookie.remove(&cookie);
        }
    }

    /// Entries behind a cookie: cookie, name, inode.
    pub fn after(&self, cookie: Cookie) -> impl Iterator<Item = (u64, &[u8], NodeId)> {
        let later = self.by_cookie.range(cookie.raw() + 1..);
        later.map(|(cookie, name)| (*cookie, name.as_slice(), self.entries[name].0))
    }
}
