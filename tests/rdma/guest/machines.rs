//! Two machines. What they must know of each other they tell over TCP, a line each way.

use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use fabric_rdma::verbs::address::{AckTimeout, Endpoint, Lid, Mtu, Psn, QpNumber, RemoteKey};
use fabric_rdma::verbs::memory::Access;
use fabric_rdma::verbs::post::{Payload, ReceiveChain, RemotePlace, Work};
use fabric_rdma::verbs::queue_pair::{RetryPolicy, State};
use fabric_rdma::verbs::status::Status;
use fabric_rdma::verbs::window::MemoryWindow;

use super::kit::{End, Memory, READS, open_device, pattern};

const BYTES: usize = 1 << 20;
/// Made by the test when it has pulled the plug.
const GO: &str = "/run/go";
const WAIT_LIMIT: Duration = Duration::from_secs(120);

fn patience() -> RetryPolicy {
    RetryPolicy {
        timeout: AckTimeout::at_least(Duration::from_millis(250)),
        retries: 4,
        receiver_not_ready_retries: 0,
    }
}

/// The other machine's end, and a place in its memory.
struct Introduction {
    endpoint: Endpoint,
    place: RemotePlace,
}

fn introduce(stream: &mut TcpStream, endpoint: Endpoint, place: RemotePlace) -> Result<()> {
    let mtu = endpoint.mtu.code();
    let (number, psn, gid) = (endpoint.queue_pair, endpoint.psn.get(), endpoint.gid);
    let (address, key) = (place.address, place.key);
    writeln!(stream, "{number} {psn} {gid} {mtu} {address} {key}").context("introduce ourselves")
}

fn introduction(stream: &TcpStream) -> Result<Introduction> {
    let mut line = String::new();
    BufReader::new(stream).read_line(&mut line)?;
    let words: Vec<&str> = line.split_whitespace().collect();
    let [number, psn, gid, mtu, address, key] = words[..] else {
        bail!("no introduction: {line:?}");
    };
    Ok(Introduction {
        endpoint: Endpoint {
            queue_pair: QpNumber(number.parse()?),
            psn: Psn::new(psn.parse()?),
            gid: gid.parse()?,
            lid: Lid(0),
            mtu: Mtu::from_code(mtu.parse()?).context("no MTU")?,
            reads_served: READS,
            reads_wanted: READS,
        },
        place: RemotePlace {
            address: address.parse()?,
            key: RemoteKey(key.parse()?),
        },
    })
}

/// Opens a window to whoever comes, until it says by a message that it needs it no more, or the connection
/// has ended.
pub fn serve(listen: SocketAddr) -> Result<()> {
    let listener = TcpListener::bind(listen).context("listen")?;
    println!("listening");
    let (mut stream, _) = listener.accept()?;
    let context = open_device()?;
    let end = End::new(&context, None, 1)?;
    let memory = Memory::new(&end.domain, BYTES, Access::LOCAL_WRITE | Access::WINDOWS)?;
    memory.put(0, &pattern(BYTES, 31));
    let peer = introduction(&stream)?;
    end.connect(&peer.endpoint, patience())?;
    let mut receives = ReceiveChain::new(1, 0);
    receives.push(1, &[])?;
    end.pair.post_receives(&mut receives)?;

    let mut window = MemoryWindow::new(&end.domain)?;
    let access = Access::REMOTE_READ | Access::REMOTE_WRITE;
    let bind = window
        .bind(2, memory.region(), 0..BYTES, access)?
        .signalled();
    let key = bind.key();
    end.pair
        .post_bound(&mut [bind], &mut end.pair.send_chain(1))?;
    let bound = end.wait_one()?;
    ensure!(bound.status == Status::Success, "{bound:?}");
    introduce(&mut stream, end.endpoint()?, memory.place(0, key))?;

    let ended = end.wait_one()?;
    println!(
        "the receive: {} {:?}",
        ended.status.name(),
        ended.invalidated
    );
    ensure!(ended.invalidated == Some(key), "{ended:?}");
    // SAFETY: its end was waited for.
    unsafe { window.invalidated() };
    ensure!(
        memory.get(0, BYTES) == pattern(BYTES, 32),
        "what came differs"
    );
    println!("served");
    Ok(())
}

/// Reads from the server, writes to it, and closes its window; `how` is `all`, or `plug` to wait for the plug
/// to be pulled between the two.
pub fn ask(server: SocketAddr, how: &str) -> Result<()> {
    let mut stream = TcpStream::connect(server).context("connect")?;
    let context = open_device()?;
    let end = End::new(&context, None, 1)?;
    let memory = Memory::new(&end.domain, BYTES, Access::LOCAL_WRITE)?;
    introduce(&mut stream, end.endpoint()?, memory.place(0, RemoteKey(0)))?;
    let peer = introduction(&stream)?;
    end.connect(&peer.endpoint, patience())?;

    let all = [memory.region().segment(0..BYTES).context("within")?];
    let ended = end.carry_out(Work::Read(peer.place), Payload::Segments(&all))?;
    ensure!(ended.status == Status::Success, "READ: {ended:?}");
    ensure!(memory.get(0, BYTES) == pattern(BYTES, 31), "READ differs");
    println!("read");
    if how == "plug" {
        return without_network(&end, peer.place, &all);
    }
    memory.put(0, &pattern(BYTES, 32));
    let ended = end.carry_out(Work::Write(peer.place), Payload::Segments(&all))?;
    ensure!(ended.status == Status::Success, "WRITE: {ended:?}");
    let ended = end.carry_out(Work::SendWithInvalidate(peer.place.key), Payload::NONE)?;
    ensure!(ended.status == Status::Success, "SEND: {ended:?}");
    let ended = end.carry_out(Work::Read(peer.place), Payload::Segments(&all))?;
    println!("READ through the closed window: {}", ended.status.name());
    // Who refuses says so once, and then answers nothing any more: a word that is lost on the way leaves
    // silence.
    let is_refused = matches!(ended.status, Status::RemoteAccess | Status::RetryExceeded);
    ensure!(is_refused, "{ended:?}");
    println!("asked");
    Ok(())
}

fn without_network(
    end: &End,
    place: RemotePlace,
    all: &[fabric_rdma::verbs::memory::Segment],
) -> Result<()> {
    let start = Instant::now();
    while !Path::new(GO).exists() {
        ensure!(start.elapsed() < WAIT_LIMIT, "nobody pulled the plug");
        std::thread::sleep(Duration::from_millis(50));
    }
    let start = Instant::now();
    let ended = end.carry_out(Work::Read(place), Payload::Segments(all))?;
    let took = start.elapsed();
    let timeout = patience().timeout.duration();
    println!(
        "without network: {} after {} ms, timeout {} ms, {} retries",
        ended.status.name(),
        took.as_millis(),
        timeout.as_millis(),
        patience().retries
    );
    ensure!(ended.status == Status::RetryExceeded, "{ended:?}");
    ensure!(
        took >= timeout * u32::from(patience().retries),
        "given up too early"
    );
    ensure!(end.pair.state()? == State::Error, "{:?}", end.pair.state()?);
    println!("given up");
    Ok(())
}
