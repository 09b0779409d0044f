//! The driver of a packed ring that is mostly honest: it knows where it stands, which a ring of odd bytes
//! would not get past the first descriptor.

use super::input::{Input, TABLE_AT, TABLE_DESCS, hostile_desc, write};
use crate::memory::GuestAddr;
use crate::ring::packed::Position;
use crate::testing::{FakeGuest, GUEST_BASE};

const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;
/// Bytes of a table, which is one chain.
const TABLE_BYTES: u64 = 48;
/// Descriptors of the largest ring.
const IDS: usize = 32;

/// A descriptor: address, length, id, flags.
type Desc = (u64, u32, u16, u16);

fn encode((addr, len, id, flags): Desc) -> [u8; 16] {
    let rest = u64::from(len) | u64::from(id) << 32 | u64::from(flags) << 48;
    (u128::from(addr) | u128::from(rest) << 64).to_le_bytes()
}

fn read(guest: &FakeGuest, at: u64) -> [u8; 16] {
    let mut bytes = [0; 16];
    if guest.memory().translate(GuestAddr(at), 16).is_some() {
        bytes.copy_from_slice(&guest.read(GuestAddr(at), 16));
    }
    bytes
}

/// Descriptors as they are in split rings have flags where packed ones have the id.
pub(super) fn convert_tables(guest: &FakeGuest) {
    for i in 0..TABLE_DESCS {
        let at = GUEST_BASE + TABLE_AT + 16 * i;
        let mut desc = read(guest, at);
        desc.copy_within(12..14, 14);
        write(guest, at, &desc);
    }
}

/// Where the driver stands.
#[derive(Debug, Clone, Copy)]
pub(super) struct Driver {
    ring: u64,
    size: u16,
    next: Position,
    used: Position,
    free: u16,
    /// Descriptors of each buffer that the device has, by its id.
    counts: [u16; IDS],
}

impl Driver {
    pub(super) fn new(ring: GuestAddr, size: u16) -> Self {
        Self {
            ring: ring.0,
            size,
            next: Position::START,
            used: Position::START,
            free: size,
            counts: [0; IDS],
        }
    }

    fn at(&self, index: u16) -> u64 {
        self.ring.wrapping_add(16 * u64::from(index))
    }

    /// Takes back what is answered.
    fn collect(&mut self, guest: &FakeGuest) {
        for _ in 0..self.size {
            let desc = read(guest, self.at(self.used.index));
            let [.., id, high, flags, top] = desc;
            let flags = u16::from_le_bytes([flags, top]);
            let id = usize::from(u16::from_le_bytes([id, high])) % IDS;
            if flags & 0x8080 != self.used.used_flags() || self.counts[id] == 0 {
                break;
            }
            let count = std::mem::take(&mut self.counts[id]);
            self.used = self.used.plus(count, self.size);
            self.free = (self.free + count).min(self.size);
        }
    }

    fn add(&mut self, guest: &FakeGuest, (addr, len, id, flags): Desc) {
        let flags = flags | self.next.available_flags();
        write(
            guest,
            self.at(self.next.index),
            &encode((addr, len, id, flags)),
        );
        self.next = self.next.plus(1, self.size);
    }

    /// Adds a few chains, each with what lies in one of the tables.
    pub(super) fn offer(
        &mut self,
        guest: &FakeGuest,
        indirect: bool,
        fair: bool,
        input: &mut Input<'_>,
    ) {
        self.collect(guest);
        for _ in 0..input.byte() % 4 {
            let choice = input.byte();
            let table =
                GUEST_BASE + TABLE_AT + u64::from(choice >> 1) % (TABLE_DESCS / 3) * TABLE_BYTES;
            let is_table = indirect && choice & 1 != 0;
            let count = if is_table { 1 } else { 3 };
            let id = self.counts.iter().position(|&count| count == 0);
            let Some(id) = id.filter(|_| !fair || self.free >= count) else {
                break;
            };
            self.counts[id] = count;
            self.free = self.free.saturating_sub(count);
            if is_table {
                self.add(guest, (table, TABLE_BYTES as u32, id as u16, INDIRECT));
                continue;
            }
            for i in 0..u64::from(count) {
                let desc = u128::from_le_bytes(read(guest, table + 16 * i));
                let (addr, rest) = (desc as u64, (desc >> 64) as u64);
                let more = if i < 2 { NEXT } else { 0 };
                let flags = (rest >> 48) as u16 & WRITE | more;
                self.add(guest, (addr, rest as u32, id as u16, flags));
            }
        }
        if !fair {
            self.break_some(guest, input);
        }
    }

    /// Overwrites a few descriptors with anything.
    fn break_some(&self, guest: &FakeGuest, input: &mut Input<'_>) {
        for _ in 0..input.byte() % 4 {
            let at = self.at(u16::from(input.byte()) % self.size);
            let mut desc = hostile_desc(input, u64::from(self.size));
            desc.copy_within(12..14, 14);
            desc[14] = desc[14] & 0x7f | input.byte() & 0x80;
            desc[15] = desc[15] & 0x7f | input.byte() & 0x80;
            write(guest, at, &desc);
        }
    }
}
