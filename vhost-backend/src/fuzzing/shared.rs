//! Memory that a front end shares for a queue beside the guest's own: the record of requests in flight and
//! the dirty log.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::io::pwrite;

use super::input::{Input, MEMORY_BYTES, write};
use crate::data_thread::QueueConfig;
use crate::dirty::{DirtyLog, LOG_PAGE_BYTES};
use crate::inflight::{InflightRegion, RingLayout};
use crate::memory::GuestAddr;
use crate::session::message::F_RING_PACKED;
use crate::testing::{FakeGuest, GUEST_BASE};

/// Entries of the record, as many as the largest queue has.
const ENTRIES: u16 = 32;
/// Bytes of the dirty log: not quite enough for the guest's memory.
const LOG_BYTES: u64 = (GUEST_BASE + MEMORY_BYTES) / LOG_PAGE_BYTES / 8 - 1;

/// Mapped once per thread, since mapping is slow.
pub(super) struct Shared {
    split: (Arc<InflightRegion>, OwnedFd),
    packed: (Arc<InflightRegion>, OwnedFd),
    log: Arc<DirtyLog>,
}

impl Shared {
    pub(super) fn new() -> Self {
        let record =
            |layout| InflightRegion::create(layout, 1, ENTRIES).expect("memory files can be made");
        let file = memfd_create("fuzz-log", MemfdFlags::CLOEXEC).expect("memory files can be made");
        ftruncate(&file, LOG_BYTES).expect("a memory file can be sized");
        Self {
            split: record(RingLayout::Split),
            packed: record(RingLayout::Packed),
            log: DirtyLog::map(file, LOG_BYTES, 0).expect("a memory file can be mapped"),
        }
    }

    /// Gives a queue a record that is fresh, or left by an earlier daemon, or made up, and a log; or does
    /// without.
    pub(super) fn add(&self, guest: &FakeGuest, config: &mut QueueConfig, input: &mut Input<'_>) {
        let choice = input.byte();
        if choice & 1 != 0 {
            let used = choice & 0x70 == 0;
            config.inflight = if config.features & F_RING_PACKED != 0 {
                self.fill_packed(used, input);
                self.packed.0.queue(0)
            } else {
                self.fill_split(used, input);
                // With a record it is the used ring that tells where to go on.
                let index = config.used.0.wrapping_add(2);
                write(guest, index, &(config.base as u16).to_le_bytes());
                self.split.0.queue(0)
            };
        }
        if choice & 4 != 0 {
            let odd = GuestAddr(u64::MAX - u64::from(choice));
            config.used_log = Some(if choice & 8 != 0 { odd } else { config.used });
            config.log = Some(Arc::clone(&self.log));
        }
    }

    /// The layout is that of the vhost-user specification.
    fn fill_split(&self, used: bool, input: &mut Input<'_>) {
        let mut bytes = vec![0; self.split.0.mmap_size() as usize];
        if used {
            bytes[8] = 1;
            bytes[12] = input.byte() % 40;
            bytes[14..16].copy_from_slice(&[input.byte(), 0]);
            for state in bytes[16..].chunks_exact_mut(16).take(usize::from(ENTRIES)) {
                let byte = input.byte();
                state[0] = u8::from(byte % 8 == 0);
                state[6] = byte >> 2;
                state[8] = byte >> 1;
                state[15] = if byte == u8::MAX { byte } else { 0 };
            }
        }
        pwrite(&self.split.1, &bytes, 0).expect("a memory file can be written");
    }

    fn fill_packed(&self, used: bool, input: &mut Input<'_>) {
        let mut bytes = vec![0; self.packed.0.mmap_size() as usize];
        if used {
            bytes[8] = 1;
            for at in [12, 14, 16, 18] {
                bytes[at] = input.byte() % 4;
            }
            bytes[20..22].fill(input.byte() & 1);
            for state in bytes[32..].chunks_exact_mut(32).take(usize::from(ENTRIES)) {
                let byte = input.byte();
                state[0] = u8::from(byte % 8 == 0);
                for at in [2, 4, 8, 16, 20, 25] {
                    state[at] = input.byte() % 33;
                }
                state[6] = 1 + byte % 3;
                state[18] = byte % 7;
                // Somewhere in the guest's memory, mostly.
                state[26] = if byte == u8::MAX { byte } else { 0x10 };
            }
        }
        pwrite(&self.packed.1, &bytes, 0).expect("a memory file can be written");
    }
}
