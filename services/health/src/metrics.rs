//! Gathers what the daemon tells Prometheus, and serves it where the configuration says.

mod listener;
mod process;

use std::collections::BTreeMap;
use std::sync::Arc;

use api::failure::Result;
use api::metrics::{Page, families};
use api::types;
use meta::{AdminState, ClusterMap, DeviceId, DeviceReport, DeviceState, LeaderReport, NodeState};
use service::view::{View, is_listed};

use crate::health::Health;

pub use listener::{Listening, listen};

impl Health {
    /// The page that Prometheus reads. Waits for no leader.
    pub async fn metrics(self: &Arc<Self>) -> Result<String> {
        let health = self.health().await?;
        let view = self.cluster.view_as_applied(LeaderReport::default())?;
        let mut page = Page::default();
        page.put(&families::BUILD_INFO, &[env!("CARGO_PKG_VERSION")], 1);
        process::put(&mut page);
        put_health(&mut page, &health);
        for service in &self.services {
            service.put_metrics(&mut page).await;
        }
        put_map(&mut page, &view.map);
        put_pools(&mut page, &view);
        put_space(&mut page, &view, &self.monitor.device_words());
        self.put_meta(&mut page);
        Ok(page.into_text())
    }

    fn put_meta(&self, page: &mut Page) {
        let raft = self.cluster.meta.raft_status();
        let leads = raft.leader == Some(self.cluster.node_id());
        page.put(&families::META_LEADER, &[], u64::from(leads));
        let silent = self.leader_silent_for().as_secs_f64();
        page.put_f64(&families::META_SILENT, &[], silent);
        page.put(&families::META_TERM, &[], raft.term);
        page.put(&families::META_APPLIED, &[], raft.applied_index);
        page.put(&families::META_LAST, &[], raft.last_index);
        page.put(&families::META_VOTERS, &[], raft.voters.len() as u64);
    }
}

fn put_health(page: &mut Page, health: &types::Health) {
    page.put(&families::PROBLEMS, &[], health.problems.len() as u64);
    page.put(
        &families::UNDER_WAY,
        &[],
        health.background_jobs.len() as u64,
    );
}

fn put_map(page: &mut Page, map: &ClusterMap) {
    page.put(&families::EPOCH, &[], map.epoch().0);
    let (mut up, mut down, mut not_started) = (0, 0, 0);
    for node in map.nodes() {
        match node.state {
            _ if !node.incarnation.has_begun() => not_started += 1,
            NodeState::Up => up += 1,
            NodeState::Down => down += 1,
        }
    }
    page.put(&families::NODES, &["up"], up);
    page.put(&families::NODES, &["down"], down);
    page.put(&families::NODES, &["not_started"], not_started);
    let draining = map
        .nodes()
        .filter(|node| node.admin_state == AdminState::Draining);
    page.put(&families::NODES_DRAINING, &[], draining.count() as u64);
    let is_up = |device: &meta::Device| {
        let node = map.node(device.node);
        node.is_some_and(|node| node.state == NodeState::Up)
    };
    let (mut online, mut offline, mut failed) = (0, 0, 0);
    for device in map.devices() {
        match device.state {
            DeviceState::Failed => failed += 1,
            DeviceState::Online if is_up(device) => online += 1,
            DeviceState::Online | DeviceState::Offline => offline += 1,
        }
    }
    page.put(&families::DEVICES, &["online"], online);
    page.put(&families::DEVICES, &["offline"], offline);
    page.put(&families::DEVICES, &["failed"], failed);
}

fn put_pools(page: &mut Page, view: &View) {
    for pool in view.map.pools() {
        let groups = view.groups_of(pool);
        let states = [
            ("in_sync", groups.in_sync),
            ("degraded", groups.degraded),
            ("waiting", groups.waiting),
            ("syncing", groups.syncing),
            ("moving", groups.moving),
        ];
        for (state, count) in states {
            page.put(&families::GROUPS, &[&pool.name, state], count as u64);
        }
    }
    for pool in view.map.pools() {
        let of_pool = |v: &&meta::Volume| v.pool == pool.name && is_listed(v);
        let volumes = view.volumes.iter().filter(of_pool).count();
        page.put(&families::POOL_VOLUMES, &[&pool.name], volumes as u64);
    }
}

fn put_space(page: &mut Page, view: &View, words: &BTreeMap<DeviceId, DeviceReport>) {
    let pools: Vec<&meta::Pool> = view.map.pools().collect();
    for pool in &pools {
        let (provisioned, _) = view.provisioned(pool);
        page.put(&families::POOL_PROVISIONED, &[&pool.name], provisioned);
    }
    for pool in &pools {
        let (_, capacity) = view.provisioned(pool);
        page.put(&families::POOL_CAPACITY, &[&pool.name], capacity);
    }
    // What nobody has said yet is left out: it is not 0.
    let heard = pools
        .iter()
        .filter_map(|pool| Some((pool, view.fullest(pool, words)?)));
    let heard: Vec<_> = heard.collect();
    for (pool, _) in &heard {
        let words = view.usable(pool).filter_map(|device| words.get(&device.id));
        let used = words.fold(0, |sum: u64, word| sum.saturating_add(word.used_bytes));
        page.put(&families::POOL_USED, &[&pool.name], used);
    }
    for (pool, fullest) in &heard {
        let percent = u64::from(fullest.percent);
        page.put(&families::POOL_FULLEST, &[&pool.name], percent);
    }
}
