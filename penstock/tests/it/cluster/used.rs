//! How much of a volume is in use, of several nodes that each know a part.

use std::fs;

use super::Cluster;
use crate::harness::{Daemon, eventually, text};

const MIB: u64 = 1 << 20;

/// Bytes in use of a volume; none if a node does not know.
fn used(daemon: &Daemon, name: &str) -> Option<u64> {
    let listed = daemon.json(&["volume", "list"]);
    let mut listed = listed.as_array().unwrap().iter();
    let volume = listed.find(|volume| volume["name"] == name).unwrap();
    volume["used_bytes"].as_u64()
}

#[test]
fn used_bytes_count_one_copy_and_stay_right_without_a_node() {
    let mut cluster = Cluster::of_three();
    let import = |cluster: &Cluster, name: &str, mib: u64| {
        let image = cluster.dir.path().join(name);
        fs::write(&image, vec![0x5a; (mib * MIB) as usize]).unwrap();
        cluster
            .node(1)
            .ok(&["volume", "import", name, text(&image)]);
    };
    import(&cluster, "a", 10);
    for node in 1..=3 {
        eventually(|| used(cluster.node(node), "a") == Some(10 * MIB));
    }
    cluster.kill(3);
    import(&cluster, "b", 3);
    // What is told may be old, or not known. It is never a part, nor a group twice.
    eventually(|| {
        let one = used(cluster.node(1), "a");
        assert!(one.is_none_or(|bytes| bytes == 10 * MIB), "{one:?}");
        let other = used(cluster.node(2), "b");
        assert!(
            other.is_none_or(|bytes| [0, 3 * MIB].contains(&bytes)),
            "{other:?}"
        );
        one.is_some() && other == Some(3 * MIB)
    });
    cluster.start(3);
    cluster.node(1).ok(&["volume", "delete", "a", "--yes"]);
    import(&cluster, "c", 2);
    eventually(|| {
        let all = ["b", "c"].map(|name| used(cluster.node(3), name));
        all == [Some(3 * MIB), Some(2 * MIB)]
    });
    // Without a leader lists go on.
    cluster.kill(1);
    cluster.kill(2);
    let left = used(cluster.node(3), "b");
    assert!(left.is_none_or(|bytes| bytes == 3 * MIB), "{left:?}");
}
