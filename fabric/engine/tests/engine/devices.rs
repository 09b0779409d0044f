//! Devices that are not what they should be, and scrubbing.

use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Duration;

use fabric::{FabricConfig, FabricError, Missing, ScrubOrder, ScrubPass, StoreKind};
use fabric_store::error::OpenError;
use fabric_store::file::{Allocation, DeviceError};
use fabric_types::block::BLOCK_BYTES;
use fabric_types::io::IoError;

use super::rig::{Guest, MIB, Rig, open_error, params};

fn with_missing(rig: &Rig, missing: Missing) -> FabricConfig {
    let mut config = rig.config();
    if let StoreKind::Devices(devices) = &mut config.store {
        devices[0].missing = missing;
    }
    config
}

#[test]
fn a_device_of_another_cluster_is_refused() {
    let rig = Rig::new(256 * MIB);
    rig.open().close().unwrap();
    let mut config = rig.config();
    config.cluster = [9; 16];
    let error = open_error(config);
    let other = matches!(
        &error,
        FabricError::Store {
            source: OpenError::OtherCluster { .. },
            ..
        }
    );
    assert!(other, "{error}");
    assert!(
        error.to_string().contains(rig.device.to_str().unwrap()),
        "{error}"
    );
    rig.open();
}

#[test]
fn what_is_not_a_store_is_never_overwritten() {
    let rig = Rig::new(256 * MIB);
    let mut content = vec![0u8; 256 << 20];
    content[510] = 0x55;
    content[511] = 0xaa;
    std::fs::write(&rig.device, &content).unwrap();
    for missing in [
        Missing::FormatBlank,
        Missing::CreateFile {
            size_bytes: MIB,
            allocation: Allocation::Sparse,
        },
    ] {
        let error = open_error(with_missing(&rig, missing));
        assert!(matches!(error, FabricError::NotBlank(_)), "{error}");
    }
    assert!(std::fs::read(&rig.device).unwrap() == content);
}

#[test]
fn a_blank_device_is_formatted_only_if_told_so() {
    let rig = Rig::new(256 * MIB);
    let missing = open_error(with_missing(&rig, Missing::Refuse));
    assert!(
        matches!(missing, FabricError::Device(DeviceError::Missing(_))),
        "{missing}"
    );
    let file = std::fs::File::create(&rig.device).unwrap();
    file.set_len(256 * MIB).unwrap();
    let error = open_error(with_missing(&rig, Missing::Refuse));
    let blank = matches!(
        &error,
        FabricError::Store {
            source: OpenError::NotFormatted,
            ..
        }
    );
    assert!(blank, "{error}");
    fabric::Fabric::open(with_missing(&rig, Missing::FormatBlank)).unwrap();
    fabric::Fabric::open(with_missing(&rig, Missing::Refuse)).unwrap();
}

#[test]
fn damaged_labels_are_told_from_a_blank_device() {
    let rig = Rig::new(256 * MIB);
    rig.open().close().unwrap();
    let file = OpenOptions::new().write(true).open(&rig.device).unwrap();
    let last = 256 * MIB - BLOCK_BYTES as u64;
    for offset in [0, last] {
        file.write_all_at(&[0xff; 16], offset + 64).unwrap();
    }
    let error = open_error(rig.config());
    let damaged = matches!(
        &error,
        FabricError::Store {
            source: OpenError::LabelDamaged { .. },
            ..
        }
    );
    assert!(damaged, "{error}");
}

#[test]
fn device_too_small_for_a_store_is_refused_and_removed() {
    let rig = Rig::new(MIB);
    let error = open_error(rig.config());
    let small = matches!(
        &error,
        FabricError::Store {
            source: OpenError::TooSmall { .. },
            ..
        }
    );
    assert!(small, "{error}");
    assert!(!rig.device.exists());
}

#[test]
fn a_flipped_bit_is_an_error_to_the_reader_and_scrub_finds_it() {
    let rig = Rig::new(256 * MIB);
    let fabric = rig.open();
    let mut guest = Guest::open(&fabric, 1, 1, 16 * MIB);
    guest.write(0, &[0x77; 4 * BLOCK_BYTES]).unwrap();
    let unique: Vec<u8> = (0..BLOCK_BYTES).map(|n| (n * 7 % 253) as u8).collect();
    guest.write(8 * BLOCK_BYTES as u64, &unique).unwrap();
    drop(guest);
    fabric.close().unwrap();
    drop(fabric);
    flip_a_bit_of(&rig.device, &unique);

    let mut config = rig.config();
    config.scrub.enabled = true;
    config.scrub.start_after_seconds = 0;
    let fabric = crate::single_node::open(config);
    let mut guest = Guest::open(&fabric, 1, 2, 16 * MIB);
    let mut block = [0u8; BLOCK_BYTES];
    assert_eq!(
        guest.read(8 * BLOCK_BYTES as u64, &mut block),
        Err(IoError::Corrupt)
    );
    assert!(
        guest
            .read_vec(0, 4 * BLOCK_BYTES)
            .iter()
            .all(|&b| b == 0x77)
    );
    let status = loop {
        let status = fabric.devices().remove(0).scrub;
        if status.passes > 0 {
            break status;
        }
        std::thread::sleep(Duration::from_millis(5));
    };
    assert_eq!(status.bad_blocks, 1);
    assert_eq!(
        (status.findings[0].layer.0, status.findings[0].block),
        (1, 8)
    );
    assert!(status.blocks >= 4, "{}", status.blocks);
}

/// Also where no pass begins by itself.
#[test]
fn a_pass_of_the_scrubber_begins_and_ends_when_somebody_says_so() {
    let rig = Rig::new(256 * MIB);
    let mut config = rig.config();
    // Slow enough that a pass does not end by itself.
    config.scrub.bytes_per_second = 4 * MIB;
    let fabric = crate::single_node::open(config);
    let mut guest = Guest::open(&fabric, 1, 1, 64 * MIB);
    guest.write(0, &vec![5; 48 << 20]).unwrap();
    guest.flush().unwrap();
    let device = fabric.devices()[0].label.device;
    let pass = || fabric.devices().remove(0).scrub_pass;
    assert_eq!(pass(), ScrubPass::Off);
    assert!(!fabric.scrub(&[9; 16], ScrubOrder::Start), "no such device");

    assert!(fabric.scrub(&device, ScrubOrder::Start));
    let until = |is: &dyn Fn(ScrubPass) -> bool| {
        while !is(pass()) {
            std::thread::sleep(Duration::from_millis(5));
        }
    };
    until(&|pass| matches!(pass, ScrubPass::Running { blocks: 1.. }));
    assert!(fabric.scrub(&device, ScrubOrder::Stop));
    until(&|pass| pass == ScrubPass::Off);
    assert_eq!(fabric.devices()[0].scrub.passes, 0);
    drop(guest);
    fabric.close().unwrap();
    drop(fabric);

    // From the beginning, and to the end.
    let fabric = crate::single_node::open(rig.config());
    assert!(fabric.scrub(&device, ScrubOrder::Start));
    while fabric.devices()[0].scrub.passes == 0 {
        std::thread::sleep(Duration::from_millis(5));
    }
    let status = fabric.devices().remove(0);
    assert_eq!(status.scrub_pass, ScrubPass::Off);
    assert!(status.scrub.blocks >= 48 * 256, "{}", status.scrub.blocks);
}

/// Flips one bit of the stored block with this content.
pub fn flip_a_bit_of(device: &Path, block: &[u8]) {
    let content = std::fs::read(device).unwrap();
    let found = content
        .chunks(BLOCK_BYTES)
        .position(|b| b == block)
        .expect("stored once");
    let file = OpenOptions::new().write(true).open(device).unwrap();
    let flipped = [block[100] ^ 4];
    file.write_all_at(&flipped, (found * BLOCK_BYTES + 100) as u64)
        .unwrap();
}

#[test]
fn volume_lies_on_the_devices_of_its_groups_and_is_found_again() {
    let rig = Rig::new(256 * MIB);
    let mut config = rig.config();
    if let StoreKind::Devices(devices) = &mut config.store {
        let mut second = devices[0].clone();
        second.path = rig.device.with_extension("second");
        devices.push(second);
    }
    let fabric = crate::single_node::open(config.clone());
    let before: Vec<_> = fabric.devices().iter().map(|d| d.used_bytes).collect();
    let mut guest = Guest::open(&fabric, 1, 1, 128 * MIB);
    guest.write(0, &vec![4; 64 << 20]).unwrap();
    guest.flush().unwrap();
    let grown = fabric.devices().into_iter().zip(before);
    let grown: Vec<_> = grown.map(|(d, before)| d.used_bytes - before).collect();
    assert!(grown.iter().all(|bytes| *bytes >= 8 * MIB), "{grown:?}");
    drop(guest);
    drop(fabric);
    let fabric = crate::single_node::open(config);
    let volume = fabric.open_volume(&params(1, 2, 128 * MIB)).unwrap();
    let mut guest = Guest::new(&fabric, &volume);
    assert!(guest.read_vec(0, 64 << 20).iter().all(|&b| b == 4));
}

#[test]
fn a_device_file_whose_making_was_cut_is_made_anew() {
    let rig = Rig::new(256 * MIB);
    let mut unfinished = rig.device.clone().into_os_string();
    unfinished.push(".new");
    let unfinished = std::path::PathBuf::from(unfinished);
    for content in [&b""[..], &[1; 8192]] {
        std::fs::write(&unfinished, content).unwrap();
        drop(rig.open());
        assert!(!unfinished.exists());
        std::fs::remove_file(&rig.device).unwrap();
    }
}

/// The device as a process that is killed now leaves it.
fn killed(rig: &Rig) -> Rig {
    let left = Rig::new(rig.size_bytes);
    let status = std::process::Command::new("cp")
        .args(["--sparse=always"])
        .args([&rig.device, &left.device])
        .status();
    assert!(status.unwrap().success());
    left
}

#[test]
fn damage_to_a_block_flushed_right_before_a_kill_is_reported() {
    // Two shards: one flush of the device, and a record of it in each.
    let rig = Rig::new(9 << 30);
    let fabric = rig.open();
    let mut guest = Guest::open(&fabric, 1, 1, 64 * MIB);
    let mark = |chunk: u64| [0xa0 + chunk as u8; BLOCK_BYTES];
    for chunk in 0..8 {
        guest.write(chunk * 4 * MIB, &mark(chunk)).unwrap();
    }
    guest.flush().unwrap();
    let left = killed(&rig);
    let mut damaged = 0;
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .open(&left.device)
        .unwrap();
    let mut block = [0; BLOCK_BYTES];
    let mut at = 0;
    while let Ok(data) = rustix::fs::seek(&file, rustix::fs::SeekFrom::Data(at)) {
        file.read_exact_at(&mut block, data).unwrap();
        if (0..8).any(|chunk| block == mark(chunk)) {
            file.write_all_at(&[block[7] ^ 1], data + 7).unwrap();
            damaged += 1;
        }
        at = data + BLOCK_BYTES as u64;
    }
    assert_eq!(damaged, 8);
    let fabric = left.open();
    let mut guest = Guest::open(&fabric, 1, 2, 64 * MIB);
    for chunk in 0..8 {
        let read = guest.read(chunk * 4 * MIB, &mut block);
        assert_eq!(read, Err(IoError::Corrupt), "chunk {chunk}");
    }
}
