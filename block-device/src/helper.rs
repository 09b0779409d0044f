//! The helper: the process that keeps the rights for block devices when the daemon gives up its own.
//!
//! It starts before the daemon changes its user, and ends with it: its sessions with the kernel are taken up
//! by the next helper, as those with guests are by the next daemon. The daemon asks by a socket that nobody
//! else has; it names devices by keys, so that it can reach nothing but devices of Penstock's own.

use std::collections::HashMap;
use std::ffi::CString;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::bridge::{Bridge, Parts};
use crate::frontend::{CONFIG_BYTES, RING_SIZE_MAX, Session, SessionError};
use crate::kernel::{self, KernelError};
use crate::nbd;
use crate::record::Record;
use crate::vduse::{Device, DeviceConfig, F_ACCESS_PLATFORM, F_CONFIG_WCE};
use crate::wire::{self, Answer, Asked};

/// Begins the names of all devices of ours.
const PREFIX: &str = "penstock-";
/// Where links may be.
pub const LINKS: &str = "/dev/penstock";
/// Longest key.
const KEY_BYTES_MAX: usize = 64;
/// For how long a device may be open in another process.
const BUSY_LIMIT: Duration = Duration::from_secs(3);
const BUSY_LOOK: Duration = Duration::from_millis(20);

/// Why something asked was not done.
#[derive(Debug, thiserror::Error)]
enum HelperError {
    #[error(transparent)]
    Kernel(#[from] KernelError),
    #[error(transparent)]
    Session(#[from] SessionError),
    #[error("no device is called {0:?}")]
    BadKey(String),
    #[error("{0} is no link below {LINKS}")]
    BadLink(String),
    #[error("another process serves device {0}: stop it, or detach the volume there")]
    Busy(String),
}

impl HelperError {
    fn answer(&self) -> Answer {
        Answer::Failed {
            error: self.to_string(),
            in_use: matches!(self, Self::Kernel(KernelError::InUse(_))),
        }
    }
}

/// The threads of a device.
#[derive(Debug)]
enum Service {
    /// Held for its thread.
    Vduse {
        _bridge: Bridge,
    },
    Nbd(nbd::Server),
}

/// What the helper has of a device.
#[derive(Debug, Default)]
struct Entry {
    service: Option<Service>,
}

/// What the next helper has to know of a device, in a file.
#[derive(Debug, Serialize, Deserialize)]
struct Note {
    link: PathBuf,
}

/// The helper's state.
#[derive(Debug)]
struct Helper {
    /// Sockets, records and notes of devices: a directory of root's, in memory.
    dir: PathBuf,
    entries: Mutex<HashMap<String, Arc<Mutex<Entry>>>>,
}

/// Whether the kernel has a device of this key, whoever serves it. Anybody may look.
pub fn is_in_kernel(key: &str) -> bool {
    let name = format!("{PREFIX}{key}");
    Device::path(&name).exists() || nbd::kernel::Device::find(&name).is_some()
}

/// A kernel interface for block devices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Interface {
    Vduse,
    Nbd,
}

impl Interface {
    /// The one that this kernel has; VDUSE if it has both, also if that is not allowed.
    fn of_kernel() -> Result<Self, KernelError> {
        match kernel::control() {
            Ok(_) => Ok(Self::Vduse),
            Err(error @ KernelError::VduseRefused(_)) => Err(error),
            Err(error) => match nbd::kernel::check() {
                Ok(()) => Ok(Self::Nbd),
                Err(nbd) => Err(KernelError::NoInterface(error.to_string(), nbd)),
            },
        }
    }

    /// The one that a device was made with, or will be.
    fn of_device(name: &str) -> Result<Self, KernelError> {
        if Device::path(name).exists() {
            Ok(Self::Vduse)
        } else if nbd::kernel::Device::find(name).is_some() {
            Ok(Self::Nbd)
        } else {
            Self::of_kernel()
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Vduse => "vduse",
            Self::Nbd => "nbd",
        }
    }
}

/// Serves the daemon at the other end of `socket` until it has gone.
pub fn run(socket: &OwnedFd, dir: &Path) -> io::Result<()> {
    let helper = Arc::new(Helper {
        dir: dir.to_owned(),
        entries: Mutex::default(),
    });
    while let Some((asked, reply)) = wire::receive::<Asked>(socket.as_fd())? {
        let Some(reply) = reply else { continue };
        let helper = Arc::clone(&helper);
        std::thread::Builder::new()
            .name("block-device-ask".into())
            .spawn(move || helper.reply(&asked, &reply))?;
    }
    Ok(())
}

impl Helper {
    fn reply(&self, asked: &Asked, reply: &OwnedFd) {
        let (answer, fd) = match self.carry_out(asked) {
            Ok(done) => done,
            Err(error) => (error.answer(), None),
        };
        // A daemon that has gone needs no answer.
        let _ = wire::send(reply.as_fd(), &answer, fd.as_ref().map(AsFd::as_fd));
    }

    fn carry_out(&self, asked: &Asked) -> Result<(Answer, Option<OwnedFd>), HelperError> {
        match asked {
            Asked::Probe => {
                let interface = Interface::of_kernel()?.name().to_owned();
                Ok((Answer::Interface(interface), None))
            }
            Asked::Listen { key } => Ok((Answer::Done, Some(self.listen(key)?))),
            Asked::Serve { key, link } => {
                let device = self.serve(key, link)?;
                Ok((Answer::Device(device.display().to_string()), None))
            }
            Asked::Remove { key, force } => self.remove(key, *force).map(|()| (Answer::Done, None)),
        }
    }

    /// What is done with a device, one after the other.
    fn entry(&self, key: &str) -> Result<Arc<Mutex<Entry>>, HelperError> {
        let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-';
        if key.is_empty() || key.len() > KEY_BYTES_MAX || !key.bytes().all(is_plain) {
            return Err(HelperError::BadKey(key.to_owned()));
        }
        let mut entries = self.entries.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(Arc::clone(entries.entry(key.to_owned()).or_default()))
    }

    fn file(&self, key: &str, suffix: &str) -> PathBuf {
        self.dir.join(format!("{key}.{suffix}"))
    }

    fn listen(&self, key: &str) -> Result<OwnedFd, HelperError> {
        let entry = self.entry(key)?;
        let _entry = entry.lock().unwrap_or_else(PoisonError::into_inner);
        let mut builder = std::fs::DirBuilder::new();
        let dir = builder.recursive(true).mode(0o700).create(&self.dir);
        dir.map_err(kernel::os(format!("make directory {}", self.dir.display())))?;
        let path = self.file(key, "sock");
        let what = format!("make socket {}", path.display());
        // What listened there before ended with its daemon.
        let _ = std::fs::remove_file(&path);
        let listener = UnixListener::bind(&path).map_err(kernel::os(what))?;
        Ok(listener.into())
    }

    fn serve(&self, key: &str, link: &str) -> Result<PathBuf, HelperError> {
        let link = checked_link(link)?;
        let entry = self.entry(key)?;
        let mut entry = entry.lock().unwrap_or_else(PoisonError::into_inner);
        let name = format!("{PREFIX}{key}");
        if Interface::of_device(&name)? == Interface::Nbd {
            return self.serve_by_nbd(&mut entry, key, &name, &link);
        }
        if entry.service.is_none() {
            entry.service = Some(Service::Vduse {
                _bridge: self.bridge(key, &name)?,
            });
        }
        let made = self.give_to_driver(key, &name, &link);
        if made.is_err() && !kernel::is_attached(&name) {
            entry.service = None;
            self.destroy(key, &name)?;
        }
        made
    }

    fn give_to_driver(&self, key: &str, name: &str, link: &Path) -> Result<PathBuf, HelperError> {
        if !kernel::is_attached(name) {
            kernel::attach(name)?;
        }
        let device = kernel::block_device(name)?;
        self.link(key, link, &device)?;
        Ok(device)
    }

    fn serve_by_nbd(
        &self,
        entry: &mut Entry,
        key: &str,
        name: &str,
        link: &Path,
    ) -> Result<PathBuf, HelperError> {
        let device = match &entry.service {
            Some(Service::Nbd(server)) => server.device().path(),
            _ => {
                let server = self.server(key, name)?;
                let device = server.device().path();
                entry.service = Some(Service::Nbd(server));
                device
            }
        };
        self.link(key, link, &device)?;
        Ok(device)
    }

    fn server(&self, key: &str, name: &str) -> Result<nbd::Server, HelperError> {
        let parts = nbd::Parts {
            name: name.to_owned(),
            socket: self.file(key, "sock"),
            record: self.record(key),
        };
        Ok(nbd::Server::start(parts).map_err(kernel::os(format!("serve nbd device {name}")))?)
    }

    /// Makes the link to a device, and notes it for its removal.
    fn link(&self, key: &str, link: &Path, device: &Path) -> Result<(), HelperError> {
        let note = Note {
            link: link.to_owned(),
        };
        let path = self.file(key, "json");
        let written = serde_json::to_vec(&note).map_err(io::Error::from);
        let written = written.and_then(|bytes| std::fs::write(&path, bytes));
        written.map_err(kernel::os(format!("write {}", path.display())))?;
        Ok(kernel::link(link, device)?)
    }

    /// Opens the kernel's device, makes it if it is not there, and serves it.
    fn bridge(&self, key: &str, name: &str) -> Result<Bridge, HelperError> {
        let is_new = !Device::path(name).exists();
        if is_new {
            self.create(key, name)?;
        }
        let device = open(name)?;
        let queues = device.queues().map_err(kernel::os("count the rings"))?;
        if !kernel::is_attached(name) {
            for index in 0..queues {
                let set = device.set_ring_size_max(index, RING_SIZE_MAX);
                set.map_err(kernel::os("set a ring's size"))?;
            }
        }
        let parts = Parts {
            device,
            queues,
            socket: self.file(key, "sock"),
            record: self.record(key),
        };
        Ok(Bridge::start(parts).map_err(kernel::os(format!("serve VDUSE device {name}")))?)
    }

    /// Makes the kernel's device, as large and able as the daemon's volume is.
    fn create(&self, key: &str, name: &str) -> Result<(), HelperError> {
        let session = Session::connect(&self.file(key, "sock"), 0)?;
        let offer = session.offer();
        let config = DeviceConfig {
            features: offer.features & !F_CONFIG_WCE | F_ACCESS_PLATFORM,
            queues: offer.queues,
            config: &offer.config[..CONFIG_BYTES],
        };
        let old = self.record(key).end();
        old.map_err(kernel::os("remove an old record"))?;
        let created = kernel::control()?.create(&c_name(name), &config);
        Ok(created.map_err(kernel::os(format!("make VDUSE device {name}")))?)
    }

    fn record(&self, key: &str) -> Record {
        Record::at(&self.file(key, "record"))
    }

    fn remove(&self, key: &str, force: bool) -> Result<(), HelperError> {
        let entry = self.entry(key)?;
        let mut entry = entry.lock().unwrap_or_else(PoisonError::into_inner);
        let name = format!("{PREFIX}{key}");
        if kernel::is_attached(&name) {
            if let (Some(device), false) = (kernel::find_block_device(&name), force) {
                kernel::check_unused(&device)?;
            }
            // The bridge answers the driver that lets go of the device, also of a volume that is not served.
            if entry.service.is_none() {
                entry.service = Some(Service::Vduse {
                    _bridge: self.bridge(key, &name)?,
                });
            }
            kernel::detach(&name)?;
        }
        if let Some(device) = nbd::kernel::Device::find(&name) {
            self.remove_from_nbd(&mut entry, key, &device, force)?;
        }
        entry.service = None;
        self.destroy(key, &name)?;
        let note = std::fs::read(self.file(key, "json")).ok();
        let note = note.and_then(|bytes| serde_json::from_slice::<Note>(&bytes).ok());
        if let Some(link) = note.and_then(|note| checked_link(&note.link.to_string_lossy()).ok()) {
            kernel::unlink(&link)?;
        }
        for suffix in ["sock", "record", "json"] {
            let _ = std::fs::remove_file(self.file(key, suffix));
        }
        Ok(())
    }

    fn remove_from_nbd(
        &self,
        entry: &mut Entry,
        key: &str,
        device: &nbd::kernel::Device,
        force: bool,
    ) -> Result<(), HelperError> {
        if !force {
            kernel::check_unused(&device.path())?;
        }
        // Somebody answers what is written back before the device goes.
        if entry.service.is_none() {
            entry.service = Some(Service::Nbd(self.server(key, &device.name)?));
        }
        let what = format!("remove {}", device.path().display());
        Ok(device.remove().map_err(kernel::os(what))?)
    }

    fn destroy(&self, key: &str, name: &str) -> Result<(), HelperError> {
        if Device::path(name).exists() {
            let destroyed = kernel::control()?.destroy(&c_name(name));
            destroyed.map_err(kernel::os(format!("destroy VDUSE device {name}")))?;
        }
        let ended = self.record(key).end();
        Ok(ended.map_err(kernel::os("remove a record"))?)
    }
}

/// Opens the kernel's device. The helper before this one may be about to end.
fn open(name: &str) -> Result<Device, HelperError> {
    let until = Instant::now() + BUSY_LIMIT;
    loop {
        match Device::open(name) {
            Ok(device) => return Ok(device),
            Err(error) if error.kind() != io::ErrorKind::ResourceBusy => {
                return Err(kernel::os(format!("open VDUSE device {name}"))(error).into());
            }
            Err(_) if Instant::now() > until => return Err(HelperError::Busy(name.to_owned())),
            Err(_) => std::thread::sleep(BUSY_LOOK),
        }
    }
}

/// A link in [`LINKS`] itself.
fn checked_link(link: &str) -> Result<PathBuf, HelperError> {
    let path = Path::new(link);
    match (path.parent(), path.file_name()) {
        (Some(dir), Some(_)) if dir == Path::new(LINKS) => Ok(path.to_owned()),
        _ => Err(HelperError::BadLink(link.to_owned())),
    }
}

/// Keys are checked, and hold no NUL.
fn c_name(name: &str) -> CString {
    CString::new(name).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_plain_keys_and_links_of_ours_are_taken() {
        let helper = Helper {
            dir: "/nowhere".into(),
            entries: Mutex::default(),
        };
        for key in ["", "../x", "a b", "a\0", &"x".repeat(65)] {
            assert!(
                matches!(helper.entry(key), Err(HelperError::BadKey(_))),
                "{key:?}"
            );
        }
        helper.entry("0123456789abcdef-x").unwrap();
        for link in [
            "/dev/vdb",
            "/dev/penstock",
            "/dev/penstock/a/b",
            "/dev/penstock/..",
            "web",
        ] {
            assert!(
                matches!(checked_link(link), Err(HelperError::BadLink(_))),
                "{link}"
            );
        }
        checked_link("/dev/penstock/web").unwrap();
    }
}
