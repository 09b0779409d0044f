//! Hosts that are evicted while they serve guests.

use serde_json::json;

use super::{Cluster, THIN};
use crate::front::Front;
use crate::harness::{one_error, serve_with};

/// A storage node and two hosts, the first of which serves a volume and a filesystem.
fn cluster() -> Cluster {
    let mut cluster = Cluster::found("1");
    for node in [2, 3] {
        let token = cluster.node(1).ok(&["token", "create"]);
        cluster.add_by(node, token.trim(), &[]);
    }
    let (socket, mount) = (cluster.socket(2), cluster.dir.path().join("fs.sock"));
    let host = cluster.node(2);
    host.ok(&["volume", "create", "disk", "64M"]);
    host.attach("disk", &socket);
    host.ok(&["fs", "create", "home"]);
    host.attach_fs("home", &mount);
    cluster
}

impl Cluster {
    fn socket(&self, node: usize) -> std::path::PathBuf {
        self.dir.path().join(format!("disk{node}.sock"))
    }

    /// Attaches the volume on a host and connects a front end.
    fn guest_on(&self, node: usize) -> Front {
        let socket = self.socket(node);
        self.node(node).attach("disk", &socket);
        Front::start(&socket, 1)
    }
}

#[test]
fn a_running_host_is_evicted_and_its_volume_is_attached_elsewhere() {
    let mut cluster = cluster();
    let mut guest = Front::start(&cluster.socket(2), 1);
    guest.write(8, 7);
    let store = cluster.node(1);
    let message = store.refused(&["node", "remove", "node2", "--yes"]);
    assert!(message.contains("--evict"), "{message}");
    let evict = ["node", "remove", "node2", "--evict"];
    let message = one_error(&store.run(&evict), 2);
    assert!(
        message.contains("lose their disks") && message.contains("--yes"),
        "{message}"
    );
    let both = store.run(&[&evict[..], &["--accept-data-loss", "--yes"]].concat());
    assert_eq!(both.status.code(), Some(2));
    let message = cluster.node(3).refused(&[&evict[..], &["--yes"]].concat());
    assert!(message.contains("has the role host"), "{message}");

    let evicted = store.json(&[&evict[..], &["--yes"]].concat());
    assert_eq!(evicted["name"], "node2");
    let events = store.ok(&["events", "--json"]);
    let events: Vec<serde_json::Value> = events
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    let event = events.iter().find(|event| event["kind"] == "node_evicted");
    assert_eq!(event.unwrap()["by"]["node_name"], "node1");
    assert!(store.ok(&["events"]).contains("was evicted"));
    let left = store.json(&["attachment", "list", "--all"]);
    assert_eq!(left, json!([]), "attachments of volumes and filesystems");
    // Its daemon ends, and its certificate is refused.
    let two = cluster.nodes[1].take().unwrap();
    assert_eq!(two.wait().code(), Some(1));
    let message = one_error(&serve_with(&cluster.data(2), &THIN), 1);
    assert!(
        message.contains("node node2 was removed from the cluster"),
        "{message}"
    );
    // The next front end reads what was acknowledged to the evicted host's guest.
    let mut next = cluster.guest_on(3);
    assert_eq!(next.read(0, 8), [7; 512]);
    next.write(8, 9);
    assert_eq!(next.read(0, 8), [9; 512]);
}

#[test]
fn an_evicted_host_that_learns_late_overwrites_no_newer_data() {
    let mut cluster = cluster();
    let mut guest = Front::start(&cluster.socket(2), 1);
    guest.write(8, 7);
    // The host is stopped and learns nothing, while its guest continues.
    cluster.node(2).stop();
    let late = guest.begin_write(8, 1);
    let evict = ["node", "remove", "node2", "--evict", "--yes"];
    cluster.node(1).ok(&evict);
    let mut next = cluster.guest_on(3);
    next.write(8, 9);
    cluster.node(2).signal(libc::SIGCONT);
    let two = cluster.nodes[1].take().unwrap();
    assert_eq!(two.wait().code(), Some(1));
    assert!(!guest.is_acknowledged(late), "its write was acknowledged");
    assert_eq!(next.read(0, 8), [9; 512]);
}
