//! Nodes are restarted one after the other, as for an upgrade, and the guest notices nothing.

use anyhow::{Result, ensure};
use cluster_rig::guest::{cluster_with_disk, goes_on, ledger};
use cluster_rig::{Cluster, ClusterOptions, Load, Promise, load};
use guest_rig::paths::penstock_binary;

/// Each node changes what the cluster knows, and all see what the others changed.
fn understand_each_other(cluster: &Cluster, when: &str) -> Result<()> {
    for one in cluster.nodes() {
        let name = format!("{when}-{}", one.number());
        one.daemon().cli(&["volume", "create", &name, "64M"])?;
        for other in cluster.nodes() {
            let volumes = other.daemon().json(&["volume", "list"])?;
            let mut volumes = volumes.as_array().into_iter().flatten();
            ensure!(
                volumes.any(|volume| volume["name"] == name.as_str()),
                "{} does not know volume {name} of {}\n{}",
                other.name(),
                one.name(),
                cluster.report()
            );
        }
    }
    Ok(())
}

#[test]
fn rolling_restart_goes_unnoticed_by_the_guest() -> Result<()> {
    let (mut cluster, socket) = cluster_with_disk(ClusterOptions::new(penstock_binary()?, 3))?;
    let load = Load::start(&socket, ledger());
    goes_on(&cluster, &load, "the start")?;
    for (restarted, killed) in [(2, 3), (3, 2)] {
        cluster.node_mut(restarted)?.restart()?;
        goes_on(&cluster, &load, &format!("the restart of node {restarted}"))?;
        cluster.wait_ready()?;
        understand_each_other(&cluster, &format!("after{restarted}"))?;
        // The replica that was restarted has caught up, and now the other one has to.
        cluster.node_mut(killed)?.kill()?;
        goes_on(&cluster, &load, &format!("kill -9 of node {killed}"))?;
        cluster.node_mut(killed)?.start()?;
        cluster.wait_ready()?;
        goes_on(&cluster, &load, &format!("the return of node {killed}"))?;
    }
    // The driver of this load does not connect again.
    let mut ledger = load.stop()?;
    cluster.node_mut(1)?.restart()?;
    cluster.wait_ready()?;
    load::check(&socket, &mut ledger, Promise::Acknowledged)?;
    understand_each_other(&cluster, "done")
}
