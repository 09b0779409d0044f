//! Writing back: what is due goes into segments, several files side by side, and is then committed.

use std::collections::VecDeque;
use std::future::pending;
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::future::{Either, join_all, select};
use futures_util::stream::FuturesUnordered;

use fs_capabilities::Instant;
use fuse_codec::Errno;
use namespace::{BLOCK, Commit, Error, Extent, Ino, Operation, Outcome};

use super::file::Taken;
use super::{
    AGE_MAX, AGE_SPREAD, BATCH_BYTES_MAX, BATCH_FILES_MAX, Buffer, Pin, SUSPENDED, State, TRIES_MAX,
};
use crate::backend::Backend;
use crate::client::Client;
use crate::failure::Failure;
use crate::segment_writer::Allocation;
use crate::session::Session;
use crate::sync::{Mode, lock};

/// Batches that are written at a time.
const BATCHES_MAX: usize = 4;

/// How long it is waited for whether a file is gone.
const GONE_WAIT_MAX: Duration = Duration::from_secs(1);

/// How often the end of the lease is looked at, at least.
const LEASE_LOOK: Duration = Duration::from_secs(1);
const WAIT_MIN: Duration = Duration::from_millis(1);

/// What became of a part of a file.
type Written = Result<(), Failure>;

impl Buffer {
    /// What is to be written back now.
    fn take_batch(&self, now: Instant) -> Vec<Taken> {
        let mut state = lock(&self.state);
        let state = &mut *state;
        let mut batch = Batch {
            now,
            taken: Vec::new(),
            bytes: 0,
        };
        let mut left = VecDeque::new();
        while let Some(ino) = state.urgent.pop_front() {
            let is_left = batch.is_full() || !state.take_urgent(&mut batch, ino);
            if is_left {
                left.push_back(ino);
            }
            if batch.is_full() {
                break;
            }
        }
        left.append(&mut state.urgent);
        state.urgent = left;
        let is_pressed = state.is_ending || self.room.is_short();
        let ages = state.ages.iter();
        let is_due = |since: &Instant, age: Duration| is_pressed || *since + age <= now;
        let first = state.ages.first();
        let spread = match first.is_some_and(|(since, _)| is_due(since, AGE_MAX)) {
            true => AGE_MAX - AGE_SPREAD,
            false => AGE_MAX,
        };
        let due = ages.take_while(|(since, _)| is_due(since, spread));
        let due: Vec<Ino> = due.take(2 * BATCH_FILES_MAX).map(|(_, ino)| *ino).collect();
        for ino in due {
            if batch.is_full() {
                break;
            }
            state.take(&mut batch, ino);
        }
        batch.taken
    }

    /// When something will be due, if nothing else happens.
    fn next_due(&self) -> Option<Instant> {
        let state = lock(&self.state);
        let paused = state.urgent.iter().filter_map(|ino| {
            let file = state.files.get(ino)?;
            (!file.is_under_way && file.pins == 0).then_some(file.not_before)
        });
        let aged = state.ages.iter().find_map(|(since, ino)| {
            let file = state.files.get(ino)?;
            (!file.is_under_way && file.pins == 0).then(|| (*since + AGE_MAX).max(file.not_before))
        });
        paused.chain(aged).min()
    }

    /// A part of a file is committed, or is not. Whether the file was recalled, and is not here any more.
    fn finish(&self, now: Instant, taken: &Taken, written: Written) -> bool {
        let mut state = lock(&self.state);
        let state = &mut *state;
        let ino = taken.ino;
        let Some(file) = state.files.get_mut(&ino).filter(|file| taken.is_of(file)) else {
            return false;
        };
        let removed = match written {
            Ok(()) => {
                file.committed(taken);
                state.figures.commits += 1;
                state.figures.written_back += taken.bytes();
                state.ends.end(ino);
                match file.blocks.is_empty() {
                    true => state.remove(ino),
                    false => None,
                }
            }
            Err(failure) => {
                file.not_committed(taken);
                file.tries += 1;
                file.not_before = now + pause(file.tries);
                let is_final = matches!(
                    failure,
                    Failure::Refused(Error::Stale | Error::NotFound | Error::TooLarge)
                );
                let is_lost = is_final || file.tries >= TRIES_MAX;
                state.suspended_until = state.suspended_until.max(now + SUSPENDED);
                match is_lost {
                    true => {
                        tracing::error!(
                            ino = ino.0,
                            blocks = file.blocks.len(),
                            ?failure,
                            "what was written to a file cannot be written back, and is lost"
                        );
                        state.lose(ino, Errno::from(failure))
                    }
                    false => None,
                }
            }
        };
        state.index(ino);
        let is_recalled = removed.is_some_and(|file| file.is_recalled);
        self.done.notify();
        is_recalled
    }

    /// A file is gone: what is here of it is of no use. Whether it was recalled.
    fn discard(&self, taken: &Taken) -> bool {
        let mut state = lock(&self.state);
        let is_it = state
            .files
            .get(&taken.ino)
            .is_some_and(|file| taken.is_of(file));
        let removed = is_it.then(|| state.remove(taken.ino)).flatten();
        drop(state);
        self.done.notify();
        removed.is_some_and(|file| file.is_recalled)
    }
}

/// Files that are written back together.
struct Batch {
    now: Instant,
    taken: Vec<Taken>,
    bytes: u64,
}

impl Batch {
    fn is_full(&self) -> bool {
        self.taken.len() >= BATCH_FILES_MAX || self.bytes >= BATCH_BYTES_MAX
    }
}

impl State {
    /// Takes of a file that is urgent. Whether that was all that is urgent.
    fn take_urgent(&mut self, batch: &mut Batch, ino: Ino) -> bool {
        let Some(file) = self.files.get(&ino) else {
            return true;
        };
        let is_asked = file.is_recalled || file.asked >= file.oldest_write();
        let is_due = is_asked || file.fresh_bytes() >= super::FILE_BYTES_DUE;
        if is_due && !self.take(batch, ino) {
            return false;
        }
        let file = self.files.get_mut(&ino).expect("it is there");
        let is_left = is_asked && file.fresh_bytes() > 0;
        file.is_queued = is_left;
        !is_left
    }

    /// Takes of a file what goes into a batch, unless it has to wait.
    fn take(&mut self, batch: &mut Batch, ino: Ino) -> bool {
        let Some(file) = self.files.get_mut(&ino) else {
            return false;
        };
        let waits = file.is_under_way || file.pins > 0 || file.not_before > batch.now;
        if waits || file.fresh_bytes() == 0 {
            return false;
        }
        let taken = file.take(ino, BATCH_BYTES_MAX - batch.bytes);
        batch.bytes += taken.bytes();
        batch.taken.push(taken);
        self.index(ino);
        true
    }
}

/// Pause before a file is tried again.
fn pause(tries: u32) -> Duration {
    Duration::from_millis(1 << tries.min(7))
}

/// The background writes back as long as this is there.
struct Running<'a>(&'a Buffer);

impl<'a> Running<'a> {
    fn begin(buffer: &'a Buffer) -> Option<Self> {
        let mut state = lock(&buffer.state);
        let was_running = std::mem::replace(&mut state.is_running, true);
        (!was_running).then_some(Self(buffer))
    }
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        lock(&self.0.state).is_running = false;
        self.0.done.notify();
    }
}

impl<B: Backend> Client<B> {
    /// Writes back what is due, until the buffer is ended and empty.
    pub(crate) async fn run_buffer(&self) {
        let Some(_running) = Running::begin(&self.buffer) else {
            return;
        };
        let mut batches = FuturesUnordered::new();
        loop {
            let wake = self.buffer.wake.listen();
            self.expire();
            while batches.len() < BATCHES_MAX {
                let batch = self.buffer.take_batch(self.backend.monotonic());
                if batch.is_empty() {
                    break;
                }
                batches.push(self.write_batch(batch));
            }
            let is_over = lock(&self.buffer.state).is_ending && self.buffer.is_empty();
            if is_over && batches.is_empty() {
                return;
            }
            let can_begin = batches.len() < BATCHES_MAX;
            let due = self.buffer.next_due().filter(|_| can_begin);
            let now = self.backend.monotonic();
            // The end of the lease is looked at well before.
            let lease = (!self.buffer.is_empty()).then(|| {
                let until = self.backend.lease_until();
                until.map_or(LEASE_LOOK, |until| (until.since(now) / 2).min(LEASE_LOOK))
            });
            let wait = due.map(|due| due.since(now));
            let timer = async {
                match wait.into_iter().chain(lease).min() {
                    Some(wait) => self.backend.sleep(wait.max(WAIT_MIN)).await,
                    None => pending().await,
                }
            };
            let ended = async {
                match batches.next().await {
                    Some(()) => {}
                    None => pending().await,
                }
            };
            let events = select(Box::pin(timer), Box::pin(ended));
            select(wake, events).await;
        }
    }

    /// Ends the buffer: all is written back, or lost.
    pub(crate) async fn end_buffer(&self) {
        self.buffer.end();
        loop {
            let done = self.buffer.done.listen();
            if self.buffer.is_empty() {
                return;
            }
            if !lock(&self.buffer.state).is_running {
                self.run_buffer().await;
                continue;
            }
            // A signal that is gone is one that came.
            let _ = done.await;
        }
    }

    /// Returns once what was written to a file before is committed or lost.
    pub(crate) async fn write_back(&self, ino: Ino) {
        self.expire();
        let Some(write) = self.buffer.request(ino) else {
            return;
        };
        #[cfg(feature = "testing")]
        if self.options.mistake == Some(crate::cache::Mistake::SyncBeforeCommit) {
            return;
        }
        loop {
            let done = self.buffer.done.listen();
            if self.buffer.is_written_back(ino, write) {
                return;
            }
            // A signal that is gone is one that came.
            let _ = done.await;
        }
    }

    /// The same of all files.
    pub(crate) async fn write_back_all(&self) {
        let files = self.buffer.files();
        join_all(files.into_iter().map(|ino| self.write_back(ino))).await;
    }

    /// Keeps a file's bytes from being written back while its attributes are changed: a commit that comes
    /// late would undo that. Nobody writes to it meanwhile.
    pub(crate) async fn pin(&self, ino: Ino) -> Option<Pin> {
        self.expire();
        loop {
            let done = self.buffer.done.listen();
            if let Some(pin) = self.buffer.pin(ino) {
                return pin;
            }
            // A signal that is gone is one that came.
            let _ = done.await;
        }
    }

    /// A turn to change a file's content past the buffer: what is there is written back first.
    pub(crate) async fn turn(&self, ino: Ino, mode: Mode) -> crate::sync::KeyedGuard<Ino> {
        let turn = self.changing.lock(ino, mode).await;
        self.write_back(ino).await;
        turn
    }

    async fn write_batch(&self, batch: Vec<Taken>) {
        let mut present = Vec::new();
        for taken in batch {
            match taken.is_orphan && self.is_gone(taken.ino).await {
                true => self.discard(&taken),
                false => present.push(taken),
            }
        }
        // Others may wait for these files, but what was acknowledged would be lost.
        let write = || self.write_taken(&present);
        if let Err(failure) = self.as_space_returns(write).await {
            present
                .iter()
                .for_each(|taken| self.finish(taken, Err(failure)));
        }
    }

    /// Whether a file that had no name any more is gone, as nobody has it open. If that is not answered soon,
    /// the commit will find out.
    async fn is_gone(&self, ino: Ino) -> bool {
        let asked = Box::pin(self.ask_inode(ino));
        let patience = Box::pin(self.backend.sleep(GONE_WAIT_MAX));
        match select(asked, patience).await {
            Either::Left((answer, _)) => answer == Err(Failure::Refused(Error::Stale)),
            Either::Right(_) => false,
        }
    }

    /// A file is gone, with what is here of it.
    fn discard(&self, taken: &Taken) {
        let ino = taken.ino;
        self.finished(|| self.buffer.discard(taken).then_some(ino));
        self.cache.release(ino);
    }

    fn finish(&self, taken: &Taken, written: Written) {
        let is_gone = written == Err(Failure::Refused(Error::Stale));
        // It lost its last name while this was under way, and nobody can read it.
        if is_gone && !self.open.has_handle(taken.ino) {
            return self.discard(taken);
        }
        let now = self.backend.monotonic();
        self.finished(|| self.buffer.finish(now, taken, written).then_some(taken.ino));
    }

    /// Ends the recall of a file that has nothing buffered any more.
    fn finished(&self, finish: impl FnOnce() -> Option<Ino>) {
        self.cache
            .finish_write_back(self.backend.monotonic(), finish);
    }

    /// Writes parts of files to a segment, flushes it, and commits and finishes each. Fails for all, or for
    /// none.
    async fn write_taken(&self, batch: &[Taken]) -> Written {
        let Some(first) = batch.first() else {
            return Ok(());
        };
        let session = self.sessions.current();
        let session = session.filter(|session| session.id == first.session);
        let Some(session) = session.filter(|session| !session.is_over()) else {
            return Err(Failure::SessionOver);
        };
        let lengths: Vec<u64> = batch.iter().map(Taken::bytes).collect();
        // What is small lies side by side, whatever file it is of.
        let affinity = if batch.len() == 1 { first.ino.0 } else { 0 };
        let segments = &session.segments;
        let allocations = segments
            .allocate_all(self, &session, &lengths, affinity)
            .await?;
        let data = batch.iter().map(|taken| {
            let mut data = Vec::with_capacity(taken.bytes() as usize);
            taken
                .blocks
                .iter()
                .for_each(|(_, block)| data.extend_from_slice(block));
            data
        });
        let epoch = match Allocation::write_all(self, &allocations, data.collect()).await {
            Ok(epoch) => epoch,
            Err(error) => {
                let segment = allocations[0].segment();
                drop(allocations);
                return Err(self.data_failure(&session, segment, error).await);
            }
        };
        let commits = batch.iter().zip(allocations);
        let commits = commits.map(|(taken, allocation)| async {
            let committed = self.commit_taken(&session, taken, allocation, epoch).await;
            self.finish(taken, committed);
        });
        join_all(commits).await;
        Ok(())
    }

    async fn commit_taken(
        &self,
        session: &Arc<Session>,
        taken: &Taken,
        mut allocation: Allocation,
        epoch: u64,
    ) -> Written {
        let commit = Operation::Commit(Commit {
            ino: taken.ino,
            // The file is held exclusively as long as the session lasts.
            expected: None,
            extents: extents_of(taken, &allocation.extents(0, epoch)),
            size: taken.size,
            mtime: taken.mtime,
            clear_privileges: taken.clears_privileges,
        });
        // Who looks at the file sees the time of the write already.
        let at = match taken.is_moved {
            true => self.backend.now(),
            false => taken.mtime,
        };
        allocation.commit_begins();
        let applied = self.apply_held(None, session, (at, taken.ino), commit);
        match applied.await {
            Ok(Outcome::Inode(_)) => {
                allocation.committed();
                Ok(())
            }
            Ok(other) => Err(Failure::unfit(&other)),
            Err(failure) => {
                if failure == Failure::Refused(Error::TooManyGaps) {
                    session.segments.retire(allocation.segment());
                }
                if matches!(failure, Failure::Refused(_) | Failure::SessionOver) {
                    allocation.commit_refused();
                }
                Err(failure)
            }
        }
    }
}

/// What names the blocks of a part of a file, which lie in these extents one behind the other.
fn extents_of(taken: &Taken, stored: &[Extent]) -> Vec<Extent> {
    let mut extents = Vec::<Extent>::new();
    let mut stored = stored.iter().flat_map(|extent| {
        let blocks = (0..extent.length).step_by(BLOCK as usize);
        blocks.map(move |at| Extent {
            address: extent.address + at,
            length: BLOCK,
            ..*extent
        })
    });
    for (offset, _) in &taken.blocks {
        let block = stored.next().expect("an allocation is as long as its data");
        match extents.last_mut() {
            Some(last) if last.end() == *offset && last.address + last.length == block.address => {
                last.length += BLOCK;
            }
            _ => extents.push(Extent {
                offset: *offset,
                ..block
            }),
        }
    }
    extents
}
