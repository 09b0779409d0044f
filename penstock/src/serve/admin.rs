//! The admin socket.

use std::io;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use tokio::net::UnixListener;

use crate::failure::{Context, Failure, Kind, Result};

/// Only the daemon's own user may administer it.
const MODE: u32 = 0o600;

/// A listening admin socket; the file goes when this is dropped, and so does the link to it.
#[derive(Debug)]
pub struct AdminSocket {
    path: PathBuf,
    link: Option<PathBuf>,
}

/// Listens at `path`. A socket that nobody answers is what a killed daemon left, and is replaced.
///
/// `usual` is where clients look that know only the data directory: a link there leads to a socket that is elsewhere.
pub fn listen(path: &Path, usual: &Path) -> Result<(UnixListener, AdminSocket)> {
    if usual.is_symlink() {
        // The data directory is ours, so the link is, too.
        std::fs::remove_file(usual).context(|| format!("remove {}", usual.display()))?;
    }
    remove_stale(path)?;
    let listener = UnixListener::bind(path).context_mend(
        || format!("listen on admin socket {}", path.display()),
        "choose another data directory, or set admin_socket to a path that is short enough and can be written",
    )?;
    let mut socket = AdminSocket {
        path: path.into(),
        link: None,
    };
    // The process's umask has kept others out since the file appeared.
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(MODE))
        .context(|| format!("set the mode of {}", path.display()))?;
    if path != usual {
        remove_stale(usual)?;
        let target = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
        std::os::unix::fs::symlink(target, usual)
            .context(|| format!("link {} to the admin socket", usual.display()))?;
        socket.link = Some(usual.to_owned());
    }
    Ok((listener, socket))
}

fn remove_stale(path: &Path) -> Result<()> {
    let shown = path.display();
    let found = match std::fs::symlink_metadata(path) {
        Ok(found) => found,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(e) => return Err(e).context(|| format!("look at admin socket {shown}")),
    };
    if !found.file_type().is_socket() {
        return Err(Failure::new(
            Kind::Conflict,
            format!("admin socket {shown} exists and is no socket"),
            "move that file away, or set admin_socket to another path",
        ));
    }
    if UnixStream::connect(path).is_ok() {
        return Err(Failure::new(
            Kind::Conflict,
            format!("another program answers on admin socket {shown}"),
            "stop it, or set admin_socket to another path",
        ));
    }
    std::fs::remove_file(path).context(|| format!("remove the stale admin socket {shown}"))
}

impl Drop for AdminSocket {
    fn drop(&mut self) {
        // Nothing is lost if it stays: the next start replaces it.
        let _ = std::fs::remove_file(&self.path);
        if let Some(link) = &self.link {
            let _ = std::fs::remove_file(link);
        }
    }
}
