//! Nodes that make a cluster, on addresses of the loopback device.

mod choosing;
mod detach;
mod devices;
mod evicted;
mod first;
mod guests;
mod health;
mod joining;
mod moved;
mod offers;
mod recovery;
mod removal;
mod starts;
mod used;

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Output, Stdio};

use tempfile::TempDir;

use crate::harness::{DEVICE_SIZE, Daemon, StartingDaemon, eventually, penstock, run, temp, text};

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
    /// No node yet.
    fn empty() -> Self {
        let pid = std::process::id();
        Cluster {
            dir: temp(),
            net: format!("127.{}.{}", 64 + (pid >> 8) % 128, pid % 256),
            nodes: Vec::new(),
        }
    }

    /// Made, and its first node running.
    fn found(replicas: &str) -> Self {
        let mut cluster = Self::empty();
        let made = cluster.init(replicas);
        assert!(made.status.success(), "{made:?}");
        cluster.start(1);
        cluster
    }

    fn init(&self, replicas: &str) -> Output {
        self.init_with(replicas, &[])
    }

    fn init_with(&self, replicas: &str, options: &[&str]) -> Output {
        let (data, listen) = (self.data(1), self.address(1));
        let init = [
            "init",
            "--data",
            text(&data),
            "--listen",
            &listen,
            "--name",
            "node1",
            "--replicas",
            replicas,
        ];
        run(&[&init, options].concat())
    }

    /// With three nodes.
    fn of_three() -> Self {
        let mut cluster = Self::found("3");
        for node in [2, 3] {
            cluster.add(node);
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

    /// A node exports these bytes of a volume.
    fn export_is(&self, node: usize, volume: &str, bytes: &[u8]) {
        let copy = self.dir.path().join("copy");
        let export = ["volume", "export", volume, text(&copy), "--force"];
        self.node(node).ok(&export);
        assert!(
            std::fs::read(&copy).unwrap() == bytes,
            "node {node} has other data"
        );
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
        let starting = self.begin(node, options);
        self.ready(node, starting);
    }

    /// Starts a node that may have to wait for others.
    fn begin(&self, node: usize, options: &[&str]) -> StartingDaemon {
        StartingDaemon::begin(penstock(), &self.data(node), &[&THIN, options].concat())
    }

    /// Waits until it is ready.
    fn ready(&mut self, node: usize, starting: StartingDaemon) {
        self.nodes.resize_with(self.nodes.len().max(node), || None);
        self.nodes[node - 1] = Some(starting.ready());
    }

    fn stop(&mut self, node: usize) {
        let daemon = self.nodes[node - 1].take().unwrap();
        assert!(daemon.terminate().success());
    }

    fn kill(&mut self, node: usize) {
        self.nodes[node - 1].take().unwrap().kill();
    }

    /// A token for a node with all roles.
    fn token(&self) -> String {
        let roles = "meta,storage,host,nfs";
        let token = self.node(1).ok(&["token", "create", "--roles", roles]);
        token.trim().to_owned()
    }

    /// Joins a node with all roles, and starts it.
    fn add(&mut self, node: usize) {
        self.add_by(node, &self.token(), &[]);
    }

    /// Joins a node by this token, and starts it.
    fn add_by(&mut self, node: usize, token: &str, options: &[&str]) {
        let joined = self.join_with(node, token, options);
        assert!(joined.status.success(), "{joined:?}");
        self.start(node);
    }

    fn join(&self, node: usize, token: &str) -> Output {
        self.join_with(node, token, &[])
    }

    fn join_with(&self, node: usize, token: &str, options: &[&str]) -> Output {
        let (data, listen) = (self.data(node), self.address(node));
        let name = format!("node{node}");
        let join = [
            "join",
            token,
            "--data",
            text(&data),
            "--listen",
            &listen,
            "--name",
            &name,
        ];
        run(&[&join, options].concat())
    }
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

/// Blocks that differ, with holes between.
fn image(path: &Path) -> Vec<u8> {
    let mut bytes = vec![0; 6 << 20];
    for (number, block) in bytes.chunks_mut(4096).enumerate() {
        if number % 5 != 0 {
            block.fill((number % 251) as u8);
        }
    }
    std::fs::write(path, &bytes).unwrap();
    bytes
}
