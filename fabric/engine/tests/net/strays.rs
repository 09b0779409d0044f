//! What a group leaves behind where it has no replica any more.

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, Ordering};

use super::meta::{Cluster, all_groups, layer_of};
use super::rig::pattern;

#[test]
fn what_a_group_left_behind_is_freed_and_comes_again_with_it() {
    for devices in [1, 3] {
        let mut cluster = Cluster::start(3, devices);
        let volume = cluster.open(1, 7);
        let mut io = cluster.fabric(1).volume_io(&volume).unwrap();
        let mut bytes = pattern(1, 24 << 20);
        io.write_at(0, &bytes).unwrap();
        let strays = |cluster: &Cluster, node: u64, complete: &HashSet<_>| {
            let fabric = cluster.fabric(node);
            fabric.drop_strays(cluster.epoch(), complete).unwrap()
        };
        let used = |cluster: &Cluster| -> u64 {
            let devices = cluster.fabric(3).devices();
            devices.iter().map(|device| device.used_bytes).sum()
        };
        assert_eq!(strays(&cluster, 3, &all_groups()), 0, "it is at home");
        cluster.let_go(3);
        assert_eq!(strays(&cluster, 3, &HashSet::new()), 0, "it may be needed");
        assert_eq!(cluster.fabric(3).layers(), [layer_of(7)]);
        let before = used(&cluster);
        assert!(before >= 24 << 20);
        assert_eq!(strays(&cluster, 3, &all_groups()), 6);
        for _ in 0..3 {
            cluster.fabric(3).checkpoint().unwrap();
        }
        assert!(used(&cluster) < before - (20 << 20));
        for node in [1, 2, 3] {
            assert_eq!(strays(&cluster, node, &all_groups()), 0);
        }
        let part = pattern(2, 1 << 20);
        io.write_at(3 << 20, &part).unwrap();
        bytes[3 << 20..4 << 20].copy_from_slice(&part);
        cluster.take_in(3);
        cluster.wait_until_in_sync();
        cluster.trust_only(3);
        let mut back = vec![0; bytes.len()];
        io.read_at(0, &mut back).unwrap();
        assert!(back == bytes);
    }
}

#[test]
fn nothing_is_freed_of_a_group_that_comes_back_meanwhile() {
    let mut cluster = Cluster::start(3, 1);
    let volume = cluster.open(1, 7);
    let fabric = cluster.fabric(1);
    let third = cluster.fabric(3);
    let (epoch, stop) = (cluster.epoch(), AtomicBool::new(false));
    let mut expected = Vec::new();
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| {
            let mut io = fabric.volume_io(&volume).unwrap();
            let mut expected = vec![0; 16 << 20];
            let mut n = 0u64;
            while !stop.load(Ordering::Acquire) {
                n += 1;
                let at = (n.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40) % (4 << 10) * 4096;
                let part = pattern(n, 4096);
                io.write_at(at, &part).unwrap();
                expected[at as usize..at as usize + 4096].copy_from_slice(&part);
            }
            expected
        });
        // It goes by an old look at the cluster, as one that is slow does.
        scope.spawn(|| {
            while !stop.load(Ordering::Acquire) {
                third.drop_strays(epoch, &all_groups()).unwrap();
            }
        });
        for _ in 0..20 {
            cluster.let_go(3);
            std::thread::sleep(std::time::Duration::from_millis(20));
            cluster.take_in(3);
            cluster.wait_until_in_sync();
        }
        stop.store(true, Ordering::Release);
        expected = writer.join().unwrap();
    });
    cluster.trust_only(3);
    let mut io = cluster.fabric(1).volume_io(&volume).unwrap();
    let mut back = vec![0; expected.len()];
    io.read_at(0, &mut back).unwrap();
    assert!(back == expected);
}
