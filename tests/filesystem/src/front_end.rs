//! A front end of vhost-user-fs without a guest: it sends the requests that Linux sends, and polls for their
//! replies.

mod files;

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, IntoRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use fuse_codec::wire::{self, InHeader, OutHeader};
use fuse_codec::{Features, HEADER_BYTES, NodeId, Opcode, REPLY_HEADER_BYTES};
use vhost::vhost_user::message::{VhostUserHeaderFlag, VhostUserProtocolFeatures};
use vhost::vhost_user::{Frontend, VhostUserFrontend};
use vhost::{VhostBackend, VhostUserMemoryRegionInfo, VringConfigData};
use vhost_backend::memory::GuestAddr;
use vhost_backend::session::message::F_PROTOCOL_FEATURES;
use vhost_backend::testing::{FakeGuest, FakeQueue, GUEST_BASE, QueueOptions, USER_BASE};
use vmm_sys_util::eventfd::EventFd;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// The root's inode in every mount.
pub const ROOT: NodeId = NodeId(1);
/// The hiprio queue and one for requests.
const QUEUES: u16 = 2;
const HIPRIO: usize = 0;
const REQUESTS: usize = 1;
const QUEUE_SIZE: u16 = 256;
/// Requests in flight at most, each with a chain of [`PARTS`] descriptors.
pub const SLOTS: usize = QUEUE_SIZE as usize / PARTS;
/// Headers and bodies, as Linux lays them out.
const PARTS: usize = 4;
/// Bytes behind a request's header, and behind a reply's.
const BODY_BYTES_MAX: usize = 16 << 10;
/// Requests, replies, and rings.
const GUEST_BYTES: u64 = 16 << 20;
/// `VIRTIO_F_VERSION_1`
const VERSION_1: u64 = 1 << 32;
/// How long a reply may take: also one that waits for a leader, on a machine that other tests share.
const REPLY_WAIT_MAX: Duration = Duration::from_secs(240);
/// At the ring, one after the other. A reply that is not there by then takes long: no processor is spent on
/// it.
const LOOKS: u32 = 1 << 20;
/// Between two looks from then on.
const LOOK_PAUSE: Duration = Duration::from_millis(5);

/// What keeps the daemon's side going.
struct Session(#[expect(dead_code, reason = "it is there to be dropped")] Frontend);

impl std::fmt::Debug for Session {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Session")
    }
}

/// What the filesystem answered: the bytes behind the reply's header, or an error number.
pub type Reply = std::result::Result<Vec<u8>, i32>;

/// A request without its header.
#[derive(Debug, Clone)]
pub struct Request {
    /// What is asked for.
    pub opcode: Opcode,
    /// Of which inode.
    pub node: NodeId,
    /// What is behind the header.
    pub body: Vec<u8>,
    /// Bytes that its reply may have behind the header.
    pub room: usize,
}

/// Where a request in flight and its reply lie.
#[derive(Debug)]
struct Slot {
    request: GuestAddr,
    reply: GuestAddr,
    opcode: Opcode,
    unique: u64,
    head: u16,
}

/// A mounted filesystem.
#[derive(Debug)]
pub struct FrontEnd {
    queues: Vec<FakeQueue>,
    guest: Arc<FakeGuest>,
    // Its end is the end of the session.
    _session: Session,
    slots: Vec<Slot>,
    unique: u64,
}

impl FrontEnd {
    /// Connects to a socket as QEMU does, and mounts what it serves as Linux does.
    pub fn mount(socket: &Path) -> Result<Self> {
        let guest = Arc::new(FakeGuest::new(GUEST_BYTES));
        let options = QueueOptions {
            size: QUEUE_SIZE,
            ..QueueOptions::default()
        };
        let queues = (0..QUEUES).map(|_| FakeQueue::new(&guest, options));
        let queues: Vec<FakeQueue> = queues.collect();
        let vhost = connect(socket, &guest, options.features, &queues)
            .with_context(|| format!("connect to {}", socket.display()))?;
        let slots = (0..SLOTS).map(|_| Slot {
            request: guest.alloc((HEADER_BYTES + BODY_BYTES_MAX) as u64, 4096),
            reply: guest.alloc((REPLY_HEADER_BYTES + BODY_BYTES_MAX) as u64, 4096),
            opcode: Opcode::Init,
            unique: 0,
            head: 0,
        });
        let mut front_end = Self {
            slots: slots.collect(),
            queues,
            guest,
            _session: Session(vhost),
            unique: 0,
        };
        front_end.init()?;
        Ok(front_end)
    }

    /// INIT with what Linux 6.1 offers.
    fn init(&mut self) -> Result<()> {
        let never = Features::SUBMOUNTS
            .with(Features::WRITEBACK_CACHE)
            .with(Features::POSIX_ACL)
            .with(Features::SECURITY_CTX);
        let features = Features::from_bits(u64::MAX).bits() & !never.bits();
        let init = wire::InitIn {
            major: wire::VERSION_MAJOR.into(),
            minor: wire::VERSION_MINOR.into(),
            max_readahead: (128 << 10).into(),
            flags: (features as u32).into(),
        };
        let more = wire::InitInExt {
            flags2: ((features >> 32) as u32).into(),
            ..wire::InitInExt::default()
        };
        let body = [init.as_bytes(), more.as_bytes()].concat();
        let _: wire::InitOut = self.call(Opcode::Init, NodeId(0), &body)?;
        Ok(())
    }

    /// Does a request whose reply is one structure.
    pub fn call<T>(&mut self, opcode: Opcode, node: NodeId, body: &[u8]) -> Result<T>
    where
        T: FromBytes + KnownLayout + Immutable,
    {
        match self.try_call(opcode, node, body)? {
            Ok(reply) => Ok(reply),
            Err(error) => bail!("{opcode:?}: {}", io::Error::from_raw_os_error(error)),
        }
    }

    /// Likewise; an error that the filesystem answers is the inner one, by its number.
    pub fn try_call<T>(
        &mut self,
        opcode: Opcode,
        node: NodeId,
        body: &[u8],
    ) -> Result<std::result::Result<T, i32>>
    where
        T: FromBytes + KnownLayout + Immutable,
    {
        let reply = self.send(opcode, node, body, size_of::<T>())?;
        let reply = reply.map(|bytes| T::read_from_bytes(&bytes).ok());
        match reply {
            Ok(None) => bail!("{opcode:?}: a reply of another size"),
            Ok(Some(reply)) => Ok(Ok(reply)),
            Err(error) => Ok(Err(error)),
        }
    }

    /// Does a request whose reply may have up to `room` bytes; returns them.
    pub fn bytes(
        &mut self,
        opcode: Opcode,
        node: NodeId,
        body: &[u8],
        room: usize,
    ) -> Result<Vec<u8>> {
        let reply = self.send(opcode, node, body, room)?;
        reply.map_err(|error| {
            let error = io::Error::from_raw_os_error(error);
            anyhow::Error::new(error).context(format!("{opcode:?}"))
        })
    }

    fn send(&mut self, opcode: Opcode, node: NodeId, body: &[u8], room: usize) -> Result<Reply> {
        self.begin(0, opcode, node, body, room)?;
        Ok(self.next_reply()?.1)
    }

    /// Does requests, as many at a time as there is room for; `take` gets the number of each and its reply.
    pub fn all(
        &mut self,
        requests: impl IntoIterator<Item = Request>,
        mut take: impl FnMut(usize, Reply) -> Result<()>,
    ) -> Result<()> {
        let mut requests = requests.into_iter().enumerate();
        let mut numbers = vec![None; SLOTS];
        let mut free: Vec<usize> = (0..SLOTS).collect();
        loop {
            while let Some(slot) = free.pop() {
                let Some((number, request)) = requests.next() else {
                    free.push(slot);
                    break;
                };
                let Request {
                    opcode,
                    node,
                    body,
                    room,
                } = request;
                self.begin(slot, opcode, node, &body, room)?;
                numbers[slot] = Some(number);
            }
            if free.len() == SLOTS {
                return Ok(());
            }
            let (slot, reply) = self.next_reply()?;
            free.push(slot);
            let number: Option<usize> = numbers[slot].take();
            take(number.context("a reply without a request")?, reply)?;
        }
    }

    /// Tells of inodes that are no longer known, each looked up once.
    pub fn forget(&mut self, nodes: &[NodeId]) -> Result<()> {
        let one = size_of::<wire::ForgetOne>();
        let at_once = (BODY_BYTES_MAX - size_of::<wire::BatchForgetIn>()) / one;
        for nodes in nodes.chunks(at_once) {
            let head = wire::BatchForgetIn {
                count: (nodes.len() as u32).into(),
                dummy: 0.into(),
            };
            let mut body = head.as_bytes().to_vec();
            for node in nodes {
                let forget = wire::ForgetOne {
                    nodeid: node.0.into(),
                    nlookup: 1.into(),
                };
                body.extend_from_slice(forget.as_bytes());
            }
            self.put_request(0, Opcode::BatchForget, NodeId(0), &body)?;
            let bytes = (HEADER_BYTES + body.len()) as u32;
            self.offer(HIPRIO, 0, &[(self.slots[0].request, bytes, false)]);
            self.next_used(HIPRIO)?;
        }
        Ok(())
    }

    /// Puts a request on the ring.
    fn begin(
        &mut self,
        slot: usize,
        opcode: Opcode,
        node: NodeId,
        body: &[u8],
        room: usize,
    ) -> Result<()> {
        ensure!(room <= BODY_BYTES_MAX, "a reply of up to {room} bytes");
        self.put_request(slot, opcode, node, body)?;
        let after = |at: GuestAddr, bytes: usize| GuestAddr(at.0 + bytes as u64);
        let Slot { request, reply, .. } = self.slots[slot];
        let chain = [
            (request, HEADER_BYTES as u32, false),
            (after(request, HEADER_BYTES), body.len() as u32, false),
            (reply, REPLY_HEADER_BYTES as u32, true),
            (after(reply, REPLY_HEADER_BYTES), room as u32, true),
        ];
        let mut parts = Vec::with_capacity(PARTS);
        parts.extend(chain.into_iter().filter(|(_, bytes, _)| *bytes > 0));
        self.offer(REQUESTS, slot, &parts);
        Ok(())
    }

    fn put_request(
        &mut self,
        slot: usize,
        opcode: Opcode,
        node: NodeId,
        body: &[u8],
    ) -> Result<()> {
        ensure!(
            body.len() <= BODY_BYTES_MAX,
            "a body of {} bytes",
            body.len()
        );
        self.unique += 2;
        let header = InHeader {
            len: ((HEADER_BYTES + body.len()) as u32).into(),
            opcode: opcode.number().into(),
            unique: self.unique.into(),
            nodeid: node.0.into(),
            pid: 1.into(),
            ..InHeader::default()
        };
        let slot = &mut self.slots[slot];
        (slot.opcode, slot.unique) = (opcode, self.unique);
        self.guest.write(slot.request, header.as_bytes());
        let behind = GuestAddr(slot.request.0 + HEADER_BYTES as u64);
        self.guest.write(behind, body);
        Ok(())
    }

    /// Makes a chain visible. The device is asked for an interrupt, as a guest asks.
    fn offer(&mut self, queue: usize, slot: usize, chain: &[(GuestAddr, u32, bool)]) {
        let queue = &mut self.queues[queue];
        self.slots[slot].head = queue.add(chain);
        queue.want_interrupt(queue.used_index(), false);
        queue.submit();
    }

    /// Polls for the next reply; returns the slot of its request.
    fn next_reply(&mut self) -> Result<(usize, Reply)> {
        let (head, used) = self.next_used(REQUESTS)?;
        let in_flight = |slot: &Slot| slot.head == head && slot.unique != 0;
        let slot = self.slots.iter().position(in_flight);
        let slot = slot.with_context(|| format!("no request begins at descriptor {head}"))?;
        let Slot { reply, opcode, .. } = self.slots[slot];
        let unique = std::mem::take(&mut self.slots[slot].unique);
        let header = self.guest.read(reply, REPLY_HEADER_BYTES);
        let header = OutHeader::read_from_bytes(&header)
            .ok()
            .context("a short header")?;
        ensure!(
            header.unique.get() == unique && header.len.get() == used,
            "{opcode:?}: {header:?} is no reply to request {unique}, {used} bytes long"
        );
        let behind = GuestAddr(reply.0 + REPLY_HEADER_BYTES as u64);
        let reply = match header.error.get() {
            0 => Ok(self.guest.read(behind, used as usize - REPLY_HEADER_BYTES)),
            error => Err(-error),
        };
        Ok((slot, reply))
    }

    /// Polls until a chain is used; returns its head and the bytes that were written.
    fn next_used(&mut self, queue: usize) -> Result<(u16, u32)> {
        let queue = &mut self.queues[queue];
        let begun = Instant::now();
        let mut looks = LOOKS;
        loop {
            for _ in 0..looks {
                if let Some((head, bytes)) = queue.next_used() {
                    queue.recycle(head);
                    return Ok((head, bytes));
                }
                std::hint::spin_loop();
            }
            ensure!(
                begun.elapsed() < REPLY_WAIT_MAX,
                "no reply in {REPLY_WAIT_MAX:?}"
            );
            looks = 1;
            std::thread::sleep(LOOK_PAUSE);
        }
    }
}

fn connect(
    socket: &Path,
    guest: &FakeGuest,
    ring_features: u64,
    queues: &[FakeQueue],
) -> Result<Frontend> {
    let stream = UnixStream::connect(socket)?;
    let mut vhost = Frontend::from_stream(stream, u64::from(QUEUES));
    vhost.set_owner()?;
    let offered = vhost.get_features()?;
    let wanted = ring_features | VERSION_1 | F_PROTOCOL_FEATURES;
    ensure!(
        offered & wanted == wanted,
        "it offers only the features {offered:#x}"
    );
    vhost.set_features(wanted)?;
    let offered = vhost.get_protocol_features()?;
    let wanted = VhostUserProtocolFeatures::MQ | VhostUserProtocolFeatures::REPLY_ACK;
    vhost.set_protocol_features(offered & wanted)?;
    vhost.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
    let region = VhostUserMemoryRegionInfo {
        guest_phys_addr: GUEST_BASE,
        memory_size: guest.size(),
        userspace_addr: USER_BASE,
        mmap_offset: 0,
        mmap_handle: guest.file().as_raw_fd(),
    };
    vhost.set_mem_table(&[region])?;
    for (index, queue) in queues.iter().enumerate() {
        start_ring(&mut vhost, index, queue)?;
    }
    Ok(vhost)
}

fn start_ring(vhost: &mut Frontend, index: usize, queue: &FakeQueue) -> Result<()> {
    let user = |at: GuestAddr| at.0 - GUEST_BASE + USER_BASE;
    let addresses = VringConfigData {
        queue_max_size: QUEUE_SIZE,
        queue_size: QUEUE_SIZE,
        flags: 0,
        desc_table_addr: user(queue.desc),
        used_ring_addr: user(queue.used),
        avail_ring_addr: user(queue.avail),
        log_addr: None,
    };
    vhost.set_vring_num(index, QUEUE_SIZE)?;
    vhost.set_vring_base(index, 0)?;
    vhost.set_vring_addr(index, &addresses)?;
    vhost.set_vring_kick(index, &event_fd(&queue.kick)?)?;
    vhost.set_vring_call(index, &event_fd(&queue.call)?)?;
    vhost.set_vring_enable(index, true)?;
    Ok(())
}

fn event_fd(fd: &OwnedFd) -> Result<EventFd> {
    let copy = fd.try_clone()?.into_raw_fd();
    // SAFETY: the descriptor is a fresh copy that nobody else owns.
    Ok(unsafe { EventFd::from_raw_fd(copy) })
}
