//! Guests go on while nodes come and go.

use std::fs;

use super::Cluster;
use crate::front::Front;
use crate::harness::{Daemon, eventually, text};

#[test]
fn guest_writes_and_reads_while_a_node_dies_and_returns() {
    const SECTORS: u64 = 64;
    // One in each of several chunks.
    let sector = |number: u64| number * 2048;
    let mut cluster = Cluster::of_three();
    let socket = cluster.dir.path().join("disk.sock");
    let one = cluster.node(1);
    one.ok(&["volume", "create", "disk", "64M"]);
    one.ok(&["attach", "volume", "disk", "--socket", text(&socket)]);
    let mut guest = Front::start(&socket, 1);
    let mut check = |cluster: &mut Cluster, byte: u8, change: &dyn Fn(&mut Cluster)| {
        for number in 0..SECTORS {
            guest.write(sector(number), byte);
            if number == SECTORS / 2 {
                change(cluster);
            }
        }
        for number in 0..SECTORS {
            assert_eq!(guest.read(0, sector(number)), [byte; 512], "{number}");
        }
    };
    check(&mut cluster, 1, &|_| {});
    check(&mut cluster, 2, &|cluster| cluster.kill(3));
    check(&mut cluster, 3, &|cluster| cluster.start(3));
    let whole = |daemon: &Daemon| {
        let groups = daemon.json(&["pool", "show", "default"])["groups"].clone();
        groups["degraded"] == 0
    };
    eventually(|| whole(cluster.node(1)));
    check(&mut cluster, 4, &|cluster| cluster.kill(2));
    check(&mut cluster, 5, &|cluster| cluster.start(2));
    drop(guest);
    cluster.node(1).ok(&["detach", "disk", "--yes"]);
    // Another node reads what that one wrote.
    let out = cluster.dir.path().join("out.raw");
    cluster
        .node(3)
        .ok(&["volume", "export", "disk", text(&out)]);
    let bytes = fs::read(&out).unwrap();
    for number in 0..SECTORS {
        let at = sector(number) as usize * 512;
        assert_eq!(bytes[at..at + 512], [5; 512], "{number}");
    }
}

#[test]
fn guest_survives_a_kill_of_the_metadata_leader() {
    let mut cluster = Cluster::of_three();
    let socket = cluster.dir.path().join("disk.sock");
    let two = cluster.node(2);
    two.ok(&["volume", "create", "disk", "64M"]);
    two.ok(&["attach", "volume", "disk", "--socket", text(&socket)]);
    let mut guest = Front::start(&socket, 1);
    guest.write(0, 1);
    // The first node leads: it has led since it was alone.
    cluster.kill(1);
    for sector in 0..32 {
        guest.write(sector * 2048, 2);
    }
    cluster.node(2).ok(&["volume", "create", "other", "64M"]);
    assert_eq!(guest.read(0, 0), [2; 512]);
    cluster.start(1);
    assert_eq!(guest.read(0, 31 * 2048), [2; 512]);
    let seen = cluster.node(1).json(&["volume", "list"]);
    assert_eq!(seen.as_array().unwrap().len(), 2);
}

#[test]
fn requests_wait_without_a_majority_and_resume_when_it_returns() {
    let mut cluster = Cluster::of_three();
    let socket = cluster.dir.path().join("disk.sock");
    let one = cluster.node(1);
    one.ok(&["volume", "create", "disk", "64M"]);
    one.ok(&["attach", "volume", "disk", "--socket", text(&socket)]);
    let mut guest = Front::start(&socket, 1);
    guest.write(0, 1);
    cluster.kill(2);
    cluster.kill(3);
    // The answer is waited for, whatever it takes: an error would come, too.
    let (sender, written) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        guest.write_patiently(0, 2);
        // The test may have failed meanwhile.
        let _ = sender.send(guest);
    });
    // Longer than all leases.
    std::thread::sleep(std::time::Duration::from_secs(13));
    assert!(written.try_recv().is_err(), "nobody else has it");
    cluster.start(2);
    cluster.start(3);
    let mut guest = written.recv().unwrap();
    assert_eq!(guest.read(0, 0), [2; 512]);
}
