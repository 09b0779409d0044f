//! A guest without a machine that speaks FUSE: requests made by hand, on rings of its own, in pieces of any
//! size. It panics where a test would fail anyway.

use std::io;
use std::sync::Arc;

use fuse_codec::wire::{self, InHeader, OutHeader};
use fuse_codec::{Features, HEADER_BYTES, NodeId, Opcode, REPLY_HEADER_BYTES};
use vhost_backend::data_thread::{QueueHandle, ThreadOptions, Threads};
use vhost_backend::memory::GuestAddr;
use vhost_backend::testing::{Buffer, FakeGuest, FakeQueue, QueueOptions};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::{FsDevice, FsEngine, FsOptions, Service};

/// Bytes of the guest's memory; what is not used takes none of the host's.
const GUEST_BYTES: u64 = 1 << 30;
/// What the guest's memory has before the device writes there.
const UNWRITTEN: u8 = 0xa5;
/// Entries of each ring: room for 1 MiB in pages.
const QUEUE_SIZE: u16 = 1024;

/// How a request is cut into pieces.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cut {
    /// As kernels do: a piece for either header, one for each body; a payload in pages.
    Kernel,
    /// Pieces of so many bytes, without regard to what they hold.
    Pieces(usize),
    /// As kernels do, in an indirect table.
    Indirect,
}

/// A request on a ring.
#[derive(Debug)]
pub struct Sent {
    /// First descriptor.
    pub head: u16,
    /// Where the reply goes.
    pub room: Vec<Buffer>,
    unique: u64,
}

/// A reply.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Answer {
    /// The used length.
    pub used: u32,
    /// The error number; 0 if there is none.
    pub error: i32,
    /// What follows the header.
    pub body: Vec<u8>,
}

impl Answer {
    /// The body, unless it is an error.
    pub fn ok(self) -> Result<Vec<u8>, i32> {
        match self.error {
            0 => Ok(self.body),
            error => Err(error),
        }
    }

    /// The body as a structure of the protocol, which it begins with.
    pub fn get<T: FromBytes + KnownLayout + Immutable>(self) -> Result<T, i32> {
        let body = self.ok()?;
        let (value, _) = T::read_from_prefix(&body).expect("a whole structure");
        Ok(value)
    }
}

/// A guest with a virtio-fs device.
pub struct FsGuest<S: Service> {
    /// Who serves its queues.
    pub threads: Arc<Threads<FsEngine<S>>>,
    /// The device.
    pub device: Arc<FsDevice<S::Filesystem>>,
    /// The guest's memory.
    pub guest: Arc<FakeGuest>,
    /// Queue 0 is the hiprio queue.
    pub queues: Vec<FakeQueue>,
    handles: Vec<QueueHandle<FsDevice<S::Filesystem>>>,
    unique: u64,
    /// How requests are cut that nobody says anything of.
    pub cut: Cut,
}

/// Options of a device with a number of request queues.
pub fn options(request_queues: u16, read_only: bool) -> FsOptions {
    FsOptions {
        tag: "tree".to_owned(),
        request_queues,
        read_only,
    }
}

impl<S: Service> FsGuest<S> {
    /// A guest whose queues run on as many threads as there are.
    pub fn new(
        filesystem: &Arc<S::Filesystem>,
        options: FsOptions,
        rings: QueueOptions,
        make: impl Fn(usize) -> io::Result<S> + Send + Sync + 'static,
    ) -> Self {
        let device = FsDevice::new(Arc::clone(filesystem), options).expect("possible options");
        let threads = ThreadOptions {
            threads: usize::from(device.options().request_queues) + 1,
            poll: vhost_backend::data_thread::PollMode::Never,
            pin: None,
        };
        let make = move |thread| make(thread).map(FsEngine::new);
        let threads = Threads::start(&threads, make).expect("threads can be started");
        let mut fs = Self {
            threads,
            device,
            guest: Arc::new(FakeGuest::new(GUEST_BYTES)),
            queues: Vec::new(),
            handles: Vec::new(),
            unique: 0,
            cut: Cut::Kernel,
        };
        let rings = QueueOptions {
            size: QUEUE_SIZE,
            ..rings
        };
        fs.start_queues(rings);
        fs
    }

    /// Lays out fresh rings and starts them.
    pub fn start_queues(&mut self, rings: QueueOptions) {
        self.queues.clear();
        for index in 0..=self.device.options().request_queues {
            let queue = FakeQueue::new(&self.guest, rings);
            let handle = self.threads.start_queue(&self.device, queue.config(index));
            self.handles
                .push(handle.expect("a queue that can be started"));
            self.queues.push(queue);
        }
    }

    /// Stops all queues, as before a reset.
    pub fn stop_queues(&mut self) {
        for handle in self.handles.drain(..) {
            handle.stop().expect("a queue that runs");
        }
    }

    /// The bytes of a request.
    pub fn request(&mut self, opcode: u32, node: NodeId, body: &[u8]) -> Vec<u8> {
        self.unique += 2;
        let header = InHeader {
            len: ((HEADER_BYTES + body.len()) as u32).into(),
            opcode: opcode.into(),
            unique: self.unique.into(),
            nodeid: node.0.into(),
            uid: 1000.into(),
            gid: 1001.into(),
            pid: 7.into(),
            ..InHeader::default()
        };
        [header.as_bytes(), body].concat()
    }

    fn cut_up(&self, bytes: usize, head: usize, cut: Cut) -> Vec<usize> {
        let piece = match cut {
            Cut::Kernel | Cut::Indirect => 4096,
            Cut::Pieces(piece) => return cut_evenly(bytes, piece),
        };
        let head = head.min(bytes);
        [cut_evenly(head, head), cut_evenly(bytes - head, piece)].concat()
    }

    /// Takes memory for pieces of these lengths, with a gap behind each.
    fn pieces(&self, lens: &[usize], writable: bool) -> Vec<Buffer> {
        let piece = |len: &usize| {
            let at = self.guest.alloc(*len as u64 + 1, 1);
            self.guest.write(at, &vec![UNWRITTEN; *len + 1]);
            (at, *len as u32, writable)
        };
        lens.iter().map(piece).collect()
    }

    /// Puts a request on a ring, not yet visible, with `room` bytes for its reply.
    pub fn put(&mut self, queue: usize, bytes: &[u8], room: usize, cut: Cut) -> Sent {
        let (sent, chain) = self.lay_out(bytes, room, cut);
        let head = match cut {
            Cut::Indirect => self.queues[queue].add_indirect(&chain),
            _ => self.queues[queue].add(&chain),
        };
        Sent { head, ..sent }
    }

    /// The same in an indirect table, however it is cut.
    pub fn put_indirect(&mut self, queue: usize, bytes: &[u8], room: usize, cut: Cut) -> Sent {
        let (sent, chain) = self.lay_out(bytes, room, cut);
        let head = self.queues[queue].add_indirect(&chain);
        Sent { head, ..sent }
    }

    /// The chain of a request.
    fn lay_out(&self, bytes: &[u8], room: usize, cut: Cut) -> (Sent, Vec<Buffer>) {
        // WRITE's arguments are a piece of their own.
        let arguments = match bytes.get(4) {
            Some(16) => 80,
            _ => HEADER_BYTES,
        };
        let out = self.pieces(&self.cut_up(bytes.len(), arguments, cut), false);
        let mut rest = bytes;
        for (at, len, _) in &out {
            let (now, later) = rest.split_at(*len as usize);
            self.guest.write(*at, now);
            rest = later;
        }
        let room = self.pieces(&self.cut_up(room, REPLY_HEADER_BYTES, cut), true);
        let chain = [out, room.clone()].concat();
        let unique = match bytes.get(8..16) {
            Some(unique) => u64::from_le_bytes(unique.try_into().expect("eight bytes")),
            None => 0,
        };
        let sent = Sent {
            head: 0,
            room,
            unique,
        };
        (sent, chain)
    }

    /// What was written of a reply. The used length is that of its header, and nothing is written beyond it.
    pub fn answer(&self, sent: &Sent, used: u32) -> Option<Answer> {
        let read = |piece: &Buffer| self.guest.read(piece.0, piece.1 as usize + 1);
        let mut bytes = Vec::new();
        for piece in &sent.room {
            let mut piece = read(piece);
            assert_eq!(piece.pop(), Some(UNWRITTEN), "a write behind a piece");
            bytes.extend(piece);
        }
        let rest = bytes.split_off(used as usize);
        assert!(
            rest.iter().all(|byte| *byte == UNWRITTEN),
            "more written than said"
        );
        if used == 0 {
            return None;
        }
        let (header, body) = OutHeader::read_from_prefix(&bytes).expect("a whole header");
        assert_eq!(
            header.len.get(),
            used,
            "the header's length is the used length"
        );
        assert_eq!(
            header.unique.get(),
            sent.unique,
            "a reply to another request"
        );
        Some(Answer {
            used,
            error: -header.error.get(),
            body: body.to_vec(),
        })
    }

    /// Does one request and waits for its reply; none if the used length is 0.
    pub fn send(&mut self, queue: usize, bytes: &[u8], room: usize, cut: Cut) -> Option<Answer> {
        let sent = self.put(queue, bytes, room, cut);
        self.queues[queue].submit();
        let (head, used) = self.queues[queue].wait_used();
        assert_eq!(head, sent.head, "an answer to another request");
        self.answer(&sent, used)
    }

    /// Does one request on the first request queue.
    pub fn call(&mut self, opcode: Opcode, node: NodeId, body: &[u8], room: usize) -> Answer {
        let bytes = self.request(opcode.number(), node, body);
        let room = REPLY_HEADER_BYTES + room;
        self.send(1, &bytes, room, self.cut).expect("a reply")
    }

    /// INIT with all that this device's codec knows.
    pub fn init(&mut self) -> Result<wire::InitOut, i32> {
        let features = Features::from_bits(u64::MAX).bits();
        let body = wire::InitIn {
            major: wire::VERSION_MAJOR.into(),
            minor: wire::VERSION_MINOR.into(),
            max_readahead: (128 << 10).into(),
            flags: (features as u32).into(),
        };
        let more = wire::InitInExt {
            flags2: ((features >> 32) as u32).into(),
            ..wire::InitInExt::default()
        };
        let body = [body.as_bytes(), more.as_bytes()].concat();
        self.call(Opcode::Init, NodeId(0), &body, size_of::<wire::InitOut>())
            .get()
    }

    /// LOOKUP.
    pub fn lookup(&mut self, parent: NodeId, name: &[u8]) -> Result<wire::EntryOut, i32> {
        let body = named(&[], name);
        self.call(Opcode::Lookup, parent, &body, size_of::<wire::EntryOut>())
            .get()
    }

    /// GETATTR.
    pub fn getattr(&mut self, node: NodeId) -> Result<wire::Attr, i32> {
        let body = wire::GetattrIn::default();
        let room = size_of::<wire::AttrOut>();
        let out: wire::AttrOut = self
            .call(Opcode::Getattr, node, body.as_bytes(), room)
            .get()?;
        Ok(out.attr)
    }

    /// MKDIR.
    pub fn mkdir(&mut self, parent: NodeId, name: &[u8]) -> Result<NodeId, i32> {
        let head = wire::MkdirIn {
            mode: 0o755.into(),
            umask: 0o22.into(),
        };
        let body = named(head.as_bytes(), name);
        let room = size_of::<wire::EntryOut>();
        let entry: wire::EntryOut = self.call(Opcode::Mkdir, parent, &body, room).get()?;
        Ok(NodeId(entry.nodeid.get()))
    }

    /// CREATE of a file for reading and writing: its inode and handle.
    pub fn create(&mut self, parent: NodeId, name: &[u8]) -> Result<(NodeId, u64), i32> {
        let head = wire::CreateIn {
            flags: (libc::O_RDWR as u32).into(),
            mode: (libc::S_IFREG | 0o644).into(),
            umask: 0o22.into(),
            open_flags: 0.into(),
        };
        self.created(Opcode::Create, parent, &named(head.as_bytes(), name))
    }

    /// TMPFILE of a file for reading and writing: its inode and handle.
    pub fn tmpfile(&mut self, parent: NodeId) -> Result<(NodeId, u64), i32> {
        let head = wire::CreateIn {
            flags: ((libc::O_RDWR | libc::O_TMPFILE) as u32).into(),
            mode: (libc::S_IFREG | 0o600).into(),
            umask: 0o22.into(),
            open_flags: 0.into(),
        };
        self.created(Opcode::Tmpfile, parent, &named(head.as_bytes(), b"/"))
    }

    /// A request that makes a file and opens it.
    fn created(
        &mut self,
        opcode: Opcode,
        parent: NodeId,
        body: &[u8],
    ) -> Result<(NodeId, u64), i32> {
        let entry_bytes = size_of::<wire::EntryOut>();
        let room = entry_bytes + size_of::<wire::OpenOut>();
        let body = self.call(opcode, parent, body, room).ok()?;
        let entry = wire::EntryOut::read_from_bytes(&body[..entry_bytes]).expect("an entry");
        let open = wire::OpenOut::read_from_bytes(&body[entry_bytes..]).expect("a handle");
        Ok((NodeId(entry.nodeid.get()), open.fh.get()))
    }

    /// OPEN or OPENDIR.
    pub fn open(&mut self, opcode: Opcode, node: NodeId, flags: i32) -> Result<u64, i32> {
        let body = wire::OpenIn {
            flags: (flags as u32).into(),
            open_flags: 0.into(),
        };
        let room = size_of::<wire::OpenOut>();
        let out: wire::OpenOut = self.call(opcode, node, body.as_bytes(), room).get()?;
        Ok(out.fh.get())
    }

    /// The bytes of a READ.
    pub fn read_request(&mut self, node: NodeId, handle: u64, offset: u64, size: u32) -> Vec<u8> {
        let body = read_in(handle, offset, size);
        self.request(Opcode::Read.number(), node, body.as_bytes())
    }

    /// READ.
    pub fn read(
        &mut self,
        node: NodeId,
        handle: u64,
        offset: u64,
        size: u32,
    ) -> Result<Vec<u8>, i32> {
        let body = read_in(handle, offset, size);
        self.call(Opcode::Read, node, body.as_bytes(), size as usize)
            .ok()
    }

    /// The bytes of a WRITE.
    pub fn write_request(
        &mut self,
        node: NodeId,
        handle: u64,
        offset: u64,
        data: &[u8],
    ) -> Vec<u8> {
        let head = wire::WriteIn {
            fh: handle.into(),
            offset: offset.into(),
            size: (data.len() as u32).into(),
            flags: (libc::O_RDWR as u32).into(),
            ..wire::WriteIn::default()
        };
        let body = [head.as_bytes(), data].concat();
        self.request(Opcode::Write.number(), node, &body)
    }

    /// WRITE.
    pub fn write(
        &mut self,
        node: NodeId,
        handle: u64,
        offset: u64,
        data: &[u8],
    ) -> Result<u32, i32> {
        let bytes = self.write_request(node, handle, offset, data);
        let room = REPLY_HEADER_BYTES + size_of::<wire::WriteOut>();
        let answer = self.send(1, &bytes, room, self.cut).expect("a reply");
        Ok(answer.get::<wire::WriteOut>()?.size.get())
    }

    /// READDIR or READDIRPLUS: name, inode and cookie of each record of one reply.
    pub fn list(
        &mut self,
        opcode: Opcode,
        node: NodeId,
        handle: u64,
        cookie: u64,
        size: u32,
    ) -> Result<Vec<(Vec<u8>, u64, u64)>, i32> {
        let body = read_in(handle, cookie, size);
        let bytes = self
            .call(opcode, node, body.as_bytes(), size as usize)
            .ok()?;
        let skip = match opcode {
            Opcode::Readdirplus => size_of::<wire::EntryOut>(),
            _ => 0,
        };
        let mut records = Vec::new();
        let mut rest = bytes.as_slice();
        while !rest.is_empty() {
            let (dirent, _) = wire::Dirent::read_from_prefix(&rest[skip..]).expect("a record");
            let head = skip + size_of::<wire::Dirent>();
            let name = rest[head..head + dirent.namelen.get() as usize].to_vec();
            let len = (head + name.len()).next_multiple_of(8);
            records.push((name, dirent.ino.get(), dirent.off.get()));
            rest = &rest[len..];
        }
        Ok(records)
    }

    /// An address in the guest's memory with these bytes.
    pub fn place(&self, bytes: &[u8]) -> GuestAddr {
        self.guest.place(bytes)
    }
}

fn read_in(handle: u64, offset: u64, size: u32) -> wire::ReadIn {
    wire::ReadIn {
        fh: handle.into(),
        offset: offset.into(),
        size: size.into(),
        ..wire::ReadIn::default()
    }
}

/// Arguments with a name behind them.
pub fn named(head: &[u8], name: &[u8]) -> Vec<u8> {
    [head, name, &[0]].concat()
}

fn cut_evenly(bytes: usize, piece: usize) -> Vec<usize> {
    let piece = piece.max(1);
    (0..bytes)
        .step_by(piece)
        .map(|at| piece.min(bytes - at))
        .collect()
}
