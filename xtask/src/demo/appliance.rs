//! The appliance: its image is built, three machines become a cluster by what they are told at their first
//! boot, a fourth one is their client, one loses its power, and all are updated.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use appliance_rig::images::{FIRST, SECOND};
use appliance_rig::payload::{MOUNT, PLACE};
use appliance_rig::{Config, Images, Machine, Seed, Way};
use guest_rig::{Nic, Switch};

use super::say;
use super::table::Table;
use crate::build::build;

/// Until something has happened in machines that share two cores, and may be emulated.
const LIMIT: Duration = Duration::from_secs(900);
/// Size of each node's data disk.
const DISK_MIB: u32 = 2048;
/// The client's number on the network; nodes are 1 to 3.
const CLIENT: u8 = 9;
/// ssh as an operator calls it, from the client.
const SSH: &str = "ssh -i /run/key -oBatchMode=yes -oStrictHostKeyChecking=accept-new \
    -oUserKnownHostsFile=/run/known -oLogLevel=ERROR -oConnectTimeout=10";

/// What a machine is told, but for the node that it becomes.
fn seed(name: &str, number: u8, key: &str) -> String {
    format!(
        "hostname: {name}\nssh_authorized_keys: ['{key}']\n\
         network: {{version: 2, ethernets: {{lan: {{match: {{macaddress: '52:54:00:00:00:0{number}'}}, \
         addresses: [10.0.0.{number}/24]}}}}}}\n"
    )
}

/// The network, and who is on it.
struct Demo {
    table: Table,
    images: Images,
    switch: Switch,
    client: Machine,
    nodes: Vec<Machine>,
    key: String,
}

/// Runs it.
pub fn run() -> Result<()> {
    say("building penstock (the first time, RocksDB takes some minutes)");
    build()?;
    let begin = Instant::now();
    say("building the appliance: version 1 to boot, version 2 to update to");
    let images = Images::get()?;
    let mut table = Table::default();
    table.row("image", "two versions, as root", begin.elapsed());
    let switch = Switch::new()?;
    let client = client(&images, &switch)?;
    let mut demo = Demo {
        table,
        images,
        switch,
        client,
        nodes: Vec::new(),
        key: String::new(),
    };
    demo.key = demo
        .client
        .sh("ssh-keygen -q -t ed25519 -N '' -C operator -f /run/key && cat /run/key.pub")?;
    demo.cluster()?;
    demo.volume()?;
    demo.lose_power()?;
    demo.update()?;
    demo.table.print();
    Ok(())
}

/// A machine of the same image that is told of no node.
fn client(images: &Images, switch: &Switch) -> Result<Machine> {
    let update = images.update(SECOND);
    let text = seed("client", CLIENT, "ssh-ed25519 AAAA nobody");
    Machine::boot(
        images,
        Config {
            nics: vec![Nic::new(CLIENT).on(switch)],
            files: vec![update.with_extension("update.minisig"), update],
            ..Config::new(Some(Seed {
                way: Way::FwCfg,
                text,
            }))
        },
    )
}

impl Demo {
    fn node(&self, name: &str, number: u8, way: Way, node: &str) -> Result<Machine> {
        let text = format!(
            "{}penstock: {{{node}, devices: all-empty, soft_roce: lan}}\n",
            seed(name, number, &self.key)
        );
        Machine::new(
            &self.images,
            Config {
                nics: vec![Nic::new(number).on(&self.switch)],
                disks_mib: vec![DISK_MIB],
                ..Config::new(Some(Seed { way, text }))
            },
        )
    }

    /// What an operator types on the client, on node `number`.
    fn on(&mut self, number: u8, command: &str) -> Result<String> {
        self.client
            .sh(&format!("{SSH} root@10.0.0.{number} '{command}' 2>&1"))
    }

    fn on_until(&mut self, number: u8, command: &str) -> Result<String> {
        self.client.sh_until(
            &format!("{SSH} root@10.0.0.{number} '{command}' 2>&1"),
            LIMIT,
        )
    }

    fn cluster(&mut self) -> Result<()> {
        say("booting node one, which makes a cluster, and then two that join it");
        let begin = Instant::now();
        let mut one = self.node("one", 1, Way::FwCfg, "init: {}")?;
        one.start()?;
        self.nodes.push(one);
        for (name, number, way) in [("two", 2, Way::NoCloud), ("three", 3, Way::Smbios)] {
            let token = self.on_until(1, "penstock token create")?;
            let mut node = self.node(name, number, way, &format!("join: {token}"))?;
            node.switch_on()?;
            self.nodes.push(node);
        }
        for node in &mut self.nodes[1..] {
            node.comes_up()?;
        }
        self.on_until(1, "penstock node list | grep -c up | grep -qx 3")?;
        self.on_until(1, "penstock health")?;
        self.table.row(
            "cluster",
            "three nodes from their first boot to health: ok",
            begin.elapsed(),
        );
        Ok(())
    }

    fn volume(&mut self) -> Result<()> {
        say("making a volume and filling it");
        let begin = Instant::now();
        self.on(
            1,
            "dd if=/dev/urandom of=/var/tmp/image bs=1M count=64 2>/dev/null",
        )?;
        self.on(1, "penstock volume import data /var/tmp/image")?;
        self.table
            .row("volume", "64 MiB imported, three copies", begin.elapsed());
        self.verify(2)
    }

    /// What a node reads is what was written.
    fn verify(&mut self, number: u8) -> Result<()> {
        let written = self.on(1, "sha256sum < /var/tmp/image")?;
        let read = self.on(
            number,
            "rm -f /var/tmp/copy; penstock volume export data /var/tmp/copy > /dev/null && \
             sha256sum < /var/tmp/copy",
        )?;
        ensure!(read.ends_with(&written), "node {number} reads other data");
        Ok(())
    }

    fn lose_power(&mut self) -> Result<()> {
        say("taking node three's power away");
        let begin = Instant::now();
        self.nodes[2].cut_power();
        self.on_until(1, "penstock node list | grep three | grep -q down")?;
        self.verify(2)?;
        self.table.row(
            "power of one lost",
            "volume read by another: verified",
            begin.elapsed(),
        );
        let begin = Instant::now();
        self.nodes[2].start()?;
        self.on_until(1, "penstock health")?;
        self.table.row("power back", "health: ok", begin.elapsed());
        Ok(())
    }

    fn update(&mut self) -> Result<()> {
        say("updating the cluster, node by node");
        let begin = Instant::now();
        self.client.sh(MOUNT)?;
        let update = format!("{PLACE}/penstock-appliance-{SECOND}.update");
        // ssh has to know where it may remember keys of hosts: root's home is read-only here.
        self.client.sh(&format!(
            "(HOME=/run penstock update cluster {update} --node 10.0.0.1 --identity /run/key --yes \
             > /run/update.log 2>&1; echo $? > /run/update.rc) > /dev/null 2>&1 &"
        ))?;
        let deadline = Instant::now() + LIMIT * 2;
        // A machine that restarts ends its QEMU here, and is switched on again.
        while self
            .client
            .sh("cat /run/update.rc 2>/dev/null || true")?
            .is_empty()
        {
            ensure!(
                Instant::now() < deadline,
                "the update does not end: {}",
                self.log()?
            );
            for node in &mut self.nodes {
                node.restarts_if_it_ended()?;
            }
            std::thread::sleep(Duration::from_secs(1));
        }
        let log = self.log()?;
        let rc = self.client.sh("cat /run/update.rc")?;
        ensure!(rc == "0", "the update failed:\n{log}");
        for number in 1..=3 {
            let status = self.on(number, "penstock update status")?;
            ensure!(
                status.contains(&format!("version  {SECOND}")),
                "node {number}: {status}"
            );
        }
        self.verify(3)?;
        let done = format!("version {FIRST} to {SECOND}, node by node; verified");
        self.table.row("update", &done, begin.elapsed());
        Ok(())
    }

    fn log(&mut self) -> Result<String> {
        self.client
            .sh("cat /run/update.log")
            .context("read the update's log")
    }
}
