//! What a write of 1 MiB from guest memory costs a data thread in copying and checksums, in two ways:
//!
//! - *copied*: each block is copied into a buffer and its checksum is taken of the copy, as the store does;
//! - *in place*: the checksum is taken of the guest's memory before the device reads it, and once more after,
//!   because the guest may have changed the memory meanwhile.
//!
//! `cargo run -p fabric-store --example copy_cost` prints medians of alternating rounds. The guest's memory
//! is walked through and larger than the caches, as a guest that streams does.

use std::hint::black_box;
use std::time::Instant;

use fabric_types::block::BLOCK_BYTES as BLOCK;
use fabric_types::checksum::crc32c;

const WRITE_BLOCKS: usize = 256;
/// 1 GiB.
const GUEST_BLOCKS: usize = 1 << 18;
/// Writes in flight at depth 8.
const IN_FLIGHT: usize = 8;
const ROUNDS: usize = 9;

fn main() {
    let guest: Vec<u8> = (0..GUEST_BLOCKS * BLOCK)
        .map(|i| ((i * 31) >> 4) as u8)
        .collect();
    let mut buffers = vec![0; WRITE_BLOCKS * IN_FLIGHT * BLOCK];
    let (mut copied, mut in_place) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        copied.push(time(|first| copy(&guest, &mut buffers, first)));
        in_place.push(time(|first| verify(&guest, first)));
    }
    println!("per block of 4 KiB, median of {ROUNDS} rounds over 1 GiB");
    println!("copied    {:6.0} ns", median(&mut copied));
    println!("in place  {:6.0} ns", median(&mut in_place));
}

/// Nanoseconds for each block of a walk through the guest's memory.
fn time(mut write: impl FnMut(usize)) -> f64 {
    let start = Instant::now();
    for first in (0..GUEST_BLOCKS).step_by(WRITE_BLOCKS) {
        write(first);
    }
    start.elapsed().as_nanos() as f64 / GUEST_BLOCKS as f64
}

/// The bytes of one write.
fn write_at(guest: &[u8], first: usize) -> &[u8] {
    &guest[first * BLOCK..][..WRITE_BLOCKS * BLOCK]
}

fn copy(guest: &[u8], buffers: &mut [u8], first: usize) {
    let slot = first / WRITE_BLOCKS % IN_FLIGHT * WRITE_BLOCKS;
    let buffer = &mut buffers[slot * BLOCK..];
    let blocks = write_at(guest, first).chunks_exact(BLOCK);
    for (from, to) in blocks.zip(buffer.chunks_exact_mut(BLOCK)) {
        to.copy_from_slice(from);
        black_box(crc32c(to));
    }
}

/// Takes the checksums of a write, and again those of the one that has ended meanwhile.
fn verify(guest: &[u8], first: usize) {
    checksums(write_at(guest, first));
    let ended = (first + GUEST_BLOCKS - (IN_FLIGHT - 1) * WRITE_BLOCKS) % GUEST_BLOCKS;
    checksums(write_at(guest, ended));
}

fn checksums(bytes: &[u8]) {
    for block in bytes.chunks_exact(BLOCK) {
        black_box(crc32c(block));
    }
}

fn median(times: &mut [f64]) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}
