//! Turns bytes into rings that are mostly wrong in interesting ways. Plain random bytes would nearly all stop
//! at the first address that lies nowhere.

use std::cell::Cell;
use std::sync::Arc;

use super::packed::{Driver, convert_tables};
use crate::data_thread::QueueConfig;
use crate::memory::GuestAddr;
use crate::ring::packed::BASE_AT_START;
use crate::testing::{FakeGuest, GUEST_BASE};

/// Bytes of the guest's memory.
pub(super) const MEMORY_BYTES: u64 = 64 << 10;
/// Descriptors that indirect tables may use.
pub(super) const TABLE_DESCS: u64 = 24;
pub(super) const TABLE_AT: u64 = 0x3000;
const HEADERS: u64 = 8;
const HEADER_AT: u64 = 0x4000;
/// The last headers are of requests with ranges.
const RANGE_HEADERS: u64 = 2;
const RANGES: u64 = 16;
const RANGES_AT: u64 = 0x4800;
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
    pub(super) base: u32,
    /// Only the requests are odd, and the ring is as it should be. Else most queues would break before
    /// anything waits.
    fair: bool,
    /// Available index written last.
    index: Cell<u16>,
    /// Of a packed ring.
    driver: Option<Cell<Driver>>,
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
        let is_packed = features & 16 != 0;
        let base = match (is_packed, features & 4 != 0) {
            (false, true) => u32::from(input.word()),
            (false, false) => 0,
            (true, true) if input.byte() > 200 => u32::from(input.word()) << 16 | 0x8000,
            (true, _) => BASE_AT_START,
        };
        let size = 1 << input.one_of(&[4u16, 5, 4, 5, 3, 2, 1, 0]);
        let desc = place(input, 0);
        Self {
            size,
            desc,
            avail: place(input, 0x1000),
            used: place(input, 0x2000),
            event_idx: features & 1 != 0,
            indirect: features & 2 != 0,
            base,
            fair: features & 8 != 0,
            index: Cell::new(base as u16),
            driver: is_packed.then(|| Cell::new(Driver::new(desc, size))),
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
            features: u64::from(self.event_idx) << 29
                | u64::from(self.indirect) << 28
                | u64::from(self.is_packed()) << 34,
            kick: None,
            call: None,
            err: None,
            inflight: None,
            log: None,
            used_log: None,
            memory: Arc::clone(guest.memory()),
        }
    }

    pub(super) fn is_packed(&self) -> bool {
        self.driver.is_some()
    }

    /// Writes descriptors, tables, headers and the available ring: first as an honest guest would, then with
    /// a few things wrong.
    pub(super) fn fill(&self, guest: &FakeGuest, input: &mut Input<'_>) {
        for i in 0..HEADERS - RANGE_HEADERS {
            write(guest, GUEST_BASE + HEADER_AT + 16 * i, &header(input));
        }
        fill_ranges(guest, input);
        let size = u64::from(self.size);
        honest_chains(guest, GUEST_BASE + TABLE_AT, TABLE_DESCS, input);
        if let Some(driver) = &self.driver {
            convert_tables(guest);
            let mut at = driver.get();
            at.offer(guest, self.indirect, self.fair, input);
            return driver.set(at);
        }
        honest_chains(guest, self.desc.0, size, input);
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
        if !self.fair {
            self.break_some(guest, input);
        }
        self.offer(guest, input);
    }

    /// Overwrites a few descriptors.
    fn break_some(&self, guest: &FakeGuest, input: &mut Input<'_>) {
        let size = u64::from(self.size);
        for _ in 0..input.byte() % 4 {
            let (base, count) = if input.byte() % 2 == 0 {
                (self.desc.0, size)
            } else {
                (GUEST_BASE + TABLE_AT, TABLE_DESCS)
            };
            let at = base.wrapping_add(u64::from(input.byte()) % count * 16);
            write(guest, at, &hostile_desc(input, count));
        }
    }

    /// Fills the available ring and moves its index.
    fn offer(&self, guest: &FakeGuest, input: &mut Input<'_>) {
        let chains = (self.size / 3).max(1);
        for i in 0..self.size {
            let head = match input.byte() {
                kind if self.fair || kind < 220 => i % chains * 3,
                220..=239 => (i * 4 + 3) % self.size,
                _ => input.word() % (self.size + 1),
            };
            let at = self.avail.0.wrapping_add(4 + 2 * u64::from(i));
            write(guest, at, &head.to_le_bytes());
        }
        let ahead = match input.byte() {
            few if self.fair || few < 200 => (u16::from(few) % 4).min(self.size),
            u8::MAX => input.word(),
            many => u16::from(many) % (self.size + 1),
        };
        let index = self.index.get().wrapping_add(ahead);
        self.index.set(index);
        write(guest, self.avail.0.wrapping_add(2), &index.to_le_bytes());
    }
}

/// What a guest changes in the requests it has sent already, and nothing else: the way to be read twice with
/// two meanings.
pub(super) fn change_headers(guest: &FakeGuest, input: &mut Input<'_>) {
    for i in 0..HEADERS {
        if input.byte() % 2 == 0 {
            write(
                guest,
                GUEST_BASE + HEADER_AT + 16 * i,
                &kind(input).to_le_bytes(),
            );
        }
    }
    if input.byte() % 4 == 0 {
        fill_ranges(guest, input);
    }
}

/// Requests with ranges, and ranges that are mostly sound: only those get as far as the engine, and into it
/// piece by piece.
fn fill_ranges(guest: &FakeGuest, input: &mut Input<'_>) {
    for i in HEADERS - RANGE_HEADERS..HEADERS {
        let kind = input.one_of(&[11u32, 13, 11, 13, 11, 13, 4, 8]);
        write(
            guest,
            GUEST_BASE + HEADER_AT + 16 * i,
            &u128::from(kind).to_le_bytes(),
        );
    }
    for i in 0..RANGES {
        let byte = input.byte();
        let (sectors, flags) = (1 + u32::from(byte % 8), u32::from(byte == u8::MAX));
        let mut range = u128::from(byte).to_le_bytes();
        range[8..12].copy_from_slice(&sectors.to_le_bytes());
        range[12..].copy_from_slice(&flags.to_le_bytes());
        write(guest, GUEST_BASE + RANGES_AT + 16 * i, &range);
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
        let place = input.byte();
        let usual = [512, 4096, 1024, 16, 48, 20, 512, 0][usize::from(choice >> 5)];
        // The headers serve as the ranges of a discard, too.
        let (header, data, len, flags) = match place % 4 {
            0 => (u64::from(choice >> 1) % HEADERS, HEADER_AT, usual, read),
            1 => (
                HEADERS - 1 - u64::from(choice & 1),
                RANGES_AT,
                16 * (1 + u32::from(choice >> 4)),
                0,
            ),
            _ => (
                u64::from(choice >> 1) % HEADERS,
                DATA_AT + u64::from(place) * 64,
                usual,
                read,
            ),
        };
        write(
            guest,
            at,
            &encode(GUEST_BASE + HEADER_AT + header * 16, 16, 1, first + 1),
        );
        write(
            guest,
            at.wrapping_add(16),
            &encode(GUEST_BASE + data, len, 1 | flags, first + 2),
        );
        write(
            guest,
            at.wrapping_add(32),
            &encode(GUEST_BASE + DATA_AT + 0x8000 + i, 1, 2, 0),
        );
    }
}

/// Writes what lies inside the guest's memory.
pub(super) fn write(guest: &FakeGuest, at: u64, bytes: &[u8]) {
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

pub(super) fn hostile_desc(input: &mut Input<'_>, table: u64) -> [u8; 16] {
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
        let kind = kind(input);
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

/// Types of requests, some of which there are not.
fn kind(input: &mut Input<'_>) -> u32 {
    input.one_of(&[0, 0, 1, 1, 4, 8, 11, 11, 13, 13, 2, 0x8000_0000, u32::MAX])
}
