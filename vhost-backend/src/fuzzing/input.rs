//! Turns bytes into rings that are mostly wrong in interesting ways. Plain random bytes would nearly all stop at the first
//! address that lies nowhere.

use std::cell::Cell;
use std::sync::Arc;

use crate::data_thread::QueueConfig;
use crate::memory::GuestAddr;
use crate::testing::{FakeGuest, GUEST_BASE};

/// Bytes of the guest's memory.
pub(super) const MEMORY_BYTES: u64 = 64 << 10;
/// Descriptors that indirect tables may use.
const TABLE_DESCS: u64 = 24;
const TABLE_AT: u64 = 0x3000;
const HEADERS: u64 = 8;
const HEADER_AT: u64 = 0x4000;
const DATA_AT: u64 = 0x5000;

/// Bytes taken one after the other; zeroes when they are used up.
#[derive(Debug)]
pub(super) struct Input<'a>(&'a [u8]);

impl<'a> Input<'a> {
    pub(super) fn new(data: &'a [u8]) -> Self {
        Self(data)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(super) fn byte(&mut self) -> u8 {
        let Some((first, rest)) = self.0.split_first() else {
            return 0;
        };
        self.0 = rest;
        *first
    }

    fn word(&mut self) -> u16 {
        u16::from_le_bytes([self.byte(), self.byte()])
    }

    fn one_of<T: Copy>(&mut self, list: &[T]) -> T {
        list[usize::from(self.byte()) % list.len()]
    }
}

/// Where a hostile ring lies, and how it is filled again and again.
#[derive(Debug)]
pub(super) struct RingInput {
    pub(super) size: u16,
    pub(super) desc: GuestAddr,
    pub(super) avail: GuestAddr,
    pub(super) used: GuestAddr,
    pub(super) event_idx: bool,
    pub(super) indirect: bool,
    pub(super) base: u16,
    /// Available index written last.
    index: Cell<u16>,
}

impl RingInput {
    pub(super) fn new(input: &mut Input<'_>) -> Self {
        let features = input.byte();
        let place = |input: &mut Input<'_>, usual: u64| {
            // Mostly the usual place; sometimes outside, unaligned, at the very end, or on top of the data.
            let odd = [
                usual + 1,
                usual + 4,
                DATA_AT,
                MEMORY_BYTES - 8,
                u64::MAX / 2,
            ];
            let at = if input.byte() < 240 {
                usual
            } else {
                input.one_of(&odd)
            };
            GuestAddr(GUEST_BASE + at)
        };
        let base = if features & 4 != 0 { input.word() } else { 0 };
        Self {
            size: 1 << input.one_of(&[4u16, 5, 4, 5, 3, 2, 1, 0]),
            desc: place(input, 0),
            avail: place(input, 0x1000),
            used: place(input, 0x2000),
            event_idx: features & 1 != 0,
            indirect: features & 2 != 0,
            base,
            index: Cell::new(base),
        }
    }

    pub(super) fn config(&self, guest: &FakeGuest) -> QueueConfig {
        QueueConfig {
            index: 0,
            size: self.size,
            desc: self.desc,
            avail: self.avail,
            used: self.used,
            base: self.base,
            features: u64::from(self.event_idx) << 29 | u64::from(self.indirect) << 28,
            enabled: true,
            kick: None,
            call: None,
            err: None,
            inflight: None,
            log: None,
            used_log: None,
            memory: Arc::clone(guest.memory()),
        }
    }

    /// Writes descriptors, tables, headers and the available ring: first as an honest guest would, then with a few
    /// things wrong.
    pub(super) fn fill(&self, guest: &FakeGuest, input: &mut Input<'_>) {
        for i in 0..HEADERS {
            write(guest, GUEST_BASE + HEADER_AT + 16 * i, &header(input));
        }
        let size = u64::from(self.size);
        honest_chains(guest, self.desc.0, size, input);
        honest_chains(guest, GUEST_BASE + TABLE_AT, TABLE_DESCS, input);
        if self.indirect {
            for i in (0..size).filter(|i| i % 4 == 3) {
                let table =
                    GUEST_BASE + TABLE_AT + u64::from(input.byte()) % (TABLE_DESCS / 3) * 48;
                write(
                    guest,
                    self.desc.0.wrapping_add(16 * i),
                    &encode(table, 48, 4, 0),
                );
            }
        }
        for _ in 0..input.byte() % 4 {
            let (base, count) = if input.byte() % 2 == 0 {
                (self.desc.0, size)
            } else {
                (GUEST_BASE + TABLE_AT, 24)
            };
            let at = base.wrapping_add(u64::from(input.byte()) % count * 16);
            write(guest, at, &hostile_desc(input, count));
        }
        for i in 0..size {
            let head = match input.byte() {
                0..=219 => i as u16 % (self.size / 3).max(1) * 3,
                220..=239 => (i as u16 * 4 + 3) % self.size,
                _ => input.word() % (self.size + 1),
            };
            write(
                guest,
                self.avail.0.wrapping_add(4 + 2 * i),
                &head.to_le_bytes(),
            );
        }
        let jump = input.byte();
        let ahead = match jump {
            u8::MAX => input.word(),
            200.. => u16::from(jump) % (self.size + 1),
            _ => (u16::from(jump) % 4).min(self.size),
        };
        let index = self.index.get().wrapping_add(ahead);
        self.index.set(index);
        write(guest, self.avail.0.wrapping_add(2), &index.to_le_bytes());
    }
}

/// Chains of three descriptors, one after the other: header, data, status.
fn honest_chains(guest: &FakeGuest, base: u64, count: u64, input: &mut Input<'_>) {
    for i in 0..count / 3 {
        let choice = input.byte();
        let (first, at) = (3 * i as u16, base.wrapping_add(48 * i));
        // In a table the chain starts at 0, since each table is three descriptors long.
        let first = if base == GUEST_BASE + TABLE_AT {
            0
        } else {
            first
        };
        let read = u16::from(choice & 1) * 2;
        // The headers serve as the ranges of a discard, too.
        let place = input.byte();
        let data = GUEST_BASE
            + if place % 4 == 0 {
                HEADER_AT
            } else {
                DATA_AT + u64::from(place) * 64
            };
        let len = [512, 4096, 1024, 16, 48, 20, 512, 0][usize::from(choice >> 5)];
        write(
            guest,
            at,
            &encode(
                GUEST_BASE + HEADER_AT + u64::from(choice >> 1) % HEADERS * 16,
                16,
                1,
                first + 1,
            ),
        );
        write(
            guest,
            at.wrapping_add(16),
            &encode(data, len, 1 | read, first + 2),
        );
        write(
            guest,
            at.wrapping_add(32),
            &encode(GUEST_BASE + DATA_AT + 0x8000 + i, 1, 2, 0),
        );
    }
}

/// Writes what lies inside the guest's memory.
fn write(guest: &FakeGuest, at: u64, bytes: &[u8]) {
    let at = GuestAddr(at);
    if guest.memory().translate(at, bytes.len() as u64).is_some() {
        guest.write(at, bytes);
    }
}

fn encode(addr: u64, len: u32, flags: u16, next: u16) -> [u8; 16] {
    let mut out = [0; 16];
    out[..8].copy_from_slice(&addr.to_le_bytes());
    out[8..12].copy_from_slice(&len.to_le_bytes());
    out[12..14].copy_from_slice(&flags.to_le_bytes());
    out[14..].copy_from_slice(&next.to_le_bytes());
    out
}

fn hostile_desc(input: &mut Input<'_>, table: u64) -> [u8; 16] {
    let addr = match input.byte() {
        kind @ 0..=99 => GUEST_BASE + HEADER_AT + u64::from(kind) % HEADERS * 16,
        100..=199 => GUEST_BASE + DATA_AT + u64::from(input.word()) % 0x8000,
        200..=229 => GUEST_BASE + TABLE_AT + u64::from(input.byte()) % TABLE_DESCS * 16,
        230..=239 => GUEST_BASE + MEMORY_BYTES - u64::from(input.byte()),
        240..=247 => u64::from(input.word()),
        _ => u64::MAX - u64::from(input.byte()),
    };
    let lens = [
        16,
        1,
        512,
        16,
        1,
        4096,
        48,
        128,
        17,
        0,
        15,
        1024,
        8192,
        TABLE_DESCS as u32 * 16,
        u32::MAX,
        1 << 20,
    ];
    let len = input.one_of(&lens);
    let flags = input.one_of(&[1, 1, 1, 3, 3, 2, 2, 0, 4, 4, 5, 6, 7, 0xffff]);
    let next = input.word() % (table as u16 + 1);
    encode(addr, len, flags, next)
}

/// A header, or a range of a discard: both are sixteen bytes.
fn header(input: &mut Input<'_>) -> [u8; 16] {
    let mut out = [0; 16];
    if input.byte() % 3 == 0 {
        out[0] = input.byte();
        out[8..12].copy_from_slice(&u32::from(input.word() % 4).to_le_bytes());
        out[12] = input.byte() % 4;
    } else {
        let kind = input.one_of(&[
            0u32,
            0,
            1,
            1,
            4,
            8,
            11,
            11,
            13,
            13,
            2,
            0x8000_0000,
            u32::MAX,
        ]);
        let sector = input.one_of(&[
            0u64,
            1,
            8,
            0,
            64,
            8,
            100,
            16,
            2000,
            2047,
            2048,
            2049,
            u64::MAX,
            1 << 55,
        ]);
        out[..4].copy_from_slice(&kind.to_le_bytes());
        out[8..].copy_from_slice(&sector.to_le_bytes());
    }
    out
}
