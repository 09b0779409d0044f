//! Device requests: what each is for, and those that are to be handed out.

use std::collections::VecDeque;

use fabric_types::slab::Slab;

use super::super::device::{DeviceAction, IoId, IoVecs};
use super::super::format::{Geometry, Ptr};
use super::super::metrics::StoreMetrics;
use super::enospc::EnospcQueue;
use super::verify::VerifiedPage;

/// Device requests in flight; reads leave [`LOG_IOS_RESERVED`] of them to the log and checkpoints.
const IOS_MAX: usize = 1536;
/// See [`IOS_MAX`].
pub(super) const LOG_IOS_RESERVED: usize = 512;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum IoKind {
    #[default]
    Free,
    /// Blocks `first..first + count` of a part, into its memory or into buffer blocks.
    Read {
        part: u32,
        first: u16,
        count: u16,
        buffer: Option<u32>,
        second: bool,
    },
    /// Old content of a partly covered block.
    Fetch {
        part: u32,
        which: u8,
        second: bool,
    },
    Leaf {
        slot: u32,
    },
    /// Blocks of a leaf into the cleaner's buffer.
    Relocate {
        part: u32,
        first: u16,
        count: u16,
        second: bool,
    },
    /// A page of the map, to be compared with what it was written as.
    Verify {
        page: VerifiedPage,
        ptr: Ptr,
        buffer: u32,
        second: bool,
    },
    /// A map page that could not be read, once more before a checkpoint replaces it.
    Reread {
        slot: u32,
        buffer: u32,
    },
    Log {
        batch: u32,
    },
    /// Checkpoint pages; the pinned leaves are in the request's list.
    Pages {
        buffer: u32,
    },
    Superblock {
        buffer: u32,
    },
    Flush,
    CheckpointFlush,
}

/// How a device request ended.
#[derive(Debug, Clone, Copy)]
pub(super) struct IoOutcome<'a> {
    pub(super) result: Result<(), i32>,
    /// Sums of the blocks of a read, if somebody took them already.
    pub(super) crcs: Option<&'a [u32]>,
}

impl IoOutcome<'_> {
    /// Whether block `i` arrived with this sum. `compute` takes it if nobody has.
    ///
    /// Invariant *Verified*: what this denies is never answered as good, be it data or a page that says where
    /// they are.
    pub(super) fn proves(&self, i: u16, crc: u32, compute: impl FnOnce() -> u32) -> bool {
        let found = match self.crcs {
            Some(crcs) => crcs[usize::from(i)],
            None => compute(),
        };
        self.result.is_ok() && found == crc
    }
}

/// A device request in flight.
#[derive(Debug, Default)]
pub(super) struct Io {
    kind: IoKind,
    /// Where it goes, if it is a write.
    unit: u32,
    /// Made again after it was put off.
    retried: bool,
    iovs: Vec<libc::iovec>,
    leaves: Vec<u32>,
}

// SAFETY: the iovecs are descriptions of memory that the submitter of an operation keeps valid, see
// `StoreCore::submit`, or that the shard owns.
unsafe impl Send for Io {}

impl Io {
    fn iovecs(&self) -> IoVecs {
        IoVecs {
            ptr: self.iovs.as_ptr(),
            len: self.iovs.len() as u32,
        }
    }
}

/// The requests of one shard. A request is taken, aimed at memory, queued as a read, write or flush, and
/// given back when its outcome has been dealt with.
#[derive(Debug)]
pub(super) struct DeviceRequests {
    geo: Geometry,
    slots: Slab<Io>,
    /// Queued, and not yet handed out.
    actions: VecDeque<DeviceAction>,
    pub(super) put_off: EnospcQueue,
}

impl DeviceRequests {
    pub(super) fn new(geo: Geometry) -> Self {
        Self {
            geo,
            slots: Slab::new(IOS_MAX as u32, Io::default),
            actions: VecDeque::with_capacity(IOS_MAX),
            put_off: EnospcQueue::default(),
        }
    }

    /// A free request, for whatever is no read.
    pub(super) fn take(&mut self) -> Option<u32> {
        self.slots.take()
    }

    /// A free request for a read; some are left to the log.
    pub(super) fn take_for_read(&mut self) -> Option<u32> {
        if self.slots.free() <= LOG_IOS_RESERVED {
            return None;
        }
        self.slots.take()
    }

    pub(super) fn give_back(&mut self, io: u32) {
        self.slots.give_back(io);
    }

    pub(super) fn free(&self) -> usize {
        self.slots.free()
    }

    /// The memory that the request reads or writes.
    pub(super) fn iovs(&self, io: u32) -> &[libc::iovec] {
        &self.slots[io].iovs
    }

    /// The request's scatter list, empty, to be filled.
    pub(super) fn new_iovs(&mut self, io: u32) -> &mut Vec<libc::iovec> {
        let iovs = &mut self.slots[io].iovs;
        iovs.clear();
        iovs
    }

    /// Makes the request read or write one range of memory.
    pub(super) fn aim(&mut self, io: u32, memory: libc::iovec) {
        self.new_iovs(io).push(memory);
    }

    /// The map pages that the request writes.
    pub(super) fn leaves_mut(&mut self, io: u32) -> &mut Vec<u32> {
        &mut self.slots[io].leaves
    }

    /// Queues the read of `unit`.. into the memory that the request aims at.
    pub(super) fn read(&mut self, io: u32, unit: u32, kind: IoKind, counters: &mut StoreMetrics) {
        let slot = &mut self.slots[io];
        slot.kind = kind;
        let bytes: u64 = slot.iovs.iter().map(|v| v.iov_len as u64).sum();
        counters.device_reads += 1;
        counters.device_read_bytes += bytes;
        self.actions.push_back(DeviceAction::Read {
            id: IoId(u64::from(io)),
            offset: self.geo.offset(unit),
            iovecs: slot.iovecs(),
        });
    }

    /// Queues the write of the memory that the request aims at to `unit`...
    pub(super) fn write(&mut self, io: u32, unit: u32, kind: IoKind, counters: &mut StoreMetrics) {
        let slot = &mut self.slots[io];
        (slot.kind, slot.unit) = (kind, unit);
        let bytes: u64 = slot.iovs.iter().map(|v| v.iov_len as u64).sum();
        counters.device_write_bytes += bytes;
        self.queue_write(io, counters);
    }

    fn queue_write(&mut self, io: u32, counters: &mut StoreMetrics) {
        let slot = &self.slots[io];
        counters.device_writes += 1;
        self.actions.push_back(DeviceAction::Write {
            id: IoId(u64::from(io)),
            offset: self.geo.offset(slot.unit),
            iovecs: slot.iovecs(),
        });
    }

    pub(super) fn flush(&mut self, io: u32, kind: IoKind, counters: &mut StoreMetrics) {
        self.slots[io].kind = kind;
        counters.device_flushes += 1;
        self.actions.push_back(DeviceAction::Flush {
            id: IoId(u64::from(io)),
        });
    }

    pub(super) fn has_action(&self) -> bool {
        !self.actions.is_empty()
    }

    pub(super) fn next_action(&mut self) -> Option<DeviceAction> {
        self.actions.pop_front()
    }

    /// Requests that were handed out and have not come back.
    pub(super) fn executing(&self) -> usize {
        self.slots.taken() - self.actions.len() - self.put_off.len()
    }

    /// The device has dealt with the request; returns what it was for.
    pub(super) fn end(&mut self, id: IoId) -> (u32, IoKind) {
        let io = id.0 as u32;
        let kind = std::mem::take(&mut self.slots[io].kind);
        assert!(
            kind != IoKind::Free,
            "completion of a device request that is not in flight: {id:?}"
        );
        (io, kind)
    }

    /// Invariant *Bounded*: whether what is queued is within the table.
    pub(super) fn is_bounded(&self) -> bool {
        self.actions.len() <= self.slots.taken()
    }

    /// RAM of the table.
    pub(super) fn ram_bytes(&self) -> usize {
        self.slots.capacity() as usize * (size_of::<Io>() + 64)
    }

    /// Whether the device file's file system is full: writes wait for room there.
    pub(super) fn is_under_space_pressure(&self) -> bool {
        self.put_off.is_waiting()
    }

    /// The request has come back. If it was one that had been put off, that ends; returns whether it was.
    pub(super) fn end_retry(&mut self, io: u32) -> bool {
        let retried = std::mem::take(&mut self.slots[io].retried);
        if retried {
            self.put_off.end_retry();
        }
        retried
    }

    /// Keeps a request, which came back for want of room, to be made again.
    pub(super) fn put_off(&mut self, io: u32, kind: IoKind, retried: bool) {
        self.slots[io].kind = kind;
        self.put_off.push(io, retried);
    }

    /// Makes the requests again that were put off, unless some are under way already.
    pub(super) fn retry_put_off(&mut self, counters: &mut StoreMetrics) {
        for io in self.put_off.take_all() {
            self.slots[io].retried = true;
            self.queue_write(io, counters);
        }
    }
}
