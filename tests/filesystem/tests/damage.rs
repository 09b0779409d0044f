//! Damaged data of files are told by the names that people gave.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use filesystem_rig::front_end::ROOT;
use filesystem_rig::mount;
use guest_rig::Daemon;
use guest_rig::process::wait_until;

const BLOCK_BYTES: usize = 4096;
/// Blocks of the file, and which of them is damaged.
const BLOCKS: u8 = 3;
const DAMAGED: u8 = 2;
const LIMIT: Duration = Duration::from_secs(60);

/// What a block of the file holds.
fn content(block: u8) -> [u8; BLOCK_BYTES] {
    [0xa0 | block; BLOCK_BYTES]
}

/// Turns a bit over wherever a device has this block.
fn damage(device: &File, block: &[u8; BLOCK_BYTES]) -> Result<()> {
    let (mut unit, mut turned) = ([0; BLOCK_BYTES], 0);
    for at in (0..device.metadata()?.len()).step_by(BLOCK_BYTES) {
        device.read_exact_at(&mut unit, at)?;
        if unit == *block {
            device.write_all_at(&[block[0] ^ 1], at)?;
            turned += 1;
        }
    }
    ensure!(turned > 0, "the device does not have the block");
    Ok(())
}

#[test]
fn a_damaged_file_is_told_by_its_path_and_offset() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let args = ["--device-size", "512M", "--preallocation", "off"];
    let mut daemon = Daemon::start(&dir.path().join("data"), &args)?;
    daemon.cli(&["fs", "create", "tree"])?;
    let mut front_end = mount(&daemon, "tree")?;
    let above = front_end.make_directory(ROOT, b"above")?;
    let directory = front_end.make_directory(above, b"a b")?;
    let blocks: Vec<u8> = (0..BLOCKS).flat_map(content).collect();
    front_end.make_files(directory, &[b"weights.bin".to_vec()], &blocks)?;
    front_end.make_files(directory, &[b"other".to_vec()], &[1; BLOCK_BYTES])?;
    front_end.sync()?;
    drop(front_end);
    daemon.stop()?;

    let image = daemon.data().join("devices/0.img");
    let device = File::options().read(true).write(true).open(image)?;
    damage(&device, &content(DAMAGED))?;
    daemon.start_again()?;
    daemon.cli(&["device", "scrub", "start"])?;
    let offset = usize::from(DAMAGED) * BLOCK_BYTES;
    let whose = format!("file '/above/a b/weights.bin' of filesystem 'tree' at byte {offset}");
    let told = || -> Result<[String; 2]> {
        let health = daemon.json(&["status"])?["health"].to_string();
        let events = daemon.cli(&["events", "--json"])?;
        Ok([health, events])
    };
    let is_told = || {
        Ok(told()?
            .iter()
            .all(|told| told.contains(&whose))
            .then_some(()))
    };
    wait_until(LIMIT, is_told).with_context(|| format!("{whose}: {:?}", told()))?;
    Ok(())
}
