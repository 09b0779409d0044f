//! Gives back what no file names any more, in sealed segments of the filesystems whose namespace group this
//! node leads.
//!
//! The order is that of decision 0020: the namespace stopped naming it and keeps a record of it as freed; it
//! is discarded, durably; then the record goes. After a crash in between it is discarded once more, which
//! changes nothing. A segment that nothing names is deleted as a whole, with its volume.
//!
//! Nothing waits for hosts that looked a file up a moment ago and are about to read what it named then: they
//! find zeros, and look again (`fs-client`, `data/read.rs`).

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use api::failure::{Failure, Kind, Result};
use fs_client::Space;
use meta::{Filesystem, FilesystemState, Filesystems, NamespaceGroupId, Volume, VolumeState};
use namespace::{
    Answer, FilesystemId, Freed, Operation, Outcome, Query, Reply, Request, SegmentId,
    SegmentState, SessionId,
};
use service::failures::meta_failure;

use crate::filesystems::FilesystemService;

use crate::backend::wall_clock;
use crate::filesystems::space_of;
use crate::shown::unfit;

/// Pause between two looks.
const PAUSE: Duration = Duration::from_secs(5);
/// Pause while much is freed compared with the pool's free space, as writers wait, or something is left.
const PAUSE_SHORT: Duration = Duration::from_millis(500);
/// Freed space is much from one part in so many of the pool's free space on.
const PRESSED_SHARE: u64 = 16;
/// No further range is discarded under one lease of a segment after this. What was, is noted then: neither
/// an error nor a restart makes it be done again.
const BATCH_TIME: Duration = Duration::from_millis(500);
/// After each batch reclaim pauses for its time multiplied by this, so that it is at work for a third of the
/// time, unless much is freed.
const PAUSE_FACTOR: u32 = 2;
/// No further batch of a filesystem is begun after this: the next one's turn comes, where writers may wait.
const TURN_TIME: Duration = Duration::from_secs(3);
/// Freed ranges of a filesystem that are given back in one turn; the others come after these.
const RANGES_MAX: usize = 100_000;
/// Items that are asked for at a time, and operations that are put into one request.
const PAGE: u32 = 1000;

/// Sealed segments of a filesystem of which nothing is left behind what they have written.
type Trimmed = BTreeSet<SegmentId>;

/// Goes on for as long as filesystems are served.
pub fn keep(service: &Arc<FilesystemService>) {
    tokio::spawn(run(Arc::downgrade(service)));
    tokio::spawn(drop_deleted(Arc::downgrade(service)));
}

async fn drop_deleted(weak: Weak<FilesystemService>) {
    loop {
        tokio::time::sleep(PAUSE).await;
        let Some(service) = weak.upgrade() else {
            return;
        };
        if let Err(failure) = service.drop_deleted_segments().await {
            tracing::warn!(%failure, "drop data of deleted segments");
        }
    }
}

async fn run(weak: Weak<FilesystemService>) {
    let mut trimmed: BTreeMap<FilesystemId, Trimmed> = BTreeMap::new();
    let mut pause = PAUSE;
    loop {
        tokio::time::sleep(pause).await;
        pause = PAUSE;
        let Some(service) = weak.upgrade() else {
            return;
        };
        let mine = service.led_filesystems();
        trimmed.retain(|id, _| mine.iter().any(|one| one.id == *id));
        for filesystem in mine {
            let trimmed = trimmed.entry(filesystem.id).or_default();
            let mut reclaim = Reclaim {
                service: &service,
                filesystem: &filesystem,
                group: service.cluster.meta.filesystems(filesystem.group),
                begun: Instant::now(),
                is_pressed: false,
                is_done: false,
            };
            // The lease of a segment whose host is gone runs out soon.
            if let Err(failure) = reclaim.once(trimmed).await
                && failure.kind != Kind::Conflict
            {
                tracing::warn!(filesystem = %filesystem.name, %failure, "give space of deleted files back");
            }
            if reclaim.is_pressed || !reclaim.is_done {
                pause = PAUSE_SHORT;
            }
        }
    }
}

impl FilesystemService {
    /// Second half of the deletion of segments' volumes, by whoever leads the cluster.
    async fn drop_deleted_segments(&self) -> Result<()> {
        if self.cluster.meta.raft_status().leader != Some(self.cluster.node_id()) {
            return Ok(());
        }
        let volumes = self
            .cluster
            .meta
            .applied()
            .volumes()
            .map_err(meta_failure)?;
        let is_due = |one: &&Volume| one.segment.is_some() && one.state == VolumeState::Deleting;
        for volume in volumes.iter().filter(is_due) {
            self.volumes.drop_data(volume).await?;
        }
        Ok(())
    }

    /// The filesystems whose namespace group this node leads.
    fn led_filesystems(&self) -> Vec<Filesystem> {
        let own = Some(self.cluster.node_id());
        let groups = self.cluster.meta.namespace_groups().into_iter();
        let led: BTreeSet<NamespaceGroupId> = groups
            .filter(|(_, status)| status.leader == own)
            .map(|(id, _)| id)
            .collect();
        let map = self.cluster.meta.map();
        let here = map.filesystems().filter(|one| led.contains(&one.group));
        here.filter(|one| one.state == FilesystemState::Ready)
            .cloned()
            .collect()
    }
}

/// One filesystem's turn.
struct Reclaim<'a> {
    service: &'a FilesystemService,
    filesystem: &'a Filesystem,
    group: Filesystems,
    /// When the turn began.
    begun: Instant,
    /// Much is freed for the pool's free space.
    is_pressed: bool,
    /// Nothing that was seen is left for another turn. An error counts as done: it is tried again later.
    is_done: bool,
}

/// One discard.
#[derive(Debug, PartialEq, Eq)]
struct Run {
    address: u64,
    length: u64,
    /// Address and length of the freed ranges in it, which are neighbours. Empty if no file ever named it.
    ranges: Vec<(u64, u64)>,
}

impl Reclaim<'_> {
    async fn once(&mut self, trimmed: &mut Trimmed) -> Result<()> {
        let segments = self.segments().await?;
        let sealed: BTreeMap<SegmentId, (u64, u64)> = segments
            .into_iter()
            .filter(|(_, segment)| segment.state == SegmentState::Sealed)
            .map(|(id, segment)| (id, (segment.written, segment.live)))
            .collect();
        trimmed.retain(|id| sealed.contains_key(id));
        let freed = self.freed().await?;
        self.is_done = freed.len() < RANGES_MAX;
        let freed_bytes = freed.iter().map(|one| one.length).sum();
        self.is_pressed = self.is_much(freed_bytes).await;
        let mut due: BTreeMap<SegmentId, Vec<(u64, u64)>> = BTreeMap::new();
        for one in &freed {
            let ranges = due.entry(one.segment).or_default();
            ranges.push((one.address, one.length));
        }
        let mut last = Ok(());
        for (id, (written, live)) in sealed {
            let due = due.remove(&id).unwrap_or_default();
            let is_empty = live == 0;
            // What goes as a whole needs no trimming.
            let end = (!is_empty && !trimmed.contains(&id)).then_some(written);
            // Deleting a volume gives its space back only some time later on other nodes.
            let is_discarded = !due.is_empty() && (self.is_pressed || !is_empty);
            let mut done = Ok(true);
            if is_discarded || end.is_some() {
                done = self.give_back(id, end, &due).await;
            }
            match done {
                Ok(true) if is_empty => self.delete(id).await?,
                Ok(true) => drop(trimmed.insert(id)),
                Ok(false) => {
                    self.is_done = false;
                    return last;
                }
                // One whose lease somebody still has keeps no other from it.
                Err(failure) => last = Err(failure),
            }
        }
        last
    }

    async fn segments(&self) -> Result<Vec<(SegmentId, namespace::Segment)>> {
        let mut all: Vec<(SegmentId, namespace::Segment)> = Vec::new();
        loop {
            let from = all
                .last()
                .map_or(SegmentId(0), |(id, _)| SegmentId(id.0 + 1));
            match self.ask(Query::Segments { from, max: PAGE }).await? {
                Answer::Segments(page) if page.is_empty() => return Ok(all),
                Answer::Segments(page) => all.extend(page),
                other => return Err(unfit(&other)),
            }
        }
    }

    async fn freed(&self) -> Result<Vec<Freed>> {
        let mut all: Vec<Freed> = Vec::new();
        while all.len() < RANGES_MAX {
            let from = all
                .last()
                .map_or((SegmentId(0), 0), |last| (last.segment, last.address + 1));
            match self.ask(Query::Freed { from, max: PAGE }).await? {
                Answer::Freed(page) if page.is_empty() => break,
                Answer::Freed(page) => all.extend(page),
                other => return Err(unfit(&other)),
            }
        }
        Ok(all)
    }

    /// Deletes a segment that nothing names.
    async fn delete(&self, id: SegmentId) -> Result<()> {
        let meta = &self.service.cluster.meta;
        let deleted = meta.delete_segment_volume(self.filesystem.id, id).await;
        deleted.map_err(meta_failure)?;
        while !self.step(Operation::DropSegment { segment: id }).await? {}
        Ok(())
    }

    /// Discards ranges of a sealed segment, and what its session wrote behind this end; forgets after each
    /// batch that they were freed. False if something is left for another turn.
    async fn give_back(
        &self,
        id: SegmentId,
        end: Option<u64>,
        ranges: &[(u64, u64)],
    ) -> Result<bool> {
        let meta = &self.service.cluster.meta;
        let found = meta.segment_volume(self.filesystem.id, id).await;
        let volume = found.map_err(meta_failure)?;
        let mut due = runs(ranges);
        if let Some((volume, end)) = volume.as_ref().zip(end) {
            due.push_back(Run {
                address: end,
                length: volume.size_bytes.saturating_sub(end),
                ranges: Vec::new(),
            });
        }
        while !due.is_empty() {
            if self.is_over() {
                return Ok(false);
            }
            let begun = Instant::now();
            let done = match &volume {
                Some(volume) => self.discard(volume, &mut due).await?,
                // It has gone with all that was in it.
                None => due.drain(..).collect(),
            };
            let done: Vec<(u64, u64)> = done.into_iter().flat_map(|run| run.ranges).collect();
            self.forget(id, &done).await?;
            if !self.is_pressed {
                tokio::time::sleep(begun.elapsed().saturating_mul(PAUSE_FACTOR)).await;
            }
        }
        Ok(true)
    }

    /// Returns true if the freed bytes are much for the pool's free space, or the pool is short of space.
    async fn is_much(&self, freed_bytes: u64) -> bool {
        let pools = self
            .service
            .pools
            .list(&self.service.cluster.list_reader())
            .await;
        let map = self.service.cluster.meta.map();
        let pool = map.pool(self.filesystem.pool);
        let space = pool
            .zip(pools.ok())
            .and_then(|(pool, pools)| space_of(&pools, pool.name.as_str()));
        space.is_some_and(|space| is_much(space, freed_bytes))
    }

    /// Whether the turn has to end.
    fn is_over(&self) -> bool {
        let mine = self.service.led_filesystems();
        self.begun.elapsed() > TURN_TIME || !mine.iter().any(|one| one.id == self.filesystem.id)
    }

    /// Takes a batch of what is due, and discards it, durably.
    async fn discard(&self, volume: &Volume, due: &mut VecDeque<Run>) -> Result<Vec<Run>> {
        let io = self.service.io().await?;
        let (meta, leases) = (&self.service.cluster.meta, self.service.volumes.leases());
        if leases.has(volume.id) {
            // This node's own client has not let go of it yet.
            return Err(Failure::plain(
                Kind::Conflict,
                "the segment is still written",
            ));
        }
        let handle = leases.open(meta, &self.service.storage, volume).await?;
        let (begun, mut batch, mut done) = (Instant::now(), Vec::new(), Ok(()));
        while done.is_ok()
            && (batch.is_empty() || begun.elapsed() < BATCH_TIME)
            && let Some(run) = due.pop_front()
        {
            if run.length > 0 {
                done = io.discard(&handle, run.address, run.length).await;
            }
            batch.push(run);
        }
        if done.is_ok() {
            done = io.flush(&handle).await;
        }
        drop(handle);
        leases.give_back(meta, volume.id).await;
        done.map_err(|error| Failure::plain(Kind::Failed, format!("discard: {error}")))?;
        Ok(batch)
    }

    /// Removes the records of freed ranges.
    async fn forget(&self, id: SegmentId, ranges: &[(u64, u64)]) -> Result<()> {
        for page in ranges.chunks(PAGE as usize) {
            let operations = page.iter().map(|(address, length)| Operation::Reclaimed {
                segment: id,
                address: *address,
                length: *length,
            });
            for reply in self.apply(operations.collect()).await? {
                reply.map_err(refused)?;
            }
        }
        Ok(())
    }

    async fn ask(&self, query: Query) -> Result<Answer> {
        let answers = self.group.read(vec![(self.filesystem.id, query)]).await;
        let answer = answers.map_err(meta_failure)?.into_iter().next();
        answer.ok_or_else(no_answer)?.map_err(refused)
    }

    /// Does one step of an operation; whether it was the last.
    async fn step(&self, operation: Operation) -> Result<bool> {
        let replies = self.apply(vec![operation]).await?;
        match replies.into_iter().next().ok_or_else(no_answer)? {
            Ok(Outcome::Step { done }) => Ok(done),
            Ok(_) => Ok(true),
            Err(error) => Err(refused(error)),
        }
    }

    async fn apply(&self, operations: Vec<Operation>) -> Result<Vec<Reply>> {
        let request = |operation| {
            let request = Request {
                session: SessionId::NONE,
                slot: 0,
                sequence: 0,
                at: wall_clock(),
                operation,
            };
            (self.filesystem.id, request)
        };
        let requests = operations.into_iter().map(request).collect();
        self.group.apply(requests).await.map_err(meta_failure)
    }
}

fn is_much(space: Space, freed_bytes: u64) -> bool {
    freed_bytes > 0 && (space.is_short() || freed_bytes >= space.free_bytes / PRESSED_SHARE)
}

/// Neighbours together.
fn runs(ranges: &[(u64, u64)]) -> VecDeque<Run> {
    let mut runs: VecDeque<Run> = VecDeque::new();
    for (address, length) in ranges {
        match runs.back_mut() {
            Some(run) if run.address + run.length == *address => {
                run.length += length;
                run.ranges.push((*address, *length));
            }
            _ => runs.push_back(Run {
                address: *address,
                length: *length,
                ranges: vec![(*address, *length)],
            }),
        }
    }
    runs
}

fn refused(error: namespace::Error) -> Failure {
    Failure::plain(Kind::Failed, error)
}

fn no_answer() -> Failure {
    Failure::plain(Kind::Failed, "the namespace group gave no answer")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn freed_space_is_much_by_what_the_pool_has_free() {
        let space = |free_bytes| Space {
            total_bytes: 1000,
            free_bytes,
        };
        assert!(!is_much(space(800), 49) && is_much(space(800), 50));
        // Short of space.
        assert!(is_much(space(49), 1) && !is_much(space(49), 0));
    }

    #[test]
    fn neighbours_are_discarded_together() {
        let ranges = [(0, 4096), (4096, 8192), (20480, 4096), (24576, 4096)];
        let run = |address, length, ranges: &[(u64, u64)]| Run {
            address,
            length,
            ranges: ranges.to_vec(),
        };
        let right = [run(0, 12288, &ranges[..2]), run(20480, 8192, &ranges[2..])];
        assert_eq!(runs(&ranges), right);
        assert!(runs(&[]).is_empty());
    }
}
