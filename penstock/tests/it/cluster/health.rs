//! What nodes tell of each other.

use serde_json::json;

use super::Cluster;
use crate::harness::{eventually, text};

#[test]
fn every_node_tells_how_all_are_and_what_is_wrong() {
    let mut cluster = Cluster::of_three();
    cluster.node(1).ok(&["volume", "create", "disk", "64M"]);
    let token = cluster.node(1).json(&["token", "create"]);
    let token = token["id"].as_str().unwrap().to_owned();
    for node in 1..=3 {
        let all_told = || {
            let devices = cluster.node(node).json(&["device", "list"]);
            let devices = devices.as_array().unwrap();
            devices.len() == 3 && devices.iter().all(|device| device["used_bytes"].is_u64())
        };
        eventually(all_told);
        eventually(|| cluster.node(node).run(&["health"]).stdout == b"ok\n");
    }
    let told = cluster
        .node(2)
        .refused(&["node", "drain", "node3", "--yes"]);
    assert!(told.contains("2 of 3 replicas"), "{told}");

    cluster.kill(3);
    let problems = |cluster: &Cluster, node: usize| {
        let health = cluster.node(node).json_of(&["health"]);
        health["problems"].as_array().unwrap().clone()
    };
    for node in [1, 2] {
        let down = |problem: &serde_json::Value| problem["what"] == "node node3 is down";
        eventually(|| problems(&cluster, node).iter().any(down));
        let problem = problems(&cluster, node).into_iter().find(down).unwrap();
        assert!(problem["since"].is_string(), "{problem}");
        let doing = problem["doing"].as_str().unwrap();
        assert!(doing.contains("its data are rebuilt elsewhere"), "{doing}");
        let shown = cluster.node(node).json(&["node", "show", "node3"]);
        assert_eq!(
            (&shown["state"], &shown["since"]),
            (&json!("down"), &problem["since"])
        );
        assert_eq!(shown["devices"][0]["state"], "offline");
    }
    cluster.start(3);
    eventually(|| cluster.node(2).run(&["health"]).stdout == b"ok\n");

    let socket = cluster.data(2).join("disk.sock");
    let attach = ["attach", "volume", "disk", "--socket", text(&socket)];
    cluster.node(2).ok(&attach);

    // Without a majority nothing can be changed, and that is what is told.
    cluster.kill(2);
    cluster.kill(3);
    eventually(|| {
        let problems = problems(&cluster, 1);
        let what = problems.first().map(|problem| problem["what"].to_string());
        what.is_some_and(|what| what.contains("hears of no metadata leader: 2 of the 3 voters"))
    });
    assert!(cluster.node(1).ok(&["status"]).contains("node2"));
    for asked in [
        &["volume", "create", "more", "64M"][..],
        &["node", "show", "node2"],
    ] {
        let told = cluster.node(1).refused(asked);
        assert!(told.contains("metadata has no majority"), "{told}");
        assert!(told.contains("does not reach node2, node3"), "{told}");
        assert_eq!(told.contains("nothing was changed"), asked[0] == "volume");
    }
    lists_answer_from_the_last_known_state(&cluster, &token);
}

fn lists_answer_from_the_last_known_state(cluster: &Cluster, token: &str) {
    // There is no filesystem, and no export.
    let known = [
        (&["volume", "list"][..], "disk"),
        (&["node", "list"], "node2"),
        (&["device", "list"], "node3"),
        (&["pool", "list"], "default"),
        (&["token", "list"], token),
        (&["attachment", "list", "--all"], "disk"),
        (&["attachment", "list", "--node", "node2"], "disk"),
        (&["fs", "list"], ""),
        (&["nfs", "export", "list"], ""),
    ];
    for (list, name) in known {
        let told = cluster.node(1).run(list);
        let (out, warned) = (shown(&told.stdout), shown(&told.stderr));
        assert!(
            told.status.success() && out.contains(name),
            "{out} {warned}"
        );
        assert!(
            warned.contains("no metadata leader answers: this is what the node knew"),
            "{warned}"
        );
        assert!(warned.contains(" ago; see"), "{warned}");
        assert_eq!(warned.lines().count(), 1, "{warned}");
    }
    // Programs read standard output alone.
    let json = cluster.node(1).json(&["volume", "list"]);
    assert!(json.to_string().contains("disk"), "{json}");
    let unknown = ["attachment", "list", "--node", "elsewhere"];
    let told = cluster.node(1).run(&unknown);
    assert_eq!(told.status.code(), Some(1));
    assert!(
        shown(&told.stderr).contains("no node 'elsewhere'"),
        "{told:?}"
    );
    assert!(
        cluster
            .node(1)
            .ok(&["events"])
            .contains("node node3 is down")
    );
}

fn shown(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}
