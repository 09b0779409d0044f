//! What the daemon gives up before it has threads: its user, its capabilities, the paths and the system
//! calls that it does not need.
//!
//! The order, and why:
//! 1. As root: the data directory and the socket directories are made if they are not there, and block
//!    devices are opened ([`OpenedAhead`](fabric_store::file::OpenedAhead)). Only what the configuration
//!    names is touched: what lies in the data directory could be put there by whoever took the daemon over
//!    before.
//! 2. It becomes the user, and gives up all capabilities but IPC_LOCK ([`user`]).
//! 3. Landlock limits the paths that it may open ([`paths`]), seccomp its system calls ([`syscalls`]).
//! 4. All of that is read back. A thread is started only after that; threads inherit it all, and none can
//!    get anything back.

pub mod limits;
mod paths;
mod place;
mod report;
mod syscalls;
mod user;

use std::path::{Path, PathBuf};

use api::failure::{Failure, Kind, Result};
use config::datadir::make_dir;
use config::devices::refused;
use config::{Config, DeviceSpec, Sandbox, StoreKind};
use fabric_store::file::{DeviceError, OpenedAhead};

use paths::Rules;

pub use place::{is_block_device, is_roots};
pub use report::in_force;
pub use user::become_owner;

/// What a sandbox lets through, to be told.
#[derive(Debug, Clone, Default)]
pub struct Confinement {
    /// Landlock's version, if it limits paths.
    pub landlock_abi: Option<u32>,
    /// Directories in which files and sockets may be made.
    dirs: Vec<PathBuf>,
    /// Devices.
    devices: Vec<PathBuf>,
}

impl Confinement {
    /// Refuses a place where this daemon cannot make a socket.
    pub fn check_socket(&self, path: &Path) -> Result<()> {
        let dir = path.parent().unwrap_or(Path::new("/"));
        if self.landlock_abi.is_none() || self.has(dir) {
            return Ok(());
        }
        Err(Failure::new(
            Kind::Denied,
            format!(
                "the sandbox of this daemon keeps it out of directory {}",
                dir.display()
            ),
            format!(
                "choose a socket below {}, or add that directory to socket_dirs in the configuration and \
                 restart the daemon",
                self.shown_dirs()
            ),
        ))
    }

    /// Refuses a device that this daemon cannot open.
    pub fn check_device(&self, path: &Path) -> Result<()> {
        // Where nothing can be, something else is wrong.
        if self.landlock_abi.is_none()
            || path.parent().is_none_or(|dir| !dir.exists())
            || self.devices.iter().any(|one| one == path)
            || self.has(path)
        {
            return Ok(());
        }
        let shown = path.display();
        // The command hands a block device over, if it can: `api::hand_over`.
        let then = match is_block_device(path) {
            true => "repeat this as root, or restart the daemon",
            false => "restart the daemon",
        };
        Err(Failure::new(
            Kind::Denied,
            format!("the sandbox of this daemon keeps it from opening {shown}"),
            format!("add {shown} to devices in the configuration, then {then}"),
        ))
    }

    fn has(&self, path: &Path) -> bool {
        // What is not there yet is made in a directory that is.
        let real = path.canonicalize().or_else(|e| {
            let dir = path.parent().ok_or(e)?;
            dir.canonicalize()
        });
        real.is_ok_and(|real| self.dirs.iter().any(|dir| real.starts_with(dir)))
    }

    fn shown_dirs(&self) -> String {
        let shown = self.dirs.iter().map(|dir| dir.display().to_string());
        shown.collect::<Vec<_>>().join(", ")
    }
}

/// Gives up what the configuration says, and opens block devices before that. `added` reads the paths of
/// devices besides those that the configuration names, from the data directory: as the user, who owns that.
/// Called before there are other threads, and before anything of the node is opened. Returns what is in
/// force.
pub fn give_up(
    config: &Config,
    added: impl FnOnce() -> Result<Vec<PathBuf>>,
    opened: &OpenedAhead,
) -> Result<Confinement> {
    user::check_alone()?;
    // Reads and keeps what the kernel handed over at the start of the process. Older kernels tell it by a
    // file that only root reads once the user has changed, and rustix panics without it.
    rustix::param::page_size();
    if let Some(user) = &config.privileges.user {
        if user::may_change() {
            user::prepare(config, user)?;
            open_devices(config, opened)?;
        }
        user::become_user(user)?;
        user::check_data(&config.data, user)?;
        tracing::info!(
            user = user.name,
            uid = user.uid,
            gid = user.gid,
            "user changed"
        );
    } else {
        if config.privileges.sandbox != Sandbox::Off {
            open_devices(config, opened)?;
        }
        limits::drop_privileges();
    }
    confine(config, added)
}

/// Opens the block devices that the configuration names, while this process may. What fails is told again,
/// with its reason, when the node looks for its devices; only a device that somebody else has stops the
/// start here. Where others than root write, the data directory above all, a link could lead to any disk.
fn open_devices(config: &Config, opened: &OpenedAhead) -> Result<()> {
    if config.store == StoreKind::Null {
        return Ok(());
    }
    for path in config.devices.iter().map(DeviceSpec::path) {
        let path = &std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
        if !is_roots(path) {
            if is_block_device(path) {
                tracing::warn!(
                    path = %path.display(),
                    "not opened as root: others can change where this path leads; name the disk by a path \
                     below /dev"
                );
            }
            continue;
        }
        match opened.open(path) {
            Ok(()) | Err(DeviceError::Missing(_)) => {}
            Err(e @ DeviceError::InUse(_)) => return Err(refused::failure(&e)),
            Err(error) => {
                tracing::warn!(path = %path.display(), %error, "open a device ahead");
            }
        }
    }
    Ok(())
}

/// Landlock and seccomp, as configured.
fn confine(config: &Config, added: impl FnOnce() -> Result<Vec<PathBuf>>) -> Result<Confinement> {
    let sandbox = config.privileges.sandbox;
    let mut confinement = Confinement::default();
    if sandbox == Sandbox::Off {
        return Ok(confinement);
    }
    // Only what is there can be allowed.
    make_dir(&config.data)?;
    let rules = rules(config, added()?);
    match paths::restrict(&rules) {
        Ok(abi) => {
            confinement = Confinement {
                landlock_abi: Some(abi),
                dirs: real(rules.own.iter().chain(&rules.sockets)),
                devices: rules.devices,
            };
        }
        Err(error) => missing(sandbox, "paths (Landlock)", &error)?,
    }
    if let Err(error) = syscalls::restrict() {
        missing(sandbox, "system calls (seccomp)", &error)?;
    }
    Ok(confinement)
}

fn missing(sandbox: Sandbox, what: &str, error: &str) -> Result<()> {
    if sandbox == Sandbox::BestEffort {
        tracing::warn!(error, "{what} are not limited");
        return Ok(());
    }
    Err(Failure::new(
        Kind::Failed,
        format!("cannot limit {what}: {error}"),
        "use a kernel that can (CONFIG_SECURITY_LANDLOCK, and landlock in its `lsm=`; \
         CONFIG_SECCOMP_FILTER), or set sandbox = \"best-effort\" to go on without",
    ))
}

/// The paths that this daemon needs.
fn rules(config: &Config, added: Vec<PathBuf>) -> Rules {
    let configured = config.devices.iter().map(|device| device.path().to_owned());
    let devices: Vec<PathBuf> = configured
        .chain(added)
        .map(|path| std::path::absolute(&path).unwrap_or(path))
        .collect();
    let mut sockets = config.privileges.socket_dirs.clone();
    sockets.extend(config.admin_socket.parent().map(Path::to_owned));
    Rules {
        own: vec![config.data.clone()],
        sockets,
        devices,
    }
}

/// Directories that are there, by their real paths.
fn real<'a>(dirs: impl Iterator<Item = &'a PathBuf>) -> Vec<PathBuf> {
    let mut dirs: Vec<PathBuf> = dirs.filter_map(|dir| dir.canonicalize().ok()).collect();
    dirs.sort();
    dirs.dedup();
    dirs
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_sandbox_keeps_out_is_named_with_its_hint() {
        let dir = tempfile::tempdir().unwrap();
        let confinement = Confinement {
            landlock_abi: Some(1),
            dirs: vec![dir.path().canonicalize().unwrap()],
            devices: vec!["/dev/sdx".into()],
        };
        confinement
            .check_socket(&dir.path().join("a.sock"))
            .unwrap();
        let told = confinement
            .check_socket(Path::new("/srv/a.sock"))
            .unwrap_err();
        assert!(
            told.error.contains("/srv") && told.to_string().contains("socket_dirs"),
            "{told}"
        );
        confinement.check_device(Path::new("/dev/sdx")).unwrap();
        confinement
            .check_device(&dir.path().join("new.img"))
            .unwrap();
        let told = confinement.check_device(Path::new("/dev/sdy")).unwrap_err();
        assert!(
            told.to_string().contains("add /dev/sdy to devices"),
            "{told}"
        );
        Confinement::default()
            .check_socket(Path::new("/srv/a.sock"))
            .unwrap();
    }
}
