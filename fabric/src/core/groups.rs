//! What a node knows of the placement groups that its devices are members of: which requests it may take.
//!
//! A replica acts only under maps that it knows: a request made under a newer one is put off ([`Refusal::Behind`]), so that a
//! replica that is to be compared notes every write that it is sent from the first one on. See
//! `docs/decisions/0004-replication.md`.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, RwLock};

use super::membership::Standing;
use crate::proto::ids::{ChunkKey, LayerId};
use crate::proto::{Command, Epoch, PgId, Refusal, Request};
use crate::store::device::BLOCK_BYTES;

/// Blocks of a map page.
pub const LEAF_BLOCKS: u32 = 256;
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

/// Blocks that were written in the present round of comparison, by map page.
#[derive(Debug, Default)]
struct Fresh(BTreeMap<LeafKey, [u64; WORDS]>);

impl Fresh {
    fn note(&mut self, chunk: ChunkKey, first: u32, end: u32) {
        for block in first..end {
            let key = LeafKey {
                layer: chunk.layer,
                chunk: chunk.index,
                leaf: block / LEAF_BLOCKS,
            };
            let bit = block % LEAF_BLOCKS;
            self.0.entry(key).or_default()[bit as usize / 64] |= 1 << (bit % 64);
        }
    }
}

const OUT: u8 = 0;
const SYNCING: u8 = 1;
const IN_SYNC: u8 = 2;

/// One group.
#[derive(Debug)]
pub struct Group {
    standing: AtomicU8,
    /// Epoch at which it became what it is.
    since: AtomicU64,
    /// Oldest map whose requests are taken.
    fence: AtomicU64,
    fresh: Mutex<Fresh>,
    /// Which of the node's devices holds it.
    device: AtomicU32,
    /// How many groups its pool has.
    of_groups: AtomicU32,
}

impl Group {
    fn standing(&self) -> Standing {
        match self.standing.load(Ordering::Acquire) {
            SYNCING => Standing::Syncing,
            IN_SYNC => Standing::InSync,
            _ => Standing::Out,
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
    fn admit(&self, request: &Request) -> Result<(), Refusal> {
        let fence = Epoch(self.fence.load(Ordering::Acquire));
        if request.epoch < fence {
            return Err(Refusal::StaleEpoch(fence));
        }
        let since = Epoch(self.since.load(Ordering::Acquire));
        let may = match request.command {
            // Invariant *No trust on return*: nothing is read from a replica that has not been compared.
            Command::Read { .. } | Command::ListChunks { .. } | Command::Join => {
                self.standing() == Standing::InSync
            }
            _ => self.standing() != Standing::Out,
        };
        if may {
            Ok(())
        } else {
            Err(Refusal::StaleEpoch(since))
        }
    }

    /// Notes what a write that was admitted is about to change.
    fn note(&self, command: &Command) {
        if self.standing() != Standing::Syncing {
            return;
        }
        let (chunk, offset, len) = match *command {
            Command::Write {
                chunk, offset, len, ..
            }
            | Command::Zero {
                chunk, offset, len, ..
            } => (chunk, offset, len),
            Command::Restore { chunk, block, .. } => {
                (chunk, block * BLOCK_BYTES as u32, BLOCK_BYTES as u32)
            }
            _ => return,
        };
        let first = offset / BLOCK_BYTES as u32;
        let end = offset.saturating_add(len).div_ceil(BLOCK_BYTES as u32);
        let mut fresh = self.fresh.lock().expect("no panic under this lock");
        fresh.note(chunk, first, end);
    }

    /// The blocks of a page that were written in this round: bit `i` of word `i / 64`.
    pub fn fresh(&self, leaf: LeafKey) -> [u64; WORDS] {
        let fresh = self.fresh.lock().expect("no panic under this lock");
        fresh.0.get(&leaf).copied().unwrap_or_default()
    }
}

/// The groups of a node, shared by its data threads. A node without any takes every request: it is alone.
#[derive(Debug, Default)]
pub struct Groups {
    /// Newest map applied.
    known: AtomicU64,
    groups: RwLock<HashMap<PgId, Arc<Group>>>,
}

impl Groups {
    fn make(&self, pg: PgId) -> Arc<Group> {
        let mut groups = self.groups.write().expect("no panic under this lock");
        let group = groups.entry(pg).or_insert_with(|| {
            Arc::new(Group {
                standing: AtomicU8::new(OUT),
                since: AtomicU64::new(0),
                fence: AtomicU64::new(0),
                fresh: Mutex::default(),
                device: AtomicU32::new(0),
                of_groups: AtomicU32::new(1),
            })
        });
        Arc::clone(group)
    }

    /// This node's replica of the group lies on its device of this index, and the pool has so many groups.
    pub fn place(&self, pg: PgId, device: u32, of_groups: u32) {
        let group = self.make(pg);
        group.device.store(device, Ordering::Release);
        group.of_groups.store(of_groups, Ordering::Release);
    }

    /// The map of `epoch` says so of this node's replica of the group. To be called for every group that changed, before
    /// [`applied`](Self::applied).
    pub fn set(&self, pg: PgId, standing: Standing, since: Epoch) {
        let group = self.make(pg);
        if since.0 < group.since.load(Ordering::Acquire) {
            return;
        }
        let new_round = since.0 > group.since.load(Ordering::Acquire);
        let code = match standing {
            Standing::Out => OUT,
            Standing::Syncing => SYNCING,
            Standing::InSync => IN_SYNC,
        };
        if standing != Standing::InSync && new_round {
            // Under older maps it may have been sent writes that nobody else has.
            group.fence.fetch_max(since.0, Ordering::AcqRel);
            group
                .fresh
                .lock()
                .expect("no panic under this lock")
                .0
                .clear();
        }
        group.since.store(since.0, Ordering::Release);
        group.standing.store(code, Ordering::Release);
    }

    /// This node is no member of the group any more.
    pub fn forget(&self, pg: PgId) {
        let mut groups = self.groups.write().expect("no panic under this lock");
        groups.remove(&pg);
    }

    /// These are the groups that this node is a member of, and no others.
    pub fn keep(&self, pgs: &[PgId]) {
        let pgs: HashSet<PgId> = pgs.iter().copied().collect();
        let mut groups = self.groups.write().expect("no panic under this lock");
        groups.retain(|pg, _| pgs.contains(pg));
    }

    /// All of the map of `epoch` has been told.
    pub fn applied(&self, epoch: Epoch) {
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
    /// Invariant *One writer*, the map's part of it: a request made under a map older than the group's fence is refused.
    pub fn admit(&self, request: &Request) -> Result<(), Refusal> {
        // Fences are about a layer, not a group, and are raised whatever the map.
        if matches!(request.command, Command::Fence { .. }) {
            return Ok(());
        }
        let known = self.known();
        if request.epoch > known {
            return Err(Refusal::Behind(known));
        }
        let Some(group) = self.get(request.pg) else {
            return Err(Refusal::StaleEpoch(known));
        };
        group.admit(request)
    }

    /// Notes a write that was admitted, before the store gets it.
    pub fn note(&self, request: &Request) {
        if let Some(group) = self.get(request.pg) {
            group.note(&request.command);
        }
    }

    /// A returning replica is about to be compared with this one: requests of maps older than `epoch` are refused from now
    /// on.
    pub fn join(&self, pg: PgId, epoch: Epoch) {
        if let Some(group) = self.get(pg) {
            group.fence.fetch_max(epoch.0, Ordering::AcqRel);
        }
    }
}
