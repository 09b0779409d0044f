//! What the namespace must do, as a tree in memory. It is written from the manual pages, not from the code:
//! links, parents, sizes of what is allocated and what is freed are not kept but counted when asked for.

mod data;
mod overlay;

use std::collections::{BTreeMap, BTreeSet};

use crate::*;

/// A block of a segment.
pub(super) type Place = (u64, u64);

#[derive(Debug, Clone, PartialEq)]
pub(super) struct Node {
    pub(super) what: What,
    mode: u16,
    owner: (u32, u32),
    size: u64,
    /// atime, mtime, ctime, btime.
    times: [Time; 4],
    pub(super) xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
    pub(super) openers: BTreeSet<u64>,
    /// It never had a name.
    is_temporary: bool,
    /// The change counter: only that it differs after each change is known of it, so it is told.
    pub(super) change: u64,
}

#[derive(Debug, Clone, PartialEq)]
pub(super) enum What {
    File(BTreeMap<u64, Place>),
    Directory(BTreeMap<Vec<u8>, u64>),
    Symlink(Vec<u8>),
    Other(Kind, u32),
}

#[derive(Debug, Clone, PartialEq)]
pub(super) struct Layer {
    pub(super) owner: u64,
    pub(super) sealed: bool,
    /// In blocks.
    pub(super) end: u64,
    /// Blocks that were named, with the epochs of their flush.
    pub(super) claimed: BTreeMap<u64, u64>,
    pub(super) returned: BTreeSet<u64>,
}

#[derive(Debug, Clone)]
pub(super) struct Model {
    pub(super) nodes: BTreeMap<u64, Node>,
    next: u64,
    pub(super) sessions: BTreeSet<u64>,
    /// The last session of each node.
    hosts: BTreeMap<u64, u64>,
    next_session: u64,
    pub(super) segments: BTreeMap<u64, Layer>,
    next_segment: u64,
}

type Answer = Result<Outcome, Error>;

fn valid(name: &[u8]) -> Result<(), Error> {
    match name {
        _ if name.len() > 255 => Err(Error::NameTooLong),
        b"" | b"." | b".." => Err(Error::Invalid),
        _ if name.iter().any(|byte| *byte == b'/' || *byte == 0) => Err(Error::Invalid),
        _ => Ok(()),
    }
}

fn valid_xattr(name: &[u8]) -> Result<(), Error> {
    let text = String::from_utf8_lossy(name);
    match text.split_once('.') {
        _ if name.is_empty() || name.len() > 255 => Err(Error::AttributeNameRange),
        Some(("user" | "trusted" | "security", "")) => Err(Error::Invalid),
        Some(("user" | "trusted" | "security", _)) => Ok(()),
        _ => Err(Error::Unsupported),
    }
}

impl Model {
    /// With these sessions, each of the node of the same number.
    pub(super) fn new(sessions: &[u64], at: Time) -> Self {
        let root = Node::new(What::Directory(BTreeMap::new()), 0o755, (0, 0), at);
        Self {
            nodes: BTreeMap::from([(1, root)]),
            next: 2,
            sessions: sessions.iter().copied().collect(),
            hosts: sessions.iter().map(|id| (*id, *id)).collect(),
            next_session: sessions.len() as u64 + 1,
            segments: BTreeMap::new(),
            next_segment: 1,
        }
    }

    /// All or nothing.
    pub(super) fn apply(&mut self, request: &Request) -> Answer {
        let mut after = self.clone();
        let answer = after.run(request);
        if answer.is_ok() {
            *self = after;
        }
        answer
    }

    pub(super) fn names_of(&self, ino: u64) -> Vec<(u64, Vec<u8>)> {
        let mut found = Vec::new();
        for (directory, node) in &self.nodes {
            if let What::Directory(children) = &node.what {
                let names = children.iter().filter(|(_, child)| **child == ino);
                found.extend(names.map(|(name, _)| (*directory, name.clone())));
            }
        }
        found
    }

    pub(super) fn attributes(&self, ino: u64) -> Attributes {
        let node = &self.nodes[&ino];
        let names = self.names_of(ino).len();
        let (kind, links, allocated, rdev) = match &node.what {
            What::File(blocks) => (Kind::File, names, blocks.len(), 0),
            What::Symlink(_) => (Kind::Symlink, names, 0, 0),
            What::Other(kind, rdev) => (*kind, names, 0, *rdev),
            What::Directory(_) if names == 0 && ino != 1 => (Kind::Directory, 0, 0, 0),
            What::Directory(children) => {
                let below = children.values().filter(|child| self.is_directory(**child));
                (Kind::Directory, 2 + below.count(), 0, 0)
            }
        };
        let [atime, mtime, ctime, btime] = node.times;
        Attributes {
            ino: Ino(ino),
            kind,
            mode: node.mode,
            nlink: u32::try_from(links).unwrap(),
            uid: node.owner.0,
            gid: node.owner.1,
            size: node.size,
            allocated: allocated as u64 * BLOCK,
            atime,
            mtime,
            ctime,
            btime,
            rdev,
            change: 0,
        }
    }

    /// Blocks that files name, with how often.
    pub(super) fn named(&self) -> BTreeMap<Place, u32> {
        let mut named = BTreeMap::new();
        for node in self.nodes.values() {
            if let What::File(blocks) = &node.what {
                for place in blocks.values() {
                    *named.entry(*place).or_default() += 1;
                }
            }
        }
        named
    }

    pub(super) fn freed(&self) -> BTreeSet<Place> {
        let named = self.named();
        let mut freed = BTreeSet::new();
        for (segment, layer) in &self.segments {
            let used = (0..layer.end).filter(|at| layer.sealed || layer.claimed.contains_key(at));
            let unnamed = used
                .filter(|at| !named.contains_key(&(*segment, *at)) && !layer.returned.contains(at));
            freed.extend(unnamed.map(|at| (*segment, at)));
        }
        freed
    }

    fn is_directory(&self, ino: u64) -> bool {
        matches!(self.nodes[&ino].what, What::Directory(_))
    }

    fn node(&mut self, ino: Ino) -> Result<&mut Node, Error> {
        self.nodes.get_mut(&ino.0).ok_or(Error::Stale)
    }

    fn children(&mut self, ino: Ino) -> Result<&mut BTreeMap<Vec<u8>, u64>, Error> {
        let is_gone = ino.0 != 1 && self.names_of(ino.0).is_empty();
        match &mut self.node(ino)?.what {
            What::Directory(_) if is_gone => Err(Error::NotFound),
            What::Directory(children) => Ok(children),
            _ => Err(Error::NotDirectory),
        }
    }

    fn file(&mut self, ino: Ino) -> Result<&mut BTreeMap<u64, Place>, Error> {
        match &mut self.node(ino)?.what {
            What::File(blocks) => Ok(blocks),
            What::Directory(_) => Err(Error::IsDirectory),
            _ => Err(Error::Invalid),
        }
    }

    fn find(&mut self, parent: Ino, name: &[u8]) -> Result<Option<u64>, Error> {
        valid(name)?;
        Ok(self.children(parent)?.get(name).copied())
    }

    fn touch(&mut self, ino: u64, at: Time, content: bool) {
        let times = &mut self.nodes.get_mut(&ino).unwrap().times;
        times[2] = at;
        if content {
            times[1] = at;
        }
    }

    /// Removes what has neither a name nor an opener.
    fn collect(&mut self, ino: u64, openers: BTreeSet<u64>) -> Removed {
        let nlink = self.attributes(ino).nlink;
        let sessions = self.sessions.clone();
        let node = self.nodes.get_mut(&ino).unwrap();
        let open = openers.into_iter();
        if nlink == 0 {
            node.openers
                .extend(open.filter(|opener| sessions.contains(opener)));
        }
        let kept = nlink > 0 || !node.openers.is_empty();
        if !kept {
            self.nodes.remove(&ino);
        }
        let ino = Ino(ino);
        Removed { ino, nlink, kept }
    }

    /// The sessions that an operation names as openers.
    fn openers(&self, openers: &Openers, session: u64) -> BTreeSet<u64> {
        match openers {
            Openers::Named(named) => named.iter().map(|opener| opener.0).collect(),
            Openers::All { own: true } => self.sessions.clone(),
            Openers::All { own: false } => {
                let sessions = self.sessions.iter().copied();
                sessions.filter(|other| *other != session).collect()
            }
        }
    }

    /// Refuses what is asked of another state of an inode.
    pub(super) fn expect(&self, ino: Ino, expected: Option<u64>) -> Result<(), Error> {
        let change = self.nodes.get(&ino.0).ok_or(Error::Stale)?.change;
        match expected.is_some_and(|expected| expected != change) {
            true => Err(Error::Changed),
            false => Ok(()),
        }
    }

    fn run(&mut self, request: &Request) -> Answer {
        let (at, session) = (request.at, request.session.0);
        match &request.operation {
            Operation::Make(make) => {
                let what = match make.node {
                    NewNode::File => What::File(BTreeMap::new()),
                    NewNode::Directory => What::Directory(BTreeMap::new()),
                    NewNode::Fifo => What::Other(Kind::Fifo, 0),
                    NewNode::Socket => What::Other(Kind::Socket, 0),
                    NewNode::CharacterDevice(rdev) => What::Other(Kind::CharacterDevice, rdev),
                    NewNode::BlockDevice(rdev) => What::Other(Kind::BlockDevice, rdev),
                };
                let node = Node::new(what, make.mode, (make.uid, make.gid), at);
                self.create(make.parent, &make.name, node)
            }
            Operation::Symlink {
                parent,
                name,
                target,
                uid,
                gid,
            } => {
                if target.is_empty() {
                    return Err(Error::NotFound);
                }
                let node = Node::new(What::Symlink(target.clone()), 0o777, (*uid, *gid), at);
                self.create(*parent, name, node)
            }
            Operation::Link { ino, parent, name } => self.link(*ino, (*parent, name), session, at),
            Operation::MakeTemporary(make) => self.make_temporary(make, session, at),
            Operation::Unlink {
                parent,
                name,
                openers,
            } => {
                let openers = self.openers(openers, session);
                self.remove(*parent, name, (false, openers), at)
            }
            Operation::Rmdir {
                parent,
                name,
                openers,
            } => {
                let openers = self.openers(openers, session);
                self.remove(*parent, name, (true, openers), at)
            }
            Operation::Rename(rename) => self.rename(rename, session, at),
            Operation::SetAttributes(set) => self.set_attributes(set, session, at),
            Operation::SetAccessTime { ino, atime } => {
                self.node(*ino)?.times[0] = *atime;
                let attributes = self.attributes(ino.0);
                Ok(Outcome::Changed {
                    attributes,
                    done: true,
                })
            }
            Operation::SetXattr {
                ino,
                name,
                value,
                mode,
            } => self.set_xattr(*ino, name, Some((value, *mode)), at),
            Operation::RemoveXattr { ino, name } => self.set_xattr(*ino, name, None, at),
            Operation::Commit(commit) => self.commit(commit, session, at),
            Operation::Punch(punch) => self.punch(punch, at),
            Operation::CopyRange(range) => self.copy(range, at),
            other => self.run_of_host(other, session),
        }
    }

    fn run_of_host(&mut self, operation: &Operation, session: u64) -> Answer {
        match operation {
            Operation::ReleaseOrphan { ino, session } => {
                if let Some(node) = self.nodes.get_mut(&ino.0) {
                    node.openers.remove(&session.0);
                    self.collect(ino.0, BTreeSet::new());
                }
                Ok(Outcome::Done)
            }
            Operation::EndSession { session } => {
                let layers = self.segments.values_mut();
                layers
                    .filter(|layer| layer.owner == session.0)
                    .for_each(|layer| layer.sealed = true);
                self.sessions.remove(&session.0);
                for ino in self.nodes.keys().copied().collect::<Vec<_>>() {
                    self.nodes.get_mut(&ino).unwrap().openers.remove(&session.0);
                    if ino != 1 {
                        self.collect(ino, BTreeSet::new());
                    }
                }
                Ok(Outcome::Step { done: true })
            }
            Operation::NewSegment => {
                let layer = Layer {
                    owner: session,
                    sealed: false,
                    end: 0,
                    claimed: BTreeMap::new(),
                    returned: BTreeSet::new(),
                };
                self.segments.insert(self.next_segment, layer);
                self.next_segment += 1;
                Ok(Outcome::Segment(SegmentId(self.next_segment - 1)))
            }
            Operation::SealSegment { segment, length } => {
                let layer = self.segments.get_mut(&segment.0).ok_or(Error::Invalid)?;
                if layer.owner != session || layer.sealed || length / BLOCK < layer.end {
                    return Err(Error::Invalid);
                }
                (layer.sealed, layer.end) = (true, length / BLOCK);
                Ok(Outcome::Done)
            }
            Operation::Reclaimed {
                segment,
                address,
                length,
            } => {
                let layer = self.segments.get_mut(&segment.0).unwrap();
                if !layer.sealed {
                    return Err(Error::Busy);
                }
                let end = address + length;
                layer.returned.extend(address / BLOCK..end / BLOCK);
                Ok(Outcome::Done)
            }
            Operation::DropSegment { segment } => {
                let named = self.named();
                let mut named = named.range((segment.0, 0)..=(segment.0, u64::MAX));
                let layer = self.segments.get(&segment.0);
                if layer.is_some_and(|layer| !layer.sealed) || named.next().is_some() {
                    return Err(Error::Busy);
                }
                self.segments.remove(&segment.0);
                Ok(Outcome::Step { done: true })
            }
            other => self.run_of_leader(other),
        }
    }

    fn run_of_leader(&mut self, operation: &Operation) -> Answer {
        match operation {
            Operation::OpenSession { node, .. } => {
                let last = self.hosts.get(node).copied();
                if let Some(open) = last.filter(|last| self.sessions.contains(last)) {
                    return Ok(Outcome::Session(SessionId(open)));
                }
                let id = self.next_session;
                self.next_session += 1;
                self.sessions.insert(id);
                self.hosts.insert(*node, id);
                Ok(Outcome::Session(SessionId(id)))
            }
            // What has as little data as here goes at once with its last name, or its last opener.
            Operation::Reap { ino, .. } => {
                let held = self.nodes.get(&ino.0);
                match held.is_some_and(|node| !node.openers.is_empty()) {
                    true => Err(Error::Busy),
                    false => Ok(Outcome::Step { done: true }),
                }
            }
            Operation::RaiseNumbers => {
                self.next += 1 << 32;
                self.next_session += 1 << 16;
                self.next_segment += 1 << 16;
                Ok(Outcome::Done)
            }
            // It is there.
            Operation::CreateFilesystem { .. } => Ok(Outcome::Done),
            other => panic!("the model has no {other:?}"),
        }
    }

    fn create(&mut self, parent: Ino, name: &[u8], mut node: Node) -> Answer {
        if self.find(parent, name)?.is_some() {
            return Err(Error::Exists);
        }
        if let What::Symlink(target) = &node.what {
            node.size = target.len() as u64;
        }
        let at = node.times[0];
        let ino = self.insert(parent, node)?;
        self.children(parent)?.insert(name.to_vec(), ino);
        self.touch(parent.0, at, true);
        Ok(Outcome::Inode(self.attributes(ino)))
    }

    fn link(&mut self, ino: Ino, (parent, name): (Ino, &[u8]), session: u64, at: Time) -> Answer {
        if self.find(parent, name)?.is_some() {
            return Err(Error::Exists);
        }
        self.node(ino)?;
        if self.is_directory(ino.0) {
            return Err(Error::NotPermitted);
        }
        if self.names_of(ino.0).is_empty() {
            self.first_name(ino, session)?;
        }
        self.children(parent)?.insert(name.to_vec(), ino.0);
        self.touch(parent.0, at, true);
        self.touch(ino.0, at, false);
        Ok(Outcome::Inode(self.attributes(ino.0)))
    }

    fn remove(
        &mut self,
        parent: Ino,
        name: &[u8],
        (directory, openers): (bool, BTreeSet<u64>),
        at: Time,
    ) -> Answer {
        let ino = self.find(parent, name)?.ok_or(Error::NotFound)?;
        match (directory, &self.nodes[&ino].what) {
            (false, What::Directory(_)) => return Err(Error::IsDirectory),
            (true, What::Directory(children)) if !children.is_empty() => {
                return Err(Error::NotEmpty);
            }
            (true, What::File(_) | What::Symlink(_) | What::Other(..)) => {
                return Err(Error::NotDirectory);
            }
            _ => {}
        }
        self.children(parent)?.remove(name);
        self.touch(parent.0, at, true);
        self.touch(ino, at, false);
        Ok(Outcome::Removed(Some(self.collect(ino, openers))))
    }

    /// Whether `ino` is `top` or somewhere below it.
    fn lies_in(&self, ino: u64, top: u64) -> bool {
        let What::Directory(children) = &self.nodes[&top].what else {
            return false;
        };
        ino == top || children.values().any(|child| self.lies_in(ino, *child))
    }

    fn rename(&mut self, rename: &Rename, session: u64, at: Time) -> Answer {
        let (from, to) = (rename.parent, rename.new_parent);
        let (name, new_name) = (&rename.name, &rename.new_name);
        valid(name)?;
        valid(new_name)?;
        self.children(to)?;
        let source = self.find(from, name)?.ok_or(Error::NotFound)?;
        let target = self.find(to, new_name)?;
        let exchange = rename.mode == RenameMode::Exchange;
        if exchange && target.is_none() {
            return Err(Error::NotFound);
        }
        let whiteout = match rename.mode {
            RenameMode::Whiteout(whiteout) => Some(whiteout),
            _ => None,
        };
        let keeps = whiteout.is_some_and(|whiteout| whiteout.no_replace);
        if (keeps || rename.mode == RenameMode::NoReplace) && target.is_some() {
            return Err(Error::Exists);
        }
        if from != to {
            if self.lies_in(to.0, source) {
                return Err(Error::Invalid);
            }
            if target.is_some_and(|target| self.lies_in(from.0, target)) {
                let errors = [Error::NotEmpty, Error::Invalid];
                return Err(errors[usize::from(exchange)]);
            }
        }
        if target == Some(source) {
            return Ok(Outcome::Removed(None));
        }
        if let (Some(target), false) = (target, exchange) {
            match (self.is_directory(source), &self.nodes[&target].what) {
                (true, What::Directory(children)) if children.is_empty() => {}
                (true, What::Directory(_)) => return Err(Error::NotEmpty),
                (true, _) => return Err(Error::NotDirectory),
                (false, What::Directory(_)) => return Err(Error::IsDirectory),
                (false, _) => {}
            }
        }
        self.children(from)?.remove(name);
        self.children(to)?.insert(new_name.clone(), source);
        let mut touched = vec![source];
        if let Some(target) = target {
            touched.push(target);
            if exchange {
                self.children(from)?.insert(name.clone(), target);
            }
        }
        for ino in touched {
            self.touch(ino, at, false);
        }
        self.touch(from.0, at, true);
        self.touch(to.0, at, true);
        if let Some(whiteout) = whiteout {
            self.leave_whiteout((from, name), whiteout, at)?;
        }
        let replaced = target.filter(|_| !exchange);
        let openers = self.openers(&rename.openers, session);
        let removed = replaced.map(|target| self.collect(target, openers));
        Ok(Outcome::Removed(removed))
    }
}

impl Node {
    fn new(what: What, mode: u16, owner: (u32, u32), at: Time) -> Self {
        Self {
            what,
            mode,
            owner,
            size: 0,
            times: [at; 4],
            xattrs: BTreeMap::new(),
            openers: BTreeSet::new(),
            is_temporary: false,
            change: 0,
        }
    }

    pub(super) fn size(&self) -> u64 {
        self.size
    }
}
