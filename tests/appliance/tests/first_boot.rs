//! Three machines become a cluster, each told in another way: a credential, a disk of NoCloud, and the
//! console's wizard. And machines that were told what cannot be.

use std::time::Duration;

use anyhow::{Result, ensure};
use appliance_rig::{Bus, Config, Firmware, Images, Machine, Seed, Way};
use guest_rig::{Form, Nic, Switch};

/// For what a loaded machine under TCG does within a minute.
const LIMIT: Duration = Duration::from_secs(400);

fn network(number: u8) -> String {
    format!(
        "network: {{version: 2, ethernets: {{lan: {{match: {{macaddress: '52:54:00:00:00:0{number}'}}, \
         addresses: [10.0.0.{number}/24]}}}}}}\n"
    )
}

#[test]
fn three_machines_told_in_three_ways_are_one_cluster() -> Result<()> {
    let images = Images::get()?;
    let switch = Switch::new()?;
    let config = |number: u8, seed: Option<Seed>| Config {
        nics: vec![Nic::new(number).on(&switch)],
        disks_mib: vec![1024],
        ..Config::new(seed)
    };
    let first = format!(
        "hostname: one\n{}penstock: {{init: {{}}, devices: all-empty}}\n",
        network(1)
    );
    let mut one = Machine::boot(
        &images,
        config(
            1,
            Some(Seed {
                way: Way::Smbios,
                text: first,
            }),
        ),
    )?;
    one.sh_until("test -e /var/lib/appliance/node && penstock status", LIMIT)?;
    // A loaded machine may have no leader yet.
    let create = "penstock token create --roles meta,storage,host 2> /dev/null";
    let token = |one: &mut Machine| one.sh_until(create, LIMIT);

    // The second one's disk is named.
    let second = format!(
        "hostname: two\n{}penstock: {{join: {}, devices: [/dev/disk/by-id/ata-QEMU_HARDDISK_data0]}}\n",
        network(2),
        token(&mut one)?
    );
    let seed = Seed {
        way: Way::NoCloud,
        text: second,
    };
    let mut two = Machine::boot(
        &images,
        Config {
            firmware: Firmware::Bios,
            bus: Bus::Sata,
            ..config(2, Some(seed))
        },
    )?;
    let mut three = Machine::boot(&images, config(3, None))?;
    let typed = token(&mut one)?;
    fill_in(&mut three, "three", "10.0.0.3/24", &typed)?;

    for machine in [&mut one, &mut two, &mut three] {
        machine.sh_until("test -e /var/lib/appliance/node", LIMIT)?;
    }
    one.sh_until("penstock health", LIMIT)?;
    let nodes = one.sh("penstock node list")?;
    for name in ["one", "two", "three"] {
        ensure!(nodes.contains(name), "{nodes}");
    }
    // The token is used up, and lies nowhere.
    ensure!(
        !three
            .sh("cat /var/lib/appliance/seed.yaml")?
            .contains(&typed)
    );
    three.refused("systemctl is-active ssh.service")?;
    three.screen_shows("Health       ok", LIMIT)?;

    if Form::of_this_run() == Form::Short {
        return Ok(());
    }
    let typed = token(&mut one)?;
    refuses_a_second_one(&images, config(4, None), &typed)?;
    one.sh_until("penstock health", LIMIT)?;
    ensure!(
        one.sh("penstock node list")?.lines().count() == nodes.lines().count(),
        "a node came or went"
    );

    one.cut_power();
    two.sh_until("penstock node list | grep one | grep -q down", LIMIT)?;
    one.start()?;
    two.sh_until("penstock health", LIMIT)?;
    Ok(())
}

/// A machine whose name another node has says so, and does not join.
fn refuses_a_second_one(images: &Images, config: Config, token: &str) -> Result<()> {
    let text = format!(
        "hostname: one\n{}penstock: {{join: {token}, devices: all-empty}}\n",
        network(4)
    );
    let way = Way::FwCfg;
    let mut machine = Machine::boot(
        images,
        Config {
            seed: Some(Seed { way, text }),
            ..config
        },
    )?;
    let told = "grep -qF 'node name \"one\" is taken' /var/lib/appliance/message";
    machine.sh_until(told, LIMIT)?;
    machine.screen_shows("Message", LIMIT)?;
    machine.refused("test -e /var/lib/appliance/node")?;
    Ok(())
}

/// Answers what the console's wizard asks.
fn fill_in(machine: &mut Machine, name: &str, address: &str, token: &str) -> Result<()> {
    machine.screen_shows("press w", LIMIT)?;
    machine.types("w")?;
    machine.answers("Name of this machine", name)?;
    machine.answers("Address with prefix", address)?;
    machine.answers("Gateway", "")?;
    machine.answers("Server of names", "")?;
    machine.answers("Token of a cluster", token)?;
    machine.answers("Take these empty disks", "yes")?;
    machine.answers("Public key for ssh", "")?;
    machine.answers("Make this machine a node", "yes")
}

/// The wizard says something else than the seed did, and makes a cluster.
fn is_mended_by_the_wizard(machine: &mut Machine) -> Result<()> {
    fill_in(machine, "one", "10.0.0.1/24", "")?;
    machine.sh_until("test -e /var/lib/appliance/node && penstock status", LIMIT)?;
    machine.refused("systemctl is-active ssh.service")?;
    machine.screen_shows("Address      10.0.0.1", LIMIT)?;
    Ok(())
}

#[test]
fn a_machine_says_what_it_cannot_do() -> Result<()> {
    let images = Images::get()?;
    let treasure = |machine: &Machine| {
        let file = machine.data_disk(0);
        guest_rig::process::run(
            std::process::Command::new("mke2fs")
                .args(["-q", "-F"])
                .arg(file),
        )
    };
    let is_long = Form::of_this_run() == Form::Long;
    let node = "penstock: {init: {replicas: 1}, wire: crc";
    // Seed, and what stands on the console and in the log.
    let mut cases = vec![(
        format!("hostname: x\n{}{node}, devices: [/dev/vdb]}}\n", network(1)),
        "is not empty (ext",
    )];
    if is_long {
        cases.extend([
            ("runcmd: [reboot]\n".to_owned(), "unknown field `runcmd`"),
            (
                format!(
                    "{}{node}, devices: [/dev/disk/by-id/virtio-lost]}}\n",
                    network(1)
                ),
                "virtio-lost",
            ),
            (
                format!("{}{node}, devices: all-empty}}\n", network(1)),
                "no disk is empty",
            ),
            (
                format!("{}penstock: {{join: nonsense}}\n", network(1)),
                "tries again",
            ),
            (format!("{node}}}\n"), "no address yet"),
        ]);
    }
    for (number, (text, word)) in cases.into_iter().enumerate() {
        // The first machine has an empty disk besides, which the wizard is given in the long form.
        let disks_mib = [64, 1024][..if number == 0 { 2 } else { 1 }].to_vec();
        let mut machine = Machine::new(
            &images,
            Config {
                nics: vec![Nic::new(1)],
                disks_mib,
                ..Config::new(Some(Seed {
                    way: Way::FwCfg,
                    text: text.clone(),
                }))
            },
        )?;
        treasure(&machine)?;
        let before = std::fs::read(machine.data_disk(0))?;
        machine.start()?;
        let screen = machine.screen_shows("Message", LIMIT)?;
        machine.sh_until(
            &format!("grep -qF '{word}' /var/lib/appliance/message"),
            LIMIT,
        )?;
        machine.sh(&format!("journalctl --no-pager | grep -qF '{word}'"))?;
        ensure!(
            !machine
                .sh("ls /var/lib/appliance")?
                .lines()
                .any(|file| file == "node"),
            "{screen}"
        );
        machine.screen_shows("no node yet", LIMIT)?;
        if number == 0 && is_long {
            is_mended_by_the_wizard(&mut machine)?;
        }
        ensure!(
            std::fs::read(machine.data_disk(0))? == before,
            "{text}: the disk was written to"
        );
    }
    Ok(())
}
