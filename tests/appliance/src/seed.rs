//! What a machine is told, and how it gets to know.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};
use guest_rig::process::run;

/// How a machine is told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    /// A credential by QEMU's fw_cfg.
    FwCfg,
    /// A credential in the SMBIOS tables.
    Smbios,
    /// A disk of cloud-init's NoCloud.
    NoCloud,
}

/// What a machine is told.
#[derive(Debug, Clone)]
pub struct Seed {
    /// How.
    pub way: Way,
    /// The text: YAML.
    pub text: String,
}

impl Seed {
    /// QEMU's arguments for it; `directory` takes files that QEMU reads. `index` is that of the disk, if it
    /// becomes one.
    pub(crate) fn args(&self, directory: &Path) -> Result<Vec<String>> {
        let file = directory.join("seed");
        match self.way {
            Way::FwCfg => {
                std::fs::write(&file, &self.text)?;
                Ok(vec![
                    "-fw_cfg".into(),
                    format!(
                        "name=opt/io.systemd.credentials/penstock.seed,file={}",
                        file.display()
                    ),
                ])
            }
            Way::Smbios => {
                std::fs::write(&file, credential("penstock.seed", &self.text))?;
                Ok(vec![
                    "-smbios".into(),
                    format!("type=11,path={}", file.display()),
                ])
            }
            Way::NoCloud => {
                let disk = nocloud(directory, &self.text)?;
                Ok(vec![
                    "-drive".into(),
                    format!("file={},format=raw,if=virtio,readonly=on", disk.display()),
                ])
            }
        }
    }
}

/// A credential as systemd reads it from SMBIOS tables (systemd-smbios(7)).
pub(crate) fn credential(name: &str, value: &str) -> String {
    format!("io.systemd.credential:{name}={value}")
}

/// A disk with the files of NoCloud.
fn nocloud(directory: &Path, text: &str) -> Result<PathBuf> {
    let disk = directory.join("nocloud.img");
    let _ = std::fs::remove_file(&disk);
    run(Command::new("mformat")
        .args(["-C", "-f", "1440", "-v", "cidata", "-i"])
        .arg(&disk)
        .arg("::"))
    .context("mformat is of the package mtools")?;
    for (name, text) in [
        ("user-data", format!("#cloud-config\n{text}")),
        ("meta-data", "instance-id: rig\n".to_owned()),
    ] {
        let file = directory.join(name);
        std::fs::write(&file, text)?;
        run(Command::new("mcopy")
            .arg("-i")
            .arg(&disk)
            .arg(&file)
            .arg(format!("::{name}")))?;
    }
    Ok(disk)
}
