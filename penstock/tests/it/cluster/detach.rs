//! Attachments of nodes that died are forgotten, and their volumes served elsewhere.

use super::Cluster;
use crate::front::Front;
use crate::harness::{eventually, one_error, text};

#[test]
fn attachment_of_a_dead_node_is_forgotten_and_served_elsewhere() {
    let mut cluster = Cluster::of_three();
    let token = cluster.node(1).ok(&["token", "create"]);
    let joined = cluster.join(4, token.trim());
    assert!(joined.status.success(), "{joined:?}");
    cluster.start(4);
    let (old, new) = (
        cluster.dir.path().join("old.sock"),
        cluster.dir.path().join("new.sock"),
    );
    let attach = |socket| ["attach", "volume", "disk", "--socket", socket];
    let three = cluster.node(3);
    three.ok(&["volume", "create", "disk", "64M"]);
    three.ok(&attach(text(&old)));
    let mut guest = Front::start(&old, 1);
    guest.write(8, 7);
    // Every node knows where it is.
    for asked in [&["--all"][..], &["--node", "node3"], &["--node", "3"]] {
        let listed = cluster
            .node(1)
            .json(&[&["attachment", "list"], asked].concat());
        assert_eq!(listed.as_array().unwrap().len(), 1, "{asked:?}: {listed}");
        let [node, state] = ["node", "state"].map(|key| listed[0][key].as_str().unwrap());
        assert_eq!([node, state], ["node3", "elsewhere"]);
    }
    let volume = cluster.node(1).json(&["volume", "show", "disk"]);
    assert_eq!(volume["attached_on"][0], "node3");
    for asked in [&[][..], &["--node", "node1"]] {
        let listed = cluster
            .node(1)
            .json(&[&["attachment", "list"], asked].concat());
        assert_eq!(listed.as_array().unwrap().len(), 0, "{asked:?}: {listed}");
    }
    let message = cluster
        .node(1)
        .refused(&["attachment", "list", "--node", "nope"]);
    assert!(message.contains("no node 'nope'"), "{message}");

    // Not while its node can be asked.
    let force = ["detach", "disk", "--force", "--yes"];
    for asked in [&["detach", "disk"][..], &force] {
        let message = cluster.node(1).refused(asked);
        assert!(
            message.contains("on node 'node3', which is up") && message.contains("--api"),
            "{message}"
        );
    }
    let message = one_error(&cluster.node(1).run(&["detach", "disk", "--node", "3"]), 2);
    assert!(message.contains("--force"), "{message}");
    cluster.kill(3);
    let one = cluster.node(1);
    eventually(|| one.json(&["node", "show", "node3"])["state"] == "down");
    let message = one.refused(&["detach", "disk"]);
    assert!(
        message.contains("on node 'node3', which is down") && message.contains("--force"),
        "{message}"
    );
    let message = one_error(&one.run(&["detach", "disk", "--force"]), 2);
    assert!(message.contains("--yes"), "{message}");
    let host = cluster.node(4);
    let message = host.refused(&["detach", "disk"]);
    assert!(
        message.contains("on a node with the role meta"),
        "{message}"
    );
    let message = host.refused(&force);
    assert!(
        message.contains("node 'node4' has the role host"),
        "{message}"
    );
    assert!(
        message.contains("run this on a node with the role meta"),
        "{message}"
    );
    let elsewhere = [&force[..], &["--node", "node2"]].concat();
    let message = one.refused(&elsewhere);
    assert!(message.contains("on node 'node2'"), "{message}");
    one.refused(&attach(text(&new)));

    let forgotten = one.json(&[&force[..], &["--node", "node3"]].concat());
    assert_eq!(
        [
            &forgotten["volume"],
            &forgotten["socket"],
            &forgotten["node"]
        ],
        ["disk", text(&old), "node3"]
    );
    let message = one.refused(&force);
    assert!(message.contains("nothing is attached"), "{message}");
    let events = one.ok(&["events"]);
    let detached = events
        .lines()
        .find(|line| line.contains("was detached on node"));
    assert!(
        detached.is_some_and(|line| line.contains("@node1") && line.contains("by force")),
        "{events}"
    );
    // The dead node has the lease still, which is waited for.
    one.ok(&attach(text(&new)));
    let events = one.ok(&["events"]);
    assert!(
        events.contains("the lease of node node3 ran out"),
        "{events}"
    );
    let mut guest = Front::start(&new, 1);
    assert_eq!(guest.read(0, 8), [7; 512]);
    guest.write(8, 9);

    cluster.start(3);
    let attachments = cluster.node(3).json(&["attachments", "list"]);
    assert_eq!(attachments.as_array().unwrap().len(), 0);
    assert!(std::os::unix::net::UnixStream::connect(&old).is_err());
    assert_eq!(guest.read(0, 8), [9; 512]);
}

#[test]
fn forced_detach_of_a_local_attachment_is_a_normal_detach() {
    let cluster = Cluster::found("1");
    let socket = cluster.dir.path().join("disk.sock");
    let one = cluster.node(1);
    one.ok(&["volume", "create", "disk", "64M"]);
    one.ok(&["attach", "volume", "disk", "--socket", text(&socket)]);
    let _guest = Front::start(&socket, 1);
    let message = one_error(&one.run(&["detach", "disk", "--force"]), 2);
    assert!(message.contains("which a guest is using"), "{message}");
    let detached = one.json(&["detach", text(&socket), "--force", "--yes"]);
    assert_eq!(detached["node"], "node1");
    assert!(!socket.exists());
}
