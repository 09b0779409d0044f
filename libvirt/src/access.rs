//! Whether a domain's QEMU may connect to a socket: it needs the right to pass every directory on the way,
//! and the right to write to the socket.
//!
//! Owners and modes count here, not access control lists. QEMU has no capability that overrides them: libvirt
//! takes those away even from a QEMU that runs as root.

use std::fs::Metadata;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use crate::domain::Domain;
use crate::xml::Element;

/// Write for the owner; for the group it is three bits lower, for others six.
const WRITE: u32 = 0o200;
/// Pass, likewise.
const PASS: u32 = 0o100;

/// A user that QEMU runs as.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct QemuUser {
    /// Name, or number where there is none.
    pub name: String,
    /// Name of its first group, or number.
    pub group: String,
    /// Number.
    pub uid: u32,
    /// Numbers of its groups, the first one at the front.
    pub gids: Vec<u32>,
}

/// Why it may not.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Denied {
    /// There is nothing.
    #[error("{0} does not exist")]
    Missing(PathBuf),
    /// It is something else.
    #[error("{0} is not a socket")]
    NotASocket(PathBuf),
    /// A directory on the way.
    #[error("{user} may not pass {path}, which has mode {mode:04o} and belongs to {owner}")]
    Directory {
        /// The directory.
        path: PathBuf,
        /// Who may not.
        user: String,
        /// Its mode.
        mode: u32,
        /// Its user and group.
        owner: String,
    },
    /// The socket itself.
    #[error("{user} may not write to {path}, which has mode {mode:04o} and belongs to {owner}")]
    Socket {
        /// The socket.
        path: PathBuf,
        /// Who may not.
        user: String,
        /// That user's first group.
        group: String,
        /// Its mode.
        mode: u32,
        /// Its user and group.
        owner: String,
    },
    /// It cannot be looked at.
    #[error("cannot look at {0}: {1}")]
    Unknown(PathBuf, String),
}

impl QemuUser {
    /// The user that a domain's QEMU runs as: by the domain's own label, or by what the host tells
    /// (`virsh capabilities`). None if neither says, as where libvirt leaves owners alone.
    pub fn of(domain: &Domain, capabilities: &Element) -> Option<Self> {
        let label = domain.dac_label.clone();
        let label = label.or_else(|| host_label(capabilities))?;
        let (user, group) = label.split_once(':')?;
        let (users, groups) = (read("/etc/passwd"), read("/etc/group"));
        Self::named(user, group, &users, &groups)
    }

    /// By user and group as libvirt writes them: a name, or a number behind a plus.
    fn named(user: &str, group: &str, users: &str, groups: &str) -> Option<Self> {
        let uid = number_of(user, users)?;
        let gid = number_of(group, groups)?;
        let name = name_of(uid, users);
        let mut gids = vec![gid];
        if let Some(name) = &name {
            gids.extend(groups.lines().filter_map(|line| {
                let mut fields = line.split(':').skip(2);
                let (number, members) = (fields.next()?, fields.next()?);
                let is_member = members.split(',').any(|member| member == name);
                is_member.then(|| number.parse::<u32>().ok())?
            }));
        }
        Some(Self {
            name: name.unwrap_or_else(|| uid.to_string()),
            group: name_of(gid, groups).unwrap_or_else(|| gid.to_string()),
            uid,
            gids,
        })
    }

    /// Whether it may connect to the socket at a path.
    pub fn may_connect(&self, socket: &Path) -> Result<(), Denied> {
        // From the root down: what lies below a directory that is closed cannot matter.
        let ways: Vec<&Path> = socket.ancestors().skip(1).collect();
        for way in ways.into_iter().rev().filter(|way| *way != Path::new("")) {
            let found = look(way)?;
            if !self.has(PASS, &found) {
                return Err(Denied::Directory {
                    path: way.to_owned(),
                    user: self.name.clone(),
                    mode: found.mode() & 0o7777,
                    owner: owner(&found),
                });
            }
        }
        let found = look(socket)?;
        if !found.file_type().is_socket() {
            return Err(Denied::NotASocket(socket.to_owned()));
        }
        match self.has(WRITE, &found) {
            true => Ok(()),
            false => Err(Denied::Socket {
                path: socket.to_owned(),
                user: self.name.clone(),
                group: self.group.clone(),
                mode: found.mode() & 0o7777,
                owner: owner(&found),
            }),
        }
    }

    fn has(&self, right: u32, of: &Metadata) -> bool {
        let right = match () {
            () if of.uid() == self.uid => right,
            () if self.gids.contains(&of.gid()) => right >> 3,
            () => right >> 6,
        };
        of.mode() & right != 0
    }
}

fn look(path: &Path) -> Result<Metadata, Denied> {
    std::fs::metadata(path).map_err(|error| match error.kind() {
        std::io::ErrorKind::NotFound => Denied::Missing(path.to_owned()),
        _ => Denied::Unknown(path.to_owned(), error.to_string()),
    })
}

fn owner(of: &Metadata) -> String {
    let name = |id: u32, file: &str| name_of(id, &read(file)).unwrap_or_else(|| id.to_string());
    format!(
        "{}:{}",
        name(of.uid(), "/etc/passwd"),
        name(of.gid(), "/etc/group")
    )
}

/// The name of a number in a file like `/etc/passwd`.
fn name_of(id: u32, text: &str) -> Option<String> {
    text.lines().find_map(|line| {
        let mut fields = line.split(':');
        let name = fields.next()?;
        (fields.nth(1)?.parse() == Ok(id)).then(|| name.to_owned())
    })
}

fn host_label(capabilities: &Element) -> Option<String> {
    let mut models = capabilities.find(&["host"])?.children("secmodel");
    let is_dac = |model: &&Element| {
        model
            .find(&["model"])
            .is_some_and(|model| model.text == "dac")
    };
    let label = models.find(is_dac)?.find(&["baselabel"])?;
    Some(label.text.clone())
}

/// The number of a name in a file like `/etc/passwd`.
fn number_of(name: &str, text: &str) -> Option<u32> {
    if let Ok(number) = name.strip_prefix('+').unwrap_or(name).parse() {
        return Some(number);
    }
    text.lines().find_map(|line| {
        let mut fields = line.split(':');
        (fields.next()? == name).then(|| fields.nth(1)?.parse().ok())?
    })
}

fn read(path: &str) -> String {
    std::fs::read_to_string(path).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;
    use std::os::unix::net::UnixListener;

    const USERS: &str = "root:x:0:0::/root:/bin/sh\nvm:x:64055:107::/:/bin/false\n";
    const GROUPS: &str = "root:x:0:\nkvm:x:107:vm,other\ndisk:x:6:other\nvm:x:64055:vm\n";

    #[test]
    fn libvirt_labels_name_a_user_with_its_groups() {
        let expected = QemuUser {
            name: "vm".into(),
            group: "vm".into(),
            uid: 64055,
            gids: vec![64055, 107, 64055],
        };
        let named = |user, group| QemuUser::named(user, group, USERS, GROUPS);
        assert_eq!(named("+64055", "+64055"), Some(expected.clone()));
        assert_eq!(named("vm", "vm"), Some(expected));
        assert_eq!(named("nobody", "vm"), None);
        assert_eq!(named("+7", "+8").unwrap().name, "7");
        let text = "<capabilities><host><secmodel><model>apparmor</model></secmodel><secmodel>\
                    <model>dac</model><baselabel type='kvm'>+1:+2</baselabel></secmodel></host>\
                    </capabilities>";
        let label = host_label(&Element::parse(text).unwrap());
        assert_eq!(label.as_deref(), Some("+1:+2"));
    }

    #[test]
    fn who_may_connect_depends_on_every_directory_and_the_socket() {
        let scratch = tempfile::tempdir().unwrap();
        let directory = scratch.path().join("d");
        std::fs::create_dir(&directory).unwrap();
        let socket = directory.join("s");
        let _listener = UnixListener::bind(&socket).unwrap();
        let mode = |path: &Path, mode| {
            std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
        };
        mode(scratch.path(), 0o755);
        let found = std::fs::metadata(&socket).unwrap();
        let user = |uid, gid| QemuUser {
            name: "q".into(),
            group: "q".into(),
            uid,
            gids: vec![gid],
        };
        let (stranger, member, owner) = (
            user(found.uid() + 1, found.gid() + 1),
            user(found.uid() + 1, found.gid()),
            user(found.uid(), found.gid() + 1),
        );
        mode(&directory, 0o711);
        mode(&socket, 0o660);
        assert_eq!(owner.may_connect(&socket), Ok(()));
        assert_eq!(member.may_connect(&socket), Ok(()));
        let denied = stranger.may_connect(&socket).unwrap_err();
        assert!(matches!(denied, Denied::Socket { .. }), "{denied}");
        mode(&socket, 0o666);
        assert_eq!(stranger.may_connect(&socket), Ok(()));
        mode(&directory, 0o700);
        assert_eq!(owner.may_connect(&socket), Ok(()));
        let denied = stranger.may_connect(&socket).unwrap_err().to_string();
        assert!(denied.contains("mode 0700"), "{denied}");
        mode(&directory, 0o711);
        let missing = directory.join("none");
        let denied = owner.may_connect(&missing).unwrap_err();
        assert_eq!(denied, Denied::Missing(missing));
        let file = directory.join("file");
        std::fs::write(&file, "").unwrap();
        let denied = owner.may_connect(&file).unwrap_err();
        assert_eq!(denied, Denied::NotASocket(file));
    }
}
