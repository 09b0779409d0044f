//! Virtual machines with RDMA devices: Debian's full kernel drives an RDMA device over each one's Ethernet
//! card (`rdma_rxe`, RoCE v2 in software), so that verbs are real where no hardware is.
//!
//! A [`Machine`] is up within seconds and runs one program of ours, which is built for the host and put into
//! the machine when it boots. Several machines on one [`Switch`] reach each other.

use std::net::Ipv4Addr;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail};
pub use guest_rig::Switch;
use guest_rig::image::DEBIAN_12;
use guest_rig::process::wait_until;
use guest_rig::{GuestImage, Nic, Output, Recipe, Vm, VmConfig};

/// The machines: the kernel's full flavour, because that for virtual machines has no RDMA.
pub const RECIPE: Recipe = Recipe {
    name: "rdma",
    suite: DEBIAN_12,
    packages: "ibverbs-providers,iproute2,busybox-static",
    kernel_package: "linux-image-amd64",
    modules: &[
        "virtio_ring",
        "virtio",
        "virtio_pci_modern_dev",
        "virtio_pci_legacy_dev",
        "virtio_pci",
        "virtio_console",
        "failover",
        "net_failover",
        "virtio_net",
        // The checksum of every packet; without modprobe the kernel cannot fetch it itself.
        "crc32_generic",
        "ib_core",
        "ib_uverbs",
        "udp_tunnel",
        "ip6_udp_tunnel",
        "rdma_rxe",
        "configfs",
        "iw_cm",
        "ib_cm",
        "rdma_cm",
        "rdma_ucm",
        // Disks of nodes.
        "loop",
    ],
    programs: &["bin/ip", "sbin/tc", "usr/bin/rdma"],
    files: &[
        "usr/lib/x86_64-linux-gnu/libibverbs.so.1",
        "usr/lib/x86_64-linux-gnu/libibverbs/librxe-rdmav34.so",
        "etc/libibverbs.d/rxe.driver",
        // What a Rust program needs besides libc.
        "usr/lib/x86_64-linux-gnu/libgcc_s.so.1",
        "usr/lib/x86_64-linux-gnu/libm.so.6",
        // And RocksDB.
        "usr/lib/x86_64-linux-gnu/libstdc++.so.6",
    ],
    boot_disk: false,
};

/// Where the program lies in a machine.
const PROGRAM: &str = "usr/bin/rdma-program";
/// Where `penstock` lies, in a machine that has it.
const PENSTOCK: &str = "usr/bin/penstock";
/// Memory of a machine.
const MEMORY_MIB: u32 = 1024;
/// The same with nodes of a cluster: what they store, what they pin, and themselves.
const CLUSTER_MEMORY_MIB: u32 = 4096;
/// From the card to the device; a machine under load takes its time.
const DEVICE_LIMIT: Duration = Duration::from_secs(60);
/// A run of the program that says no limit of its own.
pub const PROGRAM_LIMIT: Duration = Duration::from_secs(180);

/// Loads the device. Its port becomes active when the card's link is up, and the address is among its GIDs a
/// moment later.
const SET_UP: &str = "
    set -e
    ip link set lo up
    ip addr add @ADDRESS@/24 dev eth0
    ip link set eth0 up
    rdma link add rxe0 type rxe netdev eth0
    for wait in $(seq 100); do
        case $(rdma link show rxe0/1) in *'state ACTIVE'*) exit 0 ;; esac
        sleep 0.1
    done
    rdma link show; ip addr; exit 1
";

/// A running virtual machine with the RDMA device `rxe0` over `eth0`. Dropping it kills it.
#[derive(Debug)]
pub struct Machine {
    vm: Vm,
    address: Ipv4Addr,
}

impl Machine {
    /// Boots a machine that is alone; it reaches itself.
    pub fn boot(program: &Path) -> Result<Self> {
        Self::boot_with(program, None, 1, Nic::new(1))
    }

    /// The same with `penstock`, and room for nodes.
    pub fn boot_for_cluster(program: &Path, penstock: &Path) -> Result<Self> {
        Self::boot_with(program, Some(penstock), 1, Nic::new(1))
    }

    /// Boots machine `number` of those on `switch`.
    pub fn boot_on(switch: &Switch, program: &Path, number: u8) -> Result<Self> {
        Self::boot_with(program, None, number, Nic::new(number).on(switch))
    }

    /// The same on `switch`, as machine `number`.
    pub fn boot_for_cluster_on(
        switch: &Switch,
        program: &Path,
        penstock: &Path,
        number: u8,
    ) -> Result<Self> {
        Self::boot_with(program, Some(penstock), number, Nic::new(number).on(switch))
    }

    fn boot_with(program: &Path, penstock: Option<&Path>, number: u8, nic: Nic) -> Result<Self> {
        let image = GuestImage::of(&RECIPE, |line| eprintln!("{line}"))?;
        let mut config = VmConfig::new(Vec::new())
            .with_file(program, PROGRAM)
            .with_nic(nic);
        config.memory_mib = MEMORY_MIB;
        if let Some(penstock) = penstock {
            config = config.with_file(penstock, PENSTOCK);
            config.memory_mib = CLUSTER_MEMORY_MIB;
        }
        let mut machine = Self {
            vm: Vm::boot(&image, &config)?,
            address: Ipv4Addr::new(10, 77, 0, number),
        };
        let script = SET_UP.replace("@ADDRESS@", &machine.address.to_string());
        let output = machine.vm.run(&script, DEVICE_LIMIT)?;
        if output.code != 0 {
            bail!("the machine makes no RDMA device:\n{}", output.text);
        }
        Ok(machine)
    }

    /// Its address.
    pub fn address(&self) -> Ipv4Addr {
        self.address
    }

    /// The machine itself, for scripts and its console.
    pub fn vm(&mut self) -> &mut Vm {
        &mut self.vm
    }

    /// Runs the program with `args`, words without blanks, and returns its status and output.
    pub fn run(&mut self, args: &[&str], limit: Duration) -> Result<Output> {
        self.vm.run(&command(args), limit)
    }

    /// Runs the program, which must succeed, and returns its output.
    pub fn succeed(&mut self, args: &[&str]) -> Result<String> {
        let output = self.run(args, PROGRAM_LIMIT)?;
        if output.code != 0 {
            let kernel = self
                .vm
                .sh("dmesg | tail -n 20")
                .context("read the kernel's log")?;
            bail!(
                "{args:?} in the machine: exit status {}\n{}\nits kernel said:\n{kernel}",
                output.code,
                output.text
            );
        }
        Ok(output.text)
    }

    /// Starts the program in the background; what it prints goes to a log called `name`.
    pub fn start(&mut self, args: &[&str], name: &str) -> Result<()> {
        let command = command(args);
        let script =
            format!("{{ ({command}); echo \"exit status $?\"; }} > /run/{name}.log 2>&1 &");
        self.vm.sh(&script).map(drop)
    }

    /// Waits until the log called `name` has `line`, and returns all of it; fails when the program ends
    /// without it.
    pub fn wait_for_line(&mut self, name: &str, line: &str, limit: Duration) -> Result<String> {
        let log = format!("/run/{name}.log");
        let script = format!(
            "grep -q '^exit status' {log}; ended=$?; grep -qx '{line}' {log}; found=$?; cat {log}
             [ $found = 0 ] && exit 0; [ $ended = 0 ] && exit {ENDED}; exit {WAITING}"
        );
        wait_until(limit, || {
            let output = self.vm.run(&script, limit)?;
            match output.code {
                0 => Ok(Some(output.text)),
                WAITING => Ok(None),
                _ => bail!("{name} never says {line:?}:\n{}", output.text),
            }
        })
    }
}

/// Exit statuses of the script that looks into a log.
const ENDED: i32 = 3;
const WAITING: i32 = 4;

fn command(args: &[&str]) -> String {
    format!("exec /{PROGRAM} {}", args.join(" "))
}
