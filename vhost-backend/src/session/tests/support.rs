//! A front end that sets everything up, or as much of it as a test wants, and bytes by hand.

use std::io::{IoSlice, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, IntoRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use fabric_testing::{Completion, MemEngine, MemVolume};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use tempfile::TempDir;
use vhost::vhost_user::message::{VhostUserHeaderFlag, VhostUserProtocolFeatures};
use vhost::vhost_user::{Frontend, VhostUserFrontend};
use vhost::{VhostBackend, VhostUserMemoryRegionInfo, VringConfigData};
use virtio_bindings::virtio_blk::{VIRTIO_BLK_T_IN, VIRTIO_BLK_T_OUT};
use vmm_sys_util::eventfd::EventFd;
use zerocopy::{FromBytes, IntoBytes};

use crate::blk::{BlkDevice, BlkOptions};
use crate::data_thread::{PollMode, ThreadOptions, Threads};
use crate::memory::GuestAddr;
use crate::memory::budget::{Limit, MemoryBudget, MemoryPolicy};
use crate::session::message::{F_PROTOCOL_FEATURES, F_RING_PACKED, FLAG_VERSION, Header};
use crate::session::socket::{Endpoint, Listener, SocketOptions};
use crate::session::{Attachment, AttachmentState};
use crate::testing::{
    CountingRegistrar, FakeGuest, FakeQueue, GUEST_BASE, QueueOptions, USER_BASE,
};

/// Longest wait for something that must happen; only a failing test waits so long.
const WAIT_MAX: Duration = Duration::from_secs(20);

pub const DISK_BYTES: u64 = 1 << 20;
pub const GUEST_BYTES: u64 = 1 << 20;
pub const RINGS: u16 = 2;

/// Waits until something has happened.
pub fn eventually(what: &str, mut happened: impl FnMut() -> bool) {
    let until = Instant::now() + WAIT_MAX;
    while !happened() {
        assert!(Instant::now() < until, "still not: {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// The address of guest memory as the front end sees it.
pub fn user(at: GuestAddr) -> u64 {
    at.0 - GUEST_BASE + USER_BASE
}

pub fn event_fd(fd: &OwnedFd) -> EventFd {
    let copy = fd.try_clone().unwrap().into_raw_fd();
    // SAFETY: the descriptor is a fresh copy that nobody else owns.
    unsafe { EventFd::from_raw_fd(copy) }
}

/// A disk behind a socket.
pub struct Bench {
    pub volume: MemVolume,
    pub device: Arc<BlkDevice<MemVolume>>,
    pub threads: Arc<Threads<MemEngine>>,
    pub attachment: Attachment,
    /// The card that guests' memory is opened to.
    pub registrar: CountingRegistrar,
    /// What is counted of all attachments' memory.
    pub budget: MemoryBudget,
    pub path: PathBuf,
    _dir: TempDir,
}

impl Bench {
    pub fn new() -> Self {
        Self::with(MemVolume::new(DISK_BYTES))
    }

    pub fn with(volume: MemVolume) -> Self {
        Self::on(volume, Self::one_thread())
    }

    fn one_thread() -> Arc<Threads<MemEngine>> {
        let options = ThreadOptions {
            threads: 1,
            poll: PollMode::Never,
            pin: None,
        };
        Threads::start(&options, |_| MemEngine::new(Completion::Queued)).unwrap()
    }

    /// With bounds of mapped and of pinned memory.
    pub fn within(mapped: Limit, pinned: Limit) -> Self {
        let threads = Self::one_thread();
        let budget = MemoryBudget::new(mapped, pinned);
        Self::counted(MemVolume::new(DISK_BYTES), threads, budget)
    }

    pub fn on(volume: MemVolume, threads: Arc<Threads<MemEngine>>) -> Self {
        Self::counted(volume, threads, MemoryBudget::default())
    }

    /// A disk for a front end with virtqueues of this size.
    pub fn for_queue_size(queue_size: u16) -> Self {
        let options = BlkOptions {
            queues: RINGS,
            queue_size,
            ..BlkOptions::default()
        };
        let volume = MemVolume::new(DISK_BYTES);
        Self::made(volume, Self::one_thread(), MemoryBudget::default(), options)
    }

    /// A disk beside others whose memory is counted with it.
    pub fn counted(
        volume: MemVolume,
        threads: Arc<Threads<MemEngine>>,
        budget: MemoryBudget,
    ) -> Self {
        let options = BlkOptions {
            queues: RINGS,
            ..BlkOptions::default()
        };
        Self::made(volume, threads, budget, options)
    }

    fn made(
        volume: MemVolume,
        threads: Arc<Threads<MemEngine>>,
        budget: MemoryBudget,
        options: BlkOptions,
    ) -> Self {
        let device = BlkDevice::new(volume.clone(), options).unwrap();
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("disk.sock");
        let endpoint = Endpoint::Listening(Listener::bind(&SocketOptions::new(&path)).unwrap());
        let registrar = CountingRegistrar::default();
        let attachment = Attachment::start(
            endpoint,
            Arc::clone(&device),
            Arc::clone(&threads),
            MemoryPolicy::new(registrar.clone(), budget.clone()),
        )
        .unwrap();
        Self {
            registrar,
            budget,
            volume,
            device,
            threads,
            attachment,
            path,
            _dir: dir,
        }
    }

    pub fn connect(&self) -> UnixStream {
        UnixStream::connect(&self.path).unwrap()
    }

    pub fn wait_for(&self, what: &str, matches: impl Fn(&AttachmentState) -> bool) {
        eventually(what, || matches(&self.attachment.state()));
    }

    /// Waits until so many regions of memory are open to the card; so many were opened so far.
    pub fn wait_for_open(&self, regions: u64) -> u64 {
        eventually("memory is open", || {
            self.registrar.counts().regions == regions
        });
        self.registrar.counts().registrations
    }

    /// The next front end finds a disk that works, whatever the last one did.
    pub fn assert_serves(&self) {
        let mut front = Front::start(self);
        front.round_trip();
    }
}

/// A front end with one queue.
pub struct Front {
    pub vhost: Frontend,
    pub guest: Arc<FakeGuest>,
    pub queue: FakeQueue,
    /// Announced for the used ring, if it is to be logged.
    pub used_log: Option<u64>,
}

pub fn wanted() -> VhostUserProtocolFeatures {
    VhostUserProtocolFeatures::MQ
        | VhostUserProtocolFeatures::LOG_SHMFD
        | VhostUserProtocolFeatures::REPLY_ACK
        | VhostUserProtocolFeatures::BACKEND_REQ
        | VhostUserProtocolFeatures::CONFIG
        | VhostUserProtocolFeatures::INFLIGHT_SHMFD
        | VhostUserProtocolFeatures::RESET_DEVICE
        | VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS
}

/// One thing that a front end says on its way to a running ring.
pub type Step = fn(&mut Front) -> vhost::Result<()>;

/// The way to a running ring.
pub const SETUP: [Step; 13] = [
    |f| f.vhost.set_owner(),
    |f| {
        f.vhost.get_features()?;
        f.vhost.set_features(f.features())
    },
    |f| {
        f.vhost.get_protocol_features()?;
        f.vhost.set_protocol_features(wanted())?;
        f.vhost.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
        Ok(())
    },
    |f| {
        f.vhost
            .get_queue_num()
            .map(|n| assert_eq!(n, u64::from(RINGS)))
    },
    |f| f.vhost.set_mem_table(&[f.region()]).map(|_| ()),
    |f| f.vhost.set_vring_num(0, f.queue.config(0).size),
    |f| match f.is_packed() {
        // `vhost` has no word for the upper half; a ring begins at its beginning anyway.
        true => Ok(()),
        false => f.vhost.set_vring_base(0, 0),
    },
    |f| f.vhost.set_vring_addr(0, &f.addresses()),
    |f| f.vhost.set_vring_err(0, &event_fd(&f.queue.err)),
    |f| f.vhost.set_vring_kick(0, &event_fd(&f.queue.kick)),
    |f| f.vhost.set_vring_call(0, &event_fd(&f.queue.call)),
    |f| f.vhost.set_vring_enable(0, true),
    |f| {
        f.round_trip();
        Ok(())
    },
];

impl Front {
    pub fn new(bench: &Bench) -> Self {
        Self::with(bench, QueueOptions::default())
    }

    pub fn with(bench: &Bench, options: QueueOptions) -> Self {
        let guest = Arc::new(FakeGuest::new(GUEST_BYTES));
        let queue = FakeQueue::new(&guest, options);
        Self::of(bench, guest, queue)
    }

    pub fn of(bench: &Bench, guest: Arc<FakeGuest>, queue: FakeQueue) -> Self {
        Self::on(bench.connect(), guest, queue)
    }

    /// A front end of whatever device is behind the socket.
    pub fn on(socket: UnixStream, guest: Arc<FakeGuest>, queue: FakeQueue) -> Self {
        Self {
            vhost: Frontend::from_stream(socket, u64::from(RINGS)),
            guest,
            queue,
            used_log: None,
        }
    }

    /// A front end with a running ring.
    pub fn start(bench: &Bench) -> Self {
        Self::new(bench).started()
    }

    /// The same with a packed ring.
    pub fn start_packed(bench: &Bench) -> Self {
        Self::with(bench, QueueOptions::default().packed()).started()
    }

    pub fn started(mut self) -> Self {
        self.set_up(SETUP.len() - 1);
        self
    }

    pub fn is_packed(&self) -> bool {
        self.features() & F_RING_PACKED != 0
    }

    pub fn set_up(&mut self, steps: usize) {
        for (at, step) in SETUP.iter().take(steps).enumerate() {
            step(self).unwrap_or_else(|error| panic!("step {at}: {error}"));
        }
    }

    /// Feature bits to acknowledge.
    pub fn features(&self) -> u64 {
        self.queue.config(0).features | 1 << 32 | F_PROTOCOL_FEATURES
    }

    pub fn region(&self) -> VhostUserMemoryRegionInfo {
        VhostUserMemoryRegionInfo {
            guest_phys_addr: GUEST_BASE,
            memory_size: self.guest.size(),
            userspace_addr: USER_BASE,
            mmap_offset: 0,
            mmap_handle: self.guest.file().as_raw_fd(),
        }
    }

    pub fn addresses(&self) -> VringConfigData {
        let size = self.queue.config(0).size;
        VringConfigData {
            queue_max_size: size,
            queue_size: size,
            flags: u32::from(self.used_log.is_some()),
            desc_table_addr: user(self.queue.desc),
            used_ring_addr: user(self.queue.used),
            avail_ring_addr: user(self.queue.avail),
            log_addr: self.used_log,
        }
    }

    /// Writes a sector and reads it back.
    pub fn round_trip(&mut self) {
        let pattern: Vec<u8> = (0..512_u32).map(|i| i as u8).collect();
        let from = self.guest.place(&pattern);
        let (status, _) = self
            .queue
            .request(VIRTIO_BLK_T_OUT, 3, &[(from, 512, false)]);
        assert_eq!(status, 0);
        let to = self.guest.alloc(512, 512);
        assert_eq!(self.read(3, to), 0);
        assert_eq!(self.guest.read(to, 512), pattern);
    }

    /// Reads a sector into guest memory; returns the status.
    pub fn read(&mut self, sector: u64, to: GuestAddr) -> u8 {
        self.queue
            .request(VIRTIO_BLK_T_IN, sector, &[(to, 512, true)])
            .0
    }
}

/// Sends bytes with descriptors.
pub fn send_raw(socket: &UnixStream, bytes: &[u8], fds: &[&OwnedFd]) {
    let mut space = vec![MaybeUninit::uninit(); 8192];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let rights: Vec<_> = fds.iter().map(|fd| fd.as_fd()).collect();
    if !rights.is_empty() {
        assert!(control.push(SendAncillaryMessage::ScmRights(&rights)));
    }
    // The other side may have hung up already, which the test finds out by itself.
    let _ = sendmsg(
        socket,
        &[IoSlice::new(bytes)],
        &mut control,
        SendFlags::NOSIGNAL,
    );
}

/// A message by hand.
pub fn message(code: u32, flags: u32, payload: &[u8]) -> Vec<u8> {
    let header = Header {
        code,
        flags: FLAG_VERSION | flags,
        size: payload.len() as u32,
    };
    [header.as_bytes(), payload].concat()
}

/// The next message of the other side.
pub fn receive_raw(socket: &mut UnixStream) -> (Header, Vec<u8>) {
    let mut header = [0; size_of::<Header>()];
    socket.read_exact(&mut header).unwrap();
    let header = Header::read_from_bytes(&header).unwrap();
    let mut payload = vec![0; header.size as usize];
    socket.read_exact(&mut payload).unwrap();
    (header, payload)
}

/// Whether the other side has hung up, after it said whatever it had to say.
pub fn assert_hung_up(socket: &mut UnixStream) {
    socket.set_read_timeout(Some(WAIT_MAX)).unwrap();
    let mut rest = Vec::new();
    match socket.read_to_end(&mut rest) {
        Ok(_) => {}
        Err(error) => assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset),
    }
}
