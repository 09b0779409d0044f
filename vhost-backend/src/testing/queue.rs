//! The driver's side of a virtqueue, with a virtio-blk request on top.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering, fence};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, eventfd};
use virtio_bindings::virtio_config::VIRTIO_F_RING_PACKED;
use virtio_bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};

use super::FakeGuest;
use super::packed::PackedDriver;
use crate::data_thread::QueueConfig;
use crate::memory::GuestAddr;
use crate::ring::packed::BASE_AT_START;

/// How long a test waits for an answer before it fails.
const ANSWER_WAIT_MAX: Duration = Duration::from_secs(20);
/// Status byte before the device has written it.
pub const STATUS_UNSET: u8 = 0xee;

/// One descriptor: address, length, device-writable.
pub type Buffer = (GuestAddr, u32, bool);

/// What was negotiated for a queue.
#[derive(Debug, Clone, Copy)]
pub struct QueueOptions {
    /// Entries.
    pub size: u16,
    /// Feature bits, ring features among them.
    pub features: u64,
}

impl Default for QueueOptions {
    fn default() -> Self {
        Self {
            size: 64,
            features: 1 << VIRTIO_RING_F_EVENT_IDX | 1 << VIRTIO_RING_F_INDIRECT_DESC,
        }
    }
}

impl QueueOptions {
    /// The same with a packed ring.
    pub fn packed(self) -> Self {
        Self {
            features: self.features | 1 << VIRTIO_F_RING_PACKED,
            ..self
        }
    }
}

/// The driver of one queue, with a split ring unless the features say otherwise.
#[derive(Debug)]
pub struct FakeQueue {
    guest: Arc<FakeGuest>,
    options: QueueOptions,
    /// Descriptor table, or the packed ring.
    pub desc: GuestAddr,
    /// Available ring, or the driver's event suppression structure.
    pub avail: GuestAddr,
    /// Used ring, or the device's event suppression structure.
    pub used: GuestAddr,
    packed: Option<PackedDriver>,
    desc_host: *mut u8,
    avail_host: *mut u8,
    used_host: *mut u8,
    next_avail: u16,
    published: u16,
    last_used: u16,
    free: Vec<u16>,
    owned: Vec<Vec<u16>>,
    /// Written by the driver.
    pub kick: OwnedFd,
    /// Written by the device.
    pub call: OwnedFd,
    /// Written by the device when the queue broke.
    pub err: OwnedFd,
}

// SAFETY: the pointers lead into the memory that `guest` keeps; all access is volatile or atomic.
unsafe impl Send for FakeQueue {}

impl FakeQueue {
    /// A fresh eventfd.
    pub fn event() -> OwnedFd {
        eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).expect("eventfd works")
    }

    /// Lays out a queue in guest memory.
    pub fn new(guest: &Arc<FakeGuest>, options: QueueOptions) -> Self {
        let size = u64::from(options.size);
        let desc = guest.alloc(16 * size, 4096);
        let avail = guest.alloc(6 + 2 * size, 4096);
        let used = guest.alloc(6 + 8 * size, 4096);
        let parts = [(desc, 16 * size), (avail, 4), (used, 4)];
        let parts = parts.map(|(at, len)| guest.host(at, len));
        let is_packed = options.features & 1 << VIRTIO_F_RING_PACKED != 0;
        Self {
            packed: is_packed.then(|| PackedDriver::new(parts, options.size)),
            guest: Arc::clone(guest),
            options,
            desc,
            avail,
            used,
            desc_host: guest.host(desc, 16 * size),
            avail_host: guest.host(avail, 6 + 2 * size),
            used_host: guest.host(used, 6 + 8 * size),
            next_avail: 0,
            published: 0,
            last_used: 0,
            free: (0..options.size).rev().collect(),
            owned: vec![Vec::new(); usize::from(options.size)],
            kick: Self::event(),
            call: Self::event(),
            err: Self::event(),
        }
    }

    /// The guest of this queue.
    pub fn guest(&self) -> &Arc<FakeGuest> {
        &self.guest
    }

    /// What a session would start the queue with.
    pub fn config(&self, index: u16) -> QueueConfig {
        let copy = |fd: &OwnedFd| Some(fd.try_clone().expect("descriptors can be copied"));
        QueueConfig {
            index,
            size: self.options.size,
            desc: self.desc,
            avail: self.avail,
            used: self.used,
            base: if self.packed.is_some() {
                BASE_AT_START
            } else {
                0
            },
            features: self.options.features,
            kick: copy(&self.kick),
            call: copy(&self.call),
            err: copy(&self.err),
            inflight: None,
            log: None,
            used_log: None,
            memory: Arc::clone(self.guest.memory()),
        }
    }

    /// Writes one descriptor.
    #[inline]
    pub fn write_desc(&mut self, index: u16, addr: GuestAddr, len: u32, flags: u16, next: u16) {
        assert!(index < self.options.size);
        let rest = u64::from(len) | u64::from(flags) << 32 | u64::from(next) << 48;
        // SAFETY: the index was checked and the table is 16-byte aligned.
        unsafe {
            let at = self.desc_host.cast::<u64>().add(2 * usize::from(index));
            at.write_volatile(addr.0.to_le());
            at.add(1).write_volatile(rest.to_le());
        }
    }

    fn avail_u16(&self, offset: usize) -> &AtomicU16 {
        // SAFETY: offsets come from the size of the queue.
        unsafe { AtomicU16::from_ptr(self.avail_host.add(offset).cast()) }
    }

    fn used_u16(&self, offset: usize) -> &AtomicU16 {
        // SAFETY: offsets come from the size of the queue.
        unsafe { AtomicU16::from_ptr(self.used_host.add(offset).cast()) }
    }

    /// Puts a head into the available ring, not yet visible.
    #[inline]
    pub fn offer(&mut self, head: u16) {
        let at = 4 + 2 * usize::from(self.next_avail & (self.options.size - 1));
        self.avail_u16(at).store(head, Ordering::Relaxed);
        self.next_avail = self.next_avail.wrapping_add(1);
    }

    /// Makes the offered heads visible.
    #[inline]
    pub fn publish(&mut self) {
        if let Some(packed) = &mut self.packed {
            return packed.publish();
        }
        self.avail_u16(2).store(self.next_avail, Ordering::Release);
    }

    /// Sets the available index to anything.
    pub fn force_avail_index(&mut self, index: u16) {
        self.avail_u16(2).store(index, Ordering::Release);
    }

    /// Whether the device wants a kick for what was published since the last call.
    pub fn kick_wanted(&mut self) -> bool {
        fence(Ordering::SeqCst);
        if let Some(packed) = &mut self.packed {
            return packed.kick_wanted();
        }
        let moved = self.next_avail.wrapping_sub(self.published);
        self.published = self.next_avail;
        if self.event_idx() {
            let event = self
                .used_u16(4 + 8 * usize::from(self.options.size))
                .load(Ordering::Relaxed);
            self.next_avail.wrapping_sub(event).wrapping_sub(1) < moved
        } else {
            moved > 0 && self.used_u16(0).load(Ordering::Relaxed) & 1 == 0
        }
    }

    fn event_idx(&self) -> bool {
        self.options.features & 1 << VIRTIO_RING_F_EVENT_IDX != 0
    }

    /// Publishes, and kicks if the device wants it; returns whether it did.
    pub fn submit(&mut self) -> bool {
        self.publish();
        let wanted = self.kick_wanted();
        if wanted {
            rustix::io::write(&self.kick, &1u64.to_ne_bytes()).expect("an eventfd can be written");
        }
        wanted
    }

    /// Asks for an interrupt once answer number `index` is there (with EVENT_IDX), or for all or none
    /// (without). For a packed ring the requests until then have one descriptor each.
    pub fn want_interrupt(&mut self, index: u16, without_event_idx: bool) {
        let event_idx = self.event_idx();
        if let Some(packed) = &mut self.packed {
            let ahead = event_idx.then(|| index.wrapping_sub(self.last_used));
            packed.want_interrupt(ahead.map(|n| n % self.options.size), without_event_idx);
        } else if self.event_idx() {
            self.avail_u16(4 + 2 * usize::from(self.options.size))
                .store(index, Ordering::Relaxed);
        } else {
            self.avail_u16(0)
                .store(u16::from(!without_event_idx), Ordering::Relaxed);
        }
        fence(Ordering::SeqCst);
    }

    /// Whether so many descriptors are the driver's.
    pub fn has_room(&self, descs: usize) -> bool {
        match &self.packed {
            Some(packed) => packed.has_room(descs),
            None => self.free.len() >= descs,
        }
    }

    /// Adds a chain of descriptors and offers it; returns its head.
    pub fn add(&mut self, buffers: &[Buffer]) -> u16 {
        if let Some(packed) = &mut self.packed {
            return packed.add(buffers);
        }
        let at = self.free.len() - buffers.len();
        let chain = self.free.split_off(at);
        for (i, (addr, len, writable)) in buffers.iter().enumerate() {
            let next = chain.get(i + 1).copied();
            let flags = u16::from(*writable) << 1 | u16::from(next.is_some());
            self.write_desc(chain[i], *addr, *len, flags, next.unwrap_or(0));
        }
        let head = chain[0];
        self.owned[usize::from(head)] = chain;
        self.offer(head);
        head
    }

    /// Adds a chain in an indirect table; returns its head.
    pub fn add_indirect(&mut self, buffers: &[Buffer]) -> u16 {
        if let Some(packed) = &mut self.packed {
            let table = PackedDriver::table(buffers);
            let at = self.guest.place(&table);
            return packed.add_table(at, table.len() as u32);
        }
        let mut table = Vec::with_capacity(16 * buffers.len());
        for (i, (addr, len, writable)) in buffers.iter().enumerate() {
            let more = i + 1 < buffers.len();
            table.extend(addr.0.to_le_bytes());
            table.extend(len.to_le_bytes());
            table.extend((u16::from(*writable) << 1 | u16::from(more)).to_le_bytes());
            table.extend((if more { i as u16 + 1 } else { 0 }).to_le_bytes());
        }
        let at = self.guest.place(&table);
        let head = self.free.pop().expect("a free descriptor");
        self.write_desc(head, at, table.len() as u32, 4, 0);
        self.owned[usize::from(head)] = vec![head];
        self.offer(head);
        head
    }

    /// Index of the used ring, or answers that are in the packed one.
    #[inline]
    pub fn used_index(&self) -> u16 {
        if let Some(packed) = &self.packed {
            return packed.answers();
        }
        self.used_u16(2).load(Ordering::Acquire)
    }

    /// The next answer, if there is one: head and bytes written.
    #[inline]
    pub fn next_used(&mut self) -> Option<(u16, u32)> {
        if let Some(packed) = &mut self.packed {
            let answer = packed.next_used()?;
            self.last_used = self.last_used.wrapping_add(1);
            return Some(answer);
        }
        if self.used_index() == self.last_used {
            return None;
        }
        let at = 4 + 8 * usize::from(self.last_used & (self.options.size - 1));
        // SAFETY: the masked index is inside the ring, which is 4-byte aligned.
        let (id, len) = unsafe {
            let at = self.used_host.add(at).cast::<u32>();
            (
                u32::from_le(at.read_volatile()),
                u32::from_le(at.add(1).read_volatile()),
            )
        };
        self.last_used = self.last_used.wrapping_add(1);
        Some((id as u16, len))
    }

    /// Waits for the next answer and frees its descriptors.
    pub fn wait_used(&mut self) -> (u16, u32) {
        let until = Instant::now() + ANSWER_WAIT_MAX;
        loop {
            if let Some((head, len)) = self.next_used() {
                self.recycle(head);
                return (head, len);
            }
            assert!(Instant::now() < until, "no answer from the device");
            std::thread::yield_now();
        }
    }

    /// Takes back the descriptors of a request that was answered.
    pub fn recycle(&mut self, head: u16) {
        if let Some(packed) = &mut self.packed {
            return packed.recycle(head);
        }
        let chain = std::mem::take(&mut self.owned[usize::from(head)]);
        self.free.extend(chain);
    }

    /// Number of events written to an eventfd since the last call.
    pub fn events(fd: &OwnedFd) -> u64 {
        let mut count = [0; 8];
        match rustix::io::read(fd, &mut count) {
            Ok(_) => u64::from_ne_bytes(count),
            Err(_) => 0,
        }
    }

    /// Waits until an eventfd was written.
    pub fn wait_event(fd: &OwnedFd) -> u64 {
        let until = Instant::now() + ANSWER_WAIT_MAX;
        loop {
            match Self::events(fd) {
                0 => assert!(Instant::now() < until, "no event from the device"),
                count => return count,
            }
            std::thread::yield_now();
        }
    }

    /// Header, data and a fresh status byte as the usual three (or more) descriptors.
    pub fn blk(&self, kind: u32, sector: u64, data: &[Buffer]) -> (Vec<Buffer>, GuestAddr) {
        let mut header = Vec::from(kind.to_le_bytes());
        header.extend([0; 4]);
        header.extend(sector.to_le_bytes());
        let status = self.guest.place(&[STATUS_UNSET]);
        let mut chain = vec![(self.guest.place(&header), 16, false)];
        chain.extend(data);
        chain.push((status, 1, true));
        (chain, status)
    }

    /// Does one request and waits for it: its status byte and the bytes said to be written.
    pub fn request(&mut self, kind: u32, sector: u64, data: &[Buffer]) -> (u8, u32) {
        let (chain, status) = self.blk(kind, sector, data);
        let head = if !self.has_room(chain.len()) {
            self.add_indirect(&chain)
        } else {
            self.add(&chain)
        };
        self.submit();
        let (used, len) = self.wait_used();
        assert_eq!(used, head, "answer to another request");
        (self.guest.read(status, 1)[0], len)
    }
}
