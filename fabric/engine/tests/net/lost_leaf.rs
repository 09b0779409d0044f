//! A map page of one replica's device is damaged, and the cluster makes it whole by itself.

use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::{Duration, Instant};

use fabric::ScrubStatus;
use fabric_store::testing::map_pages::MapPages;
use fabric_types::block::BLOCK_BYTES;
use fabric_types::ids::LayerId;
use fabric_types::membership::Member;

use super::meta::{Cluster, layer_of};
use super::rig::{MIB, pattern};

const WAIT_MAX: Duration = Duration::from_secs(60);
/// Volumes that together have more map pages than the smallest cache.
const VOLUMES: [u64; 3] = [7, 8, 9];
const VOLUME_BYTES: u64 = 64 * MIB;

/// Blocks of a map page.
const PAGE_BLOCKS: u64 = 256;

/// Damages all map pages of a chunk; returns how many blocks they map.
fn damage_map_of(path: &Path, layer: LayerId, chunk: u32) -> u64 {
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
    damaged * PAGE_BLOCKS
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
    let _ = damage_map_of(&cluster.path(3, 0), layer_of(VOLUMES[0]), 1);
    cluster.boot(3);
    cluster.wait_until_in_sync();
    assert_eq!(cluster.fabric(3).sync_stall(), None);
    assert!(cluster.fabric(3).devices()[0].scrub.findings.is_empty());
    assert_whole(&mut cluster, 3, &expected);
}

fn status(cluster: &Cluster, node: u64) -> ScrubStatus {
    cluster.fabric(node).devices().remove(0).scrub
}

fn wait_for(cluster: &Cluster, node: u64, wanted: impl Fn(&ScrubStatus) -> bool) -> ScrubStatus {
    let start = Instant::now();
    loop {
        let status = status(cluster, node);
        if wanted(&status) {
            return status;
        }
        assert!(start.elapsed() < WAIT_MAX, "node {node}: {status:?}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// The node starts anew, and looks at all that it has without a pause.
fn boot_scrubbing(cluster: &mut Cluster, node: u64) {
    cluster.kill(node);
    cluster.boot_with(node, |config| {
        config.scrub.enabled = true;
        config.scrub.start_after_seconds = 0;
        config.scrub.pause_seconds = 0;
        config.params.leaf_cache_bytes = 0;
    });
    cluster.wait_until_in_sync();
    // Once all is read the pages that are to be damaged have left the cache.
    let passes = status(cluster, node).passes;
    let status = wait_for(cluster, node, |status| status.passes > passes + 1);
    assert_eq!(status.bad_blocks, 0);
}

/// Who is what, and since when.
fn members(cluster: &Cluster) -> Vec<Vec<Member>> {
    let view = std::cell::RefCell::new(Vec::new());
    cluster.wait_until("a map", |groups| {
        *view.borrow_mut() = groups.to_vec();
        true
    });
    view.into_inner()
}

#[test]
fn damaged_map_page_of_a_replica_in_sync_is_repaired_in_place() {
    let mut cluster = Cluster::start(3, 1);
    let expected = written(&mut cluster);
    boot_scrubbing(&mut cluster, 3);
    let before = members(&cluster);
    let lost = damage_map_of(&cluster.path(3, 0), layer_of(VOLUMES[0]), 1);
    wait_for(&cluster, 3, |status| status.bad_blocks > 0);
    wait_for(&cluster, 3, |status| {
        status.findings.is_empty() && status.repaired_blocks >= lost
    });
    let (passes, bad) = (status(&cluster, 3).passes, status(&cluster, 3).bad_blocks);
    let later = wait_for(&cluster, 3, |status| status.passes > passes + 1);
    assert_eq!(
        (later.bad_blocks, later.findings.len(), later.lost.len()),
        (bad, 0, 0)
    );
    // All the time it was in sync, and served what it knew.
    assert_eq!(members(&cluster), before);
    assert_whole(&mut cluster, 3, &expected);
}

#[test]
fn two_replicas_that_have_both_lost_a_map_page_make_each_other_whole() {
    let mut cluster = Cluster::start(2, 1);
    let expected = written(&mut cluster);
    for node in [1, 2] {
        boot_scrubbing(&mut cluster, node);
    }
    let before = members(&cluster);
    let lost = [1, 2].map(|node| {
        let chunk = node as u32;
        damage_map_of(&cluster.path(node, 0), layer_of(VOLUMES[0]), chunk)
    });
    for (node, lost) in [1, 2].into_iter().zip(lost) {
        // The pages are met one after the other.
        wait_for(&cluster, node, |status| {
            status.findings.is_empty() && status.repaired_blocks >= lost
        });
    }
    assert_eq!(members(&cluster), before);
    for node in [1, 2] {
        assert_whole(&mut cluster, node, &expected);
    }
}
