//! Writing a block again that one replica cannot read, with the content that another one has, under the
//! version that it has. Invariant *Verified*.
//!
//! The bad replica is asked whether it can read the block, then what it should hold there. What the good one
//! has is compared with the checksum in the bad one's map, and restored provided that nobody has written the
//! block meanwhile: its stamp stays what it is, so a repair is no change to anybody who compares replicas.
//! Two drive this: the client that a read has failed (`client::repair`), and a node whose scrubber has found
//! something ([`queue`]).

use fabric_types::block::{BLOCK_BYTES, Block, BlockStamp, Holds};
use fabric_types::checksum::crc32c;
use fabric_types::ids::ChunkKey;
use fabric_types::iov::IoVecs;
use fabric_types::{Command, Refusal};

pub mod queue;

/// Memory that a request in flight points into.
#[derive(Debug)]
struct Memory {
    block: Block,
    stamp: BlockStamp,
    iov: libc::iovec,
}

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
    chunk: ChunkKey,
    block: u32,
    step: Step,
    memory: Box<Memory>,
}

// SAFETY: the iovec points into memory that the machine owns.
unsafe impl Send for BlockRepair {}

impl BlockRepair {
    /// Nothing is asked yet.
    pub fn new(chunk: ChunkKey) -> Self {
        let memory = Memory {
            block: Block([0; BLOCK_BYTES]),
            stamp: BlockStamp::default(),
            iov: libc::iovec {
                iov_base: std::ptr::null_mut(),
                iov_len: 0,
            },
        };
        Self {
            chunk,
            block: 0,
            step: Step::Probe,
            memory: Box::new(memory),
        }
    }

    /// The chunk.
    pub fn chunk(&self) -> ChunkKey {
        self.chunk
    }

    /// Begins with a block.
    pub fn begin(&mut self, block: u32) -> (RepairPeer, Command) {
        self.block = block;
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
        let memory = &*self.memory;
        self.step = match (self.step, result) {
            (Step::Probe, Ok(())) => return Next::Over(End::Healthy),
            (Step::Probe, Err(Refusal::Corrupt | Refusal::Device(_))) => Step::Inspect,
            (Step::Inspect, Ok(())) if memory.stamp.holds() != Holds::Data => {
                return Next::Over(End::Healthy);
            }
            (Step::Inspect, Ok(())) => Step::Fetch,
            (Step::Fetch, Ok(())) if crc32c(&memory.block.0) != memory.stamp.crc => {
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
        let memory = &mut *self.memory;
        let (iov_base, iov_len) = match self.step {
            Step::Inspect => ((&raw mut memory.stamp).cast(), size_of::<BlockStamp>()),
            _ => (memory.block.0.as_mut_ptr().cast(), BLOCK_BYTES),
        };
        memory.iov = libc::iovec { iov_base, iov_len };
        let buffers = IoVecs {
            ptr: &raw const memory.iov,
            len: 1,
        };
        let (chunk, block, len) = (self.chunk, self.block, iov_len as u32);
        let command = match self.step {
            Step::Probe | Step::Fetch => Command::Read {
                chunk,
                offset: block * BLOCK_BYTES as u32,
                buffers,
                len,
            },
            Step::Inspect => Command::Inspect {
                chunk,
                block,
                buffers,
                len,
            },
            Step::Restore => Command::Restore {
                chunk,
                block,
                stamps: [memory.stamp; 2],
                buffers,
                len,
            },
        };
        let peer = match self.step {
            Step::Fetch => RepairPeer::Good,
            _ => RepairPeer::Bad,
        };
        (peer, command)
    }
}
