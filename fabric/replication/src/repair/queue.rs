//! The bad blocks that a node's scrubber and cleaner have found: each is written again from another replica
//! that is in sync, with no guest reading it.
//!
//! Events in: [`Repairs::on_found`], [`Repairs::on_map`], [`Repairs::on_time`] and [`Repairs::on_answer`].
//! Its actions: [`Repairs::poll`]. [`Rounds`] hands its commands on beside its own: to this node's store
//! past the replica machine with a last look at their turn, and to peers under the newest map that this node
//! knows.
//!
//! [`Rounds`]: crate::resync::rounds::Rounds

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::sync::Arc;

use fabric_types::block::LEAF_BLOCKS;
use fabric_types::ids::ChunkKey;
use fabric_types::membership::{Member, ReplicaSet};
use fabric_types::{Command, Incarnation, NodeId, PgId, Refusal, placement};

use super::unknown::{UnknownNext, UnknownRepair};
use super::{BlockRepair, End, Next, RepairPeer};
use crate::block_copy::Place;
use crate::groups::{Groups, leaf_of};
use crate::resync::BlockKey;
use crate::unresolved::{self, Unresolved};

/// Blocks that wait or are being repaired. Further ones stay reported, and the scrubber's next pass finds
/// them again.
pub const QUEUE_MAX: usize = 4096;
/// Blocks repaired at a time. One whose peer, or device, does not answer keeps its place until it does.
const JOBS_MAX: usize = 4;
/// Pause before a block is looked at once more; doubled each time up to the maximum.
const PAUSE_MIN_US: u64 = 1_000_000;
/// See [`PAUSE_MIN_US`].
const PAUSE_MAX_US: u64 = 3600 * 1_000_000;
/// How often in vain before it is told.
const TRIES_REPORTED: u32 = 5;

/// A block that one of this node's devices cannot give.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BadBlock {
    /// Index of the device.
    pub device: u32,
    /// The chunk.
    pub chunk: ChunkKey,
    /// Block within it.
    pub block: u32,
}

/// What became of one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// It was written again.
    Repaired {
        /// With what this replica has.
        from: NodeId,
    },
    /// It can be read: somebody else has written it again, or it holds nothing any more.
    Readable,
    /// Its group is not on that device any more.
    Left,
    /// No other replica has given it so far. It is tried on.
    Stuck,
}

/// What the shell is to do.
#[derive(Debug, Clone, Copy)]
pub enum RepairAction {
    /// Send a command to a peer.
    Ask(u32, (NodeId, Incarnation), PgId, Command),
    /// Have this node's store execute a command.
    Local(u32, PgId, Command),
    /// Tell what became of a block.
    Tell(BadBlock, Outcome),
}

#[derive(Debug)]
struct Entry {
    /// Its group; `None` before the first map.
    set: Option<ReplicaSet>,
    /// Other replicas from which it can be taken, while this node's is in sync itself.
    sources: Vec<Member>,
    tries: u32,
    due_us: u64,
    /// A job is at it.
    is_taken: bool,
}

impl Entry {
    fn is_ready(&self) -> bool {
        !self.is_taken && !self.sources.is_empty()
    }
}

/// What is done about a block.
#[derive(Debug)]
enum Machine {
    /// What it should be is known here.
    Known(BlockRepair),
    /// It is not.
    Unknown(UnknownRepair),
}

/// A repair under way.
#[derive(Debug)]
struct Job {
    bad: BadBlock,
    pg: PgId,
    /// Names its command in flight.
    call: u32,
    /// Those that have not been asked yet come before.
    sources: Vec<Member>,
    machine: Machine,
    /// The map says something else of its group, or the group is gone: the command in flight is the last.
    is_over: bool,
}

/// See the module.
#[derive(Debug)]
pub struct Repairs {
    me: (NodeId, Incarnation),
    groups: Arc<Groups>,
    /// What this node's replicas remember of unresolved writes.
    lanes: Arc<[Arc<Unresolved>]>,
    queue: BTreeMap<BadBlock, Entry>,
    jobs: Vec<Job>,
    next_call: u32,
    /// The last that was told.
    now_us: u64,
    actions: VecDeque<RepairAction>,
}

/// The sets of a map, by group, and how many groups each pool has.
struct Sets<'a> {
    by_group: HashMap<PgId, &'a ReplicaSet>,
    pools: HashMap<u32, u32>,
}

impl<'a> Sets<'a> {
    fn new(sets: &'a [ReplicaSet]) -> Self {
        let mut pools: HashMap<u32, u32> = HashMap::new();
        for set in sets {
            // A pool's number has fewer bits.
            *pools.entry((set.pg().0 >> 32) as u32).or_default() += 1;
        }
        Self {
            by_group: sets.iter().map(|set| (set.pg(), set)).collect(),
            pools,
        }
    }

    fn of(&self, chunk: ChunkKey) -> Option<&'a ReplicaSet> {
        let groups = self.pools.get(&placement::pool_of(chunk.layer))?;
        let pg = placement::pg_of(chunk, *groups);
        self.by_group.get(&pg).copied()
    }
}

impl Repairs {
    /// Of this start of this node, whose data threads remember unresolved writes in these lanes.
    pub fn new(
        me: (NodeId, Incarnation),
        groups: Arc<Groups>,
        lanes: Arc<[Arc<Unresolved>]>,
    ) -> Self {
        Self {
            me,
            groups,
            lanes,
            queue: BTreeMap::new(),
            jobs: Vec::new(),
            next_call: 0,
            now_us: 0,
            actions: VecDeque::new(),
        }
    }

    /// These blocks cannot be read; `sets` are the newest map.
    pub fn on_found(&mut self, found: &[BadBlock], sets: &[ReplicaSet], now_us: u64) {
        self.now_us = now_us;
        let known = (!sets.is_empty()).then(|| Sets::new(sets));
        for bad in found {
            let room = self.queue.len() < QUEUE_MAX;
            if room || self.queue.contains_key(bad) {
                self.take_in(*bad, known.as_ref());
            }
        }
        self.begin();
    }

    fn take_in(&mut self, bad: BadBlock, sets: Option<&Sets<'_>>) {
        let now_us = self.now_us;
        let is_taken = self.has_unknown(bad);
        let entry = self.queue.entry(bad).or_insert_with(|| Entry {
            set: None,
            sources: Vec::new(),
            tries: 0,
            due_us: now_us,
            is_taken,
        });
        (entry.tries, entry.due_us) = (0, now_us);
        if let Some(sets) = sets {
            self.place(bad, sets);
        }
    }

    /// The newest map, all of it.
    pub fn on_map(&mut self, sets: &[ReplicaSet], now_us: u64) {
        self.now_us = now_us;
        if self.queue.is_empty() {
            return;
        }
        let all: Vec<BadBlock> = self.queue.keys().copied().collect();
        let sets = Sets::new(sets);
        all.into_iter().for_each(|bad| self.place(bad, &sets));
        self.begin();
    }

    /// The blocks of a group that its replica here cannot give.
    pub fn known(&self, pg: PgId) -> BTreeSet<BlockKey> {
        let device = self.groups.get(pg).map(|group| group.device());
        let of_group = |entry: &Entry| entry.set.as_ref().is_some_and(|set| set.pg() == pg.base());
        let known = self.queue.iter();
        let known = known.filter(|(bad, entry)| Some(bad.device) == device && of_group(entry));
        let key = |bad: &BadBlock| (leaf_of(bad.chunk, bad.block), bad.block % LEAF_BLOCKS);
        known.map(|(bad, _)| key(bad)).collect()
    }

    /// It is later than it was.
    pub fn on_time(&mut self, now_us: u64) {
        self.now_us = now_us;
        self.begin();
    }

    /// When [`on_time`](Self::on_time) is to be called, if nothing else happens before.
    pub fn wake_at(&self) -> Option<u64> {
        let room = self.jobs.len() < JOBS_MAX;
        let ready = self.queue.values().filter(|e| room && e.is_ready());
        ready.map(|entry| entry.due_us).min()
    }

    /// Takes up what the map says of a block's group.
    fn place(&mut self, bad: BadBlock, sets: &Sets<'_>) {
        // On the device that the group is coming to it waits until that is this node's, and in sync.
        let lies_there = |pg: PgId, name: NodeId, set: &ReplicaSet| {
            let group = self.groups.get(pg);
            set.index_of(name).is_some() && group.is_some_and(|g| g.device() == bad.device)
        };
        let is_mine = |set: &ReplicaSet| lies_there(set.pg(), self.me.0, set);
        let here = |set: &&ReplicaSet| {
            is_mine(set) || lies_there(set.pg().incoming(), self.me.0.incoming(), set)
        };
        let Some(set) = sets.of(bad.chunk).filter(here) else {
            self.end(bad, Outcome::Left);
            return;
        };
        let is_mine = is_mine(set);
        let is_taken = self.has_unknown(bad);
        let Some(entry) = self.queue.get_mut(&bad) else {
            return;
        };
        if entry.set.as_ref().is_some_and(|s| s.epoch() == set.epoch()) {
            return;
        }
        let members = set.members();
        let in_sync = || set.in_sync().iter().map(|index| members[index]);
        let mine = is_mine && in_sync().any(|m| (m.node, m.incarnation) == self.me);
        let others = in_sync().filter(|member| mine && member.node != self.me.0);
        entry.sources = others.collect();
        entry.set = Some(set.clone());
        (entry.tries, entry.due_us, entry.is_taken) = (0, self.now_us, is_taken);
        let jobs = self.jobs.iter_mut().filter(|job| job.bad == bad);
        jobs.for_each(|job| job.is_over = true);
        let is_alone = members.iter().all(|member| member.node.base() == self.me.0);
        if is_mine && is_alone {
            self.actions
                .push_back(RepairAction::Tell(bad, Outcome::Stuck));
        }
    }

    /// Whether a job is taking the block over: what it has under way is not to be mistaken for another's.
    fn has_unknown(&self, bad: BadBlock) -> bool {
        let mut jobs = self.jobs.iter();
        jobs.any(|job| job.bad == bad && matches!(job.machine, Machine::Unknown(_)))
    }

    /// Begins with what has waited long enough.
    fn begin(&mut self) {
        let now_us = self.now_us;
        let due = |(bad, entry): (&BadBlock, &Entry)| {
            (entry.is_ready() && entry.due_us <= now_us).then_some(*bad)
        };
        while self.jobs.len() < JOBS_MAX {
            let Some(bad) = self.queue.iter().find_map(due) else {
                return;
            };
            let entry = self.queue.get_mut(&bad).expect("it was there just now");
            entry.is_taken = true;
            let pg = entry.set.as_ref().map_or(PgId(0), ReplicaSet::pg);
            let mut machine = BlockRepair::new(bad.chunk);
            let (peer, command) = machine.begin(bad.block);
            let job = Job {
                bad,
                pg,
                call: 0,
                sources: entry.sources.clone(),
                machine: Machine::Known(machine),
                is_over: false,
            };
            self.go_on(job, peer, command);
        }
    }

    fn go_on(&mut self, job: Job, peer: RepairPeer, command: Command) {
        match (peer, job.sources.last().copied()) {
            (RepairPeer::Bad, _) => self.local(job, command),
            (RepairPeer::Good, Some(source)) => self.ask(job, source, command),
            (RepairPeer::Good, None) => self.put_off(job.bad),
        }
    }

    fn local(&mut self, job: Job, command: Command) {
        let call = self.call(job);
        let pg = self.jobs[call.1].pg;
        let action = RepairAction::Local(call.0, pg, command);
        self.actions.push_back(action);
    }

    fn ask(&mut self, job: Job, source: Member, command: Command) {
        let call = self.call(job);
        let pg = self.jobs[call.1].pg;
        let source = (source.node, source.incarnation);
        let action = RepairAction::Ask(call.0, source, pg, command);
        self.actions.push_back(action);
    }

    /// The job has a command under way: its name, and the job's place.
    fn call(&mut self, mut job: Job) -> (u32, usize) {
        self.next_call = self.next_call.wrapping_add(1);
        job.call = self.next_call;
        self.jobs.push(job);
        (self.next_call, self.jobs.len() - 1)
    }

    /// A command has ended.
    pub fn on_answer(&mut self, call: u32, result: Result<(), Refusal>) {
        let Some(at) = self.jobs.iter().position(|job| job.call == call) else {
            return;
        };
        let mut job = self.jobs.swap_remove(at);
        match &mut job.machine {
            Machine::Known(machine) => {
                let next = machine.on_answer(result);
                self.on_known(job, next);
            }
            Machine::Unknown(machine) => {
                let next = machine.on_answer(result);
                self.on_unknown(job, next);
            }
        }
        self.begin();
    }

    fn on_known(&mut self, mut job: Job, next: Next) {
        match next {
            Next::Over(End::Restored) => {
                let from = job.sources.last().expect("it was fetched").node;
                self.end(job.bad, Outcome::Repaired { from });
            }
            _ if job.is_over => {}
            Next::Ask(peer, command) => self.go_on(job, peer, command),
            Next::Over(End::Healthy) => self.end(job.bad, Outcome::Readable),
            Next::Over(End::Differs | End::Unfetched(_)) => {
                job.sources.pop();
                if let Machine::Known(machine) = &mut job.machine {
                    let (peer, command) = machine.fetch_elsewhere();
                    self.go_on(job, peer, command);
                }
            }
            Next::Over(End::Unknown) => self.begin_unknown(job),
            Next::Over(End::Changed | End::Failed(_)) => self.put_off(job.bad),
        }
    }

    /// What this replica should have in the block is not known here: it is taken over from the others.
    fn begin_unknown(&mut self, mut job: Job) {
        let BadBlock { chunk, block, .. } = job.bad;
        let group = self.groups.get(job.pg);
        if !group.is_some_and(|group| group.watch(chunk, block)) {
            self.put_off(job.bad);
            return;
        }
        // Only now: a write that is not noted from now on is among those remembered.
        let newest = unresolved::newest(&self.lanes, chunk, block);
        let mut machine = UnknownRepair::new(Place { chunk, block }, job.sources.clone(), newest);
        let next = machine.begin();
        job.machine = Machine::Unknown(machine);
        self.on_unknown(job, next);
    }

    fn on_unknown(&mut self, job: Job, next: UnknownNext) {
        let BadBlock { chunk, block, .. } = job.bad;
        let is_over = job.is_over;
        match next {
            UnknownNext::Done(from) => self.end(job.bad, Outcome::Repaired { from }),
            UnknownNext::Ask(source, command) if !is_over => {
                return self.ask(job, source, command);
            }
            UnknownNext::Restore(told, command) if !is_over => {
                self.lanes[0].adopt_copied(chunk.layer, &told);
                return self.local(job, command);
            }
            _ if is_over => {
                // A newer map says who is asked next.
                if let Some(entry) = self.queue.get_mut(&job.bad) {
                    entry.is_taken = false;
                }
            }
            _ => self.put_off(job.bad),
        }
        if let Some(group) = self.groups.get(job.pg) {
            group.unwatch(chunk, block);
        }
    }

    fn put_off(&mut self, bad: BadBlock) {
        let Some(entry) = self.queue.get_mut(&bad) else {
            return;
        };
        let pause = PAUSE_MIN_US << entry.tries.min(12);
        entry.due_us = self.now_us + pause.min(PAUSE_MAX_US);
        entry.tries = entry.tries.saturating_add(1);
        entry.is_taken = false;
        if entry.tries == TRIES_REPORTED {
            self.actions
                .push_back(RepairAction::Tell(bad, Outcome::Stuck));
        }
    }

    fn end(&mut self, bad: BadBlock, outcome: Outcome) {
        let jobs = self.jobs.iter_mut().filter(|job| job.bad == bad);
        jobs.for_each(|job| job.is_over = true);
        if self.queue.remove(&bad).is_some() {
            self.actions.push_back(RepairAction::Tell(bad, outcome));
        }
    }

    /// Next thing to do.
    pub fn poll(&mut self, now_us: u64) -> Option<RepairAction> {
        self.now_us = now_us;
        self.actions.pop_front()
    }

    /// Whether nothing is under way. Blocks may be waiting.
    pub fn is_idle(&self) -> bool {
        self.jobs.is_empty() && self.actions.is_empty()
    }

    /// Commands whose answers are due: until they are, memory of this machine is in use.
    pub fn calls_due(&self) -> usize {
        self.jobs.len()
    }

    /// Blocks that wait or are being repaired.
    pub fn waiting(&self) -> usize {
        self.queue.len()
    }
}

#[cfg(test)]
mod tests;
