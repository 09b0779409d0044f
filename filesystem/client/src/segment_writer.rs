//! Where a session writes file data: one segment at a time, each address once.
//!
//! An [`Allocation`] is a range of addresses from the moment they are given out until it is known whether an
//! extent names them. A segment that is full, or would have too many gaps, is retired: nothing more is given
//! out in it, and it is sealed once nothing is pending there.

mod layout;
mod shared_flush;

use std::sync::{Arc, Mutex};

use namespace::{Extent, Operation, Outcome, SegmentId, Tail};

use crate::backend::{Backend, DataError};
use crate::client::Client;
use crate::failure::Failure;
use crate::session::Session;
use crate::sync::{Semaphore, lock};
use layout::{Fate, Layout, Run};
use shared_flush::SharedFlush;

pub use layout::CHUNK_BYTES;

/// Bytes of a segment. Small enough that one is sealed and can be given back in parts, large enough that
/// making one is seldom.
pub const SEGMENT_BYTES: u64 = 64 << 30;

/// Segments that are begun for one allocation. One fresh segment always has room; a further one is needed
/// only if others filled that first.
const SEGMENTS_TRIED_MAX: usize = 16;

/// The segments that a session writes.
pub(crate) struct SegmentWriter {
    state: Mutex<State>,
    /// One task at a time begins a segment.
    opening: Semaphore,
    /// One task at a time seals segments, so that whoever comes second finds them sealed.
    sealing: Semaphore,
}

struct State {
    current: Option<Arc<OpenSegment>>,
    /// What was named of the current one in all, at the last look.
    seen: (SegmentId, u64),
    /// To be sealed.
    retired: Vec<Arc<OpenSegment>>,
}

/// A segment that the session may write.
pub(crate) struct OpenSegment {
    id: SegmentId,
    layout: Mutex<Layout>,
    flushes: SharedFlush,
}

/// Addresses that were given out. Dropped before a commit was begun, nothing will ever name them; after, they
/// may be named.
pub(crate) struct Allocation {
    segment: Arc<OpenSegment>,
    runs: Vec<Run>,
    fate: Fate,
}

/// A retired segment that is being sealed. Dropped before that is done, it is retired still.
struct Sealing<'a> {
    writer: &'a SegmentWriter,
    segment: Option<Arc<OpenSegment>>,
}

/// A segment whose volume is being made. Dropped before it can be used, it is retired.
struct Begun<'a> {
    writer: &'a SegmentWriter,
    id: Option<SegmentId>,
}

impl Default for State {
    fn default() -> Self {
        Self {
            current: None,
            seen: (SegmentId(0), 0),
            retired: Vec::new(),
        }
    }
}

impl State {
    fn retire_current(&mut self) {
        let current = self.current.take();
        self.retired.extend(current);
    }
}

impl SegmentWriter {
    pub(crate) fn new() -> Self {
        Self {
            state: Mutex::default(),
            opening: Semaphore::new(1),
            sealing: Semaphore::new(1),
        }
    }

    /// Allocates in the current segment, if there is one.
    fn allocate_in_current(&self, lengths: &[u64], affinity: u64) -> Option<Vec<Allocation>> {
        let mut state = lock(&self.state);
        let segment = Arc::clone(state.current.as_ref()?);
        let mut allocations = Vec::with_capacity(lengths.len());
        for length in lengths {
            let allocated = lock(&segment.layout).allocate(*length, affinity);
            let Ok(runs) = allocated else {
                state.retire_current();
                return None;
            };
            allocations.push(Allocation {
                segment: Arc::clone(&segment),
                runs,
                fate: Fate::Lost,
            });
        }
        Some(allocations)
    }

    /// Ends allocation in a segment.
    pub(crate) fn retire(&self, id: SegmentId) {
        let mut state = lock(&self.state);
        if state
            .current
            .as_ref()
            .is_some_and(|current| current.id == id)
        {
            state.retire_current();
        }
    }

    /// Ends allocation in the current segment.
    pub(crate) fn retire_current(&self) {
        lock(&self.state).retire_current();
    }

    /// The segment that is written now.
    pub(crate) fn current(&self) -> Option<SegmentId> {
        lock(&self.state).current.as_ref().map(|current| current.id)
    }

    /// Notes how much was named of the current segment in all; whether it was as much at the last look.
    pub(crate) fn note_named(&self, id: SegmentId, bytes: u64) -> bool {
        let mut state = lock(&self.state);
        std::mem::replace(&mut state.seen, (id, bytes)) == (id, bytes)
    }

    /// A segment that was made for nobody.
    pub(crate) fn retire_unused(&self, id: SegmentId) {
        let segment = Arc::new(OpenSegment::new(id, 0));
        lock(&self.state).retired.push(segment);
    }

    /// A retired segment in which nothing is pending.
    fn next_to_seal(&self) -> Option<Sealing<'_>> {
        let mut state = lock(&self.state);
        let is_idle = |segment: &Arc<OpenSegment>| !lock(&segment.layout).is_pending();
        let position = state.retired.iter().position(is_idle)?;
        Some(Sealing {
            writer: self,
            segment: Some(state.retired.swap_remove(position)),
        })
    }

    /// How many segments are retired and not sealed.
    pub(crate) fn retired(&self) -> usize {
        lock(&self.state).retired.len()
    }

    /// Allocates `length` bytes in one segment, a multiple of the block. What has the same `affinity` lies
    /// close together. Begins a segment if it has to.
    pub(crate) async fn allocate<B: Backend>(
        &self,
        client: &Client<B>,
        session: &Arc<Session>,
        length: u64,
        affinity: u64,
    ) -> Result<Allocation, Failure> {
        let lengths = [length];
        let mut allocations = self
            .allocate_all(client, session, &lengths, affinity)
            .await?;
        Ok(allocations.pop().expect("one for each length"))
    }

    /// The same of several ranges, all in one segment and side by side where there is room.
    pub(crate) async fn allocate_all<B: Backend>(
        &self,
        client: &Client<B>,
        session: &Arc<Session>,
        lengths: &[u64],
        affinity: u64,
    ) -> Result<Vec<Allocation>, Failure> {
        for _ in 0..SEGMENTS_TRIED_MAX {
            if let Some(allocations) = self.allocate_in_current(lengths, affinity) {
                return Ok(allocations);
            }
            let _turn = self.opening.acquire().await;
            if lock(&self.state).current.is_some() {
                continue;
            }
            self.seal_retired(client, session).await;
            let id = match client.apply_in(session, Operation::NewSegment).await? {
                Outcome::Segment(id) => id,
                other => return Err(Failure::unfit(&other)),
            };
            client.counters.segments.add(1);
            let mut begun = Begun {
                writer: self,
                id: Some(id),
            };
            if let Err(error) = client.backend.create_segment(id).await {
                drop(begun);
                return Err(client.data_failure(session, id, error).await);
            }
            begun.id = None;
            let segment = OpenSegment::new(id, client.options.segment_bytes);
            lock(&self.state).current = Some(Arc::new(segment));
        }
        Err(Failure::EIO)
    }

    /// Seals retired segments in which nothing is pending. What fails is tried again by the next call.
    pub(crate) async fn seal_retired<B: Backend>(
        &self,
        client: &Client<B>,
        session: &Arc<Session>,
    ) {
        let _turn = self.sealing.acquire().await;
        // Those that fail come back to the list.
        for _ in 0..self.retired() {
            let Some(mut sealing) = self.next_to_seal() else {
                return;
            };
            let Some(segment) = sealing.segment.as_ref().map(Arc::clone) else {
                return;
            };
            client.backend.close_segment(segment.id).await;
            if session.is_over() {
                // Whoever ended the session sealed its segments.
                sealing.segment = None;
                continue;
            }
            let length = lock(&segment.layout).end();
            let seal = Operation::SealSegment {
                segment: segment.id,
                length,
            };
            match client.apply_in(session, seal).await {
                Ok(_) | Err(Failure::SessionOver) => sealing.segment = None,
                Err(Failure::Refused(error)) => {
                    tracing::warn!(segment = segment.id.0, %error, "a segment was not sealed");
                    sealing.segment = None;
                }
                Err(Failure::Failed(_) | Failure::PoolFull) => {}
            }
        }
    }
}

impl Drop for Sealing<'_> {
    fn drop(&mut self) {
        if let Some(segment) = self.segment.take() {
            lock(&self.writer.state).retired.push(segment);
        }
    }
}

impl Drop for Begun<'_> {
    fn drop(&mut self) {
        if let Some(id) = self.id {
            self.writer.retire_unused(id);
        }
    }
}

impl OpenSegment {
    fn new(id: SegmentId, bytes: u64) -> Self {
        Self {
            id,
            layout: Mutex::new(Layout::new(bytes)),
            flushes: SharedFlush::default(),
        }
    }
}

impl Allocation {
    pub(crate) fn segment(&self) -> SegmentId {
        self.segment.id
    }

    /// Writes the data, and flushes them: the epoch in which they are durable.
    pub(crate) async fn write<B: Backend>(
        &self,
        client: &Client<B>,
        data: Vec<u8>,
    ) -> Result<u64, DataError> {
        Self::write_all(client, std::slice::from_ref(self), vec![data]).await
    }

    /// The same of several allocations in one segment. What lies side by side is one write.
    pub(crate) async fn write_all<B: Backend>(
        client: &Client<B>,
        allocations: &[Self],
        data: Vec<Vec<u8>>,
    ) -> Result<u64, DataError> {
        let segment = &allocations[0].segment;
        let id = segment.id;
        let parts = parts_of(allocations, data);
        let copies = parts.iter();
        let copies = copies.map(|(address, part)| client.data.copy(id, *address, part));
        let copies: Vec<_> = copies.collect();
        let writes = parts.into_iter();
        let writes = writes.map(|(address, part)| client.backend.write(id, address, part));
        // Also if one fails: what is under way must be over before the segment is closed.
        let written = futures_util::future::join_all(writes).await;
        written.into_iter().collect::<Result<(), DataError>>()?;
        client.counters.flushes_asked.add(1);
        let flush = || {
            client.counters.flushes.add(1);
            client.backend.flush(id)
        };
        let epoch = segment.flushes.flush(flush).await?;
        copies.into_iter().for_each(|copy| client.data.put(copy));
        Ok(epoch)
    }

    /// What names the data, from a file's offset on, which is a multiple of the block.
    pub(crate) fn extents(&self, offset: u64, epoch: u64) -> Vec<Extent> {
        let mut at = offset;
        let extents = self.runs.iter().map(|run| {
            let offset = at;
            at += run.length;
            Extent {
                offset,
                length: run.length,
                segment: self.segment.id,
                address: run.address,
                epoch,
            }
        });
        extents.collect()
    }

    /// What names a single block.
    pub(crate) fn tail(&self, epoch: u64) -> Tail {
        Tail {
            segment: self.segment.id,
            address: self.runs[0].address,
            epoch,
        }
    }

    /// A commit is about to be sent.
    pub(crate) fn commit_begins(&mut self) {
        self.fate = Fate::Unsettled;
    }

    /// The commit was refused, and names nothing.
    pub(crate) fn commit_refused(&mut self) {
        self.fate = Fate::Lost;
    }

    /// The commit was done.
    pub(crate) fn committed(mut self) {
        self.fate = Fate::Named;
    }
}

/// The data of allocations, each with its address. What lies side by side within a chunk is one part.
fn parts_of(allocations: &[Allocation], data: Vec<Vec<u8>>) -> Vec<(u64, Vec<u8>)> {
    let mut parts = Vec::<(u64, Vec<u8>)>::new();
    for (allocation, mut data) in allocations.iter().zip(data) {
        for run in &allocation.runs {
            let rest = data.split_off(data.len().min(run.length as usize));
            let part = std::mem::replace(&mut data, rest);
            assert!(
                part.len() as u64 == run.length,
                "an allocation is as long as its data"
            );
            let begins_chunk = run.address % CHUNK_BYTES == 0;
            match parts.last_mut() {
                Some((address, last))
                    if *address + last.len() as u64 == run.address && !begins_chunk =>
                {
                    last.extend(part);
                }
                _ => parts.push((run.address, part)),
            }
        }
    }
    parts
}

impl Drop for Allocation {
    fn drop(&mut self) {
        let mut layout = lock(&self.segment.layout);
        for run in self.runs.drain(..) {
            layout.decide(run, self.fate);
        }
    }
}
