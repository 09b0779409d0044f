//! Several daemons that make one cluster, each on a machine of its own as far as it can tell.

use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use fault_rig::{PoweredDevice, Survival};
use guest_rig::complaints::LogMark;
use guest_rig::process::wait_until;
use guest_rig::{Daemon, DaemonOptions};
use serde_json::Value;
use tempfile::TempDir;

use crate::clock::{self, Clock};
use crate::network::Network;

/// Nodes find each other, elect, and place what there is; on a busy machine.
const READY_LIMIT: Duration = Duration::from_secs(120);
/// Lines that an error quotes of each node's log.
const QUOTED_LINES: usize = 25;

/// How a cluster is made.
#[derive(Debug, Clone)]
pub struct ClusterOptions {
    /// The `penstock` binary.
    pub binary: PathBuf,
    /// Nodes at the beginning.
    pub nodes: u8,
    /// Copies of everything in the default pool.
    pub replicas: u8,
    /// Size of each node's device.
    pub device_bytes: u64,
    /// Whether each device is a file that is written in whole, and not a thin one.
    pub full_files: bool,
    /// Whether the power of the devices can be cut. They are slower then.
    pub powered: bool,
    /// `tls` or `crc`; the daemon's default if none is given.
    pub wire: Option<String>,
    /// Further arguments of every `penstock serve`.
    pub serve_args: Vec<String>,
    /// The only processor that the daemons run on.
    pub cpu: Option<usize>,
    /// Addresses of the loopback device instead of a network of namespaces: no root needed, and nothing to
    /// cut.
    pub loopback: bool,
    /// Addresses of this machine, one for each node, likewise.
    pub addresses: Vec<String>,
    /// Block devices of this machine, one for each node, instead of thin files.
    pub block_devices: Vec<PathBuf>,
    /// Whether the nodes' clocks can be set.
    pub clocks: bool,
    /// Where the nodes' directories are made; the system's temporary directory if none is given.
    pub base: Option<PathBuf>,
}

impl ClusterOptions {
    /// `nodes` nodes with thin devices of 4 GiB and, if there are as many, three copies.
    pub fn new(binary: PathBuf, nodes: u8) -> Self {
        Self {
            binary,
            nodes,
            replicas: nodes.min(3),
            device_bytes: 4 << 30,
            full_files: false,
            powered: false,
            wire: None,
            serve_args: Vec::new(),
            cpu: None,
            loopback: false,
            addresses: Vec::new(),
            block_devices: Vec::new(),
            clocks: false,
            base: None,
        }
    }

    /// The same cluster on devices whose power can be cut.
    pub fn powered(mut self, device_bytes: u64) -> Self {
        self.powered = true;
        self.device_bytes = device_bytes;
        self
    }
}

/// A node: its daemon, which may be running or not, and its device.
#[derive(Debug)]
pub struct Node {
    number: u8,
    daemon: Daemon,
    // After the daemon: what uses a device goes before it.
    device: Option<PoweredDevice>,
    clock: Option<Clock>,
}

impl Node {
    /// Its number, from one. Numbers are not used again.
    pub fn number(&self) -> u8 {
        self.number
    }

    /// Its name in the cluster.
    pub fn name(&self) -> String {
        format!("node{}", self.number)
    }

    /// Its daemon.
    pub fn daemon(&self) -> &Daemon {
        &self.daemon
    }

    /// `kill -9`.
    pub fn kill(&mut self) -> Result<()> {
        self.daemon.kill()
    }

    /// SIGTERM, which must be obeyed.
    pub fn stop(&mut self) -> Result<()> {
        let status = self.daemon.stop()?;
        ensure!(
            status.success(),
            "node {}: penstock serve {} on SIGTERM",
            self.number,
            guest_rig::process::describe(status)
        );
        Ok(())
    }

    /// Stops it as [`Node::stop`] does and starts it again.
    pub fn restart(&mut self) -> Result<()> {
        self.stop()?;
        self.start()
    }

    /// Starts its daemon and waits until it answers.
    pub fn start(&mut self) -> Result<()> {
        self.daemon.start_again()
    }

    /// Starts its daemon and does not wait: a node that comes back before a majority has nothing to say yet.
    pub fn spawn(&mut self) -> Result<()> {
        self.daemon.spawn()
    }

    /// Cuts the power of its device; returns how many blocks were lost.
    pub fn cut_power(&self, survival: Survival) -> Result<usize> {
        let device = self
            .device
            .as_ref()
            .context("this cluster was not made with devices whose power can be cut")?;
        device.cut(survival)
    }

    /// Sets its wall clock to `seconds` after the machine's.
    pub fn set_clock(&self, seconds: i64) -> Result<()> {
        let clock = self.clock.as_ref();
        clock
            .context("this cluster was not made with clocks that can be set")?
            .set(seconds)
    }
}

/// The cluster. Dropping it kills its daemons and removes everything.
#[derive(Debug)]
pub struct Cluster {
    // In the order in which they can be taken apart.
    nodes: Vec<Node>,
    network: Option<Network>,
    machines: u8,
    /// Nodes that somebody else runs.
    elsewhere: usize,
    clock_library: Option<PathBuf>,
    scratch: TempDir,
    options: ClusterOptions,
}

impl Cluster {
    /// Makes a cluster and waits until every node is up.
    pub fn start(options: ClusterOptions) -> Result<Self> {
        let network = match options.loopback || !options.addresses.is_empty() {
            true => None,
            false => Some(Network::new(0)?),
        };
        let base = options.base.clone().unwrap_or_else(std::env::temp_dir);
        let scratch = tempfile::Builder::new()
            .prefix("penstock-cluster-")
            .tempdir_in(base)
            .context("make a directory for the nodes")?;
        let clock_library = match options.clocks {
            true => Some(clock::build(scratch.path())?),
            false => None,
        };
        let mut cluster = Self {
            nodes: Vec::new(),
            network,
            machines: 0,
            elsewhere: 0,
            clock_library,
            scratch,
            options,
        };
        let replicas = cluster.options.replicas.to_string();
        cluster.add("init", &["--replicas", &replicas])?;
        for _ in 1..cluster.options.nodes {
            cluster.join()?;
        }
        cluster.wait_ready()?;
        Ok(cluster)
    }

    /// Adds one node with a token of a running one; returns its number.
    pub fn join(&mut self) -> Result<u8> {
        let token = self.token()?;
        self.add("join", &[&token])
    }

    /// Nodes that are added from now on have devices of this size.
    pub fn set_device_bytes(&mut self, bytes: u64) {
        self.options.device_bytes = bytes;
    }

    /// So many nodes of the cluster are run by somebody else, and up when all is well.
    pub fn expect_elsewhere(&mut self, nodes: usize) {
        self.elsewhere = nodes;
    }

    /// Creates a token for a node with all roles on the first running node.
    pub fn token(&self) -> Result<String> {
        let create = ["token", "create", "--roles", "meta,storage,host,nfs"];
        let token = self.any()?.daemon.cli(&create)?;
        Ok(token.trim().to_owned())
    }

    /// A machine with a device and no node on it yet; returns its number.
    pub fn add_machine(&mut self) -> Result<u8> {
        if let Some(network) = &mut self.network {
            network.add_node()?;
        }
        self.machines += 1;
        let number = self.machines;
        let directory = self.scratch.path().join(format!("node{number}"));
        std::fs::create_dir(&directory).context("make a node's directory")?;
        let bytes = self.options.device_bytes;
        let device = self
            .options
            .powered
            .then(|| PoweredDevice::new(&directory, bytes))
            .transpose()?;
        let mut options = DaemonOptions::new(self.options.binary.clone(), &[]);
        options.namespace = self.network.as_ref().map(|net| net.namespace(number));
        options.cpu = self.options.cpu;
        let given = self.options.block_devices.get(usize::from(number) - 1);
        let path = device.as_ref().map(PoweredDevice::path);
        options.args = match path.or(given.map(PathBuf::as_path)) {
            Some(path) => vec!["--device".to_owned(), path.display().to_string()],
            None => vec![
                "--device-size".to_owned(),
                format!("{}M", bytes >> 20),
                "--preallocation".to_owned(),
                if self.options.full_files {
                    "full"
                } else {
                    "off"
                }
                .to_owned(),
            ],
        };
        options.args.extend(self.options.serve_args.iter().cloned());
        let clock = match &self.clock_library {
            Some(library) => {
                let clock = Clock::new(&directory)?;
                options.env.extend(clock.env(library));
                Some(clock)
            }
            None => None,
        };
        self.nodes.push(Node {
            number,
            daemon: Daemon::stopped(&directory.join("data"), options),
            device,
            clock,
        });
        Ok(number)
    }

    /// Runs `init` or `join` with what a node of this cluster is told, on a machine of it.
    pub fn init_or_join(&self, number: u8, verb: &str, args: &[&str]) -> Result<String> {
        let address = self.address(number);
        let name = format!("node{number}");
        let mut all = vec![verb];
        all.extend(args);
        all.extend(["--listen", &address, "--name", &name]);
        if let Some(wire) = &self.options.wire {
            all.extend(["--wire", wire]);
        }
        self.node(number)?.daemon.cli(&all)
    }

    fn add(&mut self, verb: &str, args: &[&str]) -> Result<u8> {
        let number = self.add_machine()?;
        self.init_or_join(number, verb, args)?;
        self.node_mut(number)?.start()?;
        Ok(number)
    }

    /// A node by number.
    pub fn node(&self, number: u8) -> Result<&Node> {
        self.nodes
            .iter()
            .find(|node| node.number == number)
            .with_context(|| format!("there is no node {number}"))
    }

    /// A node by number.
    pub fn node_mut(&mut self, number: u8) -> Result<&mut Node> {
        self.nodes
            .iter_mut()
            .find(|node| node.number == number)
            .with_context(|| format!("there is no node {number}"))
    }

    /// All nodes that were not thrown away.
    pub fn nodes(&self) -> &[Node] {
        &self.nodes
    }

    /// The network.
    pub fn network(&mut self) -> Result<&mut Network> {
        self.network
            .as_mut()
            .context("this cluster is on the loopback device")
    }

    /// The address of a node.
    pub fn address(&self, number: u8) -> String {
        let given = self.options.addresses.get(usize::from(number) - 1);
        match (&self.network, given) {
            (_, Some(given)) => given.clone(),
            (Some(network), None) => network.address(number),
            (None, None) => {
                // Of the process id, so that clusters of several processes do not meet.
                let pid = std::process::id();
                format!("127.{}.{}.{number}", 64 + (pid >> 8) % 128, pid % 256)
            }
        }
    }

    /// A place for files of the test's own.
    pub fn directory(&self) -> &Path {
        self.scratch.path()
    }

    /// The first running node.
    pub fn any(&self) -> Result<&Node> {
        self.nodes
            .iter()
            .find(|node| node.daemon.is_started())
            .context("no node is running")
    }

    /// Throws a machine away, with everything on it. Its address is not used again.
    pub fn discard(&mut self, number: u8) -> Result<()> {
        let node = self.node_mut(number)?;
        if node.daemon.is_started() {
            node.kill()?;
        }
        self.nodes.retain(|node| node.number != number);
        std::fs::remove_dir_all(self.scratch.path().join(format!("node{number}")))
            .context("remove a node's directory")
    }

    /// Has the cluster forget a node. One that died is refused until the others take it for down, so this
    /// asks repeatedly.
    pub fn forget(&self, number: u8) -> Result<()> {
        let name = format!("node{number}");
        let mut refused = None;
        self.wait("a node is forgotten", READY_LIMIT, |cluster| {
            let remove = ["node", "remove", &name, "--yes"];
            match cluster.any()?.daemon.cli(&remove) {
                Ok(_) => Ok(Some(())),
                Err(error) => {
                    refused = Some(error);
                    Ok(None)
                }
            }
        })
        .with_context(|| format!("last refused: {refused:?}"))
    }

    /// `kill -9` of all daemons, then the power of all devices is cut; returns how many blocks each one lost.
    pub fn cut_power_of_all(&mut self, seed: u64) -> Result<Vec<usize>> {
        for node in &mut self.nodes {
            node.kill()?;
        }
        self.nodes
            .iter()
            .map(|node| {
                // A seed of its own for each, or all would lose the same.
                let seed = seed.wrapping_add(u64::from(node.number) << 32);
                node.cut_power(Survival::Random(seed))
            })
            .collect()
    }

    /// Starts all daemons that are not running and waits until all serve.
    pub fn start_all(&mut self) -> Result<()> {
        let down = |node: &&mut Node| !node.daemon.is_started();
        for node in self.nodes.iter_mut().filter(down) {
            node.spawn()?;
        }
        self.wait("all nodes serve", READY_LIMIT, |cluster| {
            let serves = |node: &Node| node.daemon.serves();
            Ok(cluster.nodes.iter().all(serves).then_some(()))
        })
    }

    /// Fails if a node has logged a warning or an error since its first start. For clusters in which no node
    /// was killed or cut off.
    pub fn ensure_no_complaints(&self) -> Result<()> {
        for node in &self.nodes {
            let quiet = node.daemon.ensure_no_complaints(LogMark::default());
            quiet.with_context(|| format!("node {}", node.number))?;
        }
        Ok(())
    }

    /// Waits until nothing is wrong and all copies are there.
    pub fn wait_ready(&self) -> Result<Duration> {
        let begin = Instant::now();
        self.wait("the cluster is well", READY_LIMIT, |cluster| {
            Ok(cluster.is_ready()?.then_some(()))
        })?;
        Ok(begin.elapsed())
    }

    /// Whether nothing is wrong and all copies are there, as the first running node tells. A node that cannot
    /// tell now is asked again later.
    pub fn is_ready(&self) -> Result<bool> {
        let daemon = &self.any()?.daemon;
        let (Ok(pools), Ok(nodes), Ok(status)) = (
            daemon.json(&["pool", "list"]),
            daemon.json(&["node", "list"]),
            daemon.json(&["status"]),
        ) else {
            return Ok(false);
        };
        let all = |value: &Value, test: &dyn Fn(&Value) -> bool| {
            value.as_array().is_some_and(|list| list.iter().all(test))
        };
        let running = self.nodes.iter().filter(|node| node.daemon.is_started());
        let up = nodes.as_array().map(|list| {
            let up = |node: &&Value| node["state"] == "up";
            list.iter().filter(up).count()
        });
        // Nodes begin to vote shortly after they joined; until then the others cannot do without the first.
        let problems = status["health"]["problems"].to_string();
        Ok(up == Some(running.count() + self.elsewhere)
            && !problems.contains("voters")
            && all(&pools, &|pool| {
                let groups = &pool["groups"];
                groups["in_sync"] == groups["total"]
                    && [&groups["syncing"], &groups["moving"]]
                        .iter()
                        .all(|count| **count == 0)
            }))
    }

    /// Waits for something; when it does not come, the error tells how the cluster is and what its nodes said
    /// last.
    pub fn wait<T>(
        &self,
        what: &str,
        limit: Duration,
        mut ready: impl FnMut(&Self) -> Result<Option<T>>,
    ) -> Result<T> {
        wait_until(limit, || ready(self)).or_else(|error| {
            bail!("{what}: {error:#}\n{}", self.report());
        })
    }

    /// How the cluster is, and the ends of the nodes' logs.
    pub fn report(&self) -> String {
        let mut text = String::new();
        for node in &self.nodes {
            let _ = writeln!(text, "--- {}", node.name());
            if node.daemon.is_started() {
                for question in [["health"].as_slice(), &["node", "list"], &["pool", "list"]] {
                    let answer = node.daemon.cli(question);
                    let answer = answer.unwrap_or_else(|error| format!("{error:#}"));
                    let _ = writeln!(text, "{}", answer.trim_end());
                }
            } else {
                let _ = writeln!(text, "not running");
            }
            let log = node.daemon.log();
            let lines: Vec<&str> = log.lines().collect();
            for line in &lines[lines.len().saturating_sub(QUOTED_LINES)..] {
                let _ = writeln!(text, "{line}");
            }
        }
        text
    }
}
