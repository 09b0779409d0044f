//! What one process makes of a directory of its own, at random, beside a model in memory of what must be
//! there: each call is compared with the model at once, all of it in the end.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs::{File, OpenOptions};
use std::io::{Error, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::rc::Rc;

use anyhow::{Context, Result, ensure};
use rustix::fs::{FallocateFlags, XattrFlags};
use rustix::io::Errno;

use crate::digest::{self, Body, Entry};
use crate::random::Random;

/// Longest file.
const FILE_BYTES_MAX: u64 = 1 << 20;
/// Longest write; some are longer than a request.
const WRITE_BYTES_MAX: u64 = 200 << 10;
/// Most entries: above it, more are removed than made.
const ENTRIES_MAX: usize = 60;
/// Names in a directory. One is no UTF-8.
const NAMES: [&[u8]; 6] = [
    b"a",
    b"b",
    b"c",
    b"long name with spaces",
    b"\xff\xfe",
    b"e",
];
const ATTRIBUTES: [&str; 3] = ["user.one", "user.two", "user.three"];

#[derive(Default)]
struct Content {
    bytes: Vec<u8>,
    mode: u32,
    links: u64,
    attributes: BTreeMap<Vec<u8>, Vec<u8>>,
}

enum Node {
    Directory,
    File(Rc<RefCell<Content>>),
    Symlink(PathBuf),
}

/// A directory of ours, and what is in it.
pub struct Model {
    root: PathBuf,
    /// By paths below the root, which itself is the empty one.
    nodes: BTreeMap<PathBuf, Node>,
    random: Random,
}

impl Model {
    pub fn make(root: &Path, seed: u64) -> Result<Self> {
        std::fs::create_dir(root)?;
        std::fs::set_permissions(root, PermissionsExt::from_mode(0o755))?;
        Ok(Self {
            root: root.to_owned(),
            nodes: BTreeMap::from([(PathBuf::new(), Node::Directory)]),
            random: Random::new(seed),
        })
    }

    /// One call, or a few that belong together.
    pub fn step(&mut self) -> Result<()> {
        let is_full = self.nodes.len() > ENTRIES_MAX;
        match self.random.below(20) {
            0..=2 if !is_full => self.create(),
            3 if !is_full => self.make_directory(),
            4 if !is_full => self.make_symlink(),
            5 if !is_full => self.link(),
            0..=6 => self.remove(),
            7 | 8 => self.rename(),
            9..=11 => self.write(),
            12 => self.append(),
            13 => self.truncate(),
            14 => self.punch(),
            15 => self.set_attribute(),
            16 => self.set_mode(),
            17 | 18 => self.verify_file(),
            _ => self.verify_listing(),
        }
    }

    /// The lines that [`digest::of_tree`] has to find.
    pub fn lines(&self) -> String {
        let none = BTreeMap::new();
        let lines = self.nodes.iter().map(|(path, node)| {
            let content;
            let (mode, links, body, attributes) = match node {
                Node::Directory => (0o755, self.links(path), Body::Directory, &none),
                Node::Symlink(target) => (0o777, 1, Body::Symlink(target), &none),
                Node::File(file) => {
                    content = file.borrow();
                    let body = Body::File(&content.bytes);
                    (content.mode, content.links, body, &content.attributes)
                }
            };
            let entry = Entry {
                path,
                mode,
                links,
                body,
                attributes,
            };
            entry.line() + "\n"
        });
        lines.collect()
    }

    /// Links of a directory.
    fn links(&self, path: &Path) -> u64 {
        let is_in = |other: &Path, node: &Node| {
            matches!(node, Node::Directory) && other.parent() == Some(path)
        };
        let all = self.nodes.iter();
        2 + all.filter(|(other, node)| is_in(other, node)).count() as u64
    }

    fn at(&self, path: &Path) -> PathBuf {
        self.root.join(path)
    }

    fn some_path(&mut self, wanted: fn(&Node) -> bool) -> Option<PathBuf> {
        let all = self.nodes.iter().filter(|(_, node)| wanted(node));
        let all: Vec<&Path> = all.map(|(path, _)| path.as_path()).collect();
        self.random.one_of(&all).map(Path::to_owned)
    }

    fn some_file(&mut self) -> Option<(PathBuf, Rc<RefCell<Content>>)> {
        let path = self.some_path(|node| matches!(node, Node::File(_)))?;
        match &self.nodes[&path] {
            Node::File(file) => Some((path.clone(), Rc::clone(file))),
            _ => None,
        }
    }

    /// A name in some directory, which may be there.
    fn some_name(&mut self) -> PathBuf {
        let directory = self.some_path(|node| matches!(node, Node::Directory));
        let directory = directory.unwrap_or_default();
        let name = self.random.one_of(&NAMES).unwrap_or(b"a");
        directory.join(OsStr::from_bytes(name))
    }

    /// That a call came to what the model says.
    fn expect(
        &self,
        what: &str,
        path: &Path,
        done: Result<(), Error>,
        refused: Option<Errno>,
    ) -> Result<()> {
        let found = done.err().map(|error| error.raw_os_error());
        let wanted = refused.map(|errno| Some(errno.raw_os_error()));
        ensure!(
            found == wanted,
            "{what} {path:?}: {found:?}, expected was {wanted:?}"
        );
        Ok(())
    }

    /// The error of what makes a name, if it is there.
    fn exists(&self, path: &Path) -> Option<Errno> {
        self.nodes.contains_key(path).then_some(Errno::EXIST)
    }

    fn create(&mut self) -> Result<()> {
        let path = self.some_name();
        let refused = self.exists(&path);
        let length = self.random.below(WRITE_BYTES_MAX) >> self.random.below(16);
        let bytes = self.random.bytes(length);
        let mut made = File::create_new(self.at(&path));
        if let Ok(file) = &mut made {
            file.write_all(&bytes)?;
            if self.random.below(4) == 0 {
                file.sync_all()?;
            }
            let mode = 0o644;
            file.set_permissions(PermissionsExt::from_mode(mode))?;
            let content = Content {
                bytes,
                mode,
                links: 1,
                ..Content::default()
            };
            let node = Node::File(Rc::new(RefCell::new(content)));
            self.nodes.entry(path.clone()).or_insert(node);
        }
        self.expect("create", &path, made.map(drop), refused)
    }

    fn make_directory(&mut self) -> Result<()> {
        let path = self.some_name();
        let refused = self.exists(&path);
        let made = std::fs::create_dir(self.at(&path));
        if made.is_ok() {
            std::fs::set_permissions(self.at(&path), PermissionsExt::from_mode(0o755))?;
            self.nodes.entry(path.clone()).or_insert(Node::Directory);
        }
        self.expect("mkdir", &path, made, refused)
    }

    fn make_symlink(&mut self) -> Result<()> {
        let (path, target) = (self.some_name(), self.some_name());
        let refused = self.exists(&path);
        // An empty one is no target.
        let target = Path::new("x").join(target);
        let made = symlink(&target, self.at(&path));
        if made.is_ok() {
            let node = Node::Symlink(target);
            self.nodes.entry(path.clone()).or_insert(node);
        }
        self.expect("symlink", &path, made, refused)
    }

    fn link(&mut self) -> Result<()> {
        let Some((from, file)) = self.some_file() else {
            return Ok(());
        };
        let path = self.some_name();
        let refused = self.exists(&path);
        let made = std::fs::hard_link(self.at(&from), self.at(&path));
        if made.is_ok() && refused.is_none() {
            file.borrow_mut().links += 1;
            self.nodes.insert(path.clone(), Node::File(file));
        }
        self.expect("link", &path, made, refused)
    }

    fn has_children(&self, path: &Path) -> bool {
        self.nodes.keys().any(|other| other.parent() == Some(path))
    }

    fn forget(&mut self, path: &Path) {
        if let Some(Node::File(file)) = self.nodes.remove(path) {
            file.borrow_mut().links -= 1;
        }
    }

    fn remove(&mut self) -> Result<()> {
        let Some(path) = self.some_path(|_| true) else {
            return Ok(());
        };
        if path.as_os_str().is_empty() {
            return Ok(());
        }
        let (done, refused) = match &self.nodes[&path] {
            Node::Directory => {
                let refused = self.has_children(&path).then_some(Errno::NOTEMPTY);
                (std::fs::remove_dir(self.at(&path)), refused)
            }
            _ => (std::fs::remove_file(self.at(&path)), None),
        };
        if refused.is_none() {
            self.forget(&path);
        }
        self.expect("remove", &path, done, refused)
    }

    fn rename(&mut self) -> Result<()> {
        let Some(from) = self.some_path(|_| true) else {
            return Ok(());
        };
        let to = self.some_name();
        if from.as_os_str().is_empty() {
            return Ok(());
        }
        let is_directory = |path: &Path| {
            let node = self.nodes.get(path);
            node.map(|node| matches!(node, Node::Directory))
        };
        let is_same_file = match (self.nodes.get(&from), self.nodes.get(&to)) {
            (Some(Node::File(one)), Some(Node::File(two))) => Rc::ptr_eq(one, two),
            _ => false,
        };
        // As Linux asks: the places first, then the kinds, then what is in the target.
        let refused = match (is_directory(&from), is_directory(&to)) {
            _ if from == to => None,
            (Some(true), _) if to.starts_with(&from) => Some(Errno::INVAL),
            (_, Some(true)) if from.starts_with(&to) => Some(Errno::NOTEMPTY),
            (Some(true), Some(false)) => Some(Errno::NOTDIR),
            (Some(false), Some(true)) => Some(Errno::ISDIR),
            (_, Some(true)) if self.has_children(&to) => Some(Errno::NOTEMPTY),
            _ => None,
        };
        let done = std::fs::rename(self.at(&from), self.at(&to));
        // Of two names of one file both stay.
        if refused.is_none() && from != to && !is_same_file {
            self.forget(&to);
            let below = self.nodes.keys().filter(|path| path.starts_with(&from));
            let below: Vec<PathBuf> = below.cloned().collect();
            for path in below {
                let rest = path.strip_prefix(&from)?;
                let moved = match rest.as_os_str().is_empty() {
                    true => to.clone(),
                    false => to.join(rest),
                };
                if let Some(node) = self.nodes.remove(&path) {
                    self.nodes.insert(moved, node);
                }
            }
        }
        self.expect(&format!("rename {from:?} to"), &to, done, refused)
    }

    fn write(&mut self) -> Result<()> {
        let Some((path, file)) = self.some_file() else {
            return Ok(());
        };
        let offset = self.random.below(FILE_BYTES_MAX - WRITE_BYTES_MAX) >> self.random.below(12);
        let length = 1 + (self.random.below(WRITE_BYTES_MAX) >> self.random.below(14));
        let bytes = self.random.bytes(length);
        let opened = OpenOptions::new().write(true).open(self.at(&path))?;
        opened.write_all_at(&bytes, offset)?;
        if self.random.below(4) == 0 {
            opened.sync_data()?;
        }
        let content = &mut file.borrow_mut().bytes;
        let (start, end) = (offset as usize, (offset + length) as usize);
        content.resize(content.len().max(end), 0);
        content[start..end].copy_from_slice(&bytes);
        Ok(())
    }

    fn append(&mut self) -> Result<()> {
        let Some((path, file)) = self.some_file() else {
            return Ok(());
        };
        let content = &mut file.borrow_mut().bytes;
        let room = FILE_BYTES_MAX - content.len() as u64;
        let length = self.random.below(WRITE_BYTES_MAX).min(room) >> self.random.below(10);
        let bytes = self.random.bytes(length);
        let opened = OpenOptions::new().append(true).open(self.at(&path))?;
        (&opened).write_all(&bytes)?;
        content.extend(bytes);
        Ok(())
    }

    fn truncate(&mut self) -> Result<()> {
        let Some((path, file)) = self.some_file() else {
            return Ok(());
        };
        let length = self.random.below(FILE_BYTES_MAX) >> self.random.below(16);
        let opened = OpenOptions::new().write(true).open(self.at(&path))?;
        opened.set_len(length)?;
        file.borrow_mut().bytes.resize(length as usize, 0);
        Ok(())
    }

    fn punch(&mut self) -> Result<()> {
        let Some((path, file)) = self.some_file() else {
            return Ok(());
        };
        let offset = self.random.below(FILE_BYTES_MAX);
        let length = 1 + self.random.below(WRITE_BYTES_MAX);
        let opened = OpenOptions::new().write(true).open(self.at(&path))?;
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        rustix::fs::fallocate(&opened, flags, offset, length)?;
        let content = &mut file.borrow_mut().bytes;
        let end = content.len().min((offset + length) as usize);
        if let Some(hole) = content.get_mut(offset as usize..end) {
            hole.fill(0);
        }
        Ok(())
    }

    fn set_attribute(&mut self) -> Result<()> {
        let Some((path, file)) = self.some_file() else {
            return Ok(());
        };
        let name = self.random.one_of(&ATTRIBUTES).unwrap_or("user.one");
        let (at, key) = (self.at(&path), name.as_bytes().to_vec());
        let attributes = &mut file.borrow_mut().attributes;
        if self.random.below(3) > 0 {
            let length = self.random.below(300);
            let value = self.random.bytes(length);
            rustix::fs::setxattr(at, name, &value, XattrFlags::empty())?;
            attributes.insert(key, value);
            return Ok(());
        }
        let refused = attributes.remove(&key).is_none().then_some(Errno::NODATA);
        let done = rustix::fs::removexattr(at, name).map_err(Error::from);
        self.expect("removexattr", &path, done, refused)
    }

    fn set_mode(&mut self) -> Result<()> {
        let Some((path, file)) = self.some_file() else {
            return Ok(());
        };
        let mode = 0o600 + self.random.below(0o200) as u32;
        std::fs::set_permissions(self.at(&path), PermissionsExt::from_mode(mode))?;
        file.borrow_mut().mode = mode;
        Ok(())
    }

    fn verify_file(&mut self) -> Result<()> {
        let Some((path, file)) = self.some_file() else {
            return Ok(());
        };
        let (at, wanted) = (self.at(&path), file.borrow());
        let metadata = std::fs::metadata(&at)?;
        ensure!(
            metadata.len() == wanted.bytes.len() as u64 && metadata.nlink() == wanted.links,
            "{path:?}: {} bytes, {} links; expected were {}, {}",
            metadata.len(),
            metadata.nlink(),
            wanted.bytes.len(),
            wanted.links
        );
        let found = std::fs::read(&at)?;
        let differs = (found.iter().zip(&wanted.bytes)).position(|(one, two)| one != two);
        ensure!(
            found.len() == wanted.bytes.len() && differs.is_none(),
            "{path:?}: {} bytes, wrong at {differs:?}",
            found.len()
        );
        let attributes = digest::attributes(&at)?;
        ensure!(attributes == wanted.attributes, "attributes of {path:?}");
        Ok(())
    }

    fn verify_listing(&mut self) -> Result<()> {
        let directory = self.some_path(|node| matches!(node, Node::Directory));
        let directory = directory.context("the root is there")?;
        let mut found = Vec::new();
        for entry in std::fs::read_dir(self.at(&directory))? {
            found.push(directory.join(entry?.file_name()));
        }
        found.sort();
        let wanted = self.nodes.keys();
        let wanted = wanted.filter(|path| path.parent() == Some(directory.as_path()));
        let wanted: Vec<PathBuf> = wanted.cloned().collect();
        ensure!(
            found == wanted,
            "{directory:?} has {found:?}, not {wanted:?}"
        );
        Ok(())
    }
}
