//! Replies to own changes, and which of them are put into the cache.
//!
//! A reply says how something is after the change. It is put under a capability if all of this holds:
//!
//! 1. The capability was held when the change began, and ever since: another host would have had it recalled
//!    before it changed the same. Of a file that was there before, it is the file's own capability: under
//!    that of its directory alone, its former holder may have a change under way.
//! 2. No other change of this host that touches the same was under way at any moment since.
//! 3. It is known what the change did to those parts of the record that the reply does not have.

use std::sync::Arc;

use fs_capabilities::Instant;
use namespace::{
    Attributes, Body, Commit, Content, Extent, Ino, Inode, Make, NewNode, Operation, Outcome,
    SetAttributes,
};

use super::changes::Part;
use super::store::{self, Named};
use super::{Cache, Change, State};
use crate::sync::lock;

/// What was known when a change began.
pub(super) struct Before {
    /// Counts the changes that had ended.
    pub(super) asked: u64,
    known: Known,
}

enum Known {
    /// A name is made in a directory that is held, since this number.
    Name { dir: Ino, held: u64 },
    /// An inode is changed that is held, since this number.
    Inode {
        ino: Ino,
        held: u64,
        inode: Box<Inode>,
        extents: Option<Arc<[Extent]>>,
    },
}

impl State {
    /// What a reply to a change will be put under, before what the change touches is forgotten.
    pub(super) fn before(&mut self, operation: &Operation) -> Option<Before> {
        let known = match operation {
            Operation::Make(Make { parent: dir, .. }) | Operation::Symlink { parent: dir, .. } => {
                Known::Name {
                    dir: *dir,
                    held: self.store.directory(*dir)?.id,
                }
            }
            Operation::SetAttributes(SetAttributes { ino, .. })
            | Operation::Commit(Commit { ino, .. }) => {
                let file = self.store.file(*ino)?;
                let (held, extents) = (file.id, file.extents.clone());
                let inode = self.record(self.now, *ino)?.0.clone();
                Known::Inode {
                    ino: *ino,
                    held,
                    inode: Box::new(inode),
                    extents,
                }
            }
            _ => return None,
        };
        let asked = self.changes.ask();
        Some(Before { asked, known })
    }

    fn put_reply(&mut self, before: &Before, operation: &Operation, attributes: &Attributes) {
        match &before.known {
            Known::Name { dir, held } => {
                let is_held = self
                    .store
                    .directory(*dir)
                    .is_some_and(|dir| dir.id == *held);
                if let (Some((name, inode)), true) = (made(operation, attributes), is_held) {
                    self.put_made(before.asked, (*dir, name), attributes.ino, &inode);
                }
            }
            Known::Inode {
                ino,
                held,
                inode,
                extents,
            } => {
                let is_held = self.store.file(*ino).is_some_and(|file| file.id == *held);
                let is_alone = self.changes.is_alone(&Part::Inode(*ino), before.asked);
                let place = store::place_of(inode);
                let is_same = is_alone && self.changes.is_place_same(place, before.asked);
                let Some(changed) = changed(inode, operation, attributes) else {
                    return;
                };
                if is_held && is_same && attributes.nlink > 0 {
                    let is_same_content = changed.body == inode.body;
                    let extents = extents.clone().filter(|_| is_same_content);
                    self.store.put_inode(*ino, &changed);
                    self.store.put_file(*ino, &changed, extents);
                }
            }
        }
    }

    fn put_made(&mut self, asked: u64, (dir, name): (Ino, &[u8]), ino: Ino, inode: &Inode) {
        let part = Part::Name(dir, name.to_vec());
        if !self.changes.is_alone(&part, asked) {
            return;
        }
        self.store
            .put_name(dir, name, Named::Present(ino, inode.body.kind()));
        if self.changes.is_inode_same(ino, inode.parent, asked) {
            self.store.put_inode(ino, inode);
        }
    }
}

impl Cache {
    /// A change was done, and has not ended.
    pub(crate) fn replied(
        &self,
        now: Instant,
        change: &Change,
        operation: &Operation,
        outcome: &Outcome,
    ) {
        let (Outcome::Inode(attributes) | Outcome::Changed { attributes, .. }) = outcome else {
            return;
        };
        let mut state = lock(&self.state);
        state.at(now);
        if let Some(before) = &change.before {
            state.put_reply(before, operation, attributes);
            state.evict();
        }
    }
}

/// The record of an inode that was made, and its name.
fn made<'a>(operation: &'a Operation, attributes: &Attributes) -> Option<(&'a [u8], Inode)> {
    let (parent, name, body) = match operation {
        Operation::Make(make) => {
            let body = match make.node {
                NewNode::File => Body::File(Content::Empty),
                NewNode::Fifo => Body::Fifo,
                NewNode::Socket => Body::Socket,
                NewNode::CharacterDevice(number) => Body::CharacterDevice(number),
                NewNode::BlockDevice(number) => Body::BlockDevice(number),
                NewNode::Directory => Body::Directory(namespace::Directory {
                    parent: make.parent,
                    entries: 0,
                    next_cookie: namespace::FIRST_COOKIE,
                }),
            };
            (make.parent, &make.name, body)
        }
        Operation::Symlink {
            parent,
            name,
            target,
            ..
        } => (*parent, name, Body::Symlink(target.clone())),
        _ => return None,
    };
    let is_directory = matches!(body, Body::Directory(_));
    let inode = Inode {
        parent: (!is_directory).then_some(parent),
        btime: attributes.btime,
        xattr_list_bytes: 0,
        xattr_value_bytes: 0,
        body,
        ..with(attributes)
    };
    Some((name, inode))
}

/// The record of an inode that was changed, if all of it is known.
fn changed(before: &Inode, operation: &Operation, attributes: &Attributes) -> Option<Inode> {
    // Extended attributes may be taken away.
    if before.xattr_list_bytes > 0 {
        return None;
    }
    let body = match operation {
        Operation::SetAttributes(set) if set.size.is_none() => before.body.clone(),
        Operation::Commit(commit) => match (&before.body, commit.extents.as_slice()) {
            (body @ Body::File(_), []) => body.clone(),
            (Body::File(Content::Empty), [extent]) => Body::File(Content::Inline(*extent)),
            (Body::File(Content::Inline(old)), [extent])
                if extent.offset <= old.offset && extent.end() >= old.end() =>
            {
                Body::File(Content::Inline(*extent))
            }
            _ => return None,
        },
        _ => return None,
    };
    Some(Inode {
        parent: before.parent,
        btime: before.btime,
        body,
        ..with(attributes)
    })
}

/// The fields of a record that attributes have.
fn with(attributes: &Attributes) -> Inode {
    Inode {
        mode: attributes.mode,
        uid: attributes.uid,
        gid: attributes.gid,
        nlink: attributes.nlink,
        parent: None,
        size: attributes.size,
        atime: attributes.atime,
        mtime: attributes.mtime,
        ctime: attributes.ctime,
        btime: attributes.btime,
        change: attributes.change,
        allocated: attributes.allocated,
        xattr_list_bytes: 0,
        xattr_value_bytes: 0,
        body: Body::Fifo,
    }
}
