//! What was synced survives its host: another host reads it. What was not is there or is not, in parts that
//! were written.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use fs_client::OwnedOperation;
use fuse_codec::Handle;

use crate::guest::{Guest, RDWR, ROOT, client};
use crate::host::Mutation;
use crate::world::{Faults, World};
use crate::{seeds, slow};

/// Bytes that are written or not as a whole.
const SLOT: usize = 512;
/// Slots of a file.
const SLOTS: usize = 60;
const FILES: usize = 6;

/// What a file may hold if its host is lost now.
struct Model {
    /// For each slot, the values that it may have, the oldest first: the last one that is synced, and those
    /// written since.
    slots: Vec<Vec<u8>>,
    /// Bytes that it has at least, and at most.
    sizes: (usize, usize),
    /// Its size is being changed: nothing is known.
    is_unknown: bool,
}

struct User {
    world: World,
    guest: Guest,
    ino: u64,
    handle: Handle,
    model: Arc<Mutex<Model>>,
    last: u8,
}

impl User {
    fn below(&self, end: usize) -> usize {
        self.world.runtime.below(end as u64) as usize
    }

    async fn write(&mut self) {
        let first = self.below(SLOTS);
        let count = 1 + self.below((SLOTS - first).min(20));
        self.last = self.last % 250 + 1;
        let value = self.last;
        let is_sync = self.below(8) == 0;
        let snapshot: Vec<usize> = {
            let mut model = self.model.lock().unwrap();
            let end = (first + count) * SLOT;
            model.sizes.1 = model.sizes.1.max(end);
            let slots = model.slots[first..first + count].iter_mut();
            slots.for_each(|slot| slot.push(value));
            (first..first + count).collect()
        };
        let data = vec![value; count * SLOT];
        let bits = if is_sync { RDWR | libc::O_DSYNC } else { RDWR };
        let offset = (first * SLOT) as u64;
        let written = self
            .guest
            .write_with(self.ino, self.handle, offset, &data, bits)
            .await;
        let mut model = self.model.lock().unwrap();
        // What failed may be done in part, or later.
        model.is_unknown |= written.is_err();
        if is_sync && written.is_ok() {
            for slot in snapshot {
                model.slots[slot] = vec![value];
            }
            model.sizes.0 = model.sizes.0.max((first + count) * SLOT);
        }
    }

    async fn sync(&self) {
        let (ino, handle) = (self.ino, self.handle);
        let synced = self.guest.done(ino, OwnedOperation::Fsync { handle }).await;
        let mut model = self.model.lock().unwrap();
        model.is_unknown |= synced.is_err();
        if synced.is_ok() {
            for slot in &mut model.slots {
                slot.drain(..slot.len() - 1);
            }
            model.sizes.0 = model.sizes.1;
        }
    }

    async fn truncate(&self) {
        let size = self.below(SLOTS) * SLOT;
        let was_unknown = std::mem::replace(&mut self.model.lock().unwrap().is_unknown, true);
        if self.guest.truncate(self.ino, size as u64).await.is_ok() {
            let mut model = self.model.lock().unwrap();
            // What failed before may not be there.
            model.is_unknown = was_unknown && size > 0;
            // It is committed, with all that was written before.
            model.sizes = (size, size);
            for (at, slot) in model.slots.iter_mut().enumerate() {
                match at * SLOT >= size {
                    true => *slot = vec![0],
                    false => {
                        slot.drain(..slot.len() - 1);
                    }
                }
            }
        }
    }

    async fn run(mut self) {
        loop {
            match self.below(12) {
                0 | 1 => self.sync().await,
                2 => self.truncate().await,
                _ => self.write().await,
            }
            let is_long = self.below(5) == 0;
            let pause = self.world.runtime.below(if is_long { 2000 } else { 5 });
            self.world.runtime.sleep(Duration::from_millis(pause)).await;
        }
    }
}

/// What a file holds, as another host reads it, is among what it may.
fn check(world: &World, file: usize, model: &Model, data: &[u8]) {
    if model.is_unknown {
        return;
    }
    let (least, most) = model.sizes;
    if data.len() < least || data.len() > most || data.len() % SLOT != 0 {
        let what = format!("file {file} has {} bytes of {least} to {most}", data.len());
        world.violation(what);
    }
    for (at, slot) in data.chunks(SLOT).enumerate() {
        let found: BTreeSet<u8> = slot.iter().copied().collect();
        let possible = &model.slots[at];
        let is_possible = found.len() == 1 && found.iter().all(|value| possible.contains(value));
        if !is_possible {
            let what = format!("file {file}, slot {at}: {found:?}, which may be {possible:?}");
            world.violation(what);
        }
    }
}

pub async fn loses_its_host(world: World, faults: Faults, mutation: Option<Mutation>) {
    let host = client(&world, 1, mutation);
    let mut files = Vec::new();
    for number in 0..FILES {
        let guest = Guest::new(&host);
        let (ino, handle) = guest
            .create(ROOT, &format!("f{number}"), RDWR)
            .await
            .unwrap();
        let model = Arc::new(Mutex::new(Model {
            slots: vec![vec![0]; SLOTS],
            sizes: (0, 0),
            is_unknown: false,
        }));
        files.push((ino, Arc::clone(&model)));
        let user = User {
            world: world.clone(),
            guest,
            ino,
            handle,
            model,
            last: 0,
        };
        drop(world.runtime.spawn(user.run()));
    }
    world.set_faults(faults);
    let life = match world.runtime.happens(0.5) {
        true => 300,
        false => 12_000,
    };
    let life = Duration::from_millis(world.runtime.below(life));
    world.runtime.sleep(life).await;
    host.backend().crash();
    // What may be there is what it was when the host was lost: nothing of it goes on.
    world.set_faults(slow());
    world.end_session(host.backend().session()).await;
    let other = Guest::new(&client(&world, 2, None));
    for (number, (ino, model)) in files.iter().enumerate() {
        let handle = other.open(*ino, libc::O_RDONLY).await.unwrap();
        let data = other.read(*ino, handle, 0, 1 << 20).await.unwrap();
        check(&world, number, &model.lock().unwrap(), &data);
    }
}

#[test]
fn what_was_synced_survives_its_host() {
    seeds(100, |world| loses_its_host(world, slow(), None));
}

#[test]
fn what_was_synced_survives_its_host_whatever_is_lost_before() {
    let faults = Faults {
        no_space: 0.0,
        link_break: 0.02,
        ..crate::faulty()
    };
    seeds(60, move |world| loses_its_host(world, faults, None));
}

/// Most bytes of one request of a stream, and of all that a host buffers: no more than goes into one commit.
const STREAM_REQUEST_MAX: u64 = 300_000;
const STREAM_BYTES_MAX: usize = 7 << 20;

/// A stream of requests of any length, until its host is lost. What is there ends with one of them.
async fn stream_loses_its_host(world: World) {
    let host = client(&world, 1, None);
    let guest = Guest::new(&host);
    let (ino, handle) = guest.create(ROOT, "stream", RDWR).await.unwrap();
    let ends = Arc::new(Mutex::new(vec![0]));
    world.set_faults(slow());
    let stream = {
        let (world, guest, ends) = (world.clone(), guest.clone(), Arc::clone(&ends));
        async move {
            let mut end = 0;
            while end < STREAM_BYTES_MAX {
                let data = vec![1; 1 + world.runtime.below(STREAM_REQUEST_MAX) as usize];
                let offset = end as u64;
                end += data.len();
                ends.lock().unwrap().push(end);
                guest.write(ino, handle, offset, &data).await.unwrap();
                let pause = Duration::from_millis(world.runtime.below(30));
                world.runtime.sleep(pause).await;
            }
        }
    };
    drop(world.runtime.spawn(stream));
    let life = Duration::from_millis(100 + world.runtime.below(900));
    world.runtime.sleep(life).await;
    host.backend().crash();
    world.end_session(host.backend().session()).await;
    let other = Guest::new(&client(&world, 2, None));
    let size = other.getattr(ino).await.unwrap().size as usize;
    let ends = ends.lock().unwrap();
    assert!(ends.contains(&size), "{size} is none of the ends {ends:?}");
}

#[test]
fn a_request_is_there_as_a_whole_or_not_at_all() {
    seeds(100, stream_loses_its_host);
}
