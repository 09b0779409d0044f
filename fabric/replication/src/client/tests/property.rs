//! Any order of answers, errors, losses and maps: every request is reported once, never while an answer that
//! may touch its buffers is outstanding, and never as done unless all in-sync replicas have it.

use std::collections::BTreeSet;

use fabric_types::ids::Version;
use proptest::prelude::*;

use super::*;

fn version_of(request: &Request) -> Version {
    Version::of(request.generation, request.sequence)
}

#[derive(Debug, Clone)]
enum Step {
    Write { chunk: u8, chunks: u8 },
    Read { chunk: u8 },
    Flush,
    Discard { chunk: u8, chunks: u8 },
    Answer { pick: u16, refusal: u8 },
    Lose { node: u8 },
    Map { states: [u8; 3] },
    Renew,
    Wait { ms: u16 },
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (0..90u8, 1..3u8).prop_map(|(chunk, chunks)| Step::Write { chunk, chunks }),
        2 => (0..90u8).prop_map(|chunk| Step::Read { chunk }),
        1 => Just(Step::Flush),
        1 => (0..50u8, 1..50u8).prop_map(|(chunk, chunks)| Step::Discard { chunk, chunks }),
        16 => (any::<u16>(), 0..20u8).prop_map(|(pick, refusal)| Step::Answer { pick, refusal }),
        1 => (1..4u8).prop_map(|node| Step::Lose { node }),
        1 => any::<[u8; 3]>().prop_map(|states| Step::Map { states }),
        1 => Just(Step::Renew),
        2 => (0..3000u16).prop_map(|ms| Step::Wait { ms }),
    ]
}

fn refusal_of(number: u8, newest: Generation) -> Result<(), Refusal> {
    match number {
        0 => Err(Refusal::NoSpace { untouched: false }),
        6 | 7 => Err(Refusal::NoSpace { untouched: true }),
        1 => Err(Refusal::Device(5)),
        2 => Err(Refusal::Corrupt),
        3 => Err(Refusal::StaleGeneration(newest)),
        4 => Err(Refusal::Unreachable),
        5 => Err(Refusal::Renumber),
        _ => Ok(()),
    }
}

/// The bench, and what the replicas know.
struct World {
    bench: Bench,
    /// Requests without an answer, by position in what was sent.
    open: BTreeSet<usize>,
    /// Every piece of a write that a replica said it has, by node.
    has: BTreeSet<(u64, Version, u32, u32)>,
    /// Who uses a version.
    numbered: BTreeMap<Version, u64>,
    states: [ReplicaState; 3],
    seen: usize,
    epoch: u64,
    now_us: u64,
    submitted: u64,
    inline: u64,
}

impl World {
    /// What is sent has a number that was drawn from its lease, and no other request has it.
    fn notice_sent(&mut self) {
        let volume = &self.bench.volume;
        let unused = volume.watermark.draw(1, false).expect("few are used");
        for (_, request) in &self.bench.script.sent[self.seen..] {
            if !request.command.mutates() {
                continue;
            }
            let older = request.generation < volume.generation();
            assert!(older || version_of(request) < unused, "{request:?}");
            let client = &self.bench.client;
            let piece = client.pieces.find(Key(request.id.0)).expect("not answered");
            let tag = client.ios[client.pieces[piece].io].tag.0;
            let owner = *self.numbered.entry(version_of(request)).or_insert(tag);
            assert_eq!(owner, tag, "two requests have {}", version_of(request));
        }
        self.open.extend(self.seen..self.bench.script.sent.len());
        self.seen = self.bench.script.sent.len();
    }

    fn submit(&mut self, op: Op, chunk: u8, chunks: u8) {
        let len = if op == Op::Flush {
            0
        } else {
            u64::from(chunks) * CHUNK
        };
        let offset = if op == Op::Flush {
            0
        } else {
            u64::from(chunk) * CHUNK
        };
        self.submitted += 1;
        match self.bench.submit(self.submitted, op, offset, len) {
            Submit::Pending => {}
            Submit::Done(_) => self.inline += 1,
            // So many wait for others that overlap them.
            Submit::Busy => self.inline += 1,
        }
    }

    /// Answers, and checks that a write thereby reported as done is on every in-sync replica.
    fn answer(&mut self, nth: usize, result: Result<(), Refusal>) {
        self.open.remove(&nth);
        let (node, request) = self.bench.script.sent[nth];
        let Command::Write { chunk, offset, .. } = request.command else {
            self.bench.answer(nth, result);
            return;
        };
        let piece = (version_of(&request), chunk.index, offset);
        if result.is_ok() {
            self.has.insert((node.0, piece.0, piece.1, piece.2));
        }
        let before: BTreeSet<u64> = self.bench.done.keys().copied().collect();
        self.bench.answer(nth, result);
        let acknowledged = self
            .bench
            .done
            .iter()
            .any(|(t, r)| !before.contains(t) && r.is_ok());
        if acknowledged {
            for (state, member) in self.states.iter().zip(1..) {
                let has = self.has.contains(&(member, piece.0, piece.1, piece.2));
                assert!(
                    *state != IN || has,
                    "node {member} is in sync and lacks the write"
                );
            }
        }
    }

    fn lose(&mut self, node: u64) {
        let sent = &self.bench.script.sent;
        self.open.retain(|&nth| sent[nth].0 != NodeId(node));
        self.bench.lose(node);
    }

    fn map(&mut self, states: [ReplicaState; 3]) {
        self.epoch += 1;
        self.states = states;
        self.bench.map(set(self.epoch, 1, &states));
    }

    /// A tick passes, so much later.
    fn wait(&mut self, us: u64) {
        self.now_us += us;
        self.bench.client.set_now_us(self.now_us);
        self.bench.tick();
    }

    fn run(&mut self, step: &Step) {
        match *step {
            Step::Write { chunk, chunks } => self.submit(Op::Write { fua: false }, chunk, chunks),
            Step::Read { chunk } => self.submit(Op::Read, chunk, 1),
            Step::Flush => self.submit(Op::Flush, 0, 0),
            Step::Discard { chunk, chunks } => self.submit(Op::Discard, chunk, chunks),
            Step::Answer { pick, refusal } => {
                let nth = usize::from(pick) % self.open.len().max(1);
                if let Some(&nth) = self.open.iter().nth(nth) {
                    let newest = self.bench.volume.generation();
                    self.answer(nth, refusal_of(refusal, newest));
                }
            }
            Step::Lose { node } => self.lose(u64::from(node)),
            Step::Renew => {
                let next = Generation(self.bench.volume.generation().0 + 1);
                assert!(self.bench.volume.renew_lease(next));
            }
            Step::Wait { ms } => self.wait(u64::from(ms) * 1000),
            Step::Map { states } => {
                self.map(states.map(|s| [IN, IN, SYNCING, OUT][usize::from(s % 4)]));
            }
        }
        self.notice_sent();
        self.check();
    }

    /// A piece of a request that was reported has no answer outstanding.
    fn check(&self) {
        for &nth in &self.open {
            let key = Key(self.bench.script.sent[nth].1.id.0);
            let piece = self.bench.client.pieces.find(key);
            assert!(piece.is_some(), "buffers given back while in use");
        }
    }

    /// All replicas well: everything ends. The second map is for pieces that were waiting at the first one
    /// for another replica than the one that had failed before.
    fn heal(&mut self) {
        for _ in 0..2 {
            self.map([IN, IN, IN]);
            self.answer_all();
        }
        // What waits for room is tried more than one at a time once the first has found some.
        for _ in 0..20 {
            self.wait(super::super::full::RETRY_US);
            self.answer_all();
        }
    }

    fn answer_all(&mut self) {
        self.notice_sent();
        while let Some(&nth) = self.open.first() {
            self.answer(nth, Ok(()));
            self.notice_sent();
            self.check();
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn every_request_ends_once_and_keeps_its_buffers_until_then(
        steps in prop::collection::vec(step(), 1..200),
    ) {
        let mut world = World {
            bench: Bench::new(set(1, 1, &[IN, IN, IN])),
            open: BTreeSet::new(),
            has: BTreeSet::new(),
            numbered: BTreeMap::new(),
            states: [IN; 3],
            seen: 0,
            epoch: 1,
            now_us: 0,
            submitted: 0,
            inline: 0,
        };
        for step in &steps {
            world.run(step);
        }
        world.heal();
        prop_assert_eq!(world.bench.done.len() as u64 + world.inline, world.submitted);
        world.bench.assert_idle();
        world.bench.volume.watermark.refresh();
        let next = world.bench.volume.watermark.draw(1, true).unwrap();
        prop_assert_eq!(world.bench.volume.watermark.resolved(), next);
    }
}
