//! Where the rig keeps what it builds once, and where it finds the binary under test.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use anyhow::{Context, Result, bail};

/// Names the `penstock` binary to test; without it the one beside the test's own executable is taken.
pub const PENSTOCK_BIN_ENV: &str = "PENSTOCK_BIN";

/// `${XDG_CACHE_HOME:-~/.cache}/penstock`, where everything lives that is built once.
pub fn cache_root() -> Result<PathBuf> {
    if let Some(cache) = std::env::var_os("XDG_CACHE_HOME").filter(|value| !value.is_empty()) {
        return Ok(PathBuf::from(cache).join("penstock"));
    }
    let home = std::env::var_os("HOME")
        .context("neither XDG_CACHE_HOME nor HOME is set: set one of them")?;
    Ok(PathBuf::from(home).join(".cache/penstock"))
}

/// The guest's part of [`cache_root`].
pub fn guest_cache() -> Result<PathBuf> {
    Ok(cache_root()?.join("guest"))
}

/// The binary of a program that builds it into another directory than its own.
static CHOSEN: OnceLock<PathBuf> = OnceLock::new();

/// Makes [`penstock_binary`] return `path`, regardless of the environment and of the files beside this
/// executable. The first call decides.
pub fn choose_penstock_binary(path: PathBuf) {
    let _ = CHOSEN.set(path);
}

/// The `penstock` binary: the chosen one, or `PENSTOCK_BIN`, or the one that Cargo built into the target
/// directory of this executable.
pub fn penstock_binary() -> Result<PathBuf> {
    if let Some(path) = CHOSEN.get() {
        return Ok(path.clone());
    }
    if let Some(path) = std::env::var_os(PENSTOCK_BIN_ENV) {
        return Ok(path.into());
    }
    let exe = std::env::current_exe().context("find this executable")?;
    let beside = exe
        .ancestors()
        .skip(1)
        .take(2)
        .map(|dir| dir.join("penstock"))
        .find(|path| path.is_file());
    match beside {
        Some(path) => Ok(path),
        None => bail!(
            "no penstock binary beside {}: run `cargo build -p penstock` first or set {PENSTOCK_BIN_ENV}",
            exe.display()
        ),
    }
}

/// Finds a program in PATH, and in the sbin directories that an ordinary user's PATH lacks.
pub fn find_program(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let extra = ["/usr/local/sbin", "/usr/sbin", "/sbin"].map(PathBuf::from);
    std::env::split_paths(OsStr::new(&path))
        .chain(extra)
        .map(|dir| dir.join(name))
        .find(|path| is_executable(path))
}

fn is_executable(path: &Path) -> bool {
    rustix::fs::access(path, rustix::fs::Access::EXEC_OK).is_ok() && path.is_file()
}
