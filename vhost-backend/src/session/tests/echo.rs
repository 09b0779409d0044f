//! A device that is no disk, in a whole session: the device traits carry it, and nothing else knows of it.
//!
//! It is as a file system device would be: requests of any length in two kinds of queues, answers of any
//! length, and messages on the first queue that want none.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

use fabric_types::io::Tag;
use tempfile::TempDir;
use vhost::VhostBackend;
use vhost::vhost_user::VhostUserFrontend;
use vhost::vhost_user::message::VhostUserConfigFlags;

use super::support::*;
use crate::data_thread::{PollMode, ThreadOptions, Threads};
use crate::device::{Device, DeviceEngine, DeviceQueue, Submitted};
use crate::memory::budget::MemoryPolicy;
use crate::ring::{Chain, FEATURES, RingError, read_scattered, write_scattered};
use crate::session::Attachment;
use crate::session::message::{F_LOG_ALL, F_PROTOCOL_FEATURES};
use crate::session::socket::{Endpoint, Listener, SocketOptions};
use crate::testing::{Buffer, FakeGuest, FakeQueue, QueueOptions};

/// Its own feature bit.
const F_BACKWARDS: u64 = 1;
/// The queue of messages that want no answer.
const NOTES: u16 = 0;
/// The queue of messages that come back.
const ECHOES: u16 = 1;
const NAME_BYTES: usize = 8;
/// Requests that the engine holds before it has no room.
const ENGINE_REQUESTS: usize = 3;

/// Sends back what it is sent, with the last byte first.
struct Echo {
    name: Mutex<[u8; NAME_BYTES]>,
    notes: Mutex<Vec<Vec<u8>>>,
    interrupts: AtomicU32,
    stopped: AtomicU32,
}

#[derive(Debug, thiserror::Error)]
#[error("the name has {NAME_BYTES} bytes")]
struct NameError;

impl Device for Echo {
    type Error = NameError;

    fn features(&self) -> u64 {
        FEATURES | F_BACKWARDS
    }

    fn queues(&self) -> u16 {
        RINGS
    }

    fn read_config(&self, offset: u32, out: &mut [u8]) {
        let name = self.name.lock().unwrap();
        let from = name.get(offset as usize..).unwrap_or(&[]);
        let len = from.len().min(out.len());
        out[..len].copy_from_slice(&from[..len]);
        out[len..].fill(0);
    }

    fn write_config(&self, offset: u32, bytes: &[u8]) -> Result<(), NameError> {
        let name = <[u8; NAME_BYTES]>::try_from(bytes).map_err(|_| NameError)?;
        if offset != 0 {
            return Err(NameError);
        }
        *self.name.lock().unwrap() = name;
        Ok(())
    }

    fn reset(&self) {
        *self.name.lock().unwrap() = [0; NAME_BYTES];
    }
}

struct EchoQueue {
    device: Arc<Echo>,
    index: u16,
    is_backwards: bool,
}

/// Where the answer goes.
#[derive(Default)]
struct Reply(Vec<libc::iovec>);

// SAFETY: the pieces lead into guest memory, which stays mapped until the request is answered; one thread
// uses them.
unsafe impl Send for Reply {}

impl DeviceQueue for EchoQueue {
    type Device = Echo;
    type Engine = EchoEngine;
    type Request = Reply;

    fn start(device: &Arc<Echo>, index: u16, _size: u16, features: u64) -> Self {
        Self {
            device: Arc::clone(device),
            index,
            is_backwards: features & F_BACKWARDS != 0,
        }
    }

    unsafe fn submit(
        &mut self,
        engine: &mut EchoEngine,
        tag: Tag,
        chain: &mut Chain,
        request: &mut Reply,
    ) -> Result<Submitted, RingError> {
        if chain.readable_bytes == 0 {
            return Err(RingError::Incomplete);
        }
        let mut message = vec![0; chain.readable_bytes as usize];
        // SAFETY: by the caller's promise.
        unsafe { read_scattered(&chain.readable, &mut message) };
        if self.index == NOTES {
            self.device.notes.lock().unwrap().push(message);
            return Ok(Submitted::Done(0));
        }
        if engine.waiting.len() == ENGINE_REQUESTS {
            return Ok(Submitted::Busy);
        }
        request.0.clear();
        request.0.extend_from_slice(&chain.writable);
        if self.is_backwards {
            message.reverse();
        }
        engine.waiting.push((tag, message));
        Ok(Submitted::Pending)
    }

    fn complete(&mut self, _: Tag, answer: Vec<u8>, request: &mut Reply) -> Option<u32> {
        // SAFETY: the pieces stay mapped until this returns.
        Some(unsafe { write_scattered(&request.0, &answer) } as u32)
    }

    fn interrupted(&mut self) {
        self.device.interrupts.fetch_add(1, Ordering::Relaxed);
    }
}

impl Drop for EchoQueue {
    fn drop(&mut self) {
        self.device.stopped.fetch_add(1, Ordering::Relaxed);
    }
}

/// Holds messages until it is reaped, and gives out the last one first.
struct EchoEngine {
    waiting: Vec<(Tag, Vec<u8>)>,
    wake: OwnedFd,
}

impl DeviceEngine for EchoEngine {
    type Queue = EchoQueue;
    type Outcome<'a> = Vec<u8>;

    fn kick(&mut self) {
        rustix::io::write(&self.wake, &1u64.to_ne_bytes()).unwrap();
    }

    fn reap<'r>(&'r mut self, done: &'r mut dyn FnMut(Tag, Vec<u8>)) -> usize {
        match self.waiting.pop() {
            Some((tag, message)) => {
                done(tag, message);
                1
            }
            None => 0,
        }
    }

    fn in_flight(&self) -> usize {
        self.waiting.len()
    }

    fn wait_fd(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }
}

/// An echo behind a socket, and a front end with both rings running.
struct EchoBench {
    front: Front,
    /// The queue of ring [`ECHOES`]; the front end has the other.
    echoes: FakeQueue,
    device: Arc<Echo>,
    _attachment: Attachment,
    _dir: TempDir,
}

impl EchoBench {
    fn new(options: QueueOptions) -> Self {
        let device = Arc::new(Echo {
            name: Mutex::new(*b"nobody\0\0"),
            notes: Mutex::default(),
            interrupts: AtomicU32::new(0),
            stopped: AtomicU32::new(0),
        });
        let threads = ThreadOptions {
            threads: 1,
            poll: PollMode::Never,
            pin: None,
        };
        let threads = Threads::start(&threads, |_| {
            Ok(EchoEngine {
                waiting: Vec::new(),
                wake: FakeQueue::event(),
            })
        });
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("echo.sock");
        let listener = Listener::bind(&SocketOptions::new(&path)).unwrap();
        let attachment = Attachment::start(
            Endpoint::Listening(listener),
            Arc::clone(&device),
            threads.unwrap(),
            MemoryPolicy::alone(),
        );
        let guest = Arc::new(FakeGuest::new(GUEST_BYTES));
        let options = QueueOptions {
            features: options.features | F_BACKWARDS,
            ..options
        };
        let [notes, echoes] = [(); 2].map(|()| FakeQueue::new(&guest, options));
        let front = Front::on(UnixStream::connect(&path).unwrap(), guest, notes);
        let mut bench = Self {
            front,
            echoes,
            device,
            _attachment: attachment.unwrap(),
            _dir: dir,
        };
        // All but the last step, which is for disks.
        bench.front.set_up(SETUP.len() - 1);
        bench.start_echoes();
        bench
    }

    fn start_echoes(&mut self) {
        let ring = usize::from(ECHOES);
        let vhost = &self.front.vhost;
        std::mem::swap(&mut self.front.queue, &mut self.echoes);
        let addresses = self.front.addresses();
        std::mem::swap(&mut self.front.queue, &mut self.echoes);
        let size = self.echoes.config(ECHOES).size;
        vhost.set_vring_num(ring, size).unwrap();
        vhost.set_vring_addr(ring, &addresses).unwrap();
        vhost
            .set_vring_kick(ring, &event_fd(&self.echoes.kick))
            .unwrap();
        vhost
            .set_vring_call(ring, &event_fd(&self.echoes.call))
            .unwrap();
        vhost
            .set_vring_err(ring, &event_fd(&self.echoes.err))
            .unwrap();
        self.front.vhost.set_vring_enable(ring, true).unwrap();
    }

    /// A message in pieces of `piece` bytes, with room for an answer in as many.
    fn chain(&self, message: &[u8], piece: usize, room: usize) -> (Vec<Buffer>, Vec<Buffer>) {
        let guest = &self.front.guest;
        let out = message.chunks(piece);
        let out = out.map(|part| (guest.place(part), part.len() as u32, false));
        let sizes = (0..room).step_by(piece).map(|at| piece.min(room - at));
        let back = sizes.map(|len| (guest.alloc(len as u64, 1), len as u32, true));
        (out.collect(), back.collect())
    }

    /// What was written into the pieces of an answer.
    fn answer(&self, pieces: &[Buffer], written: u32) -> Vec<u8> {
        let read = |piece: &Buffer| self.front.guest.read(piece.0, piece.1 as usize);
        let mut bytes: Vec<u8> = pieces.iter().flat_map(read).collect();
        assert!(written as usize <= bytes.len());
        bytes.truncate(written as usize);
        bytes
    }

    /// Sends messages together; checks that each comes back, cut to the room that it has.
    fn exchange(&mut self, messages: &[(Vec<u8>, usize, usize)]) {
        let mut open = Vec::new();
        for (message, piece, room) in messages {
            let (out, back) = self.chain(message, *piece, *room);
            let head = self.echoes.add(&[out, back.clone()].concat());
            let mut wanted = message.clone();
            wanted.reverse();
            wanted.truncate(*room);
            open.push((head, back, wanted));
        }
        self.echoes.submit();
        while !open.is_empty() {
            let (head, written) = self.echoes.wait_used();
            let at = open.iter().position(|(known, ..)| *known == head).unwrap();
            let (_, back, wanted) = open.swap_remove(at);
            assert_eq!(self.answer(&back, written), wanted);
        }
    }
}

fn message(len: usize) -> Vec<u8> {
    (0..len).map(|i| (i * 7 + len) as u8).collect()
}

fn carries_a_whole_session(options: QueueOptions) {
    let mut bench = EchoBench::new(options);
    let offered = bench.front.vhost.get_features().unwrap();
    let session_bits = F_LOG_ALL | F_PROTOCOL_FEATURES;
    assert_eq!(offered, FEATURES | F_BACKWARDS | session_bits);
    for len in [1, 16, 40, 5000] {
        bench.exchange(&[(message(len), 1 + len / 3, len)]);
    }
    // More than the engine has room for, answers that are cut, and one without room for any.
    let many: Vec<_> = (1..12).map(|i| (message(i * 9), 50, i * 5)).collect();
    bench.exchange(&many);
    bench.exchange(&[(message(30), 10, 0)]);

    let (note, _) = bench.chain(b"forget", 4, 0);
    bench.front.queue.add(&note);
    bench.front.queue.submit();
    assert_eq!(bench.front.queue.wait_used().1, 0);
    assert_eq!(*bench.device.notes.lock().unwrap(), [b"forget"]);
    assert!(bench.device.interrupts.load(Ordering::Relaxed) > 0);
}

#[test]
fn a_device_that_is_no_disk_goes_through_a_whole_session() {
    carries_a_whole_session(QueueOptions::default());
    carries_a_whole_session(QueueOptions::default().packed());
}

#[test]
fn its_configuration_and_reset_are_its_own() {
    let mut bench = EchoBench::new(QueueOptions::default());
    let flags = VhostUserConfigFlags::WRITABLE;
    let vhost = &mut bench.front.vhost;
    let name = vhost.get_config(0, 10, flags, &[0; 10]).unwrap().1;
    assert_eq!(name, b"nobody\0\0\0\0");
    vhost.set_config(0, flags, b"somebody").unwrap();
    assert!(vhost.set_config(1, flags, b"somebody").is_err());
    assert!(vhost.set_config(0, flags, b"who").is_err());
    let name = vhost.get_config(0, 10, flags, &[0; 10]).unwrap().1;
    assert_eq!(name, b"somebody\0\0");
    assert_eq!(bench.device.stopped.load(Ordering::Relaxed), 0);
    vhost.reset_device().unwrap();
    assert_eq!(*bench.device.name.lock().unwrap(), [0; NAME_BYTES]);
    assert_eq!(bench.device.stopped.load(Ordering::Relaxed), 2);
}

#[test]
fn a_request_that_it_refuses_stops_that_queue_alone() {
    let mut bench = EchoBench::new(QueueOptions::default());
    let (_, back) = bench.chain(&[], 1, 8);
    bench.front.queue.add(&back);
    bench.front.queue.submit();
    assert!(FakeQueue::wait_event(&bench.front.queue.err) > 0);
    bench.exchange(&[(message(100), 30, 100)]);
    let base = bench.front.vhost.get_vring_base(usize::from(ECHOES));
    assert_eq!(base.unwrap(), 1);
}
