//! What is cached, by the capability that covers it.

#[cfg(test)]
pub(super) mod tests;

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::sync::Arc;

use namespace::{Body, Content, Entry, Extent, FIRST_COOKIE, Ino, Inode, Kind};

/// Names of a directory that are not known since they were changed here. With more, nothing is known of names
/// that are not cached.
const UNKNOWN_MAX: usize = 4096;

/// Extents of a file count as one inode in this number.
const EXTENTS_OF_WEIGHT: usize = 4;

/// What a name leads to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Named {
    Absent,
    Present(Ino, Kind),
}

/// What is cached under a directory's capability.
#[derive(Debug, Default)]
pub(super) struct Directory {
    /// Since when it is held, as a number.
    pub(super) id: u64,
    /// Number of the message that granted it, on the present link; 0 if it was claimed.
    pub(super) granted: u64,
    /// Its own record.
    pub(super) inode: Option<Inode>,
    names: HashMap<Arc<[u8]>, Named>,
    /// Records of what is no directory and has its only name here.
    children: HashMap<Ino, Inode>,
    /// Names in the order of their cookies, from the begin on.
    listing: BTreeMap<u64, (Arc<[u8]>, Ino, Kind)>,
    listing_end: ListingEnd,
    /// Names changed since the listing was begun. It goes on, to know which names are not there, but is not
    /// shown.
    is_stale: bool,
    /// Names that are neither cached nor in `unknown` are not there. Set when the whole listing was cached.
    is_complete: bool,
    /// Names that changed since the listing was begun.
    unknown: HashSet<Vec<u8>>,
    was_used: bool,
}

/// How far a listing goes.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
enum ListingEnd {
    /// It has not begun.
    #[default]
    None,
    /// Up to this cookie.
    At(u64),
    /// It is whole.
    Whole,
}

/// What is cached under a file's capability.
#[derive(Debug, Default)]
pub(super) struct File {
    /// As in [`Directory`].
    pub(super) id: u64,
    /// As there.
    pub(super) granted: u64,
    pub(super) inode: Option<Inode>,
    /// All of them, as of the record.
    pub(super) extents: Option<Arc<[Extent]>>,
    was_used: bool,
}

impl File {
    fn weight(&self) -> usize {
        let extents = self.extents.as_ref().map_or(0, |extents| extents.len());
        usize::from(self.inode.is_some()) + extents.div_ceil(EXTENTS_OF_WEIGHT)
    }
}

/// The directory in which an inode has its only name.
pub(super) fn place_of(inode: &Inode) -> Option<Ino> {
    match inode.body {
        Body::Directory(directory) => Some(directory.parent),
        _ => inode.parent,
    }
}

fn is_directory(inode: &Inode) -> bool {
    matches!(inode.body, Body::Directory(_))
}

/// All that is cached. A directory or file is here if and only if its capability is held.
#[derive(Debug, Default)]
pub(super) struct Store {
    directories: HashMap<Ino, Directory>,
    files: HashMap<Ino, File>,
    /// The directory under which the record of a child is cached.
    covers: HashMap<Ino, Ino>,
    /// Directories and files whose own record is cached, by the directory that has their only name.
    places: HashMap<Option<Ino>, HashSet<Ino>>,
    /// For eviction: what was not used since it was last looked at goes.
    queue: VecDeque<Ino>,
    queued: HashSet<Ino>,
    names: usize,
    inodes: usize,
    /// The last [`Directory::id`].
    last_id: u64,
}

impl Store {
    pub(super) fn clear(&mut self) {
        *self = Self {
            last_id: self.last_id,
            ..Self::default()
        };
    }

    /// A capability was granted, by a message of this number.
    pub(super) fn granted(&mut self, ino: Ino, is_directory: bool, number: u64) {
        if self.queued.insert(ino) {
            self.queue.push_back(ino);
        }
        self.last_id += 1;
        let id = self.last_id;
        match is_directory {
            true => {
                let directory = self.directories.entry(ino);
                let directory = directory.or_insert_with(|| Directory {
                    id,
                    ..Directory::default()
                });
                directory.granted = number;
            }
            false => {
                let file = self.files.entry(ino);
                let file = file.or_insert_with(|| File {
                    id,
                    ..File::default()
                });
                file.granted = number;
            }
        }
    }

    /// All that is held was claimed on a new link.
    pub(super) fn claimed(&mut self) {
        self.directories
            .values_mut()
            .for_each(|directory| directory.granted = 0);
        self.files.values_mut().for_each(|file| file.granted = 0);
    }

    pub(super) fn directory(&self, ino: Ino) -> Option<&Directory> {
        self.directories.get(&ino)
    }

    pub(super) fn file(&self, ino: Ino) -> Option<&File> {
        self.files.get(&ino)
    }

    /// The directory under which the record of a child is cached.
    pub(super) fn cover_of(&self, ino: Ino) -> Option<Ino> {
        self.covers.get(&ino).copied()
    }

    /// The record of a child under its directory.
    pub(super) fn child(&self, dir: Ino, ino: Ino) -> Option<&Inode> {
        self.directories.get(&dir)?.children.get(&ino)
    }

    /// What a name leads to, if that is known.
    pub(super) fn named(&mut self, dir: Ino, name: &[u8]) -> Option<Named> {
        let directory = self.directories.get_mut(&dir)?;
        directory.was_used = true;
        match directory.names.get(name) {
            Some(named) => Some(*named),
            None if directory.is_complete && !directory.unknown.contains(name) => {
                Some(Named::Absent)
            }
            None => None,
        }
    }

    pub(super) fn use_file(&mut self, ino: Ino) {
        if let Some(file) = self.files.get_mut(&ino) {
            file.was_used = true;
        }
    }

    pub(super) fn use_directory(&mut self, ino: Ino) {
        if let Some(directory) = self.directories.get_mut(&ino) {
            directory.was_used = true;
        }
    }

    pub(super) fn put_name(&mut self, dir: Ino, name: &[u8], named: Named) {
        let Some(directory) = self.directories.get_mut(&dir) else {
            return;
        };
        directory.unknown.remove(name);
        if directory.is_complete && named == Named::Absent {
            self.names -= usize::from(directory.names.remove(name).is_some());
            return;
        }
        self.names += usize::from(directory.names.insert(name.into(), named).is_none());
    }

    /// Puts the record of a directory, or of a child under the directory that covers it.
    pub(super) fn put_inode(&mut self, ino: Ino, inode: &Inode) {
        if is_directory(inode) {
            if let Some(directory) = self.directories.get_mut(&ino) {
                self.inodes += usize::from(directory.inode.is_none());
                let before = directory.inode.replace(inode.clone());
                self.move_place(ino, before.as_ref(), Some(inode));
            }
            return;
        }
        let dir = inode
            .parent
            .filter(|dir| self.directories.contains_key(dir));
        let Some(dir) = dir else {
            return;
        };
        if self.covers.get(&ino).is_some_and(|before| *before != dir) {
            self.forget_inode(ino);
        }
        self.covers.insert(ino, dir);
        let directory = self.directories.get_mut(&dir).expect("it is there");
        let before = directory.children.insert(ino, inode.clone());
        self.inodes += usize::from(before.is_none());
    }

    /// Puts a file's record, and all its extents if they are given.
    pub(super) fn put_file(&mut self, ino: Ino, inode: &Inode, extents: Option<Arc<[Extent]>>) {
        let Some(file) = self.files.get_mut(&ino) else {
            return;
        };
        let is_same = file
            .inode
            .as_ref()
            .is_some_and(|known| known.change == inode.change);
        self.inodes -= file.weight();
        let before = file.inode.replace(inode.clone());
        if extents.is_some() || !is_same {
            file.extents = extents;
        }
        self.inodes += file.weight();
        self.move_place(ino, before.as_ref(), Some(inode));
    }

    /// The own record of a directory or file comes or goes.
    fn move_place(&mut self, ino: Ino, before: Option<&Inode>, after: Option<&Inode>) {
        if let Some(place) = before.map(place_of) {
            let there = self.places.get_mut(&place);
            let there = there.expect("a cached record has its place");
            there.remove(&ino);
            if there.is_empty() {
                self.places.remove(&place);
            }
        }
        if let Some(place) = after.map(place_of) {
            self.places.entry(place).or_default().insert(ino);
        }
    }

    /// The cookie behind which the listing goes on; none if it is whole.
    pub(super) fn listing_end(&self, dir: Ino) -> Option<u64> {
        match self.directories.get(&dir)?.listing_end {
            ListingEnd::None => Some(FIRST_COOKIE - 1),
            ListingEnd::At(cookie) => Some(cookie),
            ListingEnd::Whole => None,
        }
    }

    /// Whether all names of a directory are known.
    pub(super) fn is_complete(&self, dir: Ino) -> bool {
        let directory = self.directories.get(&dir);
        directory.is_some_and(|directory| directory.is_complete)
    }

    /// Names in a directory that are cached.
    pub(super) fn names_of(&self, dir: Ino) -> usize {
        let directory = self.directories.get(&dir);
        directory.map_or(0, |directory| directory.names.len())
    }

    /// Adds a page to a listing, if it goes on where that ends. `changed` are names that may have changed
    /// since the page was asked for; with some, the listing ends, but what is not in it is still known.
    pub(super) fn put_page(
        &mut self,
        dir: Ino,
        behind: u64,
        page: &[(Entry, Inode)],
        changed: HashSet<Vec<u8>>,
    ) {
        let Some(directory) = self.directories.get_mut(&dir) else {
            return;
        };
        let first = FIRST_COOKIE - 1;
        let behind = behind.max(first);
        match directory.listing_end {
            ListingEnd::None | ListingEnd::Whole if behind == first => {
                directory.listing.clear();
                directory.is_complete = false;
                directory.is_stale = !changed.is_empty();
                directory.unknown = changed;
            }
            ListingEnd::At(end) if end == behind => {
                directory.is_stale |= !changed.is_empty();
                directory.unknown.extend(changed);
            }
            _ => return,
        }
        for (entry, _) in page.iter().filter(|_| !directory.is_stale) {
            let known = directory.names.get_key_value(entry.name.as_slice());
            let name = known.map(|(name, _)| Arc::clone(name));
            let name = name.unwrap_or_else(|| entry.name.as_slice().into());
            let shown = (name, entry.ino, entry.kind);
            directory.listing.insert(entry.cookie, shown);
        }
        match page.last() {
            Some((last, _)) => directory.listing_end = ListingEnd::At(last.cookie),
            None => {
                directory.is_complete = true;
                directory.listing_end = match directory.is_stale {
                    true => ListingEnd::None,
                    false => ListingEnd::Whole,
                };
            }
        }
        directory.bound_unknown();
    }

    /// A listing that is not shown begins anew.
    pub(super) fn restart_stale(&mut self, dir: Ino) {
        let directory = self.directories.get_mut(&dir);
        if let Some(directory) = directory.filter(|directory| directory.is_stale) {
            directory.break_off();
        }
    }

    /// At most `max` names behind a cookie, if they are cached. None if the listing does not go on there.
    pub(super) fn list(&mut self, dir: Ino, behind: u64, max: usize) -> Option<Vec<Entry>> {
        let directory = self.directories.get_mut(&dir)?;
        directory.was_used = true;
        let is_known = match directory.listing_end {
            ListingEnd::None => false,
            ListingEnd::At(end) => behind < end,
            ListingEnd::Whole => true,
        };
        if !is_known || directory.is_stale {
            return None;
        }
        let behind = directory
            .listing
            .range(behind.saturating_add(1)..)
            .take(max);
        let entries = behind.map(|(cookie, (name, ino, kind))| Entry {
            cookie: *cookie,
            name: name.to_vec(),
            ino: *ino,
            kind: *kind,
        });
        Some(entries.collect())
    }

    /// A name changes: it is not known any more, and no listing shows it.
    pub(super) fn forget_name(&mut self, dir: Ino, name: &[u8]) {
        let Some(directory) = self.directories.get_mut(&dir) else {
            return;
        };
        self.names -= usize::from(directory.names.remove(name).is_some());
        if directory.is_complete || directory.listing_end != ListingEnd::None {
            directory.unknown.insert(name.to_vec());
        }
        directory.bound_unknown();
    }

    /// Names of a directory change: no listing shows how they were.
    pub(super) fn forget_listing(&mut self, dir: Ino) {
        let Some(directory) = self.directories.get_mut(&dir) else {
            return;
        };
        directory.listing.clear();
        match directory.listing_end {
            ListingEnd::None => {}
            ListingEnd::At(_) => directory.is_stale = true,
            ListingEnd::Whole => directory.listing_end = ListingEnd::None,
        }
    }

    /// Forgets an inode's record, wherever it is cached, and a file's extents.
    pub(super) fn forget_inode(&mut self, ino: Ino) {
        if let Some(dir) = self.covers.remove(&ino) {
            let directory = self.directories.get_mut(&dir);
            let directory = directory.expect("a child is cached under its directory");
            directory.children.remove(&ino).expect("it is cached there");
            self.inodes -= 1;
        }
        self.forget_own(ino);
    }

    /// Forgets the own record of a directory or file, and a file's extents.
    fn forget_own(&mut self, ino: Ino) {
        let mut gone = None;
        if let Some(directory) = self.directories.get_mut(&ino) {
            gone = directory.inode.take();
            self.inodes -= usize::from(gone.is_some());
        }
        if let Some(file) = self.files.get_mut(&ino) {
            self.inodes -= file.weight();
            file.extents = None;
            gone = file.inode.take().or(gone);
        }
        self.move_place(ino, gone.as_ref(), None);
    }

    /// Forgets the records of all inodes that have their only name in this directory; with none, of all that
    /// have no directory known.
    pub(super) fn forget_inodes_in(&mut self, place: Option<Ino>) {
        if let Some(dir) = place {
            self.forget_inodes_under(dir);
        }
        let there = self.places.get(&place).into_iter().flatten();
        for ino in there.copied().collect::<Vec<Ino>>() {
            self.forget_own(ino);
        }
    }

    /// A capability is given up: forgets all that is cached under it.
    pub(super) fn drop_cover(&mut self, ino: Ino) {
        self.forget_inodes_under(ino);
        self.forget_own(ino);
        if let Some(directory) = self.directories.remove(&ino) {
            self.names -= directory.names.len();
        }
        self.files.remove(&ino);
    }

    fn forget_inodes_under(&mut self, dir: Ino) {
        if let Some(directory) = self.directories.get_mut(&dir) {
            self.inodes -= directory.children.len();
            for (ino, _) in directory.children.drain() {
                self.covers.remove(&ino);
            }
        }
    }

    /// A new access time of a cached record, which is no change.
    pub(super) fn set_access_time(&mut self, ino: Ino, atime: namespace::Time) {
        if let Some(dir) = self.covers.get(&ino) {
            let directory = self.directories.get_mut(dir);
            if let Some(inode) = directory.and_then(|directory| directory.children.get_mut(&ino)) {
                inode.atime = atime;
            }
        }
        let own = self.directories.get_mut(&ino);
        if let Some(inode) = own.and_then(|directory| directory.inode.as_mut()) {
            inode.atime = atime;
        }
        if let Some(inode) = self
            .files
            .get_mut(&ino)
            .and_then(|file| file.inode.as_mut())
        {
            inode.atime = atime;
        }
    }

    /// Whether more is cached than this.
    pub(super) fn exceeds(&self, names_max: usize, inodes_max: usize) -> bool {
        self.names > names_max || self.inodes > inodes_max
    }

    /// What is evicted next: it was not used for long.
    pub(super) fn oldest(&mut self) -> Option<Ino> {
        // Twice around the queue, everything counts as unused.
        for _ in 0..2 * self.queue.len() {
            let ino = self.queue.pop_front()?;
            let used = [
                self.directories
                    .get_mut(&ino)
                    .map(|directory| &mut directory.was_used),
                self.files.get_mut(&ino).map(|file| &mut file.was_used),
            ];
            let (mut is_cached, mut was_used) = (false, false);
            for used in used.into_iter().flatten() {
                is_cached = true;
                was_used |= std::mem::take(used);
            }
            match (is_cached, was_used) {
                // It was given up.
                (false, _) => {
                    self.queued.remove(&ino);
                }
                (true, true) => self.queue.push_back(ino),
                (true, false) => {
                    self.queue.push_back(ino);
                    return Some(ino);
                }
            }
        }
        None
    }

    /// Names and inodes that are cached.
    #[cfg(test)]
    pub(super) fn counts(&self) -> (usize, usize) {
        (self.names, self.inodes)
    }
}

impl Directory {
    fn break_off(&mut self) {
        self.listing.clear();
        self.listing_end = ListingEnd::None;
        self.is_stale = false;
        if !self.is_complete {
            self.unknown.clear();
        }
    }

    fn bound_unknown(&mut self) {
        if self.unknown.len() > UNKNOWN_MAX {
            self.is_complete = false;
            self.break_off();
        }
    }
}

/// A file's extents as its record alone says them.
pub(super) fn extents_in(inode: &Inode) -> Option<Vec<Extent>> {
    match inode.body {
        Body::File(Content::Empty) => Some(Vec::new()),
        Body::File(Content::Inline(extent)) => Some(vec![extent]),
        _ => None,
    }
}
