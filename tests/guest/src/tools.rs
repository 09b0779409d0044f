//! Programs from crates.io that tests and benchmarks run: built once into the cache.

use std::path::PathBuf;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use rustix::fs::{FlockOperation, flock};

use crate::paths::cache_root;
use crate::process::describe;

/// The target that this machine and the guests have. To name it keeps the flags of what is built from build
/// scripts and macros, which cannot be static.
const TARGET: &str = "x86_64-unknown-linux-gnu";

/// A program of a package that is called like it.
#[derive(Debug, Clone, Copy)]
pub struct Tool {
    /// The package's name.
    pub name: &'static str,
    /// Its version.
    pub version: &'static str,
    /// Whether it is linked statically, and so runs in any guest.
    pub is_static: bool,
    /// What its build needs, for whoever sees it fail.
    pub needs: &'static str,
}

impl Tool {
    /// The program, built where it is missing. Concurrent callers wait for one builder.
    pub fn binary(&self) -> Result<PathBuf> {
        let cache = cache_root()?;
        let root = cache.join(format!("{}-{}", self.name, self.version));
        let binary = root.join("bin").join(self.name);
        if binary.is_file() {
            return Ok(binary);
        }
        std::fs::create_dir_all(&root).with_context(|| format!("create {}", root.display()))?;
        let lock = std::fs::File::create(root.join("lock")).context("open a tool's lock")?;
        flock(&lock, FlockOperation::LockExclusive).context("lock a tool's directory")?;
        if !binary.is_file() {
            self.install(&root)?;
        }
        Ok(binary)
    }

    fn install(&self, root: &std::path::Path) -> Result<()> {
        let (name, version) = (self.name, self.version);
        eprintln!(
            "building {name} {version} once into {} (a few minutes)",
            root.display()
        );
        let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
        let mut command = Command::new(cargo);
        command
            .args(["install", "--quiet", "--locked", name])
            .args(["--version", version, "--root"])
            .arg(root)
            // Not with the settings of a workspace in which this is called, nor among its builds.
            .current_dir(root)
            .env_remove("CARGO_TARGET_DIR")
            .stdin(Stdio::null())
            .stdout(Stdio::null());
        if self.is_static {
            command
                .args(["--target", TARGET])
                .env("RUSTFLAGS", "-C target-feature=+crt-static");
        }
        let status = command.status().context("run cargo")?;
        ensure!(
            status.success(),
            "`cargo install {name}` {}: it needs {}",
            describe(status),
            self.needs
        );
        Ok(())
    }
}
