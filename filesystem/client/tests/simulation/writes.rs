//! Tasks of two hosts write parts of one file that share blocks and do not overlap: nothing gets lost.

use std::ops::Range;

use fuse_codec::Handle;

use crate::guest::{Guest, RDWR, ROOT, client};
use crate::host::Mutation;
use crate::world::{Faults, World};
use crate::{faulty, seeds, slow};

const HOSTS: u64 = 2;
const TASKS: usize = 6;
const PARTS: usize = 24;
const STEPS: usize = 12;

/// A part of the file, and what may be in it.
struct Part {
    range: Range<u64>,
    /// The last that was acknowledged, and what failed since.
    possible: Vec<Vec<u8>>,
}

struct Writer {
    world: World,
    guest: Guest,
    file: u64,
    handle: Handle,
    parts: Vec<Part>,
    /// What is buffered may be lost.
    syncs: bool,
}

impl Writer {
    async fn run(mut self) -> Self {
        for _ in 0..STEPS {
            let random = self.world.runtime.clone();
            let at = random.below(self.parts.len() as u64) as usize;
            match random.happens(0.7) {
                true => self.write(at).await,
                false => self.read(at).await,
            }
        }
        self
    }

    async fn write(&mut self, at: usize) {
        let part = &mut self.parts[at];
        let data = self
            .world
            .runtime
            .bytes((part.range.end - part.range.start) as usize);
        let (guest, start) = (&self.guest, part.range.start);
        let mut written = guest.write(self.file, self.handle, start, &data).await;
        if let (Ok(count), true) = (written, self.syncs) {
            let synced = guest.fsync(self.file, self.handle).await;
            written = synced.map(|()| count);
        }
        match written {
            Ok(count) => {
                assert_eq!(count as usize, data.len());
                part.possible = vec![data];
            }
            Err(_) => part.possible.push(data),
        }
    }

    async fn read(&self, at: usize) {
        let Range { start, end } = self.parts[at].range;
        let read = self
            .guest
            .read(self.file, self.handle, start, (end - start) as u32)
            .await;
        if let Ok(data) = read {
            self.check(at, &data);
        }
    }

    fn check(&self, at: usize, data: &[u8]) {
        let part = &self.parts[at];
        if !part.possible.iter().any(|possible| possible == data) {
            let what = format!("{:?} holds what nobody wrote last", part.range);
            self.world.violation(what);
        }
    }
}

/// Borders of the parts: some between blocks, most within.
fn borders(world: &World) -> Vec<u64> {
    let mut borders = vec![0];
    for _ in 0..PARTS {
        let last = borders[borders.len() - 1];
        let next = last + 1 + world.runtime.below(9000);
        borders.push(match world.runtime.happens(0.4) {
            true => next.next_multiple_of(4096),
            false => next,
        });
    }
    borders
}

pub async fn disjoint(world: World, faults: Faults, mutation: Option<Mutation>) {
    let borders = borders(&world);
    let mut writers: Vec<Writer> = Vec::new();
    for node in 1..=HOSTS {
        let host = client(&world, node, mutation);
        for _ in 0..TASKS / HOSTS as usize {
            let guest = Guest::new(&host);
            let (file, handle) = guest.create(ROOT, "f", RDWR).await.unwrap();
            writers.push(Writer {
                world: world.clone(),
                guest,
                file,
                handle,
                parts: Vec::new(),
                syncs: faults.session_end > 0.0,
            });
        }
    }
    let end = borders[PARTS];
    writers[0]
        .guest
        .truncate(writers[0].file, end)
        .await
        .unwrap();
    for (number, border) in borders.windows(2).enumerate() {
        let range = border[0]..border[1];
        writers[number % TASKS].parts.push(Part {
            possible: vec![vec![0; (range.end - range.start) as usize]],
            range,
        });
    }
    world.set_faults(faults);
    let running: Vec<_> = writers
        .into_iter()
        .map(|writer| world.runtime.spawn(writer.run()))
        .collect();
    let mut ended = Vec::new();
    for writer in running {
        ended.push(writer.await.unwrap());
    }
    world.set_faults(slow());
    for writer in &ended {
        for at in 0..writer.parts.len() {
            writer.read(at).await;
        }
        let attr = writer.guest.getattr(writer.file).await.unwrap();
        assert_eq!(attr.size, end);
    }
}

#[test]
fn disjoint_writes_of_two_hosts_are_all_kept() {
    seeds(30, |world| disjoint(world, slow(), None));
}

#[test]
fn disjoint_writes_are_kept_whatever_goes_wrong() {
    seeds(60, |world| disjoint(world, faulty(), None));
}

#[test]
fn disjoint_writes_are_kept_while_sessions_end() {
    let faults = Faults {
        session_end: 0.02,
        ..faulty()
    };
    seeds(60, move |world| disjoint(world, faults, None));
}

#[test]
fn data_that_are_given_back_at_once_are_read_anew() {
    let faults = Faults {
        session_end: 0.05,
        hasty_reclaim: true,
        ..slow()
    };
    seeds(30, move |world| disjoint(world, faults, None));
}
