//! Directory trees: each task changes names of a directory of its own, and finds them as it left them.

use std::collections::{BTreeMap, BTreeSet};

use fs_client::{OwnedOperation, OwnedReply};
use fuse_codec::{Cookie, DirLayout, Errno, RenameFlags, SetAttr};

use crate::guest::{Guest, RDWR, ROOT, client, last_cookie, names_in};
use crate::world::{Faults, World};
use crate::{faulty, seeds, slow};

const NAMES: u64 = 5;
const STEPS: usize = 30;

/// Where anything may go wrong.
const FAILURES: [Errno; 2] = [Errno::EIO, Errno::ENOSPC];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Node {
    is_directory: bool,
    ino: u64,
}

type Names = BTreeMap<String, Node>;

struct Owner {
    world: World,
    guest: Guest,
    directory: u64,
    names: Names,
    /// Errors that say nothing about what was done.
    allowed: &'static [Errno],
}

/// A change, and what it must answer by the names that are there.
enum Change {
    Create,
    Mkdir,
    Unlink,
    Rmdir,
    Link(String),
    Rename(String, RenameFlags),
}

impl Owner {
    fn name(&self) -> String {
        format!("n{}", self.world.runtime.below(NAMES))
    }

    async fn run(mut self) -> Self {
        for _ in 0..STEPS {
            self.step().await;
        }
        self
    }

    async fn step(&mut self) {
        let name = self.name();
        let change = match self.world.runtime.below(10) {
            0..3 => Change::Create,
            3..5 => Change::Mkdir,
            5 => Change::Unlink,
            6 => Change::Rmdir,
            7 => Change::Link(self.name()),
            8 => Change::Rename(self.name(), RenameFlags::Replace),
            _ => {
                let flags = [
                    RenameFlags::Exchange,
                    RenameFlags::NoReplace,
                    RenameFlags::Whiteout { no_replace: false },
                    RenameFlags::Whiteout { no_replace: true },
                ];
                Change::Rename(self.name(), flags[self.world.runtime.below(4) as usize])
            }
        };
        let expected = expect(&self.names, &name, &change);
        let done = self.make(&name, &change).await;
        match (done, expected) {
            (Err(errno), expected) if self.allowed.contains(&errno) => {
                let before = std::mem::take(&mut self.names);
                self.look_again().await;
                let after = expected.unwrap_or_else(|_| before.clone());
                let is_known = same(&self.names, &before) || same(&self.names, &after);
                if !is_known {
                    let what = format!("{before:?} became {:?}", self.names);
                    self.world.violation(what);
                }
            }
            (Ok(ino), Ok(mut names)) => {
                if let (Some(ino), Some(node)) = (ino, names.get_mut(&name)) {
                    node.ino = ino;
                }
                self.names = names;
            }
            (Err(errno), Err(expected)) if errno == expected => {}
            (done, expected) => {
                let expected = expected.map(|_| ());
                let what = format!("{name}: {done:?}, expected {expected:?}: {:?}", self.names);
                self.world.violation(what);
            }
        }
    }

    /// Does it; the inode if one was made.
    async fn make(&self, name: &str, change: &Change) -> Result<Option<u64>, Errno> {
        let (guest, directory) = (&self.guest, self.directory);
        match change {
            Change::Create => {
                let (ino, handle) = guest.create(directory, name, RDWR | libc::O_EXCL).await?;
                guest.release(ino, handle).await.unwrap();
                Ok(Some(ino))
            }
            Change::Mkdir => Ok(Some(guest.mkdir(directory, name).await?)),
            Change::Unlink => guest.unlink(directory, name).await.map(|()| None),
            Change::Rmdir => guest.rmdir(directory, name).await.map(|()| None),
            Change::Link(to) => {
                let ino = self.names.get(name).map_or(999_999, |node| node.ino);
                guest.link(ino, directory, to).await.map(|_| None)
            }
            Change::Rename(to, flags) => {
                let to = (directory, to.as_str());
                guest.rename((directory, name), to, *flags).await?;
                match flags {
                    RenameFlags::Whiteout { .. } => self.whiteout(name).await,
                    _ => Ok(None),
                }
            }
        }
    }

    /// The whiteout at a name, from where another inode was moved away; none if it is another name of the
    /// inode that was to be replaced.
    async fn whiteout(&self, name: &str) -> Result<Option<u64>, Errno> {
        let before = self.names.get(name).map(|node| node.ino);
        let entry = loop {
            match self.guest.lookup(self.directory, name).await {
                Err(errno) if self.allowed.contains(&errno) => {}
                found => break found?,
            }
        };
        let ino = entry.nodeid.0;
        if before == Some(ino) {
            return Ok(None);
        }
        if entry.attr.kind != fuse_codec::Kind::CharDevice {
            let what = format!("{name} is no whiteout: {entry:?}");
            self.world.violation(what);
        }
        Ok(Some(ino))
    }

    /// Has whatever may still come be done, and looks what is there.
    async fn look_again(&mut self) {
        let probe = SetAttr {
            permissions: Some(0o755),
            ..SetAttr::default()
        };
        while self.guest.setattr(self.directory, probe).await.is_err() {}
        loop {
            if let Ok(names) = self.look().await {
                self.names = names;
                return;
            }
        }
    }

    async fn look(&self) -> Result<Names, Errno> {
        let mut names = Names::new();
        for (name, ino) in self.guest.list(self.directory).await? {
            let entry = self.guest.lookup(self.directory, &name).await?;
            if entry.nodeid.0 != ino {
                self.world
                    .violation(format!("{name} is {ino}, and {:?}", entry.nodeid));
            }
            let is_directory = entry.attr.kind == fuse_codec::Kind::Directory;
            names.insert(name, Node { is_directory, ino });
        }
        Ok(names)
    }
}

/// Whether the same names lead to the same inodes, but for those that were just made (0).
fn same(left: &Names, right: &Names) -> bool {
    left.len() == right.len()
        && left
            .iter()
            .zip(right)
            .all(|((name, node), (other_name, other))| {
                let is_same = node.ino == other.ino || other.ino == 0;
                name == other_name && node.is_directory == other.is_directory && is_same
            })
}

/// The names after a change, or its error.
fn expect(names: &Names, name: &str, change: &Change) -> Result<Names, Errno> {
    let (mut after, there) = (names.clone(), names.get(name).copied());
    match change {
        Change::Create | Change::Mkdir => {
            let is_directory = matches!(change, Change::Mkdir);
            if there.is_some() {
                return Err(Errno::EEXIST);
            }
            after.insert(
                name.into(),
                Node {
                    is_directory,
                    ino: 0,
                },
            );
        }
        Change::Unlink | Change::Rmdir => {
            let node = there.ok_or(Errno::ENOENT)?;
            match (matches!(change, Change::Rmdir), node.is_directory) {
                (true, false) => return Err(Errno::ENOTDIR),
                (false, true) => return Err(Errno::EISDIR),
                _ => after.remove(name),
            };
        }
        Change::Link(to) => {
            if names.contains_key(to) {
                return Err(Errno::EEXIST);
            }
            let node = there.ok_or(Errno::ESTALE)?;
            if node.is_directory {
                return Err(Errno::EPERM);
            }
            after.insert(to.clone(), node);
        }
        Change::Rename(to, flags) => return expect_rename(names, name, to, *flags),
    }
    Ok(after)
}

fn expect_rename(names: &Names, name: &str, to: &str, flags: RenameFlags) -> Result<Names, Errno> {
    let node = *names.get(name).ok_or(Errno::ENOENT)?;
    let (mut after, there) = (names.clone(), names.get(to).copied());
    match (flags, there) {
        (RenameFlags::NoReplace | RenameFlags::Whiteout { no_replace: true }, Some(_)) => {
            return Err(Errno::EEXIST);
        }
        (RenameFlags::Exchange, None) => return Err(Errno::ENOENT),
        (_, Some(there)) if there.ino == node.ino => return Ok(after),
        (RenameFlags::Exchange, Some(there)) => {
            after.insert(name.into(), there);
            after.insert(to.into(), node);
            return Ok(after);
        }
        (_, Some(there)) => match (node.is_directory, there.is_directory) {
            (true, false) => return Err(Errno::ENOTDIR),
            (false, true) => return Err(Errno::EISDIR),
            _ => {}
        },
        (_, None) => {}
    }
    match flags {
        // Its number is not known yet.
        RenameFlags::Whiteout { .. } => after.insert(
            name.into(),
            Node {
                is_directory: false,
                ino: 0,
            },
        ),
        _ => after.remove(name),
    };
    after.insert(to.into(), node);
    Ok(after)
}

async fn trees(world: World, faults: Faults, allowed: &'static [Errno]) {
    let mut owners = Vec::new();
    for node in 1..4 {
        let host = client(&world, node, None);
        for number in 0..2 {
            let guest = Guest::new(&host);
            let directory = guest
                .mkdir(ROOT, &format!("{node}.{number}"))
                .await
                .unwrap();
            owners.push(Owner {
                world: world.clone(),
                guest,
                directory,
                names: Names::new(),
                allowed,
            });
        }
    }
    world.set_faults(faults);
    let running: Vec<_> = owners
        .into_iter()
        .map(|owner| world.runtime.spawn(owner.run()))
        .collect();
    let mut ended = Vec::new();
    for owner in running {
        ended.push(owner.await.unwrap());
    }
    world.set_faults(slow());
    for owner in &ended {
        let found = owner.look().await.unwrap();
        if !same(&found, &owner.names) {
            world.violation(format!("{found:?} are there, not {:?}", owner.names));
        }
    }
}

#[test]
fn names_are_as_their_owners_left_them() {
    seeds(20, |world| trees(world, slow(), &[]));
}

#[test]
fn names_are_as_their_owners_left_them_whatever_goes_wrong() {
    seeds(60, |world| trees(world, faulty(), &FAILURES));
}

#[test]
fn operations_are_done_in_another_session_when_one_ends() {
    let faults = Faults {
        session_end: 0.03,
        ..slow()
    };
    seeds(40, move |world| trees(world, faults, &[]));
}

#[test]
fn names_are_as_their_owners_left_them_while_sessions_end() {
    let faults = Faults {
        session_end: 0.03,
        ..faulty()
    };
    seeds(60, move |world| trees(world, faults, &FAILURES));
}

#[test]
fn a_listing_goes_on_at_another_host_while_names_come_and_go() {
    seeds(10, |world| async move {
        world.set_faults(slow());
        let hosts: Vec<Guest> = (1..=3)
            .map(|node| Guest::new(&client(&world, node, None)))
            .collect();
        let mut expected = BTreeSet::new();
        for number in 0..60 {
            let name = format!("stays-{number}");
            hosts[0].mkdir(ROOT, &name).await.unwrap();
            expected.insert(name);
        }
        let mut handles = Vec::new();
        for host in &hosts {
            handles.push(host.opendir(ROOT).await.unwrap());
        }
        let (mut cookie, mut found) = (0, Vec::new());
        for turn in 0.. {
            let at = world.runtime.below(3) as usize;
            let readdir = OwnedOperation::Readdir {
                layout: DirLayout::Plain,
                handle: handles[at],
                cookie: Cookie::new(cookie).unwrap(),
                size: 400,
            };
            let OwnedReply::Bytes(bytes) = hosts[at].call(ROOT, readdir).await else {
                panic!("the root is listed");
            };
            if bytes.is_empty() {
                break;
            }
            cookie = last_cookie(&bytes, DirLayout::Plain);
            let names = names_in(&bytes, DirLayout::Plain).into_iter();
            found.extend(names.map(|(name, _)| name));
            let goes = format!("goes-{turn}");
            hosts[turn % 3].mkdir(ROOT, &goes).await.unwrap();
            hosts[(turn + 1) % 3].rmdir(ROOT, &goes).await.unwrap();
        }
        found.retain(|name| name.starts_with("stays"));
        assert_eq!(found.len(), expected.len(), "none comes twice");
        assert_eq!(found.into_iter().collect::<BTreeSet<_>>(), expected);
    });
}
