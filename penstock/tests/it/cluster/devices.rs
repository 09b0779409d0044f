//! Devices of nodes of several.

use std::fs;

use super::Cluster;
use crate::front::Front;
use crate::harness::{eventually, one_error, serve_with, text};

#[test]
fn clustered_node_starts_without_a_device_and_makes_no_new_one() {
    let mut cluster = Cluster::of_three();
    cluster.node(1).ok(&["volume", "create", "disk", "64M"]);
    cluster.stop(3);
    let device = cluster.data(3).join("devices/0.img");
    let away = cluster.data(3).join("away.img");
    fs::rename(&device, &away).unwrap();
    let other = cluster.data(3).join("other.img");
    let (named, new) = (text(&device).to_owned(), format!("{}:1G", text(&other)));
    cluster.start_with(3, &["--device", &named, "--device", &new]);
    assert!(!device.exists() && !other.exists());
    let told = cluster.node(3).json(&["device", "list"]);
    let told = told.as_array().unwrap().iter();
    let told = told.clone().find(|one| one["node"] == "node3").unwrap();
    assert_eq!(told["state"], "offline");
    assert!(told["reason"].as_str().unwrap().contains("is missing"));
    let health = cluster.node(3).run(&["health"]);
    let health = String::from_utf8(health.stdout).unwrap();
    assert!(health.contains("goes on without it"), "{health}");
    assert!(health.contains("nothing is made or formatted"), "{health}");
    // Another disk in its place is not formatted either, and a damaged one is not written to.
    cluster.stop(3);
    for content in [vec![0; 1 << 20], vec![0xa5; 1 << 20]] {
        fs::write(&device, &content).unwrap();
        cluster.start(3);
        assert!(fs::read(&device).unwrap() == content);
        let health = cluster.node(3).run(&["health"]);
        let health = String::from_utf8(health.stdout).unwrap();
        assert!(health.contains("goes on without it"), "{health}");
        cluster.stop(3);
    }
    // The only device of a node, and dead: the other nodes have all, so it may be forgotten.
    cluster.start(3);
    let id = told["id"].to_string();
    let removed = cluster.node(3).json(&["device", "remove", &id, "--yes"]);
    assert_eq!(removed["state"], "removed", "{removed}");
    cluster.stop(3);
    cluster.start(3);
    let left = cluster.node(3).json(&["device", "list"]);
    assert_eq!(left.as_array().unwrap().len(), 2);
    assert!(fs::read(&device).unwrap() == vec![0xa5; 1 << 20]);
    // One that is well and merely not named any more is asked for.
    cluster.stop(2);
    let refused = serve_with(
        &cluster.data(2),
        &["--device", &new, "--preallocation", "off"],
    );
    let told = one_error(&refused, 1);
    assert!(told.contains("is not among its devices"), "{told}");
    assert!(!other.exists());
    cluster.start(2);
}

#[test]
fn node_without_the_storage_role_serves_volumes_of_other_nodes() {
    let mut cluster = Cluster::found("1");
    let roles = ["--roles", "host"];
    let joined = cluster.join_with(2, &cluster.token(), &roles);
    assert!(joined.status.success(), "{joined:?}");
    let data = cluster.data(2);
    let disk = cluster.dir.path().join("disk.img");
    let spec = format!("{}:1G", text(&disk));
    for options in [&[][..], &roles] {
        let named = [options, &["--device", &spec]].concat();
        let told = one_error(&serve_with(&data, &named), 2);
        assert!(
            told.contains(text(&disk)) && told.contains("without the role storage"),
            "{told}"
        );
    }
    cluster.start(2);
    let two = cluster.node(2);
    assert!(!data.join("devices").exists() && !disk.exists());
    let devices = two.json(&["device", "list"]);
    let nodes = devices.as_array().unwrap().iter().map(|one| &one["node"]);
    assert_eq!(nodes.collect::<Vec<_>>(), ["node1"]);
    let told = two.refused(&["device", "add", &spec]);
    assert!(told.contains("does not have the role storage"), "{told}");

    let socket = cluster.dir.path().join("disk.sock");
    two.ok(&["volume", "create", "disk", "64M"]);
    two.ok(&["attach", "volume", "disk", "--socket", text(&socket)]);
    let mut guest = Front::start(&socket, 1);
    guest.write(8, 7);
    assert_eq!(guest.read(0, 8), [7; 512]);
    drop(guest);
    eventually(|| two.run(&["health"]).stdout == b"ok\n");
    cluster.stop(2);
    cluster.start(2);
    assert!(!data.join("devices").exists());
    assert_eq!(Front::start(&socket, 1).read(0, 8), [7; 512]);
}

#[test]
fn what_a_node_has_is_opened_though_it_lost_the_role_storage() {
    let mut cluster = Cluster::found("1");
    cluster.node(1).ok(&["volume", "create", "disk", "64M"]);
    let image = cluster.dir.path().join("in.raw");
    fs::write(&image, vec![7; 1 << 20]).unwrap();
    let import = ["volume", "import", "disk", text(&image), "--yes"];
    cluster.node(1).ok(&import);
    cluster.stop(1);
    cluster.start_with(1, &["--roles", "meta,host"]);
    let out = cluster.dir.path().join("out.raw");
    let export = ["volume", "export", "disk", text(&out)];
    cluster.node(1).ok(&export);
    assert!(fs::read(&out).unwrap()[..1 << 20] == vec![7; 1 << 20]);
}
