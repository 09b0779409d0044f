//! Reads see all writes that were answered before them, on any host: parts of files are registers, each
//! written as a whole by guests of several hosts.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use fs_client::OwnedOperation;
use fuse_codec::Handle;
use futures_util::future::{Either, select};

use crate::guest::{Guest, RDWR, ROOT, client_with, options};
use crate::host::Mutation;
use crate::world::{Faults, World};
use crate::{faulty, seeds, slow};

const HOSTS: u64 = 3;
const GUESTS: usize = 2;
const FILES: usize = 2;
const STEPS: usize = 40;

/// Begins and lengths: some share a block, some lie in two, one in several.
const REGISTERS: [(u64, usize); 5] = [
    (0, 1200),
    (1500, 1200),
    (3500, 1200),
    (8192, 4096),
    (20_000, 20_000),
];

/// A write of a register.
#[derive(Debug)]
struct Written {
    value: u64,
    from: Duration,
    /// By when it was certainly done: it was answered, or somebody read it. None before.
    done: Option<Duration>,
}

#[derive(Debug, Default)]
struct Register(Vec<Written>);

impl Register {
    fn begin(&mut self, value: u64, from: Duration) {
        let done = None;
        self.0.push(Written { value, from, done });
    }

    fn done(&mut self, value: u64, at: Duration) {
        let mut all = self.0.iter_mut();
        let written = all.find(|written| written.value == value);
        if let Some(written) = written {
            written.done = Some(written.done.map_or(at, |done| done.min(at)));
        }
    }

    /// A read between these times found this value; what is wrong with that.
    fn read(&mut self, value: u64, (from, to): (Duration, Duration)) -> Option<String> {
        let (began, done) = match self.0.iter().find(|written| written.value == value) {
            Some(written) => (written.from, written.done),
            None if value == 0 => (Duration::ZERO, Some(Duration::ZERO)),
            None => return Some(format!("{value} was never written")),
        };
        if began > to {
            return Some(format!("{value} was written later"));
        }
        // One that began after this one was done, and was done before the read began.
        let newer = self.0.iter().find(|newer| {
            let is_before = newer.done.is_some_and(|newer_done| newer_done < from);
            is_before && done.is_some_and(|done| done < newer.from)
        });
        let newer = newer.map(|newer| {
            format!("{value} was read in {from:?}..{to:?}, done {done:?}, before {newer:?}")
        });
        self.done(value, to);
        newer
    }
}

/// What all guests know.
#[derive(Default)]
struct Shared {
    registers: Vec<[Register; REGISTERS.len()]>,
    /// Bytes that a file has at least.
    sizes: Vec<u64>,
    last: u64,
}

struct User {
    world: World,
    guest: Guest,
    files: Vec<(u64, Handle)>,
    shared: Arc<Mutex<Shared>>,
}

impl User {
    fn now(&self) -> Duration {
        self.world.runtime.now()
    }

    fn below(&self, end: usize) -> usize {
        self.world.runtime.below(end as u64) as usize
    }

    async fn write(&self, file: usize, at: usize) {
        let ((ino, handle), (offset, length)) = (self.files[file], REGISTERS[at]);
        let value = {
            let mut shared = self.shared.lock().unwrap();
            shared.last += 1;
            let value = shared.last;
            shared.registers[file][at].begin(value, self.now());
            value
        };
        let bits = match self.below(10) {
            0 => RDWR | libc::O_SYNC,
            1 => RDWR | libc::O_DIRECT,
            _ => RDWR,
        };
        let data: Vec<u8> = value.to_le_bytes().repeat(length / 8 + 1)[..length].to_vec();
        let writing = self.guest.write_with(ino, handle, offset, &data, bits);
        let patience = match self.below(20) {
            0 => Duration::from_micros(self.world.runtime.below(8000)),
            _ => Duration::from_secs(3600),
        };
        let patience = Box::pin(self.world.runtime.sleep(patience));
        // Dropped, it may be done later.
        let written = select(Box::pin(writing), patience).await;
        if let Either::Left((Ok(_), _)) = written {
            let mut shared = self.shared.lock().unwrap();
            shared.registers[file][at].done(value, self.now());
            let end = offset + length as u64;
            shared.sizes[file] = shared.sizes[file].max(end);
        }
    }

    async fn read(&self, file: usize, at: usize) {
        let ((ino, handle), (offset, length)) = (self.files[file], REGISTERS[at]);
        let from = self.now();
        let size = self.shared.lock().unwrap().sizes[file];
        let Ok(mut data) = self.guest.read(ino, handle, offset, length as u32).await else {
            return;
        };
        if (data.len() as u64) < size.saturating_sub(offset).min(length as u64) {
            let what = format!("{} bytes at {offset} of {size}", data.len());
            self.world.violation(what);
        }
        // Another register's write may have ended before this one's begin.
        data.resize(length, 0);
        let value = u64::from_le_bytes(data[..8].try_into().unwrap());
        let whole = value.to_le_bytes().repeat(length / 8 + 1);
        let what = match data[..] == whole[..length] {
            false => Some(format!("a torn write at {offset}, of {value}")),
            true => {
                let mut shared = self.shared.lock().unwrap();
                shared.registers[file][at].read(value, (from, self.now()))
            }
        };
        if let Some(what) = what {
            self.world
                .violation(format!("file {file}, register {at}: {what}"));
        }
    }

    async fn stat(&self, file: usize) {
        let least = self.shared.lock().unwrap().sizes[file];
        if let Ok(attr) = self.guest.getattr(self.files[file].0).await {
            self.check_size(attr.size, least);
        }
    }

    async fn look_up(&self, file: usize) {
        let least = self.shared.lock().unwrap().sizes[file];
        if let Ok(entry) = self.guest.lookup(ROOT, &name(file)).await {
            self.check_size(entry.attr.size, least);
        }
    }

    fn check_size(&self, size: u64, least: u64) {
        if size < least {
            self.world
                .violation(format!("{size} bytes, and {least} were written"));
        }
    }

    async fn run(self, writes: f64) {
        for _ in 0..STEPS {
            let (file, at) = (self.below(FILES), self.below(REGISTERS.len()));
            if self.world.runtime.happens(writes) {
                self.write(file, at).await;
            } else {
                match self.below(10) {
                    0 => self.stat(file).await,
                    1 => self.look_up(file).await,
                    2 => {
                        let (ino, handle) = self.files[file];
                        let _ = self.guest.done(ino, OwnedOperation::Fsync { handle }).await;
                    }
                    3 => {
                        let (ino, handle) = self.files[file];
                        let flush = OwnedOperation::Flush { handle };
                        let _ = self.guest.done(ino, flush).await;
                    }
                    _ => self.read(file, at).await,
                }
            }
            let is_long = self.below(6) == 0;
            let pause = self.world.runtime.below(if is_long { 80 } else { 4 });
            self.world.runtime.sleep(Duration::from_millis(pause)).await;
        }
    }
}

fn name(file: usize) -> String {
    format!("r{file}")
}

/// What goes wrong besides faults of calls.
#[derive(Clone, Copy, Default)]
pub struct Plan {
    pub faults: Faults,
    pub leaders: bool,
}

/// How often a guest writes.
fn chance_of_writing(style: u64, host: u64, guest: usize) -> f64 {
    match (style, host, guest) {
        // One host writes, others look now and then.
        (0, 1, _) => 0.7,
        (0, ..) => 0.02,
        // One guest does.
        (1, 1, 0) => 0.8,
        (1, ..) => 0.0,
        // All do.
        _ => 0.4,
    }
}

pub async fn registers(world: World, plan: Plan, mutation: Option<Mutation>) {
    let mut options = options(&world, mutation);
    if world.runtime.happens(0.2) && options.dirty_bytes_max > 0 {
        options.dirty_bytes_max = 100 << 10;
    }
    let shared = Arc::new(Mutex::new(Shared {
        registers: (0..FILES).map(|_| Default::default()).collect(),
        sizes: vec![0; FILES],
        last: 0,
    }));
    let style = world.runtime.below(3);
    let mut users = Vec::new();
    for host in 1..=HOSTS {
        let client = client_with(&world, host, mutation, options.clone());
        for guest in 0..GUESTS {
            let user = Guest::new(&client);
            let mut files = Vec::new();
            for file in 0..FILES {
                files.push(user.create(ROOT, &name(file), RDWR).await.unwrap());
            }
            let (world, shared) = (world.clone(), Arc::clone(&shared));
            let user = User {
                world,
                guest: user,
                files,
                shared,
            };
            users.push((user, chance_of_writing(style, host, guest)));
        }
    }
    world.set_faults(plan.faults);
    let running = users.into_iter();
    let running: Vec<_> = running
        .map(|(user, writes)| world.runtime.spawn(user.run(writes)))
        .collect();
    let changing = world.clone();
    let leaders = async move {
        if !plan.leaders {
            std::future::pending::<()>().await;
        }
        loop {
            let pause = Duration::from_millis(20 + changing.runtime.below(200));
            changing.runtime.sleep(pause).await;
            changing.change_leader();
        }
    };
    let ended = async {
        for user in running {
            user.await.unwrap();
        }
    };
    select(Box::pin(ended), Box::pin(leaders)).await;
}

#[test]
fn reads_see_what_was_written_before_on_any_host() {
    let faults = Faults {
        answer_late: 0.05,
        ..slow()
    };
    let leaders = false;
    seeds(60, |world| registers(world, Plan { faults, leaders }, None));
}

#[test]
fn reads_see_what_was_written_before_whatever_is_lost() {
    let faults = Faults {
        answer_late: 0.05,
        link_break: 0.02,
        ..faulty()
    };
    let leaders = false;
    seeds(60, |world| registers(world, Plan { faults, leaders }, None));
}

#[test]
fn reads_see_what_was_written_before_while_leaders_change() {
    let faults = crate::coherence::links();
    let leaders = true;
    seeds(60, |world| registers(world, Plan { faults, leaders }, None));
}
