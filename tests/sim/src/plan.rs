//! What a run is made of. A seed draws one; scenarios write theirs down.

use rand::Rng;
use rand_chacha::ChaCha8Rng;

use crate::mutation::Mutation;
use crate::pace::Pace;
use crate::queue::Span;

/// How long messages take.
#[derive(Debug, Clone, Copy)]
pub struct NetPlan {
    /// The shortest way.
    pub base: Span,
    /// At most so much more.
    pub jitter: Span,
    /// One of so many messages is late by `spike` (a lost packet that is sent again); 0: none.
    pub spike_one_in: u32,
    /// See `spike_one_in`.
    pub spike: Span,
    /// One of so many answers arrives twice, the second time late; 0: none.
    pub double_one_in: u32,
    /// A request's data leave the guest's memory up to this long after it was sent.
    pub pickup: Span,
}

/// How long disks take.
#[derive(Debug, Clone, Copy)]
pub struct DiskPlan {
    /// The shortest request.
    pub base: Span,
    /// At most so much more.
    pub jitter: Span,
    /// A flush takes so much longer.
    pub flush: Span,
}

/// What may go wrong, each as the number of times that it does.
#[derive(Debug, Clone, Copy, Default)]
pub struct FaultPlan {
    /// Nodes that faults may hit, drawn anew for each run.
    pub victims: usize,
    /// A storage process dies and starts again.
    pub process_crashes: u32,
    /// A storage machine loses power, with it what its disk had not flushed.
    pub power_losses: u32,
    /// A storage process stops for a while.
    pub pauses: u32,
    /// Links are cut, both ways or one way.
    pub cuts: u32,
    /// A disk turns slow.
    pub slow_disks: u32,
    /// A disk request fails.
    pub disk_errors: u32,
    /// Some blocks of a place turn bad, on one disk or several.
    pub rots: u32,
    /// The same, and it is the disk that does not give them.
    pub spoils: u32,
    /// A block of a replica that is not in sync is another, with the same version.
    pub forges: u32,
    /// A disk has no room for a while.
    pub full_disks: u32,
    /// Meta's leader is lost for a while.
    pub leader_losses: u32,
    /// A connection breaks.
    pub breaks: u32,
    /// A spare node joins.
    pub joins: u32,
    /// A node is to be emptied.
    pub drains: u32,
    /// A node is gone for good, and others take its share.
    pub losses: u32,
    /// A guest moves to another host in good order.
    pub migrations: u32,
    /// A guest is started on another host while its old one still sends its requests.
    pub wrests: u32,
    /// A host dies with its guests, which are started on others.
    pub host_crashes: u32,
    /// All nodes lose power at the same instant; see [`Outage`](crate::sim::Outage).
    pub outages: u32,
}

/// How guests behave. All of it is allowed; scenarios that are about something else leave some of it out.
#[derive(Debug, Clone, Copy)]
pub struct GuestBehaviour {
    /// Writes may begin and end within a block.
    pub sectors: bool,
    /// Writes may overlap other ones in flight. No file system does so; a disk may then leave either.
    pub overlaps: bool,
}

/// See the module.
#[derive(Debug, Clone)]
pub struct Plan {
    /// Storage nodes.
    pub nodes: usize,
    /// The last of them join the cluster only later, if at all.
    pub spares: usize,
    /// Devices of each storage node.
    pub devices: usize,
    /// Hosts.
    pub hosts: usize,
    /// Data threads of a host.
    pub lanes: usize,
    /// Data threads of a storage process.
    pub replica_threads: usize,
    /// Placement groups.
    pub groups: usize,
    /// Members of a group.
    pub replicas: usize,
    /// Fewest in-sync members that acknowledge a write.
    pub min_in_sync: usize,
    /// Volumes; the first is host 0's, the next host 1's, and so on in turn.
    pub volumes: usize,
    /// Of them, the first so many are in write-through mode.
    pub write_through: usize,
    /// Chunks of each.
    pub chunks: u64,
    /// Places of each chunk where guests write.
    pub spots: u64,
    /// Bytes of a device.
    pub device_bytes: u64,
    /// Bytes of the last node's, if it has a smaller one.
    pub small_device_bytes: Option<u64>,
    /// Requests of each guest.
    pub ops: u32,
    /// Requests that a guest has in flight at most.
    pub depth: usize,
    /// Whether clients cut requests into small pieces, and have few of them in flight.
    pub has_narrow_windows: bool,
    /// How long volumes let writes wait for space, in milliseconds: each takes the next of these. Disks are
    /// full for two seconds at most.
    pub full_waits_ms: [u64; 3],
    /// How guests behave.
    pub guests_do: GuestBehaviour,
    /// Longest pause of a guest between two requests.
    pub think: Span,
    /// Network.
    pub net: NetPlan,
    /// Disks.
    pub disk: DiskPlan,
    /// Silence after which a host gives a connection up.
    pub request_timeout: Span,
    /// What goes wrong.
    pub faults: FaultPlan,
    /// How often what recurs is done; `None`: as the seed says, from a random source of its own.
    pub pace: Option<Pace>,
    /// Set if hostile hosts send requests; see the module `strangers` of [`crate::sim`].
    pub has_strangers: bool,
    /// A mistake in what is tested.
    pub mutation: Option<Mutation>,
}

impl Plan {
    /// Three nodes, two hosts, a calm network, quick disks, and nothing goes wrong.
    pub fn calm() -> Self {
        Self {
            nodes: 3,
            spares: 0,
            devices: 1,
            hosts: 2,
            lanes: 2,
            replica_threads: 2,
            groups: 2,
            replicas: 3,
            min_in_sync: 2,
            volumes: 2,
            write_through: 0,
            chunks: 2,
            spots: 3,
            device_bytes: 12 << 20,
            small_device_bytes: None,
            ops: 150,
            depth: 4,
            has_narrow_windows: false,
            full_waits_ms: [60_000; 3],
            guests_do: GuestBehaviour {
                sectors: true,
                overlaps: false,
            },
            think: Span(300),
            net: NetPlan {
                base: Span(20),
                jitter: Span(60),
                spike_one_in: 0,
                spike: Span(0),
                double_one_in: 0,
                pickup: Span(0),
            },
            disk: DiskPlan {
                base: Span(50),
                jitter: Span(100),
                flush: Span(500),
            },
            request_timeout: Span::millis(500),
            faults: FaultPlan::default(),
            pace: Some(Pace::USUAL),
            has_strangers: false,
            mutation: None,
        }
    }

    /// A cluster and a network of whatever kind, where nothing fails.
    pub fn draw_healthy(rng: &mut ChaCha8Rng) -> Self {
        let nodes = [3, 3, 3, 4, 5][rng.random_range(0..5)];
        let pick = |rng: &mut ChaCha8Rng, from: &[u64]| from[rng.random_range(0..from.len())];
        let spike_one_in = pick(rng, &[0, 20, 200]) as u32;
        Self {
            nodes,
            hosts: rng.random_range(1..=2),
            lanes: rng.random_range(1..=3),
            replica_threads: rng.random_range(1..=2),
            groups: rng.random_range(1..=3),
            volumes: rng.random_range(1..=3),
            chunks: rng.random_range(1..=3),
            spots: rng.random_range(1..=3),
            ops: rng.random_range(60..=200),
            depth: rng.random_range(1..=12),
            think: Span(pick(rng, &[0, 200, 2000])),
            net: NetPlan {
                base: Span(rng.random_range(5..200)),
                jitter: Span(pick(rng, &[1, 50, 500, 5000])),
                spike_one_in,
                spike: Span::millis(rng.random_range(1..200)),
                double_one_in: pick(rng, &[0, 10, 100]) as u32,
                pickup: Span(pick(rng, &[0, 20, 500])),
            },
            disk: DiskPlan {
                base: Span(rng.random_range(10..100)),
                jitter: Span(pick(rng, &[1, 100, 1000])),
                flush: Span(pick(rng, &[0, 500, 5000])),
            },
            // Late packets add up: what is slow here is not dead.
            request_timeout: Span::seconds(60),
            pace: None,
            ..Self::calm()
        }
    }

    /// What a seed runs.
    pub fn draw(rng: &mut ChaCha8Rng) -> Self {
        let mut plan = Self::draw_healthy(rng);
        if rng.random_bool(0.2) {
            return plan;
        }
        plan.request_timeout = Span::millis(rng.random_range(300..2000));
        let victims = rng.random_range(1..=plan.nodes);
        let mut few = |chance: f64| {
            if rng.random_bool(chance) {
                rng.random_range(1..=2)
            } else {
                0
            }
        };
        plan.faults = FaultPlan {
            victims,
            process_crashes: few(0.5),
            power_losses: few(0.3),
            pauses: few(0.4),
            cuts: few(0.5),
            slow_disks: few(0.3),
            disk_errors: few(0.3),
            leader_losses: few(0.3),
            breaks: few(0.4),
            migrations: few(0.2),
            wrests: few(0.4),
            host_crashes: few(0.3),
            ..FaultPlan::default()
        };
        if plan.nodes > plan.replicas {
            plan.spares = usize::from(few(0.4) > 0);
            plan.faults.joins = plan.spares as u32;
            plan.faults.drains = few(0.3).min(1);
            plan.faults.losses = few(0.3).min(1);
        }
        plan
    }

    /// Adds what disks do of their own accord, if anything is to go wrong. It has a random source of its own:
    /// what else a seed runs is the same with it and without.
    pub fn draw_disk_faults(&mut self, rng: &mut ChaCha8Rng) {
        if self.faults.victims == 0 {
            return;
        }
        if rng.random_bool(0.6) {
            self.faults.rots = rng.random_range(1..=4);
        }
        if rng.random_bool(0.3) {
            self.faults.full_disks = rng.random_range(1..=2);
        }
    }

    /// Adds blocks that disks do not give, likewise.
    pub fn draw_spoils(&mut self, rng: &mut ChaCha8Rng) {
        if self.faults.victims > 0 && rng.random_bool(0.5) {
            self.faults.spoils = rng.random_range(1..=4);
        }
    }

    /// Draws the pace, unless it is set: half of the seeds have the usual one. The others may have replicas
    /// that lie.
    pub fn draw_pace(&mut self, rng: &mut ChaCha8Rng) {
        let is_drawn = rng.random();
        if self.pace.is_some() {
            return;
        }
        self.pace = Some(match is_drawn {
            true => Pace::draw(rng),
            false => Pace::USUAL,
        });
        if is_drawn && self.faults.victims > 0 {
            self.faults.forges = rng.random_range(0..=3);
        }
        if is_drawn {
            self.write_through = rng.random_range(0..=self.volumes);
        }
    }

    /// Draws how long volumes let writes wait for space.
    pub fn draw_full_waits(&mut self, rng: &mut ChaCha8Rng) {
        self.full_waits_ms = [(); 3].map(|()| [0, 300, 60_000][rng.random_range(0..3)]);
    }

    /// Makes the mistake on purpose, with what it needs to be noticed soon: sound disks are the caller's
    /// part.
    pub fn make_mistake(&mut self, mutation: Mutation) {
        self.mutation = Some(mutation);
        self.pace = Some(mutation.pace());
        self.guests_do.sectors = false;
        self.devices = self.devices.max(mutation.devices());
        self.faults.forges = mutation.forges();
        self.has_strangers = mutation.needs_strangers();
        if mutation.writes_through() {
            self.write_through = self.volumes;
        }
    }

    /// What a seed runs when all nodes lose power at once, several times, besides what else goes wrong.
    pub fn draw_outages(rng: &mut ChaCha8Rng) -> Self {
        let mut plan = Self::draw(rng);
        plan.request_timeout = Span::millis(rng.random_range(300..2000));
        plan.faults.victims = plan.faults.victims.max(1);
        plan.faults.outages = rng.random_range(1..=4);
        plan
    }

    /// What a seed runs when more than usual is to go wrong, at every node, and leases move often.
    pub fn draw_rough(rng: &mut ChaCha8Rng) -> Self {
        let mut plan = Self::draw(rng);
        plan.request_timeout = Span::millis(rng.random_range(200..800));
        plan.hosts = 2;
        let drawn = plan.faults;
        let mut more = |at_most: u32| rng.random_range(1..=at_most);
        plan.faults = FaultPlan {
            victims: plan.nodes,
            process_crashes: more(3),
            power_losses: more(2),
            cuts: more(4),
            breaks: more(4),
            wrests: more(4),
            host_crashes: more(2),
            ..drawn
        };
        plan
    }
}
