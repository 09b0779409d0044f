//! What a node knows of the placement groups that its devices are members of: which requests it may take.
//!
//! A replica acts only under maps that it knows: a request made under a newer one is put off
//! ([`Refusal::Behind`]), so that a replica that is to be compared notes every write that it is sent from the
//! first one on. See `docs/REPLICATION.md`.

mod cache;
mod fan_out;
mod watch;

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, RwLock};

pub use self::cache::GroupCache;
pub use self::fan_out::FAN_OUT_DEVICES_MAX;
use self::watch::Watch;
use fabric_types::block::{BLOCK_BYTES, LEAF_BLOCKS};
use fabric_types::ids::{CHUNK_BYTES, ChunkKey, LayerId};
use fabric_types::membership::{Member, ReplicaState};
use fabric_types::{Command, Epoch, Incarnation, PgId, Refusal, Request, placement};

/// Words of a page's bitmap.
const WORDS: usize = LEAF_BLOCKS as usize / 64;

/// A map page of a chunk, the unit of comparison.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct LeafKey {
    /// Layer.
    pub layer: LayerId,
    /// Chunk index.
    pub chunk: u32,
    /// Page of the chunk.
    pub leaf: u32,
}

impl LeafKey {
    /// The chunk.
    pub fn chunk_key(self) -> ChunkKey {
        ChunkKey {
            layer: self.layer,
            index: self.chunk,
        }
    }
}

/// What happened to the blocks of a page since this replica began to be sent every write: bit `i % 64` of
/// word `i / 64`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Touched {
    /// A write was admitted. It may wait, be under way, have failed, or be done.
    pub noted: [u64; WORDS],
    /// A write of the whole block is done: what was there before does not matter any more.
    pub stored: [u64; WORDS],
}

impl Touched {
    /// Nothing happened.
    pub const NOTHING: Self = Self {
        noted: [0; WORDS],
        stored: [0; WORDS],
    };

    /// Whether a write of block `i` was admitted.
    #[inline]
    pub fn is_noted(&self, i: usize) -> bool {
        self.noted[i / 64] & 1 << (i % 64) != 0
    }

    /// Whether block `i` was written as a whole.
    #[inline]
    pub fn is_stored(&self, i: usize) -> bool {
        self.stored[i / 64] & 1 << (i % 64) != 0
    }
}

/// Pages of a chunk.
const LEAVES: u32 = (CHUNK_BYTES / BLOCK_BYTES as u64) as u32 / LEAF_BLOCKS;

/// Pages that partial writes wait for, at most; beyond, a write is put off without its page being asked for,
/// and asks again.
const WANTED_MAX: usize = 1024;

/// The receiving period of a syncing replica: what was written, and what has been compared.
#[derive(Debug, Default)]
struct ResyncTracker {
    touched: BTreeMap<LeafKey, Touched>,
    /// Pages that hold what the source holds, a bit for each of a chunk.
    compared: HashMap<ChunkKey, u8>,
    /// All pages do.
    all_compared: bool,
    /// Pages that writes wait for.
    wanted: VecDeque<LeafKey>,
    /// Layers of which this replica knows who may write them: a lease may have been given to another while it
    /// was away.
    fenced: HashSet<LayerId>,
    /// Layers whose writes wait for that.
    to_fence: VecDeque<LayerId>,
}

const _: () = assert!(LEAVES <= u8::BITS);

/// Blocks of a chunk that a command changes.
#[derive(Debug, Clone, Copy)]
struct Extent {
    chunk: ChunkKey,
    /// Those touched.
    first: u32,
    end: u32,
    /// Those covered as a whole; none if it is empty.
    whole: (u32, u32),
}

impl Extent {
    fn of(command: &Command) -> Option<Self> {
        let block = BLOCK_BYTES as u32;
        let (chunk, offset, len) = match *command {
            Command::Write {
                chunk, offset, len, ..
            }
            | Command::Zero {
                chunk, offset, len, ..
            } => (chunk, offset, len),
            Command::Restore {
                chunk, block: at, ..
            } => (chunk, at.saturating_mul(block), block),
            _ => return None,
        };
        let end = offset.saturating_add(len);
        Some(Self {
            chunk,
            first: offset / block,
            end: end.div_ceil(block),
            whole: (offset.div_ceil(block), end / block),
        })
    }

    /// Blocks that are written in part: they keep some of what they were.
    fn partial(&self) -> impl Iterator<Item = u32> {
        let (first, end) = self.whole;
        [self.first, self.end.saturating_sub(1)]
            .into_iter()
            .filter(move |block| !(first..end).contains(block))
    }
}

/// The page of a chunk that a block lies in.
pub fn leaf_of(chunk: ChunkKey, block: u32) -> LeafKey {
    LeafKey {
        layer: chunk.layer,
        chunk: chunk.index,
        leaf: block / LEAF_BLOCKS,
    }
}

impl ResyncTracker {
    fn mark(
        &mut self,
        chunk: ChunkKey,
        blocks: std::ops::Range<u32>,
        bits: fn(&mut Touched) -> &mut [u64; WORDS],
    ) {
        for block in blocks {
            let bit = block % LEAF_BLOCKS;
            let touched = self.touched.entry(leaf_of(chunk, block)).or_default();
            bits(touched)[bit as usize / 64] |= 1 << (bit % 64);
        }
    }

    fn is_compared(&self, leaf: LeafKey) -> bool {
        let mask = self.compared.get(&leaf.chunk_key());
        self.all_compared || mask.is_some_and(|mask| mask & 1 << leaf.leaf != 0)
    }

    /// Whether it is not known yet who may write the layer. If so, it is to be asked.
    fn is_unfenced(&mut self, layer: LayerId) -> bool {
        if self.fenced.contains(&layer) {
            return false;
        }
        if self.to_fence.len() < WANTED_MAX && !self.to_fence.contains(&layer) {
            self.to_fence.push_back(layer);
        }
        true
    }

    /// Whether a write would complete a block from what may be out of date. If so, its page is wanted.
    fn must_wait(&mut self, extent: &Extent) -> bool {
        let mut waits = false;
        for block in extent.partial() {
            let leaf = leaf_of(extent.chunk, block);
            if leaf.leaf >= LEAVES || self.is_compared(leaf) {
                continue;
            }
            waits = true;
            if self.wanted.len() < WANTED_MAX && !self.wanted.contains(&leaf) {
                self.wanted.push_back(leaf);
            }
        }
        waits
    }
}

const OUT: u8 = 0;
const SYNCING: u8 = 1;
const IN_SYNC: u8 = 2;

/// One group.
#[derive(Debug)]
pub struct Group {
    state: AtomicU8,
    /// Epoch at which it became what it is.
    since: AtomicU64,
    /// Oldest map whose requests are taken.
    fence: AtomicU64,
    tracker: Mutex<ResyncTracker>,
    /// Which of the node's devices holds it.
    device: AtomicU32,
    /// How many groups its pool has.
    of_groups: AtomicU32,
    /// Epoch of its last change.
    changed: AtomicU64,
    watch: Watch,
}

impl Group {
    fn state(&self) -> ReplicaState {
        match self.state.load(Ordering::Acquire) {
            SYNCING => ReplicaState::Syncing,
            IN_SYNC => ReplicaState::InSync,
            _ => ReplicaState::Out,
        }
    }

    /// Index of the node's device that holds it.
    #[inline]
    pub fn device(&self) -> u32 {
        self.device.load(Ordering::Acquire)
    }

    /// How many groups its pool has.
    pub fn of_groups(&self) -> u32 {
        self.of_groups.load(Ordering::Acquire)
    }

    /// Whether a request made under a map that the node knows may be executed.
    fn admit(&self, request: &Request, known: Epoch) -> Result<(), Refusal> {
        let fence = Epoch(self.fence.load(Ordering::Acquire));
        if request.epoch < fence {
            return Err(Refusal::StaleEpoch(fence));
        }
        let since = Epoch(self.since.load(Ordering::Acquire));
        let may = match request.command {
            // Invariant *No trust on return*: nothing is read from a replica that has not been compared.
            Command::Read { .. } | Command::ListChunks { .. } | Command::Join => {
                self.state() == ReplicaState::InSync
            }
            _ => self.state() != ReplicaState::Out,
        };
        if !may {
            return Err(Refusal::StaleEpoch(since));
        }
        match self.state() {
            ReplicaState::Syncing if self.must_wait(&request.command) => {
                Err(Refusal::Behind(known))
            }
            _ => Ok(()),
        }
    }

    /// Whether the command writes a part of a block that has not been compared yet. The rest of the block
    /// would be what this replica happens to hold, under the version of the write, and nobody would see that
    /// it is out of date.
    ///
    /// Or whether it writes a layer of which it is not known who may: the source refuses an older lease's
    /// writes, and what only this replica took would stay here.
    fn must_wait(&self, command: &Command) -> bool {
        if !matches!(command, Command::Write { .. } | Command::Zero { .. }) {
            return false;
        }
        let Some(extent) = Extent::of(command) else {
            return false;
        };
        let mut tracker = self.tracker();
        tracker.is_unfenced(extent.chunk.layer) || tracker.must_wait(&extent)
    }

    fn tracker(&self) -> MutexGuard<'_, ResyncTracker> {
        self.tracker.lock().expect("no panic under this lock")
    }

    /// Notes what a write that was admitted is about to change; its receiving period, if this replica is
    /// syncing.
    fn note(&self, request: &Request) -> Option<Epoch> {
        if self.state() != ReplicaState::Syncing {
            self.note_watched(request);
            return None;
        }
        let extent = Extent::of(&request.command)?;
        let mut tracker = self.tracker();
        let since = Epoch(self.since.load(Ordering::Acquire));
        if request.epoch < since {
            // A new receiving period began since it was admitted: it will be refused when its turn comes.
            return None;
        }
        tracker.mark(extent.chunk, extent.first..extent.end, |t| &mut t.noted);
        Some(since)
    }

    /// A write that was noted in the receiving period `since` is done.
    fn stored(&self, command: &Command, since: Epoch) {
        let Some(extent) = Extent::of(command) else {
            return;
        };
        let mut tracker = self.tracker();
        // Under the lock: a new receiving period clears what is marked before it says that it began, and a
        // promotion what nobody asks for any more.
        let syncing = self.state() == ReplicaState::Syncing;
        if syncing && since.0 == self.since.load(Ordering::Acquire) {
            let (first, end) = extent.whole;
            tracker.mark(extent.chunk, first..end, |t| &mut t.stored);
        }
    }

    /// What happened to the blocks of a page in this receiving period.
    pub fn touched(&self, leaf: LeafKey) -> Touched {
        let tracker = self.tracker();
        tracker.touched.get(&leaf).copied().unwrap_or_default()
    }

    /// The page holds what the source holds: writes of a part of a block may come.
    pub fn compared(&self, leaf: LeafKey) {
        let mut tracker = self.tracker();
        *tracker.compared.entry(leaf.chunk_key()).or_default() |= 1 << leaf.leaf;
        tracker.wanted.retain(|wanted| *wanted != leaf);
    }

    /// Entries that are kept for a comparison: none unless this replica is syncing.
    pub fn kept(&self) -> usize {
        let tracker = self.tracker();
        let pages = tracker.touched.len() + tracker.compared.len() + tracker.wanted.len();
        pages + tracker.fenced.len() + tracker.to_fence.len()
    }

    /// Every page does.
    pub fn all_compared(&self) {
        let mut tracker = self.tracker();
        tracker.all_compared = true;
        tracker.wanted.clear();
    }

    fn is_all_compared(&self) -> bool {
        self.tracker().all_compared
    }

    /// It is known who may write the layer: older leases' writes are refused here as at the source.
    pub fn fenced(&self, layer: LayerId) {
        self.tracker().fenced.insert(layer);
    }

    /// A layer whose writes wait for that. It is handed out once, until another write asks.
    pub fn take_to_fence(&self) -> Option<LayerId> {
        self.tracker().to_fence.pop_front()
    }

    /// A page that a write waits for. It is handed out once, until another write asks.
    pub fn take_wanted(&self) -> Option<LeafKey> {
        self.tracker().wanted.pop_front()
    }
}

/// The groups of a node, shared by its data threads. A node without any takes every request: it is alone.
#[derive(Debug, Default)]
pub struct Groups {
    /// Newest map applied.
    known: AtomicU64,
    groups: RwLock<HashMap<PgId, Arc<Group>>>,
    /// How often a group was put into the table or taken out: what [`GroupCache`]s hold is out of date then.
    changes: AtomicU64,
    /// On which of the node's devices, a bit for each, groups are sent writes by the newest map applied.
    receiving: AtomicU64,
    /// By pool: the newest map for which a replica has joined one of its groups.
    joined: Mutex<HashMap<u32, Epoch>>,
}

impl Groups {
    fn make(&self, pg: PgId) -> Arc<Group> {
        let mut groups = self.groups.write().expect("no panic under this lock");
        let group = groups.entry(pg).or_insert_with(|| {
            self.changed();
            Arc::new(Group {
                state: AtomicU8::new(OUT),
                since: AtomicU64::new(0),
                fence: AtomicU64::new(0),
                tracker: Mutex::default(),
                device: AtomicU32::new(0),
                of_groups: AtomicU32::new(1),
                changed: AtomicU64::new(0),
                watch: Watch::default(),
            })
        });
        Arc::clone(group)
    }

    /// This node's replica of the group lies on its device of this index, and the pool has so many groups; by
    /// the map in which the group has changed last.
    pub fn place(&self, pg: PgId, device: u32, of_groups: u32, changed: Epoch) {
        self.arrive(pg, device, changed);
        let group = self.make(pg);
        group.device.store(device, Ordering::Release);
        group.of_groups.store(of_groups, Ordering::Release);
        if group.changed.fetch_max(changed.0, Ordering::AcqRel) < changed.0 {
            group.watch.clear();
        }
    }

    /// If the group has come to the device that it was [coming to](fabric_types::incoming), that replica is
    /// this node's from now on, with all that is known of it. Requests of maps before that change were meant
    /// for the old one: they are refused.
    fn arrive(&self, pg: PgId, device: u32, changed: Epoch) {
        let mut groups = self.groups.write().expect("no panic under this lock");
        let lies_there = |group: &Arc<Group>| group.device() == device;
        let has_come = !groups.get(&pg).is_some_and(lies_there)
            && groups.get(&pg.incoming()).is_some_and(lies_there);
        if !has_come {
            return;
        }
        let Some(new) = groups.remove(&pg.incoming()) else {
            return;
        };
        new.fence.fetch_max(changed.0, Ordering::AcqRel);
        if let Some(old) = groups.get(&pg) {
            // A replica that has joined the old one counts on it.
            let fence = old.fence.load(Ordering::Acquire);
            new.fence.fetch_max(fence, Ordering::AcqRel);
        }
        groups.insert(pg, new);
        self.changed();
    }

    /// The table is another. To be called under its lock: whoever sees the new number finds the new table.
    fn changed(&self) {
        self.changes.fetch_add(1, Ordering::AcqRel);
    }

    /// The map of `epoch` says so of this node's replica of the group. To be called for every group that
    /// changed, before [`applied`](Self::applied).
    pub fn set(&self, pg: PgId, state: ReplicaState, since: Epoch) {
        let group = self.make(pg);
        if since.0 < group.since.load(Ordering::Acquire) {
            return;
        }
        let new_round = since.0 > group.since.load(Ordering::Acquire);
        let code = match state {
            ReplicaState::Out => OUT,
            ReplicaState::Syncing => SYNCING,
            ReplicaState::InSync => IN_SYNC,
        };
        if new_round || group.state() != state {
            group.watch.clear();
        }
        let mut tracker = group.tracker();
        if state != ReplicaState::InSync && new_round {
            // Under older maps it may have been sent writes that nobody else has.
            group.fence.fetch_max(since.0, Ordering::AcqRel);
            *tracker = ResyncTracker::default();
        }
        group.since.store(since.0, Ordering::Release);
        group.state.store(code, Ordering::Release);
        if state != ReplicaState::Syncing {
            *tracker = ResyncTracker::default();
        }
    }

    /// The same by what the map says of the node, whose process is the start `running`.
    pub fn set_member(&self, pg: PgId, member: &Member, running: Incarnation) {
        // Invariant *No trust on return*: what the map says of an earlier process does not hold for this one.
        let state = match member.incarnation == running {
            true => member.state,
            false => ReplicaState::Out,
        };
        self.set(pg, state, member.since);
    }

    /// This node is no member of the group any more.
    pub fn forget(&self, pg: PgId) {
        let mut groups = self.groups.write().expect("no panic under this lock");
        groups.remove(&pg);
        self.changed();
    }

    /// These are the groups that this node is a member of, and no others.
    pub fn keep(&self, pgs: &[PgId]) {
        let pgs: HashSet<PgId> = pgs.iter().copied().collect();
        let mut groups = self.groups.write().expect("no panic under this lock");
        let before = groups.len();
        groups.retain(|pg, _| pgs.contains(pg));
        if groups.len() != before {
            self.changed();
        }
    }

    /// All of the map of `epoch` has been told.
    pub fn applied(&self, epoch: Epoch) {
        // Before requests of that map are taken.
        self.note_receiving();
        self.known.fetch_max(epoch.0, Ordering::AcqRel);
    }

    /// Newest map applied.
    pub fn known(&self) -> Epoch {
        Epoch(self.known.load(Ordering::Acquire))
    }

    /// A group, if the node is a member.
    pub fn get(&self, pg: PgId) -> Option<Arc<Group>> {
        let groups = self.groups.read().expect("no panic under this lock");
        groups.get(&pg).cloned()
    }

    /// Whether a request may be executed.
    ///
    /// Invariant *One writer*, the map's part of it: a request made under a map older than the group's fence
    /// is refused.
    pub fn admit(&self, request: &Request) -> Result<(), Refusal> {
        let Some(known) = self.admit_map(request)? else {
            return Ok(());
        };
        match self.get(request.pg) {
            Some(group) => group.admit(request, known),
            None => Err(Refusal::StaleEpoch(known)),
        }
    }

    /// What of that does not concern the group: the newest map applied, if the group is to be asked, too.
    fn admit_map(&self, request: &Request) -> Result<Option<Epoch>, Refusal> {
        // Applies to fences too: a fence raises the layer's epoch, and an epoch that no map reaches would
        // block it.
        let known = self.known();
        if request.epoch > known {
            return Err(Refusal::Behind(known));
        }
        // Fences are about a layer, not a group. One that comes of a map in which a replica that has joined
        // is not told of yet is refused: whoever takes over has to fence that one, too.
        if let Command::Fence { layer, .. } = request.command {
            let joined = self.joined_in(placement::pool_of(layer));
            return match request.epoch < joined {
                true => Err(Refusal::StaleEpoch(joined)),
                false => Ok(None),
            };
        }
        Ok(Some(known))
    }

    /// Notes a write that was admitted, before the store gets it. `Some` if [`stored`](Self::stored) is to be
    /// told when it is done, and that it belongs to this receiving period.
    pub fn note(&self, request: &Request) -> Option<Epoch> {
        self.get(request.pg)?.note(request)
    }

    /// A write that was noted is done.
    pub fn stored(&self, pg: PgId, command: &Command, since: Epoch) {
        if let Some(group) = self.get(pg) {
            group.stored(command, since);
        }
    }

    /// A returning replica is about to be compared with this one: requests of maps older than `epoch` are
    /// refused from now on.
    pub fn join(&self, pg: PgId, epoch: Epoch) {
        if let Some(group) = self.get(pg) {
            group.fence.fetch_max(epoch.0, Ordering::AcqRel);
            let mut joined = self.joined.lock().expect("no panic under this lock");
            let newest = joined.entry((pg.0 >> 32) as u32).or_default();
            *newest = (*newest).max(epoch);
        }
    }

    /// The newest map for which a replica has joined a group of the pool.
    fn joined_in(&self, pool: u32) -> Epoch {
        let joined = self.joined.lock().expect("no panic under this lock");
        joined.get(&pool).copied().unwrap_or_default()
    }
}

#[cfg(test)]
mod tests;
