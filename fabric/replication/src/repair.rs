//! Writing a block again that one replica cannot read, with the content that another one has, under the
//! version that it has. Invariant *Verified*.
//!
//! The bad replica is asked whether it can read the block, then what it should hold there. What the good one
//! has is compared with the checksum in the bad one's map, and restored provided that nobody has written the
//! block meanwhile: its stamp stays what it is, so a repair is no change to anybody who compares replicas.
//! Two drive this: the client that a read has failed (`client::repair`), and a node whose scrubber has found
//! something ([`queue`]).
//!
//! A replica whose map page of the block cannot be read does not know what it should hold. That is not for
//! this machine ([`End::Unknown`]): the node itself takes the block over from others ([`queue`]).

use fabric_types::block::Holds;
use fabric_types::ids::ChunkKey;
use fabric_types::{Command, Refusal};

use crate::block_copy::{BlockCopy, Place};

pub mod queue;
mod unknown;

/// What was asked last.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    /// Whether the bad replica can read the block.
    Probe,
    /// What it should be there.
    Inspect,
    /// Its content, of the good replica.
    Fetch,
    /// To write it again.
    Restore,
}

/// Which of the two replicas is asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RepairPeer {
    /// The one that cannot read the block.
    Bad,
    /// The one that has it.
    Good,
}

/// How it ended with a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// It can be read, or holds no data.
    Healthy,
    /// The good replica has another version of it: somebody is writing it, and that repairs it.
    Differs,
    /// The bad replica does not know what it should be.
    Unknown,
    /// The good replica does not give it.
    Unfetched(Refusal),
    /// Somebody has written it meanwhile.
    Changed,
    /// It was written again.
    Restored,
    /// The bad replica does not do what it is asked.
    Failed(Refusal),
}

/// What comes after an answer.
#[derive(Debug, Clone, Copy)]
pub enum Next {
    /// Another question.
    Ask(RepairPeer, Command),
    /// Nothing: the next block may be looked at.
    Over(End),
}

/// Of a chunk, one block after another. While a command is in flight its memory is in use.
#[derive(Debug)]
pub struct BlockRepair {
    step: Step,
    /// What the bad replica should have.
    copy: BlockCopy<1, 1, 1>,
}

impl BlockRepair {
    /// Nothing is asked yet.
    pub fn new(chunk: ChunkKey) -> Self {
        Self {
            step: Step::Probe,
            copy: BlockCopy::new(Place { chunk, block: 0 }),
        }
    }

    /// The chunk.
    pub fn chunk(&self) -> ChunkKey {
        self.copy.chunk()
    }

    /// Begins with a block.
    pub fn begin(&mut self, block: u32) -> (RepairPeer, Command) {
        let chunk = self.copy.chunk();
        self.copy.go_to(Place { chunk, block });
        self.step = Step::Probe;
        self.command()
    }

    /// After a replica that could not help: another one is asked for the content.
    pub fn fetch_elsewhere(&mut self) -> (RepairPeer, Command) {
        self.step = Step::Fetch;
        self.command()
    }

    /// The answer to the command that was given out last.
    pub fn on_answer(&mut self, result: Result<(), Refusal>) -> Next {
        let stamp = self.copy.stamps()[0][0];
        self.step = match (self.step, result) {
            (Step::Probe, Ok(())) => return Next::Over(End::Healthy),
            (Step::Probe, Err(Refusal::Corrupt | Refusal::Device(_))) => Step::Inspect,
            (Step::Inspect, Ok(())) if stamp.holds() != Holds::Data => {
                return Next::Over(End::Healthy);
            }
            (Step::Inspect, Ok(())) if stamp.is_unknown() => return Next::Over(End::Unknown),
            (Step::Inspect, Ok(())) => Step::Fetch,
            (Step::Fetch, Ok(())) if !self.copy.is_as_inspected(0, 0..1) => {
                return Next::Over(End::Differs);
            }
            (Step::Fetch, Ok(())) => Step::Restore,
            (Step::Fetch, Err(refusal)) => return Next::Over(End::Unfetched(refusal)),
            (Step::Restore, Ok(())) => return Next::Over(End::Restored),
            (Step::Restore, Err(Refusal::Changed)) => return Next::Over(End::Changed),
            (_, Err(refusal)) => return Next::Over(End::Failed(refusal)),
        };
        let (peer, command) = self.command();
        Next::Ask(peer, command)
    }

    fn command(&mut self) -> (RepairPeer, Command) {
        let stamp = self.copy.stamps()[0][0];
        let command = match self.step {
            Step::Probe | Step::Fetch => self.copy.read(0..1),
            Step::Inspect => self.copy.inspect(0, 0..1),
            Step::Restore => self.copy.restore(0, [stamp; 2], Some(0)),
        };
        let peer = match self.step {
            Step::Fetch => RepairPeer::Good,
            _ => RepairPeer::Bad,
        };
        (peer, command)
    }
}
