//! Which accelerator QEMU can really use here. A `/dev/kvm` that opens may still be unable to run a guest
//! (nested virtualisation often is), so the rig boots one and looks.

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result};

use crate::image::GuestImage;
use crate::process::{Guarded, wait_until};

/// A working KVM reaches the first process of the guest in about a second; one that takes longer than this is
/// no help.
const PROBE_LIMIT: Duration = Duration::from_secs(10);
/// Printed by the probe's guest from its first process.
const PROBE_WORD: &str = "rig-probe-booted";

/// How QEMU runs guest code.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Accel {
    /// Hardware virtualisation.
    Kvm,
    /// Translation: ten to twenty times slower, and available everywhere.
    Tcg,
}

impl Accel {
    /// QEMU's arguments.
    pub fn args(self) -> &'static [&'static str] {
        match self {
            Self::Kvm => &["-accel", "kvm", "-cpu", "host"],
            // No `monitor`: Debian 13's Linux idles by MWAIT if it can, and TCG's returns at once if a
            // machine has several processors, so that an idle guest would keep all of them busy.
            Self::Tcg => &["-accel", "tcg,thread=multi", "-cpu", "max,monitor=off"],
        }
    }

    /// The name people know it by.
    pub fn name(self) -> &'static str {
        match self {
            Self::Kvm => "KVM",
            Self::Tcg => "TCG",
        }
    }

    /// Boots a guest under KVM if there is a `/dev/kvm`, and remembers the answer for this boot of the
    /// machine.
    pub fn probe(image: &GuestImage) -> Result<Self> {
        let boot_id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id")
            .context("read the boot id")?;
        let answer = image.directory().join("accelerator");
        if let Ok(text) = std::fs::read_to_string(&answer) {
            match text.split_once(' ') {
                Some((name, boot)) if boot == boot_id => {
                    return Ok(if name == "kvm" { Self::Kvm } else { Self::Tcg });
                }
                _ => {}
            }
        }
        let found = if kvm_boots(image)? {
            Self::Kvm
        } else {
            Self::Tcg
        };
        let name = if found == Self::Kvm { "kvm" } else { "tcg" };
        std::fs::write(&answer, format!("{name} {boot_id}"))
            .with_context(|| format!("write {}", answer.display()))?;
        Ok(found)
    }
}

fn kvm_boots(image: &GuestImage) -> Result<bool> {
    if rustix::fs::access(
        "/dev/kvm",
        rustix::fs::Access::READ_OK | rustix::fs::Access::WRITE_OK,
    )
    .is_err()
    {
        return Ok(false);
    }
    let scratch = tempfile::tempdir().context("make a directory for the KVM probe")?;
    let console = scratch.path().join("console");
    let mut qemu = Command::new("qemu-system-x86_64");
    qemu.args([
        "-machine",
        "q35",
        "-m",
        "256",
        "-nodefaults",
        "-no-reboot",
        "-display",
        "none",
    ])
    .args(Accel::Kvm.args())
    .arg("-kernel")
    .arg(image.kernel())
    .arg("-initrd")
    .arg(image.probe_initramfs())
    .args(["-append", "console=ttyS0 panic=-1 quiet", "-serial"])
    .arg(format!("file:{}", console.display()))
    .stdin(Stdio::null())
    .stdout(Stdio::null())
    .stderr(Stdio::null());
    let mut qemu = Guarded::spawn(&mut qemu, "qemu-system-x86_64")?;
    // Ended without the word (KVM refused), or still silent at the limit (KVM hangs): both mean no.
    let booted = wait_until(PROBE_LIMIT, || {
        if console_says_booted(&console) {
            return Ok(Some(true));
        }
        Ok(qemu.ended()?.map(|_| console_says_booted(&console)))
    });
    Ok(booted.unwrap_or(false))
}

fn console_says_booted(console: &Path) -> bool {
    std::fs::read_to_string(console).is_ok_and(|text| text.contains(PROBE_WORD))
}

/// The probe's first process.
pub(crate) fn probe_init() -> String {
    format!("#!/bin/busybox sh\necho {PROBE_WORD}\n/bin/busybox poweroff -f\n")
}
