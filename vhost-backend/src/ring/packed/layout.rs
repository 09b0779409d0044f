//! What lies where in a packed virtqueue, and how places in it are told.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use crate::memory::{GuestAddr, MemoryView};
use crate::ring::guest::read_u64;
use crate::ring::{DESC_BYTES, RingError};

use super::PackedRingConfig;

/// Bytes of either event suppression structure.
pub(crate) const EVENT_BYTES: u64 = 4;

pub(crate) const DESC_F_NEXT: u16 = 1;
pub(crate) const DESC_F_WRITE: u16 = 2;
pub(crate) const DESC_F_INDIRECT: u16 = 4;
/// Equal to the driver's wrap counter, and [`DESC_F_USED`] unlike it, in a descriptor that is available.
pub(crate) const DESC_F_AVAIL: u16 = 1 << 7;
/// Both equal to the device's wrap counter in a descriptor that is used.
pub(crate) const DESC_F_USED: u16 = 1 << 15;

/// Events are wanted.
pub(crate) const EVENT_ENABLE: u16 = 0;
/// They are not.
pub(crate) const EVENT_DISABLE: u16 = 1;
/// One is wanted when the place beside the flags is reached. Only with EVENT_IDX.
pub(crate) const EVENT_DESC: u16 = 2;
const EVENT_FLAGS: u16 = 3;

/// A place in the ring: a descriptor, and the wrap counter of the lap.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Position {
    pub(crate) index: u16,
    pub(crate) wrap: bool,
}

impl Position {
    /// Where both sides begin.
    pub(crate) const START: Self = Self {
        index: 0,
        wrap: true,
    };

    pub(crate) const fn encode(self) -> u16 {
        self.index | (self.wrap as u16) << 15
    }

    pub(crate) fn decode(bits: u16) -> Self {
        Self {
            index: bits & 0x7fff,
            wrap: bits >> 15 != 0,
        }
    }

    /// The place `count` descriptors further, in a ring of `size`, of which `count` is at most one lap.
    #[inline(always)]
    pub(crate) fn plus(self, count: u16, size: u16) -> Self {
        let index = self.index + count;
        if index >= size {
            Self {
                index: index - size,
                wrap: !self.wrap,
            }
        } else {
            Self { index, ..self }
        }
    }

    /// The place `count` descriptors before.
    pub(crate) fn minus(self, count: u16, size: u16) -> Self {
        self.plus(size - count, size).other_lap()
    }

    fn other_lap(self) -> Self {
        Self {
            wrap: !self.wrap,
            ..self
        }
    }

    /// Descriptors from here to `other`, which is ahead by less than two laps.
    pub(crate) fn distance_to(self, other: Self, size: u16) -> u32 {
        let size = u32::from(size);
        let place = |at: Self| u32::from(at.index) + if at.wrap { 0 } else { size };
        (place(other) + 2 * size - place(self)) % (2 * size)
    }

    /// The availability bits of a descriptor that the driver made available here.
    #[inline(always)]
    pub(crate) fn available_flags(self) -> u16 {
        if self.wrap { DESC_F_AVAIL } else { DESC_F_USED }
    }

    /// The same of a descriptor that the device wrote here.
    #[inline(always)]
    pub(crate) fn used_flags(self) -> u16 {
        if self.wrap {
            DESC_F_AVAIL | DESC_F_USED
        } else {
            0
        }
    }

    /// Whether flags say that the driver made a descriptor available here.
    #[inline(always)]
    pub(crate) fn is_available(self, flags: u16) -> bool {
        flags & (DESC_F_AVAIL | DESC_F_USED) == self.available_flags()
    }
}

/// One descriptor of the ring, or of an indirect table, where only `addr`, `len` and [`DESC_F_WRITE`] count.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Desc {
    pub(crate) addr: u64,
    pub(crate) len: u32,
    pub(crate) id: u16,
    pub(crate) flags: u16,
}

impl Desc {
    #[inline(always)]
    pub(crate) fn of(addr: u64, rest: u64) -> Self {
        Self {
            addr,
            len: rest as u32,
            id: (rest >> 32) as u16,
            flags: flags_of(rest),
        }
    }

    /// Reads the descriptor at `from`, each half once.
    ///
    /// # Safety
    /// Sixteen bytes at `from` are mapped.
    #[inline(always)]
    pub(crate) unsafe fn read(from: *const u8) -> Self {
        // SAFETY: by the caller's promise.
        unsafe { Self::of(read_u64(from), read_u64(from.add(8))) }
    }
}

/// Flags in the second half of a descriptor.
#[inline(always)]
pub(crate) fn flags_of(rest: u64) -> u16 {
    (rest >> 48) as u16
}

/// An event suppression structure as one word.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Event(pub(crate) u32);

impl Event {
    pub(crate) fn new(place: u16, flags: u16) -> Self {
        Self(u32::from(place) | u32::from(flags) << 16)
    }

    pub(crate) fn place(self) -> u16 {
        self.0 as u16
    }

    pub(crate) fn flags(self) -> u16 {
        (self.0 >> 16) as u16 & EVENT_FLAGS
    }
}

/// Host addresses of the parts.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Parts {
    ring: *mut u8,
    driver: *mut u8,
    device: *mut u8,
    size: u16,
}

impl Parts {
    pub(crate) fn translate(
        config: &PackedRingConfig,
        view: &mut MemoryView,
    ) -> Result<Self, RingError> {
        let mut part = |part, at: GuestAddr, len, align| {
            let aligned = |host: &*mut u8| *host as usize % align == 0;
            view.translate(at, len)
                .filter(aligned)
                .ok_or(RingError::RingAddress { part, addr: at.0 })
        };
        let ring_bytes = u64::from(config.size) * DESC_BYTES;
        Ok(Self {
            ring: part("descriptor ring", config.desc, ring_bytes, 8)?,
            driver: part("driver event suppression", config.driver, EVENT_BYTES, 4)?,
            device: part("device event suppression", config.device, EVENT_BYTES, 4)?,
            size: config.size,
        })
    }

    #[inline(always)]
    pub(crate) fn desc_at(&self, index: u16) -> *mut u8 {
        assert!(index < self.size, "a place outside the ring");
        // SAFETY: the index was checked just above; the whole ring was translated.
        unsafe { self.ring.add(DESC_BYTES as usize * usize::from(index)) }
    }

    /// The half of a descriptor that tells whose it is.
    #[inline(always)]
    pub(crate) fn rest(&self, index: u16) -> &AtomicU64 {
        // SAFETY: inside the descriptor at `index`; 8-byte alignment was checked.
        unsafe { AtomicU64::from_ptr(self.desc_at(index).add(8).cast()) }
    }

    /// The other half.
    #[inline(always)]
    pub(crate) fn addr(&self, index: u16) -> u64 {
        // SAFETY: eight bytes of the descriptor at `index`.
        unsafe { read_u64(self.desc_at(index)) }
    }

    #[inline(always)]
    pub(crate) fn flags(&self, index: u16, order: Ordering) -> u16 {
        flags_of(u64::from_le(self.rest(index).load(order)))
    }

    pub(crate) fn driver_event(&self) -> Event {
        // SAFETY: the structure was translated; 4-byte alignment was checked.
        let word = unsafe { AtomicU32::from_ptr(self.driver.cast()) };
        Event(u32::from_le(word.load(Ordering::Relaxed)))
    }

    fn device_word(&self) -> &AtomicU32 {
        // SAFETY: as for the driver's.
        unsafe { AtomicU32::from_ptr(self.device.cast()) }
    }

    pub(crate) fn device_event(&self) -> Event {
        Event(u32::from_le(self.device_word().load(Ordering::Relaxed)))
    }

    pub(crate) fn set_device_event(&self, event: Event) {
        self.device_word().store(event.0.to_le(), Ordering::Relaxed);
    }
}
