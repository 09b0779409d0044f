//! Data move between the devices of a node while it serves.

use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use cluster_rig::guest::{check, cluster_with_disk, devices, goes_on, ledger};
use cluster_rig::{Cluster, ClusterOptions, Load};
use guest_rig::paths::penstock_binary;

/// Copies move within this: some hundred megabytes, beside a load, on a busy machine.
const MOVED_LIMIT: Duration = Duration::from_secs(240);
const MIB: usize = 1 << 20;

fn wait_well(cluster: &Cluster) -> Result<()> {
    cluster.wait("all nodes are well", MOVED_LIMIT, |cluster| {
        let running = cluster.nodes().iter().map(|node| node.daemon());
        let mut running = running.filter(|daemon| daemon.is_started());
        let well = running.all(|daemon| daemon.cli(&["health"]).is_ok_and(|told| told == "ok\n"));
        Ok((well && cluster.is_ready()?).then_some(()))
    })
}

/// Gives a node a second device, which takes its share of the groups at once. The numbers of both.
fn add_device(cluster: &Cluster, load: &Load, node: u8) -> Result<[u64; 2]> {
    let path = cluster.directory().join("second.img");
    let spec = format!("{}:4G", path.display());
    let daemon = cluster.node(node)?.daemon();
    let pid = daemon.pid()?;
    daemon.cli(&["device", "add", &spec])?;
    goes_on(cluster, load, "a second device")?;
    wait_well(cluster)?;
    ensure!(daemon.pid()? == pid, "the daemon was started again");
    let found = devices(cluster, 1, node)?;
    let number = |is_new: bool| {
        let mut all = found.iter();
        let one = all.find(|one| (one["path"].as_str() == path.to_str()) == is_new);
        let one = one.with_context(|| format!("{found:?}"))?;
        ensure!(one["groups"].as_u64() > Some(100), "{one}");
        one["id"].as_u64().context("a device has no number")
    };
    Ok([number(false)?, number(true)?])
}

/// A volume of one copy, some of whose groups are on each device.
fn single_copy(cluster: &Cluster) -> Result<PathBuf> {
    let image = cluster.directory().join("single.img");
    let mut state = 1u64;
    let data = (0..32 * MIB).map(|_| {
        state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
        (state >> 56) as u8
    });
    std::fs::write(&image, data.collect::<Vec<u8>>()).context("write an image")?;
    let daemon = cluster.node(1)?.daemon();
    daemon.cli(&["pool", "create", "single", "--replicas", "1"])?;
    daemon.cli(&["volume", "create", "single", "32M", "--pool", "single"])?;
    let image_path = image.display().to_string();
    daemon.cli(&["volume", "import", "single", &image_path, "--yes"])?;
    Ok(image)
}

fn exported(cluster: &Cluster, image: &Path) -> Result<()> {
    let copy = cluster.directory().join("copy.img");
    let daemon = cluster.node(2)?.daemon();
    daemon.cli(&["volume", "export", "single", &copy.display().to_string()])?;
    let read = |path: &Path| std::fs::read(path).with_context(|| path.display().to_string());
    ensure!(
        read(image)? == read(&copy)?,
        "the volume of one copy has changed"
    );
    std::fs::remove_file(copy).context("remove the copy")
}

/// Waits until a device has been emptied and forgotten.
fn wait_gone(cluster: &Cluster, node: u8, device: u64) -> Result<()> {
    cluster.wait("a device is empty and forgotten", MOVED_LIMIT, |cluster| {
        let left = devices(cluster, 1, node)?;
        Ok((!left.iter().any(|one| one["id"] == device)).then_some(()))
    })
}

/// Whether nobody has a file open to write it, be it the kernel for an io_uring: then it grants a lease for
/// reads.
fn is_closed(path: &Path) -> Result<bool> {
    let file = std::fs::File::open(path)?;
    // SAFETY: the descriptor is open, and the call takes a number.
    Ok(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETLEASE, libc::F_RDLCK) == 0 })
}

#[test]
fn device_drains_into_another_of_its_node_while_serving() -> Result<()> {
    let (cluster, socket) = cluster_with_disk(ClusterOptions::new(penstock_binary()?, 3))?;
    let load = Load::start(&socket, ledger());
    goes_on(&cluster, &load, "the start")?;
    let [old, _] = add_device(&cluster, &load, 3)?;
    let image = single_copy(&cluster)?;
    cluster
        .node(1)?
        .daemon()
        .cli(&["device", "remove", &old.to_string(), "--yes"])?;
    goes_on(&cluster, &load, "removing the first device")?;
    wait_gone(&cluster, 3, old)?;
    goes_on(&cluster, &load, "the first device is gone")?;
    wait_well(&cluster)?;
    let first = cluster.node(3)?.daemon().data().join("devices/0.img");
    cluster.wait("the disk can be pulled out", MOVED_LIMIT, |_| {
        Ok(is_closed(&first)?.then_some(()))
    })?;
    let log = cluster.node(3)?.daemon().log();
    // Since it has both: when it stopped, openraft may have had an error of its own to tell.
    let since = log.rsplit("penstock: ready").next().unwrap_or(&log);
    ensure!(
        !since.contains("ERROR"),
        "node 3 tells of errors\n{}",
        cluster.report()
    );
    exported(&cluster, &image)?;
    check(&cluster, &socket, load)
}

#[test]
fn killed_node_resumes_moving_its_data_between_devices() -> Result<()> {
    let (mut cluster, socket) = cluster_with_disk(ClusterOptions::new(penstock_binary()?, 3))?;
    let load = Load::start(&socket, ledger());
    goes_on(&cluster, &load, "the start")?;
    let [_, new] = add_device(&cluster, &load, 3)?;
    let image = single_copy(&cluster)?;
    let held = |cluster: &Cluster| -> Result<u64> {
        let all = devices(cluster, 1, 3)?;
        let one = all.iter().find(|one| one["id"] == new);
        one.and_then(|one| one["groups_left"].as_u64())
            .with_context(|| format!("{all:?}"))
    };
    cluster
        .node(1)?
        .daemon()
        .cli(&["device", "remove", &new.to_string(), "--yes"])?;
    let before = held(&cluster)?;
    cluster.wait("some groups have moved", MOVED_LIMIT, |cluster| {
        Ok((held(cluster)? + 20 < before).then_some(()))
    })?;
    cluster.node_mut(3)?.kill()?;
    goes_on(&cluster, &load, "kill -9 of node 3")?;
    cluster.node_mut(3)?.start()?;
    goes_on(&cluster, &load, "node 3 is back")?;
    wait_gone(&cluster, 3, new)?;
    wait_well(&cluster)?;
    exported(&cluster, &image)?;
    check(&cluster, &socket, load)
}
