//! The engine of one data thread: its client, and the ways to replicas.

use std::cell::Cell;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use fabric_replication::client::{Client, ClientAction};
use fabric_types::io::{Engine, IoResult, Request, Submit, Tag};
use rustix::event::{PollFd, PollFlags, poll};

use super::VolumeHandle;
use super::cluster::{MapReader, MetaRequest};
use super::config::FabricError;
use super::shared::Shared;
use super::transport::{NodeTransport, TransportEvent};

/// Answers taken in by one call of `reap`. If there are more it reports one at least, so that the caller does
/// not go to sleep.
const ANSWERS_MAX: u32 = 256;

/// The engine of one data thread.
pub struct FabricEngine {
    client: Client,
    transport: NodeTransport,
    maps: MapReader,
    /// Revocation count last processed.
    revocations: u64,
    /// What ended where nobody could be told.
    ended: Vec<(Tag, IoResult)>,
}

impl FabricEngine {
    /// For one more thread. An engine that `serves` answers other nodes, too.
    pub(super) fn new(shared: &Arc<Shared>, serves: bool) -> Result<Self, FabricError> {
        let transport = NodeTransport::of_thread(shared, serves)?;
        let (maps, map) =
            MapReader::new(&shared.cluster).map_err(FabricError::os("watch the map"))?;
        transport.watch(maps.eventfd().fd())?;
        Ok(Self {
            client: Client::new(transport.index(), map.sets.to_vec()),
            transport,
            maps,
            revocations: 0,
            ended: Vec::new(),
        })
    }

    /// Completes device requests of other threads, for an engine that nobody reaps from now
    /// on.
    pub(crate) fn drain_completions(&mut self) {
        self.transport.local.store().drain_completions();
    }

    /// Applies the newest map and time, before anything else is done: a lease is never older than the map
    /// that it was granted under.
    #[inline]
    fn look_up(&mut self) {
        self.client.set_now_us(self.transport.now_us());
        if self.maps.has_news() {
            self.take_map();
        }
    }

    /// Ends what waits of volumes that were revoked since the last look.
    fn end_revoked(&mut self) {
        let revocations = self.maps.cluster().revocations();
        if std::mem::replace(&mut self.revocations, revocations) == revocations {
            return;
        }
        let ended = &mut self.ended;
        let mut done = |tag, result| ended.push((tag, result));
        self.client.end_revoked(&mut self.transport, &mut done);
        self.transport.kick();
    }

    #[cold]
    fn take_map(&mut self) {
        // That resets the eventfd: later notifications are seen the next time.
        let news = self.maps.news();
        // Before the newer map: nothing of a lease that is another's is sent under that.
        self.end_revoked();
        let Some(news) = news else {
            return;
        };
        let ended = &mut self.ended;
        let mut done = |tag, result| ended.push((tag, result));
        let taken = self.client.on_map(news, &mut self.transport, &mut done);
        if !taken {
            self.maps.tell_again();
        }
        self.transport.kick();
        self.ask();
    }

    /// Passes on what the client asks of meta.
    #[inline]
    fn ask(&mut self) {
        while let Some(action) = self.client.poll_action() {
            let cluster = self.maps.cluster();
            match action {
                ClientAction::ReportFailed { pg, node, epoch } => {
                    cluster.ask(MetaRequest::ReportFailed { pg, node, epoch });
                }
                ClientAction::ReportSlow { pg, node, epoch } => {
                    cluster.ask(MetaRequest::ReportSlow { pg, node, epoch });
                }
                ClientAction::Repaired {
                    pg,
                    node,
                    chunk,
                    block,
                } => tracing::warn!(
                    %pg, %node, ?chunk, block,
                    "a replica's block was damaged and has been written again from another one"
                ),
                ClientAction::UnflushedLost { layer } => tracing::error!(
                    ?layer,
                    "all replicas had lost power, and writes that the guest had not flushed may be gone: its \
                     flush was failed to tell it"
                ),
            }
        }
    }
}

impl Engine for FabricEngine {
    type Volume = VolumeHandle;

    #[inline]
    unsafe fn submit(&mut self, volume: &VolumeHandle, request: &Request<'_>) -> Submit {
        self.look_up();
        self.client
            .submit(&volume.state, request, &mut self.transport)
    }

    #[inline]
    fn has_room(&self, volume: &VolumeHandle) -> bool {
        self.client.has_room(&volume.state)
    }

    #[inline]
    fn kick(&mut self) {
        self.transport.kick();
    }

    #[inline]
    fn reap(&mut self, done: &mut dyn FnMut(Tag, IoResult)) -> usize {
        let reported = Cell::new(0);
        let mut count = |tag, result| {
            reported.set(reported.get() + 1);
            done(tag, result);
        };
        let mut more = self.transport.reap();
        self.look_up();
        for (tag, result) in self.ended.drain(..) {
            count(tag, result);
        }
        if self.transport.tick(self.client.needs_tick()) {
            self.client.on_tick(&mut self.transport, &mut count);
            self.transport.kick();
        }
        let mut answers = 0;
        loop {
            let mut answered = false;
            // What an answer makes the client send may be answered in place, and so on: of a long read of
            // blocks that hold nothing, say. Other queues have their turn meanwhile.
            if answers >= ANSWERS_MAX {
                reported.set(reported.get().max(1));
                break;
            }
            while answers < ANSWERS_MAX {
                let Some(told) = self.transport.next(&mut answered) else {
                    break;
                };
                answers += 1;
                match told {
                    TransportEvent::Reply(node, reply) => {
                        self.client
                            .on_reply(node, &reply, &mut self.transport, &mut count);
                    }
                    TransportEvent::Lost(node) => {
                        self.client.on_lost(node, &mut self.transport, &mut count);
                    }
                }
            }
            if !answered {
                // Nothing to report means that there is nothing: the caller may go to sleep on it.
                if !more || reported.get() > 0 {
                    break;
                }
                more = self.transport.reap();
                continue;
            }
            // An answer may have made the client send the next piece of a range, and nobody else kicks for
            // that one. What is answered in place is looked at here, too: no descriptor would tell of it.
            self.transport.kick();
        }
        self.ask();
        // What came just now may have made a request wait for the next tick.
        self.transport.tick(self.client.needs_tick());
        reported.get()
    }

    #[inline]
    fn in_flight(&self) -> usize {
        self.client.in_flight() + self.ended.len()
    }

    #[inline]
    fn must_reap(&self) -> bool {
        self.in_flight() > 0 || self.transport.must_reap() || self.maps.has_news()
    }

    fn wait_fd(&self) -> BorrowedFd<'_> {
        self.transport.wait_fd()
    }
}

/// How long dropping an engine waits for its requests, whose buffers are in use until they end.
const DROP_WAIT: Duration = Duration::from_secs(30);

/// Pause between two looks while waiting.
const DROP_POLL: rustix::time::Timespec = rustix::time::Timespec {
    tv_sec: 0,
    tv_nsec: 10_000_000,
};

impl Drop for FabricEngine {
    /// Requests that wait for a map are left: nobody uses their buffers.
    fn drop(&mut self) {
        let start = Instant::now();
        self.transport.stop_serving();
        while self.client.unanswered() > 0 || self.transport.serving() > 0 {
            self.kick();
            if self.reap(&mut |_, _| ()) > 0 {
                continue;
            }
            if start.elapsed() > DROP_WAIT {
                tracing::error!(
                    requests = self.in_flight() + self.transport.serving(),
                    "data thread ends with requests that were never answered"
                );
                self.transport.abandon();
                return;
            }
            let fd = self.wait_fd();
            // Interrupted or not, `reap` says what there is.
            let _ = poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&DROP_POLL));
        }
    }
}
