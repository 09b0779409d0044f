//! A data thread that panics takes the process along before anything is taken apart.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::process::ExitStatusExt;
use std::process::Command;
use std::sync::Arc;

use fabric_testing::MemVolume;
use fabric_types::io::{Engine, IoResult, Request, Submit, Tag};

use super::support::*;
use crate::blk::BlkOptions;
use crate::data_thread::{ThreadOptions, Threads};
use crate::testing::{FakeGuest, FakeQueue, QueueOptions};

/// Set in the process that panics.
const CHILD_ENV: &str = "PENSTOCK_TEST_PANIC";
const ENGINE_PANICS: &str = "the engine panics";
const ENGINE_DROPPED: &str = "the engine was dropped";

struct PanickingEngine(OwnedFd);

impl Engine for PanickingEngine {
    type Volume = MemVolume;

    unsafe fn submit(&mut self, _volume: &MemVolume, _request: &Request<'_>) -> Submit {
        panic!("{ENGINE_PANICS}");
    }

    fn kick(&mut self) {}

    fn reap(&mut self, _done: &mut dyn FnMut(Tag, IoResult)) -> usize {
        0
    }

    fn in_flight(&self) -> usize {
        0
    }

    fn wait_fd(&self) -> BorrowedFd<'_> {
        std::os::fd::AsFd::as_fd(&self.0)
    }
}

impl Drop for PanickingEngine {
    fn drop(&mut self) {
        eprintln!("{ENGINE_DROPPED}");
    }
}

fn panic_on_a_data_thread() {
    let no_core = rustix::process::Rlimit {
        current: Some(0),
        maximum: Some(0),
    };
    rustix::process::setrlimit(rustix::process::Resource::Core, no_core).unwrap();
    let options = ThreadOptions {
        threads: 1,
        ..ThreadOptions::default()
    };
    let threads = Threads::start(&options, |_| Ok(PanickingEngine(FakeQueue::event()))).unwrap();
    let mut queue = FakeQueue::new(&Arc::new(FakeGuest::new(1 << 20)), QueueOptions::default());
    let _handle = threads
        .start_queue(&device(BlkOptions::default()), queue.config(0))
        .unwrap();
    queue.request(FLUSH, 0, &[]);
}

#[test]
fn panic_ends_the_process_before_engine_and_memory_are_dropped() {
    if std::env::var_os(CHILD_ENV).is_some() {
        return panic_on_a_data_thread();
    }
    let name =
        "data_thread::tests::panics::panic_ends_the_process_before_engine_and_memory_are_dropped";
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", name, "--nocapture"])
        .env(CHILD_ENV, "1")
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains(ENGINE_PANICS), "{said}");
    assert_eq!(output.status.signal(), Some(libc::SIGABRT), "{said}");
    assert!(!said.contains(ENGINE_DROPPED), "{said}");
}
