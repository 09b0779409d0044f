//! Two lanes with queue pairs beside their connection, which are torn at any moment: each request is executed once, and answered once.

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::*;
use crate::net::rdma::fake::FakeCard;
use crate::proto::{Command, Reply, Request};
use crate::store::device::IoVecs;

const REQUESTS: usize = 400;
const CHUNK: usize = 1 << 20;

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
    network.set_peers(HashMap::from([(PEER, ([127, 0, 0, 1], 1).into())]));
    let lane = Lane::new(Arc::clone(network.control()), 0, true).unwrap();
    network.control().wish(Wish::Unregister { lane: 0 });
    (network, lane)
}

/// A request of a client.
struct Asked {
    request: Request,
    memory: Vec<u8>,
    _list: Box<[libc::iovec; 1]>,
    /// What a write brings, or a read is to bring.
    bytes: Vec<u8>,
    answers: u32,
}

struct World {
    rng: ChaCha8Rng,
    card: FakeCard,
    asking: Lane,
    serving: Lane,
    _networks: [Network; 2],
    asked: Vec<Asked>,
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
        let (ours, theirs) = UnixStream::pair().unwrap();
        ours.set_nonblocking(true).unwrap();
        theirs.set_nonblocking(true).unwrap();
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
        // The lane dials with its first request.
        world.ask();
        let letter = Letter::Connected(PEER, ours.into(), established());
        world.asking.mail.post(letter);
        world.serving.mail.served.fetch_add(1, Ordering::AcqRel);
        let letter = Letter::Accepted(theirs.into(), established());
        world.serving.mail.post(letter);
        world
    }

    /// Requests lie beside each other, so that their order does not matter.
    fn ask(&mut self) {
        let id = self.asked.len();
        let room = CHUNK / REQUESTS / 512;
        let most = if self.rng.random_range(0..10) == 0 {
            room
        } else {
            4.min(room)
        };
        let sectors = self.rng.random_range(1..=most);
        let offset = id * room * 512;
        let len = sectors * 512;
        let write = self.rng.random();
        let mut bytes = vec![0; len];
        self.rng.fill(&mut bytes[..]);
        let mut memory = vec![0; len];
        match write {
            true => memory.copy_from_slice(&bytes),
            false => self.chunk[offset..offset + len].copy_from_slice(&bytes),
        }
        let list = Box::new([libc::iovec {
            iov_base: memory.as_mut_ptr().cast(),
            iov_len: len,
        }]);
        let request = request(id as u64, write, offset as u32, &list[..], len as u32);
        assert!(self.asking.send(PEER, &request).is_none());
        self.asked.push(Asked {
            request,
            memory,
            _list: list,
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
                    self.asked[reply.id.0 as usize].answers += 1;
                }
                other => panic!("{other:?}"),
            }
        }
        self.serving.poll();
        while let Some(event) = self.serving.next_event() {
            match event {
                Event::Request(_, request) => {
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
                self.asking.tick();
                self.serving.tick();
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
            match asked.request.command {
                Command::Write { offset, len, .. } => {
                    let stored = &self.chunk[offset as usize..(offset + len) as usize];
                    assert!(stored == asked.bytes, "request {id}");
                }
                _ => assert!(asked.memory == asked.bytes, "request {id}"),
            }
        }
        // What was sent is acknowledged, and nothing is kept for it.
        for _ in 0..200 {
            self.turn();
        }
        assert_eq!(self.serving.servings.taken(), 0);
    }
}

#[test]
fn small_requests_go_by_the_queue_pair_and_large_ones_on_the_connection() {
    let mut world = World::new(1);
    world.run(false);
    world.check();
    let counters = &world.asking.control.counters;
    let messages = counters.messages_out.load(Ordering::Relaxed);
    assert!(messages > REQUESTS as u64 / 2, "{messages}");
    assert_eq!(counters.messages_in.load(Ordering::Relaxed), messages);
    assert_eq!(counters.torn.load(Ordering::Relaxed), 0);
    assert!(counters.copied_bytes.load(Ordering::Relaxed) > 0);
    let ways = world.asking.control.ways.told();
    assert_eq!((ways[0].0, ways[0].1.rdma), (PEER, 1));
}

#[test]
fn a_request_is_executed_once_and_answered_once_however_queue_pairs_end() {
    let mut torn = 0;
    for seed in 0..60 {
        let mut world = World::new(seed);
        world.run(true);
        world.check();
        torn += world.asking.control.counters.torn.load(Ordering::Relaxed);
    }
    assert!(torn > 100, "{torn}");
}

#[test]
fn with_the_connection_the_queue_pair_is_lost() {
    let mut world = World::new(3);
    while world.card.pairs() < 2 || world.held.len() < 5 {
        if world.asked.len() < REQUESTS / 2 {
            world.ask();
        }
        world.asking.tick();
        world.serving.tick();
        world.card.pass();
        world.asking.kick();
        world.asking.poll();
        while world.asking.next_event().is_some() {}
        world.serving.poll();
        while let Some(Event::Request(_, request)) = world.serving.next_event() {
            world.held.push(request);
        }
    }
    let Road::Up(index) = world.asking.peers[&PEER].road else {
        panic!("it is connected")
    };
    world.asking.lose(index, &LinkError::Closed);
    assert!(matches!(world.asking.next_event(), Some(Event::Lost(PEER))));
    assert!(world.asking.next_event().is_none());
    world.serving.poll();
    assert_eq!((world.serving.links.taken(), world.card.pairs()), (0, 0));
    // The store may still be at work on what has come: its memory is there until it is done.
    while !world.held.is_empty() {
        world.answer();
    }
    assert_eq!(world.serving.servings.taken(), 0);
}
