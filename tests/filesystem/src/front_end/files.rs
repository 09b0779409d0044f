//! Files made and removed by a front end, as many at a time as its ring holds. A guest's kernel changes one
//! directory at a time.

use std::io;

use anyhow::{Context, Result, ensure};
use fuse_codec::{NodeId, Opcode, wire};
use zerocopy::{FromBytes, IntoBytes};

use super::{FrontEnd, Reply, Request};

/// Files that are open at a time.
const AT_ONCE: usize = 4096;
/// Bytes of one request: whole blocks, less than the room that a request has.
const PIECE_BYTES: usize = 12 << 10;

/// A file that is open for reading and writing.
#[derive(Debug, Clone, Copy)]
pub struct OpenFile {
    node: NodeId,
    handle: u64,
}

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
            let creates = names
                .iter()
                .map(|name| create(directory, name, libc::O_WRONLY));
            self.all(creates, |number, reply| {
                files[number] = created(reply)
                    .with_context(|| format!("make {}", names[number].escape_ascii()))?;
                Ok(())
            })?;
            if !content.is_empty() {
                let writes = files
                    .iter()
                    .map(|(node, handle)| write(*node, *handle, 0, content));
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

    /// CREATE; the file stays open.
    pub fn make_file(&mut self, directory: NodeId, name: &[u8]) -> Result<OpenFile> {
        let mut made = None;
        let request = create(directory, name, libc::O_RDWR);
        self.all([request], |_, reply| {
            let (node, handle) =
                created(reply).with_context(|| format!("make {}", name.escape_ascii()))?;
            made = Some(OpenFile { node, handle });
            Ok(())
        })?;
        made.context("no reply")
    }

    /// WRITE of a file from its start, in several requests at a time.
    pub fn overwrite(&mut self, file: OpenFile, content: &[u8]) -> Result<()> {
        let pieces = content.chunks(PIECE_BYTES).enumerate();
        let writes = pieces.map(|(number, piece)| {
            write(file.node, file.handle, (number * PIECE_BYTES) as u64, piece)
        });
        self.all(writes, |_, reply| succeeded(reply).context("write"))
    }

    /// READ of the first `length` bytes of a file.
    pub fn read(&mut self, file: OpenFile, length: usize) -> Result<Vec<u8>> {
        let begins = (0..length).step_by(PIECE_BYTES);
        let reads = begins.map(|begin| Request {
            opcode: Opcode::Read,
            node: file.node,
            body: wire::ReadIn {
                fh: file.handle.into(),
                offset: (begin as u64).into(),
                size: (PIECE_BYTES.min(length - begin) as u32).into(),
                ..wire::ReadIn::default()
            }
            .as_bytes()
            .to_vec(),
            room: PIECE_BYTES.min(length - begin),
        });
        let mut content = vec![0; length];
        self.all(reads, |number, reply| {
            let piece = reply
                .map_err(io::Error::from_raw_os_error)
                .context("read")?;
            let begin = number * PIECE_BYTES;
            let end = (begin + PIECE_BYTES).min(length);
            ensure!(piece.len() == end - begin, "{} bytes", piece.len());
            content[begin..end].copy_from_slice(&piece);
            Ok(())
        })?;
        Ok(content)
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

fn create(directory: NodeId, name: &[u8], access: i32) -> Request {
    let head = wire::CreateIn {
        flags: ((access | libc::O_CREAT | libc::O_EXCL) as u32).into(),
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

fn write(node: NodeId, handle: u64, offset: u64, content: &[u8]) -> Request {
    let head = wire::WriteIn {
        fh: handle.into(),
        offset: offset.into(),
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
