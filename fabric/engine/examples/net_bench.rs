//! Requests per second and CPU per request over loopback, on either wire, beside a plain echo of the same
//! sizes.
//!
//! `cargo run -p fabric --example net_bench -- [seconds]`. Two nodes in this process: one asks at a fixed
//! depth, the other answers from a store that keeps nothing, so what is measured is the transport. CPU is
//! that of both ends together. The echo is a thread with one blocking socket on each side: a request of the
//! size of a header and a reply with the data (a read), or the other way round (a write), one at a time in
//! flight per socket but sent as deep.

use std::collections::HashMap;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use fabric::{
    ClusterView, Fabric, FabricConfig, FabricEngine, Grant, GroupView, MemberView, Reach,
    StoreKind, VolumeHandle,
};
use fabric_replication::volume::{Durability, OnFull, VolumeParams};
use fabric_transport::control::NetConfig;
use fabric_transport::hello::Wire;
use fabric_transport::identity::{Identity, node_name};
use fabric_types::ids::LayerId;
use fabric_types::io::{Engine, Op, Request, Submit, Tag};
use fabric_types::membership::{Member, ReplicaState};
use fabric_types::{Epoch, Generation, Incarnation, NodeId, PgId};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::time::Timespec;

/// Bytes that a request or reply has besides its data, as in the protocol.
const HEAD_BYTES: usize = 120;

/// Size of a request's data, and how many are in flight.
const SIZES: [(usize, usize); 2] = [(4096, 32), (1 << 20, 8)];

fn main() {
    let seconds = std::env::args()
        .nth(1)
        .map_or(3, |text| text.parse().expect("a number of seconds"));
    let time = Duration::from_secs(seconds);
    println!("wire   op     bytes  depth  requests/s   MiB/s  CPU us/request");
    for (bytes, depth) in SIZES {
        for write in [false, true] {
            for wire in [Wire::Tls, Wire::Crc] {
                let name = format!("{wire:?}").to_lowercase();
                report(&name, write, bytes, depth, || {
                    nodes(wire, write, bytes, depth, time)
                });
            }
            report("echo", write, bytes, depth, || {
                echo(write, bytes, depth, time)
            });
        }
    }
}

fn report(name: &str, write: bool, bytes: usize, depth: usize, run: impl FnOnce() -> Figures) {
    let Figures {
        requests,
        elapsed,
        cpu,
    } = run();
    let rate = requests as f64 / elapsed.as_secs_f64();
    println!(
        "{name:6} {:5} {bytes:7} {depth:6} {rate:11.0} {:7.0} {:15.2}",
        if write { "write" } else { "read" },
        rate * bytes as f64 / f64::from(1 << 20),
        cpu.as_secs_f64() * 1e6 / requests as f64,
    );
}

struct Figures {
    requests: u64,
    elapsed: Duration,
    cpu: Duration,
}

fn cpu() -> Duration {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::new(now.tv_sec as u64, now.tv_nsec as u32)
}

fn identity(issuer: &rcgen::Issuer<'_, rcgen::KeyPair>, ca: &str, node: u64) -> Identity {
    let key = rcgen::KeyPair::generate().expect("a key");
    let names = vec![node_name([1; 16], NodeId(node))];
    let params = rcgen::CertificateParams::new(names).expect("a name");
    let certificate = params.signed_by(&key, issuer).expect("a certificate").pem();
    let key = key.serialize_pem();
    Identity::from_pem(ca.as_bytes(), certificate.as_bytes(), key.as_bytes()).expect("certificates")
}

fn open(node: u64, identity: Identity, wire: Wire) -> Fabric {
    let mut config = FabricConfig::new(NodeId(node), Incarnation(node), [1; 16], StoreKind::Null);
    config.net = Some(NetConfig {
        listen: "127.0.0.1:0".parse().expect("an address"),
        identity,
        wire,
        pairs: fabric_transport::queue_pair::pair::Offered::No("over loopback".to_owned()),
    });
    Fabric::open(config).expect("a fabric")
}

/// What the map says of a node.
fn known_as(node: u64) -> (NodeId, MemberView) {
    let view = MemberView {
        incarnation: Incarnation(node),
        former: Vec::new(),
        reach: Reach::All,
    };
    (NodeId(node), view)
}

/// Node 2 is the only replica.
fn map(address: SocketAddr) -> ClusterView {
    let member = Member {
        node: NodeId(2),
        incarnation: Incarnation(2),
        state: ReplicaState::InSync,
        since: Epoch(1),
    };
    ClusterView {
        epoch: Epoch(1),
        peers: HashMap::from([(NodeId(2), address)]),
        members: [1, 2].map(known_as).into(),
        groups: vec![GroupView {
            pg: PgId(0),
            epoch: Epoch(1),
            min_in_sync: 1,
            power_lost: Epoch(0),
            members: vec![member],
            device: Some(0),
            incoming: None,
        }],
        own_devices: vec![(0, [0; 16])],
    }
}

fn nodes(wire: Wire, write: bool, bytes: usize, depth: usize, time: Duration) -> Figures {
    let key = rcgen::KeyPair::generate().expect("a key");
    let mut params = rcgen::CertificateParams::new(Vec::new()).expect("no names");
    params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
    let ca = params.self_signed(&key).expect("a certificate").pem();
    let issuer = rcgen::Issuer::new(params, key);
    let asks = open(1, identity(&issuer, &ca, 1), wire);
    let answers = open(2, identity(&issuer, &ca, 2), wire);
    let address = answers.address().expect("it listens");
    for fabric in [&asks, &answers] {
        fabric.set_map(map(address));
        let grant = Grant {
            holder: Some(NodeId(1)),
            generation: Generation(1),
        };
        fabric.set_layers([(LayerId(1), grant)]);
    }
    let stop = Arc::new(AtomicBool::new(false));
    let stopped = Arc::clone(&stop);
    let mut server = answers.engine().expect("an engine");
    let thread = std::thread::spawn(move || {
        while !stopped.load(Ordering::Relaxed) {
            server.reap(&mut |_, _| ());
            wait(&server);
        }
    });
    let volume = asks.open_volume(&params_of()).expect("a volume");
    while !volume.is_recovered() {
        std::thread::sleep(Duration::from_millis(1));
    }
    let engine = asks.engine().expect("an engine");
    let figures = load(engine, &volume, write, bytes, depth, time);
    stop.store(true, Ordering::Relaxed);
    thread.join().expect("the server ends");
    figures
}

fn params_of() -> VolumeParams {
    VolumeParams {
        layer: LayerId(1),
        size_bytes: 1 << 30,
        generation: Generation(1),
        epoch: Epoch(1),
        read_only: false,
        durability: Durability::Flush,
        on_full: OnFull::default(),
    }
}

fn wait(engine: &FabricEngine) {
    let fd = engine.wait_fd();
    let timeout = Timespec {
        tv_sec: 0,
        tv_nsec: 100_000_000,
    };
    let _ = poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&timeout));
}

fn load(
    mut engine: FabricEngine,
    volume: &VolumeHandle,
    write: bool,
    bytes: usize,
    depth: usize,
    time: Duration,
) -> Figures {
    let mut memory = vec![1u8; bytes * depth];
    let base = memory.as_mut_ptr();
    let submit = |engine: &mut FabricEngine, slot: usize| {
        let buffers = [libc::iovec {
            iov_base: base.wrapping_add(slot * bytes).cast(),
            iov_len: bytes,
        }];
        let request = Request {
            tag: Tag(slot as u64),
            op: if write {
                Op::Write { fua: false }
            } else {
                Op::Read
            },
            offset: (slot * bytes) as u64,
            len: bytes as u64,
            buffers: &buffers,
        };
        // SAFETY: the memory outlives the engine.
        let submitted = unsafe { engine.submit(volume, &request) };
        assert_eq!(submitted, Submit::Pending);
    };
    (0..depth).for_each(|slot| submit(&mut engine, slot));
    engine.kick();
    let mut start = None;
    let mut requests = 0;
    let mut done = Vec::new();
    loop {
        let (since, cpu_before) = *start.get_or_insert_with(|| (Instant::now(), cpu()));
        engine.reap(&mut |tag, result| {
            result.expect("it succeeds");
            done.push(tag.0 as usize);
        });
        requests += done.len() as u64;
        let elapsed = since.elapsed();
        if elapsed >= time {
            let figures = Figures {
                requests,
                elapsed,
                cpu: cpu() - cpu_before,
            };
            while engine.in_flight() > 0 {
                engine.reap(&mut |_, _| ());
                wait(&engine);
            }
            return figures;
        }
        if done.is_empty() {
            wait(&engine);
        }
        done.drain(..).for_each(|slot| submit(&mut engine, slot));
        engine.kick();
    }
}

/// Both sides read and write whole messages in their order; nothing is checked or encrypted.
fn echo(write: bool, bytes: usize, depth: usize, time: Duration) -> Figures {
    let (there, back) = match write {
        true => (HEAD_BYTES + bytes, HEAD_BYTES),
        false => (HEAD_BYTES, HEAD_BYTES + bytes),
    };
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("an address");
    let server = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().expect("a connection");
        stream.set_nodelay(true).expect("an option");
        let (mut ask, answer) = (vec![0u8; there], vec![1u8; back]);
        while stream.read_exact(&mut ask).is_ok() {
            if stream.write_all(&answer).is_err() {
                return;
            }
        }
    });
    let mut stream = TcpStream::connect(address).expect("a connection");
    stream.set_nodelay(true).expect("an option");
    let (ask, mut answer) = (vec![1u8; there], vec![0u8; back]);
    let (since, before) = (Instant::now(), cpu());
    let mut reader = stream.try_clone().expect("a second handle");
    let (credit, credits) = std::sync::mpsc::sync_channel::<()>(depth);
    let writer = std::thread::spawn(move || {
        while credits.recv().is_ok() {
            if stream.write_all(&ask).is_err() {
                return;
            }
        }
    });
    (0..depth).for_each(|_| credit.send(()).expect("the writer lives"));
    let mut requests = 0;
    while since.elapsed() < time {
        reader.read_exact(&mut answer).expect("an answer");
        requests += 1;
        credit.send(()).expect("the writer lives");
    }
    let figures = Figures {
        requests,
        elapsed: since.elapsed(),
        cpu: cpu() - before,
    };
    drop(credit);
    reader
        .shutdown(std::net::Shutdown::Both)
        .expect("it is open");
    writer.join().expect("the writer ends");
    server.join().expect("the server ends");
    figures
}
