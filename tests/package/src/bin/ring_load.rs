//! A front end that writes until it is told to stop, and connects again when the daemon goes, as QEMU does:
//! it keeps the record of requests in flight and its rings, and never sends a request twice itself.
//!
//! `ring-load SOCKET STOP REPORT` writes blocks of 4 KiB one after the other until the file STOP is there,
//! reads all of them back, and writes a line of JSON into REPORT.

use std::collections::BTreeMap;
use std::io::{IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use vhost_backend::memory::GuestAddr;
use vhost_backend::session::message::{
    F_PROTOCOL_FEATURES, FLAG_NEED_REPLY, FLAG_VERSION, Header, InflightArea, MemoryHead, Region,
    VringAddr, VringState, code, protocol,
};
use vhost_backend::testing::{FakeGuest, FakeQueue, GUEST_BASE, QueueOptions, USER_BASE};
use zerocopy::{FromBytes, IntoBytes};

const GUEST_BYTES: u64 = 1 << 20;
const BLOCK_BYTES: usize = 4096;
const SECTOR_BYTES: u64 = 512;
/// Blocks that are written in turn.
const BLOCKS: u64 = 2048;
/// virtio 1.
const F_VERSION_1: u64 = 1 << 32;
const READ: u32 = 0;
const WRITE: u32 = 1;
/// Between two attempts to connect. QEMU waits a second, so a guest's pause has up to that on top.
const CONNECT_PAUSE: Duration = Duration::from_millis(5);
/// Without an answer for this long the load has failed.
const PATIENCE: Duration = Duration::from_secs(120);
/// Between two looks at the ring: processors of a small machine belong to the daemon.
const LOOK_PAUSE: Duration = Duration::from_micros(200);

fn main() -> Result<()> {
    let args: Vec<PathBuf> = std::env::args_os().skip(1).map(PathBuf::from).collect();
    let [socket, stop, report] = args.as_slice() else {
        bail!("usage: ring-load SOCKET STOP REPORT");
    };
    let mut load = Load::start(socket)?;
    let mut versions = BTreeMap::new();
    let mut longest = Duration::ZERO;
    let mut written = 0_u64;
    while !stop.exists() {
        let block = written % BLOCKS;
        written += 1;
        let begun = Instant::now();
        load.write(block, written)?;
        longest = longest.max(begun.elapsed());
        versions.insert(block, written);
    }
    let mut wrong = 0;
    for (block, version) in &versions {
        wrong += u64::from(load.read(*block)? != content(*block, *version));
    }
    let told = serde_json::json!({
        "writes": written,
        "longest_write_ms": longest.as_secs_f64() * 1e3,
        "reconnects": load.reconnects,
        "wrong_blocks": wrong,
    });
    // Whole, or not there.
    let partial = report.with_extension("partial");
    std::fs::write(&partial, told.to_string())?;
    std::fs::rename(&partial, report)?;
    Ok(())
}

/// What version `version` of a block holds.
fn content(block: u64, version: u64) -> Vec<u8> {
    let word = [block.to_le_bytes(), version.to_le_bytes()].concat();
    word.repeat(BLOCK_BYTES / word.len())
}

/// A guest that is nothing but memory and a ring.
struct Load {
    socket: PathBuf,
    stream: UnixStream,
    guest: Arc<FakeGuest>,
    queue: FakeQueue,
    /// The record of requests in flight.
    record: Option<(InflightArea, OwnedFd)>,
    header: GuestAddr,
    data: GuestAddr,
    status: GuestAddr,
    reconnects: u64,
}

impl Load {
    fn start(socket: &Path) -> Result<Self> {
        let guest = Arc::new(FakeGuest::new(GUEST_BYTES));
        let queue = FakeQueue::new(&guest, QueueOptions::default());
        let header = guest.alloc(16, 16);
        let data = guest.alloc(BLOCK_BYTES as u64, BLOCK_BYTES as u64);
        let status = guest.alloc(1, 1);
        let mut load = Self {
            socket: socket.to_owned(),
            stream: UnixStream::connect(socket).context("connect")?,
            guest,
            queue,
            record: None,
            header,
            data,
            status,
            reconnects: 0,
        };
        load.negotiate()?;
        Ok(load)
    }

    fn write(&mut self, block: u64, version: u64) -> Result<()> {
        self.guest.write(self.data, &content(block, version));
        self.request(WRITE, block)
    }

    fn read(&mut self, block: u64) -> Result<Vec<u8>> {
        self.request(READ, block)?;
        Ok(self.guest.read(self.data, BLOCK_BYTES))
    }

    /// Submits one request and waits for its answer, over any number of daemons.
    fn request(&mut self, kind: u32, block: u64) -> Result<()> {
        let sector = block * (BLOCK_BYTES as u64 / SECTOR_BYTES);
        let header = [&kind.to_le_bytes()[..], &[0; 4], &sector.to_le_bytes()].concat();
        self.guest.write(self.header, &header);
        self.guest.write(self.status, &[0xff]);
        let chain = [
            (self.header, header.len() as u32, false),
            (self.data, BLOCK_BYTES as u32, kind == READ),
            (self.status, 1, true),
        ];
        self.queue.add(&chain);
        self.queue.submit();
        let until = Instant::now() + PATIENCE;
        let head = loop {
            if let Some((head, _)) = self.queue.next_used() {
                break head;
            }
            ensure!(Instant::now() < until, "no answer");
            if self.is_gone() {
                self.connect_again(until)?;
            }
            std::thread::sleep(LOOK_PAUSE);
        };
        self.queue.recycle(head);
        let status = self.guest.read(self.status, 1);
        ensure!(
            status == [0],
            "request {kind} of block {block}: status {status:?}"
        );
        Ok(())
    }

    /// Whether the daemon has closed the connection.
    fn is_gone(&self) -> bool {
        let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
        match rustix::net::recv(&self.stream, &mut [0_u8; 1], flags) {
            Ok((_, 0)) => true,
            Ok(_) => false,
            Err(error) => error != rustix::io::Errno::AGAIN,
        }
    }

    fn connect_again(&mut self, until: Instant) -> Result<()> {
        loop {
            // A daemon that goes while it is asked is asked again.
            if let Ok(stream) = UnixStream::connect(&self.socket) {
                self.stream = stream;
                if self.negotiate().is_ok() {
                    self.reconnects += 1;
                    return Ok(());
                }
            }
            ensure!(Instant::now() < until, "the daemon does not come back");
            std::thread::sleep(CONNECT_PAUSE);
        }
    }

    fn negotiate(&mut self) -> Result<()> {
        let wanted =
            protocol::MQ | protocol::REPLY_ACK | protocol::CONFIG | protocol::INFLIGHT_SHMFD;
        self.ask(code::GET_FEATURES, &[])?;
        self.send(code::SET_PROTOCOL_FEATURES, 0, wanted.as_bytes(), &[])?;
        self.must(code::SET_OWNER, &[], &[])?;
        let features = QueueOptions::default().features | F_VERSION_1 | F_PROTOCOL_FEATURES;
        self.must(code::SET_FEATURES, features.as_bytes(), &[])?;
        self.share_record()?;
        self.share_memory()?;
        self.start_ring()
    }

    fn share_record(&mut self) -> Result<()> {
        if self.record.is_none() {
            let wanted = InflightArea {
                mmap_size: 0,
                mmap_offset: 0,
                num_queues: 1,
                queue_size: QueueOptions::default().size,
                padding: 0,
            };
            self.send(code::GET_INFLIGHT_FD, 0, wanted.as_bytes(), &[])?;
            let (answer, file) = self.receive(code::GET_INFLIGHT_FD)?;
            let area = InflightArea::read_from_bytes(&answer)
                .map_err(|e| anyhow::anyhow!("the record's answer: {e}"))?;
            self.record = Some((area, file.context("the record came without its file")?));
        }
        let Some((area, file)) = &self.record else {
            bail!("no record");
        };
        let file = file.try_clone()?;
        self.must(code::SET_INFLIGHT_FD, area.clone().as_bytes(), &[&file])
    }

    fn share_memory(&mut self) -> Result<()> {
        let head = MemoryHead {
            count: 1,
            padding: 0,
        };
        let region = Region {
            guest: GUEST_BASE,
            size: self.guest.size(),
            user: USER_BASE,
            mmap_offset: 0,
        };
        let payload = [head.as_bytes(), region.as_bytes()].concat();
        let file = self.guest.file().try_clone()?;
        self.must(code::SET_MEM_TABLE, &payload, &[&file])
    }

    fn start_ring(&mut self) -> Result<()> {
        let user = |at: GuestAddr| at.0 - GUEST_BASE + USER_BASE;
        let addr = VringAddr {
            index: 0,
            flags: 0,
            desc: user(self.queue.desc),
            used: user(self.queue.used),
            avail: user(self.queue.avail),
            log: 0,
        };
        let state = |num| VringState { index: 0, num };
        let (size, base) = (QueueOptions::default().size, self.queue.used_index());
        let fds = [&self.queue.err, &self.queue.call, &self.queue.kick];
        let [err, call, kick] = fds.map(OwnedFd::try_clone);
        self.must(code::SET_VRING_NUM, state(size.into()).as_bytes(), &[])?;
        self.must(code::SET_VRING_BASE, state(base.into()).as_bytes(), &[])?;
        self.must(code::SET_VRING_ADDR, addr.as_bytes(), &[])?;
        self.must(code::SET_VRING_ERR, 0_u64.as_bytes(), &[&err?])?;
        self.must(code::SET_VRING_CALL, 0_u64.as_bytes(), &[&call?])?;
        self.must(code::SET_VRING_KICK, 0_u64.as_bytes(), &[&kick?])?;
        self.must(code::SET_VRING_ENABLE, state(1).as_bytes(), &[])?;
        // What was submitted while nobody listened.
        rustix::io::write(&self.queue.kick, &1_u64.to_ne_bytes())?;
        Ok(())
    }

    /// Sends a message and waits until it has been carried out.
    fn must(&mut self, code: u32, payload: &[u8], fds: &[&OwnedFd]) -> Result<()> {
        self.send(code, FLAG_NEED_REPLY, payload, fds)?;
        let (answer, _) = self.receive(code)?;
        ensure!(answer == 0_u64.to_ne_bytes(), "message {code} was refused");
        Ok(())
    }

    fn ask(&mut self, code: u32, payload: &[u8]) -> Result<Vec<u8>> {
        self.send(code, 0, payload, &[])?;
        Ok(self.receive(code)?.0)
    }

    fn send(&mut self, code: u32, flags: u32, payload: &[u8], fds: &[&OwnedFd]) -> Result<()> {
        let header = Header {
            code,
            flags: FLAG_VERSION | flags,
            size: payload.len() as u32,
        };
        let bytes = [header.as_bytes(), payload].concat();
        if fds.is_empty() {
            return Ok(self.stream.write_all(&bytes)?);
        }
        let mut space = [MaybeUninit::uninit(); 64];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let rights: Vec<_> = fds.iter().map(|fd| fd.as_fd()).collect();
        ensure!(control.push(SendAncillaryMessage::ScmRights(&rights)));
        let slices = [IoSlice::new(&bytes)];
        let sent = sendmsg(&self.stream, &slices, &mut control, SendFlags::NOSIGNAL)?;
        ensure!(sent == bytes.len(), "a message was sent in part");
        Ok(())
    }

    /// An answer, and the file that came with it.
    fn receive(&mut self, code: u32) -> Result<(Vec<u8>, Option<OwnedFd>)> {
        let mut bytes = [0; size_of::<Header>()];
        let mut space = [MaybeUninit::uninit(); 64];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let slices = &mut [IoSliceMut::new(&mut bytes)];
        let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::WAITALL;
        let received = recvmsg(&self.stream, slices, &mut control, flags)?;
        ensure!(received.bytes == size_of::<Header>(), "the daemon is gone");
        let file = control.drain().find_map(|message| match message {
            RecvAncillaryMessage::ScmRights(mut files) => files.next(),
            _ => None,
        });
        let header = Header::read_from_bytes(&bytes).map_err(|e| anyhow::anyhow!("{e}"))?;
        ensure!(header.code == code, "answer to message {}", header.code);
        let mut payload = vec![0; header.size as usize];
        self.stream.read_exact(&mut payload)?;
        Ok((payload, file))
    }
}
