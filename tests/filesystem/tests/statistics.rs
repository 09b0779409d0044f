//! `penstock attachment stats` of a filesystem, against what a front end did.

use anyhow::{Result, ensure};
use filesystem_rig::front_end::ROOT;
use filesystem_rig::mount;
use guest_rig::Daemon;

const FILES: u64 = 3;
const FILE_BYTES: u64 = 3 * 4096;

#[test]
fn statistics_of_a_filesystem_count_what_its_guest_did() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let args = ["--device-size", "512M", "--preallocation", "off"];
    let daemon = Daemon::start(&dir.path().join("data"), &args)?;
    daemon.cli(&["fs", "create", "tree"])?;
    let mut front_end = mount(&daemon, "tree")?;
    let stats = || daemon.json(&["attachment", "stats", "tree"]);
    let idle = stats()?;
    ensure!(
        idle["filesystem"] == "tree" && idle["state"] == "connected",
        "{idle}"
    );
    ensure!(
        idle["written_bytes"] == 0 && idle["host"]["lost_bytes"] == 0,
        "{idle}"
    );

    let directory = front_end.make_directory(ROOT, b"d")?;
    let names: Vec<_> = (0..FILES)
        .map(|number| number.to_string().into_bytes())
        .collect();
    front_end.make_files(directory, &names, &[7; FILE_BYTES as usize])?;
    front_end.sync()?;
    let busy = stats()?;
    let requests = busy["requests"].as_array();
    let of = |operation: &str| {
        let mut found = requests.into_iter().flatten();
        let found = found.find(|one| one["operation"] == operation);
        found
            .and_then(|one| one["answered"].as_u64())
            .unwrap_or_default()
    };
    ensure!(of("make") == 1 + FILES, "{busy}");
    ensure!(
        of("write") >= FILES && of("sync") == 1 && of("read") == 0,
        "{busy}"
    );
    ensure!(busy["written_bytes"] == FILES * FILE_BYTES, "{busy}");
    for (class, least) in [("writes", FILES), ("syncs", 1), ("metadata", 1 + FILES)] {
        let seen = &busy[class];
        ensure!(
            seen["requests"].as_u64() >= Some(least) && seen["p99_ns"].as_u64() > Some(0),
            "{class}: {seen}"
        );
    }
    ensure!(busy["reads"]["requests"] == 0, "{busy}");
    ensure!(busy["writes"]["bytes"] == FILES * FILE_BYTES, "{busy}");
    let host = &busy["host"];
    ensure!(
        host["buffered_bytes"] == 0,
        "a sync has made it durable: {busy}"
    );
    ensure!(host["operations"].as_u64() > Some(0), "{busy}");
    ensure!(
        host["lost_bytes"] == 0 && host["write_back_failures"] == 0,
        "{busy}"
    );
    let told = daemon.cli(&["attachment", "stats", "tree"])?;
    for line in ["filesystem   tree", "written      36K", "lost         0"] {
        ensure!(told.lines().any(|found| found == line), "{line}: {told}");
    }
    ensure!(
        told.lines().any(|line| line.starts_with("metadata ")),
        "{told}"
    );
    let timed = daemon.metric("penstock_filesystem_latency_seconds_count")?;
    ensure!(timed >= (FILES + 1 + 1 + FILES) as f64, "{timed}");
    let socket = busy["socket"].as_str().unwrap_or_default();
    ensure!(
        daemon.json(&["attachment", "stats", socket])?["socket"] == socket,
        "{socket}"
    );
    Ok(())
}
