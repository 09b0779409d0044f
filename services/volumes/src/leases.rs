//! Keeping the leases of open volumes, and telling the data path until when it may go on.
//!
//! On a node of several, requests wait from the moment at which the volume's lease or the node's own
//! heartbeat lease ends: then others may act without this node. Both are counted from before they were asked
//! for, and less the drift of clocks. Once meta answers again they go on; they never fail for that. They do
//! fail when meta answers that the lease is another's: then the volume is revoked, and closed
//! by the attachment service.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use api::failure::Result;
use meta::refusal::LeaseRefusal;
use meta::{
    Generation, LEASE_DURATION, Lease, Meta, MetaError, Name, NodeId, NodeState, Refusal, VolumeId,
    lease_for_holder,
};
use service::code::Code;
use service::failures::meta_failure;
use service::found::Found;
use storage::{Handle, Storage};
use tokio::task::JoinSet;

use crate::volumes::Volumes;

/// Renewals in one lease's duration: two may fail.
const RENEWALS: u32 = 3;
/// A renewal without an answer by then is given up, and the next one tried.
const RENEW_WAIT_MAX: Duration = Duration::from_secs(3);
/// A lease that can number fewer writes than this is replaced by a new one, without a pause.
const SEQUENCES_MIN: u64 = 1 << 36;
/// A lease that nobody renews has run out by then, also as a new leader counts it.
const OUTWAIT_MAX: Duration = LEASE_DURATION.saturating_add(Duration::from_secs(2));
/// Pause before it is asked for again.
const OUTWAIT_PAUSE: Duration = Duration::from_secs(1);
/// A lease, and what a heartbeat allows, end earlier here by this, for clocks that run at different speeds.
fn drift() -> Duration {
    LEASE_DURATION - lease_for_holder(LEASE_DURATION)
}

/// The leases of open volumes.
pub struct Leases {
    kept: Mutex<BTreeMap<VolumeId, Kept>>,
    /// Requests wait once a lease ends. On a node without a network no other node can take a lease, and
    /// guests are served even while the metadata cannot be written.
    end: bool,
}

#[derive(Clone)]
struct Kept {
    volume: Name,
    handle: Handle,
    /// The lease that it was opened with, which tells one opening from the next.
    opened: Generation,
    /// Counted from before it was asked for.
    until: Instant,
    /// Somebody else was given it, or it was given up; why.
    lost: Option<String>,
}

impl Kept {
    /// The lease in use. The data path knows best: an answer may have come too late to be noted here.
    fn generation(&self) -> Generation {
        self.handle.generation()
    }

    fn lose(&mut self, why: String) {
        if self.lost.is_none() {
            tracing::error!(volume = %self.volume, why, "lost the lease");
            self.handle.revoke();
            self.lost = Some(why);
        }
    }
}

/// When a lease ends that was asked for at this moment.
fn end_of(asked: Instant) -> Instant {
    asked + lease_for_holder(LEASE_DURATION)
}

impl Leases {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<VolumeId, Kept>> {
        // Each entry is whole after every statement.
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// No leases yet; `end` says whether requests wait once one ends.
    pub fn new(end: bool) -> Self {
        Self {
            kept: Mutex::default(),
            end,
        }
    }

    /// Keeps a lease from now on, which was asked for at `asked`.
    pub fn begin(&self, volume: &meta::Volume, lease: &Lease, handle: &Handle, asked: Instant) {
        let kept = Kept {
            volume: volume.name.clone(),
            handle: handle.clone(),
            opened: lease.generation,
            until: end_of(asked),
            lost: None,
        };
        if self.end {
            handle.set_lease_until(kept.until);
        }
        self.lock().insert(volume.id, kept);
    }

    /// Asks for the lease of a volume, opens it, and keeps the lease from then on.
    pub async fn open(
        &self,
        meta: &Meta,
        storage: &Storage,
        volume: &meta::Volume,
    ) -> Result<Handle> {
        let asked = Instant::now();
        let granted = meta.grant_lease(&volume.name, meta.node_id()).await;
        let lease = granted.map_err(meta_failure)?;
        let handle = storage.open_volume(volume, &lease).await?;
        self.begin(volume, &lease, &handle, asked);
        Ok(handle)
    }

    /// Handle of a volume whose lease this node keeps.
    pub(crate) fn handle(&self, volume: VolumeId) -> Option<Handle> {
        let all = self.lock();
        all.get(&volume).map(|kept| kept.handle.clone())
    }

    /// Whether this node keeps a lease of a volume.
    pub fn has(&self, volume: VolumeId) -> bool {
        self.lock().contains_key(&volume)
    }

    /// Keeps it no longer, and gives it back.
    pub async fn give_back(&self, meta: &Meta, volume: VolumeId) {
        if let Some(generation) = self.end(volume) {
            // A lease that is not given back only costs a generation.
            let _ = meta.release_lease(volume, meta.node_id(), generation).await;
        }
    }

    /// Keeps it no longer. Its generation.
    pub fn end(&self, volume: VolumeId) -> Option<Generation> {
        self.lock().remove(&volume).map(|kept| kept.generation())
    }

    fn renewed(&self, volume: VolumeId, opened: Generation, asked: Instant) {
        if let Some(kept) = self.lock().get_mut(&volume)
            && kept.opened == opened
        {
            kept.until = end_of(asked);
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
        let held = all.iter().filter(|(_, kept)| kept.lost.is_none());
        held.map(|(id, kept)| (*id, kept.clone())).collect()
    }

    /// The lease is another's. From here on nothing more is sent: a replica that the other holder's takeover
    /// did not meet, for it has come in since, would take it for new.
    fn lose(&self, volume: VolumeId, opened: Generation, why: String) {
        if let Some(kept) = self.lock().get_mut(&volume)
            && kept.opened == opened
        {
            kept.lose(why);
        }
    }

    /// Nothing of the volume is to be done here any more, though its lease is this node's: it is closed
    /// without waiting for what waits.
    pub fn give_up(&self, volume: VolumeId, why: &str) {
        if let Some(kept) = self.lock().get_mut(&volume) {
            kept.lose(why.to_owned());
        }
    }

    /// Volumes whose lease is another's, or was given up, until they are closed.
    pub fn lost(&self) -> BTreeSet<VolumeId> {
        let all = self.lock();
        let lost = all.iter().filter(|(_, kept)| kept.lost.is_some());
        lost.map(|(id, _)| *id).collect()
    }

    /// Until when this node has the lease of an open volume, as far as it knows; `None` if the lease is
    /// another's.
    fn valid_until(&self, volume: VolumeId) -> Option<Instant> {
        let all = self.lock();
        let kept = all.get(&volume).filter(|kept| kept.lost.is_none())?;
        Some(kept.until)
    }

    /// Volumes whose lease is another's, and why requests to them fail.
    pub fn problems(&self) -> Vec<Found> {
        let all = self.lock();
        let lost = all.values().filter_map(|kept| {
            let why = kept.lost.as_ref()?;
            Some(Found::new(
                Code::LeaseLost,
                &kept.volume,
                format!("requests to volume '{}' fail here: {why}", kept.volume),
                "this node closes it, and serves its attachments here again once no other node uses it",
            ))
        });
        lost.collect()
    }
}

/// Passes on until when this node may serve.
async fn follow_heartbeat(leases: Weak<Leases>, meta: Meta) {
    let mut heartbeats = meta.watch_heartbeat();
    loop {
        let valid = *heartbeats.borrow_and_update();
        let Some(leases) = leases.upgrade() else {
            return;
        };
        if let Some(valid) = valid {
            leases.tell(valid - drift());
        }
        drop(leases);
        if heartbeats.changed().await.is_err() {
            return;
        }
    }
}

/// Whether the lease is another's for sure.
fn is_lost(error: &MetaError) -> bool {
    use LeaseRefusal::{Attached, Held, NotHolder, Superseded};
    matches!(
        error,
        MetaError::Refused(Refusal::Lease(
            Attached { .. } | Held { .. } | NotHolder { .. } | Superseded { .. }
        ))
    )
}

impl Volumes {
    /// Renews leases for as long as the volumes are served, on the runtime of heartbeats.
    pub fn keep_leases(self: &Arc<Self>) {
        let weak = Arc::downgrade(self);
        self.runtime.spawn(async move {
            loop {
                tokio::time::sleep(LEASE_DURATION / RENEWALS).await;
                match weak.upgrade() {
                    Some(volumes) => volumes.renew_leases().await,
                    None => return,
                }
            }
        });
        if self.cluster.has_network {
            let (leases, meta) = (Arc::downgrade(&self.leases), self.cluster.meta.clone());
            self.runtime.spawn(follow_heartbeat(leases, meta));
        }
    }

    /// All at a time, so that one that hangs keeps no other from being renewed.
    async fn renew_leases(&self) {
        let mut renewals = JoinSet::new();
        for (id, kept) in self.leases.due() {
            let (meta, storage) = (self.cluster.meta.clone(), Arc::clone(&self.storage));
            renewals.spawn(async move {
                let asked = Instant::now();
                let renewal = renew(&meta, &storage, id, &kept);
                let renewed = tokio::time::timeout(RENEW_WAIT_MAX, renewal).await;
                (id, kept, asked, renewed)
            });
        }
        while let Some(done) = renewals.join_next().await {
            match done {
                Ok((id, kept, asked, Ok(Ok(Ok(()))))) => {
                    self.leases.renewed(id, kept.opened, asked);
                }
                Ok((id, kept, _, Ok(Ok(Err(error))))) if is_lost(&error) => {
                    self.leases.lose(id, kept.opened, error.to_string());
                }
                // This node ends.
                Ok((_, _, _, Ok(Ok(Err(MetaError::Stopped))))) => {}
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
        if self.cluster.has_network {
            let valid = self.cluster.meta.heartbeat_valid_until();
            if let Some(valid) = valid {
                self.leases.tell(valid - drift());
            }
        }
    }

    /// Until when this node may write a volume; `None` if its lease is not this node's.
    pub fn lease_valid_until(&self, volume: VolumeId) -> Option<Instant> {
        let until = self.leases.valid_until(volume)?;
        if !self.cluster.has_network {
            return Some(until);
        }
        // Before the first heartbeat nothing was granted either.
        let heartbeat = self.cluster.meta.heartbeat_valid_until()?;
        Some(until.min(heartbeat - drift()))
    }

    /// Waits for the lease of a volume that a node holds which is down. The leader finds that a lease has run
    /// out only when it is asked for, and one that leads since shortly only some time after that: it is asked
    /// for repeatedly. Of any other lease nothing is done.
    ///
    /// # Errors
    /// It has not run out by then.
    pub async fn outwait_lease(&self, volume: &meta::Volume) -> Result<()> {
        let own = self.cluster.node_id();
        let lease = self
            .cluster
            .asked
            .get_lease(volume.id)
            .await
            .map_err(meta_failure)?;
        let map = self.cluster.meta.map();
        let is_dead = |id: &NodeId| {
            let node = map.node(*id);
            *id != own && node.is_none_or(|node| node.state == NodeState::Down)
        };
        if lease
            .and_then(|lease| lease.holder)
            .is_none_or(|id| !is_dead(&id))
        {
            return Ok(());
        }
        let begin = Instant::now();
        loop {
            match self.cluster.asked.grant_lease(&volume.name, own).await {
                Ok(_) => return Ok(()),
                Err(error) if is_lost(&error) && begin.elapsed() < OUTWAIT_MAX => {
                    tokio::time::sleep(OUTWAIT_PAUSE).await;
                }
                Err(error) => return Err(meta_failure(error)),
            }
        }
    }

    /// Asks for the lease of a volume and opens it.
    pub async fn open_leased(&self, volume: &meta::Volume) -> Result<Handle> {
        self.leases
            .open(&self.cluster.meta, &self.storage, volume)
            .await
    }
}

async fn renew(
    meta: &Meta,
    storage: &Storage,
    id: VolumeId,
    kept: &Kept,
) -> Result<std::result::Result<(), MetaError>> {
    let node = meta.node_id();
    if kept.handle.sequences_left() >= SEQUENCES_MIN {
        let renewed = meta.renew_lease(id, node, kept.generation()).await;
        return Ok(renewed.map(drop));
    }
    let volumes = meta.list_volumes().await.map_err(meta_failure)?;
    let Some(volume) = volumes.into_iter().find(|v| v.id == id) else {
        return Ok(Ok(()));
    };
    let lease = match meta.grant_lease(&volume.name, node).await {
        Ok(lease) => lease,
        Err(error) => return Ok(Err(error)),
    };
    storage.renew_lease(&kept.handle, &lease).await?;
    Ok(Ok(()))
}
