//! Keeping the leases of open volumes, and telling the data path until when it may go on.
//!
//! On a node of several, requests wait from the moment at which the volume's lease or the node's own heartbeat lease ends: then
//! others may act without this node. Both are counted from before they were asked for, and less the drift of clocks. Once meta
//! answers again they go on; they never fail for that.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use meta::refusal::LeaseRefusal;
use meta::{Generation, LEASE_DURATION, Lease, Meta, MetaError, Name, Refusal, VolumeId};
use tokio::task::JoinSet;

use crate::failure::Result;

use super::monitor::Found;
use super::node::{Node, meta_failure};
use super::storage::{Handle, Storage};

/// Renewals in one lease's duration: two may fail.
const RENEWALS: u32 = 3;
/// A renewal without an answer by then is given up, and the next one tried.
const RENEW_WAIT_MAX: Duration = Duration::from_secs(3);
/// A lease that can number fewer writes than this is replaced by a new one, without a pause.
const SEQUENCES_MIN: u64 = 1 << 36;
/// A lease ends earlier here by this part of it, for clocks that run at different speeds; the leader's ends later by as much.
const DRIFT_PART: u32 = 100;

/// The leases of open volumes.
#[derive(Default)]
pub struct Leases(Mutex<BTreeMap<VolumeId, Kept>>);

#[derive(Clone)]
struct Kept {
    volume: Name,
    handle: Handle,
    generation: Generation,
    /// Counted from before it was asked for.
    until: Instant,
    /// Somebody else was given it.
    lost: Option<String>,
}

/// When a lease ends that was asked for at this moment.
fn end_of(asked: Instant) -> Instant {
    asked + LEASE_DURATION - LEASE_DURATION / DRIFT_PART
}

impl Leases {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<VolumeId, Kept>> {
        // Each entry is whole after every statement.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps a lease from now on, which was asked for at `asked`.
    pub fn begin(&self, volume: &meta::Volume, lease: &Lease, handle: &Handle, asked: Instant) {
        let kept = Kept {
            volume: volume.name.clone(),
            handle: handle.clone(),
            generation: lease.generation,
            until: end_of(asked),
            lost: None,
        };
        handle.set_lease_until(kept.until);
        self.lock().insert(volume.id, kept);
    }

    /// Keeps it no longer. Its generation.
    pub fn end(&self, volume: VolumeId) -> Option<Generation> {
        self.lock().remove(&volume).map(|kept| kept.generation)
    }

    fn renewed(&self, volume: VolumeId, generation: Generation, asked: Instant) {
        if let Some(kept) = self.lock().get_mut(&volume) {
            kept.generation = generation;
            kept.until = end_of(asked);
            kept.lost = None;
        }
    }

    /// Tells the data path what holds now. `heartbeat` is when this node has to stop unless it is heard of.
    fn tell(&self, heartbeat: Instant) {
        for kept in self.lock().values() {
            kept.handle.set_lease_until(kept.until.min(heartbeat));
        }
    }

    fn due(&self) -> Vec<(VolumeId, Kept)> {
        let all = self.lock();
        all.iter().map(|(id, kept)| (*id, kept.clone())).collect()
    }

    fn lost(&self, volume: VolumeId, why: String) {
        if let Some(kept) = self.lock().get_mut(&volume)
            && kept.lost.is_none()
        {
            tracing::error!(volume = %kept.volume, why, "lost the lease");
            kept.lost = Some(why);
        }
    }

    /// Volumes whose lease is another's, and why requests to them wait.
    pub fn problems(&self) -> Vec<Found> {
        let all = self.lock();
        let lost = all.values().filter_map(|kept| {
            let why = kept.lost.as_ref()?;
            Some(Found::new(
                format!("lease {}", kept.volume),
                format!("requests to volume '{}' wait: {why}", kept.volume),
                "once nobody else uses it, restart this daemon",
            ))
        });
        lost.collect()
    }
}

/// Renews leases for as long as the node lives.
pub fn keep(node: &Arc<Node>) {
    let weak = Arc::downgrade(node);
    tokio::spawn(async move {
        loop {
            tokio::time::sleep(LEASE_DURATION / RENEWALS).await;
            match weak.upgrade() {
                Some(node) => node.renew_leases().await,
                None => return,
            }
        }
    });
    if node.membership.is_some() {
        tokio::spawn(follow_heartbeat(Arc::downgrade(node), node.meta.clone()));
    }
}

/// Passes on until when this node may serve.
async fn follow_heartbeat(node: std::sync::Weak<Node>, meta: Meta) {
    let mut heartbeats = meta.watch_heartbeat();
    loop {
        let valid = *heartbeats.borrow_and_update();
        let Some(node) = node.upgrade() else { return };
        if let Some(valid) = valid {
            node.leases.tell(valid - LEASE_DURATION / DRIFT_PART);
        }
        drop(node);
        if heartbeats.changed().await.is_err() {
            return;
        }
    }
}

/// Whether the lease is another's for sure.
fn is_lost(error: &MetaError) -> bool {
    use LeaseRefusal::{Held, NotHolder, Superseded};
    matches!(
        error,
        MetaError::Refused(Refusal::Lease(
            Held { .. } | NotHolder { .. } | Superseded { .. }
        ))
    )
}

impl Node {
    /// All at a time, so that one that hangs keeps no other from being renewed.
    async fn renew_leases(&self) {
        let mut renewals = JoinSet::new();
        for (id, kept) in self.leases.due() {
            let (meta, storage) = (self.meta.clone(), Arc::clone(&self.storage));
            renewals.spawn(async move {
                let asked = Instant::now();
                let renewal = renew(&meta, &storage, id, &kept);
                let renewed = tokio::time::timeout(RENEW_WAIT_MAX, renewal).await;
                (id, kept, asked, renewed)
            });
        }
        while let Some(done) = renewals.join_next().await {
            match done {
                Ok((id, _, asked, Ok(Ok(Ok(generation))))) => {
                    self.leases.renewed(id, generation, asked);
                }
                Ok((id, _, _, Ok(Ok(Err(error))))) if is_lost(&error) => {
                    self.leases.lost(id, error.to_string());
                }
                Ok((_, kept, _, Ok(Ok(Err(error))))) => {
                    tracing::warn!(volume = %kept.volume, %error, "renew lease");
                }
                Ok((_, kept, _, Ok(Err(failure)))) => {
                    tracing::warn!(volume = %kept.volume, %failure, "renew lease");
                }
                Ok((_, kept, _, Err(_))) => {
                    tracing::warn!(volume = %kept.volume, "renew lease: meta does not answer");
                }
                Err(error) => tracing::error!(%error, "renew lease"),
            }
        }
        if self.membership.is_some() {
            let valid = self.meta.heartbeat_valid_until();
            if let Some(valid) = valid {
                self.leases.tell(valid - LEASE_DURATION / DRIFT_PART);
            }
        }
    }

    /// Asks for the lease of a volume and opens it.
    pub(super) async fn open_leased(&self, volume: &meta::Volume) -> Result<Handle> {
        let asked = Instant::now();
        let granted = self.meta.grant_lease(&volume.name, self.meta.node_id());
        let lease = granted.await.map_err(meta_failure)?;
        let handle = self.storage.open_volume(volume, &lease).await?;
        self.leases.begin(volume, &lease, &handle, asked);
        Ok(handle)
    }
}

async fn renew(
    meta: &Meta,
    storage: &Storage,
    id: VolumeId,
    kept: &Kept,
) -> Result<std::result::Result<Generation, MetaError>> {
    let node = meta.node_id();
    if kept.handle.sequences_left() >= SEQUENCES_MIN {
        let renewed = meta.renew_lease(id, node, kept.generation).await;
        return Ok(renewed.map(|lease| lease.generation));
    }
    let volumes = meta.list_volumes().await.map_err(meta_failure)?;
    let Some(volume) = volumes.into_iter().find(|v| v.id == id) else {
        return Ok(Ok(kept.generation));
    };
    let lease = match meta.grant_lease(&volume.name, node).await {
        Ok(lease) => lease,
        Err(error) => return Ok(Err(error)),
    };
    storage.renew_lease(&kept.handle, &lease).await?;
    Ok(Ok(lease.generation))
}
