//! The devices of a node: found again, never replaced, never left out.

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::Path;

use serde_json::Value;

use crate::harness::{Daemon, eventually, one_error, serve, serve_with, temp, text};

/// Starts and ends a daemon, so that its device exists.
fn formatted(data: &Path) {
    assert!(Daemon::start(data).terminate().success());
}

/// Bytes of a unit of the on-disk format.
const UNIT_BYTES: u64 = 4096;

/// Overwrites units of a device, and returns what was there.
fn damage(device: &fs::File, units: &[u64]) -> Vec<(u64, Vec<u8>)> {
    let damage = |unit: &u64| {
        let mut before = vec![0; UNIT_BYTES as usize];
        device
            .read_exact_at(&mut before, unit * UNIT_BYTES)
            .unwrap();
        let garbage = [0xa5; UNIT_BYTES as usize];
        device.write_all_at(&garbage, unit * UNIT_BYTES).unwrap();
        (*unit, before)
    };
    units.iter().map(damage).collect()
}

/// Where the superblock of the only shard lies: two slots at its start, their copies at its end.
fn superblocks(device: &fs::File) -> ([u64; 2], [u64; 2]) {
    const SHARD_START: u64 = 256;
    let mut shard_units = [0; 4];
    device.read_exact_at(&mut shard_units, 16).unwrap();
    let end = SHARD_START + u64::from(u32::from_le_bytes(shard_units));
    ([SHARD_START, SHARD_START + 1], [end - 2, end - 1])
}

#[test]
fn corrupt_superblock_stops_the_start_only_if_its_copy_is_too() {
    let dir = temp();
    formatted(dir.path());
    let path = dir.path().join("devices/0.img");
    let device = fs::File::options()
        .read(true)
        .write(true)
        .open(&path)
        .unwrap();
    let (slots, copies) = superblocks(&device);
    damage(&device, &slots);
    formatted(dir.path());
    let before = damage(&device, &[slots, copies].concat());
    let told = one_error(&serve(dir.path()), 1);
    assert!(told.contains(text(&path)), "{told}");
    assert!(told.contains("no valid superblock"), "{told}");
    // Nothing else was written: once the superblock is put back, all is well.
    for (unit, bytes) in before {
        device.write_all_at(&bytes, unit * UNIT_BYTES).unwrap();
    }
    formatted(dir.path());
}

#[test]
fn a_device_of_another_cluster_is_refused() {
    let dir = temp();
    let (ours, theirs) = (dir.path().join("ours"), dir.path().join("theirs"));
    formatted(&ours);
    formatted(&theirs);
    fs::rename(theirs.join("devices/0.img"), ours.join("devices/0.img")).unwrap();
    let told = one_error(&serve(&ours), 1);
    assert!(told.contains("cluster"), "{told}");
    assert!(told.contains(text(&ours.join("devices/0.img"))), "{told}");
}

#[test]
fn a_device_without_its_metadata_is_not_blamed() {
    let dir = temp();
    let (data, disk) = (dir.path().join("data"), dir.path().join("disk.img"));
    let spec = format!("{}:1G", text(&disk));
    for options in [&[][..], &["--device", spec.as_str()]] {
        assert!(Daemon::start_with(&data, options).terminate().success());
        let (meta, kept) = (data.join("meta"), dir.path().join("kept"));
        fs::rename(&meta, &kept).unwrap();
        for emptied in [false, true] {
            if emptied {
                fs::create_dir_all(meta.join("db")).unwrap();
            }
            let told = one_error(&serve_with(&data, options), 1);
            assert!(
                told.contains(text(&meta)) && told.contains("no metadata"),
                "{told}"
            );
            assert!(told.contains("backup"), "{told}");
        }
        // Nothing was made anew: with the metadata back all is well.
        fs::remove_dir_all(&meta).unwrap();
        fs::rename(&kept, &meta).unwrap();
        assert!(Daemon::start_with(&data, options).terminate().success());
        fs::remove_dir_all(&data).unwrap();
    }
}

fn copy_sparse(from: &Path, to: &Path) {
    let mut cp = std::process::Command::new("cp");
    let copied = cp.arg("--sparse=always").args([from, to]).status();
    assert!(copied.unwrap().success());
}

#[test]
fn an_older_copy_of_a_device_is_refused() {
    let dir = temp();
    formatted(dir.path());
    let (device, older) = (dir.path().join("devices/0.img"), dir.path().join("older"));
    copy_sparse(&device, &older);
    let newest = dir.path().join("newest");
    // What a kill leaves is as new.
    for (end, is_killed) in [("a", false), ("b", true)] {
        let daemon = Daemon::start(dir.path());
        daemon.ok(&["volume", "create", end, "64M"]);
        match is_killed {
            true => daemon.kill(),
            false => assert!(daemon.terminate().success()),
        }
        copy_sparse(&device, &newest);
        copy_sparse(&older, &device);
        let told = one_error(&serve(dir.path()), 1);
        let record = dir.path().join("device-uses.json");
        assert!(
            told.contains("is an older copy") && told.contains(text(&device)),
            "{told}"
        );
        assert!(told.contains(text(&record)), "{told}");
        copy_sparse(&newest, &device);
        formatted(dir.path());
        if is_killed {
            copy_sparse(&older, &device);
            fs::remove_file(&record).unwrap();
            formatted(dir.path());
        }
    }
}

#[test]
fn an_older_copy_of_a_device_that_was_added_is_refused() {
    let dir = temp();
    let (data, disk) = (dir.path().join("data"), dir.path().join("disk.img"));
    let daemon = Daemon::start(&data);
    daemon.ok(&["device", "add", &format!("{}:1G", text(&disk))]);
    // Copied while nobody writes to it.
    daemon.kill();
    let copy = dir.path().join("copy.img");
    copy_sparse(&disk, &copy);
    assert!(Daemon::start(&data).terminate().success());
    copy_sparse(&copy, &disk);
    let told = one_error(&serve(&data), 1);
    assert!(
        told.contains("is an older copy") && told.contains(text(&disk)),
        "{told}"
    );
}

#[test]
fn a_lost_device_is_not_replaced_by_an_empty_one() {
    let dir = temp();
    formatted(dir.path());
    let device = dir.path().join("devices/0.img");
    fs::remove_file(&device).unwrap();
    let told = one_error(&serve(dir.path()), 1);
    assert!(told.contains(text(&device)), "{told}");
    assert!(!device.exists());
}

#[test]
fn a_device_that_is_not_named_any_more_stops_the_start() {
    let dir = temp();
    let (data, disk) = (dir.path().join("data"), dir.path().join("disk.img"));
    let spec = format!("{}:1G", text(&disk));
    let daemon = Daemon::start_with(&data, &["--device", &spec]);
    daemon.ok(&["volume", "create", "a", "64M"]);
    assert!(daemon.terminate().success());
    let other = dir.path().join("other.img");
    let other_spec = format!("{}:1G", text(&other));
    for options in [&[][..], &["--device", other_spec.as_str()]] {
        let told = one_error(&serve_with(&data, options), 1);
        assert!(told.contains(text(&disk)), "{told}");
        assert!(told.contains("--device"), "{told}");
        assert!(!data.join("devices/0.img").exists(), "a stray device file");
        assert!(!other.exists(), "a stray device file");
    }
    // Named beside a new one it is well, and so it is at another path.
    let daemon = Daemon::start_with(&data, &["--device", &spec, "--device", &other_spec]);
    assert!(daemon.terminate().success());
    let moved = dir.path().join("moved.img");
    fs::rename(&disk, &moved).unwrap();
    let options = ["--device", text(&moved), "--device", text(&other)];
    let daemon = Daemon::start_with(&data, &options);
    // Groups may be under way to the new device.
    assert!(daemon.ok(&["health"]).starts_with("ok"));
    daemon.ok(&["volume", "show", "a"]);
}

#[test]
fn an_empty_file_in_the_place_of_a_device_is_not_formatted() {
    let dir = temp();
    formatted(dir.path());
    let path = dir.path().join("devices/0.img");
    fs::remove_file(&path).unwrap();
    fs::File::create(&path).unwrap().set_len(1 << 30).unwrap();
    let told = one_error(&serve(dir.path()), 1);
    assert!(told.contains(text(&path)), "{told}");
    assert!(told.contains("blank or was wiped"), "{told}");
    assert_eq!(
        std::os::unix::fs::MetadataExt::blocks(&fs::metadata(&path).unwrap()),
        0
    );
}

#[test]
fn a_device_file_whose_making_was_killed_is_made_anew() {
    let dir = temp();
    let devices = dir.path().join("devices");
    fs::create_dir(&devices).unwrap();
    fs::write(devices.join("0.img.new"), "").unwrap();
    formatted(dir.path());
    let left: Vec<_> = fs::read_dir(&devices).unwrap().collect();
    assert_eq!(left.len(), 1, "{left:?}");
}

#[test]
fn a_device_file_has_its_space_unless_told_otherwise() {
    use std::os::unix::fs::MetadataExt;
    let dir = temp();
    let (thick, thin) = (dir.path().join("thick"), dir.path().join("thin"));
    formatted(&thick);
    let daemon = Daemon::start_with(&thin, &["--preallocation", "off"]);
    assert!(daemon.terminate().success());
    let taken = |data: &Path| {
        let found = fs::metadata(data.join("devices/0.img")).unwrap();
        assert_eq!(found.len(), 1 << 30);
        found.blocks() * 512
    };
    assert!(taken(&thick) >= 1 << 30);
    assert!(taken(&thin) < 512 << 20);
}

#[test]
fn the_directory_of_a_named_device_is_not_made() {
    let dir = temp();
    let (data, disk) = (
        dir.path().join("data"),
        dir.path().join("unmounted/disk.img"),
    );
    let spec = format!("{}:1G", text(&disk));
    let told = one_error(&serve_with(&data, &["--device", &spec]), 1);
    assert!(told.contains("there is no directory"), "{told}");
    assert!(!dir.path().join("unmounted").exists());
}

#[test]
fn a_read_that_fails_its_checksum_shows_in_health() {
    let dir = temp();
    let (data, image) = (dir.path().join("data"), dir.path().join("in.raw"));
    let block = [0x5a; UNIT_BYTES as usize];
    fs::write(&image, block.repeat(64)).unwrap();
    let daemon = Daemon::start(&data);
    daemon.ok(&["volume", "import", "a", text(&image)]);
    assert_eq!(daemon.ok(&["health"]), "ok\n");
    assert!(daemon.terminate().success());

    let device = fs::File::options()
        .read(true)
        .write(true)
        .open(data.join("devices/0.img"))
        .unwrap();
    let mut unit = [0; UNIT_BYTES as usize];
    let holds = |at: &u64| {
        device.read_exact_at(&mut unit, at * UNIT_BYTES).unwrap();
        unit == block
    };
    let at = (0..).find(holds).unwrap();
    damage(&device, &[at]);

    let daemon = Daemon::start(&data);
    let out = dir.path().join("out.raw");
    let refused = daemon.refused(&["volume", "export", "a", text(&out)]);
    assert!(refused.contains("--skip-bad"), "{refused}");
    let list = dir.path().join("skipped");
    let skipping = [
        "volume",
        "export",
        "a",
        text(&out),
        "--skip-bad",
        text(&list),
    ];
    daemon.ok(&skipping);
    let told = fs::read_to_string(&list).unwrap();
    let ranges: Vec<&str> = told.lines().filter(|line| !line.starts_with('#')).collect();
    let [range] = ranges[..] else {
        panic!("{told}")
    };
    let (offset, len) = range.split_once(' ').unwrap();
    assert_eq!(len, "4096");
    let bad = offset.parse::<usize>().unwrap() / UNIT_BYTES as usize;
    for (number, got) in fs::read(&out).unwrap().chunks(block.len()).enumerate() {
        let wanted = if number == bad {
            [0; UNIT_BYTES as usize]
        } else {
            block
        };
        assert!(got == wanted, "block {number}");
    }
    let again = [
        "volume",
        "export",
        "a",
        text(&out),
        "--force",
        "--skip-bad",
        text(&list),
    ];
    let refused = daemon.refused(&again);
    assert!(
        refused.contains("name a new file for the list"),
        "{refused}"
    );
    let health = daemon.run(&["health"]);
    assert_eq!(health.status.code(), Some(1));
    let told = String::from_utf8(health.stdout).unwrap();
    let whose = format!("1 that no other replica could give: volume 'a' at byte {offset}");
    assert!(told.contains(&whose), "{told}");
    let kinds = || -> Vec<String> {
        let events = daemon.ok(&["events", "--json"]);
        let events = events
            .lines()
            .map(|line| serde_json::from_str::<Value>(line).unwrap());
        let told = events.map(|event| format!("{} {}", event["kind"], event["text"]));
        told.filter(|told| told.starts_with("\"data_damaged\""))
            .collect()
    };
    eventually(|| kinds().iter().any(|told| told.contains(&whose)));
    assert_eq!(kinds().len(), 1, "{:?}", kinds());

    // A device is read through at an operator's word, and what was found stays found.
    let path = text(&data.join("devices/0.img")).to_owned();
    let scrub = || daemon.json(&["device", "scrub", "status"])[0].clone();
    daemon.ok(&["device", "scrub", "start"]);
    eventually(|| scrub()["scrub"]["passes"].as_u64() > Some(0));
    assert_eq!(scrub()["scrub"]["bad"], 1, "{}", scrub());
    daemon.ok(&["device", "scrub", "start", &path]);
    daemon.ok(&["device", "scrub", "stop", &path]);
    assert_eq!(scrub()["scrub"]["state"], "resting", "{}", scrub());
    let table = daemon.ok(&["device", "scrub", "status"]);
    assert!(
        table.contains("BAD NOW") && table.contains(&path),
        "{table}"
    );
    daemon.refused(&["device", "scrub", "start", "/nonexistent"]);

    // With what it lay in gone, nothing is damaged.
    daemon.ok(&["volume", "delete", "a", "--yes"]);
    eventually(|| daemon.run(&["health"]).stdout == b"ok\n");
}
