//! Becoming another user, and what has to be there for it.

use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use api::failure::{Context, Failure, Kind, Result};
use config::{Config, User};
use rustix::fs::{Gid, Mode, OFlags, Uid};
use rustix::thread::{
    CapabilitySet, CapabilitySets, capabilities, capability_is_in_bounding_set,
    clear_ambient_capability_set, remove_capability_from_bounding_set, set_capabilities,
    set_keep_capabilities, set_no_new_privs, set_thread_groups, set_thread_res_gid,
    set_thread_res_uid,
};

/// Memory pinned for io_uring and RDMA is not counted against a limit.
const KEPT: CapabilitySet = CapabilitySet::IPC_LOCK;
/// Mode of a data directory: nobody else's business.
const DATA_MODE: u32 = 0o700;
/// Mode of what leads to it, and of directories for sockets, which have modes of their own.
const DIR_MODE: u32 = 0o755;
/// Entries of the data directory that are looked at for their owner. Of one that has more, opening tells
/// about the rest.
const ENTRIES_MAX: usize = 100_000;

/// Refuses to give anything up in one thread of several: the others would keep it.
pub fn check_alone() -> Result<()> {
    let tasks =
        fs::read_dir("/proc/self/task").context(|| "look at this process's threads".into())?;
    match tasks.count() {
        1 => Ok(()),
        n => Err(Failure::plain(
            Kind::Failed,
            format!("this process has {n} threads before it gave up its privileges; this is a bug"),
        )),
    }
}

/// Whether this process may become another user at all.
pub fn may_change() -> bool {
    rustix::process::geteuid().is_root()
}

/// As root: makes for the user what is not there yet.
pub fn prepare(config: &Config, user: &User) -> Result<()> {
    make_for(user, &config.data, DATA_MODE)?;
    for dir in &config.privileges.socket_dirs {
        make_for(user, dir, DIR_MODE)?;
    }
    Ok(())
}

/// Makes a directory that belongs to the user. One that is there stays as it is.
fn make_for(user: &User, dir: &Path, mode: u32) -> Result<()> {
    if dir.symlink_metadata().is_ok() {
        return Ok(());
    }
    let making = || format!("create directory {}", dir.display());
    if let Some(parent) = dir.parent() {
        // The umask keeps everyone out of what this process makes, and the user has to get through.
        let old = rustix::process::umask(Mode::from_raw_mode(0o022));
        let made = DirBuilder::new()
            .recursive(true)
            .mode(DIR_MODE)
            .create(parent);
        rustix::process::umask(old);
        made.context(making)?;
    }
    DirBuilder::new()
        .mode(DATA_MODE)
        .create(dir)
        .context(making)?;
    // Through a descriptor: what was just made, whatever the path leads to by now.
    let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let owned = rustix::fs::open(dir, flags, Mode::empty()).and_then(|file| {
        let (uid, gid) = (Uid::from_raw(user.uid), Gid::from_raw(user.gid));
        rustix::fs::fchown(&file, Some(uid), Some(gid))?;
        rustix::fs::fchmod(&file, Mode::from_raw_mode(mode))
    });
    owned
        .map_err(io::Error::from)
        .context(|| format!("give directory {} to user {}", dir.display(), user.name))?;
    tracing::info!(dir = %dir.display(), user = user.name, "directory made");
    Ok(())
}

/// Becomes the user for good, with IPC_LOCK as far as this process has it. Whoever is that user already
/// only gives up the rest.
pub fn become_user(user: &User) -> Result<()> {
    let now = rustix::process::getuid().as_raw();
    if !may_change() && now != user.uid {
        return Err(Failure::new(
            Kind::Denied,
            format!(
                "user {now}, who started this daemon, cannot become user {}",
                user.name
            ),
            format!("start it as root, or as {}", user.name),
        ));
    }
    let failed = |e: rustix::io::Errno| {
        let error = format!("cannot become user {}: {}", user.name, io::Error::from(e));
        Failure::new(
            Kind::Denied,
            error,
            "start the daemon with the capabilities SETUID, SETGID and SETPCAP",
        )
    };
    if may_change() {
        change(user).map_err(failed)?;
    }
    give_up_rest().map_err(failed)?;
    check(user)
}

/// Root becomes the owner of `dir` for good, if that is there and belongs to somebody else: what is written
/// there is then that user's, and leads nowhere where that user could not write.
pub fn become_owner(dir: &Path) -> Result<()> {
    let Ok(found) = fs::metadata(dir) else {
        return Ok(());
    };
    if !may_change() || found.uid() == 0 {
        return Ok(());
    }
    check_alone()?;
    become_user(&User {
        name: found.uid().to_string(),
        uid: found.uid(),
        gid: found.gid(),
        groups: Vec::new(),
    })
}

fn change(user: &User) -> rustix::io::Result<()> {
    // The bounding set first: later the right to shrink it is gone.
    for capability in CapabilitySet::all() {
        if capability_is_in_bounding_set(capability).unwrap_or(false) {
            remove_capability_from_bounding_set(capability)?;
        }
    }
    let (uid, gid) = (Uid::from_raw(user.uid), Gid::from_raw(user.gid));
    let groups: Vec<Gid> = user.groups.iter().map(|gid| Gid::from_raw(*gid)).collect();
    set_thread_groups(&groups)?;
    set_thread_res_gid(gid, gid, gid)?;
    // Otherwise the change of user takes IPC_LOCK, too.
    set_keep_capabilities(true)?;
    set_thread_res_uid(uid, uid, uid)?;
    set_keep_capabilities(false)
}

fn give_up_rest() -> rustix::io::Result<()> {
    clear_ambient_capability_set()?;
    let kept = capabilities(None)?.permitted & KEPT;
    set_capabilities(
        None,
        CapabilitySets {
            effective: kept,
            permitted: kept,
            inheritable: CapabilitySet::empty(),
        },
    )?;
    set_no_new_privs(true)
}

/// Trusts no return code: what was given up must be gone, and must not come back.
fn check(user: &User) -> Result<()> {
    let left = capabilities(None)
        .map_err(io::Error::from)
        .context(|| "look at this process's capabilities".into())?;
    let uid = Uid::from_raw(user.uid);
    let is_gone = (left.permitted | left.effective | left.inheritable) & !KEPT
        == CapabilitySet::empty()
        && rustix::process::getuid() == uid
        && rustix::process::geteuid() == uid
        && rustix::process::getegid().as_raw() == user.gid
        && set_thread_res_uid(Uid::ROOT, Uid::ROOT, Uid::ROOT).is_err();
    match is_gone {
        true => Ok(()),
        false => Err(Failure::plain(
            Kind::Failed,
            format!(
                "this process did not become user {} for good; this is a bug",
                user.name
            ),
        )),
    }
}

/// As the user: refuses a data directory that it cannot use, before anything fails half-way.
pub fn check_data(data: &Path, user: &User) -> Result<()> {
    let (name, shown) = (&user.name, data.display());
    let hint = |other: &Path, owner: u32| {
        Failure::new(
            Kind::Denied,
            format!(
                "{} belongs to user {owner}, and the daemon is to be user {name}",
                other.display()
            ),
            format!(
                "run `chown -R {}:{} {shown}` once, if that directory is this daemon's alone",
                user.uid, user.gid
            ),
        )
    };
    let unreachable = |e: &io::Error| {
        Failure::new(
            Kind::Denied,
            format!(
                "user {name} cannot reach data directory {shown}: {}",
                api::failure::plain_io(e)
            ),
            format!(
                "let {name} search the directories above it (chmod o+x), or choose another one \
                 with --data DIR"
            ),
        )
    };
    let found = match fs::metadata(data) {
        Ok(found) => found,
        Err(e) if e.kind() == io::ErrorKind::NotFound && !may_change() => return Ok(()),
        Err(e) => return Err(unreachable(&e)),
    };
    if found.uid() != user.uid {
        return Err(hint(data, found.uid()));
    }
    match foreign(data, user.uid) {
        Ok(None) => Ok(()),
        Ok(Some((path, owner))) => Err(hint(&path, owner)),
        Err(e) => Err(unreachable(&e)),
    }
}

/// Something below a directory that belongs to somebody else.
fn foreign(dir: &Path, uid: u32) -> io::Result<Option<(PathBuf, u32)>> {
    let (mut dirs, mut seen) = (vec![dir.to_owned()], 0);
    while let Some(dir) = dirs.pop() {
        for entry in fs::read_dir(&dir)? {
            let entry = entry?;
            // Of a link itself, not of what it leads to.
            let found = entry.metadata()?;
            if found.uid() != uid {
                return Ok(Some((entry.path(), found.uid())));
            }
            if found.is_dir() {
                dirs.push(entry.path());
            }
            seen += 1;
            if seen >= ENTRIES_MAX {
                return Ok(None);
            }
        }
    }
    Ok(None)
}
