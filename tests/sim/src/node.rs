//! A storage machine: processes that come and go over devices that stay.

use std::sync::Arc;

use fabric_replication::fence::Fences;
use fabric_replication::groups::Groups;
use fabric_replication::repair::queue::{BadBlock, Outcome};
use fabric_replication::replica::{Handled, Peers, Replica};
use fabric_replication::resync::rounds::Rounds;
use fabric_replication::unresolved::Unresolved;
use fabric_store::ShardCore;
use fabric_store::api::{Space, StoreCore};
use fabric_store::testing::sim_disk::{CrashKind, IoKey, IoKind, SimDisk};
use fabric_types::ids::{ChunkKey, LayerId, PeerId};
use fabric_types::{
    Command, Epoch, Generation, Incarnation, NodeId, PgId, Refusal, Reply, Request,
};

use crate::mutation::{Mutation, Newest};
use crate::pace::Upkeep;
use crate::queue::At;
pub use access::{Access, Records, Sender};
pub use device::{Device, DeviceAt, Left, formatted};
use port::{Port, Purpose};
use rounds::Shell;
pub use rounds::{Ask, GivenUp, NodeMap};

mod access;
mod device;
mod inspect;
pub mod memory;
mod port;
mod rounds;
mod store;

/// Requests that a replica machine holds at most. Hosts have far fewer in flight.
const REPLICA_SLOTS: u32 = 512;

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
    /// It arrives for the second time.
    pub again: bool,
}

impl Answer {
    fn new(peer: PeerId, reply: Reply, data: Option<Arc<[u8]>>) -> Self {
        let again = false;
        Self {
            peer,
            reply,
            data,
            again,
        }
    }
}

/// What a process wants done.
#[derive(Debug, Default)]
pub struct Outputs {
    /// What time it is.
    pub now_us: u64,
    /// Answers to send.
    pub answers: Vec<Answer>,
    /// Disk requests that were begun, by device; the world says when they end.
    pub disk: Vec<(usize, IoKey, IoKind)>,
    /// Commands for other nodes.
    pub asks: Vec<Ask>,
    /// What meta is asked for.
    pub promotions: Vec<Promotion>,
    /// See [`GivenUp`].
    pub given_up: Vec<GivenUp>,
    /// What became of blocks that it could not read.
    pub repair_outcomes: Vec<(BadBlock, Outcome)>,
    /// Blocks whose loss it takes over, since no replica in sync could read them.
    pub lost: Vec<BadBlock>,
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
    /// On which of the node's devices.
    pub device: usize,
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
    rounds: Shell,
    mutation: Option<Mutation>,
    /// What the processes before it had stored.
    newest: Newest,
    /// Set once the process has learned which layers exist.
    knows_layers: bool,
}

/// See the module.
pub struct Node {
    /// Its name.
    pub id: NodeId,
    /// Its devices.
    pub devices: Vec<Device>,
    /// The process, while it runs.
    pub process: Option<Process>,
    /// Starts so far.
    pub starts: u64,
    /// Starts that failed.
    pub failed_starts: u32,
    /// Until when it does nothing.
    pub paused_until: At,
    /// It belongs to the cluster.
    pub member: bool,
    /// It does not come back.
    pub lost: bool,
    /// One of its disks has failed a request, or will.
    pub suspect: bool,
    /// Processes that ended with their machine's power: what they acknowledged and had not flushed may be
    /// gone.
    power_losses: Vec<Incarnation>,
    layers: Vec<LayerId>,
    groups: usize,
    /// A mistake in what it runs.
    pub mutation: Option<Mutation>,
    /// Layers that nodes may read and change, by the metadata that this node has applied.
    pub access: Access,
    /// What it has stored in all its lives.
    pub newest: Newest,
}

impl Node {
    /// A node of so many devices with what the disk holds, whose process does not run yet.
    pub fn new(
        id: NodeId,
        (disk, devices): (&SimDisk, usize),
        layers: Vec<LayerId>,
        groups: usize,
        seed: u64,
    ) -> Self {
        let mut this = Self {
            id,
            devices: Vec::new(),
            process: None,
            starts: 0,
            failed_starts: 0,
            paused_until: At(0),
            member: true,
            lost: false,
            suspect: false,
            power_losses: Vec::new(),
            layers,
            groups,
            mutation: None,
            access: Access::default(),
            newest: Newest::new(),
        };
        this.set_devices((disk, devices), seed);
        this
    }

    /// Gives it other devices, before it is started.
    pub fn set_devices(&mut self, (disk, devices): (&SimDisk, usize), seed: u64) {
        let seeds = (0..devices as u64).map(|device| seed.wrapping_add(device));
        self.devices = seeds.map(|seed| Device::new(disk, seed)).collect();
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
        let mut cores = Vec::new();
        for device in &mut self.devices {
            if self.mutation == Some(Mutation::IgnoreDeviceFlush) {
                device.disk.ignore_flushes();
            }
            cores.push(device.open(bytes)?);
            bytes[8] += 1;
        }
        let fences = Arc::new(self.persisted(&cores));
        let groups = Arc::new(Groups::default());
        let unresolved: Arc<[Arc<Unresolved>]> = (0..threads).map(|_| Arc::default()).collect();
        let replica = |lane| {
            let peers = Peers {
                groups: Arc::clone(&groups),
                unresolved: Arc::clone(&unresolved),
                lane,
            };
            Replica::new(incarnation, Arc::clone(&fences), REPLICA_SLOTS, peers)
        };
        let replicas = (0..threads).map(replica).collect();
        let me = (self.id, incarnation);
        let lanes = Arc::clone(&unresolved);
        let rounds = Rounds::new(me, Arc::clone(&groups), Arc::clone(&fences), lanes);
        self.process = Some(Process {
            incarnation,
            replicas,
            port: Port::new(
                cores,
                Arc::clone(&fences),
                Arc::clone(&groups),
                self.groups,
                self.mutation.map(|mutation| (mutation, incarnation)),
            ),
            fences,
            groups,
            unresolved,
            rounds: Shell::new(rounds),
            mutation: self.mutation,
            newest: self.newest.clone(),
            knows_layers: false,
        });
        Ok(incarnation)
    }

    /// The newest fences that any of its devices has.
    fn persisted(&self, cores: &[ShardCore]) -> Fences {
        let fences = Fences::default();
        for &layer in &self.layers {
            for fence in cores.iter().map(|core| core.fence(layer)) {
                let generation = Generation(u64::from(fence.generation));
                fences.raise(layer, generation, Epoch(fence.epoch));
            }
        }
        fences
    }

    /// The process dies; with `Power` so does what the disks had not flushed.
    pub fn crash(&mut self, kind: CrashKind, seed: u64) {
        // First the process: its disk requests name its memory.
        let ended = self.process.take().map(|p| p.incarnation);
        for (nth, device) in (0..).zip(&mut self.devices) {
            device.crash(kind, seed.wrapping_add(nth));
        }
        if kind == CrashKind::Power {
            self.power_losses.extend(ended);
        }
        self.paused_until = At(0);
    }

    /// Checkpoints that the stores of its process have written, and bytes that their cleaners have moved.
    pub fn maintained(&self) -> (u64, u64) {
        let stores = self.process.iter().flat_map(|p| &p.port.stores);
        let metrics = stores.map(|store| store.core.metrics());
        metrics.fold((0, 0), |(checkpoints, moved), metrics| {
            (
                checkpoints + metrics.checkpoints,
                moved + metrics.moved_bytes,
            )
        })
    }

    /// How often its machine has been booted again.
    pub fn boots(&self) -> usize {
        self.power_losses.len()
    }

    /// Whether power was lost after `from` had started and before `to` had.
    pub fn lost_power_between(&self, from: Incarnation, to: Incarnation) -> bool {
        self.power_losses.iter().any(|i| (from..to).contains(i))
    }

    /// A request came in.
    pub fn on_request(
        &mut self,
        sender: Sender,
        thread: usize,
        parcel: Parcel,
        outputs: &mut Outputs,
    ) {
        if self.is_kept_out(sender, &parcel, outputs) {
            return;
        }
        let checks_lease = self.checks_lease(sender.node, &parcel.request);
        let process = self.process.as_mut().expect("it is kept out of none");
        process.on_request((sender, checks_lease), thread, parcel, outputs);
        self.pump(outputs);
    }

    /// A disk request of a device is due.
    pub fn on_disk(&mut self, device: usize, key: IoKey, outputs: &mut Outputs) {
        let Some(process) = &mut self.process else {
            return;
        };
        let Some(result) = self.devices[device].disk.complete(key) else {
            return;
        };
        let store = &mut process.port.stores[device];
        store.core.on_device(key.id, result);
        self.pump(outputs);
    }

    /// What a data thread does a few times a second while it has nothing else to do. Some starts of the
    /// process hear only here which layers exist (see [`on_map`](Self::on_map)).
    pub fn on_idle(&mut self, outputs: &mut Outputs) {
        let Some(process) = &mut self.process else {
            return;
        };
        process.knows_layers = true;
        process.fences.set_layers(self.access.layers());
        for store in &mut process.port.stores {
            if store.core.in_flight() == 0 {
                store.core.on_idle();
            }
        }
        self.pump(outputs);
    }

    /// What the maintenance thread does of its own accord.
    pub fn on_upkeep(&mut self, upkeep: Upkeep, outputs: &mut Outputs) {
        let Some(process) = &mut self.process else {
            return;
        };
        for store in &mut process.port.stores {
            store.begin_upkeep(upkeep);
        }
        self.pump(outputs);
    }

    /// Takes the process as far as it goes now.
    fn pump(&mut self, outputs: &mut Outputs) {
        let Some(process) = &mut self.process else {
            return;
        };
        loop {
            process.port.submit_waiting();
            let mut moved = false;
            let stores = process.port.stores.iter_mut().zip(&mut self.devices);
            for (index, (store, device)) in stores.enumerate() {
                while let Some((key, kind)) = store.begin_next(&mut device.disk) {
                    moved = true;
                    outputs.disk.push((index, key, kind));
                }
            }
            moved |= process.collect(outputs);
            moved |= process.port.take_went_on();
            moved |= process.work_rounds(outputs);
            if !moved {
                return;
            }
        }
    }

    /// Nothing is under way in the process.
    pub fn is_idle(&self) -> bool {
        self.process.as_ref().is_none_or(|p| {
            p.port.in_flight() == 0
                && p.port.device_in_flight() == 0
                && p.replicas.iter().all(|r| r.in_flight() == 0)
                && p.rounds.machine.is_idle()
        })
    }

    /// What is, in words.
    pub fn unrest(&self) -> String {
        self.process.as_ref().map_or_else(String::new, |p| {
            let replicas: usize = p.replicas.iter().map(Replica::in_flight).sum();
            format!(
                "{}: {} operations, {} device requests, {replicas} requests, {} calls of rounds; ",
                self.id,
                p.port.in_flight(),
                p.port.device_in_flight(),
                p.rounds.machine.calls_due(),
            )
        })
    }
}

impl Process {
    fn on_request(
        &mut self,
        (Sender { node, peer }, checks_lease): (Sender, bool),
        thread: usize,
        parcel: Parcel,
        outputs: &mut Outputs,
    ) {
        if fabric_types::checksum::crc32c(&parcel.data) != parcel.crc {
            // The guest has changed its buffer meanwhile: what arrived is nobody's data.
            let reply = Reply {
                id: parcel.request.id,
                incarnation: self.incarnation,
                result: Err(Refusal::Mismatch),
            };
            outputs.answers.push(Answer::new(peer, reply, None));
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
        let (replica, port) = (&mut self.replicas[thread], &mut self.port);
        let handled = match checks_lease {
            true => replica.on_remote_request((node, peer), &request, port),
            false => replica.on_request(peer, &request, port),
        };
        match handled {
            Handled::Held => {}
            Handled::Replied(reply) => {
                let data = self.port.take_at_once();
                let data = data.filter(|_| reply.result.is_ok());
                outputs.answers.push(Answer::new(peer, reply, data));
            }
            Handled::Full => panic!("hosts have fewer requests in flight than replicas have slots"),
        }
    }

    /// Hands on what the store finished.
    fn collect(&mut self, outputs: &mut Outputs) -> bool {
        let mut any = false;
        while let Some(finished) = self.port.next_finished() {
            any = true;
            match finished.purpose {
                Purpose::Replica(thread, key) => {
                    let replica = &mut self.replicas[thread];
                    if let Some((peer, reply)) =
                        replica.on_store(key, &finished.request, finished.result)
                    {
                        let data = finished.data().filter(|_| reply.result.is_ok());
                        outputs.answers.push(Answer::new(peer, reply, data));
                    }
                }
                Purpose::Round(token) => {
                    let result = finished.result;
                    self.end_local(token, result, finished.data());
                }
                Purpose::Nobody => {}
            }
        }
        any
    }

    /// The chunks on a device.
    pub fn chunks(&self, device: usize) -> Vec<ChunkKey> {
        let all = self.port.stores[device].chunks_from(0);
        all.map(|(chunk, _)| chunk).collect()
    }

    /// The space of a device.
    pub fn space(&self, device: usize) -> Space {
        self.port.stores[device].core.space()
    }

    /// Operations that its stores are at work on.
    pub fn in_flight(&self) -> usize {
        self.port.in_flight()
    }

    /// What it keeps about comparisons in its groups.
    pub fn kept_by_groups(&self, groups: usize) -> usize {
        let names = (0..groups as u64).flat_map(|pg| [PgId(pg), PgId(pg).incoming()]);
        let groups = names.filter_map(|pg| self.groups.get(pg));
        groups.map(|group| group.kept()).sum()
    }

    /// Takes the list of what was stored since the last call.
    pub fn take_stored(&mut self) -> Vec<Stored> {
        std::mem::take(&mut self.port.stored)
    }

    /// The fences of its layers.
    pub fn fences(&self) -> &Fences {
        &self.fences
    }

    /// Writes that it remembers as unresolved.
    pub fn unresolved(&self) -> usize {
        self.unresolved.iter().map(|u| u.len()).sum()
    }

    /// Requests that its stores have not taken yet.
    pub fn waiting(&self) -> usize {
        self.port.waiting()
    }
}
