//! A volume moves from one host to another only after the first has offered it.

use std::path::Path;

use serde_json::Value;

use super::Cluster;
use crate::front::Front;
use crate::harness::{Daemon, eventually, text};

/// Indexes of the nodes of [`hosts`]: an administrator's node, the one that serves the volume, and the
/// destination.
const ADMIN: usize = 1;
const SOURCE: usize = 2;
const DESTINATION: usize = 3;

/// A cluster with two nodes that only have the role `host`.
fn hosts() -> Cluster {
    let mut cluster = Cluster::found("1");
    for node in [SOURCE, DESTINATION] {
        let admin = cluster.node(ADMIN);
        let token = admin.ok(&["token", "create", "--roles", "host"]);
        cluster.add_by(node, token.trim(), &["--roles", "host"]);
    }
    cluster
}

fn incoming(socket: &Path) -> [&str; 6] {
    let socket = text(socket);
    ["attach", "volume", "disk", "--socket", socket, "--incoming"]
}

fn offer<'a>(to: &'a str, more: &[&'a str]) -> Vec<&'a str> {
    [&["attachment", "offer", "disk", "--to", to][..], more].concat()
}

fn attachments(daemon: &Daemon) -> Vec<Value> {
    let list = daemon.json(&["attachment", "list"]);
    list.as_array().unwrap().clone()
}

#[test]
fn a_host_takes_over_only_an_offered_attachment() {
    let cluster = hosts();
    let (old, new) = (
        cluster.dir.path().join("old.sock"),
        cluster.dir.path().join("new.sock"),
    );
    let (admin, source) = (cluster.node(ADMIN), cluster.node(SOURCE));
    let destination = cluster.node(DESTINATION);
    source.ok(&["volume", "create", "disk", "64M"]);
    source.ok(&["attach", "volume", "disk", "--socket", text(&old)]);
    let mut guest = Front::start(&old, 1);
    guest.write(8, 7);

    // There is no offer, the offer is by another host, or it is for another host.
    let message = destination.refused(&incoming(&new));
    assert!(
        message.contains("run `penstock attachment offer disk --to node3` on node \"node2\""),
        "{message}"
    );
    let message = destination.refused(&offer("node3", &[]));
    assert!(
        message.contains("may not offer attachments of other nodes"),
        "{message}"
    );
    source.ok(&offer("node1", &[]));
    let message = destination.refused(&incoming(&new));
    assert!(message.contains("has not offered it"), "{message}");
    // The offer has expired. The leader soon removes an expired offer.
    let short = source.json(&offer("node3", &["--expires", "1s"]));
    let end = meta::UnixMillis(short["offer"]["expires_at_ms"].as_u64().unwrap());
    eventually(|| meta::UnixMillis::now() > end);
    let message = destination.refused(&incoming(&new));
    assert!(
        message.contains("has expired") || message.contains("has not offered it"),
        "{message}"
    );
    assert_eq!(attachments(destination).len(), 0);
    assert!(!new.exists());

    // An administrator offers the attachment, and the source withdraws the offer.
    let offered = admin.json(&offer("node3", &[]));
    assert_eq!(
        [&offered["node"], &offered["offer"]["to"]],
        ["node2", "node3"]
    );
    let listed = source.ok(&["attachment", "list"]);
    assert!(listed.contains("connected, offered to node3"), "{listed}");
    destination.ok(&incoming(&new));
    let waits = attachments(destination);
    assert_eq!(waits[0]["incoming"], true);
    assert!(waits[0]["expires_at_ms"].is_u64(), "{waits:?}");
    source.ok(&["attachment", "withdraw", "disk"]);
    eventually(|| attachments(destination).is_empty() && !new.exists());
    let message = source.refused(&["attachment", "withdraw", "disk"]);
    assert!(message.contains("is offered to no node"), "{message}");
    guest.write(8, 9);
    assert_eq!(attachments(source)[0].get("offer"), None);

    // The guest moves to the host with the offer.
    source.ok(&offer("node3", &[]));
    destination.ok(&incoming(&new));
    drop(guest);
    let mut guest = Front::start(&new, 1);
    assert_eq!(guest.read_patiently(8), [9; 512]);
    eventually(|| attachments(source).is_empty());
    let here = &attachments(destination)[0];
    assert_eq!(
        (here["incoming"].as_bool(), here.get("expires_at_ms")),
        (Some(false), None)
    );
    let events = admin.ok(&["events"]);
    for message in [
        "which node node2 serves, was offered to node node3",
        "the offer of volume disk by node node2 was withdrawn",
        "moved with its guest to node node3",
    ] {
        assert!(events.contains(message), "no {message:?} in {events}");
    }
}
