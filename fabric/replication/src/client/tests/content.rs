//! Any order of answers, refusals, losses, maps and time: replicas in sync hold the same once all is done,
//! with what was acknowledged, and of writes that came one after the other the later one.

use std::collections::BTreeSet;
use std::ops::Range;

use fabric_types::ids::Version;
use proptest::prelude::*;

use super::super::full::RETRY_US;
use super::*;

const BLOCK: u64 = 4096;
const CHUNK_BLOCKS: u64 = CHUNK / BLOCK;
/// Chunks that are used.
const CHUNKS: u64 = 3;
/// Blocks at the beginning of each chunk that are used, and at its end.
const BLOCKS: u64 = 6;

#[derive(Debug, Clone)]
enum Step {
    Change {
        discards: bool,
        chunk: u64,
        block: u64,
        blocks: u64,
    },
    Answer {
        pick: u16,
        refusal: u8,
    },
    Lose {
        node: usize,
        stores: bool,
    },
    Map {
        states: [u8; 3],
    },
    OnFull {
        nth: usize,
    },
    Wait {
        ms: u64,
    },
}

fn step() -> impl Strategy<Value = Step> {
    let change = (any::<u8>(), 0..CHUNKS, 0..2 * BLOCKS, 1..2 * BLOCKS);
    let change = change.prop_map(|(discards, chunk, block, blocks)| Step::Change {
        discards: discards < 40,
        chunk,
        block,
        blocks,
    });
    prop_oneof![
        6 => change,
        20 => (any::<u16>(), 0..24u8).prop_map(|(pick, refusal)| Step::Answer { pick, refusal }),
        1 => (0..3usize, any::<bool>()).prop_map(|(node, stores)| Step::Lose { node, stores }),
        1 => any::<[u8; 3]>().prop_map(|states| Step::Map { states }),
        1 => (0..3usize).prop_map(|nth| Step::OnFull { nth }),
        3 => (0..8u64).prop_map(|power| Step::Wait { ms: 10 << power }),
        1 => Just(Step::Wait { ms: 60_000 }),
    ]
}

fn on_full(nth: usize) -> OnFull {
    OnFull {
        wait: [0, 300, 60_000].map(Duration::from_millis)[nth],
    }
}

/// A guest's request; its tag is its place among them.
#[derive(Debug)]
struct Change {
    blocks: Range<u64>,
    discards: bool,
    begun: usize,
    /// When it was acknowledged.
    ended: Option<usize>,
}

/// What a replica holds.
#[derive(Debug, Default, Clone)]
struct Content {
    /// By block of the volume: version and tag.
    blocks: BTreeMap<u64, (Version, u64)>,
    /// What was changed since it began to be sent changes: no comparison touches it.
    noted: BTreeSet<u64>,
}

impl Content {
    /// Takes so many of the command's blocks in.
    fn store(&mut self, command: &Command, version: Version, tag: u64, count: u64) {
        let (chunk, offset, len) = match *command {
            Command::Write {
                chunk, offset, len, ..
            }
            | Command::Zero {
                chunk, offset, len, ..
            } => (chunk, offset, len),
            _ => return,
        };
        let first = u64::from(chunk.index) * CHUNK_BLOCKS + u64::from(offset) / BLOCK;
        let count = count.min(u64::from(len) / BLOCK);
        for block in first..first + count {
            self.noted.insert(block);
            if self.blocks.get(&block).is_some_and(|has| has.0 > version) {
                continue;
            }
            match command {
                Command::Zero { .. } => self.blocks.remove(&block),
                _ => self.blocks.insert(block, (version, tag)),
            };
        }
    }

    /// Is made equal to the source.
    fn compare(&mut self, source: &Self) {
        let noted = &self.noted;
        self.blocks.retain(|block, _| noted.contains(block));
        for (block, has) in &source.blocks {
            if !noted.contains(block) {
                self.blocks.insert(*block, *has);
            }
        }
    }
}

struct World {
    bench: Bench,
    min_in_sync: usize,
    open: BTreeSet<usize>,
    seen: usize,
    states: [ReplicaState; 3],
    since: [u64; 3],
    epoch: u64,
    now_us: u64,
    contents: [Content; 3],
    changes: Vec<Change>,
    tags: BTreeMap<Version, u64>,
    /// Ended requests that were looked at.
    ended: BTreeSet<u64>,
    refused: u64,
    step: usize,
}

impl World {
    fn new(min_in_sync: usize) -> Self {
        Self {
            bench: Bench::new(set(1, min_in_sync, &[IN, IN, IN])),
            min_in_sync,
            open: BTreeSet::new(),
            seen: 0,
            states: [IN; 3],
            since: [1; 3],
            epoch: 1,
            now_us: 0,
            contents: Default::default(),
            changes: Vec::new(),
            tags: BTreeMap::new(),
            ended: BTreeSet::new(),
            refused: 0,
            step: 0,
        }
    }

    fn change(&mut self, discards: bool, chunk: u64, block: u64, blocks: u64) {
        // Those in the upper half lie before the chunk's end, and may go beyond it.
        let within = match block < BLOCKS {
            true => block,
            false => CHUNK_BLOCKS - 1 - (block - BLOCKS),
        };
        let first = chunk * CHUNK_BLOCKS + within;
        let tag = self.changes.len() as u64;
        self.changes.push(Change {
            blocks: first..first + blocks,
            discards,
            begun: self.step,
            ended: None,
        });
        let op = match discards {
            true => Op::Discard,
            false => Op::Write { fua: false },
        };
        match self.bench.submit(tag, op, first * BLOCK, blocks * BLOCK) {
            Submit::Pending => {}
            Submit::Done(_) | Submit::Busy => self.refused += 1,
        }
    }

    /// Whose requests were sent, and which have ended.
    fn notice(&mut self) {
        let client = &self.bench.client;
        for nth in self.seen..self.bench.script.sent.len() {
            let (_, request) = self.bench.script.sent[nth];
            let piece = client.pieces.find(Key(request.id.0)).expect("in flight");
            let version = Version::of(request.generation, request.sequence);
            let tag = client.ios[client.pieces[piece].io].tag.0;
            self.tags.insert(version, tag);
            self.open.insert(nth);
        }
        self.seen = self.bench.script.sent.len();
        for (&tag, result) in &self.bench.done {
            if self.ended.insert(tag) && result.is_ok() {
                self.changes[tag as usize].ended = Some(self.step);
            }
        }
    }

    /// The replica stores so many blocks of what it was sent.
    fn store(&mut self, nth: usize, count: u64) {
        let (node, request) = self.bench.script.sent[nth];
        let version = Version::of(request.generation, request.sequence);
        let tag = self.tags[&version];
        let member = node.0 as usize - 1;
        if self.states[member] != OUT {
            self.contents[member].store(&request.command, version, tag, count);
        }
    }

    fn answer(&mut self, nth: usize, refusal: u8) {
        let (stored, result) = match refusal {
            0 => (1, Err(Refusal::NoSpace { untouched: false })),
            1..6 => (0, Err(Refusal::NoSpace { untouched: true })),
            6 => (1, Err(Refusal::Device(libc::EROFS))),
            7 => (0, Err(Refusal::Renumber)),
            8 => (u64::MAX, Err(Refusal::Unreachable)),
            _ => (u64::MAX, Ok(())),
        };
        self.open.remove(&nth);
        self.store(nth, stored);
        self.bench.answer(nth, result);
    }

    fn lose(&mut self, member: usize, stores: bool) {
        let node = member as u64 + 1;
        let lost: Vec<usize> = self.open.iter().copied().collect();
        for nth in lost {
            if self.bench.script.sent[nth].0 == NodeId(node) {
                self.open.remove(&nth);
                self.store(nth, if stores { u64::MAX } else { 0 });
            }
        }
        self.bench.lose(node);
    }

    /// As meta makes them: one that was in sync stays, and who comes in sync was compared with it.
    fn map(&mut self, mut states: [ReplicaState; 3]) {
        let stays = (0..3).find(|&m| self.states[m] == IN && states[m] == IN);
        let stays = stays.or_else(|| self.states.iter().position(|s| *s == IN));
        let source = stays.expect("one is in sync always");
        states[source] = IN;
        self.epoch += 1;
        let source = self.contents[source].clone();
        for (member, state) in states.into_iter().enumerate() {
            let content = &mut self.contents[member];
            match (self.states[member], state) {
                (IN, IN) | (SYNCING, SYNCING) | (OUT, OUT) => {}
                (SYNCING, IN) => content.compare(&source),
                (_, IN) => *content = source.clone(),
                _ => *content = Content::default(),
            }
            let goes_on =
                state == self.states[member] || (self.states[member], state) == (SYNCING, IN);
            if !goes_on {
                self.since[member] = self.epoch;
            }
        }
        self.states = states;
        let members = (0..3).map(|m| Member {
            node: NodeId(m as u64 + 1),
            incarnation: Incarnation(7),
            state: states[m],
            since: Epoch(self.since[m]),
        });
        let set = ReplicaSet::new(
            PgId(0),
            Epoch(self.epoch),
            self.min_in_sync,
            members.collect(),
        );
        self.bench.map(set);
    }

    fn wait(&mut self, us: u64) {
        self.now_us += us;
        self.bench.client.set_now_us(self.now_us);
        self.bench.tick();
    }

    fn run(&mut self, step: &Step) {
        self.step += 1;
        match *step {
            Step::Change {
                discards,
                chunk,
                block,
                blocks,
            } => self.change(discards, chunk, block, blocks),
            Step::Answer { pick, refusal } => {
                let nth = usize::from(pick) % self.open.len().max(1);
                if let Some(&nth) = self.open.iter().nth(nth) {
                    self.answer(nth, refusal);
                }
            }
            Step::Lose { node, stores } => self.lose(node, stores),
            Step::Map { states } => {
                self.map(states.map(|s| [IN, IN, SYNCING, OUT][usize::from(s % 4)]));
            }
            Step::OnFull { nth } => self.bench.volume.set_on_full(on_full(nth)),
            Step::Wait { ms } => self.wait(ms * 1000),
        }
        while self.bench.client.poll_action().is_some() {}
        self.notice();
    }

    /// All replicas are well, and everything ends.
    fn heal(&mut self) {
        for round in 0..40 {
            self.step += 1;
            match round {
                0 | 1 => self.map([IN, IN, IN]),
                _ => self.wait(RETRY_US),
            }
            self.notice();
            while let Some(&nth) = self.open.first() {
                self.answer(nth, u8::MAX);
                self.notice();
            }
        }
        assert_eq!(
            self.ended.len() as u64 + self.refused,
            self.changes.len() as u64
        );
        self.bench.assert_idle();
    }

    fn check(&self) {
        let [one, others @ ..] = &self.contents;
        for other in others {
            assert_eq!(one.blocks, other.blocks, "replicas in sync differ");
        }
        for chunk in 0..=CHUNKS {
            let start = chunk * CHUNK_BLOCKS;
            let used = start.saturating_sub(2 * BLOCKS)..start + 3 * BLOCKS;
            used.for_each(|block| self.check_block(block));
        }
    }

    /// Nothing that was acknowledged before another change of the block began, and was acknowledged.
    fn check_block(&self, block: u64) {
        let covers = |change: &&Change| change.blocks.contains(&block);
        let acknowledged = self.changes.iter().filter(covers);
        let acknowledged: Vec<&Change> = acknowledged.filter(|c| c.ended.is_some()).collect();
        let is_old = |change: &Change| {
            let ended = change.ended;
            acknowledged
                .iter()
                .any(|later| ended.is_some_and(|end| end < later.begun))
        };
        let holds = self.contents[0].blocks.get(&block);
        let fits = match holds {
            Some((_, tag)) => !is_old(&self.changes[*tag as usize]),
            None => {
                let mut discards = self.changes.iter().filter(covers).filter(|c| c.discards);
                acknowledged.iter().all(|c| c.discards) || discards.any(|c| !is_old(c))
            }
        };
        assert!(fits, "block {block} is {holds:?} after {:?}", self.changes);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn replicas_agree_and_hold_what_was_acknowledged(
        (min_in_sync, nth) in (1..3usize, 0..3usize),
        steps in prop::collection::vec(step(), 1..200),
    ) {
        let mut world = World::new(min_in_sync);
        world.bench.volume.set_on_full(on_full(nth));
        for step in &steps {
            world.run(step);
        }
        world.heal();
        world.check();
    }
}
