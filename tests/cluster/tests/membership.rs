//! Strangers stay out.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use cluster_rig::{Cluster, ClusterOptions};
use guest_rig::paths::penstock_binary;
use serde_json::Value;

/// A node that stopped is taken for down within seconds.
const DOWN_LIMIT: Duration = Duration::from_secs(60);

fn shown(cluster: &Cluster, node: u8) -> Result<Value> {
    cluster
        .any()?
        .daemon()
        .json(&["node", "show", &format!("node{node}")])
}

#[test]
fn strangers_stay_out() -> Result<()> {
    let mut cluster = Cluster::start(ClusterOptions::new(penstock_binary()?, 2))?;
    let nodes = |cluster: &Cluster| -> Result<usize> {
        let list = cluster.node(1)?.daemon().json(&["node", "list"])?;
        Ok(list.as_array().map_or(0, Vec::len))
    };

    let token = cluster.token()?;
    let third = cluster.add_machine()?;
    cluster.init_or_join(third, "join", &[&token])?;
    cluster.node_mut(third)?.start()?;
    ensure!(nodes(&cluster)? == 3, "the token let nobody in");
    let late = cluster.add_machine()?;
    let refused = cluster.init_or_join(late, "join", &[&token]);
    ensure!(refused.is_err(), "a token was used twice");
    ensure!(nodes(&cluster)? == 3);

    // A node of a cluster of its own, on the same network, that takes itself for node 3 of this one.
    cluster.init_or_join(late, "init", &["--replicas", "1"])?;
    cluster.node_mut(late)?.start()?;
    let foreign = cluster.node(late)?.daemon().cli(&["token", "create"])?;
    let other = cluster.add_machine()?;
    cluster.init_or_join(other, "join", &[foreign.trim()])?;
    ensure!(
        nodes(&cluster)? == 3,
        "a token of another cluster let a node in"
    );

    // Its credentials in the place of node 3's: they are not this node's. (That one with credentials which
    // fit is not let in by the others is tested with forged ones in `penstock/tests/it/cluster/joining.rs`.)
    cluster.node_mut(third)?.stop()?;
    let identity =
        |node: u8| -> Result<_> { Ok(cluster.node(node)?.daemon().data().join("cluster")) };
    let (theirs, ours) = (identity(third)?, identity(other)?);
    for file in ["node.pem", "node.key"] {
        std::fs::copy(ours.join(file), theirs.join(file)).context(file)?;
    }
    ensure!(
        cluster.node_mut(third)?.start().is_err(),
        "node 3 starts with another node's credentials"
    );
    let log = cluster.node(third)?.daemon().log();
    ensure!(log.contains("cannot prove who it is"), "{log}");
    cluster.wait("node 3 is down", DOWN_LIMIT, |cluster| {
        Ok((shown(cluster, third)?["state"] == "down").then_some(()))
    })
}
