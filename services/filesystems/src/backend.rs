//! What a filesystem's client on this node needs: the leader of its namespace group, and its segments.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use api::failure::{Kind, Result};
use fabric_types::io::IoError;
use fs_capabilities::{ToHolder, ToManager};
use fs_client::{
    Answered, ApplyError, Clock, DataError, Leader, LinkBroken, Reader, SegmentStore, Space,
    Unavailable,
};
use meta::{
    Answers, Epoch, Filesystem, Filesystems, LinkCall, LinkReply, Meta, MetaError, SessionLink,
    VolumeId,
};
use namespace::{Answer, Operation, Outcome, Query, Reply, Request, SegmentId, SessionId, Time};
use service::waiting::until;

use storage::{Handle, Storage};
use volumes::Leases;

use crate::segment_io::SegmentIo;
use crate::segments::Readers;

/// A session that is being ended is looked for again after this.
const SESSION_PAUSE: Duration = Duration::from_millis(500);
/// A group without a leader is asked again after this.
const LEADER_PAUSE: Duration = Duration::from_secs(1);
/// A read that takes longer counts as failed, and its file is looked up again: the segment may be deleted by
/// then, and other replicas hold what the file names now.
const READ_MAX: Duration = Duration::from_secs(20);
/// A map that a read needs is there by then, or its file is looked up anew.
const MAP_WAIT: Duration = Duration::from_secs(5);
/// Pause before it is looked whether a segment's writes have ended.
const CLOSE_PAUSE: Duration = Duration::from_millis(10);

/// Parts of the node that serve all its filesystems.
#[derive(Clone)]
pub struct Parts {
    pub(crate) meta: Meta,
    pub(crate) storage: Arc<Storage>,
    pub(crate) leases: Arc<Leases>,
    pub(crate) io: Arc<SegmentIo>,
    /// The node ends: nobody waits for a leader any more.
    pub(crate) is_closing: Arc<AtomicBool>,
}

/// A segment that this node writes.
#[derive(Clone)]
struct Writing {
    volume: VolumeId,
    handle: Handle,
    /// One reference for each request under way, and one for this.
    users: Arc<()>,
}

/// One filesystem, for its client on this node.
pub struct ClusterBackend {
    parts: Parts,
    filesystem: Filesystem,
    group: Filesystems,
    /// Name of the pool that its data lie in.
    pool: String,
    writing: Mutex<BTreeMap<SegmentId, Writing>>,
    readers: Readers,
    space: Mutex<Option<Space>>,
    /// What the client's monotonic clock counts from.
    start: Instant,
}

impl ClusterBackend {
    /// For a filesystem, whose data lie in the pool of this name.
    pub fn new(parts: Parts, filesystem: Filesystem, pool: String) -> Self {
        Self {
            group: parts.meta.filesystems(filesystem.group),
            readers: Readers::new(parts.clone(), filesystem.id),
            parts,
            filesystem,
            pool,
            writing: Mutex::default(),
            space: Mutex::default(),
            start: Instant::now(),
        }
    }

    /// Name of the filesystem.
    pub fn name(&self) -> &str {
        &self.filesystem.name
    }

    /// Name of the pool that its data lie in.
    pub fn pool(&self) -> &str {
        &self.pool
    }

    /// What is known of the pool's space from now on.
    pub fn set_space(&self, space: Option<Space>) {
        *self.space.lock().unwrap_or_else(PoisonError::into_inner) = space;
    }

    /// Whether the filesystem was not deleted.
    async fn is_there(&self) -> std::result::Result<bool, Unavailable> {
        let answered = self.read(Query::Statistics, None).await?;
        Ok(matches!(answered.answer, Ok(Answer::Statistics(Some(_)))))
    }

    /// Asks the group until somebody leads it.
    async fn until_led<T, F>(
        &self,
        what: &str,
        ask: impl Fn() -> F,
    ) -> std::result::Result<T, Unavailable>
    where
        F: Future<Output = std::result::Result<T, MetaError>>,
    {
        loop {
            match ask().await {
                Ok(answer) => return Ok(answer),
                Err(MetaError::NoGroupLeader { .. }) => {}
                Err(error) => {
                    tracing::warn!(filesystem = %self.filesystem.name, %error, "{what}");
                    return Err(Unavailable);
                }
            }
            self.pause(LEADER_PAUSE).await?;
        }
    }

    /// Says something on a link. Whatever comes in between, the client begins another one.
    async fn on_link(&self, call: LinkCall) -> std::result::Result<LinkReply, LinkBroken> {
        let replied = self.group.link(self.filesystem.id, call).await;
        replied.map_err(|error| {
            tracing::debug!(filesystem = %self.filesystem.name, %error, "a session's link");
            LinkBroken
        })
    }

    fn time(&self, at: Instant) -> fs_capabilities::Instant {
        let since = at.saturating_duration_since(self.start).as_nanos();
        fs_capabilities::Instant::from_nanos(u64::try_from(since).unwrap_or(u64::MAX))
    }

    /// Waits before something is tried again; an error if the node ends.
    async fn pause(&self, pause: Duration) -> std::result::Result<(), Unavailable> {
        if self.parts.is_closing.load(Ordering::Acquire) {
            return Err(Unavailable);
        }
        tokio::time::sleep(pause).await;
        Ok(())
    }

    fn writing(&self) -> MutexGuard<'_, BTreeMap<SegmentId, Writing>> {
        self.writing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn writer(&self, segment: SegmentId) -> Option<Writing> {
        self.writing().get(&segment).cloned()
    }

    /// Lets go of segments whose leases are lost. Their next writes fail.
    pub fn let_go_of_lost(&self) {
        let lost = self.parts.leases.lost();
        self.writing().retain(|_, writing| {
            let is_lost = lost.contains(&writing.volume);
            if is_lost {
                self.parts.leases.end(writing.volume);
            }
            !is_lost
        });
    }

    async fn begin_segment(&self, segment: SegmentId) -> Result<Writing> {
        let meta = &self.parts.meta;
        let size_bytes = fs_client::SEGMENT_BYTES;
        let made = meta.create_segment_volume(self.filesystem.id, segment, size_bytes);
        let volume = made.await.map_err(service::failures::meta_failure)?;
        let leases = &self.parts.leases;
        let handle = leases.open(meta, &self.parts.storage, &volume).await?;
        Ok(Writing {
            volume: volume.id,
            handle,
            users: Arc::default(),
        })
    }

    async fn read_from(
        &self,
        segment: SegmentId,
        (address, length): (u64, u64),
        epoch: u64,
    ) -> std::result::Result<Vec<u8>, DataError> {
        let len = usize::try_from(length).map_err(|_| DataError::Io)?;
        // What is committed needs no lease.
        let writing = self.writer(segment);
        let handle = match writing.filter(|writing| !writing.handle.is_revoked()) {
            Some(writing) => writing.handle,
            None => self.readers.get(segment).await?,
        };
        let fabric = self.parts.storage.fabric();
        if !fabric.wait_for_map(Epoch(epoch), Duration::ZERO) {
            let is_new = until(|| fabric.map_epoch() >= Epoch(epoch));
            let waited = tokio::time::timeout(MAP_WAIT, is_new).await;
            waited.map_err(|_| DataError::Late)?;
        }
        let read = self.parts.io.read(&handle, address, len).await;
        read.map_err(|error| {
            // Its volume may be another's by now, or gone.
            self.readers.forget(segment);
            failed("read", segment, error)
        })
    }
}

/// Now, as requests to the namespace carry it.
pub fn wall_clock() -> Time {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    let since = since.unwrap_or_default();
    Time {
        seconds: i64::try_from(since.as_secs()).unwrap_or(i64::MAX),
        nanoseconds: since.subsec_nanos(),
    }
}

fn failed(verb: &str, segment: SegmentId, error: IoError) -> DataError {
    match error {
        IoError::NoSpace => DataError::NoSpace,
        IoError::Fenced => DataError::Fenced,
        error => {
            tracing::warn!(?segment, %error, "cannot {verb} file data");
            DataError::Io
        }
    }
}

impl Leader for ClusterBackend {
    async fn apply(&self, request: Request) -> std::result::Result<Reply, ApplyError> {
        let mut may_be_done = false;
        loop {
            let requests = vec![(self.filesystem.id, request.clone())];
            match self.group.apply_repeated(requests).await {
                Ok(done) => {
                    may_be_done |= done.may_be_repeated;
                    let reply = done.replies.into_iter().next().ok_or(Unavailable)?;
                    return match reply {
                        Err(namespace::Error::Stale) if may_be_done => Err(Unavailable.into()),
                        reply => Ok(reply),
                    };
                }
                Err(MetaError::NoGroupLeader { .. }) => may_be_done = true,
                Err(MetaError::NoSpace { begun: false, .. }) if !may_be_done => {
                    return Err(ApplyError::NoSpace);
                }
                Err(error) => {
                    tracing::warn!(filesystem = %self.filesystem.name, %error, "change a filesystem");
                    return Err(Unavailable.into());
                }
            }
            self.pause(LEADER_PAUSE).await?;
        }
    }

    async fn read(
        &self,
        query: Query,
        reader: Option<Reader>,
    ) -> std::result::Result<Answered, Unavailable> {
        let filesystem = self.filesystem.id;
        let ask = async || {
            let queries = vec![(filesystem, query.clone())];
            let Some(Reader { session, link }) = reader else {
                let answers = self.group.read(queries).await?;
                return Ok(Answers {
                    sent: None,
                    answers,
                });
            };
            let reader = SessionLink {
                filesystem,
                session,
                link,
            };
            self.group.read_as(reader, queries).await
        };
        let answers = self.until_led("read a filesystem", ask).await?;
        let sent = answers.sent;
        let answer = answers.answers.into_iter().next().ok_or(Unavailable)?;
        Ok(Answered { answer, sent })
    }

    async fn leader_term(&self) -> std::result::Result<u64, Unavailable> {
        let ask = || self.group.link(self.filesystem.id, LinkCall::Term);
        match self.until_led("find the leader", ask).await? {
            LinkReply::Term(term) => Ok(term),
            _ => Err(Unavailable),
        }
    }

    async fn send(
        &self,
        Reader { session, link }: Reader,
        first: u64,
        messages: Vec<ToManager>,
    ) -> std::result::Result<(), LinkBroken> {
        let send = LinkCall::Send {
            session,
            link,
            first,
            messages,
        };
        match self.on_link(send).await? {
            LinkReply::Taken => Ok(()),
            _ => Err(LinkBroken),
        }
    }

    async fn receive(
        &self,
        Reader { session, link }: Reader,
        behind: u64,
    ) -> std::result::Result<Vec<ToHolder>, LinkBroken> {
        let receive = LinkCall::Receive {
            session,
            link,
            behind,
        };
        match self.on_link(receive).await? {
            LinkReply::Messages(messages) => Ok(messages),
            _ => Err(LinkBroken),
        }
    }

    fn lease_until(&self) -> Option<fs_capabilities::Instant> {
        let until = self.parts.meta.heartbeat_valid_until();
        until.map(|until| self.time(until))
    }

    async fn open_session(&self) -> std::result::Result<SessionId, Unavailable> {
        let meta = &self.parts.meta;
        loop {
            let request = Request {
                session: SessionId::NONE,
                slot: 0,
                sequence: 0,
                at: self.now(),
                operation: Operation::OpenSession {
                    node: meta.node_id().0,
                    incarnation: u128::from(meta.incarnation().0),
                },
            };
            match self.apply(request).await {
                Ok(Ok(Outcome::Session(session))) => return Ok(session),
                // The former one is being ended; or there is nothing to open a session of.
                Ok(Err(namespace::Error::Stale)) => {
                    if !self.is_there().await? {
                        return Err(Unavailable);
                    }
                }
                Ok(reply) => {
                    tracing::warn!(filesystem = %self.filesystem.name, ?reply, "open a session");
                    return Err(Unavailable);
                }
                Err(_) => return Err(Unavailable),
            }
            self.pause(SESSION_PAUSE).await?;
        }
    }
}

impl SegmentStore for ClusterBackend {
    async fn create_segment(&self, segment: SegmentId) -> std::result::Result<(), DataError> {
        match self.begin_segment(segment).await {
            Ok(writing) => {
                self.writing().insert(segment, writing);
                Ok(())
            }
            Err(failure) => {
                tracing::warn!(filesystem = %self.filesystem.name, %failure, "begin a segment");
                Err(match failure.kind {
                    Kind::NoSpace => DataError::NoSpace,
                    _ => DataError::Io,
                })
            }
        }
    }

    async fn close_segment(&self, segment: SegmentId) {
        let Some(writing) = self.writing().remove(&segment) else {
            return;
        };
        while Arc::strong_count(&writing.users) > 1 {
            tokio::time::sleep(CLOSE_PAUSE).await;
        }
        let (meta, leases) = (&self.parts.meta, &self.parts.leases);
        leases.give_back(meta, writing.volume).await;
    }

    async fn write(
        &self,
        segment: SegmentId,
        address: u64,
        data: Vec<u8>,
    ) -> std::result::Result<(), DataError> {
        let writing = self.writer(segment).ok_or(DataError::Fenced)?;
        let io = Arc::clone(&self.parts.io);
        // It is not cut off with the request that it is for.
        let write = tokio::spawn(async move {
            let _user = Arc::clone(&writing.users);
            io.write(&writing.handle, address, data).await
        });
        let written = write.await.map_err(|_| DataError::Io)?;
        written.map_err(|error| failed("write", segment, error))
    }

    async fn flush(&self, segment: SegmentId) -> std::result::Result<u64, DataError> {
        let writing = self.writer(segment).ok_or(DataError::Fenced)?;
        let flushed = self.parts.io.flush(&writing.handle).await;
        flushed.map_err(|error| failed("flush", segment, error))?;
        Ok(self.parts.storage.fabric().map_epoch().0)
    }

    async fn read_data(
        &self,
        segment: SegmentId,
        address: u64,
        length: u64,
        epoch: u64,
    ) -> std::result::Result<Vec<u8>, DataError> {
        let begun = Instant::now();
        let read = self.read_from(segment, (address, length), epoch);
        match tokio::time::timeout(READ_MAX, read).await {
            Ok(read) if begun.elapsed() < READ_MAX => read,
            // Replicas or metadata are waited for, as a disk does.
            _ if !self.parts.is_closing.load(Ordering::Acquire) => Err(DataError::Late),
            _ => Err(DataError::Io),
        }
    }

    fn space(&self) -> Option<Space> {
        if self.parts.is_closing.load(Ordering::Acquire) {
            return None;
        }
        *self.space.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Clock for ClusterBackend {
    fn monotonic(&self) -> fs_capabilities::Instant {
        self.time(Instant::now())
    }

    fn now(&self) -> Time {
        wall_clock()
    }

    async fn sleep(&self, duration: Duration) {
        tokio::time::sleep(duration).await;
    }
}
