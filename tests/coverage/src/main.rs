//! `penstock-coverage`: of the cores' code, the regions that no run of an instrumented program entered.
//!
//! A *region* is what the compiler counts: a branch, an arm of a match, the rest of a function after a
//! possible return. `cargo xtask sim --coverage` runs the simulator and then this.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, ensure};
use clap::Parser;
use llvm_profparser::coverage::coverage_mapping::CoverageMapping;
use llvm_profparser::coverage::reporting::CoverageResult;
use llvm_profparser::merge_profiles;

/// Where the cores are: what the simulator runs and what production runs.
const CORES: [&str; 4] = [
    "fabric/replication/src",
    "fabric/store/src/shard",
    "meta/src/state",
    "meta/src/watch",
];

#[derive(Debug, Parser)]
#[command(name = "penstock-coverage")]
struct Cli {
    /// The instrumented program
    #[arg(long)]
    object: PathBuf,
    /// The root of the workspace that it was built from
    #[arg(long)]
    root: PathBuf,
    /// What its runs have counted
    #[arg(required = true)]
    profiles: Vec<PathBuf>,
}

/// Regions, of a line or of a core.
#[derive(Default)]
struct Count {
    run: usize,
    regions: usize,
}

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // Returning the error from `main` would print a backtrace if `RUST_BACKTRACE` is set.
            eprintln!("penstock-coverage: error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<()> {
    let cli = Cli::parse();
    let profile = merge_profiles(&cli.profiles).context("read the profiles")?;
    let objects = [cli.object];
    let mapping = CoverageMapping::new(&objects, &profile, true)?;
    let report = mapping.generate_subreport(|paths| {
        let mut paths = paths.iter();
        paths.any(|path| core_of(&cli.root, path).is_some())
    })?;
    let mut totals: BTreeMap<&str, Count> = BTreeMap::new();
    for (path, result) in &report.files {
        let Some((core, file)) = core_of(&cli.root, path) else {
            continue;
        };
        let total = totals.entry(core).or_default();
        show(&cli.root.join(file), file, result, total)?;
    }
    ensure!(
        !totals.is_empty(),
        "the program holds nothing of {CORES:?}: was it built of {}?",
        cli.root.display()
    );
    for (core, Count { run, regions }) in totals {
        let percent = 100.0 * run as f64 / regions.max(1) as f64;
        println!("{core}: {run} of {regions} regions were run, {percent:.1} %");
    }
    Ok(())
}

/// Which core a file is of, and its path in the workspace; `None` for tests, and for what is no core's.
fn core_of<'a>(root: &Path, path: &'a Path) -> Option<(&'static str, &'a Path)> {
    let file = path.strip_prefix(root).unwrap_or(path);
    let is_test = file
        .components()
        .any(|part| Path::new(part.as_os_str()).file_stem() == Some("tests".as_ref()));
    let core = CORES
        .into_iter()
        .find(|core| file.starts_with(core) || file == Path::new(&format!("{core}.rs")))?;
    (!is_test).then_some((core, file))
}

/// Prints the lines of a file on which a region begins that never ran.
fn show(place: &Path, file: &Path, result: &CoverageResult, total: &mut Count) -> Result<()> {
    let source = std::fs::read_to_string(place);
    let source = source.with_context(|| format!("read {}", place.display()))?;
    let mut lines: BTreeMap<usize, Count> = BTreeMap::new();
    for (at, count) in &result.hits {
        let line = lines.entry(at.line_start).or_default();
        line.regions += 1;
        line.run += usize::from(*count > 0);
    }
    total.regions += lines.values().map(|line| line.regions).sum::<usize>();
    total.run += lines.values().map(|line| line.run).sum::<usize>();
    for (number, line) in lines.iter().filter(|(_, line)| line.run < line.regions) {
        let text = source.lines().nth(number - 1).unwrap_or_default().trim();
        let missed = line.regions - line.run;
        println!("{}:{number}: {missed} never run: {text}", file.display());
    }
    Ok(())
}
