//! Two lanes with queue pairs beside their connection, which fail at any moment: each request is executed
//! once, and answered once.

use std::ptr::NonNull;

use fabric_types::iov::IoVecs;
use fabric_types::registrar::Registered;
use fabric_types::{Command, Reply, Request};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::*;
use crate::queue_pair::fake::{FakeCard, Fault};
use crate::queue_pair::pair::{Port, Side};

const REQUESTS: usize = 400;
const CHUNK: usize = 4 << 20;
/// What lies between the pieces of a request's memory, and stays as it is.
const GAP: [u8; 512] = [0xee; 512];

/// A lane whose queue pairs are the card's.
fn lane_of(node: u64, card: &FakeCard) -> (Network, Lane) {
    let authority = Authority::new();
    let config = NetConfig {
        listen: ([127, 0, 0, 1], 0).into(),
        identity: authority.identity(node, &authority, DAY),
        wire: Wire::Crc,
        pairs: Offered::Port(Arc::new(card.clone())),
    };
    let network = Network::start(&config, CLUSTER, NodeId(node), Incarnation(10)).unwrap();
    network.set_members(members());
    network.set_peers(HashMap::from([(PEER, ([127, 0, 0, 1], 1).into())]));
    let lane = Lane::new(Arc::clone(network.control()), 0, true).unwrap();
    network
        .control()
        .command(ConnectorCommand::Unregister { lane: 0 });
    (network, lane)
}

/// A request of a client.
struct ReceivedRequest {
    request: Request,
    // Before the memory.
    _registered: Option<Registered>,
    /// Pieces, a gap behind each.
    memory: Vec<u8>,
    list: Box<[libc::iovec]>,
    /// What a write brings, or a read is to bring.
    bytes: Vec<u8>,
    answers: u32,
}

impl ReceivedRequest {
    /// Whether the memory holds the bytes, and nothing was written beside them.
    fn is_right(&self) -> bool {
        let mut bytes = &self.bytes[..];
        let mut memory = &self.memory[..];
        self.list.iter().all(|piece| {
            let (wanted, rest) = bytes.split_at(piece.iov_len);
            let (is, behind) = memory.split_at(piece.iov_len);
            (bytes, memory) = (rest, &behind[GAP.len()..]);
            wanted == is && behind.starts_with(&GAP)
        })
    }
}

struct World {
    rng: ChaCha8Rng,
    card: FakeCard,
    asking: Lane,
    serving: Lane,
    _networks: [Network; 2],
    asked: Vec<ReceivedRequest>,
    /// Those that the replica has, and has not answered.
    held: Vec<Request>,
    /// How often each was handed to the replica.
    executed: Vec<u32>,
    chunk: Vec<u8>,
}

fn established() -> Box<Established> {
    Box::new(Established {
        agreed: agreed(),
        session: None,
        rest: Vec::new(),
    })
}

impl World {
    fn new(seed: u64) -> Self {
        let card = FakeCard::new(seed);
        let (one, asking) = lane_of(1, &card);
        let (two, serving) = lane_of(2, &card);
        let mut world = Self {
            rng: ChaCha8Rng::seed_from_u64(seed ^ 0x5eed),
            card,
            asking,
            serving,
            _networks: [one, two],
            asked: Vec::new(),
            held: Vec::new(),
            executed: vec![0; REQUESTS],
            chunk: vec![0; CHUNK],
        };
        // Both pools of both, before anybody waits for that.
        assert_eq!(world.card.counts().regions, 4);
        // The lane dials with its first request.
        world.ask();
        world.connect();
        world
    }

    fn connect(&mut self) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        ours.set_nonblocking(true).unwrap();
        theirs.set_nonblocking(true).unwrap();
        let message = InboxMessage::Connected(PEER, ours.into(), established());
        self.asking.inbox.post(message);
        self.serving.inbox.served.fetch_add(1, Ordering::AcqRel);
        let message = InboxMessage::Accepted(theirs.into(), established());
        self.serving.inbox.post(message);
        self.asking.poll();
        self.serving.poll();
        // Time passes when the test says so.
        self.asking.readiness.set_timer(0);
        self.serving.readiness.set_timer(0);
    }

    /// Requests lie beside each other, so that their order does not matter.
    fn ask(&mut self) {
        let id = self.asked.len();
        let room = CHUNK / REQUESTS / 512;
        let most = if self.rng.random() { room } else { 8 };
        let sectors: usize = self.rng.random_range(1..=most);
        let offset = id * room * 512;
        let len = sectors * 512;
        let write: bool = self.rng.random();
        let mut bytes = vec![0; len];
        self.rng.fill(&mut bytes[..]);
        if !write {
            self.chunk[offset..offset + len].copy_from_slice(&bytes);
        }
        let pieces = match self.rng.random_range(0..4) {
            0 => self.rng.random_range(1..=sectors),
            1 => 2.min(sectors),
            _ => 1,
        };
        let mut memory = vec![0; len + pieces * GAP.len()];
        let start = memory.as_mut_ptr();
        let (mut at, mut left) = (0, sectors);
        let mut list = Vec::new();
        for nth in 0..pieces {
            let sectors = left / (pieces - nth);
            let from = len - left * 512;
            left -= sectors;
            let part = &mut memory[at..at + sectors * 512];
            if write {
                part.copy_from_slice(&bytes[from..from + sectors * 512]);
            }
            list.push(libc::iovec {
                iov_base: start.wrapping_add(at).cast(),
                iov_len: sectors * 512,
            });
            at += sectors * 512;
            memory[at..at + GAP.len()].copy_from_slice(&GAP);
            at += GAP.len();
        }
        let list: Box<[libc::iovec]> = list.into();
        let registered = (self.rng.random_range(0..3) > 0).then(|| {
            let start = NonNull::new(start).unwrap();
            // SAFETY: it goes before the memory.
            unsafe { self.card.register(start, memory.len()) }.unwrap()
        });
        let request = request(id as u64, write, offset as u32, &list, len as u32);
        assert!(self.asking.send(PEER, &request).is_none());
        self.asked.push(ReceivedRequest {
            request,
            _registered: registered,
            memory,
            list,
            bytes,
            answers: 0,
        });
    }

    /// The replica answers some request.
    fn answer(&mut self) {
        let at = self.rng.random_range(0..self.held.len());
        let request = self.held.swap_remove(at);
        let place = |buffers: &IoVecs| {
            // SAFETY: the lane holds the list and its memory until it is answered.
            unsafe { (*buffers.ptr).iov_base.cast::<u8>() }
        };
        match request.command {
            Command::Write {
                offset,
                len,
                buffers,
                ..
            } => {
                let to = &mut self.chunk[offset as usize..(offset + len) as usize];
                // SAFETY: as above.
                unsafe { to.as_mut_ptr().copy_from(place(&buffers), len as usize) };
            }
            Command::Read {
                offset,
                len,
                buffers,
                ..
            } => {
                let from = &self.chunk[offset as usize..(offset + len) as usize];
                // SAFETY: as above.
                unsafe { place(&buffers).copy_from(from.as_ptr(), len as usize) };
            }
            other => panic!("{other:?}"),
        }
        self.serving.reply(&Reply {
            id: request.id,
            incarnation: Incarnation(20),
            result: Ok(()),
        });
        self.serving.kick();
    }

    fn turn(&mut self) {
        self.card.pass();
        self.asking.kick();
        self.asking.poll();
        while let Some(event) = self.asking.next_event() {
            match event {
                Event::Reply(PEER, reply) => {
                    assert_eq!(reply.result, Ok(()));
                    let asked = &mut self.asked[reply.id.0 as usize];
                    asked.answers += 1;
                    let start = asked.memory.as_ptr().addr();
                    let is_open = self.card.has_open(start, asked.memory.len());
                    assert!(!is_open, "a guest is told before its memory is closed");
                }
                other => panic!("{other:?}"),
            }
        }
        self.serving.poll();
        while let Some(event) = self.serving.next_event() {
            match event {
                Event::Request(_, _, request) => {
                    let (Command::Write { offset, .. } | Command::Read { offset, .. }) =
                        request.command
                    else {
                        panic!("{request:?}")
                    };
                    let id = offset as usize / 512 / (CHUNK / REQUESTS / 512);
                    self.executed[id] += 1;
                    self.held.push(request);
                }
                other => panic!("{other:?}"),
            }
        }
        let busy = self.rng.random_range(0..3) > 0;
        if busy && !self.held.is_empty() {
            self.answer();
        }
    }

    fn tick(&mut self) {
        self.asking.tick();
        self.serving.tick();
    }

    fn unanswered(&self) -> usize {
        self.asked.iter().filter(|asked| asked.answers == 0).count()
    }

    fn run(&mut self, tears: bool) {
        for turn in 0..200_000 {
            if self.asked.len() < REQUESTS && self.unanswered() < 200 && self.rng.random() {
                self.ask();
            }
            if tears && self.rng.random_range(0..60) == 0 {
                self.card.tear_all();
            }
            // Time passes, so that another queue pair is offered. Not so much that the peer counts as lost.
            if turn % 40 == 0 {
                self.tick();
            }
            self.turn();
            if self.asked.len() == REQUESTS && self.unanswered() == 0 {
                return;
            }
        }
        panic!("{} requests have no answer", self.unanswered());
    }

    fn check(&mut self) {
        for (id, asked) in self.asked.iter().enumerate() {
            assert_eq!((asked.answers, self.executed[id]), (1, 1), "request {id}");
            if let Command::Write { offset, len, .. } = asked.request.command {
                let stored = &self.chunk[offset as usize..(offset + len) as usize];
                assert!(stored == asked.bytes, "request {id}");
            }
            assert!(asked.is_right(), "request {id}");
        }
        // What was sent is acknowledged, and nothing is kept for it.
        for _ in 0..200 {
            self.turn();
        }
        assert_eq!(self.serving.servings.taken(), 0);
        assert_eq!(self.card.open_windows(), 0);
        for at in 0..self.serving.links.capacity() {
            if self.serving.links.is_taken(at)
                && let Some(link) = self.serving.links[at].as_deref()
                && let End::Responder(responder) = &link.end
            {
                assert_eq!(responder.open(), 0, "signs of life for nothing");
            }
        }
        for lane in [&self.asking, &self.serving] {
            assert_eq!(
                (lane.servings.buffers(), lane.pairs.bounces.in_use()),
                (0, 0)
            );
        }
    }
}

#[test]
fn requests_use_the_queue_pair_and_copy_no_registered_data() {
    let mut world = World::new(1);
    world.run(false);
    world.check();
    let asked = |count| world.asking.counters.get(count);
    let served = |count| world.serving.counters.get(count);
    let messages = asked(Count::MessagesOut);
    assert!(messages > REQUESTS as u64 * 3 / 4, "{messages}");
    assert_eq!(
        (asked(Count::MessagesIn), asked(Count::FailedPair)),
        (messages, 0)
    );
    let (reads, writes) = (served(Count::Reads), served(Count::Writes));
    assert!(reads > 30 && writes > 30, "{reads} {writes}");
    assert!(asked(Count::Inside) > 50);
    assert!(asked(Count::Windows) >= reads + writes);
    for (one, other) in [
        (Count::RdmaBytesOut, Count::RdmaBytesIn),
        (Count::RdmaBytesIn, Count::RdmaBytesOut),
        (Count::TcpBytesOut, Count::TcpBytesIn),
        (Count::TcpBytesIn, Count::TcpBytesOut),
    ] {
        assert_eq!(asked(one), served(other), "{one:?}");
    }
    let all = asked(Count::RdmaBytesOut) + asked(Count::RdmaBytesIn);
    let copied = asked(Count::CopiedBytes);
    assert!(copied > 0 && copied < all / 2, "{copied} of {all}");
    assert_eq!(served(Count::CopiedBytes), 0);
    let lens = world.asked.iter().map(|asked| asked.bytes.len() as u64);
    let by_tcp = asked(Count::TcpBytesOut) + asked(Count::TcpBytesIn);
    assert_eq!(all + by_tcp, lens.sum::<u64>());
    let peer_routes = world.asking.control.peer_routes.report();
    assert_eq!((peer_routes[0].0, peer_routes[0].1.rdma), (PEER, 1));
}

#[test]
fn request_runs_and_is_answered_once_however_queue_pairs_end() {
    let mut failed = 0;
    for seed in 0..60 {
        let mut world = World::new(seed);
        world.run(true);
        world.check();
        failed += world.asking.counters.get(Count::FailedPair);
    }
    assert!(failed > 60, "{failed}");
}

/// The connection to the peer.
fn link_index(world: &World) -> u32 {
    match world.asking.peers[&PEER].link {
        LinkState::Up(index) => index,
        _ => panic!("it is connected"),
    }
}

fn pause(world: &World) -> u32 {
    let link = world.asking.links[link_index(world)].as_deref().unwrap();
    link.requester.as_ref().unwrap().pause()
}

fn until_by_rdma(world: &mut World) {
    while world
        .asking
        .control
        .peer_routes
        .report()
        .iter()
        .all(|way| way.1.rdma == 0)
    {
        world.tick();
        (0..40).for_each(|_| world.turn());
    }
}

/// All requests are answered on the connection, and what does not work is tried again after longer and longer
/// pauses.
fn goes_on_without(fault: Fault) -> World {
    let mut world = World::new(4);
    world.card.set_fault(fault);
    world.run(false);
    world.check();
    let first = link_index(&world);
    for _ in 0..60 {
        world.tick();
        (0..9).for_each(|_| world.turn());
    }
    world.check();
    let asked = |count| world.asking.counters.get(count);
    assert_eq!(
        (asked(Count::MessagesOut), asked(Count::FailedPair)),
        (0, 0)
    );
    assert_eq!(
        link_index(&world),
        first,
        "{fault:?} has cost the connection"
    );
    let peer_routes = world.asking.control.peer_routes.report();
    assert_eq!(
        (peer_routes[0].1.rdma, peer_routes[0].1.tcp),
        (0, 1),
        "{fault:?}"
    );
    let pause = pause(&world);
    assert!(
        pause >= 4 * requester::PAUSE_TICKS_MIN,
        "{fault:?}: {pause} ticks"
    );
    world
}

#[test]
fn no_request_waits_for_a_queue_pair_that_does_not_work() {
    use crate::queue_pair::slots::{HEAD_BYTES, PAYLOAD_BYTES};
    let last = HEAD_BYTES + PAYLOAD_BYTES - 1;
    for fault in [
        Fault::Silent,
        Fault::Dead,
        Fault::Deaf,
        Fault::Damages(Side::ReceivedRequest, 0),
        Fault::Damages(Side::ReceivedRequest, last),
        Fault::Damages(Side::Asks, 0),
        Fault::Damages(Side::Asks, last),
    ] {
        goes_on_without(fault);
    }
}

#[test]
fn the_next_connection_waits_as_long_as_the_last_has_learned() {
    let mut world = goes_on_without(Fault::Silent);
    let index = link_index(&world);
    world.asking.lose(index, &LinkError::Closed);
    assert!(world.asking.control.peer_routes.report().is_empty());
    let failed = world.asking.peers[&PEER].why_not.clone();
    assert!(failed.is_some());
    world.turn();
    let learned = world.asking.peers[&PEER].pause;
    world.asked.clear();
    world.executed.fill(0);
    world.card.set_fault(Fault::None);
    world.ask();
    world.connect();
    assert_eq!(
        world.asking.control.peer_routes.report()[0].1.why_not,
        failed
    );
    for _ in 0..learned {
        (0..9).for_each(|_| world.turn());
        assert_eq!((world.card.pairs(), pause(&world)), (0, learned));
        world.tick();
    }
    until_by_rdma(&mut world);
    world.run(false);
    world.check();
    assert!(world.asking.counters.get(Count::MessagesOut) > 0);
}

#[test]
fn silent_card_ends_the_queue_pair_but_not_the_peer() {
    let mut world = World::new(5);
    until_by_rdma(&mut world);
    while world.asking.counters.get(Count::MessagesIn) < 50 {
        world.ask();
        world.turn();
    }
    world.card.set_fault(Fault::Silent);
    world.ask();
    for _ in 0..crate::caller::QUIET_TICKS_MAX {
        world.tick();
        (0..20).for_each(|_| world.turn());
    }
    for lane in [&world.asking, &world.serving] {
        assert_eq!(lane.counters.get(Count::FailedPair), 1);
    }
    world.card.set_fault(Fault::None);
    world.run(false);
    world.check();
}

#[test]
fn with_the_connection_the_queue_pair_is_lost() {
    let mut world = World::new(3);
    while world.serving.counters.get(Count::MessagesIn) < 20 || world.card.open_windows() == 0 {
        if world.asked.len() < REQUESTS {
            world.ask();
        }
        world.tick();
        world.card.pass();
        world.asking.kick();
        world.asking.poll();
        while world.asking.next_event().is_some() {}
        world.serving.poll();
        while let Some(Event::Request(_, _, request)) = world.serving.next_event() {
            world.held.push(request);
        }
    }
    let LinkState::Up(index) = world.asking.peers[&PEER].link else {
        panic!("it is connected")
    };
    world.asking.lose(index, &LinkError::Closed);
    assert!(matches!(world.asking.next_event(), Some(Event::Lost(PEER))));
    assert!(world.asking.next_event().is_none());
    world.serving.poll();
    assert_eq!((world.serving.links.taken(), world.card.pairs()), (0, 0));
    assert_eq!(world.card.open_windows(), 0);
    // The store may still be at work on what has come: its memory is there until it is done.
    while !world.held.is_empty() {
        world.answer();
    }
    assert_eq!(world.serving.servings.taken(), 0);
}
