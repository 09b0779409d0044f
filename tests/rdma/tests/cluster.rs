//! A cluster of daemons over RDMA, in a virtual machine.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use guest_rig::paths::penstock_binary;
use rdma_rig::Machine;
use tempfile::TempDir;

const PROGRAM: &str = env!("CARGO_BIN_EXE_rdma-cluster");
/// All that the program does, in a machine that is emulated.
const LIMIT: Duration = Duration::from_secs(900);

/// A program without what only debuggers read, which would fill the machine's memory.
fn stripped(program: &Path, directory: &TempDir) -> Result<PathBuf> {
    let name = program.file_name().context("a program has a name")?;
    let to = directory.path().join(name);
    let status = Command::new("strip")
        .arg("--strip-debug")
        .arg("-o")
        .args([&to, program])
        .status()
        .context("run strip, of the package binutils")?;
    ensure!(status.success(), "strip {}", program.display());
    Ok(to)
}

#[test]
fn a_cluster_over_rdma_goes_on_without_the_link_and_without_nodes_and_copies_nothing() -> Result<()>
{
    let directory = tempfile::tempdir()?;
    let program = stripped(Path::new(PROGRAM), &directory)?;
    let penstock = stripped(&penstock_binary()?, &directory)?;
    let mut machine = Machine::boot_for_cluster(&program, &penstock)?;
    let output = machine.run(&[], LIMIT)?;
    eprintln!("{}", output.text);
    ensure!(output.code == 0, "exit status {}", output.code);
    for line in [
        "no copy, no registration",
        "link down",
        "link up",
        "kill -9",
        "all read back",
        "front ends",
    ] {
        ensure!(output.text.contains(&format!("{line}: ok")), "{line}");
    }
    Ok(())
}
