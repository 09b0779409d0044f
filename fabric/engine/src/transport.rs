//! The way to replicas: a call for the one of this node, connections for all others. A node without a network
//! has no connections.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Instant;

use fabric_replication::client::{TICK, Transport};
use fabric_replication::replica::Replica;
use fabric_transport::lane::{Event, Lane};
use fabric_transport::stable_buffers::StableBuffers;
use fabric_types::ids::PeerId;
use fabric_types::{NodeId, Refusal, Reply, Request};
use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create,
    timerfd_settime,
};

use super::cluster::traffic::Counters;
use super::config::FabricError;
use super::shared::Shared;
use super::store_port::StorePorts;
use super::stores::HELD_MAX;
use crate::mem::{LOCAL, MemTransport};

/// What the engine passes on to its client.
#[derive(Debug, Clone, Copy)]
pub enum TransportEvent {
    /// A replica answered.
    Reply(NodeId, Reply),
    /// A node is lost.
    Lost(NodeId),
}

impl TransportEvent {
    /// A node answered, by one of its replicas.
    #[inline]
    fn reply(node: NodeId, reply: Reply) -> Self {
        let (replica, reply) = reply.from_replica(node);
        Self::Reply(replica, reply)
    }
}

/// All ways of one data thread.
pub struct NodeTransport {
    node: NodeId,
    index: usize,
    /// Before `remote`: what its store works on last may lie in memory of requests that came from there.
    pub local: MemTransport,
    /// `None` on a node that is configured without a network.
    remote: Option<Box<Remote>>,
    wake: Wake,
}

/// The peer that the own replica knows when it is given a copy. Connections are numbered from the other end.
const COPIED: PeerId = PeerId(u32::MAX);

/// Connections to other nodes.
struct Remote {
    lane: Lane,
    traffic: Arc<Counters>,
    stable_buffers: StableBuffers,
}

/// Descriptors that wake a thread, and its clock.
struct Wake {
    /// Readable when the store, the lane, the map or the timer has something.
    epoll: OwnedFd,
    timer: OwnedFd,
    /// When the timer that was set goes off.
    due: Option<Instant>,
    /// When the clock began.
    start: Instant,
}

impl NodeTransport {
    /// The ways of one more thread to replicas. One that `serves` answers other nodes, too.
    ///
    /// # Errors
    /// There are too many threads, or the system does not let this one have what it needs.
    pub fn of_thread(shared: &Arc<Shared>, serves: bool) -> Result<Self, FabricError> {
        let lane = shared.take_lane()?;
        let index = lane.index();
        let config = &shared.config;
        let cluster = &shared.cluster;
        let replica = Replica::new(
            config.incarnation,
            Arc::clone(&shared.fences),
            HELD_MAX,
            cluster.peers_of(index),
        );
        let local = MemTransport::new(replica, StorePorts::new(shared, lane)?);
        let wake = Wake::new(cluster.started())?;
        wake.watch(local.store_ref().wait_fd())?;
        let remote = match &shared.network {
            Some(network) => {
                let lane = Lane::new(Arc::clone(network.control()), index, serves)
                    .map_err(FabricError::os("set up a lane"))?;
                wake.watch(lane.wait_fd())?;
                Some(Box::new(Remote {
                    lane,
                    traffic: Arc::clone(&cluster.traffic),
                    stable_buffers: StableBuffers::new(),
                }))
            }
            None => None,
        };
        Ok(Self {
            node: config.node,
            index,
            local,
            remote,
            wake,
        })
    }

    /// Number of the thread that they are of.
    pub fn index(&self) -> usize {
        self.index
    }

    /// Wakes the thread when this is readable, too.
    pub fn watch(&self, fd: BorrowedFd<'_>) -> Result<(), FabricError> {
        self.wake.watch(fd)
    }

    /// Readable when there is something to take in.
    pub fn wait_fd(&self) -> BorrowedFd<'_> {
        self.wake.epoll.as_fd()
    }

    /// Hands everything to devices and sockets.
    #[inline]
    pub fn kick(&mut self) {
        self.local.store().kick();
        if let Some(remote) = &mut self.remote {
            remote.lane.kick();
        }
    }

    /// Whether there may be something to take in although the client awaits nothing.
    #[inline]
    pub fn must_reap(&self) -> bool {
        let store = self.local.store_ref();
        store.awaits_devices()
            || store.must_look()
            || self.remote.as_ref().is_some_and(|r| r.lane.is_active())
    }

    /// Takes in what came; tells whether there is more of it.
    #[inline]
    pub fn reap(&mut self) -> bool {
        if let Some(remote) = &mut self.remote {
            remote.lane.poll();
        }
        self.local.store().reap()
    }

    /// Next thing for the client. What concerns other nodes' requests is done on the way, and counted in
    /// `work`.
    #[inline]
    pub fn next(&mut self, work: &mut bool) -> Option<TransportEvent> {
        while let Some((key, result)) = self.local.store().next_completion() {
            *work = true;
            match self.local.on_store(key, result) {
                Some((LOCAL, reply)) => return Some(TransportEvent::reply(self.node, reply)),
                Some((COPIED, reply)) => {
                    let remote = self.remote.as_mut().expect("it made the copy");
                    return Some(TransportEvent::reply(
                        self.node,
                        remote.stable_buffers.finish(&reply),
                    ));
                }
                Some((_, reply)) => self.answer(&reply),
                None => {}
            }
        }
        self.next_remote(work)
    }

    /// The same for what other nodes say alone.
    #[inline]
    pub fn next_remote(&mut self, work: &mut bool) -> Option<TransportEvent> {
        loop {
            let event = self.remote.as_mut()?.lane.next_event()?;
            *work = true;
            match event {
                Event::Reply(node, reply) => return Some(TransportEvent::reply(node, reply)),
                Event::Lost(node) => return Some(TransportEvent::Lost(node)),
                Event::Request(node, peer, request) => self.serve((node, peer), &request),
            }
        }
    }

    /// To the own replica; a write that others may be sent, too, as a copy.
    #[inline]
    fn send_here(&mut self, request: &Request) -> Option<Reply> {
        let Some(remote) = &mut self.remote else {
            return self.local.send(self.node, request);
        };
        // SAFETY: the client keeps the buffers until the answer.
        let Some(copy) = (unsafe { remote.stable_buffers.copy(request) }) else {
            return self.local.send(self.node, request);
        };
        let answer = match remote.lane.matches(request, &copy) {
            true => self.local.request_of(COPIED, &copy)?,
            false => Reply {
                id: copy.id,
                incarnation: self.local.incarnation(),
                result: Err(Refusal::Mismatch),
            },
        };
        Some(remote.stable_buffers.finish(&answer))
    }

    #[inline]
    fn send_to(&mut self, node: NodeId, request: &Request) -> Option<Reply> {
        if node == self.node {
            return self.send_here(request);
        }
        match &mut self.remote {
            Some(remote) => {
                remote.traffic.asked(self.index);
                remote.lane.send(node, request)
            }
            None => Some(fabric_transport::lane::unreachable(request)),
        }
    }

    #[cold]
    fn send_to_incoming(&mut self, replica: NodeId, request: &Request) -> Option<Reply> {
        let node = replica.base();
        let reply = self.send_to(node, &request.to_replica(replica))?;
        Some(reply.from_replica(node).1)
    }

    fn serve(&mut self, from: (NodeId, PeerId), request: &Request) {
        if let Some(remote) = &self.remote {
            remote.traffic.served(self.index);
        }
        if let Some(reply) = self.local.remote_request(from, request) {
            self.answer(&reply);
        }
    }

    fn answer(&mut self, reply: &Reply) {
        if let Some(remote) = &mut self.remote {
            remote.lane.reply(reply);
        }
    }

    /// Wakes the thread in a moment, if the client wants to be told that time passed; true if that is now.
    #[inline]
    pub fn tick(&mut self, needed: bool) -> bool {
        (needed || self.wake.due.is_some()) && self.wake.tick(needed)
    }

    /// Time by the clients' clock in microseconds.
    #[inline]
    pub fn now_us(&self) -> u64 {
        self.wake.start.elapsed().as_micros() as u64
    }

    /// Requests of other nodes that are being executed.
    pub fn serving(&self) -> usize {
        self.remote.as_ref().map_or(0, |r| r.lane.serving())
    }

    /// Takes no more requests of other nodes.
    pub fn stop_serving(&mut self) {
        if let Some(remote) = &mut self.remote {
            remote.lane.stop_serving();
        }
    }

    /// Leaves the memory of other nodes' requests to a store that never answered them.
    pub fn abandon(&mut self) {
        if let Some(remote) = self.remote.take() {
            Box::leak(remote);
        }
    }
}

impl Wake {
    fn new(start: Instant) -> Result<Self, FabricError> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)
            .map_err(FabricError::os("watch a descriptor"))?;
        let flags = TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK;
        let timer = timerfd_create(TimerfdClockId::Monotonic, flags)
            .map_err(FabricError::os("create a timer"))?;
        let wake = Self {
            epoll,
            timer,
            due: None,
            start,
        };
        wake.watch(wake.timer.as_fd())?;
        Ok(wake)
    }

    fn watch(&self, fd: BorrowedFd<'_>) -> Result<(), FabricError> {
        epoll::add(&self.epoll, fd, EventData::new_u64(0), EventFlags::IN)
            .map_err(FabricError::os("watch a descriptor"))
    }

    fn tick(&mut self, needed: bool) -> bool {
        // The clock spares asking the timer, which is there to wake a thread that sleeps.
        let now = Instant::now();
        let due = self.due.is_some_and(|due| due <= now);
        if due {
            self.due = None;
            let mut count = [0u8; 8];
            // Nothing to read yet: then it wakes the thread once for nothing.
            let _ = rustix::io::read(&self.timer, &mut count);
        }
        if needed && self.due.is_none() {
            let zero = Timespec {
                tv_sec: 0,
                tv_nsec: 0,
            };
            let spec = Itimerspec {
                it_interval: zero,
                it_value: Timespec {
                    tv_nsec: i64::from(TICK.subsec_nanos()),
                    ..zero
                },
            };
            match timerfd_settime(&self.timer, TimerfdTimerFlags::empty(), &spec) {
                Ok(_) => self.due = Some(now + TICK),
                Err(error) => tracing::error!(%error, "cannot set a timer; requests may wait"),
            }
        }
        due
    }
}

impl Transport for NodeTransport {
    #[inline]
    fn send(&mut self, node: NodeId, request: &Request) -> Option<Reply> {
        if node.is_incoming() {
            return self.send_to_incoming(node, request);
        }
        self.send_to(node, request)
    }
}
