//! Feature level of a cluster: what the programs of all its nodes understand.
//!
//! Every node applies each command with the program that it runs, and the records must be the same on all
//! nodes. So a new command, event or field of a record, and a change of what a command does, wait until no
//! node runs a program that does not know them. The cluster's record holds the level in force. A heartbeat
//! tells the leader the highest level that its node knows. Once all nodes of the map know a higher level, the
//! leader raises the cluster's ([`Command::RaiseLevel`]). From then on, programs that do not know the level
//! are refused: when they join, when they register a start, when they open their metadata, and when they
//! apply the command. Nothing lowers a level.
//!
//! Level 1 is that of the first release. **To change the state machine after a release:** add a constant for
//! the next level, make it [`Level::KNOWN`], and keep the old behaviour for clusters below it
//! (`cluster.level >= Level::NEW`). Propose a command that older programs cannot read only from that level
//! on. The same holds for what is sent to peers.
//!
//! [`Command::RaiseLevel`]: crate::Command::RaiseLevel

use std::fmt;

use serde::{Deserialize, Serialize};

/// A feature level.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Level(pub u32);

impl Level {
    /// Level of the first release.
    pub const FIRST: Self = Self(1);
    /// Highest level that this program knows.
    pub const KNOWN: Self = Self::FIRST;
}

impl fmt::Display for Level {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}
