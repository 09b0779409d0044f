//! Pools.

use std::sync::Arc;

use api::failure::{Failure, Kind, Result};
use api::types::{FailureDomain, Pool, PoolCreate, PoolSet};
use meta::{Meta, PoolSpec};
use service::cluster::Cluster;
use service::failures::{done_unseen, meta_failure};
use service::view::{View, is_listed};

use crate::devices::Devices;

/// The pools of the cluster, as people see and change them.
pub struct Pools {
    cluster: Cluster,
    devices: Arc<Devices>,
}

impl Pools {
    /// The pools that `devices` belong to.
    pub fn new(cluster: Cluster, devices: Arc<Devices>) -> Self {
        Self { cluster, devices }
    }

    /// The cluster that the pools belong to.
    pub fn cluster(&self) -> &Cluster {
        &self.cluster
    }

    /// All pools.
    pub async fn list(&self, reader: &Meta) -> Result<Vec<Pool>> {
        let view = self.cluster.view_by(reader).await?;
        let mut pools: Vec<Pool> = view
            .map
            .pools()
            .map(|p| self.pool_shown(&view, p))
            .collect();
        pools.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(pools)
    }

    /// One pool.
    pub async fn get(&self, name: &str) -> Result<Pool> {
        let pool = self
            .cluster
            .asked
            .get_pool(name)
            .await
            .map_err(meta_failure)?;
        Ok(self.pool_shown(&self.cluster.view().await?, &pool))
    }

    /// Makes a pool.
    pub async fn create(&self, request: PoolCreate) -> Result<Pool> {
        if request.failure_domain == FailureDomain::Device && request.replicas > 1 {
            // The data path reads one replica of a group on each node: a second one would never be in sync.
            return Err(not_on_one_node(&request.name));
        }
        let spec = PoolSpec {
            name: request.name,
            replicas: request.replicas,
            min_in_sync: request.min_in_sync,
            failure_domain: match request.failure_domain {
                FailureDomain::Device => meta::FailureDomain::Device,
                FailureDomain::Node => meta::FailureDomain::Node,
                FailureDomain::Host => meta::FailureDomain::Host,
                FailureDomain::Rack => meta::FailureDomain::Rack,
            },
            device_class: request.class,
            placement_groups: None,
        };
        let pool = self
            .cluster
            .asked
            .create_pool(spec)
            .await
            .map_err(meta_failure)?;
        let view = self.cluster.view().await.map_err(done_unseen)?;
        Ok(self.pool_shown(&view, &pool))
    }

    /// Gives a pool other numbers of copies.
    pub async fn set(&self, name: &str, request: &PoolSet) -> Result<Pool> {
        let (replicas, min_in_sync) = (request.replicas, request.min_in_sync);
        if replicas.is_none() && min_in_sync.is_none() {
            return Err(Failure::invalid(
                format!("pool '{name}': nothing is to be changed"),
                "give replicas or min_in_sync",
            ));
        }
        if !self.cluster.has_network && replicas.is_some_and(|replicas| replicas > 1) {
            return Err(Failure::new(
                Kind::Conflict,
                format!("pool '{name}': a node that is a cluster of its own keeps one copy"),
                "make it the first of a cluster with `penstock init`, then repeat this",
            ));
        }
        let pool = self
            .cluster
            .asked
            .get_pool(name)
            .await
            .map_err(meta_failure)?;
        let is_on_one = pool.failure_domain == meta::FailureDomain::Device;
        if is_on_one && replicas.is_some_and(|replicas| replicas > 1) {
            return Err(not_on_one_node(name));
        }
        let set = self
            .cluster
            .asked
            .set_pool(name, replicas, min_in_sync)
            .await;
        let pool = set.map_err(meta_failure)?;
        let view = self.cluster.view().await.map_err(done_unseen)?;
        Ok(self.pool_shown(&view, &pool))
    }

    /// Deletes a pool without volumes.
    pub async fn delete(&self, name: &str) -> Result<()> {
        let deleted = self.cluster.asked.delete_pool(name).await;
        deleted.map(drop).map_err(meta_failure)
    }

    fn pool_shown(&self, view: &View, pool: &meta::Pool) -> Pool {
        let space = self.devices.reported_space(view);
        let (mut capacity_bytes, mut used_bytes, mut free_bytes) = (0, 0, 0);
        let (mut devices, mut devices_unreported) = (0, 0);
        for device in view.usable(pool) {
            devices += 1;
            capacity_bytes += device.size_bytes;
            match space.get(&device.id) {
                Some(told) => {
                    used_bytes += told.used_bytes;
                    free_bytes += told.capacity_bytes.saturating_sub(told.used_bytes);
                }
                None => devices_unreported += 1,
            }
        }
        let of_pool = |volume: &&meta::Volume| volume.pool == pool.name && is_listed(volume);
        let volumes: Vec<&meta::Volume> = view.volumes.iter().filter(of_pool).collect();
        Pool {
            name: pool.name.to_string(),
            replicas: pool.replicas,
            min_in_sync: pool.min_in_sync,
            failure_domain: match pool.failure_domain {
                meta::FailureDomain::Device => FailureDomain::Device,
                meta::FailureDomain::Node => FailureDomain::Node,
                meta::FailureDomain::Host => FailureDomain::Host,
                meta::FailureDomain::Rack => FailureDomain::Rack,
            },
            class: pool.device_class.as_ref().map(ToString::to_string),
            created_at: pool.created_at.into(),
            volumes: volumes.len(),
            groups: view.groups_of(pool),
            devices,
            capacity_bytes,
            used_bytes,
            free_bytes,
            usable_bytes: capacity_bytes / u64::from(pool.replicas.max(1)),
            usable_free_bytes: free_bytes / u64::from(pool.replicas.max(1)),
            provisioned_bytes: volumes
                .iter()
                .fold(0, |sum, volume| sum.saturating_add(volume.size_bytes)),
            devices_unreported,
        }
    }
}

fn not_on_one_node(pool: &str) -> Failure {
    Failure::invalid(
        format!("pool '{pool}': two replicas on devices of one node are not supported"),
        "choose the failure domain node, host or rack",
    )
}
