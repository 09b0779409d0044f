//! The process with the rights: `penstock nfs-helper`.

use std::os::fd::{FromRawFd, OwnedFd};
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use api::failure::{Context, Failure, Kind, Result};
use cli::args::NfsHelperArgs;
use nfs::client::SOCKET;
use nfs::helper::Helper;

/// The first descriptor that systemd hands over.
const LISTEN_FD: i32 = 3;
/// Who may connect, besides root, is the socket's owner alone.
const MODE: u32 = 0o600;

/// Serves daemons until it is told to stop; then it takes all exports down.
pub fn run(args: &NfsHelperArgs) -> Result<()> {
    if !rustix::process::geteuid().is_root() {
        return Err(Failure::new(
            Kind::Denied,
            "the NFS helper mounts file systems, which root alone may",
            "run it as root; the package has penstock-nfs.socket for it",
        ));
    }
    crate::serve::prepare_process();
    crate::serve::log::keep_telling();
    let listener = match (inherited(), &args.socket) {
        (Some(listener), None) => listener,
        (_, socket) => listen(socket.as_deref().unwrap_or(Path::new(SOCKET)), args.uid)?,
    };
    let helper = Arc::new(Helper::new(&args.dir));
    end_on_signal(&helper, args.socket.clone())?;
    tracing::info!("the NFS helper serves");
    helper.run(&listener).context(|| "serve daemons".into())
}

/// The socket that systemd listens on, if this process was started for it.
fn inherited() -> Option<UnixListener> {
    let number = |name: &str| std::env::var(name).ok()?.parse::<u32>().ok();
    let is_ours = number("LISTEN_PID") == Some(std::process::id());
    if !is_ours || number("LISTEN_FDS") != Some(1) {
        return None;
    }
    // SAFETY: by systemd's protocol, the descriptor is open and this process's alone.
    let fd = unsafe { OwnedFd::from_raw_fd(LISTEN_FD) };
    Some(fd.into())
}

fn listen(path: &Path, uid: u32) -> Result<UnixListener> {
    let shown = path.display();
    if std::os::unix::net::UnixStream::connect(path).is_ok() {
        return Err(Failure::new(
            Kind::Conflict,
            format!("an NFS helper answers on {shown} already"),
            "one helper serves all daemons of a machine",
        ));
    }
    // What a killed helper left.
    let _ = std::fs::remove_file(path);
    let bound = UnixListener::bind(path).context(|| format!("listen on {shown}"))?;
    // Until here the umask kept everyone else out.
    chown(path, Some(uid), None).context(|| format!("give {shown} to user {uid}"))?;
    let mode = std::fs::Permissions::from_mode(MODE);
    std::fs::set_permissions(path, mode).context(|| format!("set the mode of {shown}"))?;
    Ok(bound)
}

/// A shutdown of the machine stops the helper before the daemon: file systems must be unmounted while their
/// devices still answer.
fn end_on_signal(helper: &Arc<Helper>, socket: Option<PathBuf>) -> Result<()> {
    let helper = Arc::clone(helper);
    // SAFETY: the set is initialised before it is used, and lives on this stack. Threads inherit the mask.
    let signals = unsafe {
        let mut signals: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&raw mut signals);
        libc::sigaddset(&raw mut signals, libc::SIGTERM);
        libc::sigaddset(&raw mut signals, libc::SIGINT);
        libc::pthread_sigmask(libc::SIG_BLOCK, &raw const signals, std::ptr::null_mut());
        signals
    };
    let thread = std::thread::Builder::new().name("nfs-signals".into());
    let started = thread.spawn(move || {
        let mut signal = 0;
        // SAFETY: set and number live until the call returns.
        unsafe { libc::sigwait(&raw const signals, &raw mut signal) };
        tracing::info!(signal, "taking all exports down");
        helper.withdraw_all();
        if let Some(socket) = socket {
            let _ = std::fs::remove_file(socket);
        }
        std::process::exit(0);
    });
    started.map(drop).context(|| "start a thread".into())
}
