//! Devices that have no room left.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use cluster_rig::{Cluster, ClusterOptions, Requests};
use guest_rig::paths::penstock_binary;
use serde_json::Value;

/// An import that finds no room ends within this: far sooner than it would for another reason.
const REPORT_LIMIT: Duration = Duration::from_secs(50);
/// What was imported in vain is gone, and all copies are there again, within this.
const ROOM_LIMIT: Duration = Duration::from_secs(180);
const MIB: u64 = 1 << 20;
/// What a guest writes at a time.
const BLOCK: u64 = 4096;

/// An image that no device can make smaller.
fn image(cluster: &Cluster, name: &str, mib: u64) -> Result<PathBuf> {
    let path = cluster.directory().join(name);
    let mut state = mib;
    let data = (0..mib * MIB / 8).flat_map(|_| {
        state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
        state.to_le_bytes()
    });
    std::fs::write(&path, data.collect::<Vec<u8>>()).context("write an image")?;
    Ok(path)
}

fn import(cluster: &Cluster, node: u8, name: &str, image: &Path) -> Result<()> {
    let image = image.display().to_string();
    let daemon = cluster.node(node)?.daemon();
    daemon.cli(&["volume", "import", name, &image]).map(drop)
}

/// Devices of different sizes fill one after the other. No replica is taken out because its device is full:
/// the import's writes wait for it, and an import gives up sooner than a guest.
#[test]
fn an_import_that_finds_no_room_says_so_and_leaves_nothing() -> Result<()> {
    let mut options = ClusterOptions::new(penstock_binary()?, 3);
    options.device_bytes = 150 * MIB;
    let mut cluster = Cluster::start(options)?;
    cluster.set_device_bytes(20 * MIB);
    cluster.join()?;
    cluster.wait_ready()?;

    let (keep, big) = (image(&cluster, "keep", 40)?, image(&cluster, "big", 200)?);
    import(&cluster, 1, "keep", &keep)?;
    let begin = Instant::now();
    let refused = import(&cluster, 2, "big", &big);
    let took = begin.elapsed();
    let told = format!("{:#}", refused.err().context("there was room for it")?);
    ensure!(told.contains("no space left"), "{told}");
    ensure!(
        told.contains("is full") && told.contains("of node node"),
        "no device is named: {told}"
    );
    ensure!(
        took < REPORT_LIMIT,
        "it took {took:?}\n{}",
        cluster.report()
    );

    // Nobody has to do anything about it.
    cluster.wait("all nodes are well again", ROOM_LIMIT, |cluster| {
        let mut daemons = cluster.nodes().iter().map(|node| node.daemon());
        let well = daemons.all(|daemon| daemon.cli(&["health"]).is_ok_and(|told| told == "ok\n"));
        Ok((well && cluster.is_ready()?).then_some(()))
    })?;
    let daemon = cluster.node(3)?.daemon();
    let volumes = daemon.json(&["volume", "list"])?;
    let names: Vec<&str> = volumes
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(|v| v["name"].as_str())
        .collect();
    ensure!(names == ["keep"], "{volumes}");
    import(&cluster, 4, "again", &keep)?;
    for name in ["keep", "again"] {
        let copy = cluster.directory().join("copy");
        daemon.cli(&[
            "volume",
            "export",
            name,
            &copy.display().to_string(),
            "--force",
        ])?;
        ensure!(
            std::fs::read(&copy)? == std::fs::read(&keep)?,
            "volume {name} has changed"
        );
    }
    Ok(())
}

/// Nothing comes and goes while a write waits, and the pool is told as full.
fn little_is_told(cluster: &Cluster) -> Result<()> {
    let daemon = cluster.node(1)?.daemon();
    let events = daemon.cli(&["events", "--json", "--since", "1h"])?;
    let kinds = events.lines().map(serde_json::from_str::<Value>);
    let kinds = kinds.collect::<Result<Vec<Value>, _>>()?;
    let first_write = kinds
        .iter()
        .position(|event| event["kind"] == "volume_on_full_set");
    let since = &kinds[first_write.context("it was not told")?..];
    ensure!(since.len() < 10, "{} events: {since:?}", since.len());
    cluster.wait("it is told as full", REPORT_LIMIT, |_| {
        let events = daemon.cli(&["events"])?;
        let told = "pool default is full: writes find no space on a device";
        Ok(events.contains(told).then_some(()))
    })
}

/// What fills the devices need not be an import.
#[test]
fn full_devices_are_named_by_all_nodes_and_deleting_frees_them() -> Result<()> {
    let mut options = ClusterOptions::new(penstock_binary()?, 3);
    options.device_bytes = 100 * MIB;
    let cluster = Cluster::start(options)?;
    for (name, mib) in [("most", 58), ("more", 28)] {
        import(&cluster, 1, name, &image(&cluster, name, mib)?)?;
    }
    let socket = cluster.node(1)?.daemon().disk("disk", "64M", 1)?;
    // A minute otherwise, twice.
    let set = ["volume", "set", "disk", "--on-full", "wait:3"];
    cluster.node(1)?.daemon().cli(&set)?;
    let mut guest = Requests::connect(&socket)?;
    // The first that finds no space waits before it fails.
    let mut longest = Duration::ZERO;
    let mut fits = |at: &u64| {
        let begin = Instant::now();
        let is_written = guest.write(at * BLOCK).is_ok();
        longest = longest.max(begin.elapsed());
        is_written
    };
    let refused = (0..64 * MIB / BLOCK).find(|at| !fits(at));
    let refused = refused.context("there was room for all of it")?;
    drop(guest);
    ensure!(
        longest >= Duration::from_secs(3),
        "it was refused after {longest:?}"
    );
    little_is_told(&cluster)?;
    for node in cluster.nodes() {
        cluster.wait("full devices are named", REPORT_LIMIT, |_| {
            let status = node.daemon().json(&["status"])?;
            Ok(status["health"]
                .to_string()
                .contains("is full")
                .then_some(()))
        })?;
    }
    cluster
        .node(2)?
        .daemon()
        .cli(&["volume", "delete", "most", "--yes"])?;
    cluster.wait("what was deleted is room", ROOM_LIMIT, |_| {
        let mut guest = Requests::connect(&socket)?;
        Ok(guest.write(refused * BLOCK).is_ok().then_some(()))
    })?;
    cluster.wait("nothing is full", ROOM_LIMIT, |cluster| {
        let mut daemons = cluster.nodes().iter().map(|node| node.daemon());
        Ok(daemons
            .all(|daemon| daemon.cli(&["health"]).is_ok())
            .then_some(()))
    })
}
