//! The cluster map's group beside a flood of operations of a filesystem.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use meta::{
    DeviceSpec, Level, Meta, NODE_DOWN_AFTER, NodeId, PlacementGroup, PoolSpec, VolumeSpec,
};
use tokio::task::JoinHandle;

use super::{Host, create};
use crate::common::cluster::Cluster;
use crate::common::{GIB, device, until};

/// Operations under way at a time.
const SLOTS: u16 = 128;
const VOLUMES: u64 = 20;

/// Each slot makes files, one after the other.
struct Flood {
    stop: Arc<AtomicBool>,
    slots: Vec<JoinHandle<u64>>,
}

impl Flood {
    fn begin(host: &Host) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let slots = (0..SLOTS).map(|slot| {
            let (host, stop) = (host.clone(), Arc::clone(&stop));
            tokio::spawn(async move {
                let mut sequence = 0;
                while !stop.load(Ordering::Relaxed) {
                    sequence += 1;
                    let name = format!("{slot}-{sequence}");
                    let made = host.make(slot, sequence, &name).await;
                    assert!(made.is_ok(), "{made:?}");
                }
                sequence
            })
        });
        let slots = slots.collect();
        Self { stop, slots }
    }

    /// Ends it; how many files it made.
    async fn end(self) -> u64 {
        assert!(self.slots.iter().all(|slot| !slot.is_finished()));
        self.stop.store(true, Ordering::Relaxed);
        let mut made = 0;
        for slot in self.slots {
            made += slot.await.unwrap();
        }
        made
    }
}

/// A pool whose data are on all three nodes.
async fn pool_of_three(cluster: &Cluster) {
    for node in &cluster.nodes[1..] {
        let spec = DeviceSpec {
            node: node.id(),
            ..device(node.id().0)
        };
        node.meta().register_device(spec).await.unwrap();
    }
    let pool = PoolSpec {
        placement_groups: Some(4),
        ..PoolSpec::new("safe", 3)
    };
    cluster.nodes[0].meta().create_pool(pool).await.unwrap();
}

async fn down(meta: &Meta) -> Vec<String> {
    let events = meta.list_events(0, 1000).await.unwrap();
    let told = events.iter().map(|event| event.what.to_string());
    told.filter(|text| text.contains("is down")).collect()
}

/// Says that a replica failed; the group without it.
async fn report(meta: &Meta, failed: NodeId) -> PlacementGroup {
    let map = meta.map();
    let mut groups = map.groups().filter(|group| group.members.len() == 3);
    let group = groups.next().unwrap();
    let members = group.members.iter();
    let member = members
        .clone()
        .find(|member| member.node == failed)
        .unwrap();
    let (device, incarnation) = (member.device, member.incarnation);
    let reported = meta.report_failed(group.id(), device, incarnation, map.epoch());
    reported.await.unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_flood_of_operations_keeps_the_cluster_map_from_nothing() {
    let mut cluster = Cluster::of(3, Level::KNOWN, Box::new(|way| way)).await;
    pool_of_three(&cluster).await;
    let leader = cluster.nodes[0].meta().raft_status().leader.unwrap();
    let stays = cluster.nodes.iter().find(|node| node.id() != leader);
    let meta = stays.unwrap().meta();
    let term = meta.raft_status().term;
    let made = create(&meta, "home").await.unwrap();
    let host = Host::open(&meta, &made).await;
    let flood = Flood::begin(&host);

    let mut leases = Vec::new();
    for number in 0..VOLUMES {
        let name = format!("v{number}");
        let spec = VolumeSpec::new(name.clone(), GIB);
        meta.create_volume(spec).await.unwrap();
        leases.push(meta.grant_lease(&name, meta.node_id()).await.unwrap());
    }
    let shrunk = report(&meta, leader).await;
    assert_eq!(shrunk.in_sync().count(), 2);
    // Who is not heard of for as long is down.
    tokio::time::sleep(2 * NODE_DOWN_AFTER).await;
    for lease in leases {
        let (volume, generation) = (lease.volume, lease.generation);
        let renewed = meta.renew_lease(volume, meta.node_id(), generation).await;
        renewed.unwrap();
    }
    assert_eq!(down(&meta).await, Vec::<String>::new());
    let now = (meta.raft_status().leader, meta.raft_status().term);
    assert_eq!(now, (Some(leader), term));

    cluster.stop(leader.0).await;
    let other = async || meta.raft_status().leader.filter(|led| *led != leader);
    until(other).await;
    let spec = VolumeSpec::new("after", GIB);
    meta.create_volume(spec).await.unwrap();
    let done = flood.end().await;
    assert!(done > 1000, "{done} operations are no flood");
    cluster.end().await;
}
