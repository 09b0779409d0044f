//! What runs inside the virtual machines: scenarios on real verbs. Each prints what it saw, and fails if that
//! is not what is promised.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::{Result, bail};

mod checks;
mod devices;
mod failures;
mod forgery;
mod forks;
mod kit;
mod lanes;
mod leaks;
mod machines;
mod transfers;
mod windows;

/// Allocations of this process.
static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

struct Counting;

// SAFETY: everything is passed on to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn allocations() -> u64 {
    ALLOCATIONS.load(Ordering::Relaxed)
}

fn main() -> Result<()> {
    tracing_subscriber::fmt()
        .with_writer(std::io::stderr)
        .with_ansi(false)
        .init();
    let args: Vec<String> = std::env::args().skip(1).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    match args[..] {
        ["devices"] => devices::show(),
        ["check"] => checks::check(None),
        ["check", address] => checks::check(Some(address)),
        ["send"] => transfers::send(),
        ["read-write"] => transfers::read_and_write(),
        ["chains"] => transfers::chains(),
        ["no-allocation"] => transfers::no_allocation(),
        ["events"] => transfers::events(),
        ["windows"] => windows::open_and_close(),
        ["windows-refused"] => windows::refused(),
        ["windows-dropped"] => windows::dropped_in_any_order(),
        ["receiver-not-ready"] => failures::receiver_not_ready(),
        ["flushed"] => failures::flushed(),
        ["nobody"] => failures::nobody_answers(),
        ["link-down"] => failures::link_down(),
        ["refused-early"] => failures::refused_early(),
        ["pinned"] => failures::too_much_pinned(),
        ["leaks", registrations, pairs] => leaks::none(registrations.parse()?, pairs.parse()?),
        ["fork"] => forks::memory_stays_whole(),
        ["lanes", address] => lanes::lanes(address),
        ["forgery", address] => forgery::forgery(address),
        ["serve", listen] => machines::serve(listen.parse()?),
        ["ask", server, how] => machines::ask(server.parse()?, how),
        _ => bail!("no such scenario: {args:?}"),
    }
}
