//! A guest with a later kernel than those of the other tests.

use std::path::Path;

use anyhow::{Result, ensure};
use filesystem_rig::scripts::{DATA, TREE, passes};
use filesystem_rig::{LINUX_6_12, PROGRAM_NAME as NAME, attach, boot_of};
use guest_rig::{Daemon, Form};

const PROGRAM: &str = env!("CARGO_BIN_EXE_filesystem-program");
const MOUNT: &str = "mount -t virtiofs tree /mnt";

#[test]
fn linux_6_12_uses_a_tree_and_maps_what_it_appends_to() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let args = ["--device-size", "4G", "--preallocation", "off"];
    let daemon = Daemon::start(&dir.path().join("data"), &args)?;
    daemon.cli(&["fs", "create", "tree"])?;
    let tree = attach(&daemon, "tree", &["--queues", "2"])?.queues(2);
    let mut vm = boot_of(&LINUX_6_12, vec![tree], &[(Path::new(PROGRAM), NAME)])?;
    let release = vm.sh("uname -r")?;
    ensure!(release.starts_with("6.12."), "{release}");
    vm.sh(MOUNT)?;
    passes(&mut vm, TREE)?;
    if Form::of_this_run() == Form::Long {
        passes(&mut vm, DATA)?;
        vm.sh(MOUNT)?;
    }
    vm.sh("head -c 20000 /dev/zero | tr '\\0' x > /mnt/mapped")?;
    ensure!(vm.sh(&format!("{NAME} map-appended /mnt/mapped m"))? == "mapped");
    // Read anew.
    passes(
        &mut vm,
        &format!(
            "cd /\numount /mnt\n{MOUNT}\n[ $(tr -dc m < /mnt/mapped | wc -c) = 20000 ]\nrm -r /mnt/*"
        ),
    )?;
    vm.power_off()
}
