//! What scenarios are made of.

use std::ptr::NonNull;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use fabric_rdma::verbs::address::{AckTimeout, Endpoint, GidIndex, PortNumber, Psn, RemoteKey};
use fabric_rdma::verbs::completion::{Completion, CompletionChannel, CompletionQueue};
use fabric_rdma::verbs::context::Context;
use fabric_rdma::verbs::device::DeviceList;
use fabric_rdma::verbs::gid::{Gid, GidKind};
use fabric_rdma::verbs::memory::{Access, MemoryRegion, ProtectionDomain};
use fabric_rdma::verbs::post::{Payload, RemotePlace, SendFlags, Work};
use fabric_rdma::verbs::queue_pair::{Depths, QueuePair, RetryPolicy, Route};
use fabric_rdma::verbs::status::{Done, Status};
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};

pub const PORT: PortNumber = PortNumber(1);
/// READs that are served, and wanted, at once.
pub const READS: u8 = 4;
pub const DEPTHS: Depths = Depths {
    sends: 64,
    receives: 64,
    send_segments: 4,
    receive_segments: 2,
    inline_bytes: 64,
};
/// Anything that takes longer has failed; machines under translation are slow.
const LIMIT: Duration = Duration::from_secs(60);

/// Every access, for regions whose keys are not what is tested.
pub fn open() -> Access {
    Access::LOCAL_WRITE | Access::REMOTE_READ | Access::REMOTE_WRITE | Access::WINDOWS
}

pub fn patience() -> RetryPolicy {
    RetryPolicy {
        timeout: AckTimeout::at_least(Duration::from_millis(500)),
        retries: 7,
        receiver_not_ready_retries: 0,
    }
}

pub fn open_device() -> Result<Context> {
    let list = DeviceList::get()?;
    let device = list.iter().next().context("there is no device")?;
    Ok(device.open()?)
}

/// Memory of ours with a region over it.
pub struct Memory {
    start: NonNull<u8>,
    bytes: usize,
    region: Option<Arc<MemoryRegion>>,
}

impl Memory {
    pub fn new(domain: &ProtectionDomain, bytes: usize, access: Access) -> Result<Self> {
        let flags = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a fresh mapping, which is nobody else's.
        let start =
            unsafe { mmap_anonymous(std::ptr::null_mut(), bytes, flags, MapFlags::PRIVATE)? };
        let start = NonNull::new(start.cast()).context("memory at address 0")?;
        // SAFETY: it stays mapped until this is dropped, and `drop` waits for the region; it is only copied
        // from and to.
        let region = unsafe { domain.register(start, bytes, access)? };
        let region = Some(Arc::new(region));
        Ok(Self {
            start,
            bytes,
            region,
        })
    }

    pub fn region(&self) -> &Arc<MemoryRegion> {
        self.region.as_ref().expect("there until it is dropped")
    }

    pub fn place(&self, offset: usize, key: RemoteKey) -> RemotePlace {
        RemotePlace {
            address: self.region().start() + offset as u64,
            key,
        }
    }

    pub fn put(&self, offset: usize, bytes: &[u8]) {
        assert!(offset + bytes.len() <= self.bytes);
        // SAFETY: within the mapping.
        unsafe {
            self.start
                .add(offset)
                .as_ptr()
                .copy_from(bytes.as_ptr(), bytes.len())
        }
    }

    pub fn get(&self, offset: usize, count: usize) -> Vec<u8> {
        assert!(offset + count <= self.bytes);
        let mut bytes = vec![0; count];
        // SAFETY: within the mapping.
        unsafe {
            self.start
                .add(offset)
                .as_ptr()
                .copy_to(bytes.as_mut_ptr(), count)
        };
        bytes
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        let Some(last) = self.region.take().and_then(Arc::into_inner) else {
            // A window still leans on it: then the memory has to stay.
            return;
        };
        drop(last);
        // SAFETY: the mapping is ours, and no region is left over it.
        let _ = unsafe { munmap(self.start.as_ptr().cast(), self.bytes) };
    }
}

/// Bytes that differ from place to place.
pub fn pattern(count: usize, seed: u32) -> Vec<u8> {
    (0..count as u32)
        .map(|index| (index.wrapping_mul(2_654_435_761).wrapping_add(seed) >> 13) as u8)
        .collect()
}

/// How a work request ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ended {
    pub id: u64,
    pub status: Status,
    pub done: Option<Done>,
    pub bytes: u32,
    pub immediate: Option<u32>,
    pub invalidated: Option<RemoteKey>,
}

/// One end of a connection.
pub struct End {
    pub domain: ProtectionDomain,
    pub queue: Arc<CompletionQueue>,
    pub pair: Arc<QueuePair>,
}

impl End {
    pub fn new(
        context: &Context,
        channel: Option<&Arc<CompletionChannel>>,
        token: u64,
    ) -> Result<Self> {
        let domain = ProtectionDomain::new(context)?;
        let queue = Arc::new(CompletionQueue::new(context, 256, channel, token)?);
        let pair = Arc::new(QueuePair::new(&domain, &queue, &queue, DEPTHS)?);
        Ok(Self {
            domain,
            queue,
            pair,
        })
    }

    pub fn endpoint(&self) -> Result<Endpoint> {
        let context = self.domain.context();
        let (_, gid) = address(context)?;
        let port = context.port(PORT)?;
        Ok(Endpoint {
            queue_pair: self.pair.number(),
            psn: Psn::new(self.pair.number().0 * 1000),
            gid,
            lid: port.lid,
            mtu: port.mtu.context("the port has no MTU")?,
            reads_served: READS,
            reads_wanted: READS,
        })
    }

    pub fn connect(&self, peer: &Endpoint, patience: RetryPolicy) -> Result<()> {
        let ours = self.endpoint()?;
        let (gid, _) = address(self.domain.context())?;
        let route = Route {
            port: PORT,
            gid,
            traffic_class: 0,
            service_level: 0,
        };
        let access = Access::REMOTE_READ | Access::REMOTE_WRITE;
        self.pair.init(PORT, access)?;
        let mtu = peer.mtu.min(ours.mtu);
        self.pair
            .ready_to_receive(peer, route, mtu, peer.reads_wanted.min(READS))?;
        let wanted = peer.reads_served.min(READS);
        Ok(self.pair.ready_to_send(ours.psn, wanted, patience)?)
    }

    /// Posts one work request that tells of its end, and waits for it.
    pub fn carry_out(&self, work: Work, payload: Payload<'_>) -> Result<Ended> {
        let mut chain = self.pair.send_chain(1);
        chain.push(1, work, payload, SendFlags::SIGNALLED)?;
        self.pair.post(&mut chain)?;
        self.wait_one()
    }

    pub fn wait_one(&self) -> Result<Ended> {
        Ok(self.wait(1)?.remove(0))
    }

    /// Waits for `count` completions; one more is an error.
    pub fn wait(&self, count: usize) -> Result<Vec<Ended>> {
        let start = Instant::now();
        let mut ended = Vec::new();
        while ended.len() < count {
            ensure!(
                start.elapsed() < LIMIT,
                "only {ended:?} of {count} work requests ended"
            );
            ended.extend(self.poll()?);
        }
        ensure!(ended.len() == count, "more ended than expected: {ended:?}");
        Ok(ended)
    }

    pub fn poll(&self) -> Result<Vec<Ended>> {
        let mut room = Completion::room::<16>();
        let count = self.queue.poll(&mut room)?;
        Ok(room[..count].iter().map(ended).collect())
    }
}

fn ended(completion: &Completion) -> Ended {
    Ended {
        id: completion.id(),
        status: completion.status(),
        done: completion.done(),
        bytes: completion.bytes(),
        immediate: completion.immediate(),
        invalidated: completion.invalidated(),
    }
}

/// Our address: the first that is made of an IPv4 address, which appears a moment after the interface got it.
pub fn address(context: &Context) -> Result<(GidIndex, Gid)> {
    let start = Instant::now();
    while start.elapsed() < LIMIT {
        let found = context
            .gids(PORT)?
            .into_iter()
            .find(|entry| entry.kind == Some(GidKind::RoceV2) && entry.gid.ipv4().is_some());
        if let Some(entry) = found {
            return Ok((entry.index, entry.gid));
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    bail!("the port has no address")
}

/// Two ends in this process that are connected with each other.
pub fn connected(context: &Context) -> Result<(End, End)> {
    connected_with(context, None, patience())
}

pub fn connected_with(
    context: &Context,
    channel: Option<&Arc<CompletionChannel>>,
    patience: RetryPolicy,
) -> Result<(End, End)> {
    let (one, two) = (
        End::new(context, channel, 1)?,
        End::new(context, channel, 2)?,
    );
    one.connect(&two.endpoint()?, patience)?;
    two.connect(&one.endpoint()?, patience)?;
    Ok((one, two))
}
