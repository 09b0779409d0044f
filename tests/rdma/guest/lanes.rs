//! Two nodes' data threads with queue pairs beside their connection: small requests go by them, and when the link is lost everything goes on over
//! TCP, until it is back.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant, SystemTime};

use anyhow::{Context as _, Result, bail, ensure};
use fabric::net::rdma::card::Card;
use fabric::net::rdma::pair::Offered;
use fabric::net::tcp::control::{NetConfig, Network};
use fabric::net::tcp::hello::Wire;
use fabric::net::tcp::identity::{Identity, node_name};
use fabric::net::tcp::lane::{Event, Lane};
use fabric::proto::ids::{ChunkKey, LayerId};
use fabric::proto::{
    Command, Epoch, Generation, Incarnation, NodeId, PgId, Reply, Request, RequestId, Sequence,
};
use fabric::store::device::IoVecs;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::failures::ip;

const CLUSTER: [u8; 16] = [7; 16];
const PEER: NodeId = NodeId(2);
const CHUNK: usize = 4 << 20;
/// Requests under way at a time.
const DEPTH: usize = 32;
const LIMIT: Duration = Duration::from_secs(60);

/// The papers of two nodes.
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

fn network(node: u64, identity: Identity, address: IpAddr) -> Result<Network> {
    let card = Card::open(address).map_err(anyhow::Error::msg)?;
    println!("node {node}: {}", card.name());
    let config = NetConfig {
        listen: SocketAddr::new(address, 0),
        identity,
        wire: Wire::Crc,
        pairs: Offered::Port(Arc::new(card)),
    };
    Ok(Network::start(
        &config,
        CLUSTER,
        NodeId(node),
        Incarnation(10 * node),
    )?)
}

/// A request, and where its data are.
struct Asked {
    memory: Vec<u8>,
    _list: Box<[libc::iovec; 1]>,
    /// What a read is to bring.
    expected: Option<Vec<u8>>,
}

struct World {
    rng: ChaCha8Rng,
    asking: Lane,
    serving: Lane,
    networks: [Network; 2],
    asked: HashMap<u64, Asked>,
    /// Places with a write under way, which are left alone.
    busy: HashMap<u64, (usize, usize)>,
    next: u64,
    chunk: Vec<u8>,
    served: u64,
}

impl World {
    fn new(address: IpAddr) -> Result<Self> {
        let [one, two] = identities()?;
        let networks = [network(1, one, address)?, network(2, two, address)?];
        networks[0].set_peers(HashMap::from([(PEER, networks[1].address())]));
        Ok(Self {
            rng: ChaCha8Rng::seed_from_u64(1),
            asking: Lane::new(Arc::clone(networks[0].control()), 0, false)?,
            serving: Lane::new(Arc::clone(networks[1].control()), 0, true)?,
            networks,
            asked: HashMap::new(),
            busy: HashMap::new(),
            next: 0,
            chunk: vec![0; CHUNK],
            served: 0,
        })
    }

    fn messages(&self) -> u64 {
        let counters = self.networks[0].counters();
        counters.messages_out.load(Ordering::Relaxed)
    }

    /// Whether requests go by a queue pair; else why not.
    fn by_rdma(&self) -> Result<(), String> {
        let ways = self.networks[0].ways();
        match ways.first() {
            Some((PEER, way)) if way.rdma == 1 => Ok(()),
            Some((_, way)) => Err(way.why_not.clone().unwrap_or_default()),
            None => Err("not connected".to_owned()),
        }
    }

    fn ask(&mut self) -> Result<()> {
        let sectors = match self.rng.random_range(0..8) {
            0 => self.rng.random_range(1..64),
            _ => self.rng.random_range(1..=8),
        };
        let len = sectors * 512;
        let offset = self.rng.random_range(0..(CHUNK - len) / 512) * 512;
        let overlaps = |(from, to): &(usize, usize)| *from < offset + len && offset < *to;
        if self.busy.values().any(overlaps) {
            return Ok(());
        }
        let is_write = self.rng.random();
        let mut memory = vec![0; len];
        let mut expected = None;
        match is_write {
            true => self.rng.fill(&mut memory[..]),
            false => expected = Some(self.chunk[offset..offset + len].to_vec()),
        }
        let list = Box::new([libc::iovec {
            iov_base: memory.as_mut_ptr().cast(),
            iov_len: len,
        }]);
        let buffers = IoVecs {
            ptr: list.as_ptr(),
            len: 1,
        };
        let chunk = ChunkKey {
            layer: LayerId(1),
            index: 0,
        };
        let (offset32, len32) = (offset as u32, len as u32);
        let command = match is_write {
            true => Command::Write {
                chunk,
                offset: offset32,
                buffers,
                len: len32,
                fua: false,
            },
            false => Command::Read {
                chunk,
                offset: offset32,
                buffers,
                len: len32,
            },
        };
        let id = self.next;
        self.next += 1;
        let request = Request {
            id: RequestId(id),
            pg: PgId(0),
            epoch: Epoch(1),
            generation: Generation(1),
            sequence: Sequence(id + 1),
            watermark: Sequence(0),
            command,
        };
        self.busy.insert(id, (offset, offset + len));
        let asked = Asked {
            memory,
            _list: list,
            expected,
        };
        self.asked.insert(id, asked);
        ensure!(self.asking.send(PEER, &request).is_none(), "not reached");
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
                Event::Request(_, request) => self.serve(&request)?,
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
            let asked = self.asked.remove(&reply.id.0);
            let asked = asked.context("a second answer")?;
            self.busy.remove(&reply.id.0);
            let wrong = asked.expected.is_some_and(|bytes| bytes != asked.memory);
            ensure!(!wrong, "other bytes were read than were written");
        }
        Ok(())
    }

    /// Goes on until so many more requests are answered.
    fn load(&mut self, requests: u64) -> Result<()> {
        let until = self.next + requests;
        self.run(|world| world.next >= until && world.asked.is_empty(), until)
    }

    fn run(&mut self, done: impl Fn(&Self) -> bool, until: u64) -> Result<()> {
        let start = Instant::now();
        while !done(self) {
            while self.next < until && self.asked.len() < DEPTH {
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

pub fn lanes(address: &str) -> Result<()> {
    let mut world = World::new(address.parse()?)?;
    world.run(|world| world.by_rdma().is_ok(), u64::MAX)?;
    world.load(0)?;
    let (before, served) = (world.messages(), world.served);
    world.load(3000)?;
    let messages = world.messages() - before;
    println!(
        "of {} requests {messages} went by RDMA",
        world.served - served
    );
    // Reads and writes of up to 4 KiB are seven eighths, and some of the rest.
    ensure!(messages > 2400 && messages < 3000, "{messages}");

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
