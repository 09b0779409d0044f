//! A front end with a guest that is nothing but memory and rings: what QEMU does, as far as a test wants it.

use std::io::{IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;

use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use vhost_backend::blk::{SERIAL_BYTES, WRITEBACK_OFFSET};
use vhost_backend::memory::GuestAddr;
use vhost_backend::session::message::{
    ConfigHead, F_PROTOCOL_FEATURES, FLAG_NEED_REPLY, FLAG_VERSION, Header, MemoryHead, Region,
    VringAddr, VringState, code, protocol,
};
use vhost_backend::testing::{FakeGuest, FakeQueue, GUEST_BASE, QueueOptions, USER_BASE};
use virtio_bindings::virtio_blk::{
    VIRTIO_BLK_T_DISCARD, VIRTIO_BLK_T_GET_ID, VIRTIO_BLK_T_IN, VIRTIO_BLK_T_OUT,
};
use zerocopy::{FromBytes, IntoBytes};

/// Memory of the guest in bytes.
const GUEST_BYTES: u64 = 1 << 20;
/// Bytes of a sector.
const SECTOR_BYTES: usize = 512;
/// virtio 1.
const F_VERSION_1: u64 = 1 << 32;

/// A connected front end.
pub struct Front {
    stream: UnixStream,
    guest: Arc<FakeGuest>,
    /// Rings that run.
    pub queues: Vec<FakeQueue>,
}

impl Front {
    /// Connects and negotiates, and starts `rings` rings.
    pub fn start(socket: &Path, rings: u32) -> Self {
        let guest = Arc::new(FakeGuest::new(GUEST_BYTES));
        let mut front = Front {
            stream: UnixStream::connect(socket).unwrap(),
            guest,
            queues: Vec::new(),
        };
        let wanted = protocol::MQ | protocol::REPLY_ACK | protocol::CONFIG | protocol::RESET_DEVICE;
        front.ask(code::GET_FEATURES, &[]);
        front.tell(code::SET_PROTOCOL_FEATURES, wanted.as_bytes());
        front.must(code::SET_OWNER, &[], &[]);
        let features = QueueOptions::default().features | F_VERSION_1 | F_PROTOCOL_FEATURES;
        front.must(code::SET_FEATURES, features.as_bytes(), &[]);
        front.share_memory();
        for index in 0..rings {
            front.start_ring(index);
        }
        front
    }

    fn share_memory(&mut self) {
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
        let file = self.guest.file().try_clone().unwrap();
        self.must(code::SET_MEM_TABLE, &payload, &[&file]);
    }

    fn start_ring(&mut self, index: u32) {
        let queue = FakeQueue::new(&self.guest, QueueOptions::default());
        let user = |at: GuestAddr| at.0 - GUEST_BASE + USER_BASE;
        let num = u32::from(QueueOptions::default().size);
        let addr = VringAddr {
            index,
            flags: 0,
            desc: user(queue.desc),
            used: user(queue.used),
            avail: user(queue.avail),
            log: 0,
        };
        let state = |num| VringState { index, num };
        let ring = u64::from(index);
        self.must(code::SET_VRING_NUM, state(num).as_bytes(), &[]);
        self.must(code::SET_VRING_BASE, state(0).as_bytes(), &[]);
        self.must(code::SET_VRING_ADDR, addr.as_bytes(), &[]);
        self.must(code::SET_VRING_ERR, ring.as_bytes(), &[&queue.err]);
        self.must(code::SET_VRING_CALL, ring.as_bytes(), &[&queue.call]);
        self.must(code::SET_VRING_KICK, ring.as_bytes(), &[&queue.kick]);
        self.must(code::SET_VRING_ENABLE, state(1).as_bytes(), &[]);
        self.queues.push(queue);
    }

    /// Writes a sector on the first ring.
    pub fn write(&mut self, sector: u64, byte: u8) {
        assert!(self.try_write(sector, byte), "sector {sector}");
    }

    /// Writes a sector on the first ring; false if that fails.
    pub fn try_write(&mut self, sector: u64, byte: u8) -> bool {
        let from = self.guest.place(&[byte; SECTOR_BYTES]);
        let data = [(from, SECTOR_BYTES as u32, false)];
        self.queues[0].request(VIRTIO_BLK_T_OUT, sector, &data).0 == 0
    }

    /// Submits a write of a sector on the first ring without waiting for the answer. Returns the address of
    /// its status byte.
    pub fn begin_write(&mut self, sector: u64, byte: u8) -> GuestAddr {
        let from = self.guest.place(&[byte; SECTOR_BYTES]);
        let data = (from, SECTOR_BYTES as u32, false);
        let queue = &mut self.queues[0];
        let (chain, status) = queue.blk(VIRTIO_BLK_T_OUT, sector, &[data]);
        queue.add(&chain);
        queue.submit();
        status
    }

    /// Returns whether the device has reported success at this status address.
    pub fn is_acknowledged(&mut self, status: GuestAddr) -> bool {
        self.queues[0].next_used().is_some() && self.guest.read(status, 1) == [0]
    }

    /// Writes a sector on the first ring, and waits for as long as it takes.
    pub fn write_patiently(&mut self, sector: u64, byte: u8) {
        let from = self.guest.place(&[byte; SECTOR_BYTES]);
        self.request_patiently(VIRTIO_BLK_T_OUT, sector, (from, SECTOR_BYTES as u32, false));
    }

    /// Reads a sector on the first ring, and waits for as long as it takes.
    pub fn read_patiently(&mut self, sector: u64) -> Vec<u8> {
        let to = self.guest.alloc(SECTOR_BYTES as u64, SECTOR_BYTES as u64);
        self.request_patiently(VIRTIO_BLK_T_IN, sector, (to, SECTOR_BYTES as u32, true));
        self.guest.read(to, SECTOR_BYTES)
    }

    fn request_patiently(&mut self, kind: u32, sector: u64, data: (GuestAddr, u32, bool)) {
        let queue = &mut self.queues[0];
        let (chain, status) = queue.blk(kind, sector, &[data]);
        queue.add(&chain);
        queue.submit();
        let head = loop {
            match queue.next_used() {
                Some((head, _)) => break head,
                None => std::thread::sleep(std::time::Duration::from_millis(20)),
            }
        };
        queue.recycle(head);
        assert_eq!(self.guest.read(status, 1), [0]);
    }

    /// Reads a sector on ring `index`.
    pub fn read(&mut self, index: usize, sector: u64) -> Vec<u8> {
        let to = self.guest.alloc(SECTOR_BYTES as u64, SECTOR_BYTES as u64);
        let data = [(to, SECTOR_BYTES as u32, true)];
        assert_eq!(
            self.queues[index].request(VIRTIO_BLK_T_IN, sector, &data).0,
            0
        );
        self.guest.read(to, SECTOR_BYTES)
    }

    /// Discards sectors on the first ring.
    pub fn discard(&mut self, sector: u64, sectors: u32) {
        let range = virtio_blk_discard_write_zeroes(sector, sectors);
        let from = self.guest.place(&range);
        let data = [(from, range.len() as u32, false)];
        assert_eq!(self.queues[0].request(VIRTIO_BLK_T_DISCARD, 0, &data).0, 0);
    }

    /// The disk's serial, as a driver asks for it.
    pub fn serial(&mut self) -> String {
        let to = self.guest.alloc(SERIAL_BYTES as u64, 1);
        let data = [(to, SERIAL_BYTES as u32, true)];
        assert_eq!(self.queues[0].request(VIRTIO_BLK_T_GET_ID, 0, &data).0, 0);
        let bytes = self.guest.read(to, SERIAL_BYTES);
        String::from_utf8(bytes)
            .unwrap()
            .trim_end_matches('\0')
            .to_owned()
    }

    /// Blocks the data thread at its next answer on the first ring, until somebody reads the event
    /// descriptor: a queue that does not come to its end. Submits a request for it.
    pub fn wedge(&mut self) {
        let queue = &mut self.queues[0];
        queue.want_interrupt(queue.used_index(), false);
        // An interrupt of an earlier request may come late: the descriptor is filled while that does not
        // block this thread.
        let full = (u64::MAX - 1).to_ne_bytes();
        while rustix::io::write(&queue.call, &full) == Err(rustix::io::Errno::AGAIN) {
            FakeQueue::events(&queue.call);
        }
        let flags = fcntl_getfl(&queue.call).unwrap();
        fcntl_setfl(&queue.call, flags - OFlags::NONBLOCK).unwrap();
        let to = self.guest.alloc(SECTOR_BYTES as u64, SECTOR_BYTES as u64);
        let (chain, _) = queue.blk(VIRTIO_BLK_T_IN, 0, &[(to, SECTOR_BYTES as u32, true)]);
        queue.add(&chain);
        queue.submit();
        // The answer is published before the descriptor is written.
        queue.wait_used();
    }

    /// Lets it go on.
    pub fn unwedge(&mut self) {
        rustix::io::read(&self.queues[0].call, &mut [0; 8]).unwrap();
    }

    /// Whether the disk caches writes until a flush.
    pub fn writeback(&mut self) -> bool {
        let head = config_head();
        let answer = self.ask(code::GET_CONFIG, &[head.as_bytes(), &[0]].concat());
        answer[size_of::<ConfigHead>()] == 1
    }

    /// Switches that, as a driver does when its user wants so.
    pub fn set_writeback(&mut self, on: bool) {
        let head = config_head();
        self.must(
            code::SET_CONFIG,
            &[head.as_bytes(), &[u8::from(on)]].concat(),
            &[],
        );
    }

    /// What a driver does that begins anew.
    pub fn reset_device(&mut self) {
        self.must(code::RESET_DEVICE, &[], &[]);
    }

    /// Sends a message and waits until it has been carried out.
    fn must(&mut self, code: u32, payload: &[u8], fds: &[&OwnedFd]) {
        self.send(code, FLAG_NEED_REPLY, payload, fds);
        let answer = self.receive(code);
        assert_eq!(answer, 0_u64.to_ne_bytes(), "message {code} was refused");
    }

    fn ask(&mut self, code: u32, payload: &[u8]) -> Vec<u8> {
        self.send(code, 0, payload, &[]);
        self.receive(code)
    }

    fn tell(&mut self, code: u32, payload: &[u8]) {
        self.send(code, 0, payload, &[]);
    }

    fn send(&mut self, code: u32, flags: u32, payload: &[u8], fds: &[&OwnedFd]) {
        let header = Header {
            code,
            flags: FLAG_VERSION | flags,
            size: payload.len() as u32,
        };
        let bytes = [header.as_bytes(), payload].concat();
        if fds.is_empty() {
            return self.stream.write_all(&bytes).unwrap();
        }
        let mut space = [MaybeUninit::uninit(); 64];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let rights: Vec<_> = fds.iter().map(|fd| fd.as_fd()).collect();
        assert!(control.push(SendAncillaryMessage::ScmRights(&rights)));
        let slices = [IoSlice::new(&bytes)];
        let sent = sendmsg(&self.stream, &slices, &mut control, SendFlags::NOSIGNAL).unwrap();
        assert_eq!(sent, bytes.len());
    }

    fn receive(&mut self, code: u32) -> Vec<u8> {
        let mut header = [0; size_of::<Header>()];
        self.stream.read_exact(&mut header).unwrap();
        let header = Header::read_from_bytes(&header).unwrap();
        assert_eq!(header.code, code);
        let mut payload = vec![0; header.size as usize];
        self.stream.read_exact(&mut payload).unwrap();
        payload
    }
}

/// The range of a discard, as the driver gives it.
fn virtio_blk_discard_write_zeroes(sector: u64, sectors: u32) -> Vec<u8> {
    let flags = 0_u32;
    [
        &sector.to_le_bytes()[..],
        &sectors.to_le_bytes(),
        &flags.to_le_bytes(),
    ]
    .concat()
}

fn config_head() -> ConfigHead {
    ConfigHead {
        offset: WRITEBACK_OFFSET,
        size: 1,
        flags: 0,
    }
}
