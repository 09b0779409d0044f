//! The machine: takes one event after the other, in an order that the seed decides.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use fabric_store::testing::sim_disk::{CrashKind, SimDisk};
use fabric_types::ids::{ChunkKey, LayerId};
use fabric_types::{Generation, Incarnation, NodeId, PgId, placement};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::checker::Checker;
use crate::host::{Conn, Host};
use crate::invariants::Ledger;
use crate::metadata::Metadata;
use crate::node::{self, DeviceAt, Node};
use crate::pace::{Pace, Upkeep};
use crate::plan::Plan;
use crate::queue::{At, Queue, Span};
use crate::trace::Trace;
use crate::workload::{self, Guest, GuestOp};

mod calls;
mod control;
mod disks;
mod durable;
mod end;
mod event;
mod faults;
mod forge;
mod guests;
mod lease_time;
pub mod leases;
mod leftovers;
mod members;
mod net;
mod nodes;
mod script;
mod strangers;

pub(crate) use event::Event;
pub use faults::{Fault, Outage};
pub use lease_time::CLOCK_PARTS;
use leases::{Lease, Takeover};

/// Between two signs of life to meta.
const BEAT_EVERY: Span = Span(meta::HEARTBEAT_INTERVAL.as_micros() as u64);
/// Between two turns of meta's planner.
const PLAN_EVERY: Span = Span::millis(250);
/// Events after which a run counts as one that never ends.
const EVENTS_MAX: u64 = 3_000_000;

/// Who sends and receives.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum End {
    /// A host.
    Host(usize),
    /// A storage node.
    Node(usize),
    /// Meta's leader.
    Meta,
}

/// Why a run failed.
#[derive(Debug, Clone)]
pub struct Failure {
    /// When.
    pub at: At,
    /// What.
    pub what: String,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "at {}: {}", self.at, self.what)
    }
}

/// What a run did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Outcome {
    /// Shared by all runs of the seed.
    pub trace: u64,
    /// Events.
    pub events: u64,
    /// Requests of guests that ended well, and with an error.
    pub ops: (u64, u64),
    /// Sectors that were read and compared.
    pub sectors_read: u64,
    /// Blocks that new leases made agree.
    pub recovered_blocks: u64,
    /// Whether there were blocks that no replica in sync could read, so that one came back without them.
    pub lost_blocks: bool,
    /// How often a group has moved from one device of a node to another.
    pub moved: u64,
    /// How often all nodes lost power at once.
    pub outages: u32,
    /// Sectors that were found durable on a device, as guests had been told.
    pub durable_sectors: u64,
    /// Bytes that cleaners have moved.
    pub cleaned_bytes: u64,
    /// Blocks that came back with another content and the same version.
    pub forged: u32,
    /// Requests of hostile hosts for layers of others that replicas have refused.
    pub refused: u32,
    /// Blocks that a hostile host restored in its own volume.
    pub restored: u32,
    /// Simulated time.
    pub time: At,
}

/// See the module.
///
/// It has many fields, because it is the whole simulated world. Faults, guests and checks look at any part of
/// it between two events, so parts that own their fields would all have to be handed to each of them.
pub struct Sim {
    /// What it is made of.
    pub plan: Plan,
    /// Simulated time.
    pub now: At,
    pub(crate) rng: ChaCha8Rng,
    /// For what disks do of their own accord.
    disk_rng: ChaCha8Rng,
    /// For the blocks that they do not give.
    spoil_rng: ChaCha8Rng,
    /// For which of a node's devices is hit.
    device_rng: ChaCha8Rng,
    disks: disks::BadDisks,
    queue: Queue<Event>,
    pub(crate) trace: Trace,
    /// Storage nodes.
    pub nodes: Vec<Node>,
    /// Hosts.
    pub hosts: Vec<Host>,
    /// Guests.
    pub guests: Vec<Guest>,
    /// Meta.
    pub meta: Metadata,
    /// What guests saw.
    pub checker: Checker,
    conns: Vec<Conn>,
    calls: Vec<calls::CallState>,
    /// Links that are cut, by direction, and how often.
    cuts: BTreeMap<(End, End), u32>,
    /// Messages on cut links.
    held: Vec<(End, End, Event)>,
    /// Until when nobody answers at meta.
    leaderless_until: At,
    /// Leaders that were lost so far.
    terms: u32,
    /// How often what recurs is done.
    pace: Pace,
    /// Nothing goes wrong any more.
    peace: bool,
    /// Whether somebody led at the planner's last turn.
    led: bool,
    pub(crate) ledger: Ledger,
    /// Nodes that faults may hit.
    victims: Vec<usize>,
    next_name: u64,
    next_tag: u32,
    next_slot: u32,
    /// Who may write each volume, as meta knows it.
    pub leases: Vec<Lease>,
    lease_time: lease_time::LeaseTime,
    /// New leases that are not used yet, by volume and host.
    takeovers: BTreeMap<(usize, usize), Takeover>,
    /// Requests of guests that left the host that still has them, by name.
    orphans: BTreeMap<u64, (usize, GuestOp)>,
    /// Blocks that were repaired after a read: node, chunk, block.
    pub repaired: Vec<(usize, ChunkKey, u32)>,
    /// What became of blocks that nodes have found bad themselves: node, block.
    pub repair_outcomes: Vec<(usize, u32, fabric_replication::repair::queue::Outcome)>,
    /// Blocks that takeovers made agree.
    pub recovered_blocks: u64,
    ops: (u64, u64),
    /// Devices that are or were members of groups.
    been_members: BTreeSet<(PgId, DeviceAt)>,
    /// See [`Outcome::moved`].
    pub(crate) moved: u64,
    /// Losses of all power that wait for something.
    outages: Vec<Outage>,
    outages_had: u32,
    /// For which flushes are checked, and what disks lose in that.
    durable_rng: ChaCha8Rng,
    /// Sectors that were found durable on a device.
    durable_sectors: u64,
    /// Bytes that cleaners have moved.
    cleaned_bytes: u64,
    forging: forge::Forging,
    strangers: strangers::Strangers,
    /// The first thing that went wrong.
    pub failure: Option<Failure>,
}

thread_local! {
    /// Formatting takes longer than many a run.
    static FORMATTED: std::cell::RefCell<BTreeMap<u64, SimDisk>> =
        const { std::cell::RefCell::new(BTreeMap::new()) };
}

fn formatted(bytes: u64) -> SimDisk {
    FORMATTED.with_borrow_mut(|disks| {
        let disk = disks.entry(bytes).or_insert_with(|| node::formatted(bytes));
        disk.clone()
    })
}

/// Another random source of the seed than that of everything else (0): 1 for rot and room, 2 for blocks that
/// disks do not give, 3 for which of a node's devices is hit, 4 for what is checked to be durable, 5 for the
/// pace, 6 for blocks that are forged, 7 for how long writes wait for space, 8 for requests of hostile hosts.
fn rng_of(seed: u64, stream: u64) -> ChaCha8Rng {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    rng.set_stream(stream);
    rng
}

/// The layer that a volume writes.
pub fn layer_of(volume: usize) -> LayerId {
    LayerId(volume as u64 + 1)
}

/// Which of so many groups holds a chunk of a volume.
pub fn group_of(volume: usize, chunk: u32, groups: usize) -> PgId {
    let chunk = ChunkKey {
        layer: layer_of(volume),
        index: chunk,
    };
    placement::pg_of(chunk, groups as u32)
}

/// Whether a seed's clients have windows of the sizes of simulated requests. None of the seeds that once
/// found something is among them: what they run is the same as then.
fn has_narrow_windows(seed: u64) -> bool {
    seed % 8 == 5
}

/// Returns whether a seed's run has hostile hosts. As above, none of the seeds that once found something is
/// among them. In a run with a mutation they come only if the mutation needs them.
fn has_strangers(seed: u64) -> bool {
    matches!(seed % 12, 1 | 4)
}

/// The plan's nodes with empty devices, and their first processes.
fn start_nodes(plan: &Plan, rng: &mut ChaCha8Rng) -> (Vec<Node>, Vec<Incarnation>) {
    let volumes = plan.volumes + usize::from(plan.has_strangers);
    let layers: Vec<LayerId> = (0..volumes).map(layer_of).collect();
    let disk = formatted(plan.device_bytes);
    let new = |n: usize| {
        let (id, devices) = (NodeId(n as u64), (&disk, plan.devices));
        Node::new(id, devices, layers.clone(), plan.groups, rng.random())
    };
    let mut nodes: Vec<Node> = (0..plan.nodes).map(new).collect();
    if let (Some(bytes), Some(last)) = (plan.small_device_bytes, nodes.last_mut()) {
        last.set_devices((&formatted(bytes), plan.devices), rng.random());
    }
    let mut incarnations = Vec::new();
    for node in &mut nodes {
        node.mutation = plan.mutation;
        let nonce = rng.random();
        let started = node.start(plan.replica_threads, nonce);
        incarnations.push(started.expect("a formatted disk opens"));
    }
    for spare in &mut nodes[plan.nodes - plan.spares..] {
        spare.member = false;
    }
    (nodes, incarnations)
}

impl Sim {
    /// The run of a seed.
    pub fn from_seed(seed: u64, print: bool) -> Self {
        Self::drawn(seed, print, Plan::draw)
    }

    /// The run of a seed with a plan that is drawn so.
    pub fn drawn(seed: u64, print: bool, draw: impl FnOnce(&mut ChaCha8Rng) -> Plan) -> Self {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let (mut disk_rng, mut spoil_rng) = (rng_of(seed, 1), rng_of(seed, 2));
        let mut plan = draw(&mut rng);
        plan.has_narrow_windows = has_narrow_windows(seed);
        plan.has_strangers |= plan.mutation.is_none() && has_strangers(seed);
        plan.draw_disk_faults(&mut disk_rng);
        plan.draw_spoils(&mut spoil_rng);
        plan.draw_pace(&mut rng_of(seed, 5));
        plan.draw_full_waits(&mut rng_of(seed, 7));
        let mut sim = Self::new(plan, rng, print);
        (sim.disk_rng, sim.spoil_rng) = (disk_rng, spoil_rng);
        sim.device_rng = rng_of(seed, 3);
        sim.durable_rng = rng_of(seed, 4);
        sim.begin_strangers(seed);
        sim.schedule_faults();
        sim.schedule_forges(seed);
        sim.schedule_disk_faults();
        sim.schedule_spoils();
        sim
    }

    /// The same with disks that neither rot nor refuse blocks nor run full.
    pub fn drawn_on_sound_disks(
        seed: u64,
        print: bool,
        draw: impl FnOnce(&mut ChaCha8Rng) -> Plan,
    ) -> Self {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let mut plan = draw(&mut rng);
        plan.has_narrow_windows = has_narrow_windows(seed);
        plan.has_strangers |= plan.mutation.is_none() && has_strangers(seed);
        plan.draw_pace(&mut rng_of(seed, 5));
        plan.draw_full_waits(&mut rng_of(seed, 7));
        let mut sim = Self::new(plan, rng, print);
        sim.device_rng = rng_of(seed, 3);
        sim.durable_rng = rng_of(seed, 4);
        sim.begin_strangers(seed);
        sim.schedule_faults();
        sim.schedule_forges(seed);
        sim
    }

    /// A cluster that runs, with guests that begin at once.
    pub fn new(plan: Plan, mut rng: ChaCha8Rng, print: bool) -> Self {
        let (nodes, incarnations) = start_nodes(&plan, &mut rng);
        let plan_pace = plan.pace.unwrap_or(Pace::USUAL);
        let mut sim = Self {
            meta: Metadata::new(&plan, &incarnations),
            trace: Trace::new(print),
            plan,
            now: At(0),
            rng,
            disk_rng: rng_of(0, 1),
            spoil_rng: rng_of(0, 2),
            device_rng: rng_of(0, 3),
            disks: disks::BadDisks::default(),
            queue: Queue::default(),
            nodes,
            hosts: Vec::new(),
            guests: Vec::new(),
            checker: Checker::default(),
            conns: Vec::new(),
            calls: Vec::new(),
            pace: plan_pace,
            peace: false,
            cuts: BTreeMap::new(),
            held: Vec::new(),
            leaderless_until: At(0),
            terms: 0,
            led: true,
            ledger: Ledger::default(),
            victims: Vec::new(),
            next_name: 1,
            next_tag: 1,
            next_slot: 0,
            leases: Vec::new(),
            lease_time: lease_time::LeaseTime::default(),
            takeovers: BTreeMap::new(),
            orphans: BTreeMap::new(),
            repaired: Vec::new(),
            repair_outcomes: Vec::new(),
            recovered_blocks: 0,
            ops: (0, 0),
            been_members: BTreeSet::new(),
            moved: 0,
            outages: Vec::new(),
            outages_had: 0,
            durable_rng: rng_of(0, 4),
            durable_sectors: 0,
            cleaned_bytes: 0,
            forging: forge::Forging::new(rng_of(0, 6)),
            strangers: strangers::Strangers::new(rng_of(0, 8)),
            failure: None,
        };
        sim.begin();
        sim
    }

    /// Hosts, volumes, guests and what recurs.
    fn begin(&mut self) {
        self.begin_access();
        for _ in 0..self.plan.hosts {
            self.add_host();
        }
        for volume in 0..self.plan.volumes {
            let added = self
                .checker
                .add_volume(self.plan.chunks * workload::CHUNK_SECTORS);
            assert_eq!(added, volume);
            let host = volume % self.plan.hosts;
            let generation = Generation(1);
            self.leases.push(Lease { generation, host });
            let epoch = self.hosts[host].map;
            self.open_volume(host, volume, generation, epoch);
            let until = self.counts_until(0);
            self.hosts[host].volumes[&volume].set_lease_until_us(until);
            self.meta.lease_granted(volume, generation, self.now);
            let spots = workload::spots(self.plan.chunks, self.plan.spots, &mut self.rng);
            self.guests.push(Guest {
                volume,
                host,
                left: self.plan.ops,
                in_flight: BTreeMap::new(),
                spots,
                awake: true,
                suspended: false,
                draining: false,
                asking: false,
            });
            self.after(Span(0), Event::Guest(volume));
        }
        for node in 0..self.plan.nodes {
            self.after(Span(0), Event::HeartbeatReply(node));
            self.after(self.pace.idle, Event::Idle(node));
            for upkeep in Upkeep::ALL {
                self.upkeep_again(node, upkeep);
            }
        }
        self.begin_renewals();
        self.after(PLAN_EVERY, Event::Plan);
        self.note_members();
        for node in 0..self.plan.nodes {
            let map = self.meta.node_map(node);
            self.on_node_map(node, map);
        }
    }

    pub(crate) fn after(&mut self, span: Span, event: Event) {
        self.at(self.now + span, event);
    }

    pub(crate) fn at(&mut self, at: At, event: Event) {
        let tie = self.rng.random();
        self.queue.push(at, tie, event);
    }

    /// A time between zero and `span`.
    pub(crate) fn some(&mut self, span: Span) -> Span {
        Span(self.rng.random_range(0..=span.0))
    }

    /// Which group holds a chunk of a volume; as the client decides.
    pub fn group_of(&self, volume: usize, chunk: u32) -> PgId {
        group_of(volume, chunk, self.plan.groups)
    }

    /// Remembers the first failure; the run ends with it.
    pub(crate) fn fail(&mut self, what: impl Into<String>) {
        if self.failure.is_none() {
            let (at, what) = (self.now, what.into());
            self.trace.note(at, &[0xfa11], || format!("FAILURE {what}"));
            self.failure = Some(Failure { at, what });
        }
    }

    /// Takes the next event. False if there is none, or the run has failed.
    pub fn step(&mut self) -> bool {
        if self.failure.is_some() {
            return false;
        }
        let Some((at, event)) = self.queue.pop() else {
            return false;
        };
        self.now = at;
        self.handle(event);
        self.check_step();
        if self.trace.events() > EVENTS_MAX {
            self.fail("the run does not end");
        }
        self.failure.is_none()
    }

    /// Goes on until `done`, or a failure, or the time.
    pub fn run_until(&mut self, limit: Span, mut done: impl FnMut(&Self) -> bool) -> bool {
        let end = self.now + limit;
        while self.failure.is_none() {
            if done(self) {
                return true;
            }
            if self.queue.next_at().is_none_or(|at| at > end) || !self.step() {
                break;
            }
        }
        false
    }

    fn handle(&mut self, event: Event) {
        match event {
            Event::Guest(guest) => self.on_guest(guest),
            Event::Pickup { conn, id } => self.on_pickup(conn, id),
            Event::Request { conn, parcel } => self.on_request(conn, parcel),
            Event::Answer { answer } => self.on_answer(answer),
            Event::Disk {
                at,
                incarnation,
                key,
            } => self.on_disk(at, incarnation, key),
            Event::Watch { conn } => self.on_watch(conn),
            Event::Connect {
                host,
                life,
                lane,
                node,
            } => self.on_connect(host, life, lane, node),
            Event::Idle(node) => self.on_idle(node),
            Event::Upkeep(node, upkeep) => self.on_upkeep(node, upkeep),
            Event::RoundTick(node) => self.on_round_tick(node),
            Event::HeartbeatReply(node) => self.on_beat(node),
            Event::Plan => self.on_plan(),
            Event::MetaMessage(word) => self.on_word(word),
            Event::Commit(command, seeker) => self.on_commit(&command, seeker),
            Event::RenewLeases(host) => self.on_renew_leases(host),
            Event::Renewed(renewal) => self.on_renewed(renewal),
            Event::RenewalRefused(renewal) => self.on_renewal_refused(renewal),
            Event::JudgeReports => self.judge_reports(),
            Event::Replace(node) => self.on_replace(node),
            Event::Map {
                host,
                life,
                epoch,
                sets,
                leases,
            } => self.on_map((host, life), epoch, sets, &leases),
            Event::Granted {
                seeker,
                generation,
                epoch,
            } => self.on_granted(seeker, generation, epoch),
            Event::Records { node, records } => self.on_records(node, &records),
            Event::Visit => self.on_visit(),
            Event::AskLease(guest) => self.on_ask_lease(guest),
            Event::LeaseRecoveryTick { by, number } => self.on_lease_recovery_tick(by, number),
            Event::NodeMap { node, map } => self.on_node_map(node, map),
            Event::Forgotten { conn, reply } => self.on_forgotten(conn, &reply),
            Event::Tick { host, life, lane } => self.on_tick(host, life, lane),
            Event::Call { number, parcel } => self.on_call(number, parcel),
            Event::CallOver(number) => {
                self.end_call(number, Err(fabric_types::Refusal::Unreachable), None);
            }
            Event::Report(host) => self.on_report(host),
            // Once there is peace, what was to come does not.
            Event::Fault(fault) if !self.peace || fault.is_repair() => self.on_fault(fault),
            Event::Fault(_) => {}
        }
    }

    /// Runs to the end: guests, then peace, then the last checks.
    pub fn run(mut self) -> Result<Outcome, Failure> {
        self.run_guests();
        self.heal();
        self.converge();
        match self.failure {
            Some(failure) => Err(failure),
            None => Ok(Outcome {
                trace: self.trace.hash() ^ self.rng.random::<u64>(),
                events: self.trace.events(),
                ops: self.ops,
                sectors_read: self.checker.sectors_read,
                recovered_blocks: self.recovered_blocks,
                lost_blocks: self.has_lost(),
                moved: self.moved,
                outages: self.outages_had,
                durable_sectors: self.durable_sectors,
                cleaned_bytes: self.cleaned_bytes,
                forged: self.forging.done,
                refused: self.strangers.refused,
                restored: self.strangers.restored,
                time: self.now,
            }),
        }
    }

    /// What killing a process, or its machine, is called in the trace.
    pub(crate) fn crash_name(kind: CrashKind) -> &'static str {
        match kind {
            CrashKind::Process => "process dies",
            CrashKind::Power => "loses power",
        }
    }
}
