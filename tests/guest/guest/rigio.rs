//! Requests that fio cannot shape, issued from inside the guest: `rigio segments|sectors|unaligned DEVICE
//! SEED`. And `rigio tree VERB ...` works on trees of files and times that ([`trees`]).
//!
//! Each mode writes with O_DIRECT, reads back through buffers of another shape, and compares every byte. Uses
//! only `std`, so that it links statically and runs in any guest root.

use std::fs::{File, OpenOptions};
use std::io::{Error, ErrorKind, IoSlice, IoSliceMut, Read, Result, Seek, SeekFrom, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::process::ExitCode;

mod trees;

const O_DIRECT: i32 = 0o40000;
const PAGE: usize = 4096;
const SECTOR: usize = 512;
/// Segments of one request in `segments`: with 4 KiB each, 1 MiB.
const SEGMENTS: usize = 256;
/// Rounds of each mode.
const ROUNDS: u64 = 24;
/// Bytes of the device that a mode works on.
const SPAN: u64 = 16 << 20;

/// xorshift64*: enough to make every byte depend on the seed and its place.
struct Rng(u64);

impl Rng {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D)
    }

    fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }

    fn fill(&mut self, buffer: &mut [u8]) {
        for chunk in buffer.chunks_mut(8) {
            let word = self.next().to_le_bytes();
            chunk.copy_from_slice(&word[..chunk.len()]);
        }
    }
}

/// Memory in which an offset can be chosen relative to a page boundary.
struct Arena {
    bytes: Vec<u8>,
    first_page: usize,
}

impl Arena {
    fn new(len: usize) -> Self {
        let bytes = vec![0u8; len + PAGE];
        let first_page = bytes.as_ptr().align_offset(PAGE);
        Self { bytes, first_page }
    }

    fn slice(&mut self, offset: usize, len: usize) -> &mut [u8] {
        let start = self.first_page + offset;
        &mut self.bytes[start..start + len]
    }
}

fn mismatch(mode: &str, at: u64) -> Error {
    Error::new(
        ErrorKind::InvalidData,
        format!("{mode}: wrong bytes read back near device offset {at}"),
    )
}

fn short(mode: &str, got: usize) -> Error {
    Error::new(
        ErrorKind::UnexpectedEof,
        format!("{mode}: short transfer of {got} bytes"),
    )
}

/// One 1 MiB request of 256 segments: every second page of a 2 MiB arena, so that no two can be merged.
fn segments(device: &mut File, rng: &mut Rng) -> Result<()> {
    let mut arena = Arena::new(2 * SEGMENTS * PAGE);
    let mut copy = vec![0u8; SEGMENTS * PAGE];
    for _ in 0..ROUNDS {
        let at = rng.below((SPAN - copy.len() as u64) / SECTOR as u64) * SECTOR as u64;
        rng.fill(&mut copy);
        for (index, page) in copy.chunks(PAGE).enumerate() {
            arena.slice(2 * index * PAGE, PAGE).copy_from_slice(page);
        }
        let whole = arena.slice(0, 2 * SEGMENTS * PAGE);
        let parts: Vec<IoSlice<'_>> = whole
            .chunks(2 * PAGE)
            .map(|pair| IoSlice::new(&pair[..PAGE]))
            .collect();
        device.seek(SeekFrom::Start(at))?;
        let written = device.write_vectored(&parts)?;
        if written != copy.len() {
            return Err(short("segments", written));
        }
        whole.fill(0);
        let mut parts: Vec<IoSliceMut<'_>> = whole
            .chunks_mut(2 * PAGE)
            .map(|pair| IoSliceMut::new(&mut pair[PAGE..]))
            .collect();
        device.seek(SeekFrom::Start(at))?;
        let read = device.read_vectored(&mut parts)?;
        if read != copy.len() {
            return Err(short("segments", read));
        }
        if whole
            .chunks(2 * PAGE)
            .zip(copy.chunks(PAGE))
            .any(|(pair, page)| &pair[PAGE..] != page)
        {
            return Err(mismatch("segments", at));
        }
    }
    Ok(())
}

/// Single sectors written at random, among them neighbours in one 4 KiB block; then one large read of
/// everything.
fn sectors(device: &mut File, rng: &mut Rng) -> Result<()> {
    const WINDOW: usize = 256 << 10;
    let base = rng.below((SPAN - WINDOW as u64) / PAGE as u64) * PAGE as u64;
    let mut model = Arena::new(WINDOW);
    rng.fill(model.slice(0, WINDOW));
    device.seek(SeekFrom::Start(base))?;
    device.write_all(model.slice(0, WINDOW))?;
    for _ in 0..ROUNDS * 8 {
        let offset = rng.below((WINDOW / SECTOR) as u64) as usize * SECTOR;
        let buffer = model.slice(offset, SECTOR);
        rng.fill(buffer);
        device.seek(SeekFrom::Start(base + offset as u64))?;
        device.write_all(buffer)?;
    }
    let mut found = Arena::new(WINDOW);
    device.seek(SeekFrom::Start(base))?;
    device.read_exact(found.slice(0, WINDOW))?;
    if found.slice(0, WINDOW) != model.slice(0, WINDOW) {
        return Err(mismatch("sectors", base));
    }
    Ok(())
}

/// Buffers that start inside a page, ranges that start and end inside a block.
fn unaligned(device: &mut File, rng: &mut Rng) -> Result<()> {
    const LARGEST: usize = 96 << 10;
    let mut source = Arena::new(LARGEST + PAGE);
    let mut target = Arena::new(LARGEST + PAGE);
    for _ in 0..ROUNDS * 4 {
        let len = (1 + rng.below((LARGEST / SECTOR) as u64)) as usize * SECTOR;
        let at = rng.below((SPAN - LARGEST as u64) / SECTOR as u64) * SECTOR as u64;
        let from = (1 + rng.below(7)) as usize * SECTOR;
        let into = (1 + rng.below(7)) as usize * SECTOR;
        rng.fill(source.slice(from, len));
        device.seek(SeekFrom::Start(at))?;
        device.write_all(source.slice(from, len))?;
        device.seek(SeekFrom::Start(at))?;
        device.read_exact(target.slice(into, len))?;
        if source.slice(from, len) != target.slice(into, len) {
            return Err(mismatch("unaligned", at));
        }
    }
    Ok(())
}

fn run(mode: &str, path: &str, seed: u64) -> Result<()> {
    let mut device = OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags(O_DIRECT)
        .open(path)?;
    let mut rng = Rng(seed | 1);
    match mode {
        "segments" => segments(&mut device, &mut rng),
        "sectors" => sectors(&mut device, &mut rng),
        "unaligned" => unaligned(&mut device, &mut rng),
        other => Err(Error::new(
            ErrorKind::InvalidInput,
            format!("unknown mode {other}"),
        )),
    }
}

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = args.iter().map(String::as_str).collect();
    let done = match words.as_slice() {
        ["tree", words @ ..] => {
            trees::run(words).map(|timed| format!("{} {}", timed.elapsed.as_nanos(), timed.count))
        }
        [mode, path, seed] => {
            let Ok(seed) = seed.parse() else {
                eprintln!("rigio: the seed is a number, not {seed}");
                return ExitCode::from(2);
            };
            run(mode, path, seed).map(|()| format!("{mode}: ok"))
        }
        _ => {
            eprintln!("usage: rigio segments|sectors|unaligned DEVICE SEED | rigio tree VERB ...");
            return ExitCode::from(2);
        }
    };
    match done {
        Ok(line) => {
            println!("{line}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("rigio: {error}");
            ExitCode::FAILURE
        }
    }
}
