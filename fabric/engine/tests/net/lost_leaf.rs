//! A map page of one replica's device is damaged, and the cluster makes it whole by itself.

use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::{Duration, Instant};

use fabric_store::testing::map_pages::MapPages;
use fabric_types::block::BLOCK_BYTES;
use fabric_types::ids::LayerId;
use fabric_types::membership::ReplicaState;

use super::meta::{Cluster, layer_of};
use super::rig::{MIB, pattern};

const WAIT_MAX: Duration = Duration::from_secs(60);
/// Volumes that together have more map pages than the smallest cache.
const VOLUMES: [u64; 3] = [7, 8, 9];
const VOLUME_BYTES: u64 = 64 * MIB;

/// Damages all map pages of a chunk.
fn damage_map_of(path: &Path, layer: LayerId, chunk: u32) {
    let device = OpenOptions::new()
        .read(true)
        .write(true)
        .open(path)
        .unwrap();
    let pages = MapPages::read(&|offset| {
        let mut page = [0; BLOCK_BYTES];
        device.read_exact_at(&mut page, offset).unwrap();
        page
    });
    let pages = pages.leaves.iter();
    let pages = pages.filter(|page| (page.layer, page.chunk) == (layer, chunk));
    let mut damaged = 0;
    for page in pages {
        device.write_all_at(&[0x5a; 100], page.offset + 40).unwrap();
        damaged += 1;
    }
    device.sync_data().unwrap();
    assert!(damaged > 0, "it is there");
}

/// A block of each map page of all volumes is written; what the first one holds.
fn written(cluster: &mut Cluster) -> Vec<u8> {
    let mut expected = Vec::new();
    for volume in VOLUMES {
        let handle = cluster.open(1, volume);
        let mut io = cluster.fabric(1).volume_io(&handle).unwrap();
        let mut content = vec![0; VOLUME_BYTES as usize];
        for leaf in 0..VOLUME_BYTES / MIB {
            let at = (leaf * MIB + 8192) as usize;
            let part = pattern(volume * 1000 + leaf, 3 * BLOCK_BYTES);
            io.write_at(at as u64, &part).unwrap();
            content[at..at + part.len()].copy_from_slice(&part);
        }
        io.flush().unwrap();
        expected.push(content);
    }
    expected.swap_remove(0)
}

fn assert_whole(cluster: &mut Cluster, node: u64, expected: &[u8]) {
    let handle = cluster.open(1, VOLUMES[0]);
    let mut io = cluster.fabric(1).volume_io(&handle).unwrap();
    cluster.trust_only(node);
    let mut back = vec![0xee; expected.len()];
    io.read_at(0, &mut back).unwrap();
    assert!(back == expected, "node {node}");
}

#[test]
fn replica_with_a_damaged_map_page_comes_back_whole() {
    let mut cluster = Cluster::start(3, 1);
    let expected = written(&mut cluster);
    cluster.kill(3);
    damage_map_of(&cluster.path(3, 0), layer_of(VOLUMES[0]), 1);
    cluster.boot(3);
    cluster.wait_until_in_sync();
    assert_eq!(cluster.fabric(3).sync_stall(), None);
    assert!(cluster.fabric(3).devices()[0].scrub.findings.is_empty());
    assert_whole(&mut cluster, 3, &expected);
}

#[test]
fn damaged_map_page_of_a_replica_in_sync_is_found_and_repaired() {
    let mut cluster = Cluster::start(3, 1);
    let expected = written(&mut cluster);
    cluster.kill(3);
    cluster.boot_with(3, |config| {
        config.scrub.enabled = true;
        config.scrub.start_after_seconds = 0;
        config.scrub.pause_seconds = 0;
        config.params.leaf_cache_bytes = 0;
    });
    cluster.wait_until_in_sync();
    let status = |cluster: &Cluster| cluster.fabric(3).devices().remove(0).scrub;
    let wait_for = |cluster: &Cluster, wanted: &dyn Fn() -> bool| {
        let start = Instant::now();
        while !wanted() {
            assert!(start.elapsed() < WAIT_MAX, "{:?}", status(cluster));
            std::thread::sleep(Duration::from_millis(5));
        }
    };
    let passes = status(&cluster).passes;
    wait_for(&cluster, &|| status(&cluster).passes > passes + 1);
    assert_eq!(status(&cluster).bad_blocks, 0);
    damage_map_of(&cluster.path(3, 0), layer_of(VOLUMES[0]), 1);
    wait_for(&cluster, &|| status(&cluster).bad_blocks > 0);
    // It leaves its group, is compared, and comes back.
    wait_for(&cluster, &|| status(&cluster).findings.is_empty());
    cluster.wait_until("back", |groups| {
        let mut members = groups.iter().flatten();
        members.all(|member| member.state == ReplicaState::InSync)
    });
    let (passes, bad) = (status(&cluster).passes, status(&cluster).bad_blocks);
    wait_for(&cluster, &|| status(&cluster).passes > passes + 1);
    let later = status(&cluster);
    assert_eq!(
        (later.bad_blocks, later.findings.len(), later.stuck),
        (bad, 0, 0)
    );
    assert_whole(&mut cluster, 3, &expected);
}
