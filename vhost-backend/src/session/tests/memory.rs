//! How much memory front ends may have the daemon map and pin, and what it says of memory that can be
//! shortened.

use std::io::Write;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::{Arc, Mutex};

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use vhost::vhost_user::VhostUserFrontend;
use vhost::{VhostBackend, VhostUserMemoryRegionInfo};

use super::support::*;
use crate::memory::budget::{Limit, MemoryBudget, MemoryPolicy};
use crate::session::host::{DeviceHost, offer};
use crate::session::machine::{Action, Machine};
use crate::session::message::Region;
use crate::session::protocol::Host;
use crate::testing::{CountingRegistrar, FakeGuest, GUEST_BASE, USER_BASE};

fn limit(per_attachment: u64, total: u64) -> Limit {
    Limit {
        per_attachment,
        total,
    }
}

/// A further region, of a sparse file: what a hostile front end names costs it nothing.
fn more(bytes: u64) -> (VhostUserMemoryRegionInfo, OwnedFd) {
    let region = FakeGuest::region(GUEST_BASE + (1 << 30), bytes);
    let info = VhostUserMemoryRegionInfo {
        guest_phys_addr: region.guest.0,
        memory_size: region.size,
        userspace_addr: region.user_addr,
        mmap_offset: 0,
        mmap_handle: region.file.as_raw_fd(),
    };
    (info, region.file)
}

#[test]
fn regions_beyond_the_bound_are_refused() {
    let bench = Bench::within(limit(2 * GUEST_BYTES, 1 << 40), Limit::default());
    let mut front = Front::start(&bench);
    let (half, _file) = more(GUEST_BYTES);
    let (page, _page) = more(GUEST_BYTES + 4096);
    assert!(front.vhost.add_mem_region(&page).is_err());
    assert!(front.vhost.set_mem_table(&[front.region(), page]).is_err());
    // The old table stays, and what was reserved for the new one is given back.
    front.round_trip();
    assert_eq!(bench.budget.mapped_bytes(), GUEST_BYTES);
    front.vhost.add_mem_region(&half).unwrap();
    assert_eq!(bench.budget.mapped_bytes(), 2 * GUEST_BYTES);
    front.vhost.remove_mem_region(&half).unwrap();
    assert_eq!(bench.budget.mapped_bytes(), GUEST_BYTES);
    drop(front);
    eventually("all is given back", || bench.budget.mapped_bytes() == 0);
}

#[test]
fn a_table_at_the_bound_can_be_replaced() {
    let bench = Bench::within(
        limit(GUEST_BYTES, GUEST_BYTES),
        limit(GUEST_BYTES, GUEST_BYTES),
    );
    let mut front = Front::start(&bench);
    for _ in 0..4 {
        front.vhost.set_mem_table(&[front.region()]).unwrap();
        front.round_trip();
        assert_eq!(bench.budget.mapped_bytes(), GUEST_BYTES);
        assert_eq!(bench.budget.pinned_bytes(), GUEST_BYTES);
    }
    assert_eq!(bench.wait_for_open(1), 5, "each table was open to the card");
}

#[test]
fn all_attachments_together_are_bounded() {
    let bench = Bench::within(limit(1 << 40, 2 * GUEST_BYTES), Limit::default());
    let other = Bench::counted(
        bench.volume.clone(),
        Arc::clone(&bench.threads),
        bench.budget.clone(),
    );
    let mut front = Front::start(&bench);
    let (half, _file) = more(GUEST_BYTES);
    front.vhost.add_mem_region(&half).unwrap();
    let mut late = Front::new(&other);
    late.set_up(4);
    assert!(late.vhost.set_mem_table(&[late.region()]).is_err());
    front.round_trip();
    // What one gives back another may have.
    drop(front);
    eventually("all is given back", || bench.budget.mapped_bytes() == 0);
    for step in &SETUP[4..] {
        step(&mut late).unwrap();
    }
}

#[test]
fn what_a_failed_change_reserved_is_given_back() {
    let bench = Bench::new();
    let mut front = Front::start(&bench);
    let (fits, _file) = more(1 << 30);
    let mut overlaps = fits;
    overlaps.guest_phys_addr += 4096;
    let table = [front.region(), fits, overlaps];
    for _ in 0..8 {
        assert!(front.vhost.set_mem_table(&table).is_err());
        assert_eq!(bench.budget.mapped_bytes(), GUEST_BYTES);
        assert_eq!(bench.budget.pinned_bytes(), GUEST_BYTES);
    }
    front.round_trip();
}

#[test]
fn memory_beyond_the_bound_is_served_without_being_pinned() {
    let bench = Bench::within(Limit::default(), limit(GUEST_BYTES, GUEST_BYTES + 4096));
    let mut front = Front::start(&bench);
    let (beyond, file) = more(4096);
    bench.volume.poke(0, &[0x5a; 512]);
    front.vhost.add_mem_region(&beyond).unwrap();
    assert_eq!(
        bench.registrar.counts().regions,
        1,
        "one attachment's bound"
    );
    assert_eq!(
        front.read(0, crate::memory::GuestAddr(beyond.guest_phys_addr)),
        0
    );
    let mut found = [0; 512];
    rustix::io::pread(&file, &mut found, 0).unwrap();
    assert_eq!(found, [0x5a; 512]);
    // The metrics tell of what the card has, and that is what is counted.
    assert_eq!(bench.registrar.counts().bytes, bench.budget.pinned_bytes());
    let other = Bench::counted(
        bench.volume.clone(),
        Arc::clone(&bench.threads),
        bench.budget.clone(),
    );
    let mut late = Front::start(&other);
    assert_eq!(other.registrar.counts().regions, 0, "the bound of all");
    drop(front);
    eventually("all is given back", || bench.budget.pinned_bytes() == 0);
    late.vhost.set_mem_table(&[late.region()]).unwrap();
    late.round_trip();
    assert_eq!(other.registrar.counts().bytes, bench.budget.pinned_bytes());
    assert_eq!(other.registrar.counts().regions, 1);
}

#[test]
fn a_dirty_log_counts_with_the_memory() {
    let bench = Bench::within(limit(2 * GUEST_BYTES, 1 << 40), Limit::default());
    let front = Front::start(&bench);
    let log = |bytes: u64| {
        let file = memfd_create("log", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&file, bytes).unwrap();
        file
    };
    let (fits, beyond) = (log(GUEST_BYTES), log(GUEST_BYTES + 4096));
    let set = |file: &OwnedFd, bytes: u64| {
        let region = vhost::VhostUserDirtyLogRegion {
            mmap_size: bytes,
            mmap_offset: 0,
            mmap_handle: file.as_raw_fd(),
        };
        front.vhost.set_log_base(0, Some(region))
    };
    let _ = set(&fits, GUEST_BYTES);
    eventually("it counts", || {
        bench.budget.mapped_bytes() == 2 * GUEST_BYTES
    });
    let _ = set(&beyond, GUEST_BYTES + 4096);
    eventually("the connection ends", || bench.budget.mapped_bytes() == 0);
}

/// What is logged on this thread while `act` runs.
pub(super) fn logged(act: impl FnOnce()) -> String {
    #[derive(Clone, Default)]
    struct Lines(Arc<Mutex<Vec<u8>>>);
    impl Write for Lines {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().unwrap().write(bytes)
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }
    let lines = Lines::default();
    let writer = lines.clone();
    let subscriber = tracing_subscriber::fmt()
        .with_ansi(false)
        .with_writer(move || writer.clone())
        .finish();
    tracing::subscriber::with_default(subscriber, act);
    let bytes = lines.0.lock().unwrap().clone();
    String::from_utf8(bytes).unwrap()
}

/// Memory of these files, one region of a page each.
fn table(files: &[&OwnedFd]) -> Action {
    let region = |(at, file): (usize, &&OwnedFd)| {
        let at = 4096 * at as u64;
        let region = Region {
            guest: GUEST_BASE + at,
            size: 4096,
            user: USER_BASE + at,
            mmap_offset: 0,
        };
        (region, file.try_clone().unwrap())
    };
    Action::ReplaceMemory(files.iter().enumerate().map(region).collect())
}

fn memfd(seals: SealFlags) -> OwnedFd {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let file = memfd_create("guest", flags).unwrap();
    ftruncate(&file, 4096).unwrap();
    fcntl_add_seals(&file, seals).unwrap();
    file
}

#[test]
fn memory_without_a_seal_is_logged_once_at_info() {
    let bench = Bench::new();
    let connect = |policy: &MemoryPolicy| {
        let (device, threads) = (Arc::clone(&bench.device), Arc::clone(&bench.threads));
        DeviceHost::new(device, threads, policy.account())
    };
    let machine = Machine::new(offer(&*bench.device));
    let (open, sealed) = (memfd(SealFlags::empty()), memfd(SealFlags::SHRINK));
    let lines = |said: &str| {
        assert!(!said.contains("WARN"), "not a warning: {said}");
        said.matches("guest memory is a memfd without F_SEAL_SHRINK")
            .count()
    };
    let policy = MemoryPolicy::alone();
    let mut host = connect(&policy);
    let said = logged(|| drop(host.perform(table(&[&sealed]), &machine).unwrap()));
    assert_eq!(said, "");
    let said = logged(|| {
        for _ in 0..3 {
            host.perform(table(&[&open, &sealed, &open]), &machine)
                .unwrap();
        }
    });
    assert_eq!(lines(&said), 1, "{said}");
    // Nor does a front end that comes and goes fill the log.
    let said = logged(|| drop(connect(&policy).perform(table(&[&open]), &machine).unwrap()));
    assert_eq!(lines(&said), 0, "{said}");
    let other = MemoryPolicy::alone();
    let said = logged(|| drop(connect(&other).perform(table(&[&open]), &machine).unwrap()));
    assert_eq!(lines(&said), 1, "another attachment's: {said}");
}

#[test]
fn memory_that_is_not_pinned_is_warned_of_once() {
    let bench = Bench::new();
    let registrar = CountingRegistrar::default();
    let budget = MemoryBudget::new(Limit::default(), limit(4096, 4096));
    let policy = MemoryPolicy::new(registrar.clone(), budget);
    let (device, threads) = (Arc::clone(&bench.device), Arc::clone(&bench.threads));
    let mut host = DeviceHost::new(device, threads, policy.account());
    let machine = Machine::new(offer(&*bench.device));
    let files = [(); 3].map(|()| memfd(SealFlags::SHRINK));
    let said = logged(|| {
        for _ in 0..3 {
            let all: Vec<&OwnedFd> = files.iter().collect();
            host.perform(table(&all), &machine).unwrap();
            assert_eq!(registrar.counts().bytes, 4096);
        }
    });
    assert_eq!(said.matches("is not pinned").count(), 1, "{said}");
    assert!(
        said.contains("raise pinned_memory_max_per_attachment"),
        "{said}"
    );
}
