//! The device with a filesystem in memory behind it, driven by a guest made by hand.

mod chains;
mod config;
mod hostile;
mod in_flight;
mod operations;
mod sessions;
mod socket;

use std::sync::Arc;
use std::time::{Duration, Instant};

use fuse_codec::NodeId;
use vhost_backend::testing::QueueOptions;

use crate::memory_fs::{MemoryFilesystem, MemoryService};
use crate::testing::{FsGuest, options};

const ROOT: NodeId = NodeId::ROOT;

type Guest = FsGuest<MemoryService>;

fn guest_with(read_only: bool, rings: QueueOptions) -> (Guest, Arc<MemoryFilesystem>) {
    let filesystem = MemoryFilesystem::new();
    let make = |_| MemoryService::new();
    let guest = FsGuest::new(&filesystem, options(2, read_only), rings, make);
    (guest, filesystem)
}

/// A guest that has mounted.
fn guest() -> Guest {
    let (mut guest, _) = guest_with(false, QueueOptions::default());
    guest.init().unwrap();
    guest
}

/// Bytes that differ from place to place.
fn pattern(len: usize) -> Vec<u8> {
    (0..len)
        .map(|i| (i as u8).wrapping_mul(31) ^ (i >> 8) as u8)
        .collect()
}

/// Waits until something has happened.
fn eventually(what: &str, mut happened: impl FnMut() -> bool) {
    let until = Instant::now() + Duration::from_secs(60);
    while !happened() {
        assert!(Instant::now() < until, "still not: {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}
