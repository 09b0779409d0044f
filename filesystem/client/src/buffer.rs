//! Writes that were answered and are not committed yet.
//!
//! While this host's session holds a file as [`Kind::FileExclusive`], nobody else looks at it or changes it:
//! a write is answered once its bytes are here. They are written back later, several files at a time.
//!
//! # What is where
//!
//! - `buffer/write.rs` puts writes here, `buffer/write_back.rs` writes them back, `buffer/look.rs` has this
//!   host's guests see them, `buffer/errors.rs` remembers what could not be written back.
//! - A file is here if and only if it has bytes that are not committed. They are whole blocks: one that is
//!   written in part is completed when it is written, so that writing back needs no questions.
//! - The file's size and mtime are those of the last write, and go with each commit.
//!
//! # Invariants
//!
//! - Bytes come only while the capability is held, and stay until they are committed, or lost.
//! - What the capability covers is given up only when the file is not here any more ([`HolderAction`]).
//! - A file has one commit under way at a time. None says a larger size than its data, and those of before,
//!   account for.
//! - Bytes in memory are bounded, those of commits under way included. Who writes more waits.
//! - Whoever changes a file in any other way has it written back first, and keeps others from writing until
//!   that is done (`Client::changing`). Names are changed beside it.
//! - What is lost is told to each handle that is open at the time, once, and to each mount that syncs all.
//!
//! Locks are taken in this order: the cache's, this one, that of the room.
//!
//! [`Kind::FileExclusive`]: fs_capabilities::Kind::FileExclusive
//! [`HolderAction`]: fs_capabilities::HolderAction

mod ends;
mod errors;
mod file;
mod look;
mod room;
pub(crate) mod write;
mod write_back;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use fs_capabilities::Instant;
use fuse_codec::Errno;
use namespace::{BLOCK, Ino, SessionId, Time};

use crate::sync::{Signal, lock};
use ends::Ends;
pub(crate) use ends::Moment;
pub(crate) use errors::ErrorMark;
use errors::Errors;
use file::File;
pub(crate) use room::Reservation;
use room::Room;

/// Age at which bytes are written back.
const AGE_MAX: Duration = Duration::from_secs(5);
/// Files that will be due within this go with those that are.
const AGE_SPREAD: Duration = Duration::from_millis(500);
/// Bytes of one file that are written back without waiting for more.
const FILE_BYTES_DUE: u64 = 1 << 20;
/// Files that have bytes here. Writes to further ones are written through.
const FILES_MAX: usize = 16_384;
/// Files and bytes that are written back together.
const BATCH_FILES_MAX: usize = 32;
const BATCH_BYTES_MAX: u64 = 8 << 20;
/// Tries of one file's write back. Then its bytes are lost.
const TRIES_MAX: u32 = 16;
/// After a write back failed, nothing more is buffered for this long: writes report errors themselves.
const SUSPENDED: Duration = Duration::from_secs(5);

/// What one filesystem's guests on this host wrote.
pub(crate) struct Buffer {
    state: Mutex<State>,
    pub(crate) room: Room,
    /// There may be something to write back.
    wake: Signal,
    /// Bytes were committed, or lost.
    done: Signal,
}

struct State {
    files: BTreeMap<Ino, File>,
    /// Counts writes.
    writes: u64,
    ends: Ends,
    errors: Errors,
    /// Files that are written back before others, in the order in which that was asked for.
    urgent: VecDeque<Ino>,
    /// Files with bytes that are not being written back, by their age.
    ages: BTreeSet<(Instant, Ino)>,
    suspended_until: Instant,
    /// All is written back, and the background ends then.
    is_ending: bool,
    /// Somebody writes back.
    is_running: bool,
    figures: Figures,
}

/// What was done.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Figures {
    pub(crate) written_back: u64,
    pub(crate) commits: u64,
    pub(crate) failures: u64,
    pub(crate) lost: u64,
}

/// Bytes to put into a file: whole blocks, by their offsets.
pub(crate) struct NewBlocks {
    pub(crate) blocks: Vec<(u64, Vec<u8>)>,
    /// The end of what was written.
    pub(crate) end: u64,
    /// Size of the file before.
    pub(crate) size: u64,
    pub(crate) mtime: Time,
    pub(crate) clear_privileges: bool,
}

impl Buffer {
    pub(crate) fn new(bytes_max: u64) -> Arc<Self> {
        let state = State {
            files: BTreeMap::new(),
            writes: 0,
            ends: Ends::default(),
            errors: Errors::default(),
            urgent: VecDeque::new(),
            ages: BTreeSet::new(),
            suspended_until: Instant::START,
            is_ending: false,
            is_running: false,
            figures: Figures::default(),
        };
        Arc::new(Self {
            state: Mutex::new(state),
            room: Room::new(bytes_max),
            wake: Signal::default(),
            done: Signal::default(),
        })
    }

    pub(crate) fn figures(&self) -> Figures {
        lock(&self.state).figures
    }

    /// Whether a write of so many bytes to a file may be buffered now.
    pub(crate) fn takes(&self, now: Instant, ino: Ino, bytes: u64) -> bool {
        let state = lock(&self.state);
        let is_known = state.files.contains_key(&ino);
        let fits = is_known || state.files.len() < FILES_MAX;
        let is_open = !state.is_ending && state.is_running && now >= state.suspended_until;
        fits && is_open && self.room.may_hold(bytes)
    }

    /// Puts blocks into a file that is held exclusively by this session, under this grant.
    pub(crate) fn insert(
        &self,
        now: Instant,
        (ino, session, grant): (Ino, SessionId, u64),
        new: NewBlocks,
        room: &mut Reservation,
    ) {
        let mut state = lock(&self.state);
        let state = &mut *state;
        state.writes += 1;
        let write = state.writes;
        let file = state.files.entry(ino);
        let file = file.or_insert_with(|| File::new(session, grant, new.size));
        assert!(file.grant == grant, "a file is here under one grant");
        for (offset, bytes) in new.blocks {
            assert!(bytes.len() as u64 == BLOCK, "what is here are whole blocks");
            file.put(now, write, offset, room.fill(bytes));
        }
        file.size = file.size.max(new.end);
        file.mtime = new.mtime;
        file.clears_privileges |= new.clear_privileges;
        let is_large = file.fresh_bytes() >= FILE_BYTES_DUE;
        if is_large {
            state.hurry(ino, 0);
        }
        let is_first = state.ages.is_empty();
        state.index(ino);
        if is_large || is_first || self.room.is_short() {
            self.wake.notify();
        }
    }

    /// Nothing more comes under a file's capability: it is to be written back. Whether it is here.
    pub(crate) fn recall(&self, ino: Ino) -> bool {
        let mut state = lock(&self.state);
        let Some(file) = state.files.get_mut(&ino) else {
            return false;
        };
        file.is_recalled = true;
        state.hurry(ino, u64::MAX);
        drop(state);
        self.wake.notify();
        true
    }

    /// Has what was written to a file so far be written back; the number of the last write. None if nothing
    /// is here.
    fn request(&self, ino: Ino) -> Option<u64> {
        let mut state = lock(&self.state);
        let writes = state.writes;
        state.files.get(&ino)?;
        state.hurry(ino, writes);
        drop(state);
        self.wake.notify();
        Some(writes)
    }

    /// Has everything be written back that is here.
    pub(crate) fn hurry(&self) {
        for ino in self.files() {
            self.request(ino);
        }
    }

    /// Files that have bytes here.
    fn files(&self) -> Vec<Ino> {
        lock(&self.state).files.keys().copied().collect()
    }

    /// Whether a file has nothing here that was written up to this write.
    fn is_written_back(&self, ino: Ino, write: u64) -> bool {
        let state = lock(&self.state);
        let file = state.files.get(&ino);
        file.is_none_or(|file| file.oldest_write() > write)
    }

    /// All is lost: the session is over.
    pub(crate) fn lose_all(&self) {
        let mut state = lock(&self.state);
        let files: Vec<Ino> = state.files.keys().copied().collect();
        for ino in &files {
            state.lose(*ino, Errno::EIO);
        }
        drop(state);
        if !files.is_empty() {
            tracing::error!(
                files = files.len(),
                "the host's session of a filesystem has ended: what was not written back is lost"
            );
            self.done.notify();
        }
    }

    /// A file has no name any more. If it goes, what is here of it is of no use. Whether it is here.
    pub(crate) fn note_orphan(&self, ino: Ino) -> bool {
        let mut state = lock(&self.state);
        let file = state.files.get_mut(&ino);
        file.map(|file| file.is_orphan = true).is_some()
    }

    /// Names of a file change, or of any file: its next commit has a time of its own, as the change has.
    pub(crate) fn note_move(&self, ino: Option<Ino>) {
        let mut state = lock(&self.state);
        match ino {
            Some(ino) => {
                if let Some(file) = state.files.get_mut(&ino) {
                    file.is_moved = true;
                }
            }
            None => state
                .files
                .values_mut()
                .for_each(|file| file.is_moved = true),
        }
    }

    /// Keeps a file from being written back while its attributes are changed. None while that is under way,
    /// or has to be done first.
    fn pin(self: &Arc<Self>, ino: Ino) -> Option<Option<Pin>> {
        let mut state = lock(&self.state);
        let Some(file) = state.files.get_mut(&ino) else {
            return Some(None);
        };
        if file.is_under_way || file.clears_privileges {
            let first = file.clears_privileges;
            if first {
                let writes = state.writes;
                state.hurry(ino, writes);
                self.wake.notify();
            }
            return None;
        }
        file.pins += 1;
        let (buffer, grant) = (Arc::clone(self), file.grant);
        Some(Some(Pin { buffer, ino, grant }))
    }

    /// Everything is to be written back, and nothing more is taken.
    pub(crate) fn end(&self) {
        lock(&self.state).is_ending = true;
        self.wake.notify();
    }

    /// Whether a failure is to be told to a handle, which knows of those up to its mark.
    pub(crate) fn check(&self, ino: Ino, mark: &mut ErrorMark) -> Result<(), Errno> {
        lock(&self.state).errors.check(ino, mark)
    }

    /// Whether a failure of any file is to be told to a mount, which knows of those up to its mark.
    pub(crate) fn check_all(&self, mark: &mut ErrorMark) -> Result<(), Errno> {
        lock(&self.state).errors.check_all(mark)
    }

    /// The mark of a handle that is opened now, or of a guest that mounts.
    pub(crate) fn mark(&self) -> ErrorMark {
        lock(&self.state).errors.mark()
    }
}

impl State {
    /// Notes the age of a file anew.
    fn index(&mut self, ino: Ino) {
        let Some(file) = self.files.get_mut(&ino) else {
            return;
        };
        let age = (file.fresh_bytes() > 0).then_some(file.since);
        let before = std::mem::replace(&mut file.indexed, age);
        if before != age {
            before.map(|since| self.ages.remove(&(since, ino)));
            age.map(|since| self.ages.insert((since, ino)));
        }
    }

    fn hurry(&mut self, ino: Ino, write: u64) {
        if let Some(file) = self.files.get_mut(&ino) {
            file.asked = file.asked.max(write);
            if !file.is_queued {
                file.is_queued = true;
                self.urgent.push_back(ino);
            }
        }
    }

    /// A file has nothing here any more.
    fn remove(&mut self, ino: Ino) -> Option<File> {
        let file = self.files.remove(&ino)?;
        self.ends.end(ino);
        file.indexed.map(|since| self.ages.remove(&(since, ino)));
        if file.is_queued {
            self.urgent.retain(|queued| *queued != ino);
        }
        Some(file)
    }

    /// Bytes of a file are lost.
    fn lose(&mut self, ino: Ino, errno: Errno) -> Option<File> {
        let file = self.remove(ino)?;
        self.figures.failures += 1;
        self.figures.lost += file.blocks.len() as u64 * BLOCK;
        self.errors.note(ino, errno);
        Some(file)
    }
}

/// A file that is not written back until this is dropped.
pub(crate) struct Pin {
    buffer: Arc<Buffer>,
    ino: Ino,
    grant: u64,
}

impl Pin {
    /// The attributes were changed, perhaps with the time of the last change of data.
    pub(crate) fn changed(&self, mtime: Option<Time>) {
        let mut state = lock(&self.buffer.state);
        let file = state.files.get_mut(&self.ino);
        if let Some(file) = file.filter(|file| file.grant == self.grant) {
            file.is_moved = true;
            file.mtime = mtime.unwrap_or(file.mtime);
        }
    }
}

impl Drop for Pin {
    fn drop(&mut self) {
        let mut state = lock(&self.buffer.state);
        let file = state.files.get_mut(&self.ino);
        if let Some(file) = file.filter(|file| file.grant == self.grant) {
            file.pins -= 1;
        }
        drop(state);
        self.buffer.wake.notify();
    }
}
