//! The seed: what a machine is told at its first boot.
//!
//! It is YAML, in the form that cloud-init's NoCloud has (`user-data`, `meta-data`, `network-config` on a
//! disk labelled `cidata`), or one text with all of it (the credential `penstock.seed`, and the console's
//! wizard).
//! Of cloud-init's keys those that an appliance has a use for are understood. Any other key is an error that
//! names it: a machine that ignored one would not be what its operator believes it is.

use std::fmt;
use std::net::IpAddr;

use anyhow::{Context, Result, bail, ensure};
use serde::{Deserialize, Serialize};

use crate::network::Network;

/// Longest seed that is read, in bytes.
pub const SEED_BYTES_MAX: u64 = 1 << 20;
/// Longest name of a host, and of a label in it (RFC 1035).
const HOSTNAME_MAX: usize = 63;

/// Everything that a machine is told.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Seed {
    /// Name of the machine, and of its node.
    pub hostname: Option<String>,
    /// Public keys that let root in by ssh, as in `authorized_keys`. Without any there is no ssh.
    #[serde(default)]
    pub ssh_authorized_keys: Vec<String>,
    /// Servers of the time.
    #[serde(default)]
    pub ntp: Ntp,
    /// The network; DHCP on every card if nothing is said.
    pub network: Option<Network>,
    /// The node that the machine becomes. None: it waits for the console's wizard.
    pub penstock: Option<Node>,
}

/// Servers of the time.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Ntp {
    /// Names or addresses; Debian's if there is none.
    #[serde(default)]
    pub servers: Vec<String>,
}

/// What a machine becomes.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Node {
    /// Makes a cluster, whose first node this is.
    pub init: Option<Init>,
    /// The token by which it joins a cluster.
    pub join: Option<String>,
    /// Address at which other nodes reach this one; the first static one of `network` if nothing is said, or
    /// the one by which the machine reaches its gateway.
    pub listen: Option<IpAddr>,
    /// Some of `meta`, `storage`, `host`, `nfs`; all if nothing is said.
    pub roles: Option<Vec<String>>,
    /// Disks that the node takes.
    #[serde(default)]
    pub devices: Devices,
    /// `tls` or `crc`.
    pub wire: Option<String>,
    /// `tcp`, `auto` or `rdma`.
    pub transport: Option<String>,
    /// The rack or room.
    pub rack: Option<String>,
    /// Network card that gets a soft RoCE device: RDMA without RDMA hardware, for trying it out. Its name, or
    /// that of an entry of `network`.
    pub soft_roce: Option<String>,
}

/// How a cluster is made.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Init {
    /// Copies of all data, each on another node; 3 if nothing is said.
    pub replicas: Option<u8>,
}

/// Which disks a node takes.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Devices {
    /// None: it stores into a file on the rest of its boot disk.
    #[default]
    None,
    /// `all-empty`: every disk with nothing on it.
    Word(String),
    /// These, by path, like `/dev/disk/by-id/…`.
    Paths(Vec<String>),
}

/// The word for every disk with nothing on it.
pub const ALL_EMPTY: &str = "all-empty";

/// What makes a seed no seed; it names the key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SeedError(String);

impl fmt::Display for SeedError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for SeedError {}

/// `meta-data` of NoCloud.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct MetaData {
    #[serde(rename = "instance-id")]
    _instance_id: Option<String>,
    #[serde(rename = "local-hostname")]
    local_hostname: Option<String>,
}

/// `network-config` of NoCloud: with or without `network` around it.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum NetworkConfig {
    Wrapped { network: serde_yaml_ng::Value },
    Plain(serde_yaml_ng::Value),
}

impl Seed {
    /// One text with all of it.
    ///
    /// # Errors
    /// It is no YAML, has an unknown key, or a value that makes no sense; the error names it.
    pub fn parse(text: &str) -> Result<Self> {
        let seed: Self = match text.trim() {
            "" => Self::default(),
            text => serde_yaml_ng::from_str(text).context("the seed is not understood")?,
        };
        seed.check()?;
        Ok(seed)
    }

    /// The files of a NoCloud disk, of which `user-data` must be there.
    ///
    /// # Errors
    /// As [`Self::parse`]; the error says which file.
    pub fn of_nocloud(user: &str, meta: Option<&str>, network: Option<&str>) -> Result<Self> {
        ensure!(
            user.lines().next().unwrap_or_default().trim_end() == "#cloud-config",
            "user-data does not begin with the line #cloud-config; nothing else is run on an appliance"
        );
        let mut seed: Self = match serde_yaml_ng::from_str::<Option<Self>>(user) {
            Ok(seed) => seed.unwrap_or_default(),
            Err(e) => bail!("user-data: {e}"),
        };
        if let Some(text) = meta.map(str::trim).filter(|text| !text.is_empty()) {
            let meta: MetaData = serde_yaml_ng::from_str(text).context("meta-data")?;
            seed.hostname = seed.hostname.or(meta.local_hostname);
        }
        if let Some(text) = network.map(str::trim).filter(|text| !text.is_empty()) {
            let value = match serde_yaml_ng::from_str(text).context("network-config")? {
                NetworkConfig::Wrapped { network } => network,
                NetworkConfig::Plain(value) => value,
            };
            seed.network = Some(serde_yaml_ng::from_value(value).context("network-config")?);
        }
        seed.check()?;
        Ok(seed)
    }

    fn check(&self) -> Result<()> {
        if let Some(name) = &self.hostname {
            check_hostname(name)?;
        }
        for key in &self.ssh_authorized_keys {
            ensure!(
                !key.contains(['\n', '\r', '\0']) && key.split(' ').count() >= 2,
                "ssh_authorized_keys: '{key}' is no public key in one line"
            );
        }
        for server in &self.ntp.servers {
            ensure!(
                is_word(server),
                "ntp.servers: '{server}' is no name or address"
            );
        }
        if let Some(network) = &self.network {
            network.check()?;
        }
        self.penstock.as_ref().map_or(Ok(()), Node::check)
    }
}

impl Node {
    fn check(&self) -> Result<()> {
        match (&self.init, &self.join) {
            (Some(_), Some(_)) => {
                bail!("penstock: both init and join are given: a machine does one of them")
            }
            (None, None) => {
                bail!("penstock: neither init nor join is given: say `init: {{}}` or `join: TOKEN`")
            }
            (None, Some(token)) => ensure!(is_word(token), "penstock.join: '{token}' is no token"),
            (Some(_), None) => {}
        }
        match &self.devices {
            Devices::None => {}
            Devices::Word(word) => ensure!(
                word == ALL_EMPTY,
                "penstock.devices: '{word}' is neither {ALL_EMPTY} nor a list of paths"
            ),
            Devices::Paths(paths) => {
                for path in paths {
                    ensure!(
                        path.starts_with("/dev/") && is_word(path) && !path.contains(".."),
                        "penstock.devices: '{path}' is no path below /dev"
                    );
                }
            }
        }
        for (key, value) in [("soft_roce", &self.soft_roce), ("rack", &self.rack)] {
            if let Some(value) = value {
                ensure!(
                    is_word(value),
                    "penstock.{key}: '{value}' has characters that it cannot have"
                );
            }
        }
        Ok(())
    }
}

/// Letters, digits and hyphens, as DNS has it; no dots, because it is the name of a node.
fn check_hostname(name: &str) -> Result<()> {
    let is_allowed = |c: char| c.is_ascii_alphanumeric() || c == '-';
    ensure!(
        (1..=HOSTNAME_MAX).contains(&name.len())
            && name.chars().all(is_allowed)
            && !name.starts_with('-')
            && !name.ends_with('-'),
        "hostname: '{name}' is not 1 to {HOSTNAME_MAX} letters, digits and hyphens"
    );
    Ok(())
}

/// Text that goes into files of others and must not end their lines.
pub(crate) fn is_word(text: &str) -> bool {
    !text.is_empty()
        && text
            .chars()
            .all(|c| c.is_ascii_graphic() && !"\"'\\".contains(c))
}

#[cfg(test)]
mod tests {
    use super::*;

    const USER: &str = "#cloud-config\nhostname: one\nssh_authorized_keys:\n  - ssh-ed25519 AAAA op\n\
        penstock:\n  init: {replicas: 3}\n  devices: all-empty\n";

    #[test]
    fn the_files_of_nocloud_are_one_seed() {
        let meta = "instance-id: i-1\nlocal-hostname: other\n";
        let network = "version: 2\nethernets:\n  eth0:\n    addresses: [10.0.0.1/24]\n";
        let seed = Seed::of_nocloud(USER, Some(meta), Some(network)).expect("a seed");
        assert_eq!(
            seed.hostname.as_deref(),
            Some("one"),
            "user-data goes first"
        );
        let node = seed.penstock.as_ref().expect("a node");
        assert_eq!(node.init, Some(Init { replicas: Some(3) }));
        assert_eq!(node.devices, Devices::Word(ALL_EMPTY.to_owned()));
        let wrapped = format!("network:\n  {}", network.replace('\n', "\n  "));
        let same = Seed::of_nocloud(USER, Some(meta), Some(&wrapped)).expect("a seed");
        assert_eq!(same, seed);
        let again = serde_yaml_ng::to_string(&seed).expect("YAML");
        assert_eq!(Seed::parse(&again).expect("what was kept"), seed);
    }

    #[test]
    fn a_seed_without_a_node_waits() {
        let seed = Seed::of_nocloud("#cloud-config\n", Some("local-hostname: two\n"), None);
        let seed = seed.expect("a seed");
        assert_eq!(seed.hostname.as_deref(), Some("two"));
        assert_eq!(seed.penstock, None);
        assert_eq!(Seed::parse("").expect("nothing"), Seed::default());
    }

    #[test]
    fn what_is_not_understood_is_named() {
        let cases = [
            ("runcmd: [reboot]", "runcmd"),
            ("hostname: a b", "a b"),
            ("hostname: -a", "-a"),
            ("penstock: {}", "neither init nor join"),
            ("penstock: {init: {}, join: T}", "both init and join"),
            ("penstock: {join: 'a b'}", "no token"),
            ("penstock: {init: {}, devices: all}", "all-empty"),
            (
                "penstock: {init: {}, devices: [/etc/passwd]}",
                "/etc/passwd",
            ),
            (
                "penstock: {init: {}, devices: [/dev/../etc/passwd]}",
                "no path",
            ),
            ("penstock: {init: {copies: 3}}", "copies"),
            ("penstock: {init: {}, rack: \"a\\nb\"}", "rack"),
            (
                "ssh_authorized_keys: [\"ssh-rsa A\\nssh-rsa B\"]",
                "no public key",
            ),
            ("hostname: [", "not understood"),
        ];
        for (text, word) in cases {
            let refusal = Seed::parse(text).expect_err(text);
            assert!(format!("{refusal:#}").contains(word), "{text}: {refusal:#}");
        }
        let refusal = Seed::of_nocloud("#!/bin/sh\nreboot\n", None, None).expect_err("a script");
        assert!(refusal.to_string().contains("#cloud-config"), "{refusal}");
    }
}
