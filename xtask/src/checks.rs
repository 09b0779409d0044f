//! `test`, `bench`, `sim` and `prepush`.

use std::ffi::OsString;

use anyhow::{Result, bail};
use guest_rig::paths::PENSTOCK_BIN_ENV;

use crate::build::{binary, build, cargo, check, has_subcommand};
use crate::{coverage, long};

/// Targets that are built to run tests. Examples hold no tests and take minutes to compile; clippy checks
/// them.
pub const TEST_TARGETS: [&str; 3] = ["--lib", "--bins", "--tests"];

/// Runs the tests in their short forms, or those that `args` select; `rdma` as the first: those in virtual
/// machines with RDMA devices.
pub fn test(args: &[OsString]) -> Result<()> {
    if let Some((first, rest)) = args.split_first()
        && first == "rdma"
    {
        return test_rdma(rest);
    }
    let mut command = cargo()?;
    if has_subcommand("nextest") {
        command.args(["nextest", "run", "--workspace"]);
        command.args(TEST_TARGETS);
        let chosen = args.iter().any(|arg| arg == "--profile" || arg == "-P");
        if !chosen && is_wide() {
            command.args(["--profile", "wide"]);
        }
    } else {
        eprintln!(
            "xtask: cargo-nextest is not installed, running cargo test with one thread (guests need the \
             machine)"
        );
        command
            .args(["test", "--workspace"])
            .args(TEST_TARGETS)
            .env("RUST_TEST_THREADS", "1");
        command.arg("--");
        for test in long::without_short_form() {
            command.args(["--skip", test]);
        }
    }
    // Whole-system tests run the binary, which Cargo builds beside the tests of its own package.
    command
        .args(args)
        .env(PENSTOCK_BIN_ENV, binary("penstock")?);
    check(&mut command)
}

/// Whether guests of tests run side by side here: each takes up to four cores and 2 GiB, clusters too.
fn is_wide() -> bool {
    const CORES_MIN: usize = 8;
    const MEMORY_MIN_KIB: u64 = 16 << 20;
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let memory = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let total = memory
        .lines()
        .find_map(|line| line.strip_prefix("MemTotal:"));
    let total = total.and_then(|rest| rest.trim().strip_suffix(" kB"));
    let total = total.and_then(|kib| kib.parse().ok());
    cores >= CORES_MIN && total.is_some_and(|kib: u64| kib >= MEMORY_MIN_KIB)
}

fn test_rdma(args: &[OsString]) -> Result<()> {
    if args.iter().any(|arg| arg == "-E") {
        // cargo-nextest would run what either of two expressions selects.
        bail!(
            "`test rdma` takes names of tests, no -E; `test -E 'package(rdma-tests) & ...'` does"
        );
    }
    let mut command = cargo()?;
    if has_subcommand("nextest") {
        // All is built, the program among it, and of the dependencies that are there already.
        command.args(["nextest", "run", "--workspace", "-E", "package(rdma-tests)"]);
        command.args(TEST_TARGETS);
    } else {
        build()?;
        command
            .args(["test", "-p", "rdma-tests"])
            .env("RUST_TEST_THREADS", "1");
    }
    let binary = binary("penstock")?;
    check(command.args(args).env(PENSTOCK_BIN_ENV, binary))
}

/// Builds and runs the benchmarks.
pub fn bench(args: &[OsString]) -> Result<()> {
    let ceph = |arg: &OsString| arg == "ceph" || arg == "--peer=ceph";
    let asks_for_help = args.iter().any(|arg| arg == "--help");
    if args.iter().any(ceph) && !asks_for_help {
        crate::packages::install_ceph()?;
    }
    if args.first().is_some_and(|arg| arg == "fs") && !asks_for_help {
        crate::packages::install_virtiofsd()?;
    }
    build()?;
    let mut command = std::process::Command::new(binary("penstock-bench")?);
    check(
        command
            .args(args)
            .env(PENSTOCK_BIN_ENV, binary("penstock")?),
    )
}

/// Builds and runs the simulator.
pub fn sim(args: &[OsString]) -> Result<()> {
    if let Some(at) = args.iter().position(|arg| arg == "--coverage") {
        let mut rest = args.to_vec();
        rest.remove(at);
        return coverage::sim(&rest);
    }
    // Alone it would be built of other variants of its dependencies, and compile RocksDB once more for that.
    build()?;
    let mut command = std::process::Command::new(binary("penstock-sim")?);
    check(command.args(args))
}

/// Everything that CI checks, cheapest first.
pub fn prepush() -> Result<()> {
    check(cargo()?.args(["fmt", "--all", "--check"]))?;
    crate::widths::check()?;
    check(cargo()?.args([
        "clippy",
        "--workspace",
        "--all-targets",
        "--locked",
        "--",
        "-D",
        "warnings",
    ]))?;
    // The fuzz targets are no part of the workspace.
    check(cargo()?.args(["check", "--manifest-path", "fuzz/Cargo.toml", "--locked"]))?;
    if has_subcommand("deny") {
        check(cargo()?.args(["deny", "--workspace", "check"]))?;
    } else {
        eprintln!("xtask: cargo-deny is not installed, licences and advisories were not checked");
    }
    test(&[])
}
