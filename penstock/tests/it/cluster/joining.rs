//! Who is let in, and who is not.

use std::fs;
use std::path::Path;

use meta::pki::{ClusterCa, NodeKey};
use serde_json::json;

use super::{Cluster, THIN, waits};
use crate::front::Front;
use crate::harness::{Daemon, one_error, penstock, run, serve, serve_with, temp, text};

#[test]
fn a_token_lets_one_node_in_once() {
    let cluster = Cluster::found("1");
    let token = cluster.token();
    let (data, listen) = (cluster.data(2), cluster.address(2));
    let cut = one_error(&cluster.join(2, &token[..token.len() - 2]), 2);
    assert!(cut.contains("not a whole join token"), "{cut}");
    let namesake = run(&[
        "join",
        &token,
        "--data",
        text(&data),
        "--listen",
        &listen,
        "--name",
        "node1",
    ]);
    let told = one_error(&namesake, 1);
    assert!(
        told.contains("\"node1\" is taken: give this node another name"),
        "{told}"
    );
    let joined = cluster.join(2, &token);
    assert!(joined.status.success(), "{joined:?}");
    let told = one_error(&cluster.join(2, &token), 1);
    assert!(
        told.contains("holds node node2") && told.contains("--data"),
        "{told}"
    );
    let told = one_error(&cluster.join(3, &token), 1);
    assert!(
        told.contains("was used already") && told.contains("token create"),
        "{told}"
    );
    let short = cluster.node(1).ok(&["token", "create", "--lifetime", "1s"]);
    std::thread::sleep(std::time::Duration::from_millis(1100));
    let told = one_error(&cluster.join(3, short.trim()), 1);
    assert!(told.contains("has expired"), "{told}");
    assert!(!cluster.data(3).join("cluster").exists());
    let told = one_error(
        &run(&["init", "--data", text(&data), "--listen", &listen]),
        1,
    );
    assert!(told.contains("holds node node2"), "{told}");
}

#[test]
fn a_node_that_joined_is_listed_as_not_started_until_it_runs() {
    let mut cluster = Cluster::found("1");
    let joined = cluster.join(2, &cluster.token());
    assert!(joined.status.success(), "{joined:?}");
    let state = |cluster: &Cluster| {
        let first = cluster.node(1);
        let listed = first.json(&["node", "list"])[1]["state"].clone();
        assert_eq!(first.json(&["node", "show", "node2"])["state"], listed);
        listed
    };
    assert_eq!(state(&cluster), "not_started");
    let output = cluster.node(1).ok(&["node", "list"]);
    let row = output.lines().find(|line| line.contains("node2")).unwrap();
    assert!(row.contains("not started"), "{output}");
    cluster.start(2);
    assert_eq!(state(&cluster), "up");
}

#[test]
fn tokens_are_listed_revoked_and_read_from_files() {
    let cluster = Cluster::found("1");
    let node = cluster.node(1);
    let made = node.json(&["token", "create", "--roles", "host"]);
    let (token, id) = (
        made["token"].as_str().unwrap(),
        made["id"].as_str().unwrap(),
    );
    let listed = node.json(&["token", "list"]);
    assert_eq!(listed.as_array().unwrap().len(), 1, "{listed}");
    assert_eq!(
        (&listed[0]["id"], &listed[0]["roles"]),
        (&json!(id), &json!(["host"]))
    );
    assert!(!node.ok(&["token", "list"]).contains(token));
    let told = node.refused(&["token", "revoke", "zz"]);
    assert!(told.contains("token list"), "{told}");
    node.ok(&["token", "revoke", id]);
    assert_eq!(node.json(&["token", "list"]), json!([]));
    let told = one_error(&cluster.join(2, token), 1);
    assert!(told.contains("is not known"), "{told}");

    let file = cluster.dir.path().join("token");
    let (data, listen) = (cluster.data(2), cluster.address(2));
    let join = |token: &[&str]| {
        let rest = [
            "--data",
            text(&data),
            "--listen",
            &listen,
            "--name",
            "node2",
        ];
        run(&[&["join"], token, &rest].concat())
    };
    fs::write(&file, "\n").unwrap();
    let by_file = ["--token-file", text(&file)];
    assert!(one_error(&join(&by_file), 2).contains("there is no token in"));
    assert!(one_error(&join(&["--token-file", "/nonexistent"]), 2).contains("/nonexistent"));
    assert!(one_error(&join(&[]), 2).contains("TOKEN"));
    fs::write(&file, format!("{}\n", cluster.token())).unwrap();
    let joined = join(&by_file);
    assert!(joined.status.success(), "{joined:?}");

    let (data, listen) = (cluster.data(3), cluster.address(3));
    let join_by_input = |input: &str| {
        fs::write(&file, input).unwrap();
        let args = ["join", "-", "--data", text(&data), "--listen", &listen];
        let mut command = penstock();
        let input = fs::File::open(&file).unwrap();
        command.args(args).args(["--name", "node3"]).stdin(input);
        command.output().unwrap()
    };
    let told = one_error(&join_by_input("\n"), 2);
    assert!(
        told.contains("there is no token in standard input"),
        "{told}"
    );
    let joined = join_by_input(&format!("{}\n", cluster.token()));
    assert!(joined.status.success(), "{joined:?}");
}

#[test]
fn a_join_that_cannot_succeed_here_leaves_its_token_good() {
    let cluster = Cluster::found("1");
    let token = cluster.token();
    let join = |data: &Path, listen: &str| {
        let name = ["--name", "node2"];
        run(&[
            &["join", &token, "--data", text(data), "--listen", listen],
            &name[..],
        ]
        .concat())
    };
    let (data, listen) = (cluster.data(2), cluster.address(2));
    // An address for examples, which is no machine's.
    let told = one_error(&join(&data, "192.0.2.1"), 1);
    assert!(told.contains("cannot listen on 192.0.2.1:7470"), "{told}");
    let taken = std::net::TcpListener::bind((listen.as_str(), 7471)).unwrap();
    let told = one_error(&join(&data, &listen), 1);
    assert!(
        told.contains(&format!("{listen}:7471")) && told.contains("no other program"),
        "{told}"
    );
    drop(taken);
    let told = one_error(&join(Path::new("/proc/self"), &listen), 1);
    assert!(told.contains("/proc/self"), "{told}");
    let told = one_error(&join(&cluster.data(1), &listen), 1);
    assert!(told.contains("data directory"), "{told}");
    let far = cluster.dir.path().join("x".repeat(100));
    let told = one_error(&join(&far, &listen), 2);
    assert!(told.contains("too long"), "{told}");
    let joined = join(&data, &listen);
    assert!(joined.status.success(), "{joined:?}");
}

#[test]
fn foreign_token_and_unreachable_cluster_have_distinct_errors() {
    let mut ours = Cluster::found("1");
    let token = ours.token();
    ours.stop(1);
    let told = one_error(&ours.join(2, &token), 1);
    assert!(
        told.contains("cannot reach the cluster") && told.contains(&ours.address(1)),
        "{told}"
    );
    // Another cluster at the same address.
    fs::rename(ours.data(1), ours.dir.path().join("kept")).unwrap();
    let listen = ours.address(1);
    let made = run(&["init", "--data", text(&ours.data(1)), "--listen", &listen]);
    assert!(made.status.success(), "{made:?}");
    ours.start(1);
    let told = one_error(&ours.join(2, &token), 1);
    assert!(
        told.contains("not a node of the cluster that made this token"),
        "{told}"
    );
    assert!(!ours.data(2).join("cluster").exists());
}

#[test]
fn a_node_of_a_cluster_of_its_own_says_so() {
    let dir = temp();
    let daemon = Daemon::start_with(dir.path(), &THIN);
    let told = daemon.refused(&["token", "create"]);
    let init = format!("penstock init --data {}", dir.path().display());
    assert!(told.contains(&init), "{told}");
    assert!(daemon.terminate().success());
    let empty = temp();
    let served = serve_with(empty.path(), &["--listen", "127.0.0.1"]);
    let told = one_error(&served, 2);
    assert!(told.contains("penstock init"), "{told}");
    let told = one_error(&run(&["init", "--data", text(empty.path())]), 2);
    assert!(told.contains("--listen"), "{told}");
    let here = [
        "init",
        "--data",
        text(empty.path()),
        "--listen",
        "127.0.0.1",
    ];
    for (ports, culprit) in [
        (["--control-port", "0"], "the control port is 0"),
        (
            ["--data-port", "7470"],
            "the control port and the data port are both 7470",
        ),
    ] {
        let told = one_error(&run(&[&here[..], &ports].concat()), 2);
        assert!(told.contains(culprit), "{told}");
    }
    let told = one_error(
        &run(&["init", "--data", text(empty.path()), "--listen", "0.0.0.0"]),
        2,
    );
    assert!(told.contains("cannot reach 0.0.0.0"), "{told}");
}

#[test]
fn a_node_without_a_certificate_of_its_own_says_so() {
    let ours = Cluster::found("1");
    assert!(ours.join(2, &ours.token()).status.success());
    let own = ours.data(2).join("cluster");
    let refused = || {
        let told = one_error(&serve(&ours.data(2)), 1);
        assert!(told.contains("cannot prove who it is"), "{told}");
        assert!(told.contains("node.pem"), "{told}");
    };
    let certificate = fs::read_to_string(own.join("node.pem")).unwrap();
    // Somewhere in its signature, as a bit that flips.
    let damaged = certificate.len() - "\n-----END CERTIFICATE-----\n".len() - 12;
    let mut bytes = certificate.clone().into_bytes();
    bytes[damaged] = if bytes[damaged] == b'A' { b'B' } else { b'A' };
    fs::write(own.join("node.pem"), bytes).unwrap();
    refused();
    // Another node's, with its key.
    for file in ["node.pem", "node.key"] {
        fs::copy(ours.data(1).join("cluster").join(file), own.join(file)).unwrap();
    }
    refused();
}

#[test]
fn credentials_of_another_authority_are_refused() {
    let ours = Cluster::found("1");
    assert!(ours.join(2, &ours.token()).status.success());
    let own = ours.data(2).join("cluster");
    let record = fs::read_to_string(own.join("node.json")).unwrap();
    let record: serde_json::Value = serde_json::from_str(&record).unwrap();
    let cluster = record["cluster"].as_str().unwrap().parse().unwrap();
    // They fit together, and the node: only its peers can tell.
    let (authority, ca) = ClusterCa::generate(cluster).unwrap();
    let key = NodeKey::generate().unwrap();
    let certificate = authority.issue(meta::NodeId(2), &key.public_key());
    for (file, text) in [
        ("ca.pem", ca),
        ("node.pem", certificate.unwrap()),
        ("node.key", key.to_pem()),
    ] {
        fs::write(own.join(file), text).unwrap();
    }
    assert!(waits(&ours.data(2)));
    // The first node minds nothing of that.
    assert_eq!(ours.node(1).json(&["volume", "list"]), json!([]));
}

#[test]
fn a_token_grants_roles_and_no_others() {
    let mut cluster = Cluster::found("1");
    let create = ["token", "create", "--roles", "host"];
    let made = cluster.node(1).run(&create);
    let told = String::from_utf8_lossy(&made.stderr).into_owned();
    assert!(told.contains("with the roles host"), "{told}");
    let token = String::from_utf8(made.stdout).unwrap().trim().to_owned();
    let told = one_error(&cluster.join_with(2, &token, &["--roles", "host,meta"]), 1);
    assert!(told.contains("grants the roles host"), "{told}");
    assert!(told.contains("join with `--roles host`"), "{told}");
    // It does not join with devices either, which it could not use.
    let config = cluster.dir.path().join("devices.toml");
    fs::write(
        &config,
        "devices = [{ path = \"/srv/x\", size = \"1G\" }]\n",
    )
    .unwrap();
    let told = one_error(
        &cluster.join_with(2, &token, &["--config", text(&config)]),
        1,
    );
    assert!(told.contains("token create --roles storage"), "{told}");
    // It is good still.
    let joined = cluster.join(2, &token);
    assert!(joined.status.success(), "{joined:?}");
    assert!(!cluster.data(2).join("cluster/ca.key").exists());
    cluster.start(2);
    cluster.stop(2);
    let more = serve_with(&cluster.data(2), &["--roles", "host,meta"]);
    let told = one_error(&more, 1);
    assert!(told.contains("was granted the roles host"), "{told}");
    cluster.start(2);
    // One that grants the role yields the authority's key.
    let joined = cluster.join(3, &cluster.token());
    assert!(joined.status.success(), "{joined:?}");
    assert!(cluster.data(3).join("cluster/ca.key").exists());
    // To whom takes the role.
    let joined = cluster.join_with(4, &cluster.token(), &["--roles", "storage,host"]);
    assert!(joined.status.success(), "{joined:?}");
    assert!(!cluster.data(4).join("cluster/ca.key").exists());
}

#[test]
fn a_token_grants_only_the_role_host_by_default() {
    let cluster = Cluster::found("1");
    let shown = cluster.node(1).json(&["token", "create"])["roles"].clone();
    assert_eq!(shown, json!(["host"]));
    let create = |options: &[&str]| {
        let made = cluster
            .node(1)
            .run(&[&["token", "create"], options].concat());
        let token = String::from_utf8(made.stdout).unwrap().trim().to_owned();
        (token, String::from_utf8(made.stderr).unwrap())
    };
    let (host, hint) = create(&[]);
    assert!(hint.contains("penstock join TOKEN --listen"), "{hint}");
    assert!(hint.contains("it keeps no data"), "{hint}");
    assert!(hint.contains("--roles meta,storage,host"), "{hint}");
    let (store, hint) = create(&["--roles", "storage,host"]);
    assert!(!hint.contains("no data") && !hint.contains("key"), "{hint}");
    let (full, hint) = create(&["--roles", "meta,storage,host"]);
    assert!(hint.contains("gets the key that lets nodes in"), "{hint}");
    // Each node gets the roles of its token without an option, and the authority's key only with meta.
    for (node, token, roles) in [
        (2, &host, json!(["host"])),
        (3, &store, json!(["storage", "host"])),
        (4, &full, json!(["meta", "storage", "host"])),
    ] {
        let joined = cluster.join(node, token);
        assert!(joined.status.success(), "{joined:?}");
        let shown = cluster
            .node(1)
            .json(&["node", "show", &format!("node{node}")]);
        assert_eq!(shown["roles"], roles);
        let key = cluster.data(node).join("cluster/ca.key");
        assert_eq!(key.exists(), node == 4, "node {node}");
    }
}

#[test]
fn a_host_serves_volumes_and_does_not_administer_the_cluster() {
    let mut cluster = Cluster::found("1");
    let token = cluster.node(1).ok(&["token", "create"]);
    let joined = cluster.join(2, token.trim());
    assert!(joined.status.success(), "{joined:?}");
    cluster.start(2);
    let host = cluster.node(2);
    for command in [
        &["token", "create"][..],
        &["pool", "create", "mine", "--replicas", "1"],
        &["pool", "delete", "default", "--yes"],
        &["node", "drain", "node1", "--yes"],
        &["node", "remove", "node1", "--yes"],
    ] {
        let told = host.refused(command);
        assert!(told.contains("node 'node2' has the role host"), "{told}");
        assert!(told.contains("with the role meta (node1)"), "{told}");
    }
    // Its data lie on the first node: it reaches what is open to it.
    let dir = cluster.dir.path();
    let (image, out, socket) = (
        dir.join("in.raw"),
        dir.join("out.raw"),
        dir.join("disk.sock"),
    );
    fs::write(&image, vec![7; 3 << 20]).unwrap();
    host.ok(&["volume", "import", "disk", text(&image)]);
    host.ok(&["volume", "export", "disk", text(&out)]);
    assert_eq!(fs::read(&image).unwrap(), fs::read(&out).unwrap());
    host.ok(&["attach", "volume", "disk", "--socket", text(&socket)]);
    let mut guest = Front::start(&socket, 1);
    guest.write(8, 9);
    assert_eq!(guest.read(0, 8), [9; 512]);
    drop(guest);
    host.ok(&["detach", "disk", "--yes"]);
    host.ok(&["volume", "resize", "disk", "8M"]);
    host.ok(&["volume", "delete", "disk", "--yes"]);
    assert_eq!(cluster.node(1).json(&["volume", "list"]), json!([]));
}
