//! What the leader has heard and keeps in memory only: for people, never for decisions about data. A new
//! leader begins without any of it and has it again within seconds.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use crate::ids::{DeviceId, NodeId, UnixMillis};
use crate::level::Level;
use crate::model::GroupId;

/// Most devices in one node's word; what is beyond is dropped. A node has far fewer.
pub const WORD_DEVICES_MAX: usize = 64;
/// Most problems in one node's word; what is beyond is dropped: the first ones keep a person busy.
pub const WORD_PROBLEMS_MAX: usize = 16;
/// Longest text of a problem in one node's word, in bytes; what is beyond is cut.
pub const WORD_TEXT_BYTES_MAX: usize = 1024;

/// How a node is, by its own word. Nodes say it every few seconds.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeReport {
    /// The devices that it serves.
    pub devices: Vec<DeviceReport>,
    /// What is wrong on it.
    pub problems: Vec<ProblemReport>,
}

/// How a device is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceReport {
    /// The device.
    pub device: DeviceId,
    /// Bytes that it can hold.
    pub capacity_bytes: u64,
    /// Bytes in use.
    pub used_bytes: u64,
    /// Whether its node has seen errors of it.
    pub is_bad: bool,
    /// Whether it refuses writes for lack of space.
    pub is_full: bool,
}

/// What is wrong on a node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProblemReport {
    /// Which sort of problem, by the word that people look it up by.
    pub code: String,
    /// What, naming the culprit.
    pub what: String,
    /// Since when, as far as the node knows.
    pub since: Option<UnixMillis>,
    /// What is being done, or what a person has to do.
    pub doing: String,
}

impl NodeReport {
    /// The word within its bounds.
    pub(crate) fn bounded(mut self) -> Self {
        self.devices.truncate(WORD_DEVICES_MAX);
        self.problems.truncate(WORD_PROBLEMS_MAX);
        for problem in &mut self.problems {
            cut(&mut problem.code);
            cut(&mut problem.what);
            cut(&mut problem.doing);
        }
        self
    }
}

fn cut(text: &mut String) {
    if let Some(end) = (0..=WORD_TEXT_BYTES_MAX)
        .rev()
        .find(|end| text.len() > WORD_TEXT_BYTES_MAX && text.is_char_boundary(*end))
    {
        text.truncate(end);
    }
}

/// What the leader has heard.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeaderReport {
    /// When each node was heard of last.
    pub heard: Vec<LastHeard>,
    /// What nodes said of themselves last.
    pub words: Vec<LastReport>,
    /// Members whose sync failed and is to be tried again.
    pub failing: Vec<FailingSync>,
    /// Feature levels that nodes know.
    pub levels: Vec<NodeLevel>,
}

/// The highest feature level that a node knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeLevel {
    /// The node.
    pub node: NodeId,
    /// The level.
    pub level: Level,
}

/// When a node was heard of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct LastHeard {
    /// The node.
    pub node: NodeId,
    /// How long ago, in milliseconds.
    pub ago_ms: u64,
}

/// What a node said.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LastReport {
    /// The node.
    pub node: NodeId,
    /// How long ago, in milliseconds.
    pub ago_ms: u64,
    /// What.
    pub word: NodeReport,
}

/// A member whose sync has failed since its device came back.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct FailingSync {
    /// The group.
    pub group: GroupId,
    /// The member.
    pub device: DeviceId,
    /// How often it failed in a row.
    pub failures: u32,
    /// When it may be tried again, in milliseconds from now.
    pub again_in_ms: u64,
}

/// How Raft stands, as far as a node knows.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RaftStatus {
    /// Who leads.
    pub leader: Option<NodeId>,
    /// The term.
    pub term: u64,
    /// Index of the last entry that this node has applied.
    pub applied_index: u64,
    /// Index of the last entry in this node's log.
    pub last_index: u64,
    /// The nodes that vote.
    pub voters: BTreeSet<NodeId>,
    /// Whether who votes is being changed: until that is done, a majority of those before is needed, too.
    pub is_changing: bool,
    /// The nodes that are sent the log and do not vote.
    pub learners: BTreeSet<NodeId>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_word_is_cut_to_its_bounds() {
        let problem = ProblemReport {
            code: "node-down".to_owned(),
            what: "ä".repeat(WORD_TEXT_BYTES_MAX),
            since: None,
            doing: "nothing".to_owned(),
        };
        let word = NodeReport {
            devices: Vec::new(),
            problems: vec![problem; WORD_PROBLEMS_MAX + 1],
        };
        let word = word.bounded();
        assert_eq!(word.problems.len(), WORD_PROBLEMS_MAX);
        assert_eq!(word.problems[0].what.len(), WORD_TEXT_BYTES_MAX);
        assert_eq!(word.problems[0].doing, "nothing");
    }
}
