//! Meta: the state machine that ships and the watch of its leader, without the Raft group that makes its
//! commands one order.
//!
//! Commands are linearizable: the world hands them over one at a time, late, or not at all, and tells
//! everybody the outcome in its own time. What a leader adds of its own is here, too: who was heard of after
//! a report came in.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use fabric_replication::fence::Grant;
use fabric_types::ids::LayerId;
use fabric_types::membership::{Member, ReplicaSet, ReplicaState};
use fabric_types::{Epoch, Generation, Incarnation, NodeId, PgId, placement};
use meta::testing::{LeaseWatch, Machine};
use meta::{
    AdminState, ClusterMap, Command, DeviceSpec, GroupId, NodeSpec, Outcome, PgIndex, PoolId,
    PoolSpec, Role, UnixMillis, VolumeSpec, Watch,
};
use uuid::Uuid;

use crate::mutation::Mutation;
pub use crate::node::Records;
use crate::node::{Access, DeviceAt, NodeMap};
use crate::plan::Plan;
use crate::queue::{At, Span};
use crate::sim::layer_of;
pub use groups::{Change, Group, Place};
use groups::{device_of, device_with, note_changes, uuid_of};

mod groups;

/// A report waits this long for a witness.
pub const WITNESS_WAIT: Span = Span(meta::WITNESS_WAIT_MAX.as_micros() as u64);
/// Hosts are nodes of the cluster from this number on.
const HOSTS_FROM: u64 = 1000;
/// A host with its own volume, to which no other volume is open.
pub const STRANGER: NodeId = NodeId(2000);
/// A host that may read all layers and holds no lease of them.
pub const READER: NodeId = NodeId(2001);
const POOL: &str = "pool";

/// A client's word that a replica failed it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Report {
    group: GroupId,
    device: meta::DeviceId,
    incarnation: Incarnation,
    epoch: Epoch,
}

/// See the module.
#[derive(Debug)]
pub struct Metadata {
    machine: Machine,
    watch: Watch,
    leases: LeaseWatch,
    lease: Duration,
    /// Time zero. Only what has passed since is ever looked at.
    epoch: Instant,
    pool: PoolId,
    min_in_sync: usize,
    replicas: usize,
    /// Of each storage node.
    devices: usize,
    mutation: Option<Mutation>,
    groups: Vec<Group>,
    /// Reports that wait for a witness, and since when.
    reports: Vec<(Report, At)>,
    /// Changes since the last look.
    pub changes: Vec<Change>,
    /// Number of applied commands.
    applied: u64,
    /// Holder of every granted lease.
    grants: BTreeMap<(LayerId, Generation), NodeId>,
    /// Nodes with the role `host` alone.
    hosts: BTreeSet<NodeId>,
    /// Layers that guests use.
    guests_layers: Vec<LayerId>,
}

/// A moment on the leader's clock.
fn clock(at: At) -> Duration {
    Duration::from_micros(at.0)
}

fn wall(at: At) -> UnixMillis {
    UnixMillis(at.0 / 1000)
}

fn node_id(node: usize) -> NodeId {
    NodeId(node as u64 + 1)
}

/// The node id of a host in the metadata.
pub fn host_id(host: usize) -> NodeId {
    NodeId(HOSTS_FROM + host as u64)
}

/// Id of a layer in the simulator: the number of its volume, counted from one.
fn layer_here(layer: LayerId) -> LayerId {
    LayerId(placement::family_of(layer))
}

fn lease_id(volume: usize) -> meta::VolumeId {
    meta::VolumeId(volume as u64)
}

/// How long the leader counts a lease, before what it adds for drift.
fn lease_of(plan: &Plan) -> Duration {
    let lasts = plan.pace.map_or(Span(0), |pace| pace.lease);
    let lasts = Duration::from_micros(lasts.0);
    match plan.mutation {
        Some(Mutation::IgnoreDrift) => lasts * 100 / 101,
        _ => lasts,
    }
}

fn volume_name(volume: usize) -> String {
    format!("v{volume}")
}

impl Metadata {
    /// A cluster of these storage processes, with its pool and volumes.
    pub fn new(plan: &Plan, incarnations: &[Incarnation]) -> Self {
        let lease = lease_of(plan);
        let mut this = Self {
            machine: Machine::default(),
            watch: Watch::default(),
            leases: LeaseWatch::of(lease),
            lease,
            epoch: Instant::now(),
            pool: PoolId(0),
            min_in_sync: plan.min_in_sync,
            replicas: plan.replicas,
            devices: plan.devices,
            mutation: plan.mutation,
            groups: Vec::new(),
            reports: Vec::new(),
            changes: Vec::new(),
            applied: 0,
            grants: BTreeMap::new(),
            hosts: (0..plan.hosts).map(host_id).collect(),
            guests_layers: (0..plan.volumes).map(layer_of).collect(),
        };
        let at = UnixMillis(0);
        let host = |host| NodeSpec {
            roles: [Role::Host].into(),
            incarnation: Incarnation(1),
            ..NodeSpec::new(host_id(host), format!("h{host}"))
        };
        let cluster = Uuid::from_u128(1);
        let node = host(0);
        this.must(Command::Bootstrap {
            cluster,
            node,
            pool: None,
            at,
        });
        for node in 1..plan.hosts {
            let (node, replaces) = (host(node), Incarnation(0));
            this.must(Command::RegisterNode { node, replaces, at });
        }
        let members = incarnations.len() - plan.spares;
        for (node, incarnation) in incarnations[..members].iter().enumerate() {
            for command in this.register(node, (*incarnation, 0), 0, At(0)) {
                this.must(command);
            }
        }
        let pool = PoolSpec {
            min_in_sync: Some(plan.min_in_sync as u8),
            placement_groups: Some(plan.groups as u32),
            ..PoolSpec::new(POOL, plan.replicas as u8)
        };
        match this.must(Command::CreatePool { pool, at }) {
            Outcome::Pool(pool) => this.pool = pool.id,
            other => panic!("{other:?} in place of a pool"),
        }
        for number in 0..plan.volumes {
            let uuid = Uuid::from_u128(0xf000 + number as u128);
            let volume = VolumeSpec {
                pool: Some(POOL.to_owned()),
                ..VolumeSpec::new(volume_name(number), plan.chunks * (4 << 20))
            };
            this.must(Command::CreateVolume { uuid, volume, at });
            this.must(this.grant(number, number % plan.hosts, Generation(0), At(0)));
        }
        if plan.has_strangers {
            this.add_strangers(plan.volumes);
        }
        this.groups = this.read_groups();
        this.changes.clear();
        this.watch.lead(Duration::ZERO);
        this
    }

    /// A start of a process, on a machine that has been booted so often.
    fn register(
        &self,
        node: usize,
        (incarnation, boots): (Incarnation, usize),
        replaces: u64,
        now: At,
    ) -> Vec<Command> {
        let spec = NodeSpec {
            roles: [Role::Storage].into(),
            incarnation,
            boot: format!("boot {boots}"),
            ..NodeSpec::new(node_id(node), format!("n{node}"))
        };
        let at = wall(now);
        let start = Command::RegisterNode {
            node: spec,
            replaces: Incarnation(replaces),
            at,
        };
        let device = |device| Command::RegisterDevice {
            device: DeviceSpec {
                uuid: uuid_of(DeviceAt { node, device }),
                node: node_id(node),
                path: format!("/dev/disk{device}"),
                size_bytes: 1 << 30,
                class: "ssd".to_owned(),
            },
            incarnation,
            at,
        };
        let devices = (0..self.devices).map(device);
        [start].into_iter().chain(devices).collect()
    }

    fn must(&mut self, command: Command) -> Outcome {
        let outcome = self.machine.apply(&command);
        let outcome = outcome.expect("the first commands succeed");
        self.note_grant(&outcome);
        outcome
    }

    /// Adds hostile hosts, and the volume of one of them.
    fn add_strangers(&mut self, own: usize) {
        let at = UnixMillis(0);
        for id in [STRANGER, READER] {
            self.hosts.insert(id);
            let node = NodeSpec {
                roles: [Role::Host].into(),
                incarnation: Incarnation(1),
                ..NodeSpec::new(id, format!("s{id}"))
            };
            let replaces = Incarnation(0);
            self.must(Command::RegisterNode { node, replaces, at });
        }
        let uuid = Uuid::from_u128(0xf000 + own as u128);
        let volume = VolumeSpec {
            pool: Some(POOL.to_owned()),
            ..VolumeSpec::new(volume_name(own), 4 << 20)
        };
        self.must(Command::CreateVolume { uuid, volume, at });
        self.must(Command::GrantLease {
            volume: volume_name(own),
            node: STRANGER,
            expired: None,
            at,
        });
    }

    fn note_grant(&mut self, outcome: &Outcome) {
        self.applied += 1;
        if let Outcome::Lease(lease) = outcome
            && let Some(holder) = lease.holder
        {
            let layer = LayerId(lease.volume.0);
            self.grants.insert((layer, lease.generation), holder);
        }
    }

    /// Returns the grant of a lease, if it was granted.
    pub fn grant_of(&self, layer: LayerId, generation: Generation) -> Option<Grant> {
        let holder = self.grants.get(&(layer, generation)).copied()?;
        Some(Grant {
            holder: Some(holder),
            generation,
        })
    }

    /// Returns the access table of a node that has applied nothing. Without hostile hosts, hosts store data
    /// too and access everything.
    pub fn access(&self, plan: &Plan) -> Access {
        let storage = (0..plan.nodes).map(|node| NodeId(node as u64)).collect();
        match plan.has_strangers {
            true => Access::new(&self.hosts, &storage),
            false => Access::new(
                &BTreeSet::new(),
                &storage.union(&self.hosts).copied().collect(),
            ),
        }
    }

    /// Returns the current layers, leases and openings.
    pub fn records(&self) -> Records {
        let granted = |known: meta::LayerLease| {
            let grant = Grant {
                holder: known.holder,
                generation: known.generation,
            };
            (layer_here(known.layer), grant)
        };
        let open = self.machine.open_layers(&self.hosts).into_iter();
        let open = open.map(|(node, layers)| (node, layers.into_iter().map(layer_here).collect()));
        let mut open: HashMap<NodeId, HashSet<LayerId>> = open.collect();
        // All layers are open to this host, like the segments of a mounted filesystem.
        open.insert(READER, self.guests_layers.iter().copied().collect());
        Records {
            applied: self.applied,
            layers: self.machine.layers().iter().map(granted).collect(),
            open,
        }
    }

    /// The map as it was committed last.
    pub fn map(&self) -> Arc<ClusterMap> {
        self.machine.map()
    }

    /// The map's version.
    pub fn epoch(&self) -> Epoch {
        self.machine.map().epoch()
    }

    /// The groups.
    pub fn groups(&self) -> &[Group] {
        &self.groups
    }

    /// The map as clients take it.
    pub fn sets(&self) -> Vec<ReplicaSet> {
        let set = |(pg, group): (u64, &Group)| {
            let members = group.members.clone();
            let set = ReplicaSet::new(PgId(pg), group.epoch, self.min_in_sync, members);
            let is_told = self.mutation != Some(Mutation::KeepQuietOfLoss);
            set.with_power_lost(if is_told { group.power_lost } else { Epoch(0) })
        };
        (0..).zip(&self.groups).map(set).collect()
    }

    /// The map as a node takes it.
    pub fn node_map(&self, node: usize) -> NodeMap {
        let name = NodeId(node as u64);
        let home = |group: &Group| {
            let device = |name| Some(group.device_of(name)?.device);
            [device(name), device(name.incoming())]
        };
        NodeMap {
            epoch: self.epoch(),
            sets: self.sets(),
            homes: self.groups.iter().map(home).collect(),
        }
    }

    /// Whether a group has all the replicas that it should have, where they should be.
    pub fn is_whole(&self, group: &Group) -> bool {
        let in_sync = |m: &Member| m.state == ReplicaState::InSync;
        let stays = |place: &Place| !place.leaving;
        group.all.iter().all(stays)
            && group.members.len() == self.replicas
            && group.members.iter().all(in_sync)
    }

    fn read_groups(&self) -> Vec<Group> {
        let map = self.machine.map();
        let groups = map.groups().filter(|group| group.pool == self.pool);
        groups.map(|group| Group::read(&map, group)).collect()
    }

    /// Applies a command that Raft committed; what it brought about, if it was granted.
    pub fn apply(&mut self, command: &Command) -> Option<Outcome> {
        let before = self.machine.map().epoch();
        let outcome = self.machine.apply(command).ok();
        if let Some(outcome) = &outcome {
            self.note_grant(outcome);
        }
        if self.machine.map().epoch() != before {
            let new = self.read_groups();
            let old = std::mem::replace(&mut self.groups, new);
            for (pg, (old, new)) in (0..).zip(old.iter().zip(&self.groups)) {
                note_changes(PgId(pg), old, new, &mut self.changes);
            }
        }
        outcome
    }

    /// The holder of a lease was granted it at this moment.
    pub fn lease_granted(&mut self, volume: usize, generation: Generation, now: At) {
        let now = self.epoch + clock(now);
        self.leases.heard(lease_id(volume), generation, now);
    }

    /// The holder renews a lease; false: it may not.
    pub fn renew_lease(&mut self, volume: usize, generation: Generation, now: At) -> bool {
        let now = self.epoch + clock(now);
        self.leases.renew(lease_id(volume), generation, now)
    }

    /// Whether a lease has run out, for somebody who wants the next one.
    pub fn lease_has_run_out(&mut self, volume: usize, generation: Generation, now: At) -> bool {
        let now = self.epoch + clock(now);
        self.leases.has_run_out(lease_id(volume), generation, now)
    }

    /// The leader is lost, and with it what it knew of leases.
    pub fn forget_leases(&mut self) {
        self.leases = LeaseWatch::of(self.lease);
    }

    /// There is a leader again, who has heard nothing yet.
    pub fn elect(&mut self, now: At) {
        self.watch = Watch::default();
        self.watch.lead(clock(now));
        self.reports.clear();
    }

    /// A process lives. What it has to tell: that it has started, on a machine that has been booted so often,
    /// unless that is known.
    pub fn heard(
        &mut self,
        node: usize,
        (incarnation, boots): (Incarnation, usize),
        now: At,
    ) -> Vec<Command> {
        let id = node_id(node);
        self.watch.heard(id, incarnation, clock(now));
        let map = self.machine.map();
        let known = map.node(id).map_or(0, |node| node.incarnation.0);
        let served = map.devices().filter(|device| device.node == id);
        let served = served.filter(|device| device.incarnation == incarnation);
        if known == incarnation.0 && served.count() == self.devices {
            return Vec::new();
        }
        self.register(node, (incarnation, boots), known, now)
    }

    /// A client gave a replica up, by the map that it has.
    pub fn report(&mut self, pg: PgId, member: &Member, epoch: Epoch, now: At) {
        let id = self.group_id(pg);
        let map = self.machine.map();
        let named = self.groups[pg.0 as usize].device_of(member.node);
        // Of one that the map has left out meanwhile it is for meta to refuse the word.
        let any = DeviceAt::first_of(member.node.base().0 as usize);
        let Some(device) = device_with(&map, named.unwrap_or(any)) else {
            return;
        };
        self.watch.member_reported(&map, id, device);
        let report = Report {
            group: id,
            device,
            incarnation: member.incarnation,
            epoch,
        };
        let known = self.reports.iter().any(|(known, _)| *known == report);
        if !known {
            self.reports.push((report, now));
        }
    }

    /// Reports that can be judged now: a witness has been heard of, or none was in time.
    pub fn due_reports(&mut self, now: At) -> Vec<Command> {
        let map = self.machine.map();
        let mut due = Vec::new();
        let watch = &self.watch;
        self.reports.retain(|(report, arrived)| {
            let heard = watch.heard_since(clock(*arrived));
            let is_over = now.since(*arrived) >= WITNESS_WAIT;
            let (group, device) = (report.group, report.device);
            if !is_over && !meta::has_witness(&map, group, device, &heard) {
                return true;
            }
            due.push(Command::ReportFailed {
                group: report.group,
                device: report.device,
                incarnation: report.incarnation,
                epoch: report.epoch,
                heard,
                at: wall(now),
            });
            false
        });
        due
    }

    /// The planner's turn.
    pub fn plan(&mut self, now: At) -> Vec<Command> {
        let map = self.machine.map();
        self.watch.plan(&map, clock(now), wall(now))
    }

    fn group_id(&self, pg: PgId) -> GroupId {
        GroupId {
            pool: self.pool,
            index: PgIndex(pg.0 as u32),
        }
    }

    /// A syncing replica has been compared.
    pub fn promotion(
        &self,
        node: usize,
        asked: &crate::node::Promotion,
        now: At,
    ) -> Option<Command> {
        let map = self.machine.map();
        let group = self.group_id(asked.pg);
        let is_compared = |m: &meta::Member| {
            m.incarnation.0 == asked.incarnation.0
                && m.state == meta::ReplicaState::Syncing
                && m.since.0 == asked.since.0
        };
        Some(Command::Promote {
            group,
            device: device_of(&map, group, node_id(node), is_compared)?,
            incarnation: asked.incarnation,
            since: asked.since,
            at: wall(now),
        })
    }

    /// A lease for a host. Whoever held it counts as having run out of time, which may be wrong: it is the
    /// replicas that keep it out.
    pub fn grant(&self, volume: usize, host: usize, current: Generation, now: At) -> Command {
        Command::GrantLease {
            volume: volume_name(volume),
            node: host_id(host),
            expired: Some(current),
            at: wall(now),
        }
    }

    /// Whether a node is to be emptied.
    pub fn is_draining(&self, node: usize) -> bool {
        let map = self.machine.map();
        map.node(node_id(node))
            .is_some_and(|node| node.admin_state == AdminState::Draining)
    }

    /// The operator wants a device empty, or has it back.
    pub fn drain_device(&self, at: DeviceAt, on: bool, now: At) -> Option<Command> {
        let device = device_with(&self.machine.map(), at)?;
        let at = wall(now);
        Some(Command::DrainDevice { device, on, at })
    }

    /// The operator, or in the end the planner, wants a node empty or has it back.
    pub fn set_admin_state(&self, node: usize, state: AdminState, now: At) -> Command {
        Command::SetNodeAdminState {
            node: node_id(node),
            admin_state: state,
            at: wall(now),
        }
    }
}
