//! Keeping the leases of open volumes.

use std::sync::{Arc, Weak};

use meta::{LEASE_DURATION, VolumeId};

use crate::failure::Result;

use super::node::{NODE, Node, meta_failure};
use super::storage::Handle;

/// Renewals in one lease's duration: two may fail.
const RENEWALS: u32 = 3;
/// A lease that can number fewer writes than this is replaced by a new one, without a pause.
const SEQUENCES_MIN: u64 = 1 << 36;

/// Renews leases for as long as the node lives.
pub fn keep(node: &Arc<Node>) {
    let node: Weak<Node> = Arc::downgrade(node);
    tokio::spawn(async move {
        loop {
            tokio::time::sleep(LEASE_DURATION / RENEWALS).await;
            match node.upgrade() {
                Some(node) => node.renew_leases().await,
                None => return,
            }
        }
    });
}

impl Node {
    async fn renew_leases(&self) {
        let mut live = self.live.lock().await;
        for (id, open) in &mut live.volumes {
            match self.renew(*id, &open.handle, open.generation).await {
                Ok(generation) => open.generation = generation,
                Err(failure) => tracing::warn!(volume = id.0, %failure, "renew lease"),
            }
        }
    }

    async fn renew(
        &self,
        id: VolumeId,
        handle: &Handle,
        generation: meta::Generation,
    ) -> Result<meta::Generation> {
        if handle.sequences_left() >= SEQUENCES_MIN {
            let renewed = self.meta.renew_lease(id, NODE, generation).await;
            return renewed.map(|lease| lease.generation).map_err(meta_failure);
        }
        let volumes = self.meta.list_volumes().await.map_err(meta_failure)?;
        let Some(volume) = volumes.into_iter().find(|v| v.id == id) else {
            return Ok(generation);
        };
        let granted = self.meta.grant_lease(&volume.name, NODE).await;
        let lease = granted.map_err(meta_failure)?;
        self.storage.renew_lease(handle, &lease).await?;
        Ok(lease.generation)
    }
}
