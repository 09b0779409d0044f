//! Who the daemon is, and what it is kept from.

use std::path::PathBuf;

use api::failure::{Failure, Result};
use serde::{Deserialize, Serialize};

use super::{File, SocketAccess};

/// Where attachment sockets may be made beside the data directory when nothing is configured.
const SOCKET_DIR_DEFAULT: &str = "/run/penstock";

/// Whether paths (Landlock) and system calls (seccomp) are limited.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Sandbox {
    /// Both, or the daemon does not start.
    On,
    /// What this kernel can do.
    BestEffort,
    /// Neither.
    Off,
}

/// The user that a daemon becomes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct User {
    /// As it was named.
    pub name: String,
    /// Its number.
    pub uid: u32,
    /// Its group.
    pub gid: u32,
    /// Further groups that it is in.
    pub groups: Vec<u32>,
}

/// Who the daemon is, and what it is kept from.
#[derive(Debug, Clone)]
pub struct Privileges {
    /// Whom it becomes; `None`: it stays who started it.
    pub user: Option<User>,
    /// Limits on paths and system calls.
    pub sandbox: Sandbox,
    /// Directories in which attachment sockets may be made under Landlock, beside the data directory.
    pub socket_dirs: Vec<PathBuf>,
}

impl Privileges {
    /// What the file says.
    pub fn resolve(file: &File) -> Result<Self> {
        let user = match (&file.user, &file.group) {
            (None, Some(_)) => {
                return Err(Failure::invalid(
                    "group is given without user",
                    "name the user that the daemon is to become, too",
                ));
            }
            (None, None) => None,
            (Some(user), group) => Some(Databases::read().user(user, group.as_deref())?),
        };
        let dirs = file.socket_dirs.clone();
        let dirs = dirs.unwrap_or_else(|| vec![PathBuf::from(SOCKET_DIR_DEFAULT)]);
        if let Some(dir) = dirs.iter().find(|dir| !dir.is_absolute()) {
            return Err(Failure::invalid(
                format!("socket_dirs: {} is not absolute", dir.display()),
                "write the whole path",
            ));
        }
        let sandbox_default = match user {
            Some(_) => Sandbox::On,
            None => Sandbox::Off,
        };
        Ok(Privileges {
            user,
            sandbox: file.sandbox.unwrap_or(sandbox_default),
            socket_dirs: dirs,
        })
    }

    /// Refuses owners of sockets that the user cannot make their owners.
    pub fn check_socket_access(&self, access: &SocketAccess) -> Result<()> {
        match &self.user {
            Some(user) => check_socket_access(user, access),
            None => Ok(()),
        }
    }
}

/// Only root gives files away.
fn check_socket_access(user: &User, access: &SocketAccess) -> Result<()> {
    let name = &user.name;
    if access.uid.is_some_and(|uid| uid != user.uid) {
        return Err(Failure::invalid(
            format!("socket_owner names another user than {name}, who cannot give sockets away"),
            format!(
                "let a group of {name}'s in instead, like socket_owner = \":GROUP\" with \
                 socket_mode = \"0660\""
            ),
        ));
    }
    let is_in = |gid| gid == user.gid || user.groups.contains(&gid);
    match access.gid {
        Some(gid) if !is_in(gid) => Err(Failure::invalid(
            format!("socket_owner names group {gid}, and user {name} is not in it"),
            format!("add {name} to that group"),
        )),
        _ => Ok(()),
    }
}

/// The local users and groups. Users that only a directory service knows are not found: the daemon starts
/// without a network.
struct Databases {
    passwd: String,
    group: String,
}

impl Databases {
    fn read() -> Self {
        let text = |path| std::fs::read_to_string(path).unwrap_or_default();
        Databases {
            passwd: text("/etc/passwd"),
            group: text("/etc/group"),
        }
    }

    /// A user by name or number, with all its groups.
    fn user(&self, name: &str, group: Option<&str>) -> Result<User> {
        let unknown = |what: &str, name: &str, file: &str| {
            Failure::invalid(
                format!("{what}: '{name}' is not in {file}"),
                format!("name a local {what}, or make one, like `useradd --system penstock`"),
            )
        };
        let found = find(&self.passwd, name);
        let (name, uid, own_gid) = match (&found, name.parse::<u32>()) {
            (Some(entry), _) => (entry.name, entry.id, entry.gid),
            (None, Ok(uid)) => (name, uid, None),
            (None, Err(_)) => return Err(unknown("user", name, "/etc/passwd")),
        };
        let gid = match group {
            None => own_gid,
            Some(group) => match (find(&self.group, group), group.parse::<u32>()) {
                (Some(entry), _) => Some(entry.id),
                (None, Ok(gid)) => Some(gid),
                (None, Err(_)) => return Err(unknown("group", group, "/etc/group")),
            },
        };
        let Some(gid) = gid else {
            return Err(Failure::invalid(
                format!("user {uid} is not in /etc/passwd and has no group"),
                "name one with --group",
            ));
        };
        if uid == 0 {
            return Err(Failure::invalid(
                "user root gives nothing up",
                "name another user, or leave --user out",
            ));
        }
        Ok(User {
            name: name.to_owned(),
            uid,
            gid,
            groups: self.groups_of(name),
        })
    }

    fn groups_of(&self, user: &str) -> Vec<u32> {
        let member = |line: &str| {
            let mut fields = line.split(':').skip(2);
            let (gid, members) = (fields.next()?, fields.next()?);
            members.split(',').find(|member| *member == user)?;
            gid.parse().ok()
        };
        self.group.lines().filter_map(member).collect()
    }
}

/// The beginning of a line of /etc/passwd or /etc/group.
struct AccountEntry<'a> {
    name: &'a str,
    id: u32,
    /// Only users have one.
    gid: Option<u32>,
}

fn find<'a>(database: &'a str, wanted: &str) -> Option<AccountEntry<'a>> {
    let entries = database.lines().filter_map(|line| {
        let mut fields = line.split(':');
        let (name, _, id) = (fields.next()?, fields.next()?, fields.next()?);
        Some(AccountEntry {
            name,
            id: id.parse().ok()?,
            gid: fields.next().and_then(|gid| gid.parse().ok()),
        })
    });
    let (mut by_name, mut by_id) = (None, None);
    for entry in entries {
        if entry.name == wanted && by_name.is_none() {
            by_name = Some(entry);
        } else if wanted.parse() == Ok(entry.id) && by_id.is_none() {
            by_id = Some(entry);
        }
    }
    by_name.or(by_id)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn databases() -> Databases {
        Databases {
            passwd: "root:x:0:0::/root:/bin/sh\nnobody:x:65534:65534::/:/bin/false\n\
                     pen:x:990:980::/:/bin/false\n"
                .to_owned(),
            group: "root:x:0:\npen:x:980:\ndisk:x:6:pen,other\nkvm:x:103:other,pen\n\
                    qemu:x:64055:other\n"
                .to_owned(),
        }
    }

    #[test]
    fn a_user_has_its_groups() {
        let pen = User {
            name: "pen".to_owned(),
            uid: 990,
            gid: 980,
            groups: vec![6, 103],
        };
        assert_eq!(databases().user("pen", None).unwrap(), pen);
        assert_eq!(databases().user("990", None).unwrap(), pen);
        assert_eq!(databases().user("pen", Some("qemu")).unwrap().gid, 64055);
        assert_eq!(databases().user("77", Some("78")).unwrap().uid, 77);
    }

    #[test]
    fn a_user_that_is_not_there_is_named() {
        let told = |user, group| databases().user(user, group).unwrap_err().to_string();
        assert!(told("nosuch", None).contains("'nosuch' is not in /etc/passwd"));
        assert!(told("pen", Some("nosuch")).contains("'nosuch' is not in /etc/group"));
        assert!(told("77", None).contains("--group"));
        assert!(told("root", None).contains("gives nothing up"));
        assert!(told("0", None).contains("gives nothing up"));
    }

    #[test]
    fn a_user_gives_no_sockets_away() {
        let pen = databases().user("pen", None).unwrap();
        let told = |uid, gid| {
            let access = SocketAccess {
                mode: 0o600,
                uid,
                gid,
            };
            check_socket_access(&pen, &access)
        };
        told(None, None).unwrap();
        told(Some(990), Some(103)).unwrap();
        assert!(
            told(Some(1), None)
                .unwrap_err()
                .error
                .contains("give sockets away")
        );
        assert!(
            told(None, Some(64055))
                .unwrap_err()
                .error
                .contains("group 64055")
        );
    }
}
