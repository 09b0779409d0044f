//! `package`: the Debian package.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};
use clap::{Args, ValueEnum};
use guest_rig::process::run;
use packaging::{Compression, Package};

use crate::build::{binary, build, cargo, check, target_directory, workspace};

/// Debian's name for the time that goes into reproducible artefacts, in seconds since 1970.
const EPOCH_ENV: &str = "SOURCE_DATE_EPOCH";
/// The profile of what ships, in `Cargo.toml`.
const DIST: &str = "dist";

/// Which build goes into the package.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Profile {
    /// The one that ships.
    Dist,
    /// The one that the tests run; for a look at a package without another build.
    Dev,
}

/// Which package to build.
#[derive(Debug, Args)]
pub struct Options {
    /// Build of Penstock to put into it
    #[arg(
        long,
        value_name = "PROFILE",
        value_enum,
        default_value = "dist",
        hide = true
    )]
    pub profile: Profile,
}

/// Builds the package and prints its path.
pub fn package(profile: Profile) -> Result<()> {
    let packed = assemble(profile)?;
    println!("{}", packed.display());
    Ok(())
}

/// Builds the package and returns its path.
pub fn assemble(profile: Profile) -> Result<PathBuf> {
    let (built, compression) = match profile {
        Profile::Dist => (build_dist()?, Compression::Small),
        Profile::Dev => {
            build()?;
            (binary("penstock")?, Compression::Fast)
        }
    };
    let directory = target_directory()?.join("package");
    std::fs::create_dir_all(&directory)
        .with_context(|| format!("create {}", directory.display()))?;
    let package = Package {
        source: workspace(),
        binary: &built,
        version: env!("CARGO_PKG_VERSION"),
        epoch: epoch()?,
        compression,
    };
    let packed = package.assemble(&directory)?;
    let bytes = std::fs::metadata(&packed)?.len();
    eprintln!(
        "xtask: {:.1} MB; install it with `apt install {}`",
        bytes as f64 / 1e6,
        packed.display()
    );
    Ok(packed)
}

/// The time of the last commit, unless the environment says otherwise.
pub fn epoch() -> Result<u64> {
    let text = match std::env::var(EPOCH_ENV) {
        Ok(text) => text,
        Err(_) => run(Command::new("git")
            .args(["log", "-1", "--format=%ct"])
            .current_dir(workspace()))
        .with_context(|| {
            format!("ask git for the last commit; {EPOCH_ENV} names a time instead")
        })?,
    };
    let text = text.trim();
    text.parse()
        .with_context(|| format!("{EPOCH_ENV} '{text}' is no number of seconds"))
}

/// The binary that ships. RocksDB, most of a first build, is taken from the build of the tests if that is
/// there: it is the same code, compiled with the same options.
fn build_dist() -> Result<PathBuf> {
    let mut command = cargo()?;
    command
        .args(["build", "--profile", DIST, "--locked"])
        .args(["-p", "penstock", "--bin", "penstock"])
        .arg("--config")
        .arg(remapped()?);
    if reuse_rocksdb(&mut command)? {
        eprintln!("xtask: RocksDB is taken from the build of the tests");
    } else {
        eprintln!("xtask: compiles RocksDB once for the package, which takes minutes");
    }
    check(&mut command)?;
    Ok(target_directory()?.join(DIST).join("penstock"))
}

/// Makes a build link the RocksDB that the tests' build has compiled, and says whether there is one. To
/// compile that takes longer than all the rest.
fn reuse_rocksdb(build: &mut Command) -> Result<bool> {
    let Some(directory) = compiled_rocksdb()? else {
        return Ok(false);
    };
    build
        .env("ROCKSDB_LIB_DIR", directory)
        .env("ROCKSDB_STATIC", "1")
        // Whoever compiles RocksDB also links the library of C++.
        .args(["--config", "build.rustflags = [\"-Clink-arg=-lstdc++\"]"]);
    Ok(true)
}

/// Directory in which the tests' build has left RocksDB.
fn compiled_rocksdb() -> Result<Option<PathBuf>> {
    let Ok(units) = std::fs::read_dir(target_directory()?.join("debug/build")) else {
        return Ok(None);
    };
    let outputs = units.flatten().map(|unit| unit.path().join("out"));
    // An interrupted build has no library, or no output of its build script.
    let finished = |out: &PathBuf| {
        let output = out.with_file_name("output");
        out.join("librocksdb.a").is_file() && output.is_file()
    };
    Ok(outputs.filter(finished).max_by_key(|out| {
        let library = std::fs::metadata(out.join("librocksdb.a"));
        library.and_then(|library| library.modified()).ok()
    }))
}

/// Paths of this machine do not belong into what ships, and two clones build the same bytes.
fn remapped() -> Result<String> {
    let home = match std::env::var_os("CARGO_HOME") {
        Some(home) => PathBuf::from(home),
        None => Path::new(&std::env::var_os("HOME").context("HOME is not set")?).join(".cargo"),
    };
    let flag = |from: &Path, to: &str| format!("\"--remap-path-prefix={}={to}\"", from.display());
    let flags = [flag(workspace(), "/penstock"), flag(&home, "/cargo")];
    Ok(format!("build.rustflags = [{}]", flags.join(", ")))
}
