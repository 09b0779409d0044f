//! Which domain uses which socket, of a disk or a filesystem: the hook's memory between a domain's start
//! and its end.
//!
//! libvirt calls the hook at the end of a domain whose start failed, too, even if it failed because another
//! domain has the disk. Without a record of who was given which socket, that call would take the disk from
//! under the other one. A claim is a file for each socket, in a directory that is empty after a boot, as
//! attachments' guests are gone then, too.

use std::fs::{DirBuilder, OpenOptions};
use std::io::{ErrorKind, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

/// Where claims are.
pub const DIRECTORY: &str = "/run/penstock-libvirt";
/// Files that are looked at; a host runs fewer disks.
const CLAIMS_MAX: usize = 16 << 10;

/// What a socket serves.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ClaimKind {
    /// A volume, as a disk.
    Volume,
    /// A filesystem.
    Filesystem,
}

impl ClaimKind {
    /// The word.
    pub fn word(self) -> &'static str {
        match self {
            Self::Volume => "volume",
            Self::Filesystem => "filesystem",
        }
    }
}

/// A domain's claim to a socket.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Claim {
    /// Identity of the domain.
    pub uuid: String,
    /// Its name.
    pub domain: String,
    /// Name of the volume or filesystem.
    pub name: String,
    /// Which of the two.
    pub kind: ClaimKind,
    /// The socket that serves it.
    pub socket: String,
}

/// The claims of a host.
#[derive(Debug, Clone)]
pub struct Claims {
    directory: PathBuf,
}

impl Claims {
    /// Those in a directory, which need not be there yet.
    pub fn at(directory: &Path) -> Self {
        Self {
            directory: directory.to_owned(),
        }
    }

    /// Claims a socket. Returns the claim of another domain if there is one: then nothing has changed.
    pub fn take(&self, claim: &Claim) -> std::io::Result<Option<Claim>> {
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(&self.directory)?;
        let path = self.path(&claim.socket);
        let text = serde_json::to_vec(claim)?;
        // A whole file appears under the name, or none: of two domains that start at once one is first.
        let partial = self.directory.join(format!(".{}", std::process::id()));
        let mut file = OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(true)
            .mode(0o600)
            .open(&partial)?;
        file.write_all(&text)?;
        let linked = std::fs::hard_link(&partial, &path);
        std::fs::remove_file(&partial)?;
        match linked {
            Ok(()) => Ok(None),
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {
                let other = read(&path)?;
                Ok((other.uuid != claim.uuid).then_some(other))
            }
            Err(error) => Err(error),
        }
    }

    /// Gives up a claim.
    pub fn give_up(&self, claim: &Claim) -> std::io::Result<()> {
        match std::fs::remove_file(self.path(&claim.socket)) {
            Err(error) if error.kind() != ErrorKind::NotFound => Err(error),
            Ok(()) | Err(_) => Ok(()),
        }
    }

    /// The claims of a domain. A file that is not understood is nobody's.
    pub fn of(&self, uuid: &str) -> Vec<Claim> {
        let Ok(listed) = std::fs::read_dir(&self.directory) else {
            return Vec::new();
        };
        let claims = listed.take(CLAIMS_MAX).flatten();
        let claims = claims.filter_map(|file| read(&file.path()).ok());
        let mut claims: Vec<Claim> = claims.filter(|claim| claim.uuid == uuid).collect();
        claims.sort_by(|one, other| one.socket.cmp(&other.socket));
        claims
    }

    fn path(&self, socket: &str) -> PathBuf {
        // A path is a name once it has no slash; what stands for one is doubled.
        let name = socket.replace('%', "%%").replace('/', "%s");
        self.directory.join(format!("{name}.json"))
    }
}

fn read(path: &Path) -> std::io::Result<Claim> {
    Ok(serde_json::from_slice(&std::fs::read(path)?)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn claim(uuid: &str, socket: &str) -> Claim {
        Claim {
            uuid: uuid.into(),
            domain: format!("domain {uuid}"),
            name: "v".into(),
            kind: ClaimKind::Volume,
            socket: socket.into(),
        }
    }

    #[test]
    fn a_socket_is_claimed_by_one_domain() {
        let scratch = tempfile::tempdir().unwrap();
        let claims = Claims::at(&scratch.path().join("claims"));
        assert_eq!(claims.of("1"), []);
        let (one, two) = (claim("1", "/run/a"), claim("2", "/run/a"));
        assert_eq!(claims.take(&one).unwrap(), None);
        assert_eq!(claims.take(&one).unwrap(), None, "it has it already");
        assert_eq!(claims.take(&two).unwrap(), Some(one.clone()));
        let other = claim("1", "/run/%sa");
        assert_eq!(claims.take(&other).unwrap(), None);
        assert_eq!(claims.of("1"), [other.clone(), one.clone()]);
        assert_eq!(claims.of("2"), []);
        claims.give_up(&one).unwrap();
        claims.give_up(&one).unwrap();
        assert_eq!(claims.take(&two).unwrap(), None);
        assert_eq!(claims.of("2"), [two]);
        assert_eq!(claims.of("1"), [other]);
    }
}
