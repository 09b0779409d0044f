//! The host's part alone: what Linux would ask of a tree, sent without a guest. Behind an emulated guest the
//! time that a daemon takes is hardly seen; on hosts with KVM it is most of what a guest waits for.

use std::path::Path;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use filesystem_rig::front_end::{FrontEnd, ROOT};
use fuse_codec::wire::{self, Dirent};
use fuse_codec::{NodeId, Opcode};
use zerocopy::{FromBytes, IntoBytes};

use super::peers::Timed;
use super::work::DIRECTORIES;

/// A tree's name in the root.
const TREE: &[u8] = b"tree";
/// What Linux 6.1 gives a listing.
const LISTING_BYTES: usize = 4096;
/// `FOPEN_NOFLUSH`
const NO_FLUSH: u32 = 1 << 5;

/// A tree of files as its front end sees it.
#[derive(Debug)]
pub struct HostTree {
    front_end: FrontEnd,
    /// Inodes whose names were looked up, once for each time.
    known: Vec<NodeId>,
    /// OPEN was answered ENOSYS: files are read without it.
    without_open: bool,
    /// Likewise FLUSH.
    without_flush: bool,
    file_bytes: u64,
}

impl HostTree {
    /// Mounts what a socket serves; its files have `file_bytes`.
    pub fn mount(socket: &Path, file_bytes: u64) -> Result<Self> {
        Ok(Self {
            front_end: FrontEnd::mount(socket)?,
            known: Vec::new(),
            without_open: false,
            without_flush: false,
            file_bytes,
        })
    }

    /// Makes a tree as the guest's helper does, durably.
    pub fn make(&mut self, files: u64) -> Result<()> {
        let content = vec![0x5a; self.file_bytes as usize];
        let tree = self.front_end.make_directory(ROOT, TREE)?;
        let mut known = vec![tree];
        let mut index = 0;
        for number in 0..DIRECTORIES {
            let directory = self
                .front_end
                .make_directory(tree, &directory_name(number))?;
            known.push(directory);
            let end = ((number + 1) * files).div_ceil(DIRECTORIES);
            let names: Vec<Vec<u8>> = (index..end).map(file_name).collect();
            self.front_end.make_files(directory, &names, &content)?;
            index = end;
        }
        self.front_end.sync()?;
        self.front_end.forget(&known)
    }

    /// Looks every file up, as `stat` does.
    pub fn stat(&mut self, files: u64) -> Result<Timed> {
        self.timed(|tree| {
            let directories = tree.directories()?;
            for index in 0..files {
                tree.look_up_file(&directories, files, index)?;
            }
            Ok(files)
        })
    }

    /// Lists every directory with the attributes of its entries.
    pub fn walk(&mut self) -> Result<Timed> {
        self.timed(|tree| {
            let directories = tree.directories()?;
            let mut files = 0;
            for directory in directories {
                files += tree.list(directory)?;
            }
            Ok(files)
        })
    }

    /// Looks each file up, opens, reads and closes it, in an order that the seed makes.
    pub fn open(&mut self, files: u64, seed: u64) -> Result<Timed> {
        let mut order: Vec<u64> = (0..files).collect();
        shuffle(&mut order, seed);
        self.timed(|tree| {
            let directories = tree.directories()?;
            for index in order {
                let entry = tree.look_up_file(&directories, files, index)?;
                tree.read_file(entry)?;
            }
            Ok(files)
        })
    }

    fn timed(&mut self, work: impl FnOnce(&mut Self) -> Result<u64>) -> Result<Timed> {
        let begun = Instant::now();
        let count = work(self)?;
        let elapsed = begun.elapsed();
        let known = std::mem::take(&mut self.known);
        self.front_end.forget(&known)?;
        Ok(Timed { elapsed, count })
    }

    fn directories(&mut self) -> Result<Vec<NodeId>> {
        let tree = self.look_up(ROOT, TREE)?;
        let names = (0..DIRECTORIES).map(directory_name);
        names.map(|name| self.look_up(tree, &name)).collect()
    }

    fn look_up_file(&mut self, directories: &[NodeId], files: u64, index: u64) -> Result<NodeId> {
        let directory = directories[(index * DIRECTORIES / files) as usize];
        self.look_up(directory, &file_name(index))
    }

    fn look_up(&mut self, parent: NodeId, name: &[u8]) -> Result<NodeId> {
        let node = self.front_end.look_up(parent, name)?;
        self.known.push(node);
        Ok(node)
    }

    /// READs a file as OPEN, if there is one, allows.
    fn read_file(&mut self, file: NodeId) -> Result<()> {
        let opened = self.open_file(file)?;
        let read = wire::ReadIn {
            fh: opened.fh,
            size: (self.file_bytes as u32).into(),
            ..wire::ReadIn::default()
        };
        let room = self.file_bytes as usize;
        let bytes = self
            .front_end
            .bytes(Opcode::Read, file, read.as_bytes(), room)?;
        ensure!(bytes.len() == room, "a file of {} bytes", bytes.len());
        if opened.open_flags.get() & NO_FLUSH == 0 {
            self.flush(file, opened)?;
        }
        if self.without_open {
            return Ok(());
        }
        self.release(Opcode::Release, file, opened)
    }

    fn flush(&mut self, file: NodeId, opened: wire::OpenOut) -> Result<()> {
        if self.without_flush {
            return Ok(());
        }
        let flush = wire::FlushIn {
            fh: opened.fh,
            ..wire::FlushIn::default()
        };
        let body = flush.as_bytes();
        match self
            .front_end
            .try_call::<[u8; 0]>(Opcode::Flush, file, body)?
        {
            Ok(_) => Ok(()),
            Err(libc::ENOSYS) => {
                self.without_flush = true;
                Ok(())
            }
            Err(error) => Err(std::io::Error::from_raw_os_error(error).into()),
        }
    }

    fn open_file(&mut self, file: NodeId) -> Result<wire::OpenOut> {
        if self.without_open {
            return Ok(wire::OpenOut::default());
        }
        let open = wire::OpenIn::default();
        match self
            .front_end
            .try_call(Opcode::Open, file, open.as_bytes())?
        {
            Err(libc::ENOSYS) => self.without_open = true,
            Err(error) => return Err(std::io::Error::from_raw_os_error(error).into()),
            Ok(opened) => return Ok(opened),
        }
        Ok(wire::OpenOut::default())
    }

    fn release(&mut self, opcode: Opcode, node: NodeId, opened: wire::OpenOut) -> Result<()> {
        let release = wire::ReleaseIn {
            fh: opened.fh,
            ..wire::ReleaseIn::default()
        };
        self.front_end.bytes(opcode, node, release.as_bytes(), 0)?;
        Ok(())
    }

    /// READDIRPLUS to the end; returns how many files there are.
    fn list(&mut self, directory: NodeId) -> Result<u64> {
        let open = wire::OpenIn::default();
        let opened = self
            .front_end
            .try_call(Opcode::Opendir, directory, open.as_bytes())?;
        let is_open = opened != Err(libc::ENOSYS);
        let opened: wire::OpenOut = match opened {
            Err(error) if is_open => return Err(std::io::Error::from_raw_os_error(error).into()),
            opened => opened.unwrap_or_default(),
        };
        let (mut files, mut cookie) = (0, 0);
        loop {
            let read = wire::ReadIn {
                fh: opened.fh,
                offset: cookie.into(),
                size: (LISTING_BYTES as u32).into(),
                ..wire::ReadIn::default()
            };
            let opcode = Opcode::Readdirplus;
            let body = read.as_bytes();
            let records = self
                .front_end
                .bytes(opcode, directory, body, LISTING_BYTES)?;
            if records.is_empty() {
                break;
            }
            (files, cookie) = self.count(&records, files)?;
        }
        if is_open {
            self.release(Opcode::Releasedir, directory, opened)?;
        }
        Ok(files)
    }

    /// Counts the files among the records of a listing; returns also the last one's cookie.
    fn count(&mut self, mut records: &[u8], mut files: u64) -> Result<(u64, u64)> {
        let mut cookie = 0;
        while !records.is_empty() {
            let cut = || "a record is cut off";
            let (entry, rest) = wire::EntryOut::read_from_prefix(records)
                .ok()
                .with_context(cut)?;
            let (dirent, names) = Dirent::read_from_prefix(rest).ok().with_context(cut)?;
            let name = names
                .get(..dirent.namelen.get() as usize)
                .with_context(cut)?;
            cookie = dirent.off.get();
            if entry.nodeid.get() != 0 && name != b"." && name != b".." {
                self.known.push(NodeId(entry.nodeid.get()));
                files += 1;
            }
            let head = size_of::<wire::EntryOut>() + size_of::<Dirent>();
            let bytes = (head + name.len()).next_multiple_of(8);
            records = records.get(bytes..).with_context(cut)?;
        }
        Ok((files, cookie))
    }
}

/// The name of a directory of a tree, as the guest's helper has it.
fn directory_name(index: u64) -> Vec<u8> {
    format!("{index:02}").into_bytes()
}

/// Likewise of a file.
fn file_name(index: u64) -> Vec<u8> {
    format!("file{index:07}").into_bytes()
}

/// Fisher and Yates, by xorshift.
fn shuffle(order: &mut [u64], seed: u64) {
    let mut state = seed | 1;
    for index in (1..order.len()).rev() {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        order.swap(index, (state % (index as u64 + 1)) as usize);
    }
}
