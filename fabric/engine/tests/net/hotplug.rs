//! Devices that are added to a node of several, and removed from it, while it serves.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use fabric_store::file::DeviceFile;

use super::meta::Cluster;
use super::rig::pattern;

/// After which a test hangs.
const WAIT_MAX: Duration = Duration::from_secs(30);
const BYTES: usize = 16 << 20;

#[test]
fn groups_move_to_an_added_device_and_off_a_removed_one() {
    let mut cluster = Cluster::start(3, 1);
    let volume = cluster.open(1, 7);
    let (fabric, stop) = (cluster.fabric(1), AtomicBool::new(false));
    let third = cluster.fabric(3);
    let first = third.devices()[0].label.device;
    let written = pattern(0, BYTES);
    let mut io = fabric.volume_io(&volume).unwrap();
    io.write_at(0, &written).unwrap();
    let expected = std::thread::scope(|scope| {
        let writer = scope.spawn(|| {
            let mut expected = written;
            let mut n = 0u64;
            while !stop.load(Ordering::Acquire) {
                n += 1;
                let at = (n.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40) as usize % (4 << 10) * 4096;
                let part = pattern(n, 4096);
                io.write_at(at as u64, &part).unwrap();
                expected[at..at + 4096].copy_from_slice(&part);
                if n.is_multiple_of(16) {
                    io.flush().unwrap();
                }
            }
            expected
        });
        third.add_device(&cluster.device(3, 1)).unwrap();
        cluster.let_go(3);
        cluster.take_in(3);
        cluster.wait_until_in_sync();
        let held = |index: usize| third.devices()[index].used_bytes;
        assert!(held(1) > 4 << 20, "{}", held(1));
        assert_eq!(third.evidence(&first).layers.len(), 1);

        // The first one is removed, with requests of an older map under way.
        cluster.let_go(3);
        third.remove_device(&first);
        cluster.take_in(3);
        cluster.wait_until_in_sync();
        assert_eq!(third.devices().len(), 1);
        stop.store(true, Ordering::Release);
        writer.join().unwrap()
    });
    let start = Instant::now();
    while let Err(error) = DeviceFile::open(&cluster.path(3, 0)) {
        assert!(start.elapsed() < WAIT_MAX, "{error}");
    }
    cluster.trust_only(3);
    let mut io = fabric.volume_io(&volume).unwrap();
    let mut back = vec![0; BYTES];
    io.read_at(0, &mut back).unwrap();
    assert!(back == expected);
    // A new lease fences the device that is there.
    let again = cluster.open(2, 7);
    let mut io = cluster.fabric(2).volume_io(&again).unwrap();
    io.write_at(0, &pattern(1, 4096)).unwrap();
    io.flush().unwrap();
}
