//! The appliance: its image is built, three machines become a cluster by what they are told at their first
//! boot, a fourth one mounts an export of it by NFS over RDMA and TCP, one loses its power, all are updated.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use appliance_rig::images::{FIRST, SECOND};
use appliance_rig::payload::{MOUNT, PLACE};
use appliance_rig::{Config, Images, Machine, Seed, Way};
use guest_rig::{Nic, Switch};

use super::say;
use super::table::{Table, seconds};
use crate::build::build;

/// Until something has happened in machines that share two cores, and may be emulated.
const LIMIT: Duration = Duration::from_secs(900);
/// Size of each node's data disk.
const DISK_MIB: u32 = 2048;
/// The client's number on the network; nodes are 1 to 3.
const CLIENT: u8 = 9;
/// The node that serves the export first, and loses its power.
const NFS_NODE: u8 = 3;
/// Where clients find the export, whichever node serves it.
const ADDRESS: &str = "10.0.0.50";
/// ssh as an operator calls it, from the client.
const SSH: &str = "ssh -i /run/key -oBatchMode=yes -oStrictHostKeyChecking=accept-new \
    -oUserKnownHostsFile=/run/known -oLogLevel=ERROR -oConnectTimeout=10";
/// The client has a card with RDMA in software, and a place to mount at.
const CLIENT_SET_UP: &str = "mkdir -p /run/nfs && modprobe -a rdma_rxe rpcrdma && \
    rdma link add rxe0 type rxe netdev \
    $(ip -o -4 addr show to 10.0.0.0/24 | { read -r n card rest; echo $card; })";
/// Appends a number after the other, and notes when each was taken.
const WRITER: &str = "rm -f /run/stop /run/written /run/errors; : > /run/trace; (
    i=0
    while [ ! -e /run/stop ]; do
        i=$((i + 1))
        echo $i >> /run/nfs/numbers || echo $i >> /run/errors
        read -r up rest < /proc/uptime; echo $up >> /run/trace
        sleep 0.2
    done
    echo $i > /run/written ) > /dev/null 2>&1 &";

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
    say("booting the client");
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
    demo.export()?;
    demo.lose_power()?;
    demo.update()?;
    demo.finish()
}

/// A machine with the same image that joins no cluster.
fn client(images: &Images, switch: &Switch) -> Result<Machine> {
    let update = images.update(SECOND);
    let text = seed("client", CLIENT, "ssh-ed25519 AAAA nobody");
    let mut client = Machine::boot(
        images,
        Config {
            nics: vec![Nic::new(CLIENT).on(switch)],
            files: vec![update.with_extension("update.minisig"), update],
            ..Config::new(Some(Seed {
                way: Way::FwCfg,
                text,
            }))
        },
    )?;
    client.sh_until("ip -4 addr | grep -q 10.0.0.9/24", LIMIT)?;
    client.sh(CLIENT_SET_UP)?;
    client.sh(MOUNT)?;
    Ok(client)
}

impl Demo {
    fn node(&self, name: &str, number: u8, way: Way, node: &str) -> Result<Machine> {
        let text = format!(
            "{}penstock: {{{node}, devices: all-empty, transport: tcp, soft_roce: lan}}\n",
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

    /// Types it again until it succeeds, but leaves the machines some time between: where they share two
    /// cores and are emulated, ssh costs a second of one on both sides.
    fn on_until(&mut self, number: u8, command: &str) -> Result<String> {
        self.client.sh_until(
            &format!("{SSH} root@10.0.0.{number} '{command}' 2>&1 || {{ sleep 2; false; }}"),
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
            let create = "penstock token create --roles meta,storage,host,nfs 2> /dev/null";
            let token = self.on_until(1, create)?;
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

    fn export(&mut self) -> Result<()> {
        say("making a volume and an NFS export, and mounting it by RDMA and by TCP");
        let begin = Instant::now();
        self.on(
            NFS_NODE,
            &format!(
                "penstock nfs export create data --volume data --size 512M --address {ADDRESS}/24 \
                 --no-root-squash"
            ),
        )?;
        self.mount("rdma")?;
        let fill = "dd if=/dev/urandom of=/run/nfs/data bs=1M count=32 conv=fsync 2>/dev/null && \
             sha256sum /run/nfs/data > /run/sum";
        let filled = self.client.running()?.run(fill, LIMIT)?;
        ensure!(filled.code == 0, "writing to the export: {}", filled.text);
        self.client.sh("umount /run/nfs")?;
        self.mount("tcp")?;
        self.client
            .sh("sha256sum -c --quiet /run/sum && umount /run/nfs")?;
        self.table.row(
            "export",
            "32 MiB written over RDMA, verified over TCP",
            begin.elapsed(),
        );
        self.mount("rdma")?;
        self.client.sh(WRITER).map(drop)
    }

    /// Mounts the export, by this protocol.
    fn mount(&mut self, protocol: &str) -> Result<()> {
        let port = match protocol {
            "rdma" => ",port=20049",
            _ => "",
        };
        self.client.sh_until(
            &format!(
                "mount.nfs {ADDRESS}:/data /run/nfs -o vers=4.2,hard,proto={protocol}{port} && \
                 grep -q '/run/nfs nfs4 .*proto={protocol}' /proc/mounts"
            ),
            LIMIT,
        )?;
        Ok(())
    }

    /// The client's longest wait for a write since this was asked last.
    fn pause(&mut self) -> Result<Duration> {
        let count = "cat /run/trace | wc -l";
        let before = self.client.sh(count)?;
        self.client
            .sh_until(
                &format!("test $({count}) -gt $(({before} + 5)) || {{ sleep 1; false; }}"),
                LIMIT,
            )
            .context("the client's writes do not go on")?;
        let errors = self.client.sh("cat /run/errors 2> /dev/null || true")?;
        ensure!(errors.is_empty(), "writes of the client failed: {errors}");
        let trace = self.client.sh("cat /run/trace; : > /run/trace")?;
        let taken: Vec<f64> = trace.lines().filter_map(|line| line.parse().ok()).collect();
        let longest = taken.windows(2).map(|pair| pair[1] - pair[0]);
        Ok(Duration::from_secs_f64(longest.fold(0.0, f64::max)))
    }

    fn lose_power(&mut self) -> Result<()> {
        say("taking the power of node three away, which serves the export");
        let begin = Instant::now();
        self.pause()?;
        self.nodes[usize::from(NFS_NODE - 1)].cut_power();
        self.on_until(1, "penstock node list | grep three | grep -q down")?;
        self.on_until(1, "penstock nfs export list | grep data | grep -q served")?;
        let pause = seconds(self.pause()?);
        let done = format!("another node serves it; the client waited {pause}");
        self.table.row("power of one lost", &done, begin.elapsed());
        let begin = Instant::now();
        self.nodes[usize::from(NFS_NODE - 1)].start()?;
        self.on_until(1, "penstock health")?;
        self.table.row("power back", "health: ok", begin.elapsed());
        Ok(())
    }

    fn update(&mut self) -> Result<()> {
        say("updating the cluster, node by node, while the client writes");
        let begin = Instant::now();
        self.pause()?;
        let update = format!("{PLACE}/penstock-appliance-{SECOND}.update");
        // ssh has to know where it may remember keys of hosts: root's home is read-only here.
        self.client.sh(&format!(
            "(HOME=/run penstock update cluster {update} --node 10.0.0.1 --identity /run/key --yes \
             > /run/update.log 2>&1; echo $? > /run/update.rc) > /dev/null 2>&1 &"
        ))?;
        // Where machines are emulated a node takes some eleven minutes.
        let deadline = Instant::now() + LIMIT * 4;
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
        let pause = seconds(self.pause()?);
        let done =
            format!("version {FIRST} to {SECOND}, node by node; the client waited {pause} at most");
        self.table.row("update", &done, begin.elapsed());
        Ok(())
    }

    fn log(&mut self) -> Result<String> {
        self.client
            .sh("cat /run/update.log")
            .context("read the update's log")
    }

    /// All that the client wrote is there, read by the other protocol.
    fn finish(mut self) -> Result<()> {
        say("reading back what the client wrote");
        let begin = Instant::now();
        self.client.sh("touch /run/stop")?;
        self.client.sh_until("test -e /run/written", LIMIT)?;
        self.client.sh("umount /run/nfs")?;
        self.mount("tcp")?;
        let written = self.client.sh(
            "sha256sum -c --quiet /run/sum && seq $(cat /run/written) > /run/expected && \
             cmp /run/expected /run/nfs/numbers && umount /run/nfs && cat /run/written",
        )?;
        self.on(1, "penstock health")?;
        let done = format!("{written} appended lines and 32 MiB verified over TCP");
        self.table.row("end", &done, begin.elapsed());
        self.table.print();
        Ok(())
    }
}
