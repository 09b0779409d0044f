//! The split virtqueue (virtio 1.2, section 2.7).
//!
//! Each cache line that guest and device share costs a transfer between cores, so lines are touched as rarely
//! as the protocol allows: the available index when everything seen before is taken, the used index once per
//! batch, the event fields only before an interrupt or a sleep.

use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering, fence};

use vm_memory::bitmap::{ArcSlice, Bitmap};

use super::guest::{prefetch_read, prefetch_write, read_u64};
use super::{Chain, DESC_BYTES, MAX_CHAIN, MAX_QUEUE_SIZE, Ring, RingError, indirect_table};
use crate::dirty::DirtyLog;
use crate::memory::{GuestAddr, MemoryView};

const USED_ELEM_BYTES: u64 = 8;
/// Bytes of `flags` and `idx` before the entries of either ring.
const RING_HEADER_BYTES: u64 = 4;
/// Offset of `idx` in either ring.
const INDEX_OFFSET: usize = 2;
/// Bytes of `used_event` and `avail_event` behind the entries.
const EVENT_BYTES: u64 = 2;

const DESC_F_NEXT: u16 = 1;
const DESC_F_WRITE: u16 = 2;
const DESC_F_INDIRECT: u16 = 4;
/// In `avail.flags`: the guest polls and wants no interrupts.
const AVAIL_F_NO_INTERRUPT: u16 = 1;
/// In `used.flags`: the device polls and wants no kicks.
const USED_F_NO_NOTIFY: u16 = 1;

/// Batches up to this size are worth a guess at what they will need.
const GUESS_REQUESTS: u16 = 2;

/// Where a split ring lies and how it is used.
#[derive(Debug, Clone, Copy)]
pub struct SplitRingConfig {
    /// Entries.
    pub size: u16,
    /// Descriptor table.
    pub desc: GuestAddr,
    /// Available ring.
    pub avail: GuestAddr,
    /// Used ring.
    pub used: GuestAddr,
    /// Whether EVENT_IDX was negotiated.
    pub event_idx: bool,
    /// Whether INDIRECT_DESC was negotiated.
    pub indirect: bool,
}

/// Host addresses of the parts.
#[derive(Debug, Clone, Copy)]
struct Parts {
    desc: *const u8,
    avail: *const u8,
    used: *mut u8,
}

impl Parts {
    fn translate(config: &SplitRingConfig, view: &mut MemoryView) -> Result<Self, RingError> {
        let size = u64::from(config.size);
        let event_bytes = if config.event_idx { EVENT_BYTES } else { 0 };
        let mut part = |part, at: GuestAddr, len, align| {
            let aligned = |host: &*mut u8| *host as usize % align == 0;
            view.translate(at, len)
                .filter(aligned)
                .ok_or(RingError::RingAddress { part, addr: at.0 })
        };
        let desc = part("descriptor table", config.desc, size * DESC_BYTES, 8)?.cast_const();
        let avail = part(
            "available ring",
            config.avail,
            RING_HEADER_BYTES + size * 2 + event_bytes,
            2,
        )?
        .cast_const();
        let used = part(
            "used ring",
            config.used,
            RING_HEADER_BYTES + size * USED_ELEM_BYTES + event_bytes,
            4,
        )?;
        Ok(Self { desc, avail, used })
    }
}

#[derive(Debug, Clone, Copy)]
struct Desc {
    addr: u64,
    len: u32,
    flags: u16,
    next: u16,
}

impl Desc {
    /// Reads the descriptor at `from`, each half once.
    ///
    /// # Safety
    /// Sixteen bytes at `from` are mapped.
    #[inline(always)]
    unsafe fn read(from: *const u8) -> Self {
        // SAFETY: by the caller's promise.
        let (addr, rest) = unsafe { (read_u64(from), read_u64(from.add(8))) };
        Self {
            addr,
            len: rest as u32,
            flags: (rest >> 32) as u16,
            next: (rest >> 48) as u16,
        }
    }
}

/// The device's side of a split virtqueue.
#[derive(Debug)]
pub struct SplitRing {
    parts: Parts,
    mask: u16,
    /// Next entry of the available ring to take.
    next_avail: u16,
    /// The guest's available index as last read.
    seen_avail: u16,
    /// Next entry of the used ring to fill.
    next_used: u16,
    /// Used index that the guest can see.
    published: u16,
    /// Used index at the last decision about an interrupt.
    signalled: u16,
    config: SplitRingConfig,
    /// From where the used ring is logged.
    log: Option<ArcSlice<DirtyLog>>,
    /// Head and header of the request before: a guess at those of the next, only ever used to prefetch.
    guess: (u16, *const u8),
}

// SAFETY: the pointers lead into guest memory, which the owner of the ring keeps mapped; they are used by one
// thread.
unsafe impl Send for SplitRing {}

impl SplitRing {
    /// A ring that goes on at `base` in the available ring, and in the used ring where its index stands.
    pub fn new(
        config: SplitRingConfig,
        base: u16,
        view: &mut MemoryView,
    ) -> Result<Self, RingError> {
        if !config.size.is_power_of_two() || config.size > MAX_QUEUE_SIZE {
            return Err(RingError::QueueSize(config.size));
        }
        let parts = Parts::translate(&config, view)?;
        let mut ring = Self {
            parts,
            mask: config.size - 1,
            next_avail: base,
            seen_avail: base,
            next_used: 0,
            published: 0,
            signalled: 0,
            config,
            log: None,
            guess: (0, std::ptr::null()),
        };
        let used_idx = ring.used_u16(INDEX_OFFSET).load(Ordering::Acquire);
        (ring.next_used, ring.published, ring.signalled) = (used_idx, used_idx, used_idx);
        Ok(ring)
    }

    /// Goes on at another place of the available ring, before the first request is taken.
    pub fn set_next_available(&mut self, next: u16) {
        (self.next_avail, self.seen_avail) = (next, next);
    }

    #[inline(always)]
    fn avail_u16(&self, offset: usize) -> &AtomicU16 {
        // SAFETY: callers pass offsets below the length that was translated; 2-byte alignment was checked.
        unsafe { AtomicU16::from_ptr(self.parts.avail.add(offset).cast_mut().cast()) }
    }

    #[inline(always)]
    fn used_u16(&self, offset: usize) -> &AtomicU16 {
        // SAFETY: callers pass offsets below the length that was translated; 4-byte alignment was checked.
        unsafe { AtomicU16::from_ptr(self.parts.used.add(offset).cast()) }
    }

    #[inline(always)]
    fn avail_entry(&self, index: u16) -> u16 {
        self.avail_u16(RING_HEADER_BYTES as usize + 2 * usize::from(index & self.mask))
            .load(Ordering::Relaxed)
    }

    #[inline(always)]
    fn desc_at(&self, index: u16) -> *const u8 {
        // SAFETY: the table has `size` entries and the mask keeps the index below it.
        unsafe {
            self.parts
                .desc
                .add(DESC_BYTES as usize * usize::from(index & self.mask))
        }
    }

    /// Reads the guest's available index and checks that it moved by no more than the ring holds.
    #[inline(always)]
    fn look(&mut self) -> Result<u16, RingError> {
        let to = self.avail_u16(INDEX_OFFSET).load(Ordering::Acquire);
        let ready = to.wrapping_sub(self.next_avail);
        if ready > self.config.size {
            return Err(RingError::IndexJump {
                from: self.next_avail,
                to,
                size: self.config.size,
            });
        }
        self.seen_avail = to;
        Ok(ready)
    }

    /// Follows an indirect table.
    #[inline]
    fn walk_indirect(
        &self,
        table: Desc,
        view: &mut MemoryView,
        chain: &mut Chain,
    ) -> Result<(), RingError> {
        let (base, entries) = indirect_table(table.addr, table.len, self.config.indirect, view)?;
        if table.flags & DESC_F_NEXT != 0 {
            return Err(RingError::IndirectNested);
        }
        let mut index = 0u16;
        for _ in 0..entries {
            if u32::from(index) >= entries {
                return Err(RingError::DescriptorIndex {
                    index,
                    size: entries,
                });
            }
            // SAFETY: the whole table was translated and the index is inside it.
            let desc = unsafe { Desc::read(base.add(DESC_BYTES as usize * usize::from(index))) };
            if desc.flags & DESC_F_INDIRECT != 0 {
                return Err(RingError::IndirectNested);
            }
            chain.push(view, desc.addr, desc.len, desc.flags & DESC_F_WRITE != 0)?;
            if desc.flags & DESC_F_NEXT == 0 {
                return Ok(());
            }
            index = desc.next;
        }
        Err(RingError::TooLong(entries))
    }

    fn log_used(&self, offset: u64, len: u64) {
        self.log.mark_dirty(offset as usize, len as usize);
    }

    fn used_event(&self) -> u16 {
        self.avail_u16(RING_HEADER_BYTES as usize + 2 * usize::from(self.config.size))
            .load(Ordering::Relaxed)
    }

    fn set_avail_event(&self, index: u16) {
        let offset = RING_HEADER_BYTES + USED_ELEM_BYTES * u64::from(self.config.size);
        self.used_u16(offset as usize)
            .store(index, Ordering::Relaxed);
        self.log_used(offset, EVENT_BYTES);
    }

    fn set_used_flags(&self, flags: u16) {
        self.used_u16(0).store(flags, Ordering::Relaxed);
        self.log_used(0, 2);
    }
}

impl Ring for SplitRing {
    #[inline(always)]
    fn available(&mut self) -> Result<u16, RingError> {
        let ready = self.seen_avail.wrapping_sub(self.next_avail);
        if ready != 0 { Ok(ready) } else { self.look() }
    }

    #[inline(always)]
    fn prefetch(&mut self, count: u16, view: &mut MemoryView) {
        if count <= GUESS_REQUESTS {
            self.prefetch_guess();
        }
        // Three rounds over the batch, so that the transfers of all its requests are under way together.
        for i in 0..count {
            prefetch_read(self.desc_at(self.avail_entry(self.next_avail.wrapping_add(i))));
        }
        let mut indirect = false;
        for i in 0..count {
            // SAFETY: `desc_at` stays inside the table. What is read is only a hint and is read and checked
            // again.
            let desc = unsafe {
                Desc::read(self.desc_at(self.avail_entry(self.next_avail.wrapping_add(i))))
            };
            let is_table = desc.flags & DESC_F_INDIRECT != 0;
            match view.translate_part(GuestAddr(desc.addr), DESC_BYTES) {
                Some((table, _)) if is_table => {
                    indirect = true;
                    prefetch_read(table);
                }
                // A request begins with its header, and most drivers keep the status beside it.
                Some((header, _)) => {
                    prefetch_write(header);
                    self.guess.1 = header;
                }
                None => {}
            }
        }
        if indirect {
            self.prefetch_headers_behind_tables(count, view);
        }
    }

    #[inline(always)]
    fn take(&mut self) -> Result<u16, RingError> {
        let head = self.avail_entry(self.next_avail);
        if head > self.mask {
            return Err(RingError::DescriptorIndex {
                index: head,
                size: u32::from(self.config.size),
            });
        }
        self.next_avail = self.next_avail.wrapping_add(1);
        self.guess.0 = head;
        Ok(head)
    }

    #[inline(always)]
    fn walk(&self, id: u16, view: &mut MemoryView, chain: &mut Chain) -> Result<(), RingError> {
        chain.clear();
        let size = u32::from(self.config.size);
        let mut index = id;
        let most = size.min(u32::from(MAX_CHAIN));
        for _ in 0..most {
            if index > self.mask {
                return Err(RingError::DescriptorIndex { index, size });
            }
            // SAFETY: `desc_at` stays inside the table.
            let desc = unsafe { Desc::read(self.desc_at(index)) };
            if desc.flags & DESC_F_INDIRECT != 0 {
                return self.walk_indirect(desc, view, chain);
            }
            chain.push(view, desc.addr, desc.len, desc.flags & DESC_F_WRITE != 0)?;
            if desc.flags & DESC_F_NEXT == 0 {
                return Ok(());
            }
            index = desc.next;
        }
        Err(RingError::TooLong(most))
    }

    #[inline(always)]
    fn answer(&mut self, id: u16, written_bytes: u32) {
        let offset = RING_HEADER_BYTES + USED_ELEM_BYTES * u64::from(self.next_used & self.mask);
        // SAFETY: the masked index is inside the ring, which was translated as a whole; 4-byte alignment was
        // checked.
        unsafe {
            let elem = self.parts.used.add(offset as usize).cast::<u32>();
            elem.write_volatile(u32::from(id).to_le());
            elem.add(1).write_volatile(written_bytes.to_le());
        }
        self.next_used = self.next_used.wrapping_add(1);
        self.log_used(offset, USED_ELEM_BYTES);
    }

    #[inline(always)]
    fn unpublished(&self) -> u16 {
        self.next_used.wrapping_sub(self.published)
    }

    #[inline(always)]
    fn publish(&mut self) {
        self.used_u16(INDEX_OFFSET)
            .store(self.next_used, Ordering::Release);
        self.published = self.next_used;
        self.log_used(INDEX_OFFSET as u64, 2);
    }

    #[inline(always)]
    fn unsignalled(&self) -> u16 {
        self.published.wrapping_sub(self.signalled)
    }

    #[inline]
    fn interrupt_due(&mut self) -> bool {
        let moved = self.unsignalled();
        self.signalled = self.published;
        // Orders the store of the used index before the load of used_event or the flags. The driver stores
        // used_event first and then loads the used index, so that at least one side sees the other's store.
        fence(Ordering::SeqCst);
        if self.config.event_idx {
            self.published
                .wrapping_sub(self.used_event())
                .wrapping_sub(1)
                < moved
        } else {
            moved != 0 && self.avail_u16(0).load(Ordering::Relaxed) & AVAIL_F_NO_INTERRUPT == 0
        }
    }

    fn arm(&mut self) -> Result<bool, RingError> {
        if self.config.event_idx {
            self.set_avail_event(self.next_avail);
        } else {
            self.set_used_flags(0);
        }
        // Orders the store of avail_event or the flags before the load of the avail index. The driver stores
        // the avail index first and then loads avail_event, so that at least one side sees the other's store.
        fence(Ordering::SeqCst);
        Ok(self.look()? != 0)
    }

    fn disarm(&mut self) {
        if self.config.event_idx {
            // An index that the guest has just passed: it kicks when it passes it again, 65535 requests
            // later. The one it was armed with would be passed by the very next request.
            self.set_avail_event(self.next_avail.wrapping_sub(1));
        } else {
            self.set_used_flags(USED_F_NO_NOTIFY);
        }
    }

    fn untake(&mut self) {
        self.next_avail = self.next_avail.wrapping_sub(1);
    }

    fn close(&mut self) {
        // What the guest did wrong meanwhile, the next one finds.
        let _ = self.arm();
    }

    fn base(&self) -> u32 {
        u32::from(self.next_avail)
    }

    fn next_used(&self) -> u16 {
        self.next_used
    }

    fn set_log(&mut self, log: Option<(Arc<DirtyLog>, GuestAddr)>) {
        self.log = log.map(|(log, used)| ArcSlice::new(log, used.0 as usize));
        // A daemon before this one may have died between a change of the ring and its mark.
        self.log_used(
            0,
            RING_HEADER_BYTES + USED_ELEM_BYTES * u64::from(self.config.size) + 2,
        );
    }
}

impl SplitRing {
    /// A guest with little to do uses the same descriptors and the same header over and over. Then entry,
    /// descriptor and header come from its cache at the same time, and not one after the other as each tells
    /// where the next lies.
    #[inline(always)]
    fn prefetch_guess(&self) {
        let used = RING_HEADER_BYTES + USED_ELEM_BYTES * u64::from(self.next_used & self.mask);
        prefetch_read(self.desc_at(self.guess.0));
        prefetch_write(self.guess.1);
        prefetch_write(self.parts.used.wrapping_add(used as usize));
    }

    #[inline]
    fn prefetch_headers_behind_tables(&mut self, count: u16, view: &mut MemoryView) {
        for i in 0..count {
            // SAFETY: as in `prefetch`.
            let desc = unsafe {
                Desc::read(self.desc_at(self.avail_entry(self.next_avail.wrapping_add(i))))
            };
            if desc.flags & DESC_F_INDIRECT == 0 {
                continue;
            }
            let Some(table) = view.translate(GuestAddr(desc.addr), DESC_BYTES) else {
                continue;
            };
            // SAFETY: sixteen bytes at `table` were just translated.
            let first = unsafe { Desc::read(table) };
            if let Some((header, _)) = view.translate_part(GuestAddr(first.addr), DESC_BYTES) {
                prefetch_write(header);
                self.guess.1 = header;
            }
        }
    }
}

#[cfg(test)]
mod tests;
