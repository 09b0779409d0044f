//! A disk that does what disks may do: requests finish in any order, and after a crash each unflushed write
//! is there, or not, or in some of its 512-byte sectors.

use std::collections::BTreeSet;
use std::io;
use std::sync::Arc;

use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::device::{DeviceAction, IoId, SyncDevice};
use fabric_types::block::BLOCK_BYTES;
use fabric_types::iov::IoVecs;
use image::Image;
use luck::apply_with_luck;
use memory::{gather, iovec_slice, scatter};

pub mod image;
mod luck;
mod memory;
mod rot;

/// The random source of one purpose under one seed.
fn seeded(seed: u64, purpose: u64) -> ChaCha8Rng {
    ChaCha8Rng::seed_from_u64(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ purpose)
}

/// What ends the life of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CrashKind {
    /// The process dies: finished writes stay (in the disk's cache), those under way may be there, or not, or
    /// torn.
    Process,
    /// The machine dies too: no unflushed write is safe.
    Power,
}

/// Who waits for a request, and its name there.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct IoKey {
    /// Which shard of the device.
    pub shard: usize,
    /// The shard's name for it.
    pub id: IoId,
}

/// What kind of request is under way, for tests that choose which finishes first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum IoKind {
    /// A read.
    Read,
    /// A write.
    Write,
    /// A flush.
    Flush,
    /// A discard.
    Discard,
}

/// Number of [`IoKind`]s.
const KINDS: usize = 4;

/// Bytes and where they go.
#[derive(Clone)]
struct WriteRecord {
    offset: u64,
    bytes: Arc<[u8]>,
}

#[derive(Clone)]
enum Request {
    Read {
        offset: u64,
        iovecs: IoVecs,
    },
    Write {
        record: WriteRecord,
        iovecs: Option<IoVecs>,
    },
    /// Covers the unflushed writes numbered below this.
    Flush {
        upto: u64,
    },
    Discard {
        offset: u64,
        len: u64,
    },
}

impl Request {
    fn kind(&self) -> IoKind {
        match self {
            Self::Read { .. } => IoKind::Read,
            Self::Write { .. } => IoKind::Write,
            Self::Flush { .. } => IoKind::Flush,
            Self::Discard { .. } => IoKind::Discard,
        }
    }

    fn write_range(&self) -> Option<(u64, u64)> {
        match self {
            Self::Write { record, .. } => Some((record.offset, record.bytes.len() as u64)),
            Self::Discard { offset, len } => Some((*offset, *len)),
            Self::Read { .. } | Self::Flush { .. } => None,
        }
    }
}

/// Requests seen, by kind.
#[derive(Debug, Clone, Default)]
pub struct Counts([u64; KINDS]);

impl Counts {
    /// Of one kind.
    pub fn of(&self, kind: IoKind) -> u64 {
        self.0[kind as usize]
    }

    fn add(&mut self, kind: IoKind) {
        self.0[kind as usize] += 1;
    }
}

/// See the module. A clone is another disk with the same content and requests under way; it can only be
/// crashed.
#[derive(Clone)]
pub struct SimDisk {
    capacity: u64,
    durable: Image,
    current: Image,
    /// Finished writes since the last flush, in the order of their finish; the first has number
    /// `unflushed_first`.
    unflushed: Vec<WriteRecord>,
    unflushed_first: u64,
    in_flight: Vec<(IoKey, Request)>,
    /// (kind, requests until the one that fails, errno)
    faults: Vec<(IoKind, u64, i32)>,
    /// Blocks that cannot be read until they are written again, by number.
    unreadable: BTreeSet<u64>,
    /// The next read of data delivers one wrong bit.
    garble: bool,
    /// The disk is a sparse file on a host that has room for so many blocks never written before.
    host_room: Option<u64>,
    /// What the read that finished last has filled.
    filled: Option<IoVecs>,
    /// Synchronous writes until the power goes.
    fuse: Option<u64>,
    /// Flushes are answered, and nothing is durable for them.
    ignores_flushes: bool,
    counts: Counts,
    rng: ChaCha8Rng,
}

fn errno_error(errno: i32) -> io::Error {
    io::Error::from_raw_os_error(errno)
}

impl SimDisk {
    /// A blank disk.
    pub fn new(capacity: u64, seed: u64) -> Self {
        Self {
            capacity,
            durable: Image::new(capacity),
            current: Image::new(capacity),
            unflushed: Vec::new(),
            unflushed_first: 0,
            in_flight: Vec::new(),
            faults: Vec::new(),
            unreadable: BTreeSet::new(),
            garble: false,
            host_room: None,
            filled: None,
            fuse: None,
            ignores_flushes: false,
            counts: Counts::default(),
            rng: seeded(seed, 0xd15c),
        }
    }

    /// Requests so far.
    pub fn counts(&self) -> &Counts {
        &self.counts
    }

    /// The `nth` request of this kind from now on (0 is the next) fails with `errno`.
    pub fn fail(&mut self, kind: IoKind, nth: u64, errno: i32) {
        self.faults.push((kind, nth, errno));
    }

    /// Requests that were to fail will not.
    pub fn forget_faults(&mut self) {
        self.faults.clear();
    }

    /// From now on the host has room for so many blocks that were never written; `None`: for all.
    pub fn set_host_room(&mut self, blocks: Option<u64>) {
        self.host_room = blocks;
    }

    /// The block at this byte cannot be read any more, until it is written again.
    pub fn spoil(&mut self, offset: u64) {
        self.unreadable.insert(offset / BLOCK_BYTES as u64);
    }

    /// The block at this byte can be read again, and is what it was.
    pub fn repair(&mut self, offset: u64) {
        self.unreadable.remove(&(offset / BLOCK_BYTES as u64));
    }

    /// Where the blocks lie that cannot be read, in bytes.
    pub fn spoilt(&self) -> Vec<u64> {
        let block = BLOCK_BYTES as u64;
        self.unreadable.iter().map(|at| at * block).collect()
    }

    fn blocks_of(offset: u64, len: u64) -> std::ops::Range<u64> {
        let block = BLOCK_BYTES as u64;
        offset / block..(offset + len).div_ceil(block)
    }

    fn is_readable(&self, offset: u64, len: u64) -> bool {
        let mut bad = self.unreadable.range(Self::blocks_of(offset, len));
        bad.next().is_none()
    }

    /// Stores a write, or its first blocks if the host has no room for the rest.
    fn put(&mut self, mut record: WriteRecord) -> Result<(), i32> {
        let block = BLOCK_BYTES as u64;
        for at in Self::blocks_of(record.offset, record.bytes.len() as u64) {
            let Some(room) = self.host_room.filter(|_| !self.current.is_written(at)) else {
                continue;
            };
            if room == 0 {
                let fits = (at * block - record.offset) as usize;
                record.bytes = record.bytes[..fits].into();
                self.store(record);
                return Err(libc::ENOSPC);
            }
            self.host_room = Some(room - 1);
        }
        self.store(record);
        Ok(())
    }

    fn store(&mut self, record: WriteRecord) {
        for block in Self::blocks_of(record.offset, record.bytes.len() as u64) {
            self.unreadable.remove(&block);
        }
        self.current.write(record.offset, &record.bytes);
        self.unflushed.push(record);
    }

    /// The next read delivers one wrong bit; what is on the disk is right.
    pub fn garble_next_read(&mut self) {
        self.garble = true;
    }

    /// The power goes during the `nth` synchronous write from now on; the first is 1.
    pub fn set_fuse(&mut self, nth: u64) {
        self.fuse = Some(nth);
    }

    /// The disk says that it is shorter now.
    pub fn truncate(&mut self, capacity: u64) {
        self.capacity = capacity;
    }

    /// Blocks of the device that were ever written.
    pub fn written_blocks(&self) -> Vec<u64> {
        self.current.written_blocks().collect()
    }

    /// Content as of now.
    pub fn peek(&self, offset: u64, buf: &mut [u8]) {
        self.current.read(offset, buf);
    }

    /// Requests under way.
    pub fn in_flight(&self) -> usize {
        self.in_flight.len()
    }

    /// Takes a request. What it wants to write is kept, and compared with the memory when it finishes.
    pub fn submit(&mut self, shard: usize, action: DeviceAction) -> IoKind {
        let (id, request) = match action {
            DeviceAction::Read { id, offset, iovecs } => {
                let len: usize = iovec_slice(&iovecs).iter().map(|v| v.iov_len).sum();
                self.check_range(offset, len as u64);
                (id, Request::Read { offset, iovecs })
            }
            DeviceAction::Write { id, offset, iovecs } => {
                let record = WriteRecord {
                    offset,
                    bytes: gather(&iovecs),
                };
                self.check_range(offset, record.bytes.len() as u64);
                (
                    id,
                    Request::Write {
                        record,
                        iovecs: Some(iovecs),
                    },
                )
            }
            DeviceAction::Flush { id } => {
                let upto = match self.ignores_flushes {
                    true => self.unflushed_first,
                    false => self.unflushed_end(),
                };
                (id, Request::Flush { upto })
            }
            DeviceAction::Discard { id, offset, len } => {
                self.check_range(offset, len);
                (id, Request::Discard { offset, len })
            }
        };
        self.push(IoKey { shard, id }, request)
    }

    /// From now on the disk answers flushes and keeps what was written in its cache.
    pub fn ignore_flushes(&mut self) {
        self.ignores_flushes = true;
    }

    /// Starts a flush of the whole device in the name of `key`.
    pub fn submit_flush(&mut self, key: IoKey) {
        let upto = self.unflushed_end();
        self.push(key, Request::Flush { upto });
    }

    fn unflushed_end(&self) -> u64 {
        self.unflushed_first + self.unflushed.len() as u64
    }

    fn push(&mut self, key: IoKey, request: Request) -> IoKind {
        let kind = request.kind();
        if let Some((offset, len)) = request.write_range() {
            let overlaps = |other: &Request| {
                other
                    .write_range()
                    .is_some_and(|(o, l)| o < offset + len && offset < o + l)
            };
            let clash = self.in_flight.iter().any(|(_, other)| overlaps(other));
            assert!(
                !clash,
                "two writes under way at byte {offset}: their order is undefined"
            );
        }
        assert!(
            self.in_flight.iter().all(|(k, _)| *k != key),
            "request name used twice: {key:?}"
        );
        self.counts.add(kind);
        self.in_flight.push((key, request));
        kind
    }

    fn check_range(&self, offset: u64, len: u64) {
        let block = BLOCK_BYTES as u64;
        assert!(
            offset % block == 0 && len % block == 0 && len > 0,
            "unaligned request"
        );
        assert!(
            offset + len <= self.capacity,
            "request behind the end of the disk"
        );
    }

    fn fault(&mut self, kind: IoKind) -> Option<i32> {
        let mut errno = None;
        self.faults.retain_mut(|(k, left, e)| {
            if *k != kind {
                return true;
            }
            if *left == 0 {
                errno = Some(*e);
                return false;
            }
            *left -= 1;
            true
        });
        errno
    }

    /// Finishes this request, if it is under way.
    pub fn complete(&mut self, key: IoKey) -> Option<Result<(), i32>> {
        let at = self.in_flight.iter().position(|(k, _)| *k == key)?;
        Some(self.complete_at(at).1)
    }

    /// Finishes a random request.
    pub fn complete_any(&mut self) -> Option<(IoKey, Result<(), i32>)> {
        if self.in_flight.is_empty() {
            return None;
        }
        let at = self.rng.random_range(0..self.in_flight.len());
        Some(self.complete_at(at))
    }

    /// Finishes the oldest request of a kind.
    pub fn complete_kind(&mut self, kind: IoKind) -> Option<(IoKey, Result<(), i32>)> {
        let at = self.in_flight.iter().position(|(_, r)| r.kind() == kind)?;
        Some(self.complete_at(at))
    }

    /// Finishes the newest request of a kind.
    pub fn complete_newest(&mut self, kind: IoKind) -> Option<(IoKey, Result<(), i32>)> {
        let at = self.in_flight.iter().rposition(|(_, r)| r.kind() == kind)?;
        Some(self.complete_at(at))
    }

    /// What the request that finished last has filled, if it was a read that ended well.
    pub fn filled(&self) -> Option<IoVecs> {
        self.filled
    }

    fn complete_at(&mut self, at: usize) -> (IoKey, Result<(), i32>) {
        let (key, request) = self.in_flight.remove(at);
        self.filled = None;
        if let Some(errno) = self.fault(request.kind()) {
            if let Request::Write { record, .. } = request {
                let kept = apply_with_luck(&mut self.current, &record, 0.3, &mut self.rng);
                self.unflushed.extend(kept);
            }
            return (key, Err(errno));
        }
        match request {
            Request::Read { offset, iovecs } => {
                let len: usize = iovec_slice(&iovecs).iter().map(|v| v.iov_len).sum();
                if !self.is_readable(offset, len as u64) {
                    return (key, Err(libc::EIO));
                }
                scatter(&iovecs, &self.current, offset);
                if std::mem::take(&mut self.garble) {
                    let first = iovec_slice(&iovecs)[0].iov_base.cast::<u8>();
                    // SAFETY: the first byte of what was just filled.
                    unsafe { *first ^= 1 };
                }
                self.filled = Some(iovecs);
            }
            Request::Write { record, iovecs } => {
                let now = iovecs.map(|iovecs| gather(&iovecs));
                let same = now.is_none_or(|now| now == record.bytes);
                assert!(same, "the store changed the memory of a write under way");
                return (key, self.put(record));
            }
            Request::Flush { upto } => self.make_durable(upto),
            Request::Discard { offset, len } => self.discard(offset, len),
        }
        (key, Ok(()))
    }

    fn make_durable(&mut self, upto: u64) {
        let count = upto.saturating_sub(self.unflushed_first) as usize;
        for record in self.unflushed.drain(..count) {
            self.durable.write(record.offset, &record.bytes);
        }
        self.unflushed_first = self.unflushed_first.max(upto);
    }

    /// A discarded range holds what it held, or zeroes, or anything.
    fn discard(&mut self, offset: u64, len: u64) {
        let fill = match self.rng.random_range(0..3) {
            0 => return,
            1 => 0,
            _ => 0xdb,
        };
        let record = WriteRecord {
            offset,
            bytes: vec![fill; len as usize].into(),
        };
        self.current.write(offset, &record.bytes);
        self.unflushed.push(record);
    }

    /// The disk as the next process finds it.
    pub fn crash(&self, kind: CrashKind, seed: u64) -> Self {
        let mut rng = seeded(seed, 0xc4a5);
        let keep = [0.0, 0.1, 0.5, 0.9, 1.0][rng.random_range(0..5)];
        let mut next = self.clone();
        next.in_flight.clear();
        next.faults.clear();
        next.fuse = None;
        next.host_room = None;
        next.rng = seeded(seed, 0xd15c);
        let under_way = self
            .in_flight
            .iter()
            .filter_map(|(_, request)| match request {
                Request::Write { record, .. } => Some(record.clone()),
                _ => None,
            });
        let under_way: Vec<WriteRecord> = under_way.collect();
        for record in &under_way {
            for block in Self::blocks_of(record.offset, record.bytes.len() as u64) {
                next.unreadable.remove(&block);
            }
        }
        if kind == CrashKind::Process {
            for record in under_way {
                let kept = apply_with_luck(&mut next.current, &record, keep, &mut rng);
                next.unflushed.extend(kept);
            }
            return next;
        }
        let mut lost: Vec<WriteRecord> = self.unflushed.iter().cloned().chain(under_way).collect();
        if rng.random_bool(0.5) {
            lost.shuffle(&mut rng);
        }
        for record in &lost {
            apply_with_luck(&mut next.durable, record, keep, &mut rng);
        }
        next.current = next.durable.clone();
        next.unflushed_first = next.unflushed_end();
        next.unflushed.clear();
        next
    }

    fn powered(&self) -> io::Result<()> {
        match self.fuse {
            Some(0) => Err(errno_error(libc::EIO)),
            _ => Ok(()),
        }
    }
}

impl SyncDevice for SimDisk {
    fn capacity_bytes(&self) -> u64 {
        self.capacity
    }

    fn read_at(&mut self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        self.powered()?;
        self.check_range(offset, buf.len() as u64);
        self.counts.add(IoKind::Read);
        if let Some(errno) = self.fault(IoKind::Read) {
            return Err(errno_error(errno));
        }
        if !self.is_readable(offset, buf.len() as u64) {
            return Err(errno_error(libc::EIO));
        }
        self.current.read(offset, buf);
        Ok(())
    }

    fn write_at(&mut self, offset: u64, buf: &[u8]) -> io::Result<()> {
        self.powered()?;
        self.check_range(offset, buf.len() as u64);
        self.counts.add(IoKind::Write);
        let record = WriteRecord {
            offset,
            bytes: buf.into(),
        };
        if let Some(left) = &mut self.fuse {
            *left -= 1;
            if *left == 0 {
                let key = IoKey {
                    shard: usize::MAX,
                    id: IoId(u64::MAX),
                };
                self.in_flight.push((
                    key,
                    Request::Write {
                        record,
                        iovecs: None,
                    },
                ));
                return Err(errno_error(libc::EIO));
            }
        }
        if let Some(errno) = self.fault(IoKind::Write) {
            return Err(errno_error(errno));
        }
        self.put(record).map_err(errno_error)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.powered()?;
        self.counts.add(IoKind::Flush);
        if let Some(errno) = self.fault(IoKind::Flush) {
            return Err(errno_error(errno));
        }
        self.make_durable(self.unflushed_end());
        Ok(())
    }
}
