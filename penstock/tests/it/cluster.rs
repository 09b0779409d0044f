//! Nodes that make a cluster, on addresses of the loopback device.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Output, Stdio};

use serde_json::json;
use tempfile::TempDir;

use crate::front::Front;
use crate::harness::{
    DEVICE_SIZE, Daemon, eventually, one_error, penstock, run, serve, serve_with, temp, text,
};

/// Device files that take their space as they are written: there are many.
const THIN: [&str; 2] = ["--preallocation", "off"];

/// A cluster with its nodes' directories; node `n` listens on `127.x.y.n`.
struct Cluster {
    dir: TempDir,
    /// Of the process id, so that tests that run at the same time do not meet.
    net: String,
    /// By number, from 1.
    nodes: Vec<Option<Daemon>>,
}

impl Cluster {
    /// Made, and its first node running.
    fn found(replicas: &str) -> Self {
        let pid = std::process::id();
        let mut cluster = Cluster {
            dir: temp(),
            net: format!("127.{}.{}", 64 + (pid >> 8) % 128, pid % 256),
            nodes: Vec::new(),
        };
        let (data, listen) = (cluster.data(1), cluster.address(1));
        let made = run(&[
            "init",
            "--data",
            text(&data),
            "--listen",
            &listen,
            "--name",
            "node1",
            "--replicas",
            replicas,
        ]);
        assert!(made.status.success(), "{made:?}");
        cluster.start(1);
        cluster
    }

    /// With three nodes.
    fn of_three() -> Self {
        let mut cluster = Self::found("3");
        for node in [2, 3] {
            let token = cluster.token();
            let joined = cluster.join(node, &token);
            assert!(joined.status.success(), "{joined:?}");
            cluster.start(node);
        }
        cluster.wait_for_voters();
        cluster
    }

    /// Nodes vote shortly after they joined; before that the cluster does not survive the first one.
    fn wait_for_voters(&self) {
        let votes = |node: &serde_json::Value| node["meta"] != "learner";
        eventually(|| {
            let nodes = self.node(1).json(&["node", "list"]);
            nodes
                .as_array()
                .unwrap()
                .iter()
                .filter(|n| votes(n))
                .count()
                == 3
        });
    }

    fn data(&self, node: usize) -> PathBuf {
        self.dir.path().join(node.to_string())
    }

    fn address(&self, node: usize) -> String {
        format!("{}.{node}", self.net)
    }

    fn node(&self, node: usize) -> &Daemon {
        self.nodes[node - 1].as_ref().unwrap()
    }

    fn start(&mut self, node: usize) {
        self.start_with(node, &[]);
    }

    fn start_with(&mut self, node: usize, options: &[&str]) {
        let daemon = Daemon::start_with(&self.data(node), &[&THIN, options].concat());
        self.nodes.resize_with(self.nodes.len().max(node), || None);
        self.nodes[node - 1] = Some(daemon);
    }

    fn stop(&mut self, node: usize) {
        let daemon = self.nodes[node - 1].take().unwrap();
        assert!(daemon.terminate().success());
    }

    fn kill(&mut self, node: usize) {
        self.nodes[node - 1].take().unwrap().kill();
    }

    fn token(&self) -> String {
        self.node(1).ok(&["token", "create"]).trim().to_owned()
    }

    fn join(&self, node: usize, token: &str) -> Output {
        let (data, listen) = (self.data(node), self.address(node));
        let name = format!("node{node}");
        run(&[
            "join",
            token,
            "--data",
            text(&data),
            "--listen",
            &listen,
            "--name",
            &name,
        ])
    }
}

#[test]
fn three_nodes_are_one_cluster_and_each_may_restart() {
    let mut cluster = Cluster::of_three();
    let id = cluster.node(1).json(&["status"])["cluster_id"].clone();
    for node in 1..=3 {
        assert_eq!(cluster.node(node).json(&["status"])["cluster_id"], id);
    }
    let made = cluster.node(2).json(&["volume", "create", "disk", "64M"]);
    let seen = cluster.node(3).json(&["volume", "show", "disk"]);
    assert_eq!(seen["id"], made["id"]);
    for node in [3, 2, 1] {
        cluster.stop(node);
        // The others go on without it, whoever led.
        let other = cluster.node(node % 3 + 1);
        other.ok(&["volume", "create", &format!("without-{node}"), "64M"]);
        cluster.start(node);
        let volumes = cluster.node(node).json(&["volume", "list"]);
        assert_eq!(volumes.as_array().unwrap().len(), 5 - node);
    }
    cluster.node(3).ok(&["volume", "delete", "disk", "--yes"]);
    cluster.node(1).refused(&["volume", "show", "disk"]);
    (1..=3).for_each(|node| cluster.stop(node));
}

#[test]
fn a_guest_writes_and_reads_while_a_node_is_killed_and_comes_back() {
    const SECTORS: u64 = 64;
    // One in each of several chunks.
    let sector = |number: u64| number * 2048;
    let mut cluster = Cluster::of_three();
    let socket = cluster.dir.path().join("disk.sock");
    let one = cluster.node(1);
    one.ok(&["volume", "create", "disk", "64M"]);
    one.ok(&["attach", "volume", "disk", "--socket", text(&socket)]);
    let mut guest = Front::start(&socket, 1);
    let mut check = |cluster: &mut Cluster, byte: u8, change: &dyn Fn(&mut Cluster)| {
        for number in 0..SECTORS {
            guest.write(sector(number), byte);
            if number == SECTORS / 2 {
                change(cluster);
            }
        }
        for number in 0..SECTORS {
            assert_eq!(guest.read(0, sector(number)), [byte; 512], "{number}");
        }
    };
    check(&mut cluster, 1, &|_| {});
    check(&mut cluster, 2, &|cluster| cluster.kill(3));
    check(&mut cluster, 3, &|cluster| cluster.start(3));
    let whole = |daemon: &Daemon| {
        let groups = daemon.json(&["pool", "show", "default"])["groups"].clone();
        groups["degraded"] == 0
    };
    eventually(|| whole(cluster.node(1)));
    check(&mut cluster, 4, &|cluster| cluster.kill(2));
    check(&mut cluster, 5, &|cluster| cluster.start(2));
    drop(guest);
    cluster.node(1).ok(&["detach", "disk", "--yes"]);
    // Another node reads what that one wrote.
    let out = cluster.dir.path().join("out.raw");
    cluster
        .node(3)
        .ok(&["volume", "export", "disk", text(&out)]);
    let bytes = fs::read(&out).unwrap();
    for number in 0..SECTORS {
        let at = sector(number) as usize * 512;
        assert_eq!(bytes[at..at + 512], [5; 512], "{number}");
    }
}

#[test]
fn a_guest_goes_on_when_the_node_that_leads_the_metadata_is_killed() {
    let mut cluster = Cluster::of_three();
    let socket = cluster.dir.path().join("disk.sock");
    let two = cluster.node(2);
    two.ok(&["volume", "create", "disk", "64M"]);
    two.ok(&["attach", "volume", "disk", "--socket", text(&socket)]);
    let mut guest = Front::start(&socket, 1);
    guest.write(0, 1);
    // The first node leads: it has led since it was alone.
    cluster.kill(1);
    for sector in 0..32 {
        guest.write(sector * 2048, 2);
    }
    cluster.node(2).ok(&["volume", "create", "other", "64M"]);
    assert_eq!(guest.read(0, 0), [2; 512]);
    cluster.start(1);
    assert_eq!(guest.read(0, 31 * 2048), [2; 512]);
    let seen = cluster.node(1).json(&["volume", "list"]);
    assert_eq!(seen.as_array().unwrap().len(), 2);
}

#[test]
fn requests_wait_while_most_nodes_are_away_and_go_on_when_they_are_back() {
    let mut cluster = Cluster::of_three();
    let socket = cluster.dir.path().join("disk.sock");
    let one = cluster.node(1);
    one.ok(&["volume", "create", "disk", "64M"]);
    one.ok(&["attach", "volume", "disk", "--socket", text(&socket)]);
    let mut guest = Front::start(&socket, 1);
    guest.write(0, 1);
    cluster.kill(2);
    cluster.kill(3);
    // The answer is waited for, whatever it takes: an error would come, too.
    let (sender, written) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        guest.write_patiently(0, 2);
        // The test may have failed meanwhile.
        let _ = sender.send(guest);
    });
    // Longer than all leases.
    std::thread::sleep(std::time::Duration::from_secs(13));
    assert!(written.try_recv().is_err(), "nobody else has it");
    cluster.start(2);
    cluster.start(3);
    let mut guest = written.recv().unwrap();
    assert_eq!(guest.read(0, 0), [2; 512]);
}

#[test]
fn a_node_that_is_elsewhere_after_a_restart_is_found_there() {
    let mut cluster = Cluster::of_three();
    cluster.stop(3);
    let elsewhere = cluster.address(33);
    cluster.start_with(3, &["--listen", &elsewhere]);
    cluster.node(3).ok(&["volume", "create", "disk", "64M"]);
    // Two are a majority only if they reach each other.
    cluster.stop(1);
    let volumes = cluster.node(3).json(&["volume", "list"]);
    assert_eq!(volumes.as_array().unwrap().len(), 1);
    cluster.start(1);
}

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
    assert!(told.contains("\"node1\" is taken by node 1"), "{told}");
    let joined = cluster.join(2, &token);
    assert!(joined.status.success(), "{joined:?}");
    let told = one_error(&cluster.join(2, &token), 1);
    assert!(
        told.contains("holds node 2") && told.contains("--data"),
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
    assert!(told.contains("holds node 2"), "{told}");
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
fn a_token_of_another_cluster_and_one_that_leads_nowhere_are_told_as_such() {
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
    assert!(told.contains("penstock init"), "{told}");
    assert!(daemon.terminate().success());
    let init = run(&["init", "--data", text(dir.path()), "--listen", "127.0.0.1"]);
    let told = one_error(&init, 1);
    assert!(told.contains("a cluster of its own"), "{told}");
    let empty = temp();
    let served = serve_with(empty.path(), &["--listen", "127.0.0.1"]);
    let told = one_error(&served, 2);
    assert!(told.contains("penstock init"), "{told}");
    let told = one_error(&run(&["init", "--data", text(empty.path())]), 2);
    assert!(told.contains("--listen"), "{told}");
    let told = one_error(
        &run(&["init", "--data", text(empty.path()), "--listen", "0.0.0.0"]),
        2,
    );
    assert!(told.contains("cannot reach 0.0.0.0"), "{told}");
}

#[test]
fn a_removed_node_ends_by_itself_and_touches_nothing() {
    let mut cluster = Cluster::of_three();
    // One is away meanwhile, and learns of it when it starts.
    cluster.kill(3);
    let remove = |node: &str| cluster.node(1).run(&["node", "remove", node, "--yes"]);
    eventually(|| remove("node3").status.success());
    let data = cluster.data(3);
    let device = data.join("devices/0.img");
    let touched = || fs::metadata(&device).unwrap().modified().unwrap();
    let before = touched();
    let told = one_error(&serve_with(&data, &THIN), 1);
    assert!(
        told.contains("node 3 was removed from the cluster") && told.contains("penstock join"),
        "{told}"
    );
    assert_eq!(touched(), before);
    // The other one runs.
    assert!(remove("node2").status.success());
    let two = cluster.nodes[1].take().unwrap();
    assert_eq!(two.wait().code(), Some(1));
    cluster.node(1).ok(&["volume", "list"]);
}

#[test]
fn a_node_with_anothers_certificate_is_not_let_in() {
    let ours = Cluster::found("1");
    let token = ours.token();
    assert!(ours.join(2, &token).status.success());
    let other = temp();
    let made = run(&[
        "init",
        "--data",
        text(other.path()),
        "--listen",
        "127.0.0.1",
    ]);
    assert!(made.status.success(), "{made:?}");
    for file in ["node.pem", "node.key", "ca.pem"] {
        let (from, to) = (other.path().join("cluster"), ours.data(2).join("cluster"));
        fs::copy(from.join(file), to.join(file)).unwrap();
    }
    assert!(waits(&ours.data(2)));
    // The first node minds nothing of that.
    assert_eq!(ours.node(1).json(&["volume", "list"]), json!([]));
}

/// Whether a daemon says that it waits for its cluster; it is killed then.
fn waits(data: &Path) -> bool {
    waits_and(data, || ())
}

/// Same, with something to do before it is killed.
fn waits_and(data: &Path, meanwhile: impl FnOnce()) -> bool {
    let mut child = penstock()
        .args(["serve", "--device-size", DEVICE_SIZE, "--data", text(data)])
        .args(THIN)
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = BufReader::new(child.stderr.take().unwrap()).lines();
    let waits = lines
        .map_while(Result::ok)
        .any(|line| line.contains("waiting for the cluster"));
    meanwhile();
    child.kill().unwrap();
    child.wait().unwrap();
    waits
}

#[test]
fn a_daemon_that_waits_for_its_cluster_is_not_taken_for_one_that_is_not_there() {
    let mut cluster = Cluster::found("1");
    let joined = cluster.join(2, &cluster.token());
    assert!(joined.status.success(), "{joined:?}");
    cluster.stop(1);
    let data = cluster.data(2);
    let asked = waits_and(&data, || {
        let told = one_error(&run(&["health", "--data", text(&data)]), 1);
        assert!(told.contains("does not answer on"), "{told}");
    });
    assert!(asked);
    let told = one_error(&run(&["health", "--data", text(&data)]), 1);
    assert!(told.contains("no daemon answers on"), "{told}");
}

#[test]
fn a_node_that_has_lost_its_metadata_does_not_make_the_cluster_a_second_time() {
    let mut cluster = Cluster::found("1");
    cluster.stop(1);
    let data = cluster.data(1);
    for lost in ["meta", "devices"] {
        fs::remove_dir_all(data.join(lost)).unwrap();
    }
    let told = one_error(&serve(&data), 1);
    assert!(told.contains("node remove 1"), "{told}");
    assert!(!data.join("meta").exists() && !data.join("devices").exists());
}

#[test]
fn data_of_a_deleted_volume_go_from_every_node() {
    let mut cluster = Cluster::of_three();
    let image = cluster.dir.path().join("in.raw");
    fs::write(&image, vec![7; 8 << 20]).unwrap();
    cluster
        .node(1)
        .ok(&["volume", "import", "disk", text(&image)]);
    let used = |daemon: &Daemon| daemon.json(&["status"])["used_bytes"].as_u64().unwrap();
    for node in 1..=3 {
        eventually(|| used(cluster.node(node)) >= 8 << 20);
    }
    cluster.node(1).ok(&["volume", "delete", "disk", "--yes"]);
    eventually(|| used(cluster.node(1)) < 8 << 20);
    // Another looks when it starts, and from time to time.
    cluster.stop(2);
    cluster.start(2);
    eventually(|| used(cluster.node(2)) < 8 << 20);
}

#[test]
fn every_node_tells_how_all_are_and_what_is_wrong() {
    let mut cluster = Cluster::of_three();
    cluster.node(1).ok(&["volume", "create", "disk", "64M"]);
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
        assert!(doing.contains("its share is given to others"), "{doing}");
        let shown = cluster.node(node).json(&["node", "show", "node3"]);
        assert_eq!(
            (&shown["state"], &shown["since"]),
            (&json!("down"), &problem["since"])
        );
        assert_eq!(shown["devices"][0]["state"], "offline");
    }
    cluster.start(3);
    eventually(|| cluster.node(2).run(&["health"]).stdout == b"ok\n");

    // Without a majority nothing can be changed, and that is what is told.
    cluster.kill(2);
    cluster.kill(3);
    eventually(|| {
        let problems = problems(&cluster, 1);
        let what = problems.first().map(|problem| problem["what"].to_string());
        what.is_some_and(|what| what.contains("hears of no metadata leader: 2 of the 3 voters"))
    });
    assert!(cluster.node(1).ok(&["status"]).contains("node2"));
    for asked in [&["volume", "create", "more", "64M"][..], &["node", "list"]] {
        let told = cluster.node(1).refused(asked);
        assert!(told.contains("metadata has no majority"), "{told}");
        assert!(told.contains("does not reach node2, node3"), "{told}");
        assert_eq!(told.contains("nothing was changed"), asked[0] == "volume");
    }
}

#[test]
fn a_node_that_alone_has_something_is_removed_only_with_what_it_has() {
    let mut cluster = Cluster::found("1");
    let token = cluster.token();
    let joined = cluster.join(2, &token);
    assert!(joined.status.success(), "{joined:?}");
    cluster.start(2);
    cluster.node(1).ok(&["volume", "create", "disk", "64M"]);
    let lost = ["node", "remove", "node2", "--accept-data-loss", "--yes"];
    let told = cluster.node(1).refused(&lost);
    assert!(told.contains("is up and holds data"), "{told}");
    // The metadata stay with the first node: of two nodes only that one votes.
    cluster.kill(2);
    let is_down = || cluster.node(1).json(&["node", "show", "node2"])["state"] == "down";
    eventually(is_down);
    let told = cluster
        .node(1)
        .refused(&["node", "remove", "node2", "--yes"]);
    assert!(told.contains("only node 'node2' has"), "{told}");
    assert!(told.contains("of volume \"disk\""), "{told}");
    assert!(
        told.contains("repeat this with --accept-data-loss"),
        "{told}"
    );
    let told = one_error(&cluster.node(1).run(&lost[..4]), 2);
    assert!(told.contains("all data that only it has"), "{told}");
    cluster.node(1).ok(&lost);
    let nodes = cluster.node(1).json(&["node", "list"]);
    assert_eq!(nodes.as_array().unwrap().len(), 1);
    let events = cluster.node(1).ok(&["events"]);
    assert!(events.contains("gave up what only node 2 had"), "{events}");
    assert!(
        events.contains("nobody had anything that was complete"),
        "{events}"
    );
    // The volume is there, with a hole where that was.
    let out = cluster.dir.path().join("out.raw");
    cluster
        .node(1)
        .ok(&["volume", "export", "disk", text(&out)]);
}

#[test]
fn a_node_of_several_starts_without_a_device_and_makes_nothing_in_its_place() {
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
