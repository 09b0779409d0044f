//! Two nodes' data threads with queue pairs beside their connection: requests of all sizes go by them, from
//! and to memory that is registered without a copy and without an allocation, and when the link is lost
//! everything goes on over TCP, until it is back.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use anyhow::{Context as _, Result, bail, ensure};
use fabric_rdma::card::Card;
use fabric_transport::control::{NetConfig, Network};
use fabric_transport::counts::Count;
use fabric_transport::hello::Wire;
use fabric_transport::identity::{Identity, node_name};
use fabric_transport::lane::{Event, Lane};
use fabric_transport::members::{MemberView, Reach};
use fabric_transport::queue_pair::pair::{Offered, Port};
use fabric_types::ids::{ChunkKey, LayerId};
use fabric_types::iov::IoVecs;
use fabric_types::registrar::Registered;
use fabric_types::{
    Command, Epoch, Generation, Incarnation, NodeId, PgId, Reply, Request, RequestId, Sequence,
};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::allocations;
use super::failures::ip;

const CLUSTER: [u8; 16] = [7; 16];
const PEER: NodeId = NodeId(2);
const CHUNK: usize = 4 << 20;
/// Requests under way at a time, each with memory of its own.
const DEPTH: usize = 32;
/// Longest request, in sectors.
const SECTORS_MAX: usize = 512;
/// Most pieces of memory of a request.
const PIECES_MAX: usize = 4;
/// Memory of a request: its pieces, and a gap behind each.
const PLACE_BYTES: usize = (SECTORS_MAX + PIECES_MAX) * 512;
const GAP: [u8; 512] = [0xee; 512];
const LIMIT: Duration = Duration::from_secs(60);
/// Rounds of requests of which two in turn are to allocate nothing.
const ROUNDS_MAX: usize = 8;

/// The credentials of two nodes.
fn identities() -> Result<[Identity; 2]> {
    let key = rcgen::KeyPair::generate()?;
    let mut params = rcgen::CertificateParams::new(Vec::new())?;
    params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
    let ca = params.self_signed(&key)?.pem();
    let issuer = rcgen::Issuer::new(params, key);
    let of = |node: u64| -> Result<Identity> {
        let key = rcgen::KeyPair::generate()?;
        let mut params = rcgen::CertificateParams::new(vec![node_name(CLUSTER, NodeId(node))])?;
        let day = Duration::from_secs(24 * 3600);
        params.not_before = (SystemTime::now() - day).into();
        params.not_after = (SystemTime::now() + day).into();
        let certificate = params.signed_by(&key, &issuer)?.pem();
        let key = key.serialize_pem();
        Ok(Identity::from_pem(
            ca.as_bytes(),
            certificate.as_bytes(),
            key.as_bytes(),
        )?)
    };
    Ok([of(1)?, of(2)?])
}

fn open(address: IpAddr) -> Result<Arc<Card>> {
    let card = Card::open(address).map_err(anyhow::Error::msg)?;
    println!("{}", card.name());
    Ok(Arc::new(card))
}

fn network(node: u64, identity: Identity, address: IpAddr, port: Arc<dyn Port>) -> Result<Network> {
    let config = NetConfig {
        listen: SocketAddr::new(address, 0),
        identity,
        wire: Wire::Crc,
        pairs: Offered::Port(port),
    };
    let incarnation = Incarnation(10 * node);
    Ok(Network::start(&config, CLUSTER, NodeId(node), incarnation)?)
}

/// A request that is under way.
#[derive(Clone, Copy)]
struct Asked {
    id: u64,
    is_write: bool,
    offset: usize,
    len: usize,
    list: [libc::iovec; PIECES_MAX],
    pieces: usize,
}

/// What a load was made of.
#[derive(Debug, Clone, Copy, Default)]
struct Asks {
    requests: u64,
    small_writes: u64,
    /// Pieces of memory that large writes came from.
    large_written: u64,
    /// Pieces of memory that were read to.
    read: u64,
}

pub struct World {
    rng: ChaCha8Rng,
    asking: Lane,
    serving: Lane,
    networks: [Network; 2],
    card: Arc<Card>,
    // Before the memory.
    registered: Option<Registered>,
    /// A place for each request.
    memory: Vec<u8>,
    /// By their places. Boxed: lanes are given pointers to the lists.
    asked: Box<[Option<Asked>; DEPTH]>,
    next: u64,
    /// Only large writes are asked for.
    only_large_writes: bool,
    asks: Asks,
    chunk: Vec<u8>,
    served: u64,
}

impl World {
    /// Of two nodes at this address, of which the serving one has its card used so.
    pub fn new<P: Port + 'static>(
        address: IpAddr,
        serving: impl FnOnce(Arc<Card>) -> Arc<P>,
    ) -> Result<Self> {
        let [one, two] = identities()?;
        let card = open(address)?;
        let port: Arc<Card> = Arc::clone(&card);
        let networks = [
            network(1, one, address, port)?,
            network(2, two, address, serving(open(address)?))?,
        ];
        networks[0].set_peers(HashMap::from([(PEER, networks[1].address())]));
        let member = |node: u64| MemberView {
            incarnation: Incarnation(10 * node),
            former: Vec::new(),
            reach: Reach::All,
        };
        for network in &networks {
            let members = [1, 2].map(|node| (NodeId(node), member(node)));
            network.set_members(members.into());
        }
        let mut world = Self {
            rng: ChaCha8Rng::seed_from_u64(1),
            asking: Lane::new(Arc::clone(networks[0].control()), 0, false)?,
            serving: Lane::new(Arc::clone(networks[1].control()), 0, true)?,
            networks,
            card,
            registered: None,
            memory: vec![0; DEPTH * PLACE_BYTES],
            asked: Box::new([None; DEPTH]),
            next: 0,
            only_large_writes: false,
            asks: Asks::default(),
            chunk: vec![0; CHUNK],
            served: 0,
        };
        world.register()?;
        Ok(world)
    }

    fn register(&mut self) -> Result<()> {
        let start = NonNull::from(&mut self.memory[0]);
        // SAFETY: it is dropped before the memory, which is reached by the pointers of requests while they
        // are under way.
        let registered = unsafe { self.card.register(start, self.memory.len()) };
        self.registered = Some(registered.map_err(anyhow::Error::msg)?);
        Ok(())
    }

    /// What is counted at a node, 0 or 1.
    pub fn of(&self, node: usize, count: Count) -> u64 {
        self.networks[node].counters().get(count)
    }

    fn messages(&self) -> u64 {
        self.of(0, Count::MessagesOut)
    }

    /// Whether requests go by a queue pair; else why not.
    fn by_rdma(&self) -> Result<(), String> {
        let peer_routes = self.networks[0].peer_routes();
        match peer_routes.first() {
            Some((PEER, way)) if way.rdma == 1 => Ok(()),
            Some((_, way)) => Err(way.why_not.clone().unwrap_or_default()),
            None => Err("not connected".to_owned()),
        }
    }

    fn unanswered(&self) -> usize {
        self.asked.iter().flatten().count()
    }

    /// A place and a part of the chunk with which nothing is under way.
    fn next_ask(&mut self) -> Option<(usize, Asked)> {
        let place = self.asked.iter().position(Option::is_none)?;
        let sectors = match self.rng.random_range(0..8) {
            _ if self.only_large_writes => SECTORS_MAX / 4,
            0 => self.rng.random_range(9..=SECTORS_MAX),
            _ => self.rng.random_range(1..=8),
        };
        let len = sectors * 512;
        let offset = self.rng.random_range(0..=(CHUNK - len) / 512) * 512;
        let overlaps =
            |other: &Asked| other.offset < offset + len && offset < other.offset + other.len;
        if self.asked.iter().flatten().any(overlaps) {
            return None;
        }
        let pieces = self.rng.random_range(1..=PIECES_MAX.min(sectors));
        let empty = libc::iovec {
            iov_base: std::ptr::null_mut(),
            iov_len: 0,
        };
        let mut asked = Asked {
            id: self.next,
            is_write: self.only_large_writes || self.rng.random(),
            offset,
            len,
            list: [empty; PIECES_MAX],
            pieces,
        };
        let mut left = sectors;
        let mut memory = &mut self.memory[place * PLACE_BYTES..(place + 1) * PLACE_BYTES];
        for (nth, piece) in asked.list[..pieces].iter_mut().enumerate() {
            let sectors = left / (pieces - nth);
            left -= sectors;
            let (data, rest) = memory.split_at_mut(sectors * 512);
            if asked.is_write {
                self.rng.fill(data);
            } else {
                data.fill(0);
            }
            piece.iov_base = data.as_mut_ptr().cast();
            piece.iov_len = data.len();
            let (gap, rest) = rest.split_at_mut(GAP.len());
            gap.copy_from_slice(&GAP);
            memory = rest;
        }
        Some((place, asked))
    }

    fn ask(&mut self) -> Result<()> {
        let Some((place, asked)) = self.next_ask() else {
            return Ok(());
        };
        self.next += 1;
        let asked = self.asked[place].insert(asked);
        let buffers = IoVecs {
            ptr: asked.list.as_ptr(),
            len: asked.pieces as u32,
        };
        let chunk = ChunkKey {
            layer: LayerId(1),
            index: 0,
        };
        let (offset, len) = (asked.offset as u32, asked.len as u32);
        let command = match asked.is_write {
            true => Command::Write {
                chunk,
                offset,
                buffers,
                len,
                fua: false,
                urgent: false,
            },
            false => Command::Read {
                chunk,
                offset,
                buffers,
                len,
            },
        };
        self.asks.requests += 1;
        match (asked.is_write, len <= 4096) {
            (true, true) => self.asks.small_writes += 1,
            (true, false) => self.asks.large_written += asked.pieces as u64,
            (false, _) => self.asks.read += asked.pieces as u64,
        }
        let request = Request {
            id: RequestId(asked.id),
            pg: PgId(0),
            epoch: Epoch(1),
            generation: Generation(1),
            sequence: Sequence(asked.id + 1),
            watermark: Sequence(0),
            command,
        };
        ensure!(self.asking.send(PEER, &request).is_none(), "not reached");
        Ok(())
    }

    /// A request is answered: what lies in its memory is what lies in the chunk, and beside it nothing was
    /// written.
    fn check(&mut self, id: u64) -> Result<()> {
        let is_it = |asked: &Option<Asked>| asked.is_some_and(|asked| asked.id == id);
        let place = self.asked.iter().position(is_it);
        let place = place.context("a second answer")?;
        let asked = self.asked[place].take().context("it was found")?;
        let mut chunk = &self.chunk[asked.offset..asked.offset + asked.len];
        let mut memory = &self.memory[place * PLACE_BYTES..(place + 1) * PLACE_BYTES];
        for piece in &asked.list[..asked.pieces] {
            let (data, behind) = memory.split_at(piece.iov_len);
            let (stored, rest) = chunk.split_at(piece.iov_len);
            ensure!(data == stored, "other bytes were read than were written");
            ensure!(behind.starts_with(&GAP), "bytes were written beside");
            (memory, chunk) = (&behind[GAP.len()..], rest);
        }
        Ok(())
    }

    fn serve(&mut self, request: &Request) -> Result<()> {
        // SAFETY: the lane holds the list and its memory until it is answered.
        let place = |buffers: &IoVecs| unsafe { (*buffers.ptr).iov_base.cast::<u8>() };
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
            other => bail!("{other:?}"),
        }
        self.served += 1;
        self.serving.reply(&Reply {
            id: request.id,
            incarnation: Incarnation(20),
            result: Ok(()),
        });
        Ok(())
    }

    /// One turn of both threads.
    fn turn(&mut self) -> Result<()> {
        self.asking.kick();
        self.serving.poll();
        while let Some(event) = self.serving.next_event() {
            match event {
                Event::Request(_, _, request) => self.serve(&request)?,
                other => bail!("the serving node: {other:?}"),
            }
        }
        self.serving.kick();
        self.asking.poll();
        while let Some(event) = self.asking.next_event() {
            let Event::Reply(PEER, reply) = event else {
                bail!("the asking node: {event:?}");
            };
            ensure!(reply.result.is_ok(), "{reply:?}");
            self.check(reply.id.0)?;
        }
        Ok(())
    }

    /// Goes on until requests go by a queue pair.
    pub fn until_by_rdma(&mut self) -> Result<()> {
        self.run(|world| world.by_rdma().is_ok(), u64::MAX)?;
        self.load(0)
    }

    /// Goes on until so many more requests are answered.
    pub fn load(&mut self, requests: u64) -> Result<()> {
        let until = self.next + requests;
        self.run(
            |world| world.next >= until && world.unanswered() == 0,
            until,
        )
    }

    fn run(&mut self, done: impl Fn(&Self) -> bool, until: u64) -> Result<()> {
        let start = Instant::now();
        while !done(self) {
            while self.next < until && self.unanswered() < DEPTH {
                self.ask()?;
                if self.rng.random_range(0..4) == 0 {
                    break;
                }
            }
            self.turn()?;
            ensure!(
                start.elapsed() < LIMIT,
                "it does not end: {:?}",
                self.by_rdma()
            );
        }
        Ok(())
    }
}

/// What is promised of data in registered memory.
fn by_rdma_alone(world: &mut World) -> Result<()> {
    // What grows with use has grown: of each request under way.
    world.only_large_writes = true;
    world.load(4 * DEPTH as u64)?;
    world.only_large_writes = false;
    world.load(1000)?;
    let counts = [
        Count::MessagesOut,
        Count::MessagesIn,
        Count::Inside,
        Count::Reads,
        Count::Writes,
        Count::CopiedBytes,
        Count::CreditsExhausted,
        Count::FailedPair,
    ];
    let all = |world: &World, node| counts.map(|count| world.of(node, count));
    let since = |now: [u64; 8], before: [u64; 8]| std::array::from_fn(|at| now[at] - before[at]);
    let before = [all(world, 0), all(world, 1)];
    (world.asks, world.served) = (Asks::default(), 0);
    world.load(2000)?;
    let asking: [u64; 8] = since(all(world, 0), before[0]);
    let serving: [u64; 8] = since(all(world, 1), before[1]);
    let asks = world.asks;
    println!("{asks:?}\nasking: {asking:?}\nserving: {serving:?}");
    let requests = asks.requests;
    // One message each way, small writes inside of it, one READ for each piece of a large write, one WRITE
    // for each of a read, and no copy.
    ensure!(asking == [requests, requests, asks.small_writes, 0, 0, 0, 0, 0]);
    ensure!(
        serving
            == [
                requests,
                requests,
                0,
                asks.large_written,
                asks.read,
                0,
                0,
                0
            ]
    );
    // A queue may still grow by an element: that ends.
    let mut made = Vec::with_capacity(ROUNDS_MAX);
    while made.len() < ROUNDS_MAX && !made.ends_with(&[0, 0]) {
        let before = allocations();
        world.load(1000)?;
        made.push(allocations() - before);
    }
    ensure!(made.ends_with(&[0, 0]), "{made:?} allocations");
    println!("one message each way, no copy, no allocation: ok");

    let pinned = world.card.counts();
    world.registered = None;
    world.load(500)?;
    let copied = world.of(0, Count::CopiedBytes);
    ensure!(copied > 0, "it was not registered");
    println!("memory that is not registered: {copied} bytes copied: ok");
    world.register()?;
    let now = world.card.counts();
    ensure!(now.registrations == pinned.registrations + 1 && now.regions == pinned.regions);
    Ok(())
}

pub fn lanes(address: &str) -> Result<()> {
    let mut world = World::new(address.parse()?, |card| card)?;
    world.until_by_rdma()?;
    by_rdma_alone(&mut world)?;
    world.served = world.next;

    // In the middle of a load.
    ip(&["link", "set", "eth0", "down"])?;
    world.run(|world| world.by_rdma().is_err(), u64::MAX)?;
    world.load(0)?;
    println!("link down: {}", world.by_rdma().err().unwrap_or_default());
    let before = world.messages();
    world.load(1000)?;
    ensure!(world.messages() == before, "by a link that is down");

    ip(&["link", "set", "eth0", "up"])?;
    world.run(|world| world.by_rdma().is_ok(), u64::MAX)?;
    world.load(1000)?;
    println!("link up: RDMA again");
    ensure!(world.messages() > before + 500, "{}", world.messages());
    ensure!(
        world.served == world.next,
        "{} of {}",
        world.served,
        world.next
    );
    Ok(())
}
