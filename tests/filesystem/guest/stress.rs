//! Random calls until a time has passed: in a directory of its own, or among others.

use std::collections::BTreeSet;
use std::fs::{File, OpenOptions};
use std::io::{Error, Read};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use rustix::fs::{OFlags, RawDir};
use rustix::io::Errno;

use crate::model::Model;
use crate::random::Random;

/// Names that all processes use, in each directory.
const SHARED_NAMES: u64 = 8;
/// Directories that all processes use, below the one given.
const SHARED_DIRECTORIES: u64 = 3;
/// Names in each of these directories that nobody touches.
const LASTING_NAMES: usize = 4;
/// What one call lists, in bytes: a few names of many.
const LISTED_BYTES: usize = 256;
/// What is written at a time, of one value: a reader sees it whole or not at all.
const BLOCK: usize = 4096;
const BLOCKS_MAX: u64 = 32;

/// What others' calls may make of ours.
const RACES: [Errno; 9] = [
    Errno::NOENT,
    Errno::EXIST,
    Errno::NOTEMPTY,
    Errno::NOTDIR,
    Errno::ISDIR,
    Errno::INVAL,
    Errno::LOOP,
    // A link to a directory.
    Errno::PERM,
    // It was removed between a lookup and what followed.
    Errno::STALE,
];

/// In a directory of its own; prints what must be there in the end.
pub fn own(dir: &Path, seed: u64, seconds: u64) -> Result<String> {
    let mut model = Model::make(dir, seed)?;
    let mut steps = 0;
    let start = Instant::now();
    while start.elapsed() < Duration::from_secs(seconds) {
        model
            .step()
            .with_context(|| format!("seed {seed}, step {steps}"))?;
        steps += 1;
    }
    eprintln!("{steps} steps");
    Ok(model.lines())
}

/// Where others do the same.
pub fn shared(dir: &Path, seed: u64, seconds: u64) -> Result<String> {
    let mut random = Random::new(seed);
    for directory in 0..SHARED_DIRECTORIES {
        let directory = dir.join(format!("d{directory}"));
        may_race(std::fs::create_dir(&directory))?;
        for name in (0..LASTING_NAMES).map(lasting_name) {
            may_race(File::create_new(directory.join(name)).map(drop))?;
        }
    }
    let mut steps = 0;
    let start = Instant::now();
    while start.elapsed() < Duration::from_secs(seconds) {
        let (one, two) = (some_name(dir, &mut random), some_name(dir, &mut random));
        shared_step(&mut random, &one, &two)
            .with_context(|| format!("seed {seed}, step {steps}: {one:?}, {two:?}"))?;
        steps += 1;
    }
    eprintln!("{steps} steps");
    Ok(String::new())
}

fn some_name(dir: &Path, random: &mut Random) -> PathBuf {
    let directory = random.below(SHARED_DIRECTORIES);
    dir.join(format!("d{directory}/{}", random.below(SHARED_NAMES)))
}

fn shared_step(random: &mut Random, one: &Path, two: &Path) -> Result<()> {
    match random.below(12) {
        0 => may_race(File::create_new(one).map(drop)),
        1 => may_race(std::fs::create_dir(one)),
        2 => may_race(std::fs::remove_dir(one)),
        3 => may_race(std::fs::remove_file(one)),
        4 => may_race(std::fs::hard_link(one, two)),
        5 | 6 => may_race(std::fs::rename(one, two)),
        7 => may_race(std::os::unix::fs::symlink("0", one)),
        8 => {
            let blocks = random.below(BLOCKS_MAX);
            let opened = OpenOptions::new().write(true).open(one);
            may_race(opened.and_then(|file| file.set_len(blocks * BLOCK as u64)))
        }
        9 => {
            let block = [random.number() as u8; BLOCK];
            let offset = random.below(BLOCKS_MAX) * BLOCK as u64;
            let opened = OpenOptions::new().write(true).open(one);
            may_race(opened.and_then(|file| file.write_all_at(&block, offset)))
        }
        10 => may_race(check_blocks(one)),
        _ => may_race(list(one)),
    }
}

/// An error is one that others may have made, or ours.
fn may_race(done: Result<(), Error>) -> Result<()> {
    let Err(error) = done else {
        return Ok(());
    };
    let code = error.raw_os_error();
    let is_race = RACES.iter().any(|errno| code == Some(errno.raw_os_error()));
    match is_race {
        true => Ok(()),
        false => Err(error.into()),
    }
}

/// Each block has one value. Past the guest's cache, which Linux reads while it is written to.
fn check_blocks(path: &Path) -> Result<(), Error> {
    let flags = OFlags::DIRECT.bits() as i32;
    let mut file = OpenOptions::new()
        .read(true)
        .custom_flags(flags)
        .open(path)?;
    let mut block = [0; BLOCK];
    loop {
        let count = file.read(&mut block)?;
        if count == 0 {
            return Ok(());
        }
        let values = &block[..count];
        if values.iter().any(|value| *value != values[0]) {
            let differs = format!("{path:?}: a block of several writes");
            return Err(Error::other(differs));
        }
    }
}

/// Each position comes once, and each name that is there all the time as well. A name that is
/// removed and made again meanwhile may come twice.
fn list(path: &Path) -> Result<(), Error> {
    let directory = path.parent().unwrap_or(path);
    let opened = File::open(directory)?;
    let mut buffer = Vec::with_capacity(LISTED_BYTES);
    let mut entries = RawDir::new(opened, buffer.spare_capacity_mut());
    let (mut positions, mut lasting) = (BTreeSet::new(), [0; LASTING_NAMES]);
    while let Some(entry) = entries.next() {
        let entry = entry?;
        let position = entry.next_entry_cookie();
        if !positions.insert(position) {
            return Err(Error::other(format!("position {position} comes twice")));
        }
        let name = entry.file_name().to_bytes();
        if let Some(number) = (0..LASTING_NAMES).find(|n| lasting_name(*n).as_bytes() == name) {
            lasting[number] += 1;
        }
    }
    match lasting.iter().all(|count| *count == 1) {
        true => Ok(()),
        false => Err(Error::other(format!("listed so often: {lasting:?}"))),
    }
}

fn lasting_name(number: usize) -> String {
    format!("lasting{number}")
}
