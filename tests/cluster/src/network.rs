//! A network of nodes on one machine: each in a network namespace of its own with an address of its own, all
//! on one bridge in one more namespace, so that nothing shows on the machine's own network. Packets are
//! dropped by nftables inside the namespaces.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

use anyhow::{Context, Result, bail, ensure};
use guest_rig::paths::find_program;
use guest_rig::process::{enter_namespace, run};

/// What the names of all our namespaces begin with; the process's id follows.
const PREFIX: &str = "pst";
/// Nodes of one network: what the last byte of an address allows is far more than a machine can run.
pub const NODES_MAX: u8 = 16;

/// Networks of this process, counted for their names.
static NETWORKS: AtomicU32 = AtomicU32::new(0);

/// Which packets are dropped, as the node sees it that the cut is made at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CutDirection {
    /// Both ways: a pulled cable.
    Both,
    /// What comes in. What the node says is heard.
    In,
    /// What goes out. The node hears and is not heard.
    Out,
    /// What comes in to the node's own ports, as a firewall does. Connections that it makes work both ways.
    InToPorts,
}

/// The ports at which nodes reach each other, as nft writes them.
const PORTS: &str = "7470-7472";

impl CutDirection {
    fn drops_in(self) -> bool {
        matches!(self, Self::Both | Self::In)
    }

    fn drops_out(self) -> bool {
        matches!(self, Self::Both | Self::Out)
    }
}

/// Namespaces, a bridge and the cables between. Dropping it removes everything.
#[derive(Debug)]
pub struct Network {
    name: String,
    nodes: u8,
    /// Cuts at each node: to whom, and which way.
    cuts: BTreeMap<(u8, u8), CutDirection>,
    addresses: fn(u8) -> String,
}

impl Network {
    /// Makes the network of `nodes` nodes, numbered from one, after removing what runs that were killed have
    /// left.
    pub fn new(nodes: u8) -> Result<Self> {
        Self::with_addresses(nodes, |node| format!("10.77.0.{node}"))
    }

    /// Same, with the nodes' addresses. They share their first three bytes.
    pub fn with_addresses(nodes: u8, addresses: fn(u8) -> String) -> Result<Self> {
        ensure!(
            rustix::process::geteuid().is_root(),
            "network namespaces need root: run this as root (with sudo, keep HOME and CARGO_HOME)"
        );
        for program in ["ip", "nft"] {
            ensure!(
                find_program(program).is_some(),
                "{program} is missing: `cargo xtask packages` installs it"
            );
        }
        remove_leftovers()?;
        let count = NETWORKS.fetch_add(1, Ordering::Relaxed);
        let mut network = Self {
            name: format!("{PREFIX}{}n{count}", std::process::id()),
            nodes: 0,
            cuts: BTreeMap::new(),
            addresses,
        };
        let hub = network.hub();
        ip(&["netns", "add", &hub])?;
        ip(&["-n", &hub, "link", "add", "br0", "type", "bridge"])?;
        ip(&["-n", &hub, "link", "set", "br0", "up"])?;
        for _ in 0..nodes {
            network.add_node()?;
        }
        Ok(network)
    }

    /// Connects one more node and returns its number.
    pub fn add_node(&mut self) -> Result<u8> {
        ensure!(self.nodes < NODES_MAX, "more than {NODES_MAX} nodes");
        let node = self.nodes + 1;
        let (hub, own) = (self.hub(), self.namespace(node));
        let (port, address) = (format!("node{node}"), format!("{}/24", self.address(node)));
        ip(&["netns", "add", &own])?;
        // From here on Drop removes it.
        self.nodes = node;
        ip(&["-n", &own, "link", "set", "lo", "up"])?;
        ip(&[
            "link", "add", "eth0", "netns", &own, "type", "veth", "peer", "name", &port, "netns",
            &hub,
        ])?;
        ip(&["-n", &hub, "link", "set", &port, "master", "br0", "up"])?;
        ip(&["-n", &own, "addr", "add", &address, "dev", "eth0"])?;
        ip(&["-n", &own, "link", "set", "eth0", "up"])?;
        Ok(node)
    }

    /// The namespace of a node, by the name under `/run/netns`.
    pub fn namespace(&self, node: u8) -> String {
        format!("{}-{node}", self.name)
    }

    /// The address of a node.
    pub fn address(&self, node: u8) -> String {
        (self.addresses)(node)
    }

    /// Drops packets between `node` and all others.
    pub fn cut(&mut self, node: u8, way: CutDirection) -> Result<()> {
        for peer in (1..=self.nodes).filter(|peer| *peer != node) {
            self.cuts.insert((node, peer), way);
        }
        self.apply(node)
    }

    /// Drops packets between two nodes; `way` is as `node` sees it.
    pub fn cut_pair(&mut self, node: u8, peer: u8, way: CutDirection) -> Result<()> {
        self.cuts.insert((node, peer), way);
        self.apply(node)
    }

    /// Lets everything through again that a cut at `node` dropped.
    pub fn heal(&mut self, node: u8) -> Result<()> {
        self.cuts.retain(|(at, _), _| *at != node);
        self.apply(node)
    }

    /// Lets everything through everywhere.
    pub fn heal_all(&mut self) -> Result<()> {
        self.cuts.clear();
        (1..=self.nodes).try_for_each(|node| self.apply(node))
    }

    fn hub(&self) -> String {
        format!("{}-hub", self.name)
    }

    /// Replaces the rules in a node's namespace, in one transaction.
    fn apply(&self, node: u8) -> Result<()> {
        let mut child = Command::new("nft");
        enter_namespace(&mut child, &self.namespace(node))?;
        let mut child = child
            .args(["-f", "-"])
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .context("run nft")?;
        let mut stdin = child.stdin.take().context("nft has no stdin")?;
        stdin.write_all(self.rules(node).as_bytes())?;
        drop(stdin);
        let output = child.wait_with_output().context("wait for nft")?;
        if !output.status.success() {
            bail!(
                "nft refuses the rules of node {node}: {}",
                String::from_utf8_lossy(&output.stderr)
            );
        }
        Ok(())
    }

    fn rules(&self, node: u8) -> String {
        let cuts = || self.cuts.iter().filter(move |((at, _), _)| *at == node);
        let dropped = |field: &str, ports: &str, wanted: fn(CutDirection) -> bool| -> String {
            cuts()
                .filter(|(_, way)| wanted(**way))
                .map(|((_, peer), _)| {
                    format!("    ip {field} {}{ports} drop\n", self.address(*peer))
                })
                .collect()
        };
        let to_ports = format!(" tcp dport {PORTS}");
        format!(
            "table inet rig\ndelete table inet rig\ntable inet rig \
             {{\n  chain in {{\n    type filter hook input priority 0; \
             policy accept;\n{}{}  }}\n  chain out {{\n    type filter hook output priority 0; policy \
             accept;\n{}  }}\n}}\n",
            dropped("saddr", "", CutDirection::drops_in),
            dropped("saddr", &to_ports, |way| way == CutDirection::InToPorts),
            dropped("daddr", "", CutDirection::drops_out)
        )
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        // The cables go with the namespaces that they end in.
        for node in 1..=self.nodes {
            let _ = ip(&["netns", "delete", &self.namespace(node)]);
        }
        let _ = ip(&["netns", "delete", &self.hub()]);
    }
}

fn ip(args: &[&str]) -> Result<String> {
    run(Command::new("ip").args(args))
}

/// Removes the namespaces of processes that are gone. Their daemons went with them.
fn remove_leftovers() -> Result<()> {
    for line in ip(&["netns", "list"])?.lines() {
        let name = line.split_whitespace().next().unwrap_or_default();
        if owner(name).is_some_and(|pid| !Path::new(&format!("/proc/{pid}")).exists()) {
            // Another run may be removing it as well.
            let _ = ip(&["netns", "delete", name]);
        }
    }
    Ok(())
}

/// The process that made the namespace called `name`, if it is one of ours.
fn owner(name: &str) -> Option<u32> {
    let (pid, rest) = name.strip_prefix(PREFIX)?.split_once('n')?;
    rest.contains('-').then_some(())?;
    pid.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_our_own_namespaces_have_an_owner() {
        assert_eq!(owner("pst4711n0-hub"), Some(4711));
        assert_eq!(owner("pst4711n12-3"), Some(4711));
        for other in ["pst", "pst4711", "pstn-1", "cni-4711n0-1", "pst4711n0"] {
            assert_eq!(owner(other), None, "{other}");
        }
    }
}
