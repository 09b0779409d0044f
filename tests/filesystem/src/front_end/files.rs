//! Files made and removed by a front end, as many at a time as its ring holds. A guest's kernel changes one
//! directory at a time.

use std::io;

use anyhow::{Context, Result, ensure};
use fuse_codec::{NodeId, Opcode, wire};
use zerocopy::{FromBytes, IntoBytes};

use super::{FrontEnd, Reply, Request};

/// Files that are open at a time.
const AT_ONCE: usize = 4096;

impl FrontEnd {
    /// LOOKUP; returns the inode, which stays known.
    pub fn look_up(&mut self, parent: NodeId, name: &[u8]) -> Result<NodeId> {
        let entry: wire::EntryOut = self
            .call(Opcode::Lookup, parent, &named(&[], name))
            .with_context(|| format!("look {} up", name.escape_ascii()))?;
        Ok(NodeId(entry.nodeid.get()))
    }

    /// MKDIR; returns its inode, which stays known.
    pub fn make_directory(&mut self, parent: NodeId, name: &[u8]) -> Result<NodeId> {
        let head = wire::MkdirIn {
            mode: 0o755.into(),
            umask: 0o22.into(),
        };
        let body = named(head.as_bytes(), name);
        let entry: wire::EntryOut = self.call(Opcode::Mkdir, parent, &body)?;
        Ok(NodeId(entry.nodeid.get()))
    }

    /// CREATE, WRITE and RELEASE of each: files that begin with `content`, or are empty. They are durable
    /// after [`sync`](Self::sync).
    pub fn make_files(
        &mut self,
        directory: NodeId,
        names: &[Vec<u8>],
        content: &[u8],
    ) -> Result<()> {
        for names in names.chunks(AT_ONCE) {
            let mut files = vec![(NodeId(0), 0); names.len()];
            let creates = names.iter().map(|name| create(directory, name));
            self.all(creates, |number, reply| {
                files[number] = created(reply)
                    .with_context(|| format!("make {}", names[number].escape_ascii()))?;
                Ok(())
            })?;
            if !content.is_empty() {
                let writes = files
                    .iter()
                    .map(|(node, handle)| write(*node, *handle, content));
                self.all(writes, |number, reply| {
                    succeeded(reply)
                        .with_context(|| format!("write {}", names[number].escape_ascii()))
                })?;
            }
            let releases = files.iter().map(|(node, handle)| release(*node, *handle));
            self.all(releases, |number, reply| {
                succeeded(reply).with_context(|| format!("close {}", names[number].escape_ascii()))
            })?;
            let nodes: Vec<NodeId> = files.into_iter().map(|(node, _)| node).collect();
            self.forget(&nodes)?;
        }
        Ok(())
    }

    /// UNLINK of each.
    pub fn remove_files(&mut self, directory: NodeId, names: &[Vec<u8>]) -> Result<()> {
        let unlinks = names.iter().map(|name| Request {
            opcode: Opcode::Unlink,
            node: directory,
            body: named(&[], name),
            room: 0,
        });
        self.all(unlinks, |number, reply| {
            succeeded(reply).with_context(|| format!("remove {}", names[number].escape_ascii()))
        })
    }

    /// SYNCFS: what was written is durable.
    pub fn sync(&mut self) -> Result<()> {
        let syncfs = wire::SyncfsIn::default();
        self.bytes(Opcode::Syncfs, super::ROOT, syncfs.as_bytes(), 0)?;
        Ok(())
    }
}

/// Arguments with a name behind them.
fn named(head: &[u8], name: &[u8]) -> Vec<u8> {
    [head, name, &[0]].concat()
}

fn create(directory: NodeId, name: &[u8]) -> Request {
    let head = wire::CreateIn {
        flags: ((libc::O_WRONLY | libc::O_CREAT | libc::O_EXCL) as u32).into(),
        mode: (libc::S_IFREG | 0o644).into(),
        umask: 0o22.into(),
        open_flags: 0.into(),
    };
    Request {
        opcode: Opcode::Create,
        node: directory,
        body: named(head.as_bytes(), name),
        room: size_of::<wire::EntryOut>() + size_of::<wire::OpenOut>(),
    }
}

/// Inode and handle.
fn created(reply: Reply) -> Result<(NodeId, u64)> {
    let body = reply.map_err(io::Error::from_raw_os_error)?;
    let (entry, rest) = wire::EntryOut::read_from_prefix(&body)
        .ok()
        .context("no entry")?;
    let opened = wire::OpenOut::read_from_bytes(rest)
        .ok()
        .context("no handle")?;
    ensure!(entry.nodeid.get() != 0, "an entry without an inode");
    Ok((NodeId(entry.nodeid.get()), opened.fh.get()))
}

fn write(node: NodeId, handle: u64, content: &[u8]) -> Request {
    let head = wire::WriteIn {
        fh: handle.into(),
        size: (content.len() as u32).into(),
        flags: (libc::O_WRONLY as u32).into(),
        ..wire::WriteIn::default()
    };
    Request {
        opcode: Opcode::Write,
        node,
        body: [head.as_bytes(), content].concat(),
        room: size_of::<wire::WriteOut>(),
    }
}

fn release(node: NodeId, handle: u64) -> Request {
    let release = wire::ReleaseIn {
        fh: handle.into(),
        ..wire::ReleaseIn::default()
    };
    Request {
        opcode: Opcode::Release,
        node,
        body: release.as_bytes().to_vec(),
        room: 0,
    }
}

fn succeeded(reply: Reply) -> Result<()> {
    reply.map_err(io::Error::from_raw_os_error)?;
    Ok(())
}
