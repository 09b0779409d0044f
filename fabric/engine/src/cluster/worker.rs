//! The thread that does what the cluster asks of a node beside guests' requests: it takes volumes over for
//! new leases ([`Takeover`]), and brings this node's replicas up to date ([`Rounds`]).

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use fabric_replication::lease_recovery;
use fabric_replication::replica::StorePort;
use fabric_replication::resync::rounds::{Action, Failing, Rounds, Token, Totals};
use fabric_replication::volume::VolumeState;
use fabric_transport::inbox::EventFd;
use fabric_types::slab::Slab;
use fabric_types::{Command, Request};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::time::Timespec;

use super::pace::{PAGE_BYTES, Pace, Work};
use super::requests::Requests;
use super::takeover::{self, Takeover};
use super::{Cluster, MapReader, MetaRequest};
use crate::config::FabricError;
use crate::shared::Shared;
use crate::stores::{HELD_MAX, Stores};
use crate::transport::NodeTransport;

/// How often machines that wait for a moment are told that it passed, and how long the thread sleeps when the
/// pace holds it back.
const TICK: Duration = lease_recovery::TICK;
/// How long an idle thread sleeps at most.
const IDLE: Duration = Duration::from_secs(1);
/// Commands begun in one turn, so that answers are looked at in between.
const BEGUN_MAX: u32 = 256;
/// How much the thread steps back.
const NICENESS: i32 = 10;
/// How long the end of the thread waits for requests whose memory is in use.
const END_WAIT: Duration = Duration::from_secs(30);

/// What others tell the thread.
#[derive(Default)]
struct WorkerInbox {
    taken_over: Vec<Takeover>,
}

/// The way to the thread, shared.
struct WorkerHandle {
    inbox: Mutex<WorkerInbox>,
    eventfd: EventFd,
    stop: AtomicBool,
    told: Arc<Mutex<Told>>,
}

/// What the thread tells others.
#[derive(Debug, Clone, Copy, Default)]
struct Told {
    totals: Totals,
    failing: Option<Failing>,
}

/// The running thread. Dropping it ends it.
pub struct Worker {
    handle: Arc<WorkerHandle>,
    thread: Mutex<Option<JoinHandle<()>>>,
    numbers: std::sync::atomic::AtomicU64,
}

impl Worker {
    /// Starts the thread.
    pub fn start(shared: &Arc<Shared>, cluster: &Arc<Cluster>) -> Result<Self, FabricError> {
        let handle = Arc::new(WorkerHandle {
            inbox: Mutex::default(),
            eventfd: EventFd::new().map_err(FabricError::os("create an eventfd"))?,
            stop: AtomicBool::new(false),
            told: Arc::default(),
        });
        let state = State::new(shared, cluster, Arc::clone(&handle))?;
        let thread = std::thread::Builder::new()
            .name("penstock-resync".into())
            .spawn(move || {
                // Guests go first, as beside the maintenance thread. Takeovers are rare and need little.
                let _ = rustix::process::nice(NICENESS);
                state.run();
            })
            .map_err(FabricError::os("start the thread for takeovers and resync"))?;
        Ok(Self {
            handle,
            thread: Mutex::new(Some(thread)),
            numbers: std::sync::atomic::AtomicU64::new(1),
        })
    }

    /// Takes a volume over under its new lease; it is served once lease recovery is complete.
    pub fn take_over(&self, volume: &Arc<VolumeState>) {
        let number = self.numbers.fetch_add(1, Ordering::Relaxed);
        let mut inbox = self.handle.inbox.lock().expect("no panic under this lock");
        inbox.taken_over.push(Takeover::new(number, volume));
        drop(inbox);
        self.handle.eventfd.signal();
    }

    /// What rounds have done since the start.
    pub fn totals(&self) -> Totals {
        self.told().totals
    }

    /// Groups whose rounds fail, if there are any. Time is the cluster's.
    pub fn failing(&self) -> Option<Failing> {
        self.told().failing
    }

    fn told(&self) -> Told {
        *self.handle.told.lock().expect("no panic under this lock")
    }

    /// Ends the thread.
    pub fn stop(&self) {
        let thread = self.thread.lock().expect("no panic under this lock").take();
        if let Some(thread) = thread {
            self.handle.stop.store(true, Ordering::Release);
            self.handle.eventfd.signal();
            if thread.join().is_err() {
                tracing::error!("the thread for takeovers and resync panicked");
            }
        }
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.stop();
    }
}

struct State {
    cluster: Arc<Cluster>,
    reader: MapReader,
    stores: Option<Arc<Stores>>,
    handle: Arc<WorkerHandle>,
    /// The store behind it is the rounds': what it finishes is named by `local`.
    rounds_ways: Requests<Token>,
    /// The way of rounds to this node's own replicas: what moves from one of its devices to another.
    home_ways: Requests<Token>,
    local: Slab<Token>,
    rounds: Rounds,
    pace: Pace,
    /// Whether the pace has been told of the time that passes.
    is_pacing: bool,
    takeover_ways: Requests<takeover::Token>,
    takeovers: Vec<Takeover>,
    ticked: Instant,
}

impl State {
    fn new(
        shared: &Arc<Shared>,
        cluster: &Arc<Cluster>,
        handle: Arc<WorkerHandle>,
    ) -> Result<Self, FabricError> {
        let (mut reader, _) = MapReader::new(cluster).map_err(FabricError::os("watch the map"))?;
        reader.tell_again();
        let peer_routes =
            || -> Result<NodeTransport, FabricError> { NodeTransport::of_thread(shared, false) };
        let now = Instant::now();
        let me = (cluster.node, cluster.incarnation);
        let (groups, fences) = (Arc::clone(&cluster.groups), Arc::clone(&shared.fences));
        Ok(Self {
            cluster: Arc::clone(cluster),
            reader,
            stores: shared.stores.clone(),
            rounds: Rounds::new(me, groups, fences, cluster.unresolved()),
            handle,
            rounds_ways: Requests::new(peer_routes()?),
            home_ways: Requests::new(peer_routes()?),
            local: Slab::new(HELD_MAX, Token::default),
            pace: Pace::new(shared.config.resync, Work::default(), now),
            is_pacing: false,
            takeover_ways: Requests::new(peer_routes()?),
            takeovers: Vec::new(),
            ticked: now,
        })
    }

    fn run(mut self) {
        while !self.handle.stop.load(Ordering::Acquire) {
            let now = Instant::now();
            self.clear(now);
            let worked = self.turn(now);
            if !worked {
                self.sleep(now);
            }
        }
        self.end();
    }

    /// Takes in maps, volumes and time.
    fn clear(&mut self, now: Instant) {
        if self.handle.eventfd.is_signalled() {
            self.handle.eventfd.clear();
            let mut inbox = self.handle.inbox.lock().expect("no panic under this lock");
            let map = self.cluster.map();
            for mut takeover in std::mem::take(&mut inbox.taken_over) {
                takeover.on_map(&map);
                self.takeovers.push(takeover);
            }
        }
        if self.reader.news().is_some() {
            let map = self.cluster.map();
            self.rounds.on_map(&map.sets, self.cluster.us_at(now));
            self.takeovers
                .iter_mut()
                .for_each(|takeover| takeover.on_map(&map));
        }
        if now - self.ticked >= TICK {
            self.ticked = now;
            self.takeovers.iter_mut().for_each(Takeover::on_tick);
        }
        let now_us = self.cluster.us_at(now);
        if let Some(stores) = &self.stores {
            let found = stores.damage.take();
            if !found.is_empty() {
                let map = self.cluster.map();
                self.rounds.on_bad_blocks(&found, &map.sets, now_us);
            }
        }
        let wake = self.rounds.wake_at(now_us);
        if wake.is_some_and(|wake| wake <= now_us) {
            self.rounds.on_time(now_us);
        }
    }

    fn turn(&mut self, now: Instant) -> bool {
        let mut worked = self.turn_takeovers();
        worked |= self.begin_commands(now);
        worked |= self.end_commands();
        worked
    }

    fn turn_takeovers(&mut self) -> bool {
        let (takeovers, cluster) = (&mut self.takeovers, &self.cluster);
        let worked = self.takeover_ways.poll(|token, result| {
            takeovers
                .iter_mut()
                .for_each(|takeover| takeover.on_reply(token, result));
        });
        for takeover in takeovers.iter_mut() {
            takeover.go_on(&mut self.takeover_ways, cluster);
        }
        self.takeover_ways.transport.kick();
        takeovers.retain(|takeover| !takeover.is_over());
        worked
    }

    /// Begins what rounds want, as far as the pace allows.
    fn begin_commands(&mut self, now: Instant) -> bool {
        let Some(stores) = self.stores.clone() else {
            return false;
        };
        if self.rounds.is_idle() {
            if std::mem::take(&mut self.is_pacing) {
                self.tell_totals();
            }
            return false;
        }
        let work = || Work {
            served: self.cluster.traffic.sum().served,
            ops: stores.ops(),
        };
        if !std::mem::replace(&mut self.is_pacing, true) {
            self.pace.wake(work(), now);
        }
        self.pace.turn(work, now);
        let now_us = self.cluster.us_at(now);
        let urgent = self.rounds.poll_urgent(now_us);
        let mut begun = urgent.len() as u32;
        for action in urgent {
            self.begin(action);
        }
        while begun < BEGUN_MAX && self.pace.allows() {
            let Some(action) = self.rounds.poll(now_us) else {
                break;
            };
            self.begin(action);
            begun += 1;
        }
        self.tell_totals();
        begun > 0
    }

    fn begin(&mut self, action: Action) {
        match action {
            Action::Ask {
                token,
                source,
                request,
            } => {
                let bytes = match request.command {
                    Command::Read { len, .. } => len,
                    Command::Inspect { .. } => PAGE_BYTES,
                    _ => 0,
                };
                self.pace.spend(bytes, false);
                let peer_routes = match source.0 == self.cluster.node {
                    true => &mut self.home_ways,
                    false => &mut self.rounds_ways,
                };
                if let Some(result) = peer_routes.send(source, &request, token) {
                    self.rounds.on_reply(token, result);
                }
            }
            Action::Local { token, request } => self.begin_local(token, &request),
            Action::Promote { pg, since } => {
                // Before anybody hears of it.
                self.tell_totals();
                self.cluster.ask(MetaRequest::Promote { pg, since });
            }
            Action::ReportFailed { pg, member, epoch } => {
                let node = member.node;
                self.cluster
                    .ask(MetaRequest::ReportFailed { pg, node, epoch });
            }
            Action::Tell { bad, outcome } => {
                if let Some(stores) = &self.stores {
                    stores.damage.on_outcome(bad, outcome);
                }
            }
        }
    }

    fn tell_totals(&self) {
        let mut told = self.handle.told.lock().expect("no panic under this lock");
        *told = Told {
            totals: self.rounds.totals(),
            failing: self.rounds.failing(),
        };
    }

    fn begin_local(&mut self, token: Token, request: &Request) {
        self.pace.spend(0, true);
        let slot = self
            .local
            .take()
            .expect("rounds have far fewer calls than there are slots");
        self.local[slot] = token;
        let store = self.rounds_ways.transport.local.store();
        if let Some(result) = store.submit(self.local.key(slot), request) {
            self.local.give_back(slot);
            self.rounds.on_local(token, result);
        }
    }

    /// Takes in what the source and the store have done for rounds.
    fn end_commands(&mut self) -> bool {
        let rounds = &mut self.rounds;
        let peer_routes = &mut self.rounds_ways;
        peer_routes.transport.kick();
        peer_routes.transport.reap();
        let mut worked = false;
        while let Some((key, result)) = peer_routes.transport.local.store().next_completion() {
            worked = true;
            let Some(slot) = self.local.find(key) else {
                continue;
            };
            let token = self.local[slot];
            self.local.give_back(slot);
            rounds.on_local(token, result);
        }
        worked |= peer_routes.poll_remote(|token, result| rounds.on_reply(token, result));
        let home = &mut self.home_ways;
        worked |= home.poll(|token, result| rounds.on_reply(token, result));
        worked
    }

    fn sleep(&mut self, now: Instant) {
        let patience = match self.rounds.is_idle() {
            true => self.patience(now),
            // Blocks are to come as evenly as the pace says.
            false => {
                let rest = self.pace.rest().unwrap_or(IDLE);
                self.patience(now).min(rest)
            }
        };
        let timeout = Timespec {
            tv_sec: patience.as_secs() as i64,
            tv_nsec: i64::from(patience.subsec_nanos()),
        };
        let fds = [
            self.rounds_ways.transport.wait_fd(),
            self.home_ways.transport.wait_fd(),
            self.takeover_ways.transport.wait_fd(),
            self.handle.eventfd.fd(),
            self.reader.eventfd().fd(),
        ];
        let fds = fds
            .into_iter()
            .map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN));
        let mut fds: Vec<PollFd<'_>> = fds.collect();
        // Interrupted or not, the next turn looks at everything.
        let _ = poll(&mut fds, Some(&timeout));
    }

    /// How long there is nothing to do, unless somebody rings.
    fn patience(&mut self, now: Instant) -> Duration {
        let held_back = !self.rounds.is_idle() && !self.pace.allows();
        if held_back || !self.takeovers.is_empty() {
            return TICK;
        }
        let now_us = self.cluster.us_at(now);
        let wake = self.rounds.wake_at(now_us);
        wake.map_or(IDLE, |wake| {
            IDLE.min(Duration::from_micros(wake.saturating_sub(now_us)))
        })
    }

    /// Waits until nobody uses the machines' memory.
    fn end(mut self) {
        let start = Instant::now();
        loop {
            self.turn_takeovers();
            self.end_commands();
            let ways = [&self.rounds_ways, &self.home_ways].map(Requests::in_flight);
            let asked = ways.iter().sum::<usize>() + self.takeover_ways.in_flight();
            let open = asked + self.local.taken();
            if open == 0 {
                return;
            }
            if start.elapsed() > END_WAIT {
                tracing::error!(open, "requests of takeovers and resync were never answered");
                // Whoever still works on them does it in memory that nobody else gets.
                Box::leak(Box::new(self));
                return;
            }
            self.sleep(Instant::now());
        }
    }
}
