//! What the daemon and the helper say to each other: one question on a connection, one answer, each a line of
//! JSON.

use std::io::{self, BufRead, BufReader, Read, Write};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::plan::{ExportPlan, FloatingAddress};

/// Longest line in bytes; a longer one ends the connection.
const LINE_BYTES_MAX: u64 = 1 << 20;

/// What the daemon asks of the helper. Each is done at once or again without harm.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Question {
    /// What this machine can do.
    Probe,
    /// What is mounted, published and set.
    Look,
    /// What a volume holds, by its first bytes. It must be a block device of this machine.
    Inspect {
        /// The volume.
        volume: String,
    },
    /// Make a file system on a volume that holds nothing.
    Format {
        /// The volume.
        volume: String,
    },
    /// Whether an address could be set here.
    CheckAddress {
        /// The address.
        address: FloatingAddress,
    },
    /// Mount an export.
    Mount {
        /// The export.
        plan: ExportPlan,
    },
    /// Have the NFS server export what is mounted. It is started, or started anew, if clients of the export
    /// have something to reclaim.
    Publish {
        /// Name of the export.
        name: String,
        /// Server scope that all NFS nodes of a cluster share: without it clients reclaim nothing.
        scope: String,
    },
    /// Take the address of an export, or keep it, for so many seconds. Then the kernel removes it.
    SetAddress {
        /// Name of the export.
        name: String,
        /// For how long.
        valid_s: u32,
    },
    /// Give the address up.
    DropAddress {
        /// Name of the export.
        name: String,
    },
    /// Have the NFS server forget an export, and what clients have open there.
    Unpublish {
        /// Name of the export.
        name: String,
    },
    /// Unmount an export.
    Unmount {
        /// Name of the export.
        name: String,
        /// The lease is gone, and I/O fails: take it out of sight if it is busy.
        fenced: bool,
    },
}

/// The answer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Answer {
    /// Done.
    Done,
    /// What this machine can do.
    Abilities(Abilities),
    /// What is there.
    State(State),
    /// What a volume holds.
    Signature(Signature),
    /// Not done.
    Failed {
        /// Why.
        error: String,
        /// What to do about it.
        hint: String,
    },
}

/// What a machine can do.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Abilities {
    /// Missing requirements of an NFS node, each with its fix.
    pub missing: Vec<String>,
    /// Names of its RDMA devices.
    pub rdma_devices: Vec<String>,
}

/// What a volume holds.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Signature {
    /// Nothing that is known.
    Empty,
    /// XFS.
    Xfs,
    /// Something else, as blkid(8) calls it.
    Other(String),
}

/// What is on a machine.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct State {
    /// Exports that are mounted, published or have their address here.
    pub exports: Vec<ExportState>,
    /// The NFS server.
    pub server: Option<ServerState>,
}

/// An export on a machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExportState {
    /// The export, as it was mounted.
    pub plan: ExportPlan,
    /// It is mounted.
    pub mounted: bool,
    /// The NFS server has it.
    pub published: bool,
    /// Its address is on an interface.
    pub has_address: bool,
    /// Bytes of the file system, and those that are free.
    pub space_bytes: Option<(u64, u64)>,
}

/// The NFS server of a machine.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServerState {
    /// Its threads.
    pub threads: u32,
    /// Where it listens, such as `tcp 2049` and `rdma 20049`.
    pub ports: Vec<String>,
    /// Clients that have state.
    pub clients: u32,
    /// Clients may reclaim, and open nothing new.
    pub in_grace: bool,
}

/// Writes a message.
pub fn write<T: Serialize>(to: &mut impl Write, message: &T) -> io::Result<()> {
    let mut line = serde_json::to_vec(message)?;
    line.push(b'\n');
    to.write_all(&line)
}

/// Reads a message; `None` if the other side said nothing.
pub fn read<T: DeserializeOwned>(from: impl Read) -> io::Result<Option<T>> {
    let mut line = Vec::new();
    BufReader::new(from.take(LINE_BYTES_MAX)).read_until(b'\n', &mut line)?;
    match line.is_empty() {
        true => Ok(None),
        false => Ok(Some(serde_json::from_slice(&line)?)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read() {
        let mut bytes = Vec::new();
        let question = Question::Unmount {
            name: "data".into(),
            fenced: true,
        };
        write(&mut bytes, &question).unwrap();
        assert_eq!(read(bytes.as_slice()).unwrap(), Some(question));
        assert_eq!(read::<Question>(&b""[..]).unwrap(), None);
    }

    #[test]
    fn what_is_no_question_is_an_error() {
        for bad in ["x\n", "{\"mount\":{}}\n", "{\"probe\":1}\n", "{"] {
            assert!(read::<Question>(bad.as_bytes()).is_err(), "{bad}");
        }
        let long = vec![b' '; 2 << 20];
        assert!(read::<Question>(long.as_slice()).is_err());
    }
}
