//! A line for each entry of a tree, by which trees are compared.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::hash::{DefaultHasher, Hasher};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};

/// Longest value that we give to an attribute.
const VALUE_MAX: usize = 4096;

/// What is compared of an entry.
pub struct Entry<'a> {
    pub path: &'a Path,
    pub mode: u32,
    pub links: u64,
    pub body: Body<'a>,
    pub attributes: &'a BTreeMap<Vec<u8>, Vec<u8>>,
}

pub enum Body<'a> {
    Directory,
    File(&'a [u8]),
    Symlink(&'a Path),
    Other(&'a str),
}

impl Entry<'_> {
    pub fn line(&self) -> String {
        let body = match &self.body {
            Body::Directory => "directory".to_owned(),
            Body::File(content) => format!("file {} {:016x}", content.len(), hash(content)),
            Body::Symlink(target) => format!("symlink {target:?}"),
            Body::Other(kind) => (*kind).to_owned(),
        };
        let mut line = format!(
            "{:?} {:o} {} {body}",
            self.path,
            self.mode & 0o7777,
            self.links
        );
        for (name, value) in self.attributes {
            let name = OsStr::from_bytes(name);
            line.push_str(&format!(" {name:?}={:016x}", hash(value)));
        }
        line
    }
}

fn hash(bytes: &[u8]) -> u64 {
    let mut hasher = DefaultHasher::new();
    hasher.write(bytes);
    hasher.finish()
}

/// The lines of a tree, in order of its paths. All names of its files have to be in it: their links are
/// counted.
pub fn of_tree(root: &Path, times: bool) -> Result<String> {
    let mut paths = vec![PathBuf::new()];
    let mut at = 0;
    let mut names: BTreeMap<u64, (u64, u64)> = BTreeMap::new();
    let mut lines = Vec::new();
    while let Some(path) = paths.get(at).cloned() {
        at += 1;
        let full = root.join(&path);
        let metadata =
            std::fs::symlink_metadata(&full).with_context(|| format!("stat {path:?}"))?;
        let mut subdirectories = 0;
        if metadata.is_dir() {
            for entry in std::fs::read_dir(&full).with_context(|| format!("list {path:?}"))? {
                let entry = entry?;
                subdirectories += u64::from(entry.file_type()?.is_dir());
                paths.push(path.join(entry.file_name()));
            }
            ensure!(
                metadata.nlink() == 2 + subdirectories,
                "{path:?} has {subdirectories} subdirectories and {} links",
                metadata.nlink()
            );
        } else {
            let counted = names.entry(metadata.ino()).or_insert((0, metadata.nlink()));
            counted.0 += 1;
        }
        lines.push((path.clone(), line(&full, &path, &metadata, times)?));
    }
    for (ino, (found, links)) in names {
        ensure!(found == links, "inode {ino}: {links} links, {found} names");
    }
    lines.sort();
    Ok(lines.into_iter().map(|(_, line)| line + "\n").collect())
}

fn line(full: &Path, path: &Path, metadata: &std::fs::Metadata, times: bool) -> Result<String> {
    let kind = metadata.file_type();
    let (content, target);
    let body = if kind.is_dir() {
        Body::Directory
    } else if kind.is_file() {
        content = std::fs::read(full).with_context(|| format!("read {path:?}"))?;
        ensure!(
            content.len() as u64 == metadata.len(),
            "{path:?}: {} bytes are read of {}",
            content.len(),
            metadata.len()
        );
        Body::File(&content)
    } else if kind.is_symlink() {
        target = std::fs::read_link(full)?;
        Body::Symlink(&target)
    } else {
        Body::Other(if kind.is_fifo() { "fifo" } else { "other" })
    };
    let attributes = match kind.is_symlink() {
        true => BTreeMap::new(),
        false => attributes(full).with_context(|| format!("attributes of {path:?}"))?,
    };
    let entry = Entry {
        path,
        mode: metadata.mode(),
        links: metadata.nlink(),
        body,
        attributes: &attributes,
    };
    let mut line = entry.line();
    if times {
        let (m, c) = (metadata.mtime(), metadata.ctime());
        let (m_nsec, c_nsec) = (metadata.mtime_nsec(), metadata.ctime_nsec());
        line.push_str(&format!(
            " {} {m}.{m_nsec:09} {c}.{c_nsec:09} {}",
            metadata.ino(),
            metadata.uid()
        ));
    }
    Ok(line)
}

/// Its `user.` attributes.
pub fn attributes(path: &Path) -> Result<BTreeMap<Vec<u8>, Vec<u8>>> {
    let mut names = vec![0; VALUE_MAX];
    let used = rustix::fs::llistxattr(path, &mut names[..])?;
    let names = names[..used].split(|byte| *byte == 0);
    let ours = names.filter(|name| name.starts_with(b"user."));
    ours.map(|name| {
        let mut value = vec![0; VALUE_MAX];
        let used = rustix::fs::lgetxattr(path, OsStr::from_bytes(name), &mut value[..])?;
        value.truncate(used);
        Ok((name.to_vec(), value))
    })
    .collect()
}
