//! Memory windows: a peer reaches what it was offered, for as long as it was offered.

use std::sync::Arc;

use anyhow::{Context as _, Result, bail, ensure};
use fabric_rdma::verbs::address::RemoteKey;
use fabric_rdma::verbs::context::Context;
use fabric_rdma::verbs::memory::{Access, MemoryRegion, ProtectionDomain};
use fabric_rdma::verbs::post::{Payload, ReceiveChain, RemotePlace, SendFlags, Work};
use fabric_rdma::verbs::queue_pair::State;
use fabric_rdma::verbs::status::{Done, Status};
use fabric_rdma::verbs::window::MemoryWindow;

use super::kit::{End, Memory, connected, open_device, pattern};

const BYTES: usize = 64 << 10;
/// What a window opens.
const OPEN: std::ops::Range<usize> = 4096..12288;
const OPEN_BYTES: usize = OPEN.end - OPEN.start;

/// A connection whose `owner` opens windows to its `peer`. The owner's region itself is closed to peers.
struct Stage {
    owner: End,
    peer: End,
    offered: Memory,
    taken: Memory,
}

impl Stage {
    fn new(context: &Context) -> Result<Self> {
        let (owner, peer) = connected(context)?;
        let offered = Memory::new(&owner.domain, BYTES, Access::LOCAL_WRITE | Access::WINDOWS)?;
        let taken = Memory::new(&peer.domain, BYTES, Access::LOCAL_WRITE)?;
        offered.put(0, &pattern(BYTES, 21));
        Ok(Self {
            owner,
            peer,
            offered,
            taken,
        })
    }

    /// Binds `window`, and waits until it is.
    fn bind(&self, window: &mut MemoryWindow, access: Access) -> Result<RemoteKey> {
        let bind = window.bind(5, self.offered.region(), OPEN, access)?;
        let bind = bind.signalled();
        let key = bind.key();
        let mut none = self.owner.pair.send_chain(1);
        self.owner.pair.post_bound(&mut [bind], &mut none)?;
        let ended = self.owner.wait_one()?;
        ensure!(ended.done == Some(Done::BindWindow), "{ended:?}");
        Ok(key)
    }

    fn bound(&self, access: Access) -> Result<(MemoryWindow, RemoteKey)> {
        let mut window = MemoryWindow::new(&self.owner.domain)?;
        let key = self.bind(&mut window, access)?;
        Ok((window, key))
    }

    fn read(&self, key: RemoteKey, offset: usize, bytes: usize) -> Result<Status> {
        let work = Work::Read(self.offered.place(offset, key));
        self.reach(work, bytes)
    }

    fn write(&self, key: RemoteKey, offset: usize, bytes: usize) -> Result<Status> {
        let work = Work::Write(self.offered.place(offset, key));
        self.reach(work, bytes)
    }

    fn reach(&self, work: Work, bytes: usize) -> Result<Status> {
        let part = self.taken.region().segment(0..bytes).context("within")?;
        let ended = self.peer.carry_out(work, Payload::Segments(&[part]))?;
        Ok(ended.status)
    }

    /// The peer's message invalidates `key`.
    fn invalidate_remotely(&self, key: RemoteKey) -> Result<()> {
        let mut receives = ReceiveChain::new(1, 0);
        receives.push(9, &[])?;
        self.owner.pair.post_receives(&mut receives)?;
        let sent = self
            .peer
            .carry_out(Work::SendWithInvalidate(key), Payload::NONE)?;
        ensure!(sent.status == Status::Success, "{sent:?}");
        let received = self.owner.wait_one()?;
        println!(
            "SEND with invalidate: the owner's receive says {:?}",
            received.invalidated
        );
        ensure!(received.invalidated == Some(key), "{received:?}");
        Ok(())
    }

    fn invalidate_locally(&self, key: RemoteKey) -> Result<()> {
        let ended = self
            .owner
            .carry_out(Work::LocalInvalidate(key), Payload::NONE)?;
        ensure!(ended.done == Some(Done::LocalInvalidate), "{ended:?}");
        Ok(())
    }

    fn states(&self) -> Result<(State, State)> {
        Ok((self.peer.pair.state()?, self.owner.pair.state()?))
    }
}

/// Windows open what they should; both ways to close them allow to bind them anew.
pub fn open_and_close() -> Result<()> {
    let context = open_device()?;
    let limits = context.limits()?;
    println!(
        "the device says: {:?}, {} windows",
        limits.window_kinds, limits.windows
    );
    let stage = Stage::new(&context)?;
    let mut window = MemoryWindow::new(&stage.owner.domain)?;
    let mut keys = Vec::new();
    for round in 0..4 {
        let key = stage.bind(&mut window, Access::REMOTE_READ | Access::REMOTE_WRITE)?;
        ensure!(!keys.contains(&key), "key {key} came again");
        keys.push(key);
        ensure!(window.is_bound() && window.key() == key, "{window:?}");
        let refused = window.bind(5, stage.offered.region(), OPEN, Access::REMOTE_READ);
        ensure!(refused.is_err(), "bound twice");

        let status = stage.read(key, OPEN.start, OPEN_BYTES)?;
        ensure!(status == Status::Success, "READ: {status}");
        let shown = stage.offered.get(OPEN.start, OPEN_BYTES);
        ensure!(stage.taken.get(0, OPEN_BYTES) == shown, "READ differs");
        stage.taken.put(0, &pattern(OPEN_BYTES, round));
        let status = stage.write(key, OPEN.start, OPEN_BYTES)?;
        ensure!(status == Status::Success, "WRITE: {status}");
        let now = stage.offered.get(OPEN.start, OPEN_BYTES);
        ensure!(now == pattern(OPEN_BYTES, round), "WRITE differs");

        if round % 2 == 0 {
            stage.invalidate_locally(key)?;
        } else {
            stage.invalidate_remotely(key)?;
        }
        // SAFETY: its end was waited for.
        unsafe { window.invalidated() };
        ensure!(!window.is_bound(), "{window:?}");
    }
    println!("keys: {keys:x?}");
    bound_with_its_message(&stage, &mut window)?;
    println!("windows: ok");
    Ok(())
}

/// The binding and the message that tells the key are posted at once; the peer uses it as soon as the message
/// is there.
fn bound_with_its_message(stage: &Stage, window: &mut MemoryWindow) -> Result<()> {
    let inbox = Memory::new(&stage.peer.domain, 64, Access::LOCAL_WRITE)?;
    let mut receives = ReceiveChain::new(1, 1);
    receives.push(3, &[inbox.region().segment(0..64).context("within")?])?;
    stage.peer.pair.post_receives(&mut receives)?;

    let bind = window.bind(1, stage.offered.region(), OPEN, Access::REMOTE_READ)?;
    let mut chain = stage.owner.pair.send_chain(1);
    let message = bind.key().0.to_le_bytes();
    chain.push(
        2,
        Work::Send,
        Payload::Inline(&message),
        SendFlags::SIGNALLED,
    )?;
    stage.owner.pair.post_bound(&mut [bind], &mut chain)?;

    let received = stage.peer.wait_one()?;
    ensure!(received.bytes == 4, "{received:?}");
    let key = inbox.get(0, 4).try_into().map(u32::from_le_bytes);
    let key = RemoteKey(key.expect("four bytes"));
    let status = stage.read(key, OPEN.start, 100)?;
    ensure!(
        status == Status::Success,
        "READ right behind the message: {status}"
    );
    let sent = stage.owner.wait_one()?;
    ensure!((sent.id, sent.status) == (2, Status::Success), "{sent:?}");
    stage.invalidate_remotely(key)?;
    // SAFETY: its end was waited for.
    unsafe { window.invalidated() };
    Ok(())
}

/// Everything that a peer may try with keys that do not open what it wants. Each ends the connection.
pub fn refused() -> Result<()> {
    let context = open_device()?;
    let read = Access::REMOTE_READ;
    case(
        &context,
        "after a local invalidation",
        read,
        |stage, key| {
            stage.invalidate_locally(key)?;
            stage.read(key, OPEN.start, 100)
        },
    )?;
    case(
        &context,
        "after a remote invalidation",
        read,
        |stage, key| {
            stage.invalidate_remotely(key)?;
            stage.read(key, OPEN.start, 100)
        },
    )?;
    case(&context, "a forged key", read, |stage, key| {
        stage.read(RemoteKey(key.0 ^ 0x10), OPEN.start, 100)
    })?;
    case(
        &context,
        "a forged number of a window",
        read,
        |stage, key| stage.read(RemoteKey(key.0 ^ 0x0004_0000), OPEN.start, 100),
    )?;
    case(&context, "a byte behind the region", read, |stage, key| {
        stage.read(key, BYTES - 99, 100)
    })?;
    case(&context, "a byte before the region", read, |stage, key| {
        let place = RemotePlace {
            address: stage.offered.region().start() - 1,
            key,
        };
        stage.reach(Work::Read(place), 100)
    })?;
    case(
        &context,
        "a WRITE through a window to be read",
        read,
        |stage, key| stage.write(key, OPEN.start, 100),
    )?;
    case(
        &context,
        "a READ through a window to be written",
        Access::REMOTE_WRITE,
        |stage, key| stage.read(key, OPEN.start, 100),
    )?;
    case(
        &context,
        "the key of a region that is not open to peers",
        read,
        |stage, _| {
            let key = stage.offered.region().remote_key();
            stage.read(key, OPEN.start, 100)
        },
    )?;
    key_of_another_connection(&context)?;
    outside_the_window(&context)?;
    closed_by_a_stranger(&context)?;
    println!("refused: ok");
    Ok(())
}

/// The peer of another connection invalidates a key that is not its own. The specification says that it is
/// refused; rxe of Linux 6.1 does not look whose key it is. Whatever becomes of it, the stranger reaches
/// nothing.
fn closed_by_a_stranger(context: &Context) -> Result<()> {
    let first = Stage::new(context)?;
    let (window, key) = first.bound(Access::REMOTE_READ)?;
    let second = Stage::new(context)?;
    let mut receives = ReceiveChain::new(1, 0);
    receives.push(9, &[])?;
    second.owner.pair.post_receives(&mut receives)?;
    let sent = second
        .peer
        .carry_out(Work::SendWithInvalidate(key), Payload::NONE)?;
    let status = first.read(key, OPEN.start, 100)?;
    println!(
        "a stranger's invalidation: {}; a READ of whom the key is for: {}",
        sent.status.name(),
        status.name()
    );
    let (refused, closed) = (
        sent.status != Status::Success,
        status == Status::RemoteAccess,
    );
    ensure!(refused != closed, "{sent:?}, {status}");
    drop(window);
    Ok(())
}

/// What is within the region and outside the window. The specification says that it is refused; rxe of Linux
/// 6.1 looks at the region's bounds only. Anything but these two is wrong.
fn outside_the_window(context: &Context) -> Result<()> {
    for (name, offset, bytes) in [
        ("before", OPEN.start - 1, 100),
        ("behind", OPEN.start, OPEN_BYTES + 1),
    ] {
        let stage = Stage::new(context)?;
        let (_window, key) = stage.bound(Access::REMOTE_READ)?;
        let status = stage.read(key, offset, bytes)?;
        println!(
            "a byte {name} the window, within the region: {}",
            status.name()
        );
        let came = stage.taken.get(0, bytes);
        match status {
            Status::RemoteAccess => ensure!(came == vec![0; bytes], "refused, and bytes came"),
            Status::Success => ensure!(came == stage.offered.get(offset, bytes), "others came"),
            other => bail!("{name}: {other}"),
        }
    }
    Ok(())
}

fn case(
    context: &Context,
    name: &str,
    access: Access,
    attempt: impl FnOnce(&Stage, RemoteKey) -> Result<Status>,
) -> Result<()> {
    let stage = Stage::new(context)?;
    let (window, key) = stage.bound(access)?;
    let before = stage.offered.get(0, BYTES);
    let status = attempt(&stage, key).with_context(|| name.to_owned())?;
    report(&stage, context, name, status)?;
    ensure!(
        stage.taken.get(0, BYTES) == vec![0; BYTES],
        "{name}: bytes came"
    );
    ensure!(
        stage.offered.get(0, BYTES) == before,
        "{name}: bytes were written"
    );
    drop(window);
    Ok(())
}

fn report(stage: &Stage, context: &Context, name: &str, status: Status) -> Result<()> {
    let (peer, owner) = stage.states()?;
    let event = context.next_event()?;
    let told = stage.owner.poll()?;
    println!(
        "{name}: {} peer={peer:?} owner={owner:?} event={event:?} owner's completions={told:?}",
        status.name()
    );
    ensure!(status == Status::RemoteAccess, "{name}: {status}");
    ensure!(
        peer == State::Error,
        "{name}: the peer's queue pair is {peer:?}"
    );
    Ok(())
}

/// A window is bound to one queue pair: the same key does not work for the peer of another one, even in the
/// same domain.
fn key_of_another_connection(context: &Context) -> Result<()> {
    let first = Stage::new(context)?;
    let (window, key) = first.bound(Access::REMOTE_READ)?;
    let second = Stage::new(context)?;
    let part = second.taken.region().segment(0..100).context("within")?;
    let place = RemotePlace {
        address: first.offered.region().start() + OPEN.start as u64,
        key,
    };
    let ended = second
        .peer
        .carry_out(Work::Read(place), Payload::Segments(&[part]))?;
    report(
        &second,
        context,
        "the key of another connection",
        ended.status,
    )?;
    let status = first.read(key, OPEN.start, 100)?;
    ensure!(
        status == Status::Success,
        "the connection that it is for: {status}"
    );
    drop(window);
    Ok(())
}

/// Whatever is dropped first, what it leans on stays until it is gone. Objects that cannot be destroyed would
/// be logged as errors.
pub fn dropped_in_any_order() -> Result<()> {
    let context = open_device()?;
    let (owner, peer) = connected(&context)?;
    let memory = Memory::new(&owner.domain, BYTES, Access::LOCAL_WRITE | Access::WINDOWS)?;
    let mut window = MemoryWindow::new(&owner.domain)?;
    bind_on(&owner, &mut window, memory.region())?;
    let End {
        domain,
        queue,
        pair,
    } = owner;
    // The window is left with a queue pair, its queue, a region and a domain that nobody else holds.
    let region = Arc::downgrade(memory.region());
    let weak = Arc::downgrade(&pair);
    drop((context, domain, queue, pair, peer));
    drop(memory);
    ensure!(
        weak.strong_count() == 1 && region.strong_count() == 1,
        "the window holds nothing"
    );
    drop(window);
    ensure!(
        weak.strong_count() == 0 && region.strong_count() == 0,
        "somebody holds on"
    );

    let context = open_device()?;
    let domain = ProtectionDomain::new(&context)?;
    drop(context);
    let memory = Memory::new(&domain, BYTES, Access::LOCAL_WRITE)?;
    drop(domain);
    drop(memory);
    println!("dropped: ok");
    Ok(())
}

fn bind_on(owner: &End, window: &mut MemoryWindow, region: &Arc<MemoryRegion>) -> Result<()> {
    let bind = window
        .bind(1, region, OPEN, Access::REMOTE_READ)?
        .signalled();
    let mut none = owner.pair.send_chain(1);
    owner.pair.post_bound(&mut [bind], &mut none)?;
    let ended = owner.wait_one()?;
    ensure!(ended.status == Status::Success, "{ended:?}");
    Ok(())
}
