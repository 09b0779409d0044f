//! Clients of several hosts over one namespace, in one deterministic process: the namespace is the real one,
//! segments are in memory and check what clients do to them.
//!
//! `FS_CLIENT_SEEDS=N` runs so many seeds of each test instead of a few, `FS_CLIENT_SEED=N` a single one.

mod appends;
mod buffering;
mod caching;
mod coherence;
mod content;
mod data_caching;
mod discards;
mod durability;
mod executor;
mod guest;
mod history;
mod host;
mod hostile;
mod leader;
mod looked_up;
mod mutations;
mod names;
mod operations;
mod orphans;
mod overwriting;
mod pool;
mod registers;
mod sessions;
mod temporary;
mod world;
mod writes;

use std::future::Future;
use std::time::Duration;

use executor::Runtime;
use world::{Faults, World, Writes};

/// Runs a test in a world without faults, first with writes that are written through, then with buffered
/// ones.
fn in_world<F: Future<Output = ()> + Send + 'static>(body: impl Fn(World) -> F) {
    run_seed(1, body);
}

/// The same with one kind of writes.
fn in_world_with<F: Future<Output = ()> + Send + 'static>(
    writes: Writes,
    body: impl FnOnce(World) -> F,
) {
    run_unchecked(1, writes, body).check();
}

/// Runs a test with one seed, and with writes of either kind.
fn run_seed<F: Future<Output = ()> + Send + 'static>(seed: u64, body: impl Fn(World) -> F) {
    for writes in [Writes::Through, Writes::Buffered] {
        let named = NameOnPanic(seed, writes);
        run_unchecked(seed, writes, &body).check();
        drop(named);
    }
}

/// Runs something with one seed; the world as it is then.
fn run_unchecked<F: Future<Output = ()> + Send + 'static>(
    seed: u64,
    writes: Writes,
    body: impl FnOnce(World) -> F,
) -> World {
    let runtime = Runtime::new(seed);
    let world = World::new(runtime.clone(), writes);
    runtime.run(body(world.clone()));
    world
}

/// Runs a test with several seeds, each named if it fails.
fn seeds<F: Future<Output = ()> + Send + 'static>(count: u64, body: impl Fn(World) -> F) {
    let number = |name| {
        std::env::var(name)
            .ok()
            .map(|text| text.parse::<u64>().unwrap())
    };
    let seeds = match number("FS_CLIENT_SEED") {
        Some(seed) => seed..seed + 1,
        None => 0..number("FS_CLIENT_SEEDS").unwrap_or(count),
    };
    for seed in seeds {
        run_seed(seed, &body);
    }
}

struct NameOnPanic(u64, Writes);

impl Drop for NameOnPanic {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("this was FS_CLIENT_SEED={} {:?}", self.0, self.1);
        }
    }
}

/// Delays alone.
fn slow() -> Faults {
    Faults {
        delay_max: Duration::from_millis(3),
        ..Faults::default()
    }
}

/// Whatever may go wrong but for the end of sessions.
fn faulty() -> Faults {
    Faults {
        request_lost: 0.03,
        request_late: 0.03,
        reply_lost: 0.03,
        unavailable: 0.01,
        no_space: 0.01,
        data_error: 0.01,
        ..slow()
    }
}
