//! One tree in two guests on two nodes: this source tree is imported and built in by one of them, and read by
//! the other.

use std::process::Command;
use std::time::Instant;

use anyhow::{Result, ensure};
use cluster_rig::Cluster;
use guest_rig::image::{DEBIAN_12, Recipe};
use guest_rig::process::run as run_command;
use guest_rig::{Disk, GuestImage, Tree, Vm, VmConfig};

use super::table::{Table, seconds};
use super::{path_str, say, sources};

/// A guest with virtiofs and a small C compiler.
const RECIPE: Recipe = Recipe {
    name: "builder",
    suite: DEBIAN_12,
    packages: "tcc,libc6-dev,util-linux,busybox-static",
    kernel_package: "linux-image-amd64",
    modules: &[
        "virtio_ring",
        "virtio",
        "virtio_pci_modern_dev",
        "virtio_pci_legacy_dev",
        "virtio_pci",
        "virtio_blk",
        "virtio_console",
        "fuse",
        "virtiofs",
    ],
    programs: &["usr/bin/tcc"],
    files: &[
        "usr/include",
        "usr/lib/x86_64-linux-gnu/tcc",
        "usr/lib/x86_64-linux-gnu/crt1.o",
        "usr/lib/x86_64-linux-gnu/crti.o",
        "usr/lib/x86_64-linux-gnu/crtn.o",
        "usr/lib/x86_64-linux-gnu/libc.so",
        "usr/lib/x86_64-linux-gnu/libc_nonshared.a",
    ],
    boot_disk: false,
};
/// Entries of a queue that takes requests of 1 MiB.
const QUEUE_SIZE: u16 = 1024;
/// Where a small program lies in this source tree, with what it prints.
const PROGRAM: &str = "/mnt/filesystem/fuse/fixtures";
/// Checksums of all files of the current directory.
const SUMS: &str = "find . -type f | sort | xargs sha256sum";

/// Two guests that have mounted the tree.
struct Guests {
    one: Vm,
    two: Vm,
}

/// Shows it on nodes 1 and 2 of a cluster.
pub(super) fn show(cluster: &Cluster, table: &mut Table) -> Result<()> {
    say("a tree in two guests, on nodes 1 and 2: one imports this source tree and builds in it");
    let begin = Instant::now();
    let image = GuestImage::of(&RECIPE, say)?;
    let archive = sources::archive(cluster.directory())?;
    let node = cluster.node(1)?.daemon();
    // Import would refuse a tar archive without `--format raw`.
    let import = ["volume", "import", "sources", path_str(&archive)?];
    node.cli(&[&import[..], &["--format", "raw"]].concat())?;
    let disk = node.attach("sources", 1)?;
    node.cli(&["fs", "create", "tree"])?;
    let mut guests = Guests {
        one: boot(cluster, 1, vec![Disk::new(disk)], &image)?,
        two: boot(cluster, 2, Vec::new(), &image)?,
    };
    row(table, "a tree in guests on two nodes", "mounted", begin);

    let begin = Instant::now();
    guests.one.sh("tar -xf /dev/vda -C /mnt")?;
    let expected = run_command(
        Command::new("sh")
            .args(["-c", SUMS])
            .current_dir(cluster.directory().join("sources")),
    )?;
    let found = guests.two.sh(&format!("cd /mnt && {SUMS}"))?;
    ensure!(
        found.trim() == expected.trim(),
        "the second guest reads other files than were imported"
    );
    let files = expected.lines().count();
    let files = format!("{files} files, in the other guest");
    row(table, "one guest imports this source tree", &files, begin);

    let begin = Instant::now();
    guests.one.sh(&format!(
        "cd {PROGRAM} && tcc -L/usr/lib64 -o generate generate.c"
    ))?;
    // Its output is part of this source tree.
    guests.two.sh(&format!(
        "cd {PROGRAM} && ./generate > printed && cmp printed messages.txt"
    ))?;
    guests
        .one
        .sh(&format!("cd {PROGRAM} && cmp printed messages.txt"))?;
    let built = "runs in the other guest";
    row(table, "one guest builds a program in it", built, begin);
    end(cluster, guests)
}

fn row(table: &mut Table, event: &str, verified: &str, begin: Instant) {
    table.cells(&[event, "", "", verified, &seconds(begin.elapsed())]);
}

fn boot(cluster: &Cluster, number: u8, disks: Vec<Disk>, image: &GuestImage) -> Result<Vm> {
    let node = cluster.node(number)?.daemon();
    let socket = node.data().join("tree.sock");
    let (path, tag) = (path_str(&socket)?, "tree");
    node.cli(&["attach", "fs", "tree", "--socket", path, "--tag", tag])?;
    let mut config = VmConfig::new(disks);
    config.memory_mib = 512;
    config.trees = vec![Tree::new(&socket, tag).queue_size(QUEUE_SIZE)];
    let mut vm = Vm::boot(image, &config)?;
    vm.sh("mount -t virtiofs tree /mnt")?;
    Ok(vm)
}

/// Takes everything away again, by which the tree's data are given back.
fn end(cluster: &Cluster, guests: Guests) -> Result<()> {
    for mut vm in [guests.one, guests.two] {
        vm.sh("umount /mnt")?;
        vm.power_off()?;
    }
    for number in [1, 2] {
        let node = cluster.node(number)?.daemon();
        node.cli(&["detach", "tree"])?;
    }
    let node = cluster.node(1)?.daemon();
    node.cli(&["fs", "delete", "tree", "--yes"])?;
    node.cli(&["detach", "sources", "--yes"])?;
    node.cli(&["volume", "delete", "sources", "--yes"])?;
    Ok(())
}
