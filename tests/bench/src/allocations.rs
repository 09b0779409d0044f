//! Allocations per request in steady state, counted from outside by a preloaded library.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};
use guest_rig::Daemon;
use guest_rig::process::run;
use serde::Serialize;

use crate::backend::{Kind, NULL_SIZE, Store, attach_afresh, penstock_options};
use crate::clock::Clock;
use crate::driver::{Direction, Driver, Load, Order};

/// The library's source.
const SOURCE: &str = include_str!("../preload/count_allocations.rs");
/// Named by the library too.
const FILE_ENV: &str = "PENSTOCK_BENCH_ALLOCATIONS";
/// Before this has passed the state is not steady: pools fill, vectors reach their size.
const WARM_UP: Duration = Duration::from_secs(1);
/// How long allocations are counted.
const COUNTED: Duration = Duration::from_secs(2);

/// What was counted.
#[derive(Debug, Serialize)]
pub struct Counted {
    /// Where data went.
    pub store: Store,
    /// The load.
    pub load: Load,
    /// Requests while it was counted.
    pub requests: u64,
    /// Allocations of the whole daemon, its control plane included.
    pub allocations: u64,
}

/// Counts on both stores.
pub fn count(
    directory: &Path,
    stores: &[Store],
    clock: Clock,
    cpus: [usize; 2],
) -> Result<Vec<Counted>> {
    let library = directory.join("libcount_allocations.so");
    let source = directory.join("count_allocations.rs");
    std::fs::write(&source, SOURCE)?;
    let rustc = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    run(Command::new(rustc)
        .args(["--edition", "2024", "-O", "--crate-type", "cdylib", "-o"])
        .arg(&library)
        .arg(&source)
        .current_dir(directory))?;
    let counter = directory.join("allocations");
    let mut counted = Vec::new();
    for store in stores {
        let (name, size) = match store {
            Store::Null => ("null", NULL_SIZE),
            Store::File => ("file", crate::backend::FILE_SIZE),
        };
        std::fs::write(&counter, 0u64.to_ne_bytes())?;
        let options = penstock_options(Kind::PenstockAdaptive, *store)?
            .cpu(cpus[1])
            .env("LD_PRELOAD", &library)
            .env(FILE_ENV, &counter);
        let mut daemon = Daemon::start_with(&directory.join(name), options)?;
        let socket = attach_afresh(&daemon, size, 1)?;
        if *store == Store::File {
            Driver::connect(&socket, 1, clock)?.fill()?;
        }
        for direction in [Direction::Read, Direction::Write] {
            let load = Load {
                direction,
                order: Order::Random,
                block: 4096,
                depth: 32,
            };
            let mut driver = Driver::connect(&socket, 1, clock)?;
            driver.run(&load, WARM_UP)?;
            let before = read(&counter)?;
            let requests = driver.run(&load, COUNTED)?.requests;
            counted.push(Counted {
                store: *store,
                load,
                requests,
                allocations: read(&counter)? - before,
            });
        }
        daemon.stop()?;
    }
    Ok(counted)
}

fn read(counter: &Path) -> Result<u64> {
    let bytes = std::fs::read(counter).context("read the counter of allocations")?;
    Ok(u64::from_ne_bytes(
        bytes
            .as_slice()
            .try_into()
            .context("the counter of allocations has another size")?,
    ))
}
