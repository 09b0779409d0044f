//! Checks the invariants on all records of a filesystem, by counting.

use std::collections::{BTreeMap, BTreeSet};

use records::{Read, ReadError};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::directory::FIRST_COOKIE;
use crate::extents::{BLOCK, block_end};
use crate::ids::{FilesystemId, Ino, SegmentId, SessionId};
use crate::keys::{
    COOKIES, DENTRIES, EXTENTS, FILESYSTEM, FREED, HOLDS, INODES, ORPHANS, SEGMENTS, SESSIONS,
    SHARED, SLOTS, Table, XATTRS, number_at, prefix_of,
};
use crate::operation::Operation;
use crate::read::Freed;
use crate::record::{
    Body, Content, CookieEntry, Dentry, Extent, Filesystem, Inode, Kind, Orphan, Segment,
    SegmentState, Session, Shared, Statistics, Xattr,
};

macro_rules! ensure {
    ($condition:expr, $($message:tt)*) => {
        if !$condition {
            return Err(format!($($message)*));
        }
    };
}

/// Names, or attributes' names, by inode.
type ByName<V> = BTreeMap<(Ino, Vec<u8>), V>;

/// How often each block of each segment is named.
type Named = BTreeMap<(SegmentId, u64), u32>;

/// All records.
struct All {
    inodes: BTreeMap<Ino, Inode>,
    dentries: ByName<Dentry>,
    cookies: BTreeMap<(Ino, u64), CookieEntry>,
    xattrs: ByName<Xattr>,
    extents: BTreeMap<Ino, Vec<Extent>>,
    orphans: BTreeMap<Ino, Orphan>,
    holds: BTreeSet<(SessionId, Ino)>,
    sessions: BTreeMap<SessionId, Session>,
    slots: BTreeSet<SessionId>,
    segments: BTreeMap<SegmentId, Segment>,
    freed: BTreeMap<(SegmentId, u64), u64>,
    shared: BTreeMap<(SegmentId, u64), Shared>,
}

/// The freed range that an operation gives back if it is granted. To be asked before it is applied: its
/// record goes, so that only the caller knows then.
///
/// # Errors
/// The records cannot be read.
pub fn given_back_by(
    records: &dyn Read,
    filesystem: FilesystemId,
    operation: &Operation,
) -> Result<Option<Freed>, ReadError> {
    let Operation::Reclaimed {
        segment,
        address,
        length,
    } = *operation
    else {
        return Ok(None);
    };
    let freed = FREED.get(records, filesystem, &(segment, address))?;
    Ok(freed.filter(|freed| *freed == length).map(|_| Freed {
        segment,
        address,
        length,
    }))
}

/// Says what is wrong with a filesystem's records. All ranges that were ever given back must be told
/// ([`given_back_by`]): every other address of a segment has a record.
///
/// # Errors
/// The first invariant found broken, or a record that cannot be read.
pub fn check(
    records: &dyn Read,
    filesystem: FilesystemId,
    given_back: &[Freed],
) -> Result<(), String> {
    let found = FILESYSTEM.get(records, filesystem, &());
    let all = All::load(records, filesystem).map_err(|error| error.to_string())?;
    let Some(totals) = found.map_err(|error| error.to_string())? else {
        let first = first_key(records, filesystem).map_err(|error| error.to_string())?;
        ensure!(first.is_none(), "records without a filesystem");
        return Ok(());
    };
    if let Some(gone_below) = totals.removed_below {
        // What is left of it holds together no more.
        let first = first_key(records, filesystem).map_err(|error| error.to_string())?;
        let is_removed = first.is_some_and(|first| first >= gone_below);
        ensure!(
            is_removed,
            "a filesystem that goes in the order of its keys"
        );
        return Ok(());
    }
    all.check_names()?;
    all.check_links(&totals)?;
    all.check_reachable()?;
    all.check_orphans()?;
    all.check_xattrs()?;
    all.check_sessions(&totals)?;
    let named = all.check_extents()?;
    let statistics = all.check_space(&named, given_back)?;
    ensure!(
        statistics == totals.statistics,
        "statistics are {:?}, counted {statistics:?}",
        totals.statistics
    );
    Ok(())
}

/// The key of a filesystem's first record besides its own.
fn first_key(records: &dyn Read, filesystem: FilesystemId) -> Result<Option<Vec<u8>>, ReadError> {
    let (mut first, own) = (None, FILESYSTEM.key(filesystem, &()));
    records.scan(&prefix_of(filesystem), &mut |key, _| {
        first = (key != own).then(|| key.to_vec());
        Ok(first.is_none())
    })?;
    Ok(first)
}

fn load<K: Ord, V: Serialize + DeserializeOwned>(
    table: &Table<V>,
    (records, filesystem): (&dyn Read, FilesystemId),
    key_of: impl Fn(&[u8]) -> Result<K, ReadError>,
) -> Result<BTreeMap<K, V>, ReadError> {
    let mut found = BTreeMap::new();
    table.scan(records, filesystem, &(), &(), &mut |key, record| {
        found.insert(key_of(key)?, record);
        Ok(true)
    })?;
    Ok(found)
}

fn ino(key: &[u8]) -> Result<Ino, ReadError> {
    Ok(Ino(number_at(key, 0)?))
}

fn named_key(key: &[u8]) -> Result<(Ino, Vec<u8>), ReadError> {
    Ok((ino(key)?, key[8..].to_vec()))
}

fn space_key(key: &[u8]) -> Result<(SegmentId, u64), ReadError> {
    Ok((SegmentId(number_at(key, 0)?), number_at(key, 8)?))
}

impl All {
    fn load(records: &dyn Read, filesystem: FilesystemId) -> Result<Self, ReadError> {
        let from = (records, filesystem);
        let session = |key: &[u8]| Ok(SessionId(number_at(key, 0)?));
        let mut extents: BTreeMap<Ino, Vec<Extent>> = BTreeMap::new();
        let of_file = |key: &[u8]| Ok((ino(key)?, number_at(key, 8)?));
        for ((ino, offset), run) in load(&EXTENTS, from, of_file)? {
            extents.entry(ino).or_default().push(Extent {
                offset,
                length: run.length,
                segment: run.segment,
                address: run.address,
                epoch: run.epoch,
            });
        }
        let hold = |key: &[u8]| Ok((session(key)?, Ino(number_at(key, 8)?)));
        let slots = load(&SLOTS, from, |key| Ok(key.to_vec()))?;
        Ok(Self {
            inodes: load(&INODES, from, ino)?,
            dentries: load(&DENTRIES, from, named_key)?,
            cookies: load(&COOKIES, from, of_file)?,
            xattrs: load(&XATTRS, from, named_key)?,
            extents,
            orphans: load(&ORPHANS, from, ino)?,
            holds: load(&HOLDS, from, hold)?.into_keys().collect(),
            sessions: load(&SESSIONS, from, session)?,
            slots: slots
                .keys()
                .map(|key| session(key))
                .collect::<Result<_, _>>()?,
            segments: load(&SEGMENTS, from, |key| Ok(SegmentId(number_at(key, 0)?)))?,
            freed: load(&FREED, from, space_key)?,
            shared: load(&SHARED, from, space_key)?,
        })
    }

    fn check_names(&self) -> Result<(), String> {
        ensure!(
            self.dentries.len() == self.cookies.len(),
            "as many cookies as names"
        );
        for ((parent, name), dentry) in &self.dentries {
            let place = format!("{name:x?} in {parent:?}");
            let entry = self.cookies.get(&(*parent, dentry.cookie));
            let right = CookieEntry {
                name: name.clone(),
                ino: dentry.ino,
                kind: dentry.kind,
            };
            ensure!(entry == Some(&right), "the cookie of {place}");
            let inode = self.inodes.get(&dentry.ino);
            let kind = inode.map(|inode| inode.body.kind());
            ensure!(kind == Some(dentry.kind), "the inode of {place}");
            match self.inodes.get(parent).map(|inode| &inode.body) {
                Some(Body::Directory(directory)) => {
                    let cookies = FIRST_COOKIE..directory.next_cookie;
                    ensure!(cookies.contains(&dentry.cookie), "the counter of {place}");
                }
                _ => return Err(format!("the directory of {place}")),
            }
        }
        Ok(())
    }

    fn check_links(&self, totals: &Filesystem) -> Result<(), String> {
        let mut names: BTreeMap<Ino, Vec<Ino>> = BTreeMap::new();
        let mut entries: BTreeMap<Ino, (u64, u32)> = BTreeMap::new();
        for ((parent, _), dentry) in &self.dentries {
            names.entry(dentry.ino).or_default().push(*parent);
            let (all, directories) = entries.entry(*parent).or_default();
            *all += 1;
            *directories += u32::from(dentry.kind == Kind::Directory);
        }
        for (ino, inode) in &self.inodes {
            ensure!(ino.0 < totals.next_inode, "{ino:?} was not given out");
            let parents = names.get(ino).map_or(&[][..], Vec::as_slice);
            let (all, directories) = entries.get(ino).copied().unwrap_or_default();
            let Body::Directory(directory) = &inode.body else {
                ensure!(inode.nlink as usize == parents.len(), "links of {ino:?}");
                let is_only = inode.parent.is_none_or(|parent| parents == [parent]);
                ensure!(is_only, "the only parent of {ino:?}");
                continue;
            };
            ensure!(inode.parent.is_none(), "the parent of directory {ino:?}");
            ensure!(directory.entries == all, "entries of {ino:?}");
            let (links, right_parents) = match *ino {
                Ino::ROOT => (
                    2 + directories,
                    directory.parent == *ino && parents.is_empty(),
                ),
                _ if parents.is_empty() => (0, all == 0),
                _ => (2 + directories, parents == [directory.parent]),
            };
            ensure!(inode.nlink == links, "links of directory {ino:?}");
            ensure!(right_parents, "the parent of {ino:?}");
        }
        Ok(())
    }

    /// Every directory that is no orphan is found from the root. So none lies below itself.
    fn check_reachable(&self) -> Result<(), String> {
        let mut below: BTreeMap<Ino, Vec<Ino>> = BTreeMap::new();
        for ((parent, _), dentry) in &self.dentries {
            if dentry.kind == Kind::Directory {
                below.entry(*parent).or_default().push(dentry.ino);
            }
        }
        let (mut found, mut next) = (BTreeSet::new(), vec![Ino::ROOT]);
        while let Some(ino) = next.pop() {
            ensure!(found.insert(ino), "{ino:?} lies in two places");
            next.extend(below.get(&ino).into_iter().flatten());
        }
        for (ino, inode) in &self.inodes {
            let is_tree = inode.body.kind() == Kind::Directory && inode.nlink > 0;
            ensure!(is_tree == found.contains(ino), "{ino:?} is not reachable");
        }
        Ok(())
    }

    fn check_orphans(&self) -> Result<(), String> {
        for (ino, inode) in &self.inodes {
            let is_orphan = self.orphans.contains_key(ino);
            ensure!((inode.nlink == 0) == is_orphan, "orphan {ino:?}");
        }
        let mut holds = BTreeSet::new();
        for (ino, orphan) in &self.orphans {
            ensure!(self.inodes.contains_key(ino), "no inode of orphan {ino:?}");
            let holders = match orphan {
                Orphan::Held(holders) => {
                    let is_list = !holders.is_empty() && holders.is_sorted();
                    ensure!(is_list, "holders of {ino:?}");
                    holders.as_slice()
                }
                Orphan::Temporary(holder) => {
                    let is_file = self.inodes[ino].body.kind() == Kind::File;
                    ensure!(is_file, "temporary {ino:?} is a file");
                    std::slice::from_ref(holder)
                }
                Orphan::Emptying => &[],
            };
            holds.extend(holders.iter().map(|holder| (*holder, *ino)));
        }
        ensure!(holds == self.holds, "holds by session");
        Ok(())
    }

    fn check_xattrs(&self) -> Result<(), String> {
        let mut bytes: BTreeMap<Ino, (usize, usize)> = BTreeMap::new();
        for ((ino, name), Xattr(value)) in &self.xattrs {
            let (list, values) = bytes.entry(*ino).or_default();
            *list += name.len() + 1;
            *values += value.len();
            ensure!(
                self.inodes.contains_key(ino),
                "attribute of no inode {ino:?}"
            );
        }
        for (ino, inode) in &self.inodes {
            let counted = bytes.get(ino).copied().unwrap_or_default();
            let kept = (inode.xattr_list_bytes, inode.xattr_value_bytes);
            let kept = (kept.0 as usize, kept.1 as usize);
            ensure!(kept == counted, "attributes of {ino:?}");
        }
        Ok(())
    }

    fn check_sessions(&self, totals: &Filesystem) -> Result<(), String> {
        for holder in self
            .holds
            .iter()
            .map(|(holder, _)| holder)
            .chain(&self.slots)
        {
            ensure!(self.sessions.contains_key(holder), "no {holder:?}");
        }
        let mut open = BTreeSet::new();
        for (id, session) in &self.sessions {
            ensure!(id.0 < totals.next_session, "{id:?} was not given out");
            open.extend(session.open_segments.iter().map(|segment| (*segment, *id)));
        }
        let mut open_segments = BTreeSet::new();
        for (id, segment) in &self.segments {
            ensure!(id.0 < totals.next_segment, "{id:?} was not given out");
            if let SegmentState::Open(_) = segment.state {
                open_segments.insert((*id, segment.session));
            }
        }
        ensure!(open == open_segments, "open segments of sessions");
        Ok(())
    }

    fn check_extents(&self) -> Result<Named, String> {
        let mut named = Named::new();
        for ino in self.extents.keys() {
            ensure!(self.inodes.contains_key(ino), "extents of no inode {ino:?}");
        }
        for (ino, inode) in &self.inodes {
            let table = self.extents.get(ino).map_or(&[][..], Vec::as_slice);
            let (inline, count) = match inode.body {
                Body::File(Content::Inline(extent)) => (Some(extent), 0),
                Body::File(Content::Table(count)) => {
                    ensure!(count > 1, "{ino:?} could keep its extent");
                    (None, count)
                }
                _ => (None, 0),
            };
            ensure!(
                table.len() as u64 == count,
                "extents of {ino:?} are counted"
            );
            let (mut end, mut allocated) = (0, 0);
            for extent in inline.iter().chain(table) {
                ensure!(extent.length > 0, "an empty extent of {ino:?}");
                ensure!(extent.offset >= end, "extents of {ino:?} overlap");
                let numbers = [extent.offset, extent.length, extent.address];
                let is_aligned = numbers.iter().all(|number| number % BLOCK == 0);
                ensure!(is_aligned, "an extent of {ino:?} is not aligned");
                end = extent.end();
                allocated += extent.length;
                for block in blocks(extent.address, extent.length) {
                    *named.entry((extent.segment, block)).or_default() += 1;
                }
            }
            // What is being emptied has lost its last extents first.
            ensure!(end <= block_end(inode.size), "{ino:?} ends before its data");
            ensure!(inode.allocated == allocated, "allocated bytes of {ino:?}");
        }
        Ok(named)
    }

    fn check_space(&self, named: &Named, given_back: &[Freed]) -> Result<Statistics, String> {
        self.check_shared(named)?;
        let unnamed = self.unnamed(given_back)?;
        let both = unnamed.iter().find(|place| named.contains_key(place));
        ensure!(both.is_none(), "{both:?} is named and free");
        let mut known: BTreeMap<SegmentId, u64> = BTreeMap::new();
        let mut live: BTreeMap<SegmentId, u64> = BTreeMap::new();
        for (segment, block) in named.keys().chain(&unnamed) {
            let written = self.segments.get(segment).map_or(0, |found| found.written);
            let is_written = block * BLOCK < written;
            ensure!(is_written, "{segment:?} is written behind its end");
            *known.entry(*segment).or_default() += BLOCK;
        }
        for (segment, _) in named.keys() {
            *live.entry(*segment).or_default() += BLOCK;
        }
        for (id, segment) in &self.segments {
            let bytes = live.get(id).copied().unwrap_or(0);
            ensure!(segment.live == bytes, "live bytes of {id:?}");
            // Each address is in one state, and below the end: if the sum is right, none is missing.
            let bytes = known.get(id).copied().unwrap_or(0);
            let lost = segment.written - bytes;
            ensure!(lost == 0, "{lost} bytes of {id:?} are lost");
        }
        Ok(Statistics {
            inodes: self.inodes.len() as u64,
            named_bytes: named.len() as u64 * BLOCK,
            freed_bytes: self.freed.values().sum(),
        })
    }

    /// Each block is named as often as the shared runs say.
    fn check_shared(&self, named: &Named) -> Result<(), String> {
        let mut others = Named::new();
        for ((segment, address), run) in &self.shared {
            ensure!(run.others > 0, "a run in {segment:?} is not shared");
            for block in blocks(*address, run.length) {
                let before = others.insert((*segment, block), run.others);
                ensure!(before.is_none(), "shared runs in {segment:?} overlap");
            }
        }
        for ((segment, block), count) in named {
            let more = others.remove(&(*segment, *block)).unwrap_or(0);
            ensure!(
                *count == more + 1,
                "{segment:?} block {block} is named {count} times"
            );
        }
        ensure!(others.is_empty(), "shared runs that nothing names");
        Ok(())
    }

    /// Blocks in gaps, freed and given back.
    fn unnamed(&self, given_back: &[Freed]) -> Result<BTreeSet<(SegmentId, u64)>, String> {
        let mut ranges = Vec::new();
        for (id, segment) in &self.segments {
            if let SegmentState::Open(gaps) = &segment.state {
                ranges.extend(gaps.iter().map(|(from, to)| (*id, *from, to - from)));
            }
        }
        let freed = self.freed.iter();
        ranges.extend(freed.map(|((segment, address), length)| (*segment, *address, *length)));
        let given_back = given_back.iter();
        // A segment goes with all its space.
        let given_back = given_back.filter(|range| self.segments.contains_key(&range.segment));
        ranges.extend(given_back.map(|range| (range.segment, range.address, range.length)));
        let mut unnamed = BTreeSet::new();
        for (segment, address, length) in ranges {
            for block in blocks(address, length) {
                let is_new = unnamed.insert((segment, block));
                ensure!(is_new, "{segment:?} block {block} is free twice");
            }
        }
        Ok(unnamed)
    }
}

/// The blocks of a range of bytes.
fn blocks(address: u64, length: u64) -> std::ops::Range<u64> {
    address / BLOCK..(address + length) / BLOCK
}
