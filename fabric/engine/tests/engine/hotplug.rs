//! Devices that are added and removed while threads work on the others.

use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use fabric::{DeviceConfig, Fabric, FabricError, Missing, ScrubOrder};
use fabric_store::file::Allocation;
use fabric_types::Epoch;
use fabric_types::block::BLOCK_BYTES;
use fabric_types::ids::LayerId;
use fabric_types::io::Engine;

use super::devices::flip_a_bit_of;
use super::rig::{Guest, MIB, Rig, params};
use crate::single_node::{layer_of_pool_1, place_on};

/// Devices of a node, see the store's executor.
const DEVICES_MAX: usize = 16;
/// After which a test hangs.
const WAIT_MAX: Duration = Duration::from_secs(30);

fn made(path: PathBuf, size_bytes: u64) -> DeviceConfig {
    let missing = Missing::CreateFile {
        size_bytes,
        allocation: Allocation::Sparse,
    };
    DeviceConfig { path, missing }
}

fn used(fabric: &Fabric) -> Vec<u64> {
    let devices = fabric.devices();
    devices.iter().map(|device| device.used_bytes).collect()
}

/// Waits until nobody has a device open to write it, be it a ring in whose table it stands: only then does
/// the kernel grant a lease for reads.
fn wait_closed(path: &Path) {
    let file = std::fs::File::open(path).unwrap();
    let start = Instant::now();
    // SAFETY: the descriptor is open, and the call takes a number.
    while unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETLEASE, libc::F_RDLCK) } != 0 {
        let error = std::io::Error::last_os_error();
        assert!(start.elapsed() < WAIT_MAX, "{}: {error}", path.display());
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Ends other threads, also when this one panics.
struct Ends<'a>(&'a AtomicBool);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

/// Writes, flushes and reads back until told to stop.
fn write_on(guest: &mut Guest, stop: &AtomicBool) {
    let mut round = 0u8;
    while !stop.load(Ordering::Acquire) {
        round = round.wrapping_add(1);
        let at = u64::from(round) * 8192;
        guest.write(at, &[round; BLOCK_BYTES]).unwrap();
        guest.flush().unwrap();
        let back = guest.read_vec(at, BLOCK_BYTES);
        assert!(back.iter().all(|byte| *byte == round));
    }
}

/// What a data thread does that has nothing to do: it sleeps, and looks when it is woken.
fn idle_on(guest: &mut Guest, stop: &AtomicBool) {
    while !stop.load(Ordering::Acquire) {
        if guest.engine.must_reap() {
            guest.engine.reap(&mut |_, _| panic!("it asked nothing"));
        } else {
            super::rig::wait_up_to(&guest.engine, Duration::from_millis(100));
        }
    }
}

/// Adds a device to a fabric with a thread at work, and places groups and a volume on it. Returns its
/// identity.
fn add_and_use(fabric: &Fabric, second: &Path) -> [u8; 16] {
    let added = fabric.add_device(&made(second.into(), 512 * MIB)).unwrap();
    assert_eq!(fabric.devices()[1].label, added.label);
    let before = used(fabric)[1];
    let layer = layer_of_pool_1(3);
    let volume = fabric.open_volume(&params(layer, 1, 64 * MIB)).unwrap();
    let mut guest = Guest::new(fabric, &volume);
    guest.write(0, &vec![3; 32 << 20]).unwrap();
    guest.flush().unwrap();
    assert!(used(fabric)[1] < before + MIB, "no map places groups there");

    place_on(fabric, Epoch(2), [&[0], &[1]]);
    let layer = layer_of_pool_1(4);
    let volume = fabric.open_volume(&params(layer, 1, 64 * MIB)).unwrap();
    let mut guest = Guest::new(fabric, &volume);
    guest.write(0, &vec![4; 32 << 20]).unwrap();
    guest.flush().unwrap();
    let back = guest.read_vec(0, 32 << 20);
    assert!(back.iter().all(|byte| *byte == 4));
    assert!(used(fabric)[1] >= before + 32 * MIB);
    added.label.device
}

fn empty_and_remove(fabric: &Fabric, device: [u8; 16], second: &Path) {
    fabric.delete_volume(LayerId(layer_of_pool_1(4))).unwrap();
    place_on(fabric, Epoch(3), [&[0], &[0]]);
    fabric.remove_device(&device);
    assert_eq!(fabric.devices().len(), 1);
    wait_closed(second);
    fabric.checkpoint().unwrap();
}

#[test]
fn a_device_is_added_and_removed_while_threads_work() {
    let rig = Rig::new(256 * MIB);
    let second = rig.device.with_extension("second");
    let fabric = rig.open();
    let mut writer = Guest::open(&fabric, 1, 1, 16 * MIB);
    let other = fabric.open_volume(&params(2, 1, 16 * MIB)).unwrap();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| write_on(&mut writer, &stop));
        let _ends = Ends(&stop);
        let device = add_and_use(&fabric, &second);
        let mut idle = Guest::new(&fabric, &other);
        scope.spawn({
            let stop = &stop;
            move || idle_on(&mut idle, stop)
        });
        empty_and_remove(&fabric, device, &second);
    });
    // What lies there is a store, which may be added again. A thread that was there before works on it.
    let again = DeviceConfig {
        path: second,
        missing: Missing::Refuse,
    };
    fabric.add_device(&again).unwrap();
    place_on(&fabric, Epoch(4), [&[1], &[1]]);
    let before = used(&fabric)[1];
    writer.volume = fabric.open_volume(&params(5, 1, 16 * MIB)).unwrap();
    writer.write(0, &vec![5; 8 << 20]).unwrap();
    writer.flush().unwrap();
    assert!(writer.read_vec(0, 8 << 20).iter().all(|byte| *byte == 5));
    assert!(used(&fabric)[1] >= before + 8 * MIB);
    drop(writer);
    fabric.close().unwrap();
}

#[test]
fn what_cannot_be_added_changes_nothing() {
    let rig = Rig::new(256 * MIB);
    let fabric = rig.open();
    let place = |number: usize| rig.device.with_extension(number.to_string());
    let full = place(0);
    std::fs::write(&full, vec![7; 8 << 20]).unwrap();
    let blank = |path: &Path| DeviceConfig {
        path: path.to_owned(),
        missing: Missing::FormatBlank,
    };
    let error = fabric.add_device(&blank(&full)).unwrap_err();
    assert!(matches!(error, FabricError::NotBlank(_)), "{error}");
    let error = fabric.add_device(&blank(&place(1))).unwrap_err();
    assert!(matches!(error, FabricError::Device(_)), "{error}");
    assert_eq!(fabric.devices().len(), 1);

    // Those that were removed count, too.
    for number in 1..DEVICES_MAX {
        let added = fabric.add_device(&made(place(number), 256 * MIB)).unwrap();
        fabric.remove_device(&added.label.device);
    }
    let last = place(DEVICES_MAX);
    let error = fabric
        .add_device(&made(last.clone(), 256 * MIB))
        .unwrap_err();
    assert!(matches!(error, FabricError::NoPlace(_)), "{error}");
    assert!(error.to_string().contains("restart"), "{error}");
    assert!(!last.exists());
    assert_eq!(fabric.devices().len(), 1);
    let mut guest = Guest::open(&fabric, 1, 1, 16 * MIB);
    guest.write(0, &[1; BLOCK_BYTES]).unwrap();
    guest.flush().unwrap();
    drop(guest);
    fabric.close().unwrap();
}

#[test]
fn the_scrubber_verifies_a_device_that_was_added() {
    let rig = Rig::new(256 * MIB);
    let mut config = rig.config();
    config.scrub.enabled = false;
    let fabric = crate::single_node::open(config);
    let second = rig.device.with_extension("second");
    let added = fabric.add_device(&made(second.clone(), 512 * MIB)).unwrap();
    place_on(&fabric, Epoch(2), [&[1], &[1]]);
    let mut guest = Guest::open(&fabric, 1, 1, 64 * MIB);
    guest.write(0, &vec![4; 4 << 20]).unwrap();
    let unique: Vec<u8> = (0..BLOCK_BYTES).map(|n| (n * 7 % 253) as u8).collect();
    guest.write(8 * BLOCK_BYTES as u64, &unique).unwrap();
    guest.flush().unwrap();
    flip_a_bit_of(&second, &unique);
    assert!(fabric.scrub(&added.label.device, ScrubOrder::Start));
    let start = Instant::now();
    let status = loop {
        let status = fabric.devices().remove(1).scrub;
        if status.passes > 0 {
            break status;
        }
        assert!(start.elapsed() < WAIT_MAX, "{status:?}");
        std::thread::sleep(Duration::from_millis(5));
    };
    assert!(status.blocks + status.bad_blocks >= 1024, "{status:?}");
    let found: Vec<_> = status.findings.iter().map(|one| one.block).collect();
    assert_eq!((status.bad_blocks, found), (1, vec![8]));
}
