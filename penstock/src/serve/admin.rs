//! The admin socket.

use std::io;
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use api::failure::{Context, Failure, Kind, Result, kind_of, plain_io};
use tokio::net::UnixListener;
use vhost_backend::session::socket::{SocketError, SocketFile, SocketOptions};

use attachments::sockets::socket_failure;

/// Only the daemon's own user may administer it.
const MODE: u32 = 0o600;
/// Clients that may wait for their turn; the kernel makes further ones wait in `connect`.
const BACKLOG: i32 = 128;

/// A listening admin socket; the file goes when this is dropped, and so does the link to it.
#[derive(Debug)]
pub struct AdminSocket {
    _file: SocketFile,
    link: Option<PathBuf>,
}

/// Listens at `path`. A socket that nobody answers is what a killed daemon left, and is replaced.
///
/// `usual` is where clients look that know only the data directory: a link there leads to a socket that is
/// elsewhere.
pub fn listen(path: &Path, usual: &Path) -> Result<(UnixListener, AdminSocket)> {
    if usual.is_symlink() {
        // The data directory is ours, so the link is, too.
        std::fs::remove_file(usual).context(|| format!("remove {}", usual.display()))?;
    }
    let options = SocketOptions {
        mode: MODE,
        ..SocketOptions::new(path)
    };
    let (listener, file) = SocketFile::listen(&options, BACKLOG).map_err(failure)?;
    let listener = UnixListener::from_std(listener.into())
        .context(|| format!("listen on admin socket {}", path.display()))?;
    let mut socket = AdminSocket {
        _file: file,
        link: None,
    };
    if path != usual {
        remove_stale(usual)?;
        let target = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
        std::os::unix::fs::symlink(target, usual)
            .context(|| format!("link {} to the admin socket", usual.display()))?;
        socket.link = Some(usual.to_owned());
    }
    Ok((listener, socket))
}

/// Why the socket cannot be made.
fn failure(error: SocketError) -> Failure {
    match error {
        SocketError::NotASocket(path) => not_a_socket(&path),
        SocketError::InUse(path) => in_use(&path),
        SocketError::Os { what, path, source } => Failure::new(
            kind_of(&source),
            format!(
                "cannot {what} admin socket {}: {}",
                path.display(),
                plain_io(&source)
            ),
            "choose another data directory, or set admin_socket to a path that is short enough and can be \
             written",
        ),
        other => socket_failure(&other),
    }
}

fn not_a_socket(path: &Path) -> Failure {
    Failure::new(
        Kind::Conflict,
        format!("admin socket {} exists and is no socket", path.display()),
        "move that file away, or set admin_socket to another path",
    )
}

fn in_use(path: &Path) -> Failure {
    Failure::new(
        Kind::Conflict,
        format!("another program answers on admin socket {}", path.display()),
        "stop it, or set admin_socket to another path",
    )
}

/// Clears the usual place, which is in our own data directory, for the link.
fn remove_stale(path: &Path) -> Result<()> {
    let shown = path.display();
    let found = match std::fs::symlink_metadata(path) {
        Ok(found) => found,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(e) => return Err(e).context(|| format!("look at admin socket {shown}")),
    };
    if !found.file_type().is_socket() {
        return Err(not_a_socket(path));
    }
    if UnixStream::connect(path).is_ok() {
        return Err(in_use(path));
    }
    std::fs::remove_file(path).context(|| format!("remove the stale admin socket {shown}"))
}

impl Drop for AdminSocket {
    fn drop(&mut self) {
        // Nothing is lost if it stays: the next start replaces it.
        if let Some(link) = &self.link {
            let _ = std::fs::remove_file(link);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, symlink};
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;

    /// Sockets that are made while somebody swaps their name, enough for a few to meet the moment between
    /// `bind` and the mode.
    const SWAPPED_BINDS: usize = 5000;

    #[tokio::test]
    async fn a_link_planted_at_the_path_leads_to_no_other_file() {
        let dir = tempfile::tempdir().unwrap();
        let (path, victim) = (dir.path().join("admin.sock"), dir.path().join("victim"));
        let prepared = dir.path().join("prepared");
        std::fs::write(&victim, "").unwrap();
        let theirs = std::fs::Permissions::from_mode(0o644);
        std::fs::set_permissions(&victim, theirs).unwrap();
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !done.load(Ordering::Relaxed) {
                    let _ = symlink(&victim, &prepared);
                    while !done.load(Ordering::Relaxed) && !path.exists() {
                        std::hint::spin_loop();
                    }
                    let _ = std::fs::rename(&prepared, &path);
                }
            });
            for _ in 0..SWAPPED_BINDS {
                drop(listen(&path, &path));
                let _ = std::fs::remove_file(&path);
            }
            done.store(true, Ordering::Relaxed);
        });
        let mode = victim.metadata().unwrap().permissions().mode();
        assert_eq!(mode & 0o7777, 0o644);
    }

    #[tokio::test]
    async fn what_is_in_the_way_is_named_and_kept() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("admin.sock");
        std::fs::write(&path, "precious").unwrap();
        let told = listen(&path, &path).unwrap_err();
        assert_eq!(told.kind, Kind::Conflict);
        assert!(told.error.contains("is no socket"), "{told}");
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "precious");
        std::fs::remove_file(&path).unwrap();
        let first = listen(&path, &path).unwrap();
        let told = listen(&path, &path).unwrap_err();
        assert!(told.error.contains("another program answers"), "{told}");
        let mode = path.metadata().unwrap().permissions().mode();
        assert_eq!(mode & 0o7777, MODE);
        drop(first);
        assert!(!path.exists());
    }
}
