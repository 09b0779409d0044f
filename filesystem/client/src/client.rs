//! A filesystem on this host, shared by the mounts of its guests.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use fs_capabilities::{GuestId, Settings};
use fuse_codec::Errno;
use namespace::Ino;

use crate::access_times::AccessTimes;
use crate::backend::Backend;
use crate::buffer::Buffer;
use crate::cache::{Cache, Limits};
use crate::caller::Caller;
use crate::counters::{ClientCounters, Counters};
use crate::data_cache::{DataCache, FilesystemData, ReadAhead};
use crate::mount::Mount;
use crate::open_inodes::OpenInodes;
use crate::segment_writer::SEGMENT_BYTES;
use crate::session::Sessions;
use crate::sync::{KeyedLocks, Semaphore, Signal, lock};
use crate::throttle::Throttle;

/// How a client works.
#[derive(Debug, Clone)]
pub struct ClientOptions {
    /// Operations of the namespace that are under way at a time; more wait. At most
    /// [`namespace::SLOTS_MAX`].
    pub operations_max: usize,
    /// Writes of file data that are under way at a time; more wait. Their data are in memory twice, and once
    /// more if they are to be cached.
    pub writes_max: usize,
    /// Bytes that guests have written and that are not committed yet, at most; more writes wait. 0: each
    /// write is committed before it is answered. Others see what is buffered only through a leader that has
    /// hosts write it back before it tells of a file
    /// ([`Coordinator::tell`](fs_capabilities::Coordinator::tell)), and that knows in which directory
    /// a file is ([`Coordinator::take`](fs_capabilities::Coordinator::take)): with any
    /// other leader this has to be 0.
    pub dirty_bytes_max: u64,
    /// Bytes of a segment: a multiple of the chunk's 4 MiB, at most [`namespace::SEGMENT_LENGTH_MAX`].
    pub segment_bytes: u64,
    /// Inodes that are cached at most. Directories and files that were not used for long are given up.
    pub cached_inodes_max: usize,
    /// Names that are cached at most.
    pub cached_names_max: usize,
    /// Where file data are cached: one cache for all clients of the host. Besides its bytes, each client has
    /// up to 16 MiB under way that it reads ahead.
    pub data_cache: Arc<DataCache>,
    /// Times that all hosts and the leader agree on.
    pub capabilities: Settings,
    /// A mistake that tests have to notice.
    #[cfg(feature = "testing")]
    pub mistake: Option<crate::cache::Mistake>,
}

/// Bytes that are buffered at most, where nothing else is wanted.
pub const DIRTY_BYTES_MAX: u64 = 64 << 20;

impl Default for ClientOptions {
    fn default() -> Self {
        Self {
            operations_max: 256,
            writes_max: 128,
            dirty_bytes_max: 0,
            segment_bytes: SEGMENT_BYTES,
            cached_inodes_max: 1 << 18,
            cached_names_max: 1 << 19,
            data_cache: DataCache::new(0),
            capabilities: Settings::default(),
            #[cfg(feature = "testing")]
            mistake: None,
        }
    }
}

/// A filesystem on this host.
pub struct Client<B: Backend> {
    pub(crate) backend: B,
    pub(crate) options: ClientOptions,
    pub(crate) sessions: Sessions,
    pub(crate) cache: Arc<Cache>,
    pub(crate) buffer: Arc<Buffer>,
    /// File data that are cached.
    pub(crate) data: FilesystemData,
    pub(crate) read_ahead: ReadAhead,
    /// Directories whose listing is being loaded.
    pub(crate) loading: KeyedLocks<Ino>,
    /// Guests that were attached.
    guests: AtomicU64,
    pub(crate) open: Arc<OpenInodes>,
    /// Files whose content is being changed here.
    pub(crate) changing: KeyedLocks<Ino>,
    /// Bounds the data that are being written.
    pub(crate) writes: Semaphore,
    pub(crate) throttle: Throttle,
    pub(crate) access_times: AccessTimes,
    pub(crate) life: Life,
    pub(crate) counters: Counters,
}

impl<B: Backend> Client<B> {
    /// A client of one filesystem. Opens its session at the first change or open, or when it would have use
    /// of caching.
    ///
    /// # Panics
    /// If the options are not within their bounds.
    pub fn new(backend: B, options: ClientOptions) -> Arc<Self> {
        let is_whole = options.segment_bytes % crate::segment_writer::CHUNK_BYTES == 0;
        let is_bounded = options.segment_bytes <= namespace::SEGMENT_LENGTH_MAX;
        assert!(is_whole && is_bounded && options.segment_bytes > 0);
        assert!(options.writes_max > 0 && options.operations_max > 0);
        let buffer = Buffer::new(options.dirty_bytes_max);
        let limits = Limits {
            names_max: options.cached_names_max,
            inodes_max: options.cached_inodes_max,
            settings: options.capabilities.clone(),
            #[cfg(feature = "testing")]
            mistake: options.mistake,
        };
        let cache = Cache::new(limits, Arc::clone(&buffer));
        let data = options.data_cache.register(
            #[cfg(feature = "testing")]
            options.mistake,
        );
        Arc::new(Self {
            backend,
            cache,
            buffer,
            data,
            read_ahead: ReadAhead::default(),
            loading: KeyedLocks::default(),
            guests: AtomicU64::new(0),
            sessions: Sessions::new(),
            open: OpenInodes::new(
                #[cfg(feature = "testing")]
                options.mistake,
            ),
            changing: KeyedLocks::default(),
            writes: Semaphore::new(options.writes_max),
            throttle: Throttle::new(),
            options,
            access_times: AccessTimes::default(),
            life: Life::default(),
            counters: Counters::new(),
        })
    }

    /// What it was made with.
    pub fn backend(&self) -> &B {
        &self.backend
    }

    /// A guest's mount.
    pub fn attach(self: &Arc<Self>, read_only: bool) -> Mount<B> {
        // 0 is the host itself.
        let guest = GuestId(self.guests.fetch_add(1, Ordering::Relaxed) + 1);
        Mount::new(Arc::clone(self), guest, read_only)
    }

    /// What was done so far.
    pub fn counters(&self) -> ClientCounters {
        let (figures, buffered) = (self.cache.figures(), self.buffer.figures());
        ClientCounters {
            recalls: figures.recalls,
            capabilities: figures.capabilities,
            dirty_bytes: self.buffer.room.used(),
            written_back_bytes: buffered.written_back,
            write_backs: buffered.commits,
            write_back_failures: buffered.failures,
            lost_bytes: buffered.lost,
            ..self.counters.get()
        }
    }

    /// Notes that this session holds an inode without a name.
    pub(crate) fn note_orphan(&self, ino: Ino) {
        let found = self.open.moment();
        self.open.note_orphan(self.backend.monotonic(), ino, found);
    }

    /// The client on behalf of a guest.
    pub(crate) fn caller(&self, guest: GuestId) -> Caller<'_, B> {
        Caller::new(self, guest)
    }

    /// Files and directories that guests have open.
    pub fn open_inodes(&self) -> usize {
        self.open.len()
    }

    /// Ends the client: new requests get EIO, those under way are finished, what is buffered is written back,
    /// segments are sealed, and [`Client::run`] returns. Call it once all guests have unmounted.
    pub async fn shutdown(&self) {
        self.life.close();
        loop {
            let idle = self.life.idle.listen();
            if self.life.is_idle() {
                break;
            }
            // A signal that is gone is one that came.
            let _ = idle.await;
        }
        self.end_buffer().await;
        if let Some(session) = self.sessions.current() {
            // A segment may have been begun. What cannot be done now is done when the session is ended.
            let _ = self.settle_doubts(&session).await;
            session.segments.retire_current();
            session.segments.seal_retired(self, &session).await;
        }
        self.close_former_sessions().await;
        self.say_farewell().await;
    }

    /// Waits before a try is repeated. Hosts that are in each other's way wait for different times.
    pub(crate) async fn pause(&self, tries: u32) {
        let session = self.sessions.current().map_or(0, |session| session.id.0);
        let longest_us = 1_000_u64 << tries.min(6);
        let spread = (session * 7 + u64::from(tries) * 13) % 16;
        let pause_us = longest_us / 2 + longest_us * spread / 32;
        self.backend.sleep(Duration::from_micros(pause_us)).await;
    }
}

/// Requests under way, and whether new ones are taken.
#[derive(Default)]
pub(crate) struct Life {
    state: Mutex<LifeState>,
    idle: Signal,
    /// It is being ended.
    pub(crate) closing: Signal,
}

#[derive(Default)]
struct LifeState {
    under_way: usize,
    is_closing: bool,
}

/// A request under way.
pub(crate) struct UnderWay<'a>(&'a Life);

impl Life {
    pub(crate) fn enter(&self) -> Result<UnderWay<'_>, Errno> {
        let mut state = lock(&self.state);
        if state.is_closing {
            return Err(Errno::EIO);
        }
        state.under_way += 1;
        Ok(UnderWay(self))
    }

    fn close(&self) {
        lock(&self.state).is_closing = true;
        self.closing.notify();
    }

    fn is_idle(&self) -> bool {
        lock(&self.state).under_way == 0
    }

    pub(crate) fn is_closing(&self) -> bool {
        lock(&self.state).is_closing
    }
}

impl Drop for UnderWay<'_> {
    fn drop(&mut self) {
        let mut state = lock(&self.0.state);
        state.under_way -= 1;
        if state.under_way == 0 {
            drop(state);
            self.0.idle.notify();
        }
    }
}
