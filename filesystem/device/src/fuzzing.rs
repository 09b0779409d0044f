//! Hostile input as a plain function: the fuzz target calls it with what the fuzzer finds, the tests with
//! random bytes. It returns if all is well and panics if a guest got where it must not.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use fabric_types::io::Tag;
use fuse_codec::wire::{self, OutHeader};
use fuse_codec::{Dialect, Errno, Opcode, Request};
use vhost_backend::device::{DeviceEngine, DeviceQueue, Submitted};
use vhost_backend::ring::{Chain, MAX_SEGMENTS};
use zerocopy::{FromBytes, IntoBytes};

use crate::memory_fs::{MemoryFilesystem, MemoryService};
use crate::{FsDevice, FsEngine, FsOptions, FsQueue, FsRequest, FsSlot, Reply, Service, Submit};

/// Requests of one input; what follows is ignored.
const REQUESTS_MAX: usize = 64;
/// Requests that the service holds before it has no room.
const HELD_MAX: usize = 3;
/// Most room for a reply: an operation may ask for more, and is refused then.
const ROOM_BYTES_MAX: usize = 128 << 10;
/// What the guest's memory has before the device writes there.
const UNWRITTEN: u8 = 0xa5;

/// How far an input got.
#[derive(Debug, Clone, Copy, Default)]
pub struct Reach {
    /// Requests that the service was asked about.
    pub served: usize,
    /// Requests that were answered.
    pub answered: usize,
    /// Of these, not by an error.
    pub succeeded: usize,
}

/// Chooses by the bytes of an input; zero when there are no more.
struct Input<'a>(&'a [u8]);

impl<'a> Input<'a> {
    fn byte(&mut self) -> u8 {
        match self.0.split_first() {
            Some((byte, rest)) => {
                self.0 = rest;
                *byte
            }
            None => 0,
        }
    }

    fn take(&mut self, bytes: usize) -> &'a [u8] {
        let (now, rest) = self.0.split_at(bytes.min(self.0.len()));
        self.0 = rest;
        now
    }
}

/// Serves from memory, and holds replies, turns requests away or gives replies that do not fit, as it is
/// told.
struct HostileService {
    inner: MemoryService,
    held: VecDeque<(Tag, Option<Errno>)>,
    /// Of the next request.
    choice: u8,
    served: usize,
    never: OwnedFd,
}

impl Service for HostileService {
    type Filesystem = MemoryFilesystem;

    fn submit<'s>(
        &'s mut self,
        filesystem: &Arc<MemoryFilesystem>,
        request: &FsRequest<'_>,
    ) -> Submit<'s> {
        let pieces = request.data.pieces().iter().map(|piece| piece.iov_len);
        assert_eq!(pieces.sum::<usize>(), request.data.len());
        match self.choice % 8 {
            0 if self.held.len() >= HELD_MAX => return Submit::Busy,
            0 => {
                let error = (self.choice & 8 != 0).then_some(Errno::EINTR);
                self.held.push_back((request.tag, error));
                self.served += 1;
                return Submit::Pending;
            }
            1 => return Submit::Done(Reply::Bytes(&[UNWRITTEN; 3000])),
            2 => return Submit::Done(Reply::Data(u32::MAX)),
            _ => {}
        }
        self.served += 1;
        self.inner.submit(filesystem, request)
    }

    fn kick(&mut self) {}

    fn reap(&mut self, done: &mut dyn FnMut(Tag, Reply<'_>)) -> usize {
        let Some((tag, error)) = self.held.pop_back() else {
            return 0;
        };
        done(tag, error.map_or(Reply::Done, Reply::Error));
        1
    }

    fn in_flight(&self) -> usize {
        self.held.len()
    }

    fn wait_fd(&self) -> BorrowedFd<'_> {
        self.never.as_fd()
    }
}

/// A chain in memory of its own.
struct GuestChain {
    memory: Vec<u8>,
    /// Where the writable pieces are in it.
    room: Vec<(usize, usize)>,
    slot: FsSlot,
    unique: u64,
}

impl GuestChain {
    /// Lays out a request and room for its reply in pieces that the input chooses, each with a gap behind it.
    fn new(request: &[u8], room: usize, input: &mut Input<'_>, chain: &mut Chain) -> Self {
        let cut = 1 + usize::from(input.byte());
        let lens = |bytes: usize| {
            let piece = cut.max(bytes.div_ceil(MAX_SEGMENTS));
            (0..bytes)
                .step_by(piece)
                .map(move |at| (at, piece.min(bytes - at)))
        };
        let mut memory = Vec::new();
        let readable: Vec<_> = lens(request.len())
            .map(|(at, len)| {
                memory.extend_from_slice(&request[at..at + len]);
                memory.push(0);
                (memory.len() - len - 1, len)
            })
            .collect();
        let room: Vec<_> = lens(room)
            .map(|(_, len)| {
                memory.resize(memory.len() + len + 1, UNWRITTEN);
                (memory.len() - len - 1, len)
            })
            .collect();
        let base = memory.as_mut_ptr();
        let piece = |&(at, len): &(usize, usize)| libc::iovec {
            iov_base: base.wrapping_add(at).cast(),
            iov_len: len,
        };
        chain.clear();
        chain.readable.extend(readable.iter().map(piece));
        chain.writable.extend(room.iter().map(piece));
        chain.readable_bytes = request.len() as u64;
        chain.writable_bytes = room.iter().map(|(_, len)| *len as u64).sum();
        let unique = request.get(8..16).map_or(0, |unique| {
            u64::from_le_bytes(unique.try_into().expect("eight bytes"))
        });
        Self {
            memory,
            room,
            slot: FsSlot::default(),
            unique,
        }
    }

    /// Checks what was written; says whether it is a reply, and whether that is no error.
    fn check(&self, used: u32) -> (bool, bool) {
        let mut bytes = Vec::new();
        for &(at, len) in &self.room {
            bytes.extend_from_slice(&self.memory[at..at + len]);
            assert_eq!(self.memory[at + len], UNWRITTEN, "a write behind a piece");
        }
        let used = used as usize;
        assert!(used <= bytes.len(), "more written than there is room for");
        if used == 0 {
            assert!(
                bytes.iter().all(|byte| *byte == UNWRITTEN),
                "written without a word"
            );
            return (false, false);
        }
        let (header, _) = OutHeader::read_from_prefix(&bytes).expect("a whole header");
        assert_eq!(
            header.len.get() as usize,
            used,
            "the header's length is the used length"
        );
        assert_eq!(header.unique.get(), self.unique);
        let error = header.error.get();
        assert!((-Errno::MAX..=0).contains(&error));
        (true, error == 0)
    }
}

/// Bytes of an operation's arguments, and how many names follow them.
fn shape(opcode: Opcode) -> (usize, usize) {
    use Opcode as O;
    match opcode {
        O::Lookup | O::Unlink | O::Rmdir | O::Removexattr => (0, 1),
        O::Symlink => (0, 2),
        O::Forget | O::Interrupt | O::Access | O::Syncfs | O::Open | O::Opendir => (8, 0),
        O::Listxattr => (8, 0),
        O::Mkdir | O::Link | O::Getxattr => (8, 1),
        O::Rename => (8, 2),
        O::Mknod | O::Create | O::Tmpfile | O::Setxattr => (16, 1),
        O::Rename2 => (16, 2),
        O::Getattr | O::Fsync | O::Fsyncdir => (16, 0),
        O::Flush | O::Release | O::Releasedir | O::Lseek | O::Statx | O::Poll => (24, 0),
        O::Fallocate | O::Ioctl => (32, 0),
        O::Read | O::Write | O::Readdir | O::Readdirplus => (40, 0),
        O::Getlk | O::Setlk | O::Setlkw => (48, 0),
        O::CopyFileRange => (56, 0),
        O::Setattr => (88, 0),
        O::Init => (64, 0),
        O::BatchForget => (8, 0),
        O::Readlink | O::Statfs | O::Destroy | O::NotifyReply => (0, 0),
    }
}

/// Arguments that often have a meaning: small numbers, and names of few inodes.
fn likely_body(opcode: Opcode, input: &mut Input<'_>) -> Vec<u8> {
    let (bytes, names) = shape(opcode);
    let mut body: Vec<u8> = (0..bytes)
        .map(|at| match (input.byte(), at % 4) {
            (byte @ 252.., _) => byte,
            (byte, 0) => byte % 4,
            // Kinds of inodes, and sizes of some KiB.
            (byte @ 128.., 1) => byte & 0xb0,
            _ => 0,
        })
        .collect();
    for _ in 0..names {
        body.extend([b'a' + input.byte() % 4, 0]);
    }
    if opcode == Opcode::Write {
        body.extend_from_slice(input.take(40));
    }
    body
}

/// A request with a header that mostly fits, of an operation that the input chooses.
fn request(input: &mut Input<'_>) -> Vec<u8> {
    let kind = input.byte();
    let opcode = Opcode::ALL.get(usize::from(kind) % (Opcode::ALL.len() + 1));
    let number = opcode.map_or(u32::from(kind), |opcode| opcode.number());
    let body = match opcode {
        Some(opcode) if input.byte() % 4 != 0 => likely_body(*opcode, input),
        _ => {
            let len = usize::from(input.byte());
            input.take(len).to_vec()
        }
    };
    let spoil = input.byte();
    let header = wire::InHeader {
        len: (40 + body.len() as u32 + u32::from(spoil == 1)).into(),
        opcode: number.into(),
        unique: u64::from(input.byte()).into(),
        nodeid: u64::from(input.byte() % 4).into(),
        ..wire::InHeader::default()
    };
    let mut bytes = [header.as_bytes(), &body].concat();
    if spoil == 2 {
        bytes.truncate(usize::from(input.byte()));
    }
    // The length of a payload that is right, so that more than its check is reached.
    if opcode == Some(&Opcode::Write) && bytes.len() >= 80 && spoil != 3 {
        let size = bytes.len() as u32 - 80;
        bytes[56..60].copy_from_slice(&size.to_le_bytes());
    }
    bytes
}

/// How much room the reply of a request gets: what it needs, a little more, or anything.
fn room_for(request: &[u8], input: &mut Input<'_>) -> usize {
    let dialect = Dialect {
        setxattr_ext: true,
        io_bytes_max: 1 << 20,
    };
    let choice = input.byte();
    let needed = Request::parse(request, dialect).map_or(16, |request| request.reply_bytes_max());
    let room = match choice {
        0..=31 => usize::from(choice),
        32..=63 => needed.saturating_sub(1),
        64..=127 => needed + usize::from(choice),
        _ => needed,
    };
    room.min(ROOM_BYTES_MAX)
}

fn service() -> io::Result<HostileService> {
    Ok(HostileService {
        inner: MemoryService::new()?,
        held: VecDeque::new(),
        choice: 0,
        served: 0,
        never: rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC)?,
    })
}

/// Feeds requests to a queue, from chains that the input cuts. No request panics; what is said to be written
/// is what the reply's header says, has room in the chain, and is all that is written.
pub fn chains(data: &[u8]) -> Reach {
    let mut input = Input(data);
    let options = FsOptions {
        tag: "fuzz".to_owned(),
        request_queues: 1,
        read_only: input.byte() % 8 == 0,
    };
    let device = FsDevice::new(MemoryFilesystem::new(), options).expect("possible options");
    let mut queue = FsQueue::<HostileService>::start(&device, 1, 1024, 0);
    let mut engine = FsEngine::new(service().expect("descriptors"));
    let mut chain = Chain::default();
    let mut reach = Reach::default();
    let mut held = HashMap::new();
    let init = init();
    for at in 0..REQUESTS_MAX as u64 {
        if input.0.is_empty() {
            break;
        }
        let bytes = if at == 0 {
            init.clone()
        } else {
            request(&mut input)
        };
        let room = match at {
            0 => 80,
            _ => room_for(&bytes, &mut input),
        };
        let mut guest = GuestChain::new(&bytes, room, &mut input, &mut chain);
        engine.service.choice = input.byte();
        // SAFETY: the pieces lie in memory that lives until the request is answered.
        let submitted = unsafe { queue.submit(&mut engine, Tag(at), &mut chain, &mut guest.slot) };
        match submitted {
            Ok(Submitted::Done(used)) => count(&mut reach, guest.check(used)),
            Ok(Submitted::Pending) => {
                held.insert(at, guest);
            }
            Ok(Submitted::Busy) => {}
            Ok(Submitted::Partial) => panic!("no request is submitted in parts"),
            Err(_) => break,
        }
        if input.byte() % 4 == 0 {
            reap(&mut engine, &mut queue, &mut held, &mut reach);
        }
    }
    while !held.is_empty() {
        reap(&mut engine, &mut queue, &mut held, &mut reach);
    }
    assert_eq!(queue.lists_taken(), 0, "a list that nobody uses");
    reach.served = engine.service.served;
    reach
}

fn init() -> Vec<u8> {
    let init = wire::InitIn {
        major: wire::VERSION_MAJOR.into(),
        minor: wire::VERSION_MINOR.into(),
        max_readahead: 0.into(),
        flags: u32::MAX.into(),
    };
    let more = wire::InitInExt::default();
    let header = wire::InHeader {
        len: 104.into(),
        opcode: Opcode::Init.number().into(),
        unique: 1.into(),
        ..wire::InHeader::default()
    };
    [header.as_bytes(), init.as_bytes(), more.as_bytes()].concat()
}

fn count(reach: &mut Reach, (is_reply, is_ok): (bool, bool)) {
    reach.answered += usize::from(is_reply);
    reach.succeeded += usize::from(is_ok);
}

fn reap(
    engine: &mut FsEngine<HostileService>,
    queue: &mut FsQueue<HostileService>,
    held: &mut HashMap<u64, GuestChain>,
    reach: &mut Reach,
) {
    let mut done = |tag: Tag, reply: Reply<'_>| {
        let mut guest: GuestChain = held.remove(&tag.0).expect("a tag that was submitted");
        let used = queue.complete(tag, reply, &mut guest.slot);
        count(reach, guest.check(used.expect("an answer at once")));
    };
    engine.reap(&mut done);
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    proptest! {
        #![proptest_config(ProptestConfig { cases: 10_000, ..ProptestConfig::default() })]

        #[test]
        fn any_chain_is_answered_as_its_header_says(
            data in proptest::collection::vec(any::<u8>(), 0..3000),
        ) {
            super::chains(&data);
        }
    }

    /// A target that stops at the first check it meets would find nothing.
    #[test]
    fn the_target_gets_past_the_first_checks() {
        let mut state = 1u64;
        let mut byte = || {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            (state >> 56) as u8
        };
        let mut sum = super::Reach::default();
        for _ in 0..200 {
            let data: Vec<u8> = (0..3000).map(|_| byte()).collect();
            let reach = super::chains(&data);
            sum.served += reach.served;
            sum.answered += reach.answered;
            sum.succeeded += reach.succeeded;
        }
        assert!(
            sum.served > 1000 && sum.answered > 2000 && sum.succeeded > 500,
            "{sum:?}"
        );
    }
}
