//! Gives back what no file names any more, in sealed segments of the filesystems whose namespace group this
//! node leads.
//!
//! The order is that of decision 0020: the namespace stopped naming it and keeps a record of it as freed; it
//! is discarded, durably; then the record goes. After a crash in between it is discarded once more, which
//! changes nothing. A segment that nothing names is deleted as a whole, with its volume.
//!
//! A host that looked a file up a moment ago may still be about to read what the file named then. So nothing
//! is given back before it has been seen as freed for [`GIVE_BACK_AFTER`], and a read that takes long counts
//! as failed, and looks the file up anew.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use meta::{Filesystem, FilesystemState, Filesystems, NamespaceGroupId, Volume, VolumeState};
use namespace::{
    Answer, FilesystemId, Freed, Operation, Outcome, Query, Reply, Request, SegmentId,
    SegmentState, SessionId,
};

use super::backend::wall_clock;
use super::shown::unfit;
use crate::failure::{Failure, Kind, Result};
use crate::serve::node::{Node, meta_failure};

/// Pause between two looks.
const PAUSE: Duration = Duration::from_secs(5);
/// What is freed stays as it is for so long at least. Nobody reads what was named that long ago.
pub const GIVE_BACK_AFTER: Duration = Duration::from_secs(60);
const _: () = assert!(GIVE_BACK_AFTER.as_secs() > fs_client::LOOK_MAX.as_secs());
/// After each discard this node's reclaim rests so many times as long as that took. Guests' requests come
/// first: the longer they keep a discard waiting, the longer the pause after it.
const REST_FACTOR: u32 = 2;
/// But no longer than this, or a single discard that waited for a node would keep a segment's lease.
const REST_MAX: Duration = Duration::from_secs(1);
/// Freed ranges of a filesystem that are remembered; the others come after these.
const RANGES_MAX: usize = 100_000;
/// Items that are asked for at a time, and operations that are put into one request.
const PAGE: u32 = 1000;

/// What was seen as freed, and since when.
#[derive(Default)]
struct Seen {
    /// Lengths of ranges, by segment and address.
    ranges: BTreeMap<(SegmentId, u64), (u64, Instant)>,
    /// Sealed segments that nothing names.
    empty: BTreeMap<SegmentId, Instant>,
    /// Sealed segments of which nothing is left behind what they have written.
    trimmed: BTreeSet<SegmentId>,
}

/// Goes on for as long as the node lives.
pub fn keep(node: &Arc<Node>) {
    let weak = Arc::downgrade(node);
    tokio::spawn(run(weak));
}

async fn run(weak: Weak<Node>) {
    let mut seen: BTreeMap<FilesystemId, Seen> = BTreeMap::new();
    loop {
        tokio::time::sleep(PAUSE).await;
        let Some(node) = weak.upgrade() else { return };
        if let Err(failure) = node.drop_deleted_segments().await {
            tracing::warn!(%failure, "drop data of deleted segments");
        }
        let mine = node.led_filesystems();
        seen.retain(|id, _| mine.iter().any(|one| one.id == *id));
        for filesystem in mine {
            let seen = seen.entry(filesystem.id).or_default();
            let group = node.meta.filesystems(filesystem.group);
            let reclaim = Reclaim {
                node: &node,
                filesystem: &filesystem,
                group,
            };
            // The lease of a segment whose host is gone runs out soon.
            if let Err(failure) = reclaim.once(seen).await
                && failure.kind != Kind::Conflict
            {
                tracing::warn!(filesystem = %filesystem.name, %failure, "give space of deleted files back");
            }
        }
    }
}

impl Node {
    /// Second half of the deletion of segments' volumes, by whoever leads the cluster.
    async fn drop_deleted_segments(&self) -> Result<()> {
        if self.meta.raft_status().leader != Some(self.meta.node_id()) {
            return Ok(());
        }
        let volumes = self.meta.applied().volumes().map_err(meta_failure)?;
        let is_due = |one: &&Volume| one.segment.is_some() && one.state == VolumeState::Deleting;
        for volume in volumes.iter().filter(is_due) {
            self.drop_data(volume).await?;
        }
        Ok(())
    }

    /// The filesystems whose namespace group this node leads.
    fn led_filesystems(&self) -> Vec<Filesystem> {
        let own = Some(self.meta.node_id());
        let groups = self.meta.namespace_groups().into_iter();
        let led: BTreeSet<NamespaceGroupId> = groups
            .filter(|(_, status)| status.leader == own)
            .map(|(id, _)| id)
            .collect();
        let map = self.meta.map();
        let here = map.filesystems().filter(|one| led.contains(&one.group));
        here.filter(|one| one.state == FilesystemState::Ready)
            .cloned()
            .collect()
    }
}

/// One filesystem's turn.
struct Reclaim<'a> {
    node: &'a Node,
    filesystem: &'a Filesystem,
    group: Filesystems,
}

impl Reclaim<'_> {
    async fn once(&self, seen: &mut Seen) -> Result<()> {
        let segments = self.segments().await?;
        let sealed: BTreeMap<SegmentId, (u64, u64)> = segments
            .into_iter()
            .filter(|(_, segment)| segment.state == SegmentState::Sealed)
            .map(|(id, segment)| (id, (segment.written, segment.live)))
            .collect();
        seen.trimmed.retain(|id| sealed.contains_key(id));
        self.delete_empty(seen, &sealed).await?;
        let freed = self.freed().await?;
        // Not before it was looked: what was freed meanwhile is not older than this.
        let now = Instant::now();
        seen.note(&freed, now);
        let mut last = Ok(());
        for (id, (written, live)) in &sealed {
            let due = seen.due(*id, now);
            // Empty ones go as a whole.
            if *live > 0 && (!due.is_empty() || !seen.trimmed.contains(id)) {
                // One whose lease somebody still has keeps no other from it.
                if let Err(failure) = self.give_back(*id, *written, &due).await {
                    last = Err(failure);
                    continue;
                }
                seen.trimmed.insert(*id);
                for (address, _) in due {
                    seen.ranges.remove(&(*id, address));
                }
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

    async fn delete_empty(
        &self,
        seen: &mut Seen,
        sealed: &BTreeMap<SegmentId, (u64, u64)>,
    ) -> Result<()> {
        let now = Instant::now();
        let is_empty = |id: &SegmentId| sealed.get(id).is_some_and(|(_, live)| *live == 0);
        seen.empty.retain(|id, _| is_empty(id));
        for id in sealed.keys().filter(|id| is_empty(id)) {
            let since = *seen.empty.entry(*id).or_insert(now);
            if now.duration_since(since) < GIVE_BACK_AFTER {
                continue;
            }
            let meta = &self.node.meta;
            let deleted = meta.delete_segment_volume(self.filesystem.id, *id).await;
            deleted.map_err(meta_failure)?;
            while !self.step(Operation::DropSegment { segment: *id }).await? {}
            seen.empty.remove(id);
        }
        Ok(())
    }

    /// Discards ranges of a sealed segment, and what its session wrote behind the last named byte; then
    /// forgets that they were freed.
    async fn give_back(&self, id: SegmentId, written: u64, ranges: &[(u64, u64)]) -> Result<()> {
        let meta = &self.node.meta;
        let found = meta.segment_volume(self.filesystem.id, id).await;
        if let Some(volume) = found.map_err(meta_failure)? {
            let mut whole = joined(ranges);
            whole.push((written, volume.size_bytes.saturating_sub(written)));
            self.discard(&volume, &whole).await?;
        }
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

    async fn discard(&self, volume: &Volume, ranges: &[(u64, u64)]) -> Result<()> {
        let io = self.node.filesystems.io(&self.node.storage).await?;
        let (meta, leases) = (&self.node.meta, &self.node.leases);
        if leases.has(volume.id) {
            // This node's own client has not let go of it yet.
            return Err(Failure::plain(
                Kind::Conflict,
                "the segment is still written",
            ));
        }
        let handle = leases.open(meta, &self.node.storage, volume).await?;
        let mut done = Ok(());
        for (address, length) in ranges.iter().filter(|(_, length)| *length > 0) {
            let begun = Instant::now();
            done = io.discard(&handle, *address, *length).await;
            if done.is_err() {
                break;
            }
            tokio::time::sleep(rest_after(begun.elapsed())).await;
        }
        if done.is_ok() {
            done = io.flush(&handle).await;
        }
        drop(handle);
        leases.give_back(meta, volume.id).await;
        done.map_err(|error| Failure::plain(Kind::Failed, format!("discard: {error}")))
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

impl Seen {
    fn note(&mut self, freed: &[Freed], now: Instant) {
        let mut ranges = BTreeMap::new();
        for one in freed {
            let key = (one.segment, one.address);
            let known = self
                .ranges
                .get(&key)
                .filter(|(length, _)| *length == one.length);
            let since = known.map_or(now, |(_, since)| *since);
            ranges.insert(key, (one.length, since));
        }
        self.ranges = ranges;
    }

    /// Ranges of a segment that may be given back, by address.
    fn due(&self, id: SegmentId, now: Instant) -> Vec<(u64, u64)> {
        let of_segment = self.ranges.range((id, 0)..=(id, u64::MAX));
        let due =
            of_segment.filter(|(_, (_, since))| now.duration_since(*since) >= GIVE_BACK_AFTER);
        due.map(|((_, address), (length, _))| (*address, *length))
            .collect()
    }
}

fn rest_after(discard: Duration) -> Duration {
    discard.saturating_mul(REST_FACTOR).min(REST_MAX)
}

/// Neighbours as one range.
fn joined(ranges: &[(u64, u64)]) -> Vec<(u64, u64)> {
    let mut joined: Vec<(u64, u64)> = Vec::new();
    for (address, length) in ranges {
        match joined.last_mut() {
            Some((from, len)) if *from + *len == *address => *len += length,
            _ => joined.push((*address, *length)),
        }
    }
    joined
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

    fn freed(segment: u64, address: u64, length: u64) -> Freed {
        Freed {
            segment: SegmentId(segment),
            address,
            length,
        }
    }

    #[test]
    fn a_range_is_given_back_once_it_was_freed_for_long() {
        let begin = Instant::now();
        let mut seen = Seen::default();
        seen.note(&[freed(1, 0, 4096), freed(1, 8192, 4096)], begin);
        let later = begin + GIVE_BACK_AFTER;
        // One came back, and one is another than before.
        seen.note(
            &[freed(1, 0, 4096), freed(1, 8192, 8192), freed(2, 0, 4096)],
            later,
        );
        assert_eq!(seen.due(SegmentId(1), later), [(0, 4096)]);
        assert_eq!(seen.due(SegmentId(2), later), []);
        let last = later + GIVE_BACK_AFTER;
        assert_eq!(seen.due(SegmentId(1), last), [(0, 4096), (8192, 8192)]);
        seen.note(&[], last);
        assert_eq!(seen.due(SegmentId(1), last), []);
    }

    #[test]
    fn slow_discards_are_followed_by_long_rests() {
        let rest = |micros| rest_after(Duration::from_micros(micros)).as_micros();
        assert_eq!([rest(0), rest(80), rest(20_000)], [0, 160, 40_000]);
        assert_eq!(rest_after(Duration::from_secs(20)), REST_MAX);
        assert_eq!(rest_after(Duration::MAX), REST_MAX);
    }

    #[test]
    fn neighbours_are_discarded_together() {
        let ranges = [(0, 4096), (4096, 8192), (20480, 4096), (24576, 4096)];
        assert_eq!(joined(&ranges), [(0, 12288), (20480, 8192)]);
        assert_eq!(joined(&[]), []);
    }
}
