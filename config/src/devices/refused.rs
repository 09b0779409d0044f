//! Why a device cannot be opened, in a person's words: who has it, who may use it, and what to do.

use std::fs::{self, Metadata};
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::path::Path;

use api::failure::{Failure, Kind, plain_io};
use api::lock::lock_holder;
use fabric_store::file::DeviceError;
use rustix::io::Errno;

/// What the store refuses to open or make, and why.
pub fn failure(e: &DeviceError) -> Failure {
    match e {
        DeviceError::InUse(path) => in_use(path),
        DeviceError::Missing(path) => Failure::new(
            Kind::NotFound,
            format!("device {} does not exist", path.display()),
            "name a block device or file that is there",
        ),
        DeviceError::Kind(path) => wrong_kind(path),
        DeviceError::NoPreallocation(path) => Failure::new(
            Kind::Failed,
            format!("the filesystem cannot reserve space for {}", path.display()),
            "use ext4, xfs, btrfs or a block device, or take --preallocation off and keep the filesystem \
             from filling up",
        ),
        DeviceError::Os { path, source, .. } => match hint_of(path, source) {
            Some((kind, why, hint)) => {
                Failure::new(kind, format!("{}: {why}", first_part(e)), hint)
            }
            None => Failure::plain(Kind::Failed, e),
        },
        DeviceError::NoSpace { .. } => Failure::plain(Kind::NoSpace, e),
        DeviceError::OtherDevice(_) => Failure::plain(Kind::Conflict, e),
        DeviceError::Exists(_) | DeviceError::NoDirectIo(_) | DeviceError::SectorSize { .. } => {
            Failure::plain(Kind::Failed, e)
        }
    }
}

/// What was tried on which device.
fn first_part(e: &DeviceError) -> String {
    match e {
        DeviceError::Os { verb, path, .. } => format!("cannot {verb} device {}", path.display()),
        other => other.to_string(),
    }
}

/// Kind, reason and hint for what the operating system says.
fn hint_of(path: &Path, source: &std::io::Error) -> Option<(Kind, String, String)> {
    let plain = plain_io(source);
    let told = match Errno::from_io_error(source)? {
        Errno::ACCESS | Errno::PERM => return Some(denied(path, source, plain)),
        Errno::ROFS => (Kind::Denied, "make it writable, or name another device"),
        Errno::NOTDIR => (
            Kind::NotFound,
            "correct the path: a part of it is no directory",
        ),
        Errno::NXIO | Errno::NODEV | Errno::NOMEDIUM => (
            Kind::NotFound,
            "plug the disk in, or load its driver: there is nothing behind that name",
        ),
        Errno::IO => (
            Kind::Failed,
            "look at the kernel's log: the disk may be dead",
        ),
        _ => return None,
    };
    Some((told.0, plain, told.1.to_owned()))
}

fn denied(path: &Path, source: &std::io::Error, plain: String) -> (Kind, String, String) {
    let user = rustix::process::geteuid().as_raw();
    let Ok(found) = fs::metadata(path) else {
        let why =
            format!("{plain}; the daemon runs as user {user}, who may not look into its directory");
        let hint =
            "let that user search the directories above it, or run the daemon as another user";
        return (Kind::Denied, why, hint.to_owned());
    };
    let is_block = found.file_type().is_block_device();
    let (owner, group, mode) = (
        found.uid(),
        found.gid(),
        found.permissions().mode() & 0o7777,
    );
    let mut why = format!(
        "{plain}; it is user {owner}'s and group {group}'s with mode {mode:04o}, and the daemon runs as user \
         {user}"
    );
    // Whoever named the wrong disk need not give the right to open it first.
    let number = DeviceNumber::of(found.rdev());
    if let Some(place) = place_of(number).filter(|_| is_block) {
        why.push_str(&format!("; besides, the filesystem at {place} is on it"));
    }
    let hint = match (Errno::from_io_error(source), is_block) {
        // Owners and modes are answered with the other one.
        (Some(Errno::PERM), true) => {
            "the kernel denies the device whoever owns it: allow it in the daemon's container, or with \
             DeviceAllow= in its systemd unit"
        }
        (_, true) => {
            "give that user read and write access, by a udev rule for example, or add it to that group and \
             restart the daemon"
        }
        (_, false) => "give that user read and write access with chown or chmod",
    };
    (Kind::Denied, why, hint.to_owned())
}

fn wrong_kind(path: &Path) -> Failure {
    let shown = path.display();
    match path.is_dir() {
        true => Failure::invalid(
            format!("{shown} is a directory, and a device is a block device or a file"),
            format!(
                "name a file in it, like {shown}/penstock.img:100G, or the block device that is mounted there"
            ),
        ),
        false => Failure::invalid(
            format!("{shown} is neither a block device nor a regular file"),
            "name one that is",
        ),
    }
}

fn in_use(path: &Path) -> Failure {
    let (who, hint) = fs::metadata(path)
        .ok()
        .and_then(|found| user_of(&found))
        .unwrap_or_else(|| {
            (
                "by another process".to_owned(),
                "stop whatever uses it, `lsof` tells, or name another device".to_owned(),
            )
        });
    Failure::new(
        Kind::Conflict,
        format!("device {} is in use {who}", path.display()),
        hint,
    )
}

/// Who has a device that cannot be opened for itself alone, and how it is set free.
fn user_of(found: &Metadata) -> Option<(String, String)> {
    if let Some(process) = lock_holder(found) {
        if process == std::process::id() {
            return Some((
                "by this daemon, which has not closed it yet".to_owned(),
                "repeat in a moment; if it stays so, restart the daemon".to_owned(),
            ));
        }
        // A lock is the process's that took it, also when it has handed the open file to another.
        let Ok(name) = fs::read_to_string(format!("/proc/{process}/comm")) else {
            return Some((
                "by a process that was handed it, as `penstock device add` hands a daemon its disk"
                    .to_owned(),
                "look at the daemons of this host, or name another device".to_owned(),
            ));
        };
        return Some((
            format!("by process {process} ({})", name.trim()),
            "stop that process, or name another device".to_owned(),
        ));
    }
    if !found.file_type().is_block_device() {
        return None;
    }
    let number = DeviceNumber::of(found.rdev());
    if let Some(place) = place_of(number) {
        return Some((
            format!("by the filesystem mounted at {place}"),
            format!("name another device, or unmount {place} if its data are not needed"),
        ));
    }
    let swaps = fs::read_to_string("/proc/swaps").unwrap_or_default();
    let is_swap = |path: &str| {
        fs::metadata(path).is_ok_and(|swap| number.is_or_holds(DeviceNumber::of(swap.rdev())))
    };
    if let Some(path) = swaps
        .lines()
        .filter_map(|line| line.split_whitespace().next())
        .find(|path| is_swap(path))
    {
        return Some((
            format!("as swap space, {path}"),
            format!("name another device, or run `swapoff {path}`"),
        ));
    }
    let holder = number.holder()?;
    Some((
        format!("by the device {holder} that is built on it, of LVM, LUKS, RAID or multipath"),
        format!("name another device, /dev/{holder} for example, or take that apart"),
    ))
}

/// Where a filesystem on a device, or on a partition of it, is mounted.
fn place_of(number: DeviceNumber) -> Option<String> {
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    mounted(&mounts, |other| number.is_or_holds(other))
}

/// Where a filesystem is mounted whose device `is_meant`, as `/proc/self/mountinfo` tells.
fn mounted(mountinfo: &str, is_meant: impl Fn(DeviceNumber) -> bool) -> Option<String> {
    mountinfo.lines().find_map(|line| {
        // 36 35 98:0 /root /mnt rw,noatime master:1 - ext4 /dev/sdb rw
        let mut fields = line.split(' ');
        let number = DeviceNumber::parse(fields.nth(2)?)?;
        let place = fields.nth(1)?;
        // Spaces in it are written in octal.
        is_meant(number).then(|| place.replace("\\040", " "))
    })
}

/// Of a block device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct DeviceNumber {
    major: u32,
    minor: u32,
}

impl DeviceNumber {
    fn of(rdev: u64) -> Self {
        DeviceNumber {
            major: libc::major(rdev),
            minor: libc::minor(rdev),
        }
    }

    fn parse(text: &str) -> Option<Self> {
        let (major, minor) = text.trim().split_once(':')?;
        Some(DeviceNumber {
            major: major.parse().ok()?,
            minor: minor.parse().ok()?,
        })
    }

    fn dir(self) -> String {
        format!("/sys/dev/block/{}:{}", self.major, self.minor)
    }

    /// Whether `other` is this device or one of its partitions.
    fn is_or_holds(self, other: DeviceNumber) -> bool {
        let whole = || {
            let partition = fs::canonicalize(other.dir()).ok()?;
            DeviceNumber::parse(&fs::read_to_string(partition.parent()?.join("dev")).ok()?)
        };
        other == self || whole() == Some(self)
    }

    /// The name of a device that is built on it.
    fn holder(self) -> Option<String> {
        let mut holders = fs::read_dir(format!("{}/holders", self.dir())).ok()?;
        let name = holders.next()?.ok()?.file_name();
        Some(name.to_string_lossy().into_owned())
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use rustix::fs::FlockOperation;

    use super::*;

    fn told(errno: Errno, path: &Path) -> String {
        let e = DeviceError::Os {
            verb: "open",
            path: path.to_owned(),
            source: errno.into(),
        };
        failure(&e).to_string()
    }

    #[test]
    fn who_may_not_open_a_device_is_told_whose_it_is() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("disk");
        fs::write(&path, "").unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o640)).unwrap();
        let told = told(Errno::ACCESS, &path);
        let (user, group) = (rustix::process::geteuid(), rustix::process::getegid());
        let whose = format!(
            "cannot open device {}: permission denied; it is user {user}'s and group {group}'s with mode \
             0640",
            path.display()
        );
        assert!(told.starts_with(&whose), "{told}");
        assert!(told.contains("chown"), "{told}");
        let gone = self::told(Errno::ACCESS, &dir.path().join("no/disk"));
        assert!(gone.contains("search the directories above"), "{gone}");
    }

    #[test]
    fn each_reason_has_its_hint() {
        let path = PathBuf::from("/dev/sdx");
        for (errno, part) in [
            (Errno::ROFS, "make it writable"),
            (Errno::NXIO, "nothing behind that name"),
            (Errno::NOTDIR, "no directory"),
            (Errno::IO, "kernel's log"),
        ] {
            let told = told(errno, &path);
            assert!(told.contains("/dev/sdx") && told.contains(part), "{told}");
        }
        let missing = failure(&DeviceError::Missing(path)).to_string();
        assert!(
            missing.contains("/dev/sdx does not exist; name"),
            "{missing}"
        );
        let dir = failure(&DeviceError::Kind("/usr".into()));
        assert!(dir.to_string().contains("/usr is a directory"), "{dir}");
        assert_eq!(dir.exit_code(), 2);
        let null = failure(&DeviceError::Kind("/dev/null".into())).to_string();
        assert!(null.contains("neither"), "{null}");
    }

    #[test]
    fn who_has_a_device_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("disk");
        let file = fs::File::create(&path).unwrap();
        rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive).unwrap();
        let told = || failure(&DeviceError::InUse(path.clone())).to_string();
        assert!(told().contains("is in use by this daemon"), "{}", told());
        drop(file);
        let mut other = std::process::Command::new("flock")
            .args(["--no-fork", path.to_str().unwrap(), "sleep", "60"])
            .spawn()
            .unwrap();
        let name = format!("is in use by process {} (sleep)", other.id());
        let mut looks = 0..1000;
        while !told().contains(&name) {
            assert!(looks.next().is_some(), "{}", told());
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
        assert!(told().contains("stop that process"), "{}", told());
        other.kill().unwrap();
        other.wait().unwrap();
    }

    #[test]
    fn a_mounted_device_is_found_with_the_place_where_it_is_mounted() {
        let mountinfo = "22 27 0:21 / /proc rw - proc proc rw\n\
                         31 1 254:1 / / rw,relatime shared:1 - ext4 /dev/vda1 rw\n\
                         40 31 8:16 / /srv/my\\040disk rw - xfs /dev/sdb rw\n";
        let at = |major, minor| mounted(mountinfo, |other| other == DeviceNumber { major, minor });
        assert_eq!(at(254, 1).as_deref(), Some("/"));
        assert_eq!(at(8, 16).as_deref(), Some("/srv/my disk"));
        assert_eq!(at(8, 0), None);
    }
}
