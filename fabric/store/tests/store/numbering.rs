//! Writes that reach the store long after they were numbered, as from a thread that the scheduler kept
//! waiting, while discards empty what is around them and checkpoints drop the emptied map pages. None is
//! lost: in the end every block shows an operation that no later one has overwritten, where later means begun
//! after the other had ended.

use std::collections::{BTreeMap, VecDeque};

use fabric_store::ShardCore;
use fabric_store::api::{CoreParams, OpId, StoreCore, StoreError, StoreOp, StoreResult, Submitted};
use fabric_store::format::{LEAF_BLOCKS, Page, UNIT_BYTES};
use fabric_types::ids::{LayerId, Version};
use rand::Rng;
use rand_chacha::ChaCha8Rng;

use crate::factory;
use crate::rig::TURNS_MAX;
use crate::seeds::{self, for_each_seed};
use crate::shard::{SMALL_DISK, small_params};
use crate::sim_disk::{CrashKind, SimDisk};

const LAYER: LayerId = LayerId(1);
/// Map pages, all of one chunk, and the blocks used of each: so few that they are often empty.
const LEAVES: usize = 4;
const SPOTS: usize = 3;
/// Operations in flight at most.
const DEPTH: usize = 12;

/// A write of `tag`, or a discard for tag 0.
#[derive(Clone)]
struct Change {
    leaf: usize,
    first: usize,
    count: usize,
    tag: u64,
    version: Version,
    begun: u64,
}

impl Change {
    fn offset(&self) -> u32 {
        ((self.leaf * LEAF_BLOCKS + self.first) * UNIT_BYTES) as u32
    }
}

/// A change that ended, as a block remembers it.
#[derive(Clone, Copy)]
struct Past {
    tag: u64,
    begun: u64,
    ended: u64,
}

struct World {
    disk: SimDisk,
    core: ShardCore,
    rng: ChaCha8Rng,
    clock: u64,
    sequence: u64,
    /// Numbered, not submitted.
    waiting: VecDeque<Change>,
    /// Submitted; the memory is the source of a write.
    live: BTreeMap<OpId, (Option<Change>, Vec<Page>)>,
    done: [[Vec<Past>; SPOTS]; LEAVES],
    renumbered: u64,
}

fn params() -> CoreParams {
    small_params()
}

fn open(disk: &mut SimDisk, seed: u64) -> ShardCore {
    let (mut cores, _) = factory::open(disk, &params(), seed).expect("opens");
    cores.remove(0)
}

impl World {
    fn new(seed: u64) -> Self {
        let mut disk = SimDisk::new(SMALL_DISK, seed);
        factory::format(&mut disk).expect("formats");
        let core = open(&mut disk, seed);
        Self {
            disk,
            core,
            rng: seeds::rng(seed, 0x40b),
            clock: 0,
            sequence: 0,
            waiting: VecDeque::new(),
            live: BTreeMap::new(),
            done: Default::default(),
            renumbered: 0,
        }
    }

    fn tick(&mut self) -> u64 {
        self.clock += 1;
        self.clock
    }

    fn draw(&mut self) -> Version {
        self.sequence += 1;
        Version::new(1, self.sequence)
    }

    fn begin(&mut self, discard: bool) {
        let (leaf, first) = (
            self.rng.random_range(0..LEAVES),
            self.rng.random_range(0..SPOTS),
        );
        let (first, count) = if discard && self.rng.random_bool(0.7) {
            (0, SPOTS)
        } else {
            (first, self.rng.random_range(1..=SPOTS - first))
        };
        let (version, begun) = (self.draw(), self.tick());
        let change = Change {
            leaf,
            first,
            count,
            tag: if discard { 0 } else { begun },
            version,
            begun,
        };
        self.waiting.push_back(change);
    }

    fn submit(&mut self, change: Option<Change>) {
        let id = OpId(self.tick());
        let tag = change.as_ref().map_or(0, |c| c.tag);
        let count = change.as_ref().map_or(0, |c| c.count);
        let mut memory = vec![Page([0; UNIT_BYTES]); count];
        for page in &mut memory {
            page.0[..8].copy_from_slice(&tag.to_le_bytes());
        }
        let iovecs = [libc::iovec {
            iov_base: memory.as_mut_ptr().cast(),
            iov_len: count * UNIT_BYTES,
        }];
        let op = match &change {
            None => StoreOp::Checkpoint { clean: false },
            Some(change) if tag == 0 => StoreOp::Zero {
                layers: &[LAYER],
                chunk: 0,
                offset: change.offset(),
                len: (count * UNIT_BYTES) as u32,
                version: change.version,
                fua: false,
            },
            Some(change) => StoreOp::Write {
                layers: &[LAYER],
                chunk: 0,
                offset: change.offset(),
                iovecs: &iovecs,
                version: change.version,
                fua: false,
                urgent: false,
            },
        };
        // SAFETY: `live` keeps the memory until the completion.
        assert_eq!(unsafe { self.core.submit(id, op) }, Submitted::Accepted);
        self.live.insert(id, (change, memory));
    }

    fn finish(&mut self, id: OpId, result: StoreResult) {
        let (change, _) = self.live.remove(&id).expect("finishes once");
        let Some(mut change) = change else {
            return result.expect("a checkpoint is written");
        };
        match result {
            // Stale: others overwrote it block by block.
            Ok(()) | Err(StoreError::Stale { .. }) => {}
            Err(StoreError::Renumber { newest }) => {
                assert!(newest > change.version);
                change.version = self.draw();
                self.renumbered += 1;
                return self.waiting.push_back(change);
            }
            Err(error) => panic!("{error}"),
        }
        let past = Past {
            tag: change.tag,
            begun: change.begun,
            ended: self.tick(),
        };
        for spot in change.first..change.first + change.count {
            self.done[change.leaf][spot].push(past);
        }
    }

    fn step(&mut self) -> bool {
        let mut moved = false;
        while let Some(action) = self.core.poll_action() {
            self.disk.submit(0, action);
            moved = true;
        }
        if let Some((key, result)) = self.disk.complete_any() {
            self.core.on_device(key.id, result);
            moved = true;
        }
        while let Some((id, result)) = self.core.poll_completion() {
            self.finish(id, result);
            moved = true;
        }
        moved
    }

    fn play(&mut self) {
        match self.rng.random_range(0..10) {
            0..3 if self.waiting.len() < DEPTH => self.begin(false),
            3 | 4 if self.waiting.len() < DEPTH => self.begin(true),
            5 | 6 if self.live.len() < DEPTH && !self.waiting.is_empty() => {
                let at = self.rng.random_range(0..self.waiting.len());
                let change = self.waiting.remove(at);
                self.submit(change);
            }
            7 if self.live.len() < DEPTH => self.submit(None),
            _ => {
                self.step();
            }
        }
    }

    fn drain(&mut self) {
        for _ in 0..TURNS_MAX {
            let moved = self.step();
            if !moved && self.live.is_empty() {
                match self.waiting.pop_front() {
                    Some(change) => self.submit(Some(change)),
                    None => return,
                }
            }
        }
        panic!("no end");
    }

    fn read(&mut self) -> [[u64; SPOTS]; LEAVES] {
        let mut shown = [[0; SPOTS]; LEAVES];
        for (leaf, tags) in shown.iter_mut().enumerate() {
            let id = OpId(self.tick());
            let mut memory = vec![Page([0xee; UNIT_BYTES]); SPOTS];
            let iovecs = [libc::iovec {
                iov_base: memory.as_mut_ptr().cast(),
                iov_len: SPOTS * UNIT_BYTES,
            }];
            let op = StoreOp::Read {
                layers: &[LAYER],
                chunk: 0,
                offset: (leaf * LEAF_BLOCKS * UNIT_BYTES) as u32,
                iovecs: &iovecs,
            };
            // SAFETY: the memory outlives the loop, which ends with the completion.
            assert_eq!(unsafe { self.core.submit(id, op) }, Submitted::Accepted);
            self.live.insert(id, (None, Vec::new()));
            while !self.live.is_empty() {
                assert!(self.step());
            }
            for (tag, page) in tags.iter_mut().zip(&memory) {
                *tag = u64::from_le_bytes(page.0[..8].try_into().expect("8 bytes"));
            }
        }
        shown
    }

    /// See the module.
    fn check(&mut self) -> [[u64; SPOTS]; LEAVES] {
        let shown = self.read();
        for (leaf, tags) in shown.iter().enumerate() {
            for (spot, &tag) in tags.iter().enumerate() {
                let done = &self.done[leaf][spot];
                let blank = Past {
                    tag: 0,
                    begun: 0,
                    ended: 0,
                };
                let mut candidates = done.iter().chain([&blank]).filter(|p| p.tag == tag);
                let newest = candidates.any(|p| done.iter().all(|later| later.begun <= p.ended));
                assert!(
                    newest,
                    "block {spot} of leaf {leaf} shows {tag}: a write that ended is lost"
                );
            }
        }
        shown
    }
}

#[test]
fn write_overtaken_by_a_discard_of_its_neighbours_is_not_lost() {
    for_each_seed(40, |seed| {
        let mut world = World::new(seed);
        for life in 0..4 {
            for _ in 0..400 {
                world.play();
            }
            world.drain();
            let shown = world.check();
            world.disk = world.disk.crash(CrashKind::Process, seed * 10 + life);
            world.core = open(&mut world.disk, seed * 10 + life);
            assert_eq!(world.read(), shown, "recovery changed what was there");
        }
        assert!(world.renumbered > 0, "nothing was numbered anew");
    });
}
