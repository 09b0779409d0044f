//! Nodes whose addresses change while they are stopped.

use std::net::TcpListener;

use super::Cluster;
use crate::harness::eventually;

/// Options for ports of this address that no other test uses.
fn free_ports(address: &str) -> Vec<String> {
    let listeners = ["--control-port", "--data-port", "--enrol-port"].map(|option| {
        let listener = TcpListener::bind((address, 0)).unwrap();
        (option, listener)
    });
    let ports = listeners.iter().flat_map(|(option, listener)| {
        let port = listener.local_addr().unwrap().port();
        [(*option).to_owned(), port.to_string()]
    });
    ports.collect()
}

impl Cluster {
    /// Kills a node's process and waits until another node lists it as down.
    fn lose(&mut self, node: usize) {
        self.kill(node);
        let other = self.node(node % 3 + 1);
        let name = format!("node{node}");
        eventually(|| other.json(&["node", "show", &name])["state"] == "down");
    }

    /// Checks that a node works and that the others list it at this address.
    fn is_at(&self, node: usize, address: &str) {
        self.node(node).ok(&["volume", "create", "made", "64M"]);
        self.node(node).ok(&["volume", "delete", "made", "--yes"]);
        for other in (1..=3).filter(|other| *other != node) {
            let shown = self
                .node(other)
                .json(&["node", "show", &format!("node{node}")]);
            assert_eq!(shown["state"], "up");
            let at = shown["control_address"].as_str().unwrap();
            assert!(at.starts_with(address), "{at}, not {address}");
        }
    }

    fn leader(&self) -> usize {
        let nodes = self.node(1).json(&["node", "list"]);
        let nodes = nodes.as_array().unwrap();
        let leads = |node: &&serde_json::Value| node["meta"] == "leader";
        let leader = nodes.iter().find(leads).unwrap();
        usize::try_from(leader["id"].as_u64().unwrap()).unwrap()
    }
}

#[test]
fn a_node_returns_with_other_ports_and_another_address_family() {
    let mut cluster = Cluster::of_three();
    for address in [cluster.address(3), "::1".to_owned(), cluster.address(33)] {
        cluster.lose(3);
        let ports = free_ports(&address);
        let mut options = vec!["--listen", &address];
        options.extend(ports.iter().map(String::as_str));
        cluster.start_with(3, &options);
        let shown = match address.contains(':') {
            true => format!("[{address}]:{}", ports[1]),
            false => format!("{address}:{}", ports[1]),
        };
        cluster.is_at(3, &shown);
    }
    // Data reach the node at the new address: two of three copies are written without the second node.
    cluster.lose(2);
    let image = cluster.dir.path().join("in.raw");
    let bytes = super::image(&image);
    let import = ["volume", "import", "disk", crate::harness::text(&image)];
    cluster.node(1).ok(&import);
    cluster.export_is(3, "disk", &bytes);
}

#[test]
fn a_former_leader_returns_at_another_address() {
    let mut cluster = Cluster::of_three();
    let leader = cluster.leader();
    cluster.lose(leader);
    let elsewhere = cluster.address(leader * 11);
    cluster.start_with(leader, &["--listen", &elsewhere]);
    cluster.is_at(leader, &elsewhere);
}

#[test]
fn one_node_at_its_old_address_is_enough_to_find_the_others() {
    let mut cluster = Cluster::of_three();
    (1..=3).for_each(|node| cluster.kill(node));
    let (two, three) = (cluster.address(22), cluster.address(33));
    let starting = [
        cluster.begin(1, &[]),
        cluster.begin(2, &["--listen", &two]),
        cluster.begin(3, &["--listen", &three]),
    ];
    for (node, starting) in (1..).zip(starting) {
        cluster.ready(node, starting);
    }
    eventually(|| cluster.node(1).run(&["volume", "list"]).status.success());
    cluster.is_at(2, &two);
    cluster.is_at(3, &three);
}

#[test]
fn nodes_that_all_moved_find_each_other_by_one_address() {
    let mut cluster = Cluster::of_three();
    (1..=3).for_each(|node| cluster.kill(node));
    let [one, two, three] = [11, 22, 33].map(|node| cluster.address(node));
    // No node knows another one's address, and each prints what to do.
    let mut alone = cluster.begin(3, &["--listen", &three]);
    let output = alone.says("waiting for the cluster");
    assert!(output.contains("--peer ADDRESS"), "{output}");
    alone.kill();
    let starting = [
        cluster.begin(1, &["--listen", &one]),
        cluster.begin(2, &["--listen", &two, "--peer", &one]),
        cluster.begin(3, &["--listen", &three, "--peer", &one]),
    ];
    for (node, starting) in (1..).zip(starting) {
        cluster.ready(node, starting);
    }
    for (node, address) in (1..).zip([&one, &two, &three]) {
        cluster.is_at(node, address);
    }
    // Later starts know the addresses and need no option.
    cluster.stop(2);
    cluster.start_with(2, &["--listen", &two]);
    cluster.is_at(2, &two);
}
