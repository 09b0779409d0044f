//! A storage machine: processes that come and go over a disk that stays.

use std::sync::Arc;

use fabric::core::fence::Fences;
use fabric::core::groups::Groups;
use fabric::core::membership::{Member, ReplicaSet};
use fabric::core::replica::{Handled, PeerId, Peers, Replica, StoreFailure};
use fabric::core::resync::Call;
use fabric::core::unresolved::Unresolved;
use fabric::proto::ids::LayerId;
use fabric::proto::message::BlockStamp;
use fabric::proto::{
    Command, Epoch, Generation, Incarnation, NodeId, PgId, Refusal, Reply, Request,
};
use fabric::store;
use fabric::store::api::{CoreParams, DeviceLabel, ScrubFinding, StoreCore};
use fabric::store::device::IoVecs;
use fabric::testing::sim_disk::{CrashKind, IoKey, IoKind, SimDisk};

use crate::mutation::{Mutation, Newest};
use crate::queue::At;
use port::{For, Port};
use rounds::{Rounds, Wish};

pub mod memory;
mod port;
mod rounds;

/// Requests that a replica machine holds at most. Hosts have far fewer in flight.
const REPLICA_SLOTS: u32 = 512;

/// Cluster of all simulated devices.
const CLUSTER: [u8; 16] = [0xc1; 16];

/// A request as it travels: its list of buffers means nothing here, so the data travel along.
#[derive(Debug)]
pub struct Parcel {
    /// The request.
    pub request: Request,
    /// What a write stores.
    pub data: Box<[u8]>,
    /// The checksum of it that the host took when it sent the first byte.
    pub crc: u32,
}

/// An answer as it travels.
#[derive(Debug, Clone)]
pub struct Answer {
    /// Whom it is for.
    pub peer: PeerId,
    /// The answer.
    pub reply: Reply,
    /// What a read found.
    pub data: Option<Arc<[u8]>>,
}

/// What a process wants done.
#[derive(Debug, Default)]
pub struct Wishes {
    /// Answers to send.
    pub answers: Vec<Answer>,
    /// Disk requests that were begun; the world says when they end.
    pub disk: Vec<(IoKey, IoKind)>,
    /// Commands for other nodes.
    pub asks: Vec<Ask>,
}

/// A command of a round of comparison for its source.
#[derive(Debug, Clone, Copy)]
pub struct Ask {
    /// The round: group and number.
    pub round: (PgId, u64),
    /// Names the answer.
    pub call: Call,
    /// The source.
    pub source: NodeId,
    /// The map.
    pub epoch: Epoch,
    /// The command.
    pub command: Command,
}

/// A promotion to be asked for.
#[derive(Debug, Clone, Copy)]
pub struct Promotion {
    /// Group.
    pub pg: PgId,
    /// The process.
    pub incarnation: Incarnation,
    /// Its round.
    pub since: Epoch,
}

/// What a process stored and said so; for the invariants.
#[derive(Debug, Clone, Copy)]
pub struct Stored {
    /// The layer.
    pub layer: LayerId,
    /// Its version.
    pub version: u64,
    /// First byte in the layer.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
    /// First bytes of the data, which name the write; 0 for zeroes.
    pub tag: u32,
    /// The lease it was made under, and the one that the shard had persisted by then.
    pub generations: (Generation, Generation),
}

/// One start of the storage process.
pub struct Process {
    /// Which.
    pub incarnation: Incarnation,
    replicas: Vec<Replica>,
    port: Port,
    fences: Arc<Fences>,
    groups: Arc<Groups>,
    unresolved: Arc<[Arc<Unresolved>]>,
    rounds: Rounds,
    /// A tick is due.
    ticking: bool,
    mutation: Option<Mutation>,
    /// What the processes before it had stored.
    newest: Newest,
}

/// See the module.
pub struct Node {
    /// Its name.
    pub id: NodeId,
    /// The disk.
    pub disk: SimDisk,
    /// The process, while it runs.
    pub process: Option<Process>,
    /// Starts so far.
    pub starts: u64,
    /// Starts that failed.
    pub failed_starts: u32,
    /// Until when it does nothing.
    pub paused_until: At,
    /// How many times slower than planned the disk is.
    pub slowness: u64,
    /// It belongs to the cluster.
    pub member: bool,
    /// It does not come back.
    pub lost: bool,
    /// Its disk has failed a request, or will.
    pub suspect: bool,
    /// Processes that ended with their machine's power: what they acknowledged and had not flushed may be gone.
    power_losses: Vec<Incarnation>,
    layers: Vec<LayerId>,
    groups: usize,
    /// A mistake in what it runs.
    pub mutation: Option<Mutation>,
    /// What it has stored in all its lives.
    pub newest: Newest,
}

fn params() -> CoreParams {
    CoreParams {
        cluster: Some(CLUSTER),
        ops_max: 128,
        leaf_cache_bytes: 256 << 10,
        buffer_bytes: 4 << 20,
    }
}

/// An empty store on a disk of this size. Disks of one size differ in nothing, so the caller may clone it.
pub fn formatted(bytes: u64) -> SimDisk {
    let mut disk = SimDisk::new(bytes, 0);
    let label = DeviceLabel {
        cluster: CLUSTER,
        device: [0xde; 16],
    };
    store::format(&mut disk, label, false).expect("a blank disk can be formatted");
    disk
}

impl Node {
    /// A node whose process does not run yet.
    pub fn new(id: NodeId, disk: &SimDisk, layers: Vec<LayerId>, groups: usize, seed: u64) -> Self {
        Self {
            id,
            disk: disk.crash(CrashKind::Process, seed),
            process: None,
            starts: 0,
            failed_starts: 0,
            paused_until: At(0),
            slowness: 1,
            member: true,
            lost: false,
            suspect: false,
            power_losses: Vec::new(),
            layers,
            groups,
            mutation: None,
            newest: Newest::new(),
        }
    }

    /// Whether a process runs.
    pub fn is_up(&self) -> bool {
        self.process.is_some()
    }

    /// The process that runs, if its incarnation is this one.
    pub fn runs(&self, incarnation: Incarnation) -> bool {
        self.process
            .as_ref()
            .is_some_and(|p| p.incarnation == incarnation)
    }

    /// Starts the process.
    ///
    /// # Errors
    /// What the store says when it cannot be opened.
    pub fn start(&mut self, threads: usize, nonce: u64) -> Result<Incarnation, String> {
        assert!(self.process.is_none(), "it runs already");
        self.starts += 1;
        let incarnation = Incarnation(self.id.0 << 32 | self.starts);
        let mut bytes = [0x5e; 16];
        bytes[..8].copy_from_slice(&nonce.to_le_bytes());
        let (mut cores, _) =
            store::open(&mut self.disk, &params(), bytes).map_err(|e| e.to_string())?;
        assert_eq!(cores.len(), 1, "a small device has one shard");
        let core = cores.remove(0);
        let fences = Arc::new(Fences::default());
        for &layer in &self.layers {
            let fence = core.fence(layer);
            let generation = Generation(u64::from(fence.generation));
            fences.of(layer).raise(generation, Epoch(fence.epoch));
        }
        let groups = Arc::new(Groups::default());
        let unresolved: Arc<[Arc<Unresolved>]> = (0..threads).map(|_| Arc::default()).collect();
        let replica = |lane| {
            let peers = Peers {
                groups: Arc::clone(&groups),
                unresolved: Arc::clone(&unresolved),
                lane,
            };
            Replica::new(incarnation, Arc::clone(&fences), REPLICA_SLOTS).with_peers(peers)
        };
        let replicas = (0..threads).map(replica).collect();
        self.process = Some(Process {
            incarnation,
            replicas,
            port: Port::new(core, self.groups),
            fences,
            groups,
            unresolved,
            ticking: false,
            rounds: Rounds::new(self.mutation == Some(Mutation::TrustCleanFlag)),
            mutation: self.mutation,
            newest: self.newest.clone(),
        });
        Ok(incarnation)
    }

    /// The process dies; with `Power` so does what the disk had not flushed.
    pub fn crash(&mut self, kind: CrashKind, seed: u64) {
        // First the process: its disk requests name its memory.
        let ended = self.process.take().map(|p| p.incarnation);
        self.disk = self.disk.crash(kind, seed);
        if kind == CrashKind::Power {
            self.power_losses.extend(ended);
        }
        self.paused_until = At(0);
    }

    /// Whether power was lost after `from` had started and before `to` had.
    pub fn lost_power_between(&self, from: Incarnation, to: Incarnation) -> bool {
        self.power_losses.iter().any(|i| (from..to).contains(i))
    }

    /// A request came in.
    pub fn on_request(&mut self, peer: PeerId, thread: usize, parcel: Parcel, wishes: &mut Wishes) {
        let Some(process) = &mut self.process else {
            return;
        };
        process.on_request(peer, thread, parcel, wishes);
        self.pump(wishes);
    }

    /// A disk request is due.
    pub fn on_disk(&mut self, key: IoKey, wishes: &mut Wishes) {
        let Some(process) = &mut self.process else {
            return;
        };
        let Some(result) = self.disk.complete(key) else {
            return;
        };
        process.port.core.on_device(key.id, result);
        self.pump(wishes);
    }

    /// What a data thread does a few times a second while it has nothing else to do.
    pub fn on_idle(&mut self, wishes: &mut Wishes) {
        let Some(process) = &mut self.process else {
            return;
        };
        if process.port.core.in_flight() == 0 {
            process.port.core.on_idle();
        }
        let me = (self.id, process.incarnation);
        process.rounds.begin(me, &process.groups);
        self.pump(wishes);
    }

    /// A moment has passed for rounds of comparison.
    pub fn on_tick(&mut self, wishes: &mut Wishes) {
        if let Some(process) = &mut self.process {
            process.ticking = false;
            process.rounds.on_tick();
        }
        self.pump(wishes);
    }

    /// Whether a tick is to be set; said once.
    pub fn wants_tick(&mut self) -> bool {
        let process = self.process.as_mut();
        process.is_some_and(|p| p.rounds.needs_tick() && !std::mem::replace(&mut p.ticking, true))
    }

    /// Memberships that this node gives up, and by which maps.
    pub fn take_hopeless(&mut self) -> Vec<(PgId, Member, Epoch)> {
        let (id, process) = (self.id, self.process.as_mut());
        process.map_or_else(Vec::new, |p| p.rounds.take_hopeless(id))
    }

    /// A map arrived.
    pub fn on_map(&mut self, epoch: Epoch, sets: &[ReplicaSet], wishes: &mut Wishes) {
        let Some(process) = &mut self.process else {
            return;
        };
        let me = (self.id, process.incarnation);
        process.rounds.on_map(me, epoch, sets, &process.groups);
        self.pump(wishes);
    }

    /// The source of a round answered, or is lost.
    pub fn on_round(
        &mut self,
        (pg, number): (PgId, u64),
        call: Call,
        result: Result<(), Refusal>,
        data: Option<&[u8]>,
        wishes: &mut Wishes,
    ) {
        let Some(process) = &mut self.process else {
            return;
        };
        let data = data.filter(|_| result.is_ok());
        let delta = process.mutation == Some(Mutation::DeltaLogFromDeparture);
        if let Some(round) = process.rounds.get(pg, number) {
            let shown = data
                .filter(|_| delta)
                .and_then(|data| round.only_newer(call, data, &process.newest));
            round.end(call, shown.as_deref().or(data));
            round.machine.on_reply(call, result, &process.groups);
        }
        self.pump(wishes);
    }

    /// Promotions to be asked for.
    pub fn promotions(&self) -> Vec<Promotion> {
        let process = self.process.iter();
        let rounds = process.flat_map(|p| p.rounds.all.iter().map(move |r| (p.incarnation, r)));
        rounds
            .filter(|(_, (_, round))| round.promoted)
            .map(|(incarnation, (pg, round))| Promotion {
                pg: *pg,
                incarnation,
                since: round.machine.since(),
            })
            .collect()
    }

    /// Takes the process as far as it goes now.
    fn pump(&mut self, wishes: &mut Wishes) {
        let Some(process) = &mut self.process else {
            return;
        };
        loop {
            process
                .port
                .submit_waiting(&process.fences, &process.groups);
            let mut moved = false;
            while let Some(action) = process.port.core.poll_action() {
                moved = true;
                let (key, kind) = port::begin(&mut self.disk, action);
                wishes.disk.push((key, kind));
            }
            moved |= process.collect(wishes);
            moved |= process.work_rounds(wishes);
            if !moved {
                return;
            }
        }
    }

    /// Nothing is under way in the process.
    pub fn is_idle(&self) -> bool {
        self.process.as_ref().is_none_or(|p| {
            p.port.core.in_flight() == 0
                && p.port.core.device_in_flight() == 0
                && p.replicas.iter().all(|r| r.in_flight() == 0)
                && p.rounds.all.is_empty()
        })
    }
}

impl Process {
    fn on_request(&mut self, peer: PeerId, thread: usize, parcel: Parcel, wishes: &mut Wishes) {
        if fabric::checksum::crc32c(&parcel.data) != parcel.crc {
            // The guest has changed its buffer meanwhile: what arrived is nobody's data.
            let reply = Reply {
                id: parcel.request.id,
                incarnation: self.incarnation,
                result: Err(Refusal::Mismatch),
            };
            let data = None;
            wishes.answers.push(Answer { peer, reply, data });
            return;
        }
        let thread = thread % self.replicas.len();
        let mut request = self.port.receive(thread, parcel);
        let writes = matches!(
            request.command,
            Command::Write { .. } | Command::Zero { .. }
        );
        if writes && self.mutation == Some(Mutation::SkipEpochCheck) {
            request.epoch = self.groups.known();
        }
        let handled = self.replicas[thread].on_request(peer, &request, &mut self.port);
        match handled {
            Handled::Held => {}
            Handled::Replied(reply) => {
                let data = self.port.take_at_once();
                let data = data.filter(|_| reply.result.is_ok());
                wishes.answers.push(Answer { peer, reply, data });
            }
            Handled::Full => panic!("hosts have fewer requests in flight than replicas have slots"),
        }
    }

    /// Hands on what the store finished.
    fn collect(&mut self, wishes: &mut Wishes) -> bool {
        let mut any = false;
        while let Some(finished) = self.port.next_finished() {
            any = true;
            match finished.whom {
                For::Replica(thread, key) => {
                    let replica = &mut self.replicas[thread];
                    if let Some((peer, reply)) = replica.on_store(key, finished.result) {
                        let data = finished.data().filter(|_| reply.result.is_ok());
                        wishes.answers.push(Answer { peer, reply, data });
                    }
                }
                For::Round(pg, number, call) => {
                    let result = finished.result;
                    self.end_local((pg, number), call, result, finished.data());
                }
            }
        }
        any
    }

    fn end_local(
        &mut self,
        (pg, number): (PgId, u64),
        call: Call,
        result: Result<(), StoreFailure>,
        data: Option<Arc<[u8]>>,
    ) {
        if let Some(round) = self.rounds.get(pg, number) {
            if let Some(data) = &data {
                round.note_here(call, data);
            }
            round.end(call, data.as_deref().filter(|_| result.is_ok()));
            round.machine.on_local(call, result, &self.groups);
        }
    }

    /// Takes the rounds of comparison as far as they go now.
    fn work_rounds(&mut self, wishes: &mut Wishes) -> bool {
        let wanted = self.rounds.poll(&self.groups);
        let any = !wanted.is_empty();
        for (pg, number, call, wish) in wanted {
            let wish = match self.mutation {
                Some(Mutation::ResyncFromReturning) => self.turned_round(pg, wish),
                _ => wish,
            };
            match wish {
                Wish::Ask(source, epoch, command) => wishes.asks.push(Ask {
                    round: (pg, number),
                    call,
                    source,
                    epoch,
                    command,
                }),
                Wish::Fence(layer, generation, epoch) => {
                    // In memory first: no write slips in between.
                    self.fences.of(layer).raise(generation, epoch);
                    let command = Command::Fence {
                        layer,
                        buffers: IoVecs::NONE,
                        len: 0,
                    };
                    let request = Request {
                        pg,
                        epoch,
                        generation,
                        command,
                        ..Request::NOTHING
                    };
                    let data = memory::pick_up(command);
                    let parcel = Parcel {
                        request,
                        data,
                        crc: 0,
                    };
                    self.port.submit_local(For::Round(pg, number, call), parcel);
                }
                Wish::Local(command) => {
                    let request = Request {
                        pg,
                        command,
                        ..Request::NOTHING
                    };
                    let data = memory::pick_up(command);
                    let whom = For::Round(pg, number, call);
                    let parcel = Parcel {
                        request,
                        data,
                        crc: 0,
                    };
                    if let Some(data) = self.port.submit_local(whom, parcel) {
                        self.end_local((pg, number), call, Ok(()), Some(data));
                    }
                }
            }
        }
        any
    }

    /// The same comparison with the two sides confused.
    fn turned_round(&mut self, pg: PgId, wish: Wish) -> Wish {
        let compares = |command: &Command| {
            matches!(
                command,
                Command::Inspect { .. } | Command::Read { .. } | Command::Restore { .. }
            )
        };
        match wish {
            Wish::Ask(_, _, command) if compares(&command) => Wish::Local(command),
            Wish::Local(command) if compares(&command) => {
                let round = self.rounds.all.get(&pg);
                let source = round.map(|round| round.machine.source());
                let source = source.expect("it has just said what it wants");
                Wish::Ask(source, self.groups.known(), command)
            }
            other => other,
        }
    }

    /// What a block of a layer is, as its map tells; the store must be idle.
    pub fn stamp(
        &mut self,
        disk: &mut SimDisk,
        layer: LayerId,
        place: (u32, u32),
    ) -> Result<BlockStamp, String> {
        self.port.stamp(disk, layer, place)
    }

    /// Lets the scrubber read every block once; what it finds bad. The store must be idle.
    pub fn scrub(&mut self, disk: &mut SimDisk) -> Vec<ScrubFinding> {
        self.port.scrub(disk)
    }

    /// Takes the list of what was stored since the last call.
    pub fn take_stored(&mut self) -> Vec<Stored> {
        std::mem::take(&mut self.port.stored)
    }

    /// The store.
    pub fn core(&self) -> &store::ShardCore {
        &self.port.core
    }

    /// The fences of its layers.
    pub fn fences(&self) -> &Fences {
        &self.fences
    }

    /// Writes that it remembers as unresolved.
    pub fn unresolved(&self) -> usize {
        self.unresolved.iter().map(|u| u.len()).sum()
    }

    /// Requests that the store has not taken yet.
    pub fn waiting(&self) -> usize {
        self.port.waiting()
    }

    /// Reads a range of a layer's chunk beside the data path, for comparing nodes; the store must be idle.
    pub fn peek(
        &mut self,
        disk: &mut SimDisk,
        layer: LayerId,
        chunk: u32,
        range: (u32, u32),
    ) -> Result<Vec<u8>, String> {
        self.port.peek(disk, layer, chunk, range)
    }
}
