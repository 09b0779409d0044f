//! Until the machine is a node: its disks are chosen, the daemon's configuration is written, and the node is
//! made or joins. Each step is kept before the next begins, so that a loss of power at any moment goes on
//! where it was.

use std::net::{IpAddr, UdpSocket};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde::Serialize;

use crate::disks::{self, Disk};
use crate::machine::Machine;
use crate::process::run;
use crate::seed::{Devices, Node, Seed};

/// The daemon's data directory, a partition of the boot disk.
pub const DATA: &str = "/var/lib/penstock";
/// How long a named disk may take to appear.
const DISKS_APPEAR: Duration = Duration::from_secs(60);
/// Between two tries to make or join a cluster; doubled each time up to the second.
const RETRY: [Duration; 2] = [Duration::from_secs(5), Duration::from_secs(60)];
/// Any address outside: nothing is sent there, the kernel is only asked which way it would go.
const OUTSIDE: [&str; 2] = ["192.0.2.1:9", "[2001:db8::1]:9"];

/// Makes the machine a node, by `program`, which is `penstock`. Returns at once if the machine has not been
/// told what to be.
///
/// # Errors
/// What the seed asks for cannot be: a disk that is not there or has data on it. It is told on the console,
/// too, and done at the next boot or when the console asks.
pub fn run_to_end(machine: &Machine, program: &Path) -> Result<()> {
    let Some((seed, node)) = machine
        .seed()?
        .and_then(|seed| Some((seed.clone(), seed.penstock?)))
    else {
        if machine.message().is_none() {
            machine.tell("this machine has not been told what to be: press w for the wizard");
        }
        return Ok(());
    };
    let outcome = (|| {
        choose_disks(machine, &node)?;
        write_configuration(machine, &seed, &node)?;
        own_data()
    })();
    if let Err(error) = outcome {
        machine.tell(&format!("this machine is no node yet: {error:#}"));
        return Err(error);
    }
    enter(machine, program, &node);
    forget_token(machine, seed)?;
    machine.become_node()?;
    machine.hush();
    Ok(())
}

/// Chooses the disks once: at a second try after a loss of power they may have the node's data on them.
fn choose_disks(machine: &Machine, node: &Node) -> Result<()> {
    if machine.devices()?.is_some() {
        return Ok(());
    }
    let chosen = match &node.devices {
        Devices::None => Vec::new(),
        Devices::Word(_) => {
            let all = disks::list()?;
            let empty = disks::all_empty(&all);
            if empty.is_empty() {
                bail!(
                    "no disk is empty, and the seed says all-empty; there are: {}",
                    list(&all)
                );
            }
            empty.into_iter().map(stable_path).collect()
        }
        Devices::Paths(paths) => paths
            .iter()
            .map(|path| named(Path::new(path)))
            .collect::<Result<_>>()?,
    };
    machine.keep_devices(&chosen)
}

/// A disk that the seed names; it has to be empty.
fn named(path: &Path) -> Result<PathBuf> {
    let begin = Instant::now();
    while !path.exists() && begin.elapsed() < DISKS_APPEAR {
        std::thread::sleep(Duration::from_millis(500));
    }
    let disk = match disks::find(path) {
        Ok(disk) => disk,
        Err(error) => bail!("{error:#}; there are: {}", list(&disks::list()?)),
    };
    match &disk.content {
        None => Ok(path.to_owned()),
        Some(content) => bail!(
            "disk {} is not empty ({content}) and is left as it is; name another, or clear it with \
             `wipefs --all` if nothing on it is needed",
            path.display()
        ),
    }
}

fn list(disks: &[Disk]) -> String {
    let lines: Vec<String> = disks.iter().map(disks::describe).collect();
    lines.join("; ")
}

/// The name of a disk that stays its name when others come and go.
fn stable_path(disk: &Disk) -> PathBuf {
    let links = std::fs::read_dir("/dev/disk/by-id")
        .into_iter()
        .flatten()
        .flatten();
    let mut links: Vec<PathBuf> = links
        .map(|link| link.path())
        .filter(|link| std::fs::canonicalize(link).is_ok_and(|real| real == disk.path))
        .collect();
    links.sort();
    links
        .into_iter()
        .next()
        .unwrap_or_else(|| disk.path.clone())
}

/// The daemon's configuration, as TOML.
#[derive(Serialize)]
struct Configuration<'a> {
    data: &'a str,
    user: &'a str,
    sandbox: &'a str,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    devices: Vec<PathBuf>,
    socket_dirs: [&'a str; 1],
    socket_owner: &'a str,
    socket_mode: &'a str,
    listen: IpAddr,
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    roles: Option<&'a [String]>,
    #[serde(skip_serializing_if = "Option::is_none")]
    wire: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    transport: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    labels: Option<Labels<'a>>,
}

#[derive(Serialize)]
struct Labels<'a> {
    rack: &'a str,
}

fn write_configuration(machine: &Machine, seed: &Seed, node: &Node) -> Result<()> {
    let listen = match (node.listen, &seed.network) {
        (Some(address), _) => Some(address),
        (None, Some(network)) => network.first_address(),
        (None, None) => None,
    };
    let listen = match listen.or_else(own_address) {
        Some(address) => address,
        None => bail!(
            "this machine has no address yet; say one as penstock.listen, or see to the network"
        ),
    };
    let configuration = Configuration {
        data: DATA,
        user: "penstock",
        sandbox: "on",
        devices: machine.devices()?.unwrap_or_default(),
        socket_dirs: ["/run/penstock"],
        socket_owner: ":libvirt-qemu",
        socket_mode: "0660",
        listen,
        name: seed.hostname.as_deref(),
        roles: node.roles.as_deref(),
        wire: node.wire.as_deref(),
        transport: node.transport.as_deref(),
        labels: node.rack.as_deref().map(|rack| Labels { rack }),
    };
    let text = toml::to_string(&configuration).context("write the configuration")?;
    machine.keep_configuration(&text)
}

/// The address by which this machine would speak to one outside.
fn own_address() -> Option<IpAddr> {
    OUTSIDE.iter().find_map(|outside| {
        let any = if outside.starts_with('[') {
            "[::]:0"
        } else {
            "0.0.0.0:0"
        };
        let socket = UdpSocket::bind(any).ok()?;
        socket.connect(outside).ok()?;
        let address = socket.local_addr().ok()?.ip();
        (!address.is_unspecified() && !address.is_loopback()).then_some(address)
    })
}

fn own_data() -> Result<()> {
    run(Command::new("install")
        .args(["-d", "-m", "0700", "-o", "penstock", "-g", "penstock", DATA]))?;
    Ok(())
}

/// Makes or joins the cluster; tries until it succeeds, because what is in the way is mended outside: the
/// network, a node that is still down, a name that another node has.
fn enter(machine: &Machine, program: &Path, node: &Node) {
    let [mut pause, longest] = RETRY;
    loop {
        // A loss of power between the node's making and its record: it is there.
        if Path::new(DATA).join("cluster").is_dir() {
            return;
        }
        let mut command = Command::new(program);
        match (&node.init, &node.join) {
            (Some(init), _) => {
                command.arg("init");
                if let Some(replicas) = init.replicas {
                    command.args(["--replicas", &replicas.to_string()]);
                }
            }
            (None, token) => {
                command.arg("join").args(token);
            }
        }
        command.arg("--config").arg(machine.configuration());
        match run(&mut command) {
            Ok(_) => return,
            Err(error) => machine.tell(&format!(
                "this machine is no node yet, and tries again: {error:#}"
            )),
        }
        std::thread::sleep(pause);
        pause = (pause * 2).min(longest);
    }
}

/// A used token opens nothing; it need not lie about.
fn forget_token(machine: &Machine, mut seed: Seed) -> Result<()> {
    if let Some(node) = &mut seed.penstock
        && node.join.is_some()
    {
        node.join = Some("used".to_owned());
        machine.keep_seed(&seed)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_configuration_has_what_the_seed_says() {
        let dir = tempfile::tempdir().expect("a directory");
        let machine = Machine::at(dir.path());
        let seed = Seed::parse(
            "hostname: one\nnetwork: {version: 2, ethernets: {e: {addresses: [10.0.0.1/24]}}}\n\
             penstock: {init: {}, roles: [meta, storage], rack: r1, wire: crc, transport: auto}\n",
        )
        .expect("a seed");
        machine
            .keep_devices(&[PathBuf::from("/dev/vdb")])
            .expect("kept");
        let node = seed.penstock.clone().expect("a node");
        write_configuration(&machine, &seed, &node).expect("written");
        let text = std::fs::read_to_string(machine.configuration()).expect("read");
        for line in [
            "devices = [\"/dev/vdb\"]",
            "listen = \"10.0.0.1\"",
            "name = \"one\"",
            "roles = [\"meta\", \"storage\"]",
            "wire = \"crc\"",
            "[labels]\nrack = \"r1\"",
        ] {
            assert!(text.contains(line), "{line} is not in\n{text}");
        }
    }

    #[test]
    fn disks_are_chosen_once() {
        let dir = tempfile::tempdir().expect("a directory");
        let machine = Machine::at(dir.path());
        machine
            .keep_devices(&[PathBuf::from("/dev/vdb")])
            .expect("kept");
        let node = Seed::parse("penstock: {init: {}, devices: [/dev/nothing]}").expect("a seed");
        choose_disks(&machine, &node.penstock.expect("a node")).expect("chosen before");
        assert_eq!(
            machine.devices().expect("read"),
            Some(vec![PathBuf::from("/dev/vdb")])
        );
    }

    #[test]
    fn a_used_token_is_forgotten() {
        let dir = tempfile::tempdir().expect("a directory");
        let machine = Machine::at(dir.path());
        let seed = Seed::parse("penstock: {join: secret-token}").expect("a seed");
        forget_token(&machine, seed).expect("kept");
        let text = std::fs::read_to_string(machine.path("seed.yaml")).expect("read");
        assert!(!text.contains("secret"), "{text}");
    }
}
