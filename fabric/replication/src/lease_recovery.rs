//! The machine that a new lease runs before its first I/O: it fences the old holder out, and makes all
//! replicas agree on the writes that the old holder may have left on some of them only. See
//! `docs/REPLICATION.md`.
//!
//! Events in: [`LeaseRecovery::on_reply`], [`LeaseRecovery::on_map`], [`LeaseRecovery::on_tick`]. Actions
//! out: [`LeaseRecovery::poll`].
//!
//! Blocks become what the in-sync replica with the newest version has. A syncing replica never decides: it
//! may hold what nobody acknowledged, from before it left. Whatever goes wrong with a replica, it is
//! reported, and with the next map everything begins anew; that is safe, since each step may be done any
//! number of times. Without a newer map it does so after a while: a replica that stays in the map, as the
//! last in-sync one does, may answer by then. [`takeover`] is the machine around this one that shells drive.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use fabric_types::block::{BLOCK_BYTES, BlockStamp, Holds, LEAF_BLOCKS};
use fabric_types::ids::{CHUNK_BYTES, ChunkKey, LayerId};
use fabric_types::iov::IoVecs;
use fabric_types::membership::{Members, ReplicaSet, ReplicaState};
use fabric_types::message::UnresolvedEntry;
use fabric_types::{Command, Epoch, Incarnation, NodeId, PgId, Refusal};

use super::groups::LeafKey;

mod list;
mod memory;
pub mod takeover;
mod winner;

use list::List;
use memory::Memory;

/// How often [`LeaseRecovery::on_tick`] is called while something waits for it.
pub const TICK: Duration = Duration::from_millis(5);
/// Ticks after which it is tried again without a newer map: 100 ms, as clients do with a replica that stays
/// in the map.
const AGAIN_TICKS: u32 = 20;
/// Blocks whose loss a takeover passes on though a device refused them with an error: one map page. With more
/// the device has not lost its data block by block, and may give them yet: the takeover asks again until it
/// does, or an operator gives the device up.
const LOST_MAX: u32 = LEAF_BLOCKS;
const BLOCKS: usize = LEAF_BLOCKS as usize;
/// Blocks of a chunk.
const CHUNK_BLOCKS: u32 = (CHUNK_BYTES / BLOCK_BYTES as u64) as u32;

/// Names a request of this machine in [`Action`] and the answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Call(pub u32);

/// What the shell is to do.
#[derive(Debug)]
pub enum Action {
    /// Send the command under the new lease. `pg` and `epoch` are those of the request; a fence concerns no
    /// group.
    Ask {
        /// Names the answer.
        call: Call,
        /// To whom. An answer of another start of that node is none.
        to: (NodeId, Incarnation),
        /// For which group.
        pg: PgId,
        /// Under which map.
        epoch: Epoch,
        /// What.
        command: Command,
    },
    /// Ask meta for a map without this replica; once per map and replica.
    ReportFailed {
        /// Group.
        pg: PgId,
        /// Replica.
        node: NodeId,
        /// Map under which it failed.
        epoch: Epoch,
    },
    /// The volume can be used.
    Done,
    /// A newer lease exists: this one is worth nothing.
    Fenced,
}

/// Which of the layer's chunks lie in which group.
pub trait PlaceOf {
    /// Index of the chunk's set among those the machine was given.
    fn set_of(&self, chunk: ChunkKey) -> usize;
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Purpose {
    Fence(NodeId),
    Inspect(usize),
    Read(usize),
    Restore(usize),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Fence,
    Blocks,
    /// For a newer map, or for so many ticks.
    AwaitMap(u32),
    /// For a moment: a replica does not know the map yet.
    AwaitTick,
    Over,
}

/// The page whose blocks are being recovered.
#[derive(Debug, Clone, Copy)]
struct Current {
    set: usize,
    leaf: LeafKey,
    /// Blocks within the page.
    first: usize,
    end: usize,
    at: usize,
    winner: usize,
    /// In-sync members that cannot read the block at `at`.
    unreadable: Members,
    /// Of one at least it is the device that says so, and no checksum.
    by_device: bool,
}

impl Current {
    /// Nothing is left to do about the block.
    fn pass(&mut self) {
        self.at += 1;
        self.begin_block();
    }

    fn begin_block(&mut self) {
        (self.unreadable, self.by_device) = (Members::NONE, false);
    }
}

/// See the module.
#[derive(Debug)]
pub struct LeaseRecovery {
    layer: LayerId,
    size_bytes: u64,
    sets: Vec<ReplicaSet>,
    /// The newest of the sets': that of the fence, so no request may be under an older one.
    epoch: Epoch,
    phase: Phase,
    lists: BTreeMap<NodeId, List>,
    /// What replicas have told, in earlier attempts, too: one that told and left since may have been the
    /// source of another, which has what it had, and does not know that it is unresolved.
    reported_pages: BTreeMap<LeafKey, (usize, usize)>,
    /// Pages to recover, with a range of blocks.
    pages: VecDeque<(LeafKey, usize, usize)>,
    current: Option<Current>,
    memory: Box<Memory>,
    calls: Vec<(Call, Purpose)>,
    next_call: u32,
    again: bool,
    reported: BTreeSet<(PgId, NodeId, Epoch)>,
    actions: VecDeque<Action>,
    recovered: u64,
    /// Of these, in all attempts: those whose loss was passed on, see [`LOST_MAX`].
    lost_by_device: u32,
}

// SAFETY: the iovecs point into memory that the machine owns.
unsafe impl Send for LeaseRecovery {}

impl LeaseRecovery {
    /// For the layer of a volume of this size, whose chunks lie in these sets.
    #[must_use]
    pub fn new(layer: LayerId, size_bytes: u64, sets: Vec<ReplicaSet>) -> Self {
        let memory = Memory::new();
        let mut machine = Self {
            layer,
            size_bytes,
            sets,
            epoch: Epoch(0),
            phase: Phase::Fence,
            lists: BTreeMap::new(),
            reported_pages: BTreeMap::new(),
            pages: VecDeque::new(),
            current: None,
            memory,
            calls: Vec::new(),
            next_call: 0,
            again: false,
            reported: BTreeSet::new(),
            actions: VecDeque::new(),
            recovered: 0,
            lost_by_device: 0,
        };
        machine.start();
        machine
    }

    /// Next thing to do.
    pub fn poll(&mut self) -> Option<Action> {
        self.actions.pop_front()
    }

    /// Whether it has ended, well or not.
    pub fn is_over(&self) -> bool {
        self.phase == Phase::Over
    }

    /// Calls whose answers are due: until they are, the machine's memory is in use.
    pub fn calls_due(&self) -> usize {
        self.calls.len()
    }

    /// The map that replicas were fenced under: requests of the new lease are to claim none that is older.
    pub fn epoch(&self) -> Epoch {
        self.epoch
    }

    /// Blocks that were made to agree.
    pub fn recovered_blocks(&self) -> u64 {
        self.recovered
    }

    /// A replica answered, or is lost ([`Refusal::Unreachable`]).
    pub fn on_reply(&mut self, call: Call, result: Result<(), Refusal>, places: &dyn PlaceOf) {
        let Some(at) = self.calls.iter().position(|(c, _)| *c == call) else {
            return;
        };
        let (_, purpose) = self.calls.swap_remove(at);
        match self.phase {
            Phase::Over => return,
            // Answers to what was asked before: with the last of them everything begins anew.
            Phase::AwaitMap(_) | Phase::AwaitTick => return,
            Phase::Fence | Phase::Blocks => {}
        }
        match result {
            Ok(()) => {}
            Err(Refusal::Changed | Refusal::Mismatch) => self.again = true,
            Err(Refusal::StaleGeneration(_)) => {
                self.phase = Phase::Over;
                self.actions.push_back(Action::Fenced);
                return;
            }
            Err(Refusal::Behind(_)) => {
                self.phase = Phase::AwaitTick;
                return;
            }
            Err(Refusal::StaleEpoch(_)) => {
                self.phase = Phase::AwaitMap(AGAIN_TICKS);
                return;
            }
            Err(refusal) => {
                if let Purpose::Read(member) = purpose
                    && refusal.is_unreadable()
                    && self.do_without(member, refusal)
                {
                    return self.recover_next(places);
                }
                self.report(purpose);
                self.phase = Phase::AwaitMap(AGAIN_TICKS);
                return;
            }
        }
        if self.calls.is_empty() {
            self.go_on(purpose, places);
        }
    }

    /// A member cannot read the block that is being recovered; false if that is not to be believed.
    fn do_without(&mut self, member: usize, refusal: Refusal) -> bool {
        let mut current = self.current();
        current.unreadable.insert(member);
        current.by_device |= refusal != Refusal::Corrupt;
        let is_lost = winner::is_lost(&current, &self.sets[current.set]);
        if is_lost && current.by_device && self.lost_by_device >= LOST_MAX {
            return false;
        }
        self.current = Some(current);
        true
    }

    /// All replicas have the block, or know that its data are lost.
    fn end_block(&mut self) {
        self.recovered += 1;
        let mut current = self.current();
        if winner::is_lost(&current, &self.sets[current.set]) {
            let block = current.leaf.leaf * LEAF_BLOCKS + current.at as u32;
            tracing::error!(
                block,
                chunk = ?self.chunk(),
                "no replica in sync can read the block: its data are lost"
            );
            self.lost_by_device += u32::from(current.by_device);
        }
        current.pass();
        self.current = Some(current);
    }

    /// Newer sets, in the same order. Everything begins anew if one of them changed.
    pub fn on_map(&mut self, sets: &[ReplicaSet]) {
        if self.is_over() {
            return;
        }
        let newer = |(new, old): (&ReplicaSet, &ReplicaSet)| new.epoch() > old.epoch();
        if sets.iter().zip(&self.sets).any(newer) {
            self.sets = sets.to_vec();
            self.phase = Phase::AwaitTick;
        }
    }

    /// Some milliseconds have passed: tries again what could not be done.
    pub fn on_tick(&mut self) {
        if !self.calls.is_empty() {
            return;
        }
        match self.phase {
            Phase::AwaitTick | Phase::AwaitMap(0) => self.start(),
            Phase::AwaitMap(ticks) => self.phase = Phase::AwaitMap(ticks - 1),
            Phase::Fence | Phase::Blocks | Phase::Over => {}
        }
    }

    /// Whether something waits for the next tick.
    pub fn needs_tick(&self) -> bool {
        let waits = matches!(self.phase, Phase::AwaitTick | Phase::AwaitMap(_));
        waits && self.calls.is_empty()
    }

    /// Fences everybody who takes writes.
    fn start(&mut self) {
        self.phase = Phase::Fence;
        self.pages.clear();
        self.current = None;
        self.again = false;
        self.gather();
        let newest = self.sets.iter().map(ReplicaSet::epoch).max();
        self.epoch = newest.unwrap_or_default();
        let nodes = self.receiving_nodes();
        if self.sets.iter().any(|set| set.in_sync().is_empty()) {
            self.phase = Phase::AwaitMap(AGAIN_TICKS);
            return;
        }
        for (node, (_, incarnation)) in nodes {
            let list = self.lists.entry(node).or_insert_with(List::new);
            let command = list.command(self.layer);
            let to = (node, incarnation);
            self.ask(Purpose::Fence(node), to, PgId(0), command);
        }
    }

    /// Nodes that take writes, and the start of each that the map knows last: in other groups it may stand
    /// with one before.
    fn receiving_nodes(&self) -> BTreeMap<NodeId, (Epoch, Incarnation)> {
        let mut nodes = BTreeMap::new();
        for set in &self.sets {
            for member in set.receiving().iter().map(|i| set.members()[i]) {
                let known = (member.since, member.incarnation);
                let newest = nodes.entry(member.node).or_insert(known);
                *newest = (*newest).max(known);
            }
        }
        nodes
    }

    /// Every answer to the last questions is there.
    fn go_on(&mut self, last: Purpose, places: &dyn PlaceOf) {
        match last {
            Purpose::Fence(_) => {
                self.gather();
                let page =
                    |(leaf, (first, end)): (&LeafKey, &(usize, usize))| (*leaf, *first, *end);
                self.pages = self.reported_pages.iter().map(page).collect();
                self.phase = Phase::Blocks;
                self.next_page(places);
            }
            Purpose::Inspect(_) => self.recover_next(places),
            Purpose::Read(_) => self.restore(),
            Purpose::Restore(_) if self.again => self.inspect(),
            Purpose::Restore(_) => {
                self.end_block();
                self.recover_next(places);
            }
        }
    }

    /// Adds the lists to the pages that are known.
    fn gather(&mut self) {
        let pages = &mut self.reported_pages;
        let layer = self.layer;
        let mut add = |chunk: u32, first: u32, end: u32| {
            for leaf in first / LEAF_BLOCKS..end.div_ceil(LEAF_BLOCKS) {
                let base = leaf * LEAF_BLOCKS;
                let from = first.max(base) - base;
                let to = end.min(base + LEAF_BLOCKS) - base;
                let page = pages.entry(LeafKey { layer, chunk, leaf });
                let range = page.or_insert((from as usize, to as usize));
                *range = (range.0.min(from as usize), range.1.max(to as usize));
            }
        };
        for list in self.lists.values() {
            for entry in list.reported() {
                if entry == UnresolvedEntry::EVERYTHING {
                    let chunks = self.size_bytes.div_ceil(CHUNK_BYTES) as u32;
                    (0..chunks).for_each(|chunk| add(chunk, 0, CHUNK_BLOCKS));
                    break;
                }
                let end = entry.block.saturating_add(entry.count).min(CHUNK_BLOCKS);
                // What a peer told is any bytes, and the last number names no chunk.
                if entry.block < end && entry.chunk != u32::MAX {
                    add(entry.chunk, entry.block, end);
                }
            }
        }
        self.lists.clear();
    }

    fn next_page(&mut self, places: &dyn PlaceOf) {
        let Some((leaf, first, end)) = self.pages.pop_front() else {
            self.phase = Phase::Over;
            self.actions.push_back(Action::Done);
            return;
        };
        let chunk = ChunkKey {
            layer: leaf.layer,
            index: leaf.chunk,
        };
        self.current = Some(Current {
            set: places.set_of(chunk),
            leaf,
            first,
            end,
            at: first,
            winner: 0,
            unreadable: Members::NONE,
            by_device: false,
        });
        self.inspect();
    }

    fn current(&self) -> Current {
        self.current.expect("a page is being recovered")
    }

    fn chunk(&self) -> ChunkKey {
        let leaf = self.current().leaf;
        ChunkKey {
            layer: leaf.layer,
            index: leaf.chunk,
        }
    }

    /// Asks everybody who takes writes what the blocks are.
    fn inspect(&mut self) {
        self.again = false;
        let current = self.current();
        if let Some(current) = &mut self.current {
            current.at = current.first;
            current.begin_block();
        }
        let blocks = current.end - current.first;
        let set = &self.sets[current.set];
        for member in set.receiving().iter() {
            let len = blocks * size_of::<BlockStamp>();
            let place = &mut self.memory.stamps[member][current.first..];
            self.memory.stamps_iovs[member] = libc::iovec {
                iov_base: place.as_mut_ptr().cast(),
                iov_len: len,
            };
            let command = Command::Inspect {
                chunk: self.chunk(),
                block: current.leaf.leaf * LEAF_BLOCKS + current.first as u32,
                buffers: IoVecs {
                    ptr: &raw const self.memory.stamps_iovs[member],
                    len: 1,
                },
                len: len as u32,
            };
            self.ask_member(Purpose::Inspect(member), member, command);
        }
    }

    /// Goes to the next block on which they do not agree.
    fn recover_next(&mut self, places: &dyn PlaceOf) {
        let current = self.current();
        let set = &self.sets[current.set];
        let Some(next) = winner::next(current, set, &self.memory.stamps) else {
            self.current = None;
            self.next_page(places);
            return;
        };
        let (at, winner) = (next.at, next.winner);
        let stamp = self.memory.stamps[winner][at];
        self.current = Some(next);
        if stamp.holds() != Holds::Data || winner::is_lost(&next, set) {
            self.restore();
            return;
        }
        self.memory.block_iov = libc::iovec {
            iov_base: self.memory.block.0.as_mut_ptr().cast(),
            iov_len: BLOCK_BYTES,
        };
        let command = Command::Read {
            chunk: self.chunk(),
            offset: (current.leaf.leaf * LEAF_BLOCKS + at as u32) * BLOCK_BYTES as u32,
            buffers: IoVecs {
                ptr: &raw const self.memory.block_iov,
                len: 1,
            },
            len: BLOCK_BYTES as u32,
        };
        self.ask_member(Purpose::Read(winner), winner, command);
    }

    /// Makes the others' block what the winner's is.
    fn restore(&mut self) {
        let current = self.current();
        let Current {
            set,
            leaf,
            at,
            winner,
            ..
        } = current;
        let stamp = self.memory.stamps[winner][at];
        let is_lost = winner::is_lost(&current, &self.sets[set]);
        let is_data = stamp.holds() == Holds::Data && !is_lost;
        for member in self.sets[set].receiving().iter() {
            let theirs = self.memory.stamps[member][at];
            // One that is being compared is told in any case, and then knows the block for one that changes
            // in its receiving period. Else, were it compared with one that has yet to get the block, it
            // would give it up for what that one has.
            let in_sync = self.sets[set].members()[member].state == ReplicaState::InSync;
            if (in_sync || is_lost) && theirs.agrees_with(&stamp) {
                continue;
            }
            let command = Command::Restore {
                chunk: self.chunk(),
                block: leaf.leaf * LEAF_BLOCKS + at as u32,
                stamps: [theirs, stamp],
                buffers: IoVecs {
                    ptr: &raw const self.memory.block_iov,
                    len: u32::from(is_data),
                },
                len: if is_data { BLOCK_BYTES as u32 } else { 0 },
            };
            self.ask_member(Purpose::Restore(member), member, command);
        }
        assert!(!self.calls.is_empty(), "somebody disagreed");
    }

    fn ask_member(&mut self, purpose: Purpose, member: usize, command: Command) {
        let set = &self.sets[self.current().set];
        let (member, pg) = (set.members()[member], set.pg());
        let to = (member.node, member.incarnation);
        self.ask(purpose, to, pg, command);
    }

    fn ask(&mut self, purpose: Purpose, to: (NodeId, Incarnation), pg: PgId, command: Command) {
        let call = Call(self.next_call);
        self.next_call = self.next_call.wrapping_add(1);
        self.calls.push((call, purpose));
        self.actions.push_back(Action::Ask {
            call,
            to,
            pg,
            epoch: self.epoch,
            command,
        });
    }

    /// Says of whom an answer is missing.
    fn report(&mut self, purpose: Purpose) {
        let failed: Vec<(PgId, NodeId, Epoch)> = match purpose {
            Purpose::Fence(node) => self
                .sets
                .iter()
                .filter(|set| {
                    set.receiving()
                        .iter()
                        .any(|m| set.members()[m].node == node)
                })
                .map(|set| (set.pg(), node, set.epoch()))
                .collect(),
            Purpose::Inspect(member) | Purpose::Read(member) | Purpose::Restore(member) => {
                let set = &self.sets[self.current().set];
                vec![(set.pg(), set.members()[member].node, set.epoch())]
            }
        };
        for (pg, node, epoch) in failed {
            if self.reported.insert((pg, node, epoch)) {
                self.actions
                    .push_back(Action::ReportFailed { pg, node, epoch });
            }
        }
    }
}
