//! A port tried out: two queue pairs of this process, connected with each other by the port's own address, do
//! once what a replicated write and a refused one do. What a probe says can be had and what works are two
//! things: firmware, the driver and the process's rights are in between.

use std::ptr::NonNull;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};

use super::choice::Choice;
use super::verbs::address::{AckTimeout, Endpoint, Psn, RemoteKey};
use super::verbs::completion::{Completion, CompletionQueue};
use super::verbs::context::Context;
use super::verbs::device::DeviceList;
use super::verbs::error::VerbsError;
use super::verbs::memory::{Access, MemoryRegion, ProtectionDomain};
use super::verbs::post::{ChainError, Payload, ReceiveChain, RemotePlace, SendFlags, Work};
use super::verbs::queue_pair::{Depths, PostError, QueuePair, RetryPolicy, Route};
use super::verbs::status::Status;
use super::verbs::window::{BindError, MemoryWindow};

/// Memory of each side.
const BYTES: usize = 64 << 10;
/// What is opened to the other side.
const OPENED: std::ops::Range<usize> = 4096..8192;
/// A work request that takes longer has failed. The slowest that is expected is a refused READ that is tried
/// again.
const LIMIT: Duration = Duration::from_secs(10);
const DEPTHS: Depths = Depths {
    sends: 8,
    receives: 8,
    send_segments: 1,
    receive_segments: 1,
    inline_bytes: 0,
};

/// What went wrong, and where.
#[derive(Debug, thiserror::Error)]
#[error("{step}: {why}")]
pub struct TrialError {
    /// What was tried.
    pub step: &'static str,
    /// Why it failed.
    pub why: Failure,
}

/// Why a step failed.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// The device, or the library, refused.
    #[error(transparent)]
    Verbs(#[from] VerbsError),
    /// The queue refused.
    #[error("{}", .0.source)]
    Post(#[from] PostError),
    /// Memory of our own.
    #[error("map memory: {0}")]
    Memory(std::io::Error),
    /// It ended otherwise than it should.
    #[error("it ended with \"{}\" in place of \"{}\"", .ended.text(), .wanted.text())]
    Ended {
        /// How it ended.
        ended: Status,
        /// How it should have.
        wanted: Status,
    },
    /// It did not end.
    #[error("no completion within {} s", LIMIT.as_secs())]
    Silent,
    /// Other bytes arrived.
    #[error("other bytes arrived than were sent")]
    Bytes,
    /// The device is gone, or tells nothing of its port.
    #[error("the device is gone, or tells nothing of its port")]
    Gone,
    /// This code asked for what cannot be.
    #[error("{0}")]
    Chain(#[from] ChainError),
    /// The same of a window.
    #[error("{0}")]
    Bind(#[from] BindError),
}

/// Names the step in which something failed.
fn at<T, E: Into<Failure>>(step: &'static str, result: Result<T, E>) -> Result<T, TrialError> {
    result.map_err(|why| TrialError {
        step,
        why: why.into(),
    })
}

/// Tries the port out.
pub fn try_out(choice: &Choice) -> Result<(), TrialError> {
    let context = at("open the device", open(choice))?;
    let (owner, peer) = at("connect two queue pairs", connect(&context, choice))?;
    owner.memory.fill();
    at("send a message", message(&owner, &peer))?;
    let mut window = at("make a memory window", MemoryWindow::new(&owner.domain))?;
    let key = at("bind a memory window", bind(&owner, &mut window))?;
    at("READ through a memory window", read(&owner, &peer, key))?;
    at(
        "invalidate a window by a message",
        close(&owner, &peer, key),
    )?;
    // SAFETY: the peer's message did it, and it was received.
    unsafe { window.invalidated() };
    let refused = ends(&peer, read_work(&owner, key), Status::RemoteAccess);
    at("be refused at a window that is closed", refused)
}

fn open(choice: &Choice) -> Result<Context, Failure> {
    let list = DeviceList::get()?;
    let device = list.find(&choice.device).ok_or(Failure::Gone)?;
    Ok(device.open()?)
}

/// Memory with a region over it.
struct Memory {
    start: NonNull<u8>,
    /// There until this is dropped.
    region: Option<Arc<MemoryRegion>>,
}

/// One end.
struct Side {
    /// Before the memory: what is posted ends with it.
    pair: Arc<QueuePair>,
    queue: Arc<CompletionQueue>,
    domain: ProtectionDomain,
    memory: Memory,
}

impl Memory {
    fn new(domain: &ProtectionDomain) -> Result<Self, Failure> {
        let rights = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a fresh mapping, which is nobody else's.
        let start =
            unsafe { mmap_anonymous(std::ptr::null_mut(), BYTES, rights, MapFlags::PRIVATE) };
        let start = start.map_err(|error| Failure::Memory(error.into()))?;
        let start = NonNull::new(start.cast()).ok_or(Failure::Gone)?;
        let access = Access::LOCAL_WRITE | Access::WINDOWS;
        // SAFETY: it stays mapped as long as the region lives, see `drop`, and is only copied from and to.
        let region = unsafe { domain.register(start, BYTES, access) };
        match region {
            Ok(region) => Ok(Self {
                start,
                region: Some(Arc::new(region)),
            }),
            Err(error) => {
                // SAFETY: the mapping is ours, and nobody else knows of it.
                let _ = unsafe { munmap(start.as_ptr().cast(), BYTES) };
                Err(error.into())
            }
        }
    }

    fn region(&self) -> &Arc<MemoryRegion> {
        self.region.as_ref().expect("there until this is dropped")
    }

    fn fill(&self) {
        let bytes: Vec<u8> = (0..BYTES).map(|i| (i / 251 + i) as u8).collect();
        // SAFETY: so many bytes are mapped, and nobody reads or writes them now.
        unsafe { self.start.as_ptr().copy_from(bytes.as_ptr(), BYTES) };
    }

    fn bytes(&self, range: std::ops::Range<usize>) -> Vec<u8> {
        let mut bytes = vec![0; range.len()];
        assert!(range.end <= BYTES);
        // SAFETY: the range is mapped, and the device is done with it.
        unsafe {
            let from = self.start.add(range.start);
            from.as_ptr().copy_to(bytes.as_mut_ptr(), range.len());
        }
        bytes
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        let Some(region) = self.region.take().and_then(Arc::into_inner) else {
            // A window that is bound still leans on it, for a step failed: then the memory has to stay.
            return;
        };
        drop(region);
        // SAFETY: the mapping is ours, and no region is left over it.
        let _ = unsafe { munmap(self.start.as_ptr().cast(), BYTES) };
    }
}

impl Side {
    fn new(context: &Context) -> Result<Self, Failure> {
        let domain = ProtectionDomain::new(context)?;
        let queue = Arc::new(CompletionQueue::new(context, 32, None, 0)?);
        let pair = Arc::new(QueuePair::new(&domain, &queue, &queue, DEPTHS)?);
        Ok(Self {
            memory: Memory::new(&domain)?,
            pair,
            queue,
            domain,
        })
    }

    fn endpoint(&self, choice: &Choice) -> Result<Endpoint, Failure> {
        let context = self.domain.context();
        let port = context.port(choice.port)?;
        Ok(Endpoint {
            queue_pair: self.pair.number(),
            psn: Psn::new(self.pair.number().0),
            gid: choice.gid,
            lid: port.lid,
            mtu: port.mtu.ok_or(Failure::Gone)?,
            reads_served: 1,
            reads_wanted: 1,
        })
    }

    fn connect(&self, peer: &Endpoint, choice: &Choice) -> Result<(), Failure> {
        let route = Route {
            port: choice.port,
            gid: choice.index,
            traffic_class: 0,
            service_level: 0,
        };
        let patience = RetryPolicy {
            timeout: AckTimeout::at_least(Duration::from_millis(250)),
            retries: 3,
            receiver_not_ready_retries: 0,
        };
        let access = Access::REMOTE_READ | Access::REMOTE_WRITE;
        self.pair.init(choice.port, access)?;
        self.pair.ready_to_receive(peer, route, peer.mtu, 1)?;
        let own = self.endpoint(choice)?;
        Ok(self.pair.ready_to_send(own.psn, 1, patience)?)
    }

    /// Waits for the next completion.
    fn next(&self) -> Result<Completion, Failure> {
        let start = Instant::now();
        let mut room = Completion::room::<1>();
        while start.elapsed() < LIMIT {
            if self.queue.poll(&mut room)? > 0 {
                let [completion] = room;
                return Ok(completion);
            }
            std::thread::yield_now();
        }
        Err(Failure::Silent)
    }

    fn segment(&self) -> Result<super::verbs::memory::Segment, Failure> {
        let whole = self.memory.region().segment(0..OPENED.len());
        whole.ok_or(Failure::Gone)
    }
}

fn connect(context: &Context, choice: &Choice) -> Result<(Side, Side), Failure> {
    let (owner, peer) = (Side::new(context)?, Side::new(context)?);
    owner.connect(&peer.endpoint(choice)?, choice)?;
    peer.connect(&owner.endpoint(choice)?, choice)?;
    Ok((owner, peer))
}

/// Carries one work request out on the side's own memory; it must end so.
fn ends(side: &Side, work: Work, wanted: Status) -> Result<(), Failure> {
    let mut chain = side.pair.send_chain(1);
    chain.push(
        1,
        work,
        Payload::Segments(&[side.segment()?]),
        SendFlags::SIGNALLED,
    )?;
    side.pair.post(&mut chain)?;
    expect(side, wanted)
}

fn expect(side: &Side, wanted: Status) -> Result<(), Failure> {
    match side.next()?.status() {
        ended if ended == wanted => Ok(()),
        ended => Err(Failure::Ended { ended, wanted }),
    }
}

fn message(owner: &Side, peer: &Side) -> Result<(), Failure> {
    let mut receives = ReceiveChain::new(1, 1);
    receives.push(2, &[peer.segment()?])?;
    peer.pair.post_receives(&mut receives)?;
    ends(owner, Work::Send, Status::Success)?;
    expect(peer, Status::Success)?;
    same(owner, 0..OPENED.len(), peer)
}

fn same(owner: &Side, range: std::ops::Range<usize>, peer: &Side) -> Result<(), Failure> {
    match owner.memory.bytes(range) == peer.memory.bytes(0..OPENED.len()) {
        true => Ok(()),
        false => Err(Failure::Bytes),
    }
}

fn bind(owner: &Side, window: &mut MemoryWindow) -> Result<RemoteKey, Failure> {
    let access = Access::REMOTE_READ;
    let bind = window.bind(3, owner.memory.region(), OPENED, access)?;
    let bind = bind.signalled();
    let key = bind.key();
    let mut nothing = owner.pair.send_chain(1);
    owner.pair.post_bound(&mut [bind], &mut nothing)?;
    expect(owner, Status::Success)?;
    Ok(key)
}

fn read_work(owner: &Side, key: RemoteKey) -> Work {
    Work::Read(RemotePlace {
        address: owner.memory.region().start() + OPENED.start as u64,
        key,
    })
}

fn read(owner: &Side, peer: &Side, key: RemoteKey) -> Result<(), Failure> {
    ends(peer, read_work(owner, key), Status::Success)?;
    same(owner, OPENED, peer)
}

fn close(owner: &Side, peer: &Side, key: RemoteKey) -> Result<(), Failure> {
    let mut receives = ReceiveChain::new(1, 1);
    receives.push(4, &[owner.segment()?])?;
    owner.pair.post_receives(&mut receives)?;
    ends(peer, Work::SendWithInvalidate(key), Status::Success)?;
    let received = owner.next()?;
    match received.invalidated() {
        Some(invalidated) if invalidated == key => Ok(()),
        _ => Err(Failure::Ended {
            ended: received.status(),
            wanted: Status::Success,
        }),
    }
}
