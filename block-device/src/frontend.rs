//! The front end's side of a session with the daemon: what QEMU is to a guest's disk, this is to a block
//! device.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use vhost::vhost_user::message::{
    VhostUserConfigFlags, VhostUserHeaderFlag, VhostUserInflight, VhostUserProtocolFeatures,
    VhostUserVirtioFeatures,
};
use vhost::vhost_user::{Frontend, VhostUserFrontend};
use vhost::{VhostBackend, VhostUserMemoryRegionInfo, VringConfigData};
use vmm_sys_util::eventfd::EventFd;

use crate::record::Record;
use crate::vduse::{Region, Ring};

/// Bytes of virtio-blk's configuration space up to `write_zeroes_may_unmap` and its padding (virtio 1.2,
/// section 5.2.4).
pub const CONFIG_BYTES: usize = 60;
/// Most entries of a ring.
pub const RING_SIZE_MAX: u16 = 256;
/// A daemon that answers no message for that long counts as gone: the session is made anew.
const ANSWER_LIMIT: Duration = Duration::from_secs(30);

/// Virtio's feature of packed rings (`VIRTIO_F_RING_PACKED`), of which the kernel's bridge is told nothing:
/// it keeps the place in a ring as split ones have it.
const RING_PACKED: u64 = 1 << 34;

const PROTOCOL_NEEDED: VhostUserProtocolFeatures = VhostUserProtocolFeatures::MQ
    .union(VhostUserProtocolFeatures::REPLY_ACK)
    .union(VhostUserProtocolFeatures::CONFIG)
    .union(VhostUserProtocolFeatures::BACKEND_REQ)
    .union(VhostUserProtocolFeatures::INFLIGHT_SHMFD)
    .union(VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS);

/// Why a session failed.
#[derive(Debug, thiserror::Error)]
pub enum SessionError {
    /// The socket.
    #[error("connect to the daemon: {0}")]
    Connect(#[source] io::Error),
    /// The daemon refused, or went away.
    #[error("the daemon and the session: {0}")]
    Protocol(#[from] vhost::Error),
    /// It lacks what this front end relies on.
    #[error("the daemon's vhost-user lacks protocol features {0:#x}: it is of another version")]
    Lacks(u64),
    /// The record of requests in flight.
    #[error("record of requests in flight: {0}")]
    Record(#[source] io::Error),
    /// The kernel's device.
    #[error("VDUSE device: {0}")]
    Kernel(#[source] io::Error),
    /// A channel could not be made.
    #[error("make a channel: {0}")]
    Channel(#[source] io::Error),
}

/// What the daemon offers.
#[derive(Debug, Clone)]
pub struct Offer {
    /// Virtio features, without those of vhost-user.
    pub features: u64,
    /// Rings.
    pub queues: u16,
    /// The configuration space.
    pub config: [u8; CONFIG_BYTES],
}

/// A ring that is to be served.
#[derive(Debug)]
pub struct Served<'a> {
    /// Its number.
    pub index: u16,
    /// Where it is.
    pub ring: Ring,
    /// Signalled by the driver.
    pub kick: &'a EventFd,
    /// Signalled by the daemon.
    pub call: &'a EventFd,
}

/// A session. Dropping it ends it: the daemon drains its rings and keeps what it did not begin in the record.
pub struct Session {
    frontend: Frontend,
    socket: UnixStream,
    /// By which the daemon tells that the configuration changed.
    channel: UnixStream,
    offer: Offer,
}

impl std::fmt::Debug for Session {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Session").finish_non_exhaustive()
    }
}

impl Session {
    /// Connects; `driver_features` are what the driver chose, or what it may choose from.
    pub fn connect(path: &Path, driver_features: u64) -> Result<Self, SessionError> {
        let socket = UnixStream::connect(path).map_err(SessionError::Connect)?;
        let limit = Some(ANSWER_LIMIT);
        socket
            .set_read_timeout(limit)
            .map_err(SessionError::Connect)?;
        socket
            .set_write_timeout(limit)
            .map_err(SessionError::Connect)?;
        let copy = socket.try_clone().map_err(SessionError::Connect)?;
        let mut frontend = Frontend::from_stream(copy, u64::from(u16::MAX));
        frontend.set_owner()?;
        let own = VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits();
        let log = VhostUserVirtioFeatures::LOG_ALL.bits();
        let offered = frontend.get_features()? & !RING_PACKED;
        frontend.set_features(offered & driver_features & !log | own)?;
        let lacking = PROTOCOL_NEEDED - frontend.get_protocol_features()?;
        if !lacking.is_empty() {
            return Err(SessionError::Lacks(lacking.bits()));
        }
        frontend.set_protocol_features(PROTOCOL_NEEDED)?;
        frontend.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
        let queues = frontend.get_queue_num()?;
        let (channel, theirs) = UnixStream::pair().map_err(SessionError::Channel)?;
        channel
            .set_nonblocking(true)
            .map_err(SessionError::Channel)?;
        frontend.set_backend_request_fd(&theirs)?;
        let mut session = Self {
            frontend,
            socket,
            channel,
            offer: Offer {
                features: offered & !own & !log,
                queues: u16::try_from(queues).unwrap_or(u16::MAX),
                config: [0; CONFIG_BYTES],
            },
        };
        session.offer.config = session.read_config()?;
        Ok(session)
    }

    /// What the daemon offers.
    pub fn offer(&self) -> &Offer {
        &self.offer
    }

    /// Reads the configuration space anew.
    pub fn read_config(&mut self) -> Result<[u8; CONFIG_BYTES], SessionError> {
        let zeroes = [0; CONFIG_BYTES];
        let size = CONFIG_BYTES as u32;
        let flags = VhostUserConfigFlags::empty();
        let (_, bytes) = self.frontend.get_config(0, size, flags, &zeroes)?;
        let mut config = zeroes;
        // The answer has the length that was asked for: `get_config` checks it.
        config.copy_from_slice(&bytes);
        Ok(config)
    }

    /// Hands over memory, record and rings, and has the rings served.
    pub fn start(
        &mut self,
        memory: &[Region],
        record: &Record,
        rings: &[Served<'_>],
    ) -> Result<(), SessionError> {
        let wanted = VhostUserInflight::new(0, 0, self.offer.queues, RING_SIZE_MAX);
        let (layout, _) = self.frontend.get_inflight_fd(&wanted)?;
        let file = record
            .file(layout.mmap_size)
            .map_err(SessionError::Record)?;
        let layout = VhostUserInflight {
            mmap_offset: 0,
            ..layout
        };
        self.frontend.set_inflight_fd(&layout, file.as_raw_fd())?;
        for region in memory {
            self.frontend.add_mem_region(&VhostUserMemoryRegionInfo {
                guest_phys_addr: region.start,
                memory_size: region.size,
                userspace_addr: region.start,
                mmap_offset: region.offset,
                mmap_handle: region.file.as_raw_fd(),
            })?;
        }
        for served in rings {
            self.start_ring(served)?;
        }
        Ok(())
    }

    fn start_ring(&mut self, served: &Served<'_>) -> Result<(), SessionError> {
        let (index, ring) = (usize::from(served.index), &served.ring);
        self.frontend.set_vring_num(index, ring.size)?;
        self.frontend.set_vring_base(index, ring.base)?;
        let addresses = VringConfigData {
            queue_max_size: RING_SIZE_MAX,
            queue_size: ring.size,
            flags: 0,
            desc_table_addr: ring.desc,
            used_ring_addr: ring.used,
            avail_ring_addr: ring.avail,
            log_addr: None,
        };
        self.frontend.set_vring_addr(index, &addresses)?;
        self.frontend.set_vring_call(index, served.call)?;
        self.frontend.set_vring_kick(index, served.kick)?;
        Ok(self.frontend.set_vring_enable(index, true)?)
    }

    /// Stops a ring, and returns the index in the available ring at which it goes on. Waits for its requests.
    pub fn stop_ring(&mut self, index: u16) -> Result<u16, SessionError> {
        Ok(self.frontend.get_vring_base(usize::from(index))? as u16)
    }

    /// Readable once the daemon has gone.
    pub fn socket(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Readable when the configuration has changed.
    pub fn channel(&self) -> BorrowedFd<'_> {
        self.channel.as_fd()
    }

    /// Takes what came by the channel. Only one message is known, whose content says nothing more.
    pub fn drain_channel(&self) {
        let mut bytes = [0; 256];
        while matches!(io::Read::read(&mut &self.channel, &mut bytes), Ok(1..)) {}
    }
}
