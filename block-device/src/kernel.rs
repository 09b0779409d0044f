//! The kernel's side of a device's life: vDPA devices by the tool `vdpa` of iproute2, block devices by sysfs.

use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::vduse;

/// vDPA devices, and the drivers that have them.
const VDPA_DEVICES: &str = "/sys/bus/vdpa/devices";
/// Modules: VDUSE, and virtio drivers on vDPA devices.
const MODULES: [&str; 2] = ["vduse", "virtio_vdpa"];
/// Until the kernel has carried out what `vdpa` asked of it. A device's driver reads its partition table
/// meanwhile, and one that goes waits for its requests.
const TOOL_LIMIT: Duration = Duration::from_secs(45);
/// Until a block device has appeared.
const APPEAR_LIMIT: Duration = Duration::from_secs(15);
const LOOK: Duration = Duration::from_millis(20);

/// Why the kernel did not do something.
#[derive(Debug, thiserror::Error)]
pub enum KernelError {
    /// Nothing that makes block devices.
    #[error(
        "this kernel has no VDUSE ({0}): load the modules vduse and virtio_vdpa (Linux 5.15 or later)"
    )]
    NoVduse(String),
    /// The kernel has VDUSE, and this process may not use it.
    #[error(
        "VDUSE may not be used here ({0}): allow the devices of char-vduse (DeviceAllow= of the daemon's \
         unit) and start the daemon again"
    )]
    VduseRefused(String),
    /// Neither that nor nbd.
    #[error("{0}, or the module nbd, which takes no orders either: {1}")]
    NoInterface(String, #[source] io::Error),
    /// A program is missing.
    #[error("cannot run {program}: {source}; install {package}")]
    NoTool {
        /// Its name.
        program: &'static str,
        /// Its package.
        package: &'static str,
        /// Why not.
        #[source]
        source: io::Error,
    },
    /// A program failed.
    #[error("{command}: {told}")]
    Tool {
        /// What was run.
        command: String,
        /// What it said.
        told: String,
    },
    /// It took too long, and goes on.
    #[error("{0} is not done after {limit} s, and goes on", limit = TOOL_LIMIT.as_secs())]
    Slow(String),
    /// No block device appeared.
    #[error(
        "the kernel made no block device of vDPA device {0}: is the module virtio_vdpa loaded?"
    )]
    NoBlockDevice(String),
    /// Mounted, or opened by somebody who wants it alone.
    #[error("{0} is in use: it is mounted, or a part of another device")]
    InUse(PathBuf),
    /// The operating system.
    #[error("{what}: {source}")]
    Os {
        /// Verb and object.
        what: String,
        /// Its answer.
        #[source]
        source: io::Error,
    },
}

/// An error of the operating system, with what was tried.
pub fn os(what: impl Into<String>) -> impl FnOnce(io::Error) -> KernelError {
    let what = what.into();
    move |source| KernelError::Os { what, source }
}

/// Opens VDUSE's control device, and loads the modules if they are missing.
pub fn control() -> Result<vduse::Control, KernelError> {
    let has_driver = Path::new("/sys/bus/virtio/drivers/virtio_blk").exists()
        && Path::new("/sys/bus/vdpa/drivers/virtio_vdpa").exists();
    if !Path::new(vduse::CONTROL).exists() || !has_driver {
        for module in MODULES.iter().chain(&["virtio_blk"]) {
            // What is missing afterwards is told below.
            let loaded = Command::new("modprobe")
                .arg(module)
                .stdin(Stdio::null())
                .stderr(Stdio::null())
                .status();
            tracing::debug!(module, ?loaded, "load a module");
        }
    }
    vduse::Control::open().map_err(|error| {
        let told = format!("{}: {error}", vduse::CONTROL);
        match error.kind() {
            io::ErrorKind::PermissionDenied => KernelError::VduseRefused(told),
            _ => KernelError::NoVduse(told),
        }
    })
}

/// Whether a vDPA device exists, which means that a driver has been given the VDUSE device.
pub fn is_attached(name: &str) -> bool {
    Path::new(VDPA_DEVICES).join(name).exists()
}

/// Gives a VDUSE device to the kernel's driver.
pub fn attach(name: &str) -> Result<(), KernelError> {
    vdpa(&["dev", "add", "name", name, "mgmtdev", "vduse"])
}

/// Takes it away again. Requests in flight are waited for.
pub fn detach(name: &str) -> Result<(), KernelError> {
    vdpa(&["dev", "del", name])
}

fn vdpa(args: &[&str]) -> Result<(), KernelError> {
    let shown = format!("vdpa {}", args.join(" "));
    let started = Command::new("vdpa")
        .args(args)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn();
    let mut child = started.map_err(|source| KernelError::NoTool {
        program: "vdpa",
        package: "iproute2",
        source,
    })?;
    let until = Instant::now() + TOOL_LIMIT;
    while child.try_wait().map_err(os(&*shown))?.is_none() {
        if Instant::now() > until {
            // It waits in the kernel and cannot be ended.
            return Err(KernelError::Slow(shown));
        }
        std::thread::sleep(LOOK);
    }
    ended(child, shown)
}

fn ended(child: Child, shown: String) -> Result<(), KernelError> {
    let output = child.wait_with_output().map_err(os(&*shown))?;
    if output.status.success() {
        return Ok(());
    }
    let told = String::from_utf8_lossy(&output.stderr);
    Err(KernelError::Tool {
        command: shown,
        told: told.trim().replace('\n', "; "),
    })
}

/// The block device (`/dev/vdb`) of a vDPA device, once it is there.
pub fn block_device(name: &str) -> Result<PathBuf, KernelError> {
    let until = Instant::now() + APPEAR_LIMIT;
    loop {
        if let Some(found) = find_block_device(name) {
            return Ok(found);
        }
        if Instant::now() > until {
            return Err(KernelError::NoBlockDevice(name.to_owned()));
        }
        std::thread::sleep(LOOK);
    }
}

/// The same, if it is there now.
pub fn find_block_device(name: &str) -> Option<PathBuf> {
    let device = Path::new(VDPA_DEVICES).join(name);
    let parts = std::fs::read_dir(device).ok()?;
    let block = parts.flatten().map(|part| part.path().join("block"));
    let disks = block
        .filter_map(|block| std::fs::read_dir(block).ok())
        .flatten();
    let node = disks
        .flatten()
        .map(|disk| Path::new("/dev").join(disk.file_name()));
    node.into_iter().find(|node| node.exists())
}

/// Refuses a block device that is mounted, or part of another.
pub fn check_unused(device: &Path) -> Result<(), KernelError> {
    let mut options = std::fs::OpenOptions::new();
    let opened = options
        .read(true)
        .custom_flags(libc::O_EXCL | libc::O_NONBLOCK)
        .open(device);
    match opened {
        Ok(_) => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::ResourceBusy => {
            Err(KernelError::InUse(device.to_owned()))
        }
        Err(error) => Err(os(format!("open {}", device.display()))(error)),
    }
}

/// Makes the link by which people know the device, in place of an old one.
pub fn link(link: &Path, device: &Path) -> Result<(), KernelError> {
    let what = || format!("make {}", link.display());
    if let Some(dir) = link.parent() {
        std::fs::create_dir_all(dir).map_err(os(what()))?;
    }
    if std::fs::read_link(link).is_ok_and(|target| target == device) {
        return Ok(());
    }
    unlink(link)?;
    std::os::unix::fs::symlink(device, link).map_err(os(what()))
}

/// Removes a link, and nothing else.
pub fn unlink(link: &Path) -> Result<(), KernelError> {
    match link.symlink_metadata() {
        Ok(found) if found.is_symlink() => {
            std::fs::remove_file(link).map_err(os(format!("remove {}", link.display())))
        }
        Ok(_) => Err(os(format!("replace {}", link.display()))(io::Error::other(
            "it is not a link",
        ))),
        Err(_) => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_are_replaced_and_other_files_are_not() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("penstock/web");
        link(&path, Path::new("/dev/vdb")).unwrap();
        link(&path, Path::new("/dev/vdc")).unwrap();
        assert_eq!(std::fs::read_link(&path).unwrap(), Path::new("/dev/vdc"));
        unlink(&path).unwrap();
        unlink(&path).unwrap();
        std::fs::write(&path, "precious").unwrap();
        let told = link(&path, Path::new("/dev/vdb")).unwrap_err().to_string();
        assert!(told.contains("not a link"), "{told}");
        unlink(&path).unwrap_err();
        assert_eq!(std::fs::read(&path).unwrap(), b"precious");
    }
}
