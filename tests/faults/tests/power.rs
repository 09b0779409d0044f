//! The device through the kernel: as the daemon uses it, with O_DIRECT and io_uring.

use std::fs::{File, OpenOptions};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};

use anyhow::{Result, ensure};
use fault_rig::{PoweredDevice, Survival};
use io_uring::{IoUring, opcode, types};

const BLOCK: usize = 4096;
const BYTES: u64 = 16 << 20;

/// A block of memory that O_DIRECT takes.
#[repr(align(4096))]
struct Page([u8; BLOCK]);

fn open(device: &PoweredDevice) -> Result<File> {
    Ok(OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags(libc::O_DIRECT)
        .open(device.path())?)
}

fn ring_write(file: &File, offset: u64, page: &Page) -> Result<i32> {
    let mut ring = IoUring::new(4)?;
    let write = opcode::Write::new(types::Fd(file.as_raw_fd()), page.0.as_ptr(), BLOCK as u32)
        .offset(offset)
        .build();
    // SAFETY: the page and the file outlive the request, which is waited for below.
    unsafe { ring.submission().push(&write)? };
    ring.submit_and_wait(1)?;
    let entry = ring.completion().next();
    Ok(entry.map_or(0, |entry| entry.result()))
}

fn first_byte(file: &File, offset: u64) -> Result<u8> {
    let mut page = Box::new(Page([0; BLOCK]));
    file.read_exact_at(&mut page.0, offset)?;
    ensure!(page.0.iter().all(|byte| *byte == page.0[0]), "a torn block");
    Ok(page.0[0])
}

#[test]
fn what_was_synced_survives_and_what_was_not_is_gone() -> Result<()> {
    let scratch = tempfile::tempdir()?;
    let device = PoweredDevice::new(scratch.path(), BYTES)?;
    let file = open(&device)?;
    ensure!(file.metadata()?.len() == BYTES);
    assert_eq!(ring_write(&file, 0, &Page([1; BLOCK]))?, BLOCK as i32);
    file.sync_data()?;
    assert_eq!(ring_write(&file, 0, &Page([2; BLOCK]))?, BLOCK as i32);
    assert_eq!(ring_write(&file, 8192, &Page([3; BLOCK]))?, BLOCK as i32);
    assert_eq!(first_byte(&file, 0)?, 2);
    assert_eq!(device.cut(Survival::Nothing)?, 2);

    // Who had it open when the power went has lost it.
    assert!(ring_write(&file, 0, &Page([4; BLOCK]))? < 0);
    assert!(file.sync_data().is_err());
    let file = open(&device)?;
    assert_eq!(first_byte(&file, 0)?, 1);
    assert_eq!(first_byte(&file, 8192)?, 0);
    drop(file);

    drop(device);
    let device = PoweredDevice::new(scratch.path(), BYTES)?;
    assert_eq!(first_byte(&open(&device)?, 0)?, 1);
    Ok(())
}

#[test]
fn a_large_write_is_one_device_full_of_blocks() -> Result<()> {
    const LARGE: usize = 1 << 20;
    let scratch = tempfile::tempdir()?;
    let device = PoweredDevice::new(scratch.path(), BYTES)?;
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .open(device.path())?;
    let data: Vec<u8> = (0..LARGE).map(|index| (index / BLOCK) as u8 | 1).collect();
    file.write_all_at(&data, 3 << 20)?;
    assert_eq!(device.unflushed_blocks(), LARGE / BLOCK);
    let lost = device.cut(Survival::Random(1))?;
    ensure!((1..LARGE / BLOCK).contains(&lost), "{lost} blocks lost");
    let file = open(&device)?;
    let kept = (0..LARGE / BLOCK).filter(|block| {
        first_byte(&file, (3 << 20) + (block * BLOCK) as u64).is_ok_and(|byte| byte != 0)
    });
    assert_eq!(kept.count() + lost, LARGE / BLOCK);
    Ok(())
}
