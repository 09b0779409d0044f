//! `sim --coverage`: which parts of the cores no seed runs.

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::{Command, ExitCode};

use anyhow::{Context, Result};

use crate::build::{binary, build, cargo, check, target_directory, workspace};

/// Set where Cargo calls the compiler through this program.
const WRAPS: &str = "PENSTOCK_XTASK_WRAPS_RUSTC";

/// What is run if nothing is asked for: each kind of plan.
const STANDARD: [&[&str]; 4] = [
    &["--seeds", "400"],
    &["--seeds", "300", "--rough"],
    &["--seeds", "300", "--outages"],
    &["--seeds", "200", "--devices", "2", "--overlaps"],
];

/// If Cargo has called this program in place of the compiler: calls that, so that what it compiles counts
/// which of its regions are run. `None`: it was called by somebody else.
pub fn wrap_rustc() -> Option<ExitCode> {
    std::env::var_os(WRAPS)?;
    let mut args = std::env::args_os().skip(1);
    let status = Command::new(args.next()?)
        .args(args)
        .arg("-Cinstrument-coverage")
        .status();
    match status {
        Ok(status) if status.success() => Some(ExitCode::SUCCESS),
        _ => Some(ExitCode::FAILURE),
    }
}

/// Builds an instrumented simulator, runs it with `args` (or with all kinds of plans), and lists what was not
/// run.
pub fn sim(args: &[OsString]) -> Result<()> {
    build()?;
    let folder = target_directory()?.join("coverage");
    // Counts of an earlier program say nothing of this one.
    let _ = std::fs::remove_dir_all(&folder);
    std::fs::create_dir_all(&folder).with_context(|| format!("make {}", folder.display()))?;
    let sim = instrumented(&folder)?;
    let standard: Vec<Vec<OsString>> = STANDARD
        .iter()
        .map(|run| run.iter().map(OsString::from).collect())
        .collect();
    let runs = match args {
        [] => standard,
        args => vec![args.to_vec()],
    };
    let mut profiles = Vec::new();
    for (number, run) in runs.iter().enumerate() {
        let profile = folder.join(format!("{number}.profraw"));
        check(
            Command::new(&sim)
                .args(run)
                .env("LLVM_PROFILE_FILE", &profile),
        )?;
        profiles.push(profile);
    }
    let mut report = Command::new(binary("penstock-coverage")?);
    report
        .arg("--object")
        .arg(&sim)
        .arg("--root")
        .arg(workspace());
    check(report.args(profiles))
}

/// The simulator, compiled so that it counts. Only the workspace's own crates are: RocksDB stays as it is.
fn instrumented(folder: &std::path::Path) -> Result<PathBuf> {
    let own = std::env::current_exe().context("find this program")?;
    // Programs of the compilation itself that count, too, write where nobody looks.
    let nowhere = folder.join("build.profraw");
    check(
        cargo()?
            .args(["build", "--workspace", "--bin", "penstock-sim"])
            .env("RUSTC_WORKSPACE_WRAPPER", own)
            .env(WRAPS, "1")
            .env("LLVM_PROFILE_FILE", nowhere),
    )?;
    let copy = folder.join("penstock-sim");
    std::fs::copy(binary("penstock-sim")?, &copy).context("copy the simulator")?;
    // What the other commands run is the ordinary one again.
    build()?;
    Ok(copy)
}
