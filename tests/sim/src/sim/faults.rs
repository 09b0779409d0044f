//! What goes wrong, and when it is repaired.

use fabric_store::testing::sim_disk::{CrashKind, IoKind};
use meta::AdminState;
use rand::Rng;
use rand::seq::SliceRandom;

use super::{End, Event, Sim};
use crate::node::DeviceAt;
use crate::queue::{At, Span};

/// Something that goes wrong, or is repaired.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// A process, or its machine, dies.
    Crash(usize, CrashKind),
    /// It starts again.
    Start(usize),
    /// A process stops for a while.
    Pause(usize, Span),
    /// A link is cut in one direction.
    Cut(End, End),
    /// It is repaired.
    Reconnect(End, End),
    /// A disk is so many times slower.
    Slow(DeviceAt, u64),
    /// A disk request of this kind fails with this errno.
    DiskError(DeviceAt, IoKind, i32),
    /// Stored blocks turn bad.
    Rot,
    /// A disk does not give stored blocks any more.
    Spoil,
    /// The next process that starts finds a block with another content and the same version.
    Forge,
    /// A disk has room for so many blocks more that were never written.
    Full(DeviceAt, u64),
    /// It has room again.
    FreeSpace(DeviceAt),
    /// Nobody answers at meta for a while.
    Leaderless(Span),
    /// A connection to a victim breaks, the nth of those that are open.
    Break(usize),
    /// A spare node joins the cluster.
    Join(usize),
    /// A node is to be emptied.
    Drain(usize),
    /// A device is to be emptied, or not any more.
    DrainDevice(DeviceAt, bool),
    /// A node dies and does not come back.
    Lose(usize),
    /// A guest moves to another host in good order.
    Migrate(usize),
    /// A guest is started on another host while the one it ran on still sends its requests.
    Wrest(usize),
    /// A host dies.
    HostCrash(usize),
    /// It starts again.
    HostStart(usize),
    /// All nodes lose power at the same instant: now, or when something happens.
    Outage(Outage),
    /// All is repaired; see [`Sim::heal`].
    Peace,
}

/// What a loss of all power comes right after. What is on the way to devices then differs with it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outage {
    /// Nothing in particular.
    Any,
    /// A member is in sync again.
    Promotion,
    /// A member is in sync no more.
    Demotion,
    /// A guest's flush is acknowledged.
    Flush,
    /// A store has written a checkpoint.
    Checkpoint,
}

const OUTAGES: [Outage; 5] = [
    Outage::Any,
    Outage::Promotion,
    Outage::Demotion,
    Outage::Flush,
    Outage::Checkpoint,
];

/// An outage that waits for something comes this soon after it.
const OUTAGE_DELAY: Span = Span(300);

impl Fault {
    /// Whether it ends something that is wrong.
    pub fn is_repair(self) -> bool {
        matches!(
            self,
            Self::Start(_)
                | Self::HostStart(_)
                | Self::Reconnect(..)
                | Self::Slow(_, 1)
                | Self::FreeSpace(_)
                | Self::DrainDevice(_, false)
                | Self::Peace
        )
    }
}

/// Faults begin within this time.
pub(super) const ACTIVE: Span = Span::millis(300);
/// Devices that are to be emptied in a run, where nodes have several.
const DEVICE_DRAINS_MAX: u32 = 8;

impl Sim {
    /// Draws when the plan's faults happen, and to whom.
    pub(super) fn schedule_faults(&mut self) {
        let plan = self.plan.faults;
        let mut nodes: Vec<usize> = (0..self.plan.nodes).collect();
        nodes.shuffle(&mut self.rng);
        nodes.truncate(plan.victims);
        self.victims = nodes;
        if self.victims.is_empty() {
            return;
        }
        for _ in 0..plan.process_crashes {
            self.schedule_crash(CrashKind::Process);
        }
        for _ in 0..plan.power_losses {
            self.schedule_crash(CrashKind::Power);
        }
        for _ in 0..plan.pauses {
            let span = Span(self.rng.random_range(1_000..2_000_000));
            let node = self.any_node();
            self.schedule(Fault::Pause(node, span));
        }
        for _ in 0..plan.cuts {
            self.schedule_cut();
        }
        for _ in 0..plan.slow_disks {
            let (node, factor) = (self.any_node(), self.rng.random_range(2..200));
            let device = self.any_device(node);
            let at = self.schedule(Fault::Slow(device, factor));
            let end = at + self.some(Span::seconds(1));
            self.at(end, Event::Fault(Fault::Slow(device, 1)));
        }
        for _ in 0..plan.disk_errors {
            let kinds = [IoKind::Read, IoKind::Write, IoKind::Flush];
            let kind = kinds[self.rng.random_range(0..3)];
            let node = self.any_node();
            let device = self.any_device(node);
            self.schedule(Fault::DiskError(device, kind, libc::EIO));
        }
        self.schedule_moves();
        self.schedule_members();
        for _ in 0..plan.outages {
            let outage = OUTAGES[self.rng.random_range(0..OUTAGES.len())];
            self.schedule(Fault::Outage(outage));
        }
        for _ in 0..plan.leader_losses {
            let span = Span(self.rng.random_range(1_000..3_000_000));
            self.schedule(Fault::Leaderless(span));
        }
        for _ in 0..plan.breaks {
            let nth = self.rng.random_range(0..64);
            self.schedule(Fault::Break(nth));
        }
    }

    fn any_node(&mut self) -> usize {
        self.victims[self.rng.random_range(0..self.victims.len())]
    }

    /// One of a node's devices. It has a random source of its own: whatever else a seed draws is the same
    /// with more of them.
    pub(super) fn any_device(&mut self, node: usize) -> DeviceAt {
        let device = self.device_rng.random_range(0..self.plan.devices);
        DeviceAt { node, device }
    }

    fn schedule(&mut self, fault: Fault) -> At {
        let at = self.now + self.some(ACTIVE);
        self.at(at, Event::Fault(fault));
        at
    }

    /// Leases move.
    fn schedule_moves(&mut self) {
        let plan = self.plan.faults;
        for _ in 0..plan.migrations {
            let guest = self.rng.random_range(0..self.plan.volumes);
            self.schedule(Fault::Migrate(guest));
        }
        for _ in 0..plan.wrests {
            let guest = self.rng.random_range(0..self.plan.volumes);
            self.schedule(Fault::Wrest(guest));
        }
        for _ in 0..plan.host_crashes {
            let host = self.rng.random_range(0..self.plan.hosts);
            let at = self.schedule(Fault::HostCrash(host));
            let back = at + self.some(Span::seconds(1));
            self.at(back, Event::Fault(Fault::HostStart(host)));
        }
    }

    /// Nodes come and go.
    fn schedule_members(&mut self) {
        let plan = self.plan.faults;
        for nth in 0..plan.joins as usize {
            self.schedule(Fault::Join(self.plan.nodes - self.plan.spares + nth));
        }
        for _ in 0..plan.drains {
            let node = self.any_node();
            self.schedule(Fault::Drain(node));
        }
        for _ in 0..plan.losses {
            let node = self.any_node();
            self.schedule(Fault::Lose(node));
        }
        if self.plan.devices > 1 {
            self.schedule_device_drains();
        }
    }

    /// Groups move between devices of a node.
    fn schedule_device_drains(&mut self) {
        for _ in 0..self.device_rng.random_range(2..=DEVICE_DRAINS_MAX) {
            let node = self.device_rng.random_range(0..self.plan.nodes);
            let device = self.any_device(node);
            let at = self.now + Span(self.device_rng.random_range(0..ACTIVE.0));
            self.at(at, Event::Fault(Fault::DrainDevice(device, true)));
            if self.device_rng.random() {
                let off = at + Span(self.device_rng.random_range(0..1_000_000));
                self.at(off, Event::Fault(Fault::DrainDevice(device, false)));
            }
        }
    }

    fn schedule_crash(&mut self, kind: CrashKind) {
        let node = self.any_node();
        let at = self.schedule(Fault::Crash(node, kind));
        let back = at + self.some(Span::seconds(2));
        self.at(back, Event::Fault(Fault::Start(node)));
    }

    /// Cuts a node off from a host, from meta, or from all; both ways or one way.
    fn schedule_cut(&mut self) {
        let node = End::Node(self.any_node());
        let mut others = vec![End::Meta];
        others.extend((0..self.plan.hosts).map(End::Host));
        if self.rng.random() {
            let keep = self.rng.random_range(0..others.len());
            others = vec![others[keep]];
        }
        let directions = self.rng.random_range(1..4);
        let at = self.now + self.some(ACTIVE);
        let end = at + self.some(Span::seconds(2));
        for other in others {
            let ways = [(node, other), (other, node)];
            for (bit, (from, to)) in ways.into_iter().enumerate() {
                if directions & (1 << bit) != 0 {
                    self.at(at, Event::Fault(Fault::Cut(from, to)));
                    self.at(end, Event::Fault(Fault::Reconnect(from, to)));
                }
            }
        }
    }

    /// Lets it happen.
    pub fn on_fault(&mut self, fault: Fault) {
        self.trace
            .note(self.now, &[12], || format!("fault: {fault:?}"));
        match fault {
            Fault::Crash(node, kind) => self.crash_node(node, kind),
            Fault::Start(node) => self.start_node(node),
            Fault::Pause(node, span) => self.pause_node(node, span),
            Fault::Cut(from, to) => self.cut(from, to),
            Fault::Reconnect(from, to) => self.reconnect(from, to),
            Fault::Slow(at, factor) => self.device(at).slowness = factor,
            Fault::DiskError(at, kind, errno) => {
                self.nodes[at.node].suspect = true;
                self.device(at).disk.fail(kind, 0, errno);
            }
            Fault::Rot => self.rot(),
            Fault::Spoil => self.spoil(),
            Fault::Forge => self.forge_at_start(),
            Fault::Full(at, blocks) => self.set_room(at, Some(blocks)),
            Fault::FreeSpace(at) => self.set_room(at, None),
            Fault::Leaderless(span) => {
                self.leaderless_until = self.leaderless_until.max(self.now + span);
                self.terms += 1;
                self.meta.forget_leases();
            }
            Fault::Break(nth) => {
                let mut open = self.open_conns();
                open.retain(|&conn| self.victims.contains(&self.conns[conn].node));
                if !open.is_empty() {
                    self.break_conn(open[nth % open.len()]);
                }
            }
            Fault::Join(node) => self.nodes[node].member = true,
            Fault::Drain(node) => self.set_admin_state(node, AdminState::Draining),
            Fault::DrainDevice(at, on) => self.drain_device(at, on),
            Fault::Lose(node) => self.lose_node(node),
            Fault::Migrate(guest) => self.migrate(guest),
            Fault::Wrest(guest) => {
                let to = self.any_host();
                self.wrest(guest, to);
            }
            Fault::HostCrash(host) => self.crash_host(host),
            Fault::HostStart(host) => self.start_host(host),
            Fault::Outage(Outage::Any) => self.lose_all_power(),
            Fault::Outage(outage) => self.outages.push(outage),
            Fault::Peace => self.repair_all(),
        }
    }

    /// Something happened that outages may wait for.
    pub(super) fn outage_at(&mut self, happened: Outage) {
        let Some(at) = self.outages.iter().position(|one| *one == happened) else {
            return;
        };
        self.outages.swap_remove(at);
        let delay = self.some(OUTAGE_DELAY);
        self.after(delay, Event::Fault(Fault::Outage(Outage::Any)));
    }

    /// Every machine with a device is off at the same instant. Each comes back when it does. Hosts are other
    /// machines, or the same.
    fn lose_all_power(&mut self) {
        let hosts_too = self.rng.random();
        for node in 0..self.nodes.len() {
            if self.nodes[node].is_up() {
                self.crash_node(node, CrashKind::Power);
                let back = self.some(Span::seconds(2));
                self.after(back, Event::Fault(Fault::Start(node)));
            }
        }
        for host in 0..self.hosts.len() {
            if hosts_too {
                self.crash_host(host);
                let back = self.some(Span::seconds(1));
                self.after(back, Event::Fault(Fault::HostStart(host)));
            }
        }
        self.outages_had += 1;
    }

    /// From now on nothing is wrong any more.
    pub(super) fn repair_all(&mut self) {
        self.peace = true;
        self.outages.clear();
        let cut: Vec<_> = self.cuts.keys().copied().collect();
        for (from, to) in cut {
            while self.cuts.contains_key(&(from, to)) {
                self.reconnect(from, to);
            }
        }
        self.leaderless_until = self.now;
        self.make_room();
        for host in 0..self.hosts.len() {
            self.start_host(host);
        }
        for node in 0..self.nodes.len() {
            for device in 0..self.plan.devices {
                let at = DeviceAt { node, device };
                // With nodes lost for good there might not be enough others.
                if self.plan.devices > 1 {
                    self.drain_device(at, false);
                }
                self.device(at).slowness = 1;
                self.set_room(at, None);
                self.device(at).disk.forget_faults();
            }
            self.nodes[node].paused_until = self.now;
            if std::mem::take(&mut self.nodes[node].suspect) {
                // A store that met an error of its device takes no writes until it is opened again.
                self.crash_node(node, CrashKind::Process);
            }
            self.start_node(node);
        }
    }
}
