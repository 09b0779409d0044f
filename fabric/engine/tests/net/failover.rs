//! Volumes on three nodes, through the engines that ship: nodes die and come back, leases move.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use fabric_types::io::IoError;
use fabric_types::membership::ReplicaState;
use fabric_types::{Epoch, NodeId};

use super::meta::{Cluster, layer_of};
use super::rig::{MIB, pattern};

#[test]
fn what_is_written_is_on_all_three_nodes_and_devices() {
    for devices in [1, 3] {
        let mut cluster = Cluster::start(3, devices);
        let volume = cluster.open(1, 7);
        let mut io = cluster.fabric(1).volume_io(&volume).unwrap();
        let bytes = pattern(1, 24 << 20);
        io.write_at(0, &bytes).unwrap();
        io.flush().unwrap();
        for node in 1..=3 {
            cluster.trust_only(node);
            let mut back = vec![0; bytes.len()];
            io.read_at(0, &mut back).unwrap();
            assert!(back == bytes, "node {node}");
            assert_eq!(cluster.fabric(node).layers(), [layer_of(7)]);
        }
    }
}

#[test]
fn what_was_flushed_is_read_on_every_node_without_the_lease() {
    let mut cluster = Cluster::start(3, 1);
    let volume = cluster.open(1, 7);
    let mut io = cluster.fabric(1).volume_io(&volume).unwrap();
    let bytes = pattern(1, 8 << 20);
    io.write_at(0, &bytes).unwrap();
    io.flush().unwrap();
    let flushed = cluster.fabric(1).map_epoch();
    let mut readers = Vec::new();
    for node in 1..=3 {
        let fabric = cluster.fabric(node);
        assert!(fabric.wait_for_map(flushed, Duration::from_secs(10)));
        let reader = cluster.open_for_reading(node, 7);
        let mut reader = fabric.volume_io(&reader).unwrap();
        let mut back = vec![0; bytes.len()];
        reader.read_at(0, &mut back).unwrap();
        assert!(back == bytes, "node {node}");
        assert_eq!(reader.write_at(0, &bytes[..4096]), Err(IoError::ReadOnly));
        assert_eq!(reader.zero(0, 4096), Err(IoError::ReadOnly));
        readers.push(reader);
    }
    let newer = Epoch(flushed.0 + 1);
    let fabric = cluster.fabric(1);
    assert!(!fabric.wait_for_map(newer, Duration::from_millis(1)));
    // The holder's lease is none of the readers' business, and they go on without a node.
    io.write_at(8 << 20, &bytes[..4096]).unwrap();
    readers.truncate(2);
    cluster.kill(3);
    io.write_at(16 << 20, &bytes[..4096]).unwrap();
    io.flush().unwrap();
    for mut reader in readers {
        let mut back = vec![0; bytes.len()];
        reader.read_at(0, &mut back).unwrap();
        assert!(back == bytes);
        reader.read_at(16 << 20, &mut back[..4096]).unwrap();
        assert!(back[..4096] == bytes[..4096]);
    }
}

#[test]
fn write_costs_one_round_trip_per_peer_and_a_read_costs_none() {
    let mut cluster = Cluster::start(3, 1);
    let volume = cluster.open(1, 7);
    let mut io = cluster.fabric(1).volume_io(&volume).unwrap();
    // So that it is taken over.
    io.write_at(0, &pattern(1, 4096)).unwrap();
    let traffic = |cluster: &Cluster| {
        let all = [1, 2, 3].map(|node| cluster.fabric(node).traffic());
        all.map(|t| (t.asked, t.served))
    };
    let before = traffic(&cluster);
    for n in 0..100 {
        io.write_at(n * 8192, &pattern(n, 4096)).unwrap();
    }
    let after = traffic(&cluster);
    let grown = |i: usize| (after[i].0 - before[i].0, after[i].1 - before[i].1);
    assert_eq!([0, 1, 2].map(grown), [(200, 0), (0, 100), (0, 100)]);
    let mut back = vec![0; 4096];
    for n in 0..100 {
        io.read_at(n * 8192, &mut back).unwrap();
    }
    // One that is slower than most is asked of another replica, too: few are, however busy the machine is.
    let [reads, ..] = traffic(&cluster);
    assert!(reads.0 - after[0].0 < 50, "{} of 100", reads.0 - after[0].0);
}

#[test]
fn node_killed_under_load_copies_only_what_it_missed() {
    let mut cluster = Cluster::start(3, 2);
    let volume = cluster.open(1, 7);
    let mut io = cluster.fabric(1).volume_io(&volume).unwrap();
    let mut expected = pattern(1, 32 << 20);
    io.write_at(0, &expected).unwrap();
    cluster.kill(3);
    cluster.set_admission_closed(true);
    // Every chunk is touched, but little of each.
    for chunk in 0..8 {
        let at = chunk * (4 << 20) + 8192;
        let part = pattern(100 + chunk as u64, 16384);
        io.write_at(at as u64, &part).unwrap();
        expected[at..at + part.len()].copy_from_slice(&part);
    }
    io.zero(30 << 20, 1 << 20).unwrap();
    expected[30 << 20..31 << 20].fill(0);
    io.flush().unwrap();
    cluster.boot(3);
    cluster.set_admission_closed(false);
    cluster.wait_until_in_sync();
    let totals = cluster.fabric(3).resynced();
    // 4 blocks of each chunk that was written; the 256 zeroed ones carry no data.
    assert!(
        (32..=40 + 256).contains(&totals.progress.blocks),
        "{totals:?}"
    );
    cluster.trust_only(3);
    let mut back = vec![0; expected.len()];
    io.read_at(0, &mut back).unwrap();
    assert!(back == expected);
}

#[test]
fn a_node_comes_back_while_its_blocks_are_written() {
    let mut cluster = Cluster::start(3, 1);
    let volume = cluster.open(1, 7);
    let fabric = cluster.fabric(1);
    let stop = AtomicBool::new(false);
    let mut expected = vec![0; 16 << 20];
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| {
            let mut io = fabric.volume_io(&volume).unwrap();
            let mut expected = vec![0; 16 << 20];
            let mut n = 0u64;
            while !stop.load(Ordering::Acquire) {
                n += 1;
                // Sectors and whole blocks, all over the place.
                let at = (n.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40) % (31 << 10) * 512;
                let len = [512, 4096, 1536, 16384][n as usize % 4].min((16 << 20) - at as usize);
                let part = pattern(n, len);
                io.write_at(at, &part).unwrap();
                expected[at as usize..at as usize + len].copy_from_slice(&part);
            }
            expected
        });
        for node in [3, 2, 3] {
            std::thread::sleep(Duration::from_millis(150));
            cluster.kill(node);
            std::thread::sleep(Duration::from_millis(150));
            cluster.boot(node);
            cluster.wait_until_in_sync();
        }
        stop.store(true, Ordering::Release);
        expected = writer.join().unwrap();
    });
    let mut io = fabric.volume_io(&volume).unwrap();
    for node in 1..=3 {
        cluster.trust_only(node);
        let mut back = vec![0; expected.len()];
        io.read_at(0, &mut back).unwrap();
        assert!(back == expected, "node {node}");
    }
}

#[test]
fn volume_is_taken_over_while_its_groups_have_different_epochs() {
    let mut cluster = Cluster::start(3, 1);
    cluster.kill(3);
    cluster.boot(3);
    // Each group was changed at another time.
    cluster.wait_until_in_sync();
    let volume = cluster.open(1, 7);
    let mut io = cluster.fabric(1).volume_io(&volume).unwrap();
    let bytes = pattern(1, 64 << 20);
    io.write_at(0, &bytes).unwrap();
    let mut back = vec![0; bytes.len()];
    io.read_at(0, &mut back).unwrap();
    assert!(back == bytes);
}

#[test]
fn a_newer_lease_on_another_node_fences_the_older_one_out() {
    let mut cluster = Cluster::start(3, 2);
    let old = cluster.open(1, 7);
    let mut before = cluster.fabric(1).volume_io(&old).unwrap();
    before.write_at(0, &pattern(1, 1 << 20)).unwrap();
    let new = cluster.open(2, 7);
    let mut after = cluster.fabric(2).volume_io(&new).unwrap();
    let mut back = vec![0; 1 << 20];
    after.read_at(0, &mut back).unwrap();
    assert!(new.is_recovered() && back == pattern(1, 1 << 20));
    assert_eq!(before.write_at(0, &pattern(2, 4096)), Err(IoError::Fenced));
    after.write_at(0, &pattern(3, 4096)).unwrap();
    after.read_at(0, &mut back[..4096]).unwrap();
    assert!(back[..4096] == pattern(3, 4096));
}

/// Nodes 2 and 3 die, and stay out.
fn leave_alone(cluster: &mut Cluster) {
    cluster.set_admission_closed(true);
    for node in [2, 3] {
        cluster.kill(node);
    }
    cluster.wait_until("alone", |groups| {
        let others = |m: &&fabric_types::membership::Member| m.node != NodeId(1);
        let mut members = groups.iter().flatten().filter(others);
        members.all(|member| member.state == ReplicaState::Out)
    });
}

#[test]
fn writes_wait_with_fewer_than_two_in_sync_and_reads_do_not() {
    let mut cluster = Cluster::start(3, 1);
    let volume = cluster.open(1, 7);
    let fabric = cluster.fabric(1);
    let mut io = fabric.volume_io(&volume).unwrap();
    io.write_at(0, &pattern(1, MIB as usize)).unwrap();
    leave_alone(&mut cluster);
    let mut back = vec![0; 4096];
    io.read_at(0, &mut back).unwrap();
    assert!(back == pattern(1, MIB as usize)[..4096]);
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| {
            let mut io = fabric.volume_io(&volume).unwrap();
            let result = io.write_at(0, &pattern(2, 4096));
            done.store(true, Ordering::Release);
            result
        });
        std::thread::sleep(Duration::from_millis(300));
        assert!(!done.load(Ordering::Acquire), "it rests on one copy");
        cluster.boot(2);
        cluster.set_admission_closed(false);
        writer.join().unwrap().unwrap();
    });
    cluster.boot(3);
    cluster.wait_until_in_sync();
    cluster.trust_only(3);
    io.read_at(0, &mut back).unwrap();
    assert!(back == pattern(2, 4096));
}

#[test]
fn revoke_ends_waiting_requests_and_a_newer_lease_reopens() {
    let mut cluster = Cluster::start(3, 1);
    let fabric = cluster.fabric(1);
    let mut back = vec![0; 4096];
    // Requests wait for a map, and for their lease.
    for lease_ends in [false, true] {
        let volume = cluster.open(1, 7);
        let mut io = fabric.volume_io(&volume).unwrap();
        io.write_at(0, &pattern(1, 4096)).unwrap();
        if lease_ends {
            volume.set_lease_until(Instant::now());
        } else {
            leave_alone(&mut cluster);
        }
        let ended = std::thread::scope(|scope| {
            let writer = scope.spawn(|| {
                let mut io = fabric.volume_io(&volume).unwrap();
                io.write_at(0, &pattern(2, 4096))
            });
            std::thread::sleep(Duration::from_millis(300));
            assert!(!writer.is_finished(), "nothing to wait for");
            volume.revoke();
            writer.join().unwrap()
        });
        assert_eq!(ended, Err(IoError::Fenced));
        assert_eq!(io.read_at(0, &mut back), Err(IoError::Fenced));
        if !lease_ends {
            cluster.boot(2);
            cluster.boot(3);
            cluster.set_admission_closed(false);
            cluster.wait_until_in_sync();
        }
    }
    let volume = cluster.open(1, 7);
    let mut io = fabric.volume_io(&volume).unwrap();
    io.write_at(0, &pattern(3, 4096)).unwrap();
    io.read_at(0, &mut back).unwrap();
    assert!(back == pattern(3, 4096));
}

#[test]
fn node_that_lost_all_devices_uses_data_of_other_nodes() {
    let mut cluster = Cluster::start(3, 1);
    let bytes = pattern(1, 8 << 20);
    {
        let volume = cluster.open(1, 7);
        let mut io = cluster.fabric(1).volume_io(&volume).unwrap();
        io.write_at(0, &bytes).unwrap();
        io.flush().unwrap();
    }
    cluster.set_admission_closed(true);
    cluster.kill(1);
    cluster.lose(1, 0);
    cluster.boot_lacking(1);
    // Whoever starts is told the map: this node's replicas are out, and nobody lets them in.
    cluster.let_go(1);
    cluster.take_in(1);
    let fabric = cluster.fabric(1);
    assert!(fabric.devices().is_empty() && fabric.layers().is_empty());
    let (path, why) = &fabric.lacking()[0];
    assert!(path.ends_with("node-1-0"), "{}", path.display());
    assert!(why.to_string().contains("does not exist"), "{why}");
    let volume = cluster.open(1, 7);
    let mut io = fabric.volume_io(&volume).unwrap();
    let mut back = vec![0; bytes.len()];
    io.read_at(0, &mut back).unwrap();
    assert!(back == bytes);
    io.write_at(0, &pattern(2, 4096)).unwrap();
    io.flush().unwrap();
    io.read_at(0, &mut back[..4096]).unwrap();
    assert!(back[..4096] == pattern(2, 4096));
    fabric.checkpoint().unwrap();
}

#[test]
fn a_node_that_has_lost_one_of_its_devices_keeps_the_others() {
    let mut cluster = Cluster::start(3, 3);
    let volume = cluster.open(1, 7);
    let mut io = cluster.fabric(1).volume_io(&volume).unwrap();
    io.write_at(0, &pattern(1, 8 << 20)).unwrap();
    cluster.set_admission_closed(true);
    cluster.kill(3);
    cluster.lose(3, 1);
    cluster.boot_lacking(3);
    let fabric = cluster.fabric(3);
    assert_eq!((fabric.devices().len(), fabric.lacking().len()), (2, 1));
    assert!(fabric.lacking()[0].0.ends_with("node-3-1"));
    let mut back = vec![0; 8 << 20];
    io.read_at(0, &mut back).unwrap();
    assert!(back == pattern(1, 8 << 20));
}
