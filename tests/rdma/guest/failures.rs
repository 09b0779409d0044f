//! How connections end, and what is refused before anything happens.

use std::process::Command;
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use fabric_rdma::verbs::address::{AckTimeout, PortNumber, QpNumber};
use fabric_rdma::verbs::completion::CompletionQueue;
use fabric_rdma::verbs::context::{Context, PortState};
use fabric_rdma::verbs::event::Event;
use fabric_rdma::verbs::memory::{Access, ProtectionDomain};
use fabric_rdma::verbs::post::{Payload, ReceiveChain, SendFlags, Work};
use fabric_rdma::verbs::queue_pair::{QueuePair, RetryPolicy, State};
use fabric_rdma::verbs::status::Status;
use fabric_rdma::verbs::window::{BindError, MemoryWindow};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Resource, Rlimit, setrlimit};

use super::kit::{
    DEPTHS, End, Memory, PORT, connected, connected_with, open, open_device, patience,
};

/// A user without rights.
const NOBODY: libc::uid_t = 65534;

/// A message without a receive for it fails at once, and ends the connection.
pub fn receiver_not_ready() -> Result<()> {
    let context = open_device()?;
    let (one, two) = connected(&context)?;
    let ended = one.carry_out(Work::Send, Payload::Inline(b"unasked"))?;
    println!(
        "no receive: {} {:?} {:?}",
        ended.status.name(),
        one.pair.state()?,
        two.pair.state()?
    );
    ensure!(ended.status == Status::ReceiverNotReady, "{ended:?}");
    ensure!(one.pair.state()? == State::Error, "{:?}", one.pair.state()?);
    Ok(())
}

/// All that is posted on a connection that has ended is told as flushed, with or without a completion asked
/// for.
pub fn flushed() -> Result<()> {
    let context = open_device()?;
    let (one, _two) = connected(&context)?;
    let mut receives = ReceiveChain::new(3, 0);
    for id in 10..13 {
        receives.push(id, &[])?;
    }
    one.pair.post_receives(&mut receives)?;
    ensure!(one.poll()?.is_empty(), "receives ended by themselves");
    one.pair.fail()?;
    ensure!(one.pair.state()? == State::Error, "{:?}", one.pair.state()?);
    let ended = one.wait(3)?;
    let ids: Vec<u64> = ended.iter().map(|ended| ended.id).collect();
    ensure!(ids == [10, 11, 12], "{ids:?}");
    ensure!(
        ended.iter().all(|ended| ended.status == Status::Flushed),
        "{ended:?}"
    );

    let mut chain = one.pair.send_chain(2);
    chain.push(20, Work::Send, Payload::NONE, SendFlags::SILENT)?;
    chain.push(21, Work::Send, Payload::NONE, SendFlags::SIGNALLED)?;
    one.pair.post(&mut chain)?;
    let ended = one.wait(2)?;
    println!("posted afterwards: {ended:?}");
    ensure!(
        ended.iter().all(|ended| ended.status == Status::Flushed),
        "{ended:?}"
    );
    Ok(())
}

/// A peer that is not there is given up after the retries.
pub fn nobody_answers() -> Result<()> {
    let context = open_device()?;
    let one = End::new(&context, None, 1)?;
    let mut nobody = one.endpoint()?;
    nobody.queue_pair = QpNumber(0x00ab_cdef);
    let timeout = AckTimeout::at_least(Duration::from_millis(100));
    one.connect(
        &nobody,
        RetryPolicy {
            timeout,
            retries: 3,
            receiver_not_ready_retries: 0,
        },
    )?;
    let start = Instant::now();
    let ended = one.carry_out(Work::Send, Payload::Inline(b"hello?"))?;
    let took = start.elapsed();
    println!(
        "nobody: {} after {} ms, timeout {} ms, 3 retries",
        ended.status.name(),
        took.as_millis(),
        timeout.duration().as_millis()
    );
    ensure!(ended.status == Status::RetryExceeded, "{ended:?}");
    ensure!(took >= timeout.duration() * 3, "given up too early");
    ensure!(one.pair.state()? == State::Error, "{:?}", one.pair.state()?);
    Ok(())
}

/// The link goes down and comes back: the device tells, and what is sent meanwhile fails.
pub fn link_down() -> Result<()> {
    let context = open_device()?;
    let (one, two) = connected_with(
        &context,
        None,
        RetryPolicy {
            retries: 2,
            ..patience()
        },
    )?;
    let memory = Memory::new(&two.domain, 4096, open())?;
    let place = memory.place(0, memory.region().remote_key());
    let ended = one.carry_out(Work::Write(place), Payload::Inline(b"before"))?;
    ensure!(ended.status == Status::Success, "{ended:?}");
    while context.next_event()?.is_some() {}

    ip(&["link", "set", "eth0", "down"])?;
    wait_for(&context, Event::PortDown(PORT))?;
    let state = context.port(PORT)?.state;
    ensure!(state == PortState::Down, "the port is {state:?}");
    let ended = one.carry_out(Work::Write(place), Payload::Inline(b"during"))?;
    println!(
        "link down: event, port {state:?}, a WRITE ends with {}",
        ended.status.name()
    );
    ensure!(ended.status != Status::Success, "{ended:?}");
    ensure!(one.pair.state()? == State::Error, "{:?}", one.pair.state()?);
    ensure!(
        memory.get(0, 6) == b"before",
        "written while the link was down"
    );

    ip(&["link", "set", "eth0", "up"])?;
    wait_for(&context, Event::PortActive(PORT))?;
    let (one, two) = connected(&context)?;
    let memory = Memory::new(&two.domain, 4096, open())?;
    let place = memory.place(0, memory.region().remote_key());
    let ended = one.carry_out(Work::Write(place), Payload::Inline(b"after"))?;
    println!(
        "link up: event, a new connection's WRITE ends with {}",
        ended.status.name()
    );
    ensure!(ended.status == Status::Success, "{ended:?}");
    Ok(())
}

pub fn ip(args: &[&str]) -> Result<()> {
    let status = Command::new("ip").args(args).status().context("run ip")?;
    ensure!(status.success(), "ip {args:?}: {status}");
    Ok(())
}

/// Sleeps until the device tells `wanted`.
fn wait_for(context: &Context, wanted: Event) -> Result<()> {
    let limit = Timespec {
        tv_sec: 30,
        tv_nsec: 0,
    };
    loop {
        let mut wait = [PollFd::from_borrowed_fd(context.event_fd(), PollFlags::IN)];
        if poll(&mut wait, Some(&limit))? == 0 {
            bail!("the device does not tell {wanted:?}");
        }
        while let Some(event) = context.next_event()? {
            println!("event: {event:?}");
            if event == wanted {
                return Ok(());
            }
        }
    }
}

/// Errors of calls: what they say, and that nothing is done by halves without saying so.
pub fn refused_early() -> Result<()> {
    let context = open_device()?;
    let error = context.port(PortNumber(9)).expect_err("there is no port 9");
    println!("port 9: {error}");

    let one = End::new(&context, None, 1)?;
    let nowhere = NonNull::new(0x1000 as *mut u8).context("not null")?;
    // SAFETY: nothing is mapped there, so nobody's memory is opened.
    let error = unsafe { one.domain.register(nowhere, 4096, Access::LOCAL_WRITE) };
    println!(
        "unmapped: {}",
        error.err().context("registered what is not there")?
    );

    let mut chain = one.pair.send_chain(1);
    chain.push(1, Work::Send, Payload::NONE, SendFlags::SIGNALLED)?;
    let error = one.pair.post(&mut chain).err();
    println!(
        "not connected: {}",
        error.context("posted before it was connected")?
    );
    let peer = one.endpoint()?;
    let error = one.pair.ready_to_send(peer.psn, 1, patience()).err();
    println!(
        "wrong order: {}",
        error.context("sending before receiving")?
    );

    not_together(&context)?;
    too_many(&context)
}

/// What was made on one opening of a device, or in one domain, is not used with that of another.
fn not_together(context: &Context) -> Result<()> {
    let other = open_device()?;
    let (one, two) = connected(context)?;
    let queue = Arc::new(CompletionQueue::new(&other, 1, None, 0)?);
    let error = QueuePair::new(&one.domain, &queue, &queue, DEPTHS).err();
    println!(
        "another opening: {}",
        error.context("made of two openings")?
    );

    let memory = Memory::new(&two.domain, 4096, open())?;
    let mut theirs = MemoryWindow::new(&two.domain)?;
    let mut ours = MemoryWindow::new(&one.domain)?;
    let refused = ours
        .bind(1, memory.region(), 0..1, Access::REMOTE_READ)
        .err();
    ensure!(refused == Some(BindError::Domain), "{refused:?}");
    let bind = theirs.bind(1, memory.region(), 0..1, Access::REMOTE_READ)?;
    let mut none = one.pair.send_chain(1);
    let error = one.pair.post_bound(&mut [bind], &mut none).err();
    println!(
        "another domain: {}",
        error.context("bound in another domain")?
    );
    ensure!(!theirs.is_bound(), "bound, and not posted");
    Ok(())
}

/// A queue takes as many as it has room for, and says how many that were.
fn too_many(context: &Context) -> Result<()> {
    let (one, two) = connected(context)?;
    let memory = Memory::new(&two.domain, 4096, open())?;
    let place = memory.place(0, memory.region().remote_key());
    let room = one.pair.depths().sends as usize;
    let count = 4 * room;
    let mut chain = one.pair.send_chain(count);
    for id in 0..count {
        let byte = Payload::Inline(&[1]);
        chain.push(id as u64, Work::Write(place), byte, SendFlags::SIGNALLED)?;
    }
    let error = one.pair.post(&mut chain).err().context("no bound")?;
    println!("queue of {room}: {error}");
    // The device may have more room than it says.
    ensure!(error.taken >= room && error.taken < count, "{error}");
    let ended = one.wait(error.taken)?;
    ensure!(
        ended.iter().all(|ended| ended.status == Status::Success),
        "{ended:?}"
    );
    Ok(())
}

/// A process that may not pin as much as it wants to register is told so, and of the limit.
pub fn too_much_pinned() -> Result<()> {
    let context = open_device()?;
    let domain = ProtectionDomain::new(&context)?;
    let limit = Rlimit {
        current: Some(64 << 10),
        maximum: Some(64 << 10),
    };
    setrlimit(Resource::Memlock, limit)?;
    // Without root's capabilities the limit counts.
    // SAFETY: changes the ids of this process, which has one thread.
    let code = unsafe { libc::setresuid(NOBODY, NOBODY, NOBODY) };
    ensure!(code == 0, "setresuid: {}", std::io::Error::last_os_error());
    Memory::new(&domain, 32 << 10, open())?;
    let error = Memory::new(&domain, 1 << 20, open()).err();
    println!("pinned: {}", error.context("no limit")?);
    Ok(())
}
