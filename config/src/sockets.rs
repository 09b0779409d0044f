//! Mode and owner of attachment sockets.

use api::failure::{Failure, Result};

/// Mode of attachment sockets when nothing is configured.
const SOCKET_MODE_DEFAULT: u32 = 0o600;

/// Owner and mode given to attachment sockets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SocketAccess {
    /// Permission bits.
    pub mode: u32,
    /// User id, `None` to leave it.
    pub uid: Option<u32>,
    /// Group id, `None` to leave it.
    pub gid: Option<u32>,
}

impl SocketAccess {
    /// The owner as the configuration has it, by numbers; none if nobody is named.
    pub(super) fn owner(&self) -> Option<String> {
        match (self.uid, self.gid) {
            (None, None) => None,
            (Some(uid), None) => Some(uid.to_string()),
            (uid, Some(gid)) => {
                let uid = uid.map(|uid| uid.to_string()).unwrap_or_default();
                Some(format!("{uid}:{gid}"))
            }
        }
    }
}

/// Parses the mode and owner of attachment sockets.
pub(super) fn socket_access(mode: Option<&str>, owner: Option<&str>) -> Result<SocketAccess> {
    let mode = match mode {
        None => SOCKET_MODE_DEFAULT,
        Some(text) => u32::from_str_radix(text, 8)
            .ok()
            .filter(|m| *m <= 0o777)
            .ok_or_else(|| {
                Failure::invalid(
                    format!("socket_mode '{text}' is not a mode"),
                    "write it in octal, like \"0660\"",
                )
            })?,
    };
    let (user, group) = match owner {
        None => (None, None),
        Some(text) => match text.split_once(':') {
            Some((user, group)) => (Some(user), Some(group)),
            None => (Some(text), None),
        },
    };
    let lookup = |name: Option<&str>, file: &str| match name {
        None | Some("") => Ok(None),
        Some(name) => id_of(name, file).map(Some),
    };
    Ok(SocketAccess {
        mode,
        uid: lookup(user, "/etc/passwd")?,
        gid: lookup(group, "/etc/group")?,
    })
}

/// Numeric id of a local user or group; a number stands for itself.
fn id_of(name: &str, file: &str) -> Result<u32> {
    if let Ok(id) = name.parse() {
        return Ok(id);
    }
    let text = std::fs::read_to_string(file).unwrap_or_default();
    let id = text.lines().find_map(|line| {
        let mut fields = line.split(':');
        (fields.next() == Some(name))
            .then(|| fields.nth(1))?
            .and_then(|id| id.parse().ok())
    });
    id.ok_or_else(|| {
        Failure::invalid(
            format!("socket_owner: '{name}' is not in {file}"),
            "name a local user or group, or its number",
        )
    })
}
