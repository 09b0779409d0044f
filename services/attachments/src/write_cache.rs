//! Keeps with an attachment the write cache mode that its guest chose, because a front end that comes back to
//! another process does not say it again.
//!
//! Each record is a durable entry of the metadata log, and a guest may switch as often as it likes. What
//! makes a bound possible is that the two modes are not alike. A guest that is served in writethrough mode
//! though it chose writeback loses speed. A guest that is served in writeback mode though it chose
//! writethrough loses data that it was promised. So:
//!
//! - *To writethrough*: the data path changes at once, and the mode is recorded before the guest is answered,
//!   without any limit. If it is recorded already, nothing is to be done.
//! - *To writeback*: the guest is granted it in any case, and the record may follow later. If the daemon dies
//!   meanwhile, the next one serves the guest in writethrough mode until it chooses again: slower, but safe.
//!   This record is what is limited.
//!
//! A record of writethrough is needed only after one of writeback. So the limit on one bounds both, and no
//! guest ever waits for it. The mode that was chosen last is recorded in the end: by a task, at the latest
//! when the daemon stops.

use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use meta::{AttachmentId, Meta};
use tokio::sync::Mutex;
use vhost_backend::blk::ModeKeeper;

/// Records of writeback mode that an attachment may make at once. Further ones wait for their turn; in
/// between only the last counts.
const BURST: u32 = 4;
/// Time after which it may make one more.
const PAUSE: Duration = Duration::from_secs(2);
/// How long a stopping daemon tries to record a mode that waited. If it fails, the next process serves that
/// guest in writethrough mode.
const CLOSE_MAX: Duration = Duration::from_secs(2);

/// What the next step is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    /// What the guest chose is recorded.
    Nothing,
    /// To record this mode now.
    Record {
        /// Whether it is writeback.
        writeback: bool,
    },
    /// To look again after this time.
    Wait(Duration),
}

/// What a guest chose, what of it is recorded, and how many records it may still cause. No clock and no
/// metadata in here.
#[derive(Debug)]
struct ModeRecord {
    /// Whether the guest wants writeback.
    wanted: bool,
    /// What is recorded; `None` while nobody knows, because an attempt has failed.
    recorded: Option<bool>,
    tokens: u32,
    /// When the first of the missing tokens was taken, or the last one came.
    since: Instant,
}

impl ModeRecord {
    fn new(recorded: bool, now: Instant) -> Self {
        Self {
            wanted: recorded,
            recorded: Some(recorded),
            tokens: BURST,
            since: now,
        }
    }

    /// The guest chooses.
    fn choose(&mut self, writeback: bool, now: Instant) -> Step {
        self.wanted = writeback;
        self.step(now)
    }

    /// What is to be done. A record that is to be made counts as made by halves: its outcome is open until
    /// [`Self::done`].
    fn step(&mut self, now: Instant) -> Step {
        if self.recorded == Some(self.wanted) {
            return Step::Nothing;
        }
        if self.wanted {
            self.refill(now);
            if self.tokens == 0 {
                return Step::Wait((self.since + PAUSE).saturating_duration_since(now));
            }
            if self.tokens == BURST {
                self.since = now;
            }
            self.tokens -= 1;
        }
        self.recorded = None;
        Step::Record {
            writeback: self.wanted,
        }
    }

    fn refill(&mut self, now: Instant) {
        while self.tokens < BURST && now.saturating_duration_since(self.since) >= PAUSE {
            self.tokens += 1;
            self.since += PAUSE;
        }
    }

    /// The record was made.
    fn done(&mut self, writeback: bool) {
        self.recorded = Some(writeback);
    }

    /// The guest was refused writethrough mode: it goes on in writeback mode.
    fn refuse_writethrough(&mut self) {
        self.wanted = true;
    }
}

/// Where modes are recorded: meta, or a test.
trait Recorder: Send + Sync + 'static {
    /// Records a mode. When this fails, nobody knows whether it is recorded.
    fn record(&self, writeback: bool) -> impl Future<Output = Result<(), String>> + Send;
}

/// The record of one attachment in meta.
struct InMeta {
    meta: Meta,
    attachment: AttachmentId,
}

impl Recorder for InMeta {
    async fn record(&self, writeback: bool) -> Result<(), String> {
        let recorded = self.meta.set_write_through(self.attachment, !writeback);
        recorded.await.map(drop).map_err(|e| e.to_string())
    }
}

struct Shared<R> {
    recorder: R,
    /// Held while something is recorded, so that records are made in the order of choices.
    state: Mutex<State>,
}

struct State {
    record: ModeRecord,
    /// A task is going to record what waits.
    is_deferred: bool,
}

/// Keeps the mode of one attachment. When it is dropped, what waits is not recorded any more.
struct Keeper<R> {
    shared: Arc<Shared<R>>,
    /// The session's thread is none of the runtime's.
    runtime: tokio::runtime::Handle,
}

/// See the module.
#[derive(Clone)]
pub(crate) struct WriteCacheKeeper(Arc<Keeper<InMeta>>);

impl WriteCacheKeeper {
    /// For an attachment that has this mode recorded. Is called on the runtime.
    pub(crate) fn new(meta: Meta, attachment: AttachmentId, writeback: bool) -> Self {
        let recorder = InMeta { meta, attachment };
        Self(Arc::new(Keeper::new(recorder, writeback)))
    }
}

impl WriteCacheKeeper {
    /// Goes on from a mode that was recorded elsewhere.
    pub(crate) async fn adopt(&self, writeback: bool) {
        self.0.shared.state.lock().await.record = ModeRecord::new(writeback, Instant::now());
    }
}

/// Records what waits of these, all at once and for a while. Nothing is chosen any more.
pub(crate) async fn close_all(keepers: Vec<WriteCacheKeeper>) {
    let mut closing = tokio::task::JoinSet::new();
    for WriteCacheKeeper(keeper) in keepers {
        closing.spawn(async move { keeper.close().await });
    }
    closing.join_all().await;
}

impl std::fmt::Debug for WriteCacheKeeper {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("WriteCacheKeeper")
            .field("attachment", &self.0.shared.recorder.attachment)
            .finish_non_exhaustive()
    }
}

impl ModeKeeper for WriteCacheKeeper {
    fn keep(&self, writeback: bool) -> Result<(), String> {
        self.0.runtime.block_on(self.0.choose(writeback))
    }
}

impl<R: Recorder> Keeper<R> {
    fn new(recorder: R, writeback: bool) -> Self {
        let state = State {
            record: ModeRecord::new(writeback, Instant::now()),
            is_deferred: false,
        };
        Self {
            shared: Arc::new(Shared {
                recorder,
                state: Mutex::new(state),
            }),
            runtime: tokio::runtime::Handle::current(),
        }
    }

    /// The guest chooses. Only writethrough can fail: writeback needs no record.
    async fn choose(&self, writeback: bool) -> Result<(), String> {
        let mut state = self.shared.state.lock().await;
        match state.record.choose(writeback, Instant::now()) {
            Step::Nothing => return Ok(()),
            Step::Wait(_) => {}
            Step::Record { writeback } => match self.shared.recorder.record(writeback).await {
                Ok(()) => {
                    state.record.done(writeback);
                    return Ok(());
                }
                Err(error) if !writeback => {
                    state.record.refuse_writethrough();
                    self.defer(&mut state);
                    return Err(error);
                }
                Err(error) => tracing::warn!(error, "record the write cache mode later"),
            },
        }
        self.defer(&mut state);
        Ok(())
    }

    /// Has a task record what waits.
    fn defer(&self, state: &mut State) {
        if !std::mem::replace(&mut state.is_deferred, true) {
            let shared = Arc::downgrade(&self.shared);
            self.runtime.spawn(record_later(shared));
        }
    }

    async fn close(&self) {
        let record = async {
            let mut state = self.shared.state.lock().await;
            let ModeRecord {
                wanted, recorded, ..
            } = state.record;
            if recorded == Some(wanted) {
                return;
            }
            match self.shared.recorder.record(wanted).await {
                Ok(()) => state.record.done(wanted),
                Err(error) => tracing::warn!(error, "record the write cache mode"),
            }
        };
        if tokio::time::timeout(CLOSE_MAX, record).await.is_err() {
            tracing::warn!(
                "the write cache mode that a guest chose is not recorded: it begins with writethrough"
            );
        }
    }
}

/// Records what waits, as soon as it may, until what the guest chose last is recorded.
async fn record_later<R: Recorder>(shared: Weak<Shared<R>>) {
    loop {
        // Dropped before the pause: an attachment that is closed needs no record.
        let pause = match shared.upgrade() {
            Some(shared) => shared.record_due().await,
            None => return,
        };
        match pause {
            Some(pause) => tokio::time::sleep(pause).await,
            None => return,
        }
    }
}

impl<R: Recorder> Shared<R> {
    /// Records what waits, if it may now. Returns when to look again.
    async fn record_due(&self) -> Option<Duration> {
        let mut state = self.state.lock().await;
        match state.record.step(Instant::now()) {
            Step::Nothing => {
                state.is_deferred = false;
                None
            }
            Step::Wait(pause) => Some(pause),
            Step::Record { writeback } => match self.recorder.record(writeback).await {
                Ok(()) => {
                    state.record.done(writeback);
                    state.is_deferred = false;
                    None
                }
                Err(error) => {
                    tracing::debug!(error, "record the write cache mode later");
                    Some(PAUSE)
                }
            },
        }
    }
}

#[cfg(test)]
mod tests;
