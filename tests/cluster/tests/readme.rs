//! What the README tells people to type works when it is typed.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use cluster_rig::document::{Line, console_lines};
use cluster_rig::typing::{document, programs, scratch, type_all};
use cluster_rig::{Machine, Network};
use guest_rig::{GuestImage, Vm};

/// Stands in the README for what every guest needs: what it boots, say.
const ELLIPSIS: &str = "…";
/// A guest sees what was changed within this, on a busy machine.
const SOON: Duration = Duration::from_secs(60);

fn readme() -> Result<String> {
    document("README.md")
}

#[test]
fn the_readme_has_the_blocks_that_are_typed() -> Result<()> {
    let text = readme()?;
    for (heading, least) in [
        ("## First disk", 8),
        ("## Several nodes", 9),
        ("### When a node dies", 4),
    ] {
        let lines = console_lines(&text, heading);
        ensure!(lines.len() >= least, "{heading}: {lines:?}");
    }
    Ok(())
}

#[test]
fn the_first_disk_of_the_readme_is_served_to_a_guest() -> Result<()> {
    let scratch = scratch()?;
    let programs = programs(scratch.path())?;
    let image = GuestImage::get(|line| eprintln!("{line}"))?;
    let mut machine = Machine::start("one", scratch.path(), &programs, None)?;
    let mut guest = None;
    for Line { prompt, command } in console_lines(&readme()?, "## First disk") {
        ensure!(prompt.is_empty(), "one machine, but {prompt}$ {command}");
        eprintln!("$ {command}");
        if !command.starts_with("qemu-system") {
            if let (true, Some(vm)) = (command.contains(" detach "), &mut guest) {
                before_detach(vm)?;
            }
            let printed = machine.ok(&command)?;
            if command.contains("libvirt disk-xml") {
                ensure!(printed.contains("path=\"/run/web.sock\""), "{printed}");
            }
            continue;
        }
        let mut typed = None;
        let vm = Vm::boot_by(&image, |args| {
            let quoted: Vec<String> = args.iter().map(|arg| format!("'{arg}'")).collect();
            let line = command.replacen(ELLIPSIS, &quoted.join(" "), 1);
            let started = machine.command(&format!("exec {line}"));
            started.unwrap_or_else(|error| {
                typed = Some(error);
                std::process::Command::new("false")
            })
        });
        if let Some(error) = typed {
            return Err(error);
        }
        let mut vm = vm?;
        assert_eq!(
            vm.sh("blockdev --getsize64 /dev/vda")?,
            (10_u64 << 30).to_string()
        );
        vm.sh("mkfs.ext4 -q /dev/vda && mount /dev/vda /mnt && cp /init /mnt && sync")?;
        guest = Some(vm);
    }
    guest.context("the README starts no guest").map(drop)
}

#[test]
fn the_nodes_of_the_readme_make_a_cluster_and_outlive_one() -> Result<()> {
    let scratch = scratch()?;
    let programs = programs(scratch.path())?;
    let network = Network::with_addresses(3, |node| format!("10.0.0.{node}"))?;
    let mut machines = Vec::new();
    for (name, node) in [("one", 1), ("two", 2), ("three", 3)] {
        let namespace = network.namespace(node);
        machines.push(Machine::start(
            name,
            scratch.path(),
            &programs,
            Some(&namespace),
        )?);
    }
    let text = readme()?;
    type_all(&mut machines, &console_lines(&text, "## Several nodes"))?;
    let volumes = machines[2].ok("penstock volume list --json")?;
    let volumes: serde_json::Value = serde_json::from_str(&volumes)?;
    ensure!(volumes[0]["name"] == "web", "{volumes}");
    let attached = machines[2].ok("penstock attachment list --all --json")?;
    let attached: serde_json::Value = serde_json::from_str(&attached)?;
    ensure!(attached[0]["socket"] == "/run/web.sock", "{attached}");

    // Node one dies, with the guest's disk.
    drop(machines.remove(0));
    machines[0].until_ok("penstock node list | grep -q ' one .* down '")?;
    type_all(&mut machines, &console_lines(&text, "### When a node dies"))?;
    let attached = machines[0].ok("penstock attachment list")?;
    ensure!(attached.contains("web"), "{attached}");
    let nodes = machines[1].ok("penstock node list")?;
    ensure!(!nodes.contains(" one "), "{nodes}");
    Ok(())
}

/// What the guest has to say to the README's promises.
fn before_detach(vm: &mut Vm) -> Result<()> {
    let grown = "test $(blockdev --getsize64 /dev/vda) = $((20 << 30))";
    vm.sh_until(grown, SOON)?;
    vm.sh("cmp /init /mnt/init && umount /mnt")?;
    let errors = vm.io_errors()?;
    ensure!(errors.is_empty(), "{}", errors.join("\n"));
    Ok(())
}
