//! What a machine keeps in `/var/lib/appliance`.
//!
//! | file | content |
//! |---|---|
//! | `seed.yaml` | the seed, once it was read and understood; the token is taken out after it was used |
//! | `devices.json` | the disks that the node takes, once they were chosen |
//! | `penstock.toml` | the daemon's configuration |
//! | `node` | there when the machine is a node; the daemon starts only then |
//! | `authorized_keys`, `ssh/` | who comes in by ssh, and the machine's own key |
//! | `message` | why the machine is no node yet, or what an update did: one line for the console |

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use crate::files::{read_if_there, replace};
use crate::seed::Seed;

/// Where it is.
pub const DIRECTORY: &str = "/var/lib/appliance";

/// With less room for state the console says so. The log alone leaves 128 MiB (`journald.conf.d`).
const STATE_FREE_MIB_MIN: u64 = 64;

const SECRET: u32 = 0o600;
const PUBLIC: u32 = 0o644;

/// The directory.
#[derive(Debug, Clone)]
pub struct Machine {
    directory: PathBuf,
}

impl Default for Machine {
    fn default() -> Self {
        Self::at(Path::new(DIRECTORY))
    }
}

impl Machine {
    /// What is kept in `directory`.
    pub fn at(directory: &Path) -> Self {
        Self {
            directory: directory.to_owned(),
        }
    }

    /// Where `name` lies.
    pub fn path(&self, name: &str) -> PathBuf {
        self.directory.join(name)
    }

    /// The daemon's configuration.
    pub fn configuration(&self) -> PathBuf {
        self.path("penstock.toml")
    }

    /// The seed, if the machine has one.
    ///
    /// # Errors
    /// It cannot be read, or is damaged.
    pub fn seed(&self) -> Result<Option<Seed>> {
        let path = self.path("seed.yaml");
        let text = read_if_there(&path)?;
        text.map(|text| Seed::parse(&text).with_context(|| format!("{}", path.display())))
            .transpose()
    }

    /// Keeps the seed.
    ///
    /// # Errors
    /// It cannot be written.
    pub fn keep_seed(&self, seed: &Seed) -> Result<()> {
        let text = serde_yaml_ng::to_string(seed).context("write the seed")?;
        replace(&self.path("seed.yaml"), text.as_bytes(), SECRET)
    }

    /// The disks that were chosen, if they were.
    ///
    /// # Errors
    /// They cannot be read.
    pub fn devices(&self) -> Result<Option<Vec<PathBuf>>> {
        let text = read_if_there(&self.path("devices.json"))?;
        text.map(|text| serde_json::from_str(&text).context("devices.json"))
            .transpose()
    }

    /// Keeps the choice of disks.
    ///
    /// # Errors
    /// It cannot be written.
    pub fn keep_devices(&self, devices: &[PathBuf]) -> Result<()> {
        replace(
            &self.path("devices.json"),
            &serde_json::to_vec(devices)?,
            PUBLIC,
        )
    }

    /// Keeps the daemon's configuration.
    ///
    /// # Errors
    /// It cannot be written.
    pub fn keep_configuration(&self, text: &str) -> Result<()> {
        replace(&self.configuration(), text.as_bytes(), PUBLIC)
    }

    /// Keeps who comes in by ssh.
    ///
    /// # Errors
    /// It cannot be written.
    pub fn keep_authorized_keys(&self, keys: &[String]) -> Result<()> {
        let lines: String = keys.iter().map(|key| format!("{key}\n")).collect();
        replace(&self.path("authorized_keys"), lines.as_bytes(), SECRET)
    }

    /// Whether the machine is a node.
    pub fn is_node(&self) -> bool {
        self.path("node").exists()
    }

    /// From now on it is one.
    ///
    /// # Errors
    /// That cannot be written.
    pub fn become_node(&self) -> Result<()> {
        replace(&self.path("node"), b"", PUBLIC)
    }

    /// The line for the console.
    pub fn message(&self) -> Option<String> {
        let text = read_if_there(&self.path("message")).ok().flatten()?;
        Some(text.trim().to_owned()).filter(|text| !text.is_empty())
    }

    /// Keeps the line for the console, and prints it on stderr, which is the log and the console. A line that
    /// cannot be kept was still printed: what it reports must not depend on that.
    pub fn tell(&self, message: &str) {
        if self.message().as_deref() != Some(message) {
            eprintln!("penstock: {message}");
        }
        if let Err(e) = replace(
            &self.path("message"),
            format!("{message}\n").as_bytes(),
            PUBLIC,
        ) {
            eprintln!("penstock: {e:#}");
        }
    }

    /// What is wrong with the room for state, if something is: without any, a node cannot write its
    /// configuration, its log or the record of an update.
    pub fn lack_of_room(&self) -> Option<String> {
        let room = rustix::fs::statvfs(&self.directory).ok()?;
        let free_mib = (room.f_bavail * room.f_frsize) >> 20;
        (free_mib < STATE_FREE_MIB_MIN).then(|| {
            format!(
                "{free_mib} MiB are free on the state partition (/var): remove files of yours from \
                 /var/tmp"
            )
        })
    }

    /// Forgets the line for the console.
    pub fn hush(&self) {
        // It is not there, or the next one replaces it.
        let _ = std::fs::remove_file(self.path("message"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_kept_is_read_back() {
        let dir = tempfile::tempdir().expect("a directory");
        let machine = Machine::at(dir.path());
        assert_eq!(machine.seed().expect("none"), None);
        let seed = Seed::parse("hostname: one\npenstock: {join: T}\n").expect("a seed");
        machine.keep_seed(&seed).expect("kept");
        assert_eq!(machine.seed().expect("read"), Some(seed));
        std::fs::write(machine.path("seed.yaml"), "hostname: [").expect("damaged");
        assert!(format!("{:#}", machine.seed().expect_err("damaged")).contains("seed.yaml"));

        assert!(!machine.is_node());
        machine.become_node().expect("kept");
        assert!(machine.is_node());
        machine.tell("no disk");
        assert_eq!(machine.message().as_deref(), Some("no disk"));
        machine.hush();
        assert_eq!(machine.message(), None);
    }
}
