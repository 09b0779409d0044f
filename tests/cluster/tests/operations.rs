//! The chapters of docs/OPERATIONS.md work when they are typed.

use anyhow::{Context, Result, ensure};
use cluster_rig::document::{Line, console_lines};
use cluster_rig::typing::{document, programs, scratch, type_all};
use cluster_rig::{Machine, Network};
use tempfile::TempDir;

const CHAPTERS: [(&str, usize); 10] = [
    ("## What is wrong, and what happened", 6),
    ("## Filesystems", 11),
    ("## Make a cluster of a node that was alone", 11),
    ("## Upgrade", 5),
    ("## Replace a disk", 4),
    ("## Replace a node", 6),
    ("## A pool is full", 5),
    ("## Back the metadata up", 2),
    ("## A majority of the metadata nodes is gone", 10),
    ("## The metadata of all nodes are gone", 11),
];
/// How the machines' daemons are started: they have no service manager.
const SERVE: &str = "penstock serve --preallocation off --device-size 1G &";
const STOP: &str = "kill -TERM $(cat $PENSTOCK_DATA/lock); wait";
/// Stand in the document for what the machines do not have, or for what never ends.
const ELSEWHERE: [(&str, &str); 5] = [
    ("/dev/nvme1n1", "/srv/nvme1n1:1G"),
    ("/dev/nvme2n1", "/srv/nvme2n1:1G"),
    ("/var/backups/", "/srv/"),
    ("/run/penstock/", "/srv/"),
    (" --follow", ""),
];

/// Machines one to four, with addresses as in the document, and the directory that their files lie in.
struct Room {
    machines: Vec<Machine>,
    _network: Network,
    _scratch: TempDir,
}

impl Room {
    fn new() -> Result<Self> {
        let scratch = scratch()?;
        let programs = programs(scratch.path())?;
        let network = Network::with_addresses(4, |node| format!("10.0.0.{node}"))?;
        let mut machines = Vec::new();
        for (name, node) in [("four", 4), ("three", 3), ("two", 2), ("one", 1)] {
            let namespace = network.namespace(node);
            let mut machine = Machine::start(name, scratch.path(), &programs, Some(&namespace))?;
            machine.ok("export PENSTOCK_DATA=/srv/penstock")?;
            machines.push(machine);
        }
        // `any` is the last one, and it stays.
        machines.swap(2, 3);
        Ok(Self {
            machines,
            _network: network,
            _scratch: scratch,
        })
    }

    fn machine(&mut self, name: &str) -> Result<&mut Machine> {
        let mut machines = self.machines.iter_mut();
        let found = machines.find(|machine| machine.name() == name);
        found.with_context(|| format!("there is no machine {name}"))
    }

    /// What the volume holds, as node one reads it.
    fn read_back(&mut self) -> Result<String> {
        let export = "rm -f /srv/copy; penstock volume export web /srv/copy; cksum < /srv/copy";
        self.machine("one")?.until_ok(export)
    }

    /// Types a chapter, with these words in place of others.
    fn chapter(&mut self, heading: &str, words: &[(&str, &str)]) -> Result<()> {
        let lines = console_lines(&document("docs/OPERATIONS.md")?, heading);
        let mut typed = Vec::new();
        for line in lines.into_iter().filter(|line| line.prompt != "guest") {
            typed.extend(as_typed(line, words));
        }
        type_all(&mut self.machines, &typed)
    }
}

/// What is typed instead of a line on machines without a service manager and disks.
fn as_typed(line: Line, words: &[(&str, &str)]) -> Vec<Line> {
    let mut command = line.command;
    // A person reads the comment.
    if let Some((before, _)) = command.split_once(" #") {
        command = before.trim_end().to_owned();
    }
    for (word, instead) in words.iter().chain(&ELSEWHERE) {
        command = command.replace(word, instead);
    }
    let commands = match command.strip_prefix("systemctl ") {
        Some("start penstock") => vec![SERVE],
        Some("stop penstock") => vec![STOP],
        Some("restart penstock") => vec![STOP, SERVE],
        // The program is there.
        _ if command.starts_with("apt install") => vec![],
        _ => vec![command.as_str()],
    };
    let commands = commands.into_iter().map(|command| Line {
        prompt: line.prompt.clone(),
        command: command.to_owned(),
    });
    commands.collect()
}

#[test]
fn the_chapters_have_the_blocks_that_are_typed() -> Result<()> {
    let text = document("docs/OPERATIONS.md")?;
    for (heading, least) in CHAPTERS {
        let lines = console_lines(&text, heading);
        ensure!(lines.len() >= least, "{heading}: {lines:?}");
    }
    Ok(())
}

#[test]
fn a_node_alone_grows_and_its_disk_and_itself_are_replaced() -> Result<()> {
    let mut room = Room::new()?;
    let one = room.machine("one")?;
    one.ok(SERVE)?;
    one.ok("head -c 8M /dev/urandom > /srv/image; penstock volume import web /srv/image")?;
    one.ok("penstock volume create old 64M")?;
    room.chapter("## Make a cluster of a node that was alone", &[])?;
    let copied = room.machine("one")?.ok("cksum < /srv/image")?;
    room.chapter("## What is wrong, and what happened", &[])?;
    // The guests' part is typed in tests/filesystem.
    room.chapter("## Filesystems", &[])?;
    let pool = room
        .machine("two")?
        .ok("penstock pool show default --json")?;
    ensure!(
        pool.contains("\"replicas\": 3") && pool.contains("\"min_in_sync\": 2"),
        "{pool}"
    );

    room.chapter("## Upgrade", &[])?;
    room.chapter("## A pool is full", &[("VOLUME", "old")])?;

    let listed = room.machine("one")?.ok("penstock device list --json")?;
    let devices: serde_json::Value = serde_json::from_str(&listed)?;
    let mut devices = devices.as_array().into_iter().flatten();
    let of_one = devices.find(|device| device["node"] == "one");
    let number = of_one.context("node one has a device")?["id"].to_string();
    room.chapter("## Replace a disk", &[("DEVICE", &number)])?;
    let gone = format!("! penstock device list | grep -q '^ *{number} '");
    room.machine("two")?.until_ok(&gone)?;
    room.chapter("## Replace a node", &[])?;
    let nodes = room.machine("two")?.ok("penstock node list")?;
    ensure!(
        !nodes.contains(" one ") && nodes.contains(" four "),
        "{nodes}"
    );
    // Machine one is no node any more.
    drop(room.machines.remove(2));
    room.machine("two")?
        .ok("penstock volume export web /srv/copy")?;
    let read = room.machine("two")?.ok("cksum < /srv/copy")?;
    ensure!(read == copied, "the volume was {copied}, and is {read}");
    Ok(())
}

#[test]
fn metadata_come_back_from_a_backup_and_from_the_last_node() -> Result<()> {
    let mut room = Room::new()?;
    let one = room.machine("one")?;
    one.ok(SERVE)?;
    one.ok("head -c 8M /dev/urandom > /srv/image; penstock volume import web /srv/image")?;
    let copied = one.ok("cksum < /srv/image")?;
    room.chapter("## Make a cluster of a node that was alone", &[])?;
    room.chapter("## Back the metadata up", &[])?;
    room.chapter("## The metadata of all nodes are gone", &[])?;
    ensure!(
        room.read_back()? == copied,
        "other content after the restore"
    );

    let token = room
        .machine("one")?
        .ok("penstock token create --roles meta,storage,host")?;
    let token = token.lines().last().context("it printed a token")?;
    let four = room.machine("four")?;
    four.ok(&format!("penstock join {token} --listen 10.0.0.4"))?;
    four.ok(SERVE)?;
    four.until_ok("penstock health")?;
    // Two of the three that vote; three copies on four nodes outlive them.
    room.machines
        .retain(|machine| !["two", "three"].contains(&machine.name()));
    room.chapter("## A majority of the metadata nodes is gone", &[])?;
    ensure!(
        room.read_back()? == copied,
        "other content after the recovery"
    );
    Ok(())
}
