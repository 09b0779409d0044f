//! A file that is overwritten again and again leaves room for what shares its pool.

use anyhow::{Context, Result, ensure};
use filesystem_rig::front_end::ROOT;
use filesystem_rig::mount;
use guest_rig::{Daemon, Form};

const FILE_BYTES: usize = 1 << 20;
/// Bytes that the neighbour writes each time.
const NEIGHBOUR_BYTES: usize = 64 << 10;
/// Versions of the file for each one that the neighbour writes.
const NEIGHBOUR_STEP: u64 = 8;

fn version(number: u64, bytes: usize) -> Vec<u8> {
    let word = number.to_le_bytes();
    word.iter().copied().cycle().take(bytes).collect()
}

#[test]
fn overwriting_one_file_does_not_fill_the_pool() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let args = ["--device-size", "256M", "--preallocation", "off"];
    let daemon = Daemon::start(&dir.path().join("data"), &args)?;
    daemon.cli(&["fs", "create", "tree"])?;
    daemon.cli(&["fs", "create", "neighbour"])?;
    let mut writer = mount(&daemon, "tree")?;
    let mut neighbour = mount(&daemon, "neighbour")?;
    let file = writer.make_file(ROOT, b"file")?;
    let small = neighbour.make_file(ROOT, b"small")?;
    // Several times what the pool holds.
    let versions = Form::of_this_run().pick(800, 8_000);
    let mut last_small = 0;
    for number in 1..=versions {
        let done = writer
            .overwrite(file, &version(number, FILE_BYTES))
            .and_then(|()| writer.sync());
        done.with_context(|| format!("version {number}"))?;
        if number % NEIGHBOUR_STEP == 0 {
            last_small = number;
            let done = neighbour
                .overwrite(small, &version(number, NEIGHBOUR_BYTES))
                .and_then(|()| neighbour.sync());
            done.with_context(|| format!("the neighbour's version {number}"))?;
        }
    }
    let content = writer.read(file, FILE_BYTES)?;
    ensure!(content == version(versions, FILE_BYTES), "another version");
    let content = neighbour.read(small, NEIGHBOUR_BYTES)?;
    ensure!(
        content == version(last_small, NEIGHBOUR_BYTES),
        "another version of the neighbour's"
    );
    let lost = daemon.metric("penstock_filesystem_lost_bytes_total")?;
    ensure!(lost == 0.0, "{lost} bytes were lost");
    Ok(())
}
