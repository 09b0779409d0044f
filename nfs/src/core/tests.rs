//! Two NFS nodes and a model of meta: any sequence of steps, cuts, crashes and moves.

use proptest::prelude::*;

use super::*;

const NFS_NODES: usize = 2;
/// Ticks of a lease; an address is given away at the latest when it ends, as the kernel does by itself.
const LEASE_TICKS: u32 = 3;
/// After the last fault everything is in place within so many rounds.
const ROUNDS_MAX: usize = 60;

#[derive(Debug, Clone, Copy)]
enum Event {
    /// An NFS node takes its next step.
    Step(usize),
    /// Time goes on: leases of NFS nodes that are cut off run out.
    Tick,
    /// An NFS node is cut off from meta, or reaches it again.
    Cut(usize),
    /// A machine loses power and boots.
    Crash(usize),
    /// An operator, or an NFS node, decides who serves.
    Assign(usize),
    /// The next unmount of an NFS node fails as busy.
    Busy(usize),
}

#[derive(Debug, Clone, Copy, Default)]
struct Node {
    mounted: bool,
    published: bool,
    address: bool,
    is_cut: bool,
    busy: bool,
    /// Ticks until it must not do anything under its lease; as it counts them itself.
    lease_left: u32,
    /// What it knows of meta.
    known_owner: Option<usize>,
    known_assigned: usize,
}

#[derive(Debug, Clone)]
struct World {
    nodes: [Node; NFS_NODES],
    /// Who has the attachment.
    owner: Option<usize>,
    assigned: usize,
    /// Ticks until meta may give the lease to another.
    lease_left: u32,
}

impl World {
    fn new() -> Self {
        Self {
            nodes: [Node::default(); NFS_NODES],
            owner: None,
            assigned: 0,
            lease_left: 0,
        }
    }

    fn seen(&self, at: usize) -> Seen {
        let node = &self.nodes[at];
        Seen {
            attachment: match node.known_owner {
                None => AttachmentSeen::None,
                Some(owner) if owner == at => AttachmentSeen::Own { device: true },
                Some(owner) => AttachmentSeen::Other {
                    is_down: self.nodes[owner].is_cut,
                },
            },
            lease: match (node.known_owner == Some(at), node.lease_left) {
                (true, 1..) => LeaseSeen::Held,
                (true, 0) => LeaseSeen::Expired,
                (false, _) => LeaseSeen::NotOwn,
            },
            mounted: node.mounted,
            published: node.published,
            address: match node.address {
                true => AddressSeen::Present,
                false => AddressSeen::Absent,
            },
        }
    }

    /// An NFS node that is not cut off hears of the newest.
    fn learn(&mut self, at: usize) {
        let (owner, assigned) = (self.owner, self.assigned);
        let node = &mut self.nodes[at];
        if !node.is_cut {
            node.known_owner = owner;
            node.known_assigned = assigned;
        }
    }

    fn step(&mut self, at: usize) -> Step {
        self.learn(at);
        let wanted = match self.nodes[at].known_assigned == at {
            true => Wanted::Here,
            false => Wanted::Elsewhere,
        };
        let step = next(wanted, &self.seen(at));
        let reaches_meta = !self.nodes[at].is_cut;
        match step {
            Step::Attach if reaches_meta && self.owner.is_none() && self.lease_left == 0 => {
                self.owner = Some(at);
                self.lease_left = LEASE_TICKS;
                self.nodes[at].lease_left = LEASE_TICKS;
            }
            Step::ForgetDead if reaches_meta => {
                let owner = self.owner.expect("an attachment of another was seen");
                assert!(self.nodes[owner].is_cut, "only of a node that is down");
                self.owner = None;
            }
            Step::Detach => {
                assert!(
                    !self.nodes[at].mounted,
                    "the lease is given back while it is mounted"
                );
                if reaches_meta {
                    self.owner = None;
                    self.lease_left = 0;
                }
            }
            Step::Mount => {
                assert_eq!(
                    self.seen(at).lease,
                    LeaseSeen::Held,
                    "mounted without the lease"
                );
                self.nodes[at].mounted = true;
            }
            Step::Publish => self.nodes[at].published = true,
            Step::SetAddress => {
                assert!(self.nodes[at].published, "clients come before the export");
                self.nodes[at].address = true;
            }
            Step::DropAddress => self.nodes[at].address = false,
            Step::Unpublish => {
                assert!(!self.nodes[at].address, "clients see the export vanish");
                self.nodes[at].published = false;
            }
            Step::Unmount { fenced } => {
                assert!(!self.nodes[at].published);
                let busy = std::mem::take(&mut self.nodes[at].busy);
                if fenced || !busy {
                    self.nodes[at].mounted = false;
                }
            }
            _ => {}
        }
        step
    }

    fn tick(&mut self) {
        for at in 0..NFS_NODES {
            self.learn(at);
            let owns = self.owner == Some(at);
            let node = &mut self.nodes[at];
            match owns && !node.is_cut {
                // The daemon renews it.
                true => {
                    node.lease_left = LEASE_TICKS;
                    self.lease_left = LEASE_TICKS;
                }
                false => node.lease_left = node.lease_left.saturating_sub(1),
            }
            if node.lease_left == 0 {
                // The kernel's own clock for the address.
                node.address = false;
            }
        }
        let renewed = self.owner.is_some_and(|owner| !self.nodes[owner].is_cut);
        if !renewed {
            self.lease_left = self.lease_left.saturating_sub(1);
        }
    }

    fn apply(&mut self, event: Event) {
        match event {
            Event::Step(at) => {
                self.step(at);
            }
            Event::Tick => self.tick(),
            Event::Cut(at) => self.nodes[at].is_cut = !self.nodes[at].is_cut,
            Event::Crash(at) => {
                let known_assigned = self.nodes[at].known_assigned;
                self.nodes[at] = Node {
                    known_assigned,
                    known_owner: self.owner,
                    ..Node::default()
                };
            }
            Event::Assign(at) => self.assigned = at,
            Event::Busy(at) => self.nodes[at].busy = true,
        }
        self.check();
    }

    fn check(&self) {
        let writers = self
            .nodes
            .iter()
            .filter(|node| node.mounted && node.lease_left > 0);
        assert!(writers.count() <= 1, "two NFS nodes may write: {self:?}");
        let addresses = self.nodes.iter().filter(|node| node.address);
        assert!(
            addresses.count() <= 1,
            "two NFS nodes have the address: {self:?}"
        );
    }

    fn is_served(&self) -> bool {
        (0..NFS_NODES).all(|at| {
            let node = &self.nodes[at];
            let here = at == self.assigned;
            (node.mounted, node.published, node.address) == (here, here, here)
        })
    }
}

fn event() -> impl Strategy<Value = Event> {
    prop_oneof![
        8 => (0..NFS_NODES).prop_map(Event::Step),
        4 => Just(Event::Tick),
        1 => (0..NFS_NODES).prop_map(Event::Cut),
        1 => (0..NFS_NODES).prop_map(Event::Crash),
        1 => (0..NFS_NODES).prop_map(Event::Assign),
        1 => (0..NFS_NODES).prop_map(Event::Busy),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn never_two_writers_or_addresses_and_always_served_in_the_end(
        events in proptest::collection::vec(event(), 0..120)
    ) {
        let mut world = World::new();
        for event in events {
            world.apply(event);
        }
        for node in &mut world.nodes {
            node.is_cut = false;
        }
        for _ in 0..ROUNDS_MAX {
            for at in 0..NFS_NODES {
                world.apply(Event::Step(at));
            }
            world.apply(Event::Tick);
        }
        prop_assert!(world.is_served(), "{world:?}");
    }

    #[test]
    fn any_view_has_a_step_and_none_breaks_a_rule(
        wanted in prop_oneof![Just(Wanted::Here), Just(Wanted::Elsewhere), Just(Wanted::Deleted)],
        seen in seen(),
    ) {
        match next(wanted, &seen) {
            Step::Mount | Step::Publish | Step::SetAddress => {
                prop_assert!(wanted == Wanted::Here && seen.lease == LeaseSeen::Held);
                prop_assert_eq!(seen.attachment, AttachmentSeen::Own { device: true });
            }
            Step::Detach => prop_assert!(!seen.mounted && !seen.published),
            Step::ForgetExport | Step::Attach => {
                prop_assert!(!seen.mounted && seen.attachment == AttachmentSeen::None);
            }
            Step::ForgetDead => {
                prop_assert_eq!(seen.attachment, AttachmentSeen::Other { is_down: true });
            }
            Step::Unpublish => prop_assert!(seen.address != AddressSeen::Present),
            Step::Unmount { .. } => prop_assert!(!seen.published),
            Step::Rest | Step::Wait(_) | Step::DropAddress => {}
        }
    }
}

fn seen() -> impl Strategy<Value = Seen> {
    let attachment = prop_oneof![
        Just(AttachmentSeen::None),
        any::<bool>().prop_map(|device| AttachmentSeen::Own { device }),
        any::<bool>().prop_map(|is_down| AttachmentSeen::Other { is_down }),
    ];
    let lease = prop_oneof![
        Just(LeaseSeen::Held),
        Just(LeaseSeen::Expired),
        Just(LeaseSeen::NotOwn)
    ];
    let address = prop_oneof![
        Just(AddressSeen::Unwanted),
        Just(AddressSeen::Absent),
        Just(AddressSeen::Present)
    ];
    (attachment, lease, any::<bool>(), any::<bool>(), address).prop_map(
        |(attachment, lease, mounted, published, address)| Seen {
            attachment,
            lease,
            mounted,
            published,
            address,
        },
    )
}

#[test]
fn a_hand_over_takes_the_steps_in_order() {
    let mut world = World::new();
    let mut steps = Vec::new();
    for _ in 0..5 {
        steps.push(world.step(0));
    }
    world.assigned = 1;
    for _ in 0..5 {
        steps.push(world.step(0));
    }
    let up = [
        Step::Attach,
        Step::Mount,
        Step::Publish,
        Step::SetAddress,
        Step::Rest,
    ];
    let down = [
        Step::DropAddress,
        Step::Unpublish,
        Step::Unmount { fenced: false },
        Step::Detach,
        Step::Rest,
    ];
    assert_eq!(steps, [up, down].concat());
}

#[test]
fn while_the_lease_is_only_expired_state_of_clients_stays() {
    let seen = Seen {
        attachment: AttachmentSeen::Own { device: true },
        lease: LeaseSeen::Expired,
        mounted: true,
        published: true,
        address: AddressSeen::Absent,
    };
    assert_eq!(next(Wanted::Here, &seen), Step::Wait(Reason::Lease));
    let back = Seen {
        lease: LeaseSeen::Held,
        ..seen
    };
    assert_eq!(next(Wanted::Here, &back), Step::SetAddress);
}
