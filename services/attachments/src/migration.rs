//! Attachments that move between nodes: with their guest, which is migrated live, or without one.
//!
//! The destination's attachment is *incoming*: its socket is there, and its requests wait, for the lease of
//! the volume is the source's. The source gives the lease back while no ring of its attachment runs: the
//! front end has stopped and drained them, and everything is flushed. The destination takes over once its own
//! rings run ([`meta::Incoming::Guest`]) or at once ([`meta::Incoming::Move`]). With that the source's record
//! is gone, and its session ends.
//!
//! **Why no two guests write.** The lease decides, as ever: the destination is granted it when the source has
//! given it back or its time is over, and fences the older generation out on all replicas before its first
//! request. If the front end of the source starts its rings again, because the migration was called off, the
//! source asks for a new lease; it is granted only if the destination did not take over.
//!
//! **Why it is done by looking, not by messages.** Each side looks at the records and at its own rings, and
//! does what fits. So a lost answer, a new leader or a restart of a daemon changes nothing.

use std::sync::Arc;
use std::time::{Duration, Instant};

use api::failure::{Failure, Result};
use meta::{
    Attachment, AttachmentId, AttachmentTarget, Incoming, Lease, MetaError, NodeId, Refusal,
    VolumeId,
};
use service::failures::meta_failure;

use crate::attachments::{Attachments, Live};
use storage::Handle;

use crate::attachments::{Served, State};

/// Pause between two looks if nothing happens.
const PAUSE: Duration = Duration::from_secs(3);
/// The same while something is to be done that could not be done yet, and time between two tries of it.
const RETRY: Duration = Duration::from_millis(20);
/// A lease that another node holds is asked for this often: only so is found out that it has run out. Each
/// time costs an entry in the log of metadata.
const ASK_EVERY: Duration = Duration::from_secs(1);
/// A guest that waits for its lease for longer is reported as a problem.
const WAIT_REPORTED_AFTER: Duration = Duration::from_secs(3);
/// The other node takes an attachment over within this time, or it stays where it is. Covers a node that is
/// slow to hear of it.
pub(crate) const MOVE_WAIT_MAX: Duration = Duration::from_secs(15);

/// How an attachment of this node waits for the lease of its volume.
#[derive(Debug, Default)]
pub struct Waiting {
    /// Since when the guest waits: when its rings were first seen to run.
    since: Option<Instant>,
    /// When the lease was asked for last.
    asked: Option<Instant>,
    /// For how long the last guest waited, from its rings' start to the end of lease recovery.
    pause: Option<Duration>,
}

impl Waiting {
    /// For how long the guest waited when it came here.
    pub fn pause(&self) -> Option<Duration> {
        self.pause
    }

    /// Whether it has waited for so long that a person should know.
    pub fn is_overdue(&self) -> bool {
        self.since
            .is_some_and(|since| since.elapsed() >= WAIT_REPORTED_AFTER)
    }
}

/// What is to be done about an attachment of this node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    /// To take the place of the one on another node.
    TakeOver,
    /// To give the lease back, for another node is to take over.
    GiveBack,
    /// To take the lease again: nobody takes over, or the guest goes on here.
    TakeBack,
}

/// What decides about an attachment of this node.
#[derive(Debug, Clone, Copy)]
struct Facts {
    incoming: Option<Incoming>,
    /// Another node has an incoming attachment of the volume.
    leaves: bool,
    /// The volume is open without a lease.
    waits_for_lease: bool,
    /// Rings run.
    is_running: bool,
    /// Something else on this node uses the volume.
    is_shared: bool,
}

fn step(facts: Facts) -> Option<Step> {
    let Facts {
        incoming,
        leaves,
        waits_for_lease,
        is_running,
        is_shared,
    } = facts;
    match incoming {
        Some(Incoming::Guest) if !is_running => None,
        // Else it has taken over, and the record is older.
        Some(_) => waits_for_lease.then_some(Step::TakeOver),
        None if waits_for_lease && (is_running || !leaves) => Some(Step::TakeBack),
        None if !waits_for_lease && leaves && !is_running && !is_shared => Some(Step::GiveBack),
        None => None,
    }
}

/// Looks for as long as attachments are served. A node without a network has nobody to move anything to.
pub fn keep(attachments: &Arc<Attachments>) {
    if !attachments.cluster.has_network {
        return;
    }
    let changed = Arc::clone(&attachments.rings_changed);
    let weak = Arc::downgrade(attachments);
    let mut openings = attachments.cluster.meta.watch_openings();
    tokio::spawn(async move {
        loop {
            openings.mark_unchanged();
            let pause = match weak.upgrade() {
                Some(attachments) => match attachments.follow_migrations().await {
                    Ok(true) => RETRY,
                    Ok(false) => PAUSE,
                    Err(failure) => {
                        tracing::warn!(%failure, "look for attachments that move");
                        PAUSE
                    }
                },
                None => return,
            };
            tokio::select! {
                () = changed.notified() => {}
                opened = openings.changed() => if opened.is_err() { return },
                () = tokio::time::sleep(pause) => {}
            }
        }
    });
}

impl Attachments {
    /// Whether another node has an incoming attachment of the volume, as far as this one knows.
    pub(crate) fn leaves(&self, volume: VolumeId) -> Result<bool> {
        let records = self
            .cluster
            .meta
            .applied()
            .attachments()
            .map_err(meta_failure)?;
        Ok(is_leaving(&records, volume, self.cluster.node_id()))
    }

    /// Begins what is to be done; true if something is.
    async fn follow_migrations(self: &Arc<Self>) -> Result<bool> {
        let mut live = self.lock().await;
        // Read under the lock: what is not there is not there any more, or is not served yet.
        let records = self
            .cluster
            .meta
            .applied()
            .attachments()
            .map_err(meta_failure)?;
        let own = self.cluster.node_id();
        let is_concerned = records.iter().any(|one| one.options.incoming.is_some())
            || live.open.volumes.values().any(|open| open.waits_for_lease);
        if !is_concerned {
            return Ok(false);
        }
        let mut is_busy = false;
        for record in records.iter().filter(|one| one.node == own) {
            if self.serve_moved(&mut live, record).await {
                continue;
            }
            if let Some(step) = self.due(&mut live, &records, record)? {
                is_busy = true;
                let (attachments, record) = (Arc::clone(self), record.clone());
                live.attached.migrating.insert(record.id);
                tokio::spawn(async move { attachments.carry_out(step, record).await });
            }
        }
        let mut served = live.attached.served.keys();
        let has_left =
            served.any(|id| records.iter().all(|one| one.id != *id) && waits(&live, *id));
        drop(live);
        if has_left {
            self.look_for_losses().await?;
        }
        Ok(is_busy)
    }

    /// What is to be done about one attachment, if nothing is being done.
    fn due(
        &self,
        live: &mut Live<'_>,
        records: &[Attachment],
        record: &Attachment,
    ) -> Result<Option<Step>> {
        let AttachmentTarget::Volume { id: volume, .. } = record.target;
        if live.attached.migrating.contains(&record.id) {
            return Ok(None);
        }
        let (Some(served), Some(open)) = (
            live.attached.served.get_mut(&record.id),
            live.open.volumes.get(&volume),
        ) else {
            return Ok(None);
        };
        let State::Up { session, .. } = &served.state else {
            return Ok(None);
        };
        let facts = Facts {
            incoming: record.options.incoming,
            leaves: is_leaving(records, volume, record.node),
            waits_for_lease: open.waits_for_lease,
            is_running: session.state().rings > 0,
            is_shared: open.users > 1,
        };
        let waiting = &mut served.waiting;
        match facts.is_running && facts.waits_for_lease {
            true => waiting.since = waiting.since.or_else(|| Some(Instant::now())),
            false => waiting.since = None,
        }
        let step = step(facts);
        if let Some(Step::TakeOver | Step::TakeBack) = step {
            let lease = self
                .cluster
                .meta
                .applied()
                .lease(volume)
                .map_err(meta_failure)?;
            let holder = lease.and_then(|lease| lease.holder);
            let is_free = holder.is_none_or(|holder| holder == record.node);
            let pause = if is_free { RETRY } else { ASK_EVERY };
            if waiting.asked.is_some_and(|asked| asked.elapsed() < pause) {
                return Ok(None);
            }
            waiting.asked = Some(Instant::now());
        }
        Ok(step)
    }

    async fn carry_out(self: Arc<Self>, step: Step, record: Attachment) {
        let done = match step {
            Step::TakeOver => self.take_over(&record).await,
            Step::TakeBack => self.take_lease_back(&record).await,
            Step::GiveBack => self.give_back(&record).await,
        };
        if let Err(failure) = done {
            tracing::warn!(%failure, socket = record.socket, ?step, "migrate an attachment");
        }
        self.lock().await.attached.migrating.remove(&record.id);
        if step != Step::GiveBack {
            // The lease may have become free meanwhile.
            self.rings_changed.notify_one();
        }
    }

    /// Takes the place of the attachment on another node, unless that has the lease.
    async fn take_over(&self, record: &Attachment) -> Result<()> {
        let asked = Instant::now();
        match self.cluster.meta.take_over_attachment(record.id).await {
            Ok(lease) => self.go_on(record, &lease, asked).await,
            // An answer that was lost: then the record tells, and the lease is asked for as any other.
            Err(MetaError::Refused(Refusal::Lease(_) | Refusal::Attachment(_))) => Ok(()),
            Err(error) => Err(meta_failure(error)),
        }
    }

    /// Asks for the lease again, unless another node took over.
    async fn take_lease_back(&self, record: &Attachment) -> Result<()> {
        let asked = Instant::now();
        let granted = self
            .cluster
            .meta
            .grant_lease(record.target.name(), record.node);
        match granted.await {
            Ok(lease) => self.go_on(record, &lease, asked).await,
            Err(MetaError::Refused(Refusal::Lease(_))) => Ok(()),
            Err(error) => Err(meta_failure(error)),
        }
    }

    /// Has the requests of an attachment go on under a lease, or gives that back if it is not served any
    /// more.
    async fn go_on(&self, record: &Attachment, lease: &Lease, asked: Instant) -> Result<()> {
        // It may have been resized, and its write cache switched, where it was.
        let name = record.target.name();
        let volume = self
            .cluster
            .meta
            .get_volume(name)
            .await
            .map_err(meta_failure)?;
        let records = self.cluster.meta.list_attachments_of(record.node).await;
        let records = records.map_err(meta_failure)?;
        let now = records.into_iter().find(|one| one.id == record.id);
        let mut live = self.lock().await;
        let Live { open, attached } = &mut live;
        let (volumes, attachments) = (&mut open.volumes, &mut attached.served);
        let (Some(now), Some(open), Some(served)) = (
            now,
            volumes
                .get_mut(&volume.id)
                .filter(|open| open.waits_for_lease),
            attachments.get_mut(&record.id),
        ) else {
            drop(live);
            let released =
                self.cluster
                    .meta
                    .release_lease(volume.id, record.node, lease.generation);
            return released.await.map(drop).map_err(meta_failure);
        };
        let State::Up {
            session,
            device,
            keeper,
        } = &served.state
        else {
            // It is being detached, or cannot be served.
            drop(live);
            let released =
                self.cluster
                    .meta
                    .release_lease(volume.id, record.node, lease.generation);
            return released.await.map(drop).map_err(meta_failure);
        };
        let writeback = !now.options.write_through;
        device.adopt_writeback(writeback);
        keeper.adopt(writeback).await;
        open.handle.set_size_bytes(volume.size_bytes);
        // Its end is known before the first request may begin.
        self.volumes
            .leases()
            .begin(&volume, lease, &open.handle, asked);
        if let Err(failure) = self.storage.take_over(&open.handle, lease).await {
            self.volumes.leases().end(volume.id);
            return Err(failure);
        }
        open.waits_for_lease = false;
        session.notify_config_changed();
        let (since, handle) = (served.waiting.since.take(), open.handle.clone());
        drop(live);
        self.note_pause(record, since.unwrap_or(asked), &handle)
            .await;
        Ok(())
    }

    /// Waits for the lease recovery and remembers for how long the guest waited.
    async fn note_pause(&self, record: &Attachment, since: Instant, handle: &Handle) {
        while !handle.is_recovered() && !handle.is_revoked() && since.elapsed() < MOVE_WAIT_MAX {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        let pause = since.elapsed();
        tracing::info!(
            socket = record.socket,
            volume = %record.target.name(),
            pause_ms = pause.as_millis(),
            "the attachment goes on here"
        );
        if let Some(served) = self.lock().await.attached.served.get_mut(&record.id) {
            served.waiting.pause = Some(pause);
        }
    }

    /// Gives the lease back while no ring runs. Everything is flushed before: the next holder knows of no
    /// write that a loss of power may take.
    async fn give_back(&self, record: &Attachment) -> Result<()> {
        let AttachmentTarget::Volume { id: volume, .. } = record.target;
        let idle = self.idle(&self.lock().await, record.id, volume);
        // What is being recovered is looked at again.
        let Some((handle, messages)) = idle.filter(|(handle, _)| handle.is_recovered()) else {
            return Ok(());
        };
        self.storage.flush(&handle).await?;
        let generation = {
            let mut live = self.lock().await;
            handle.suspend();
            // A ring that starts from here on finds the volume suspended. One that ran meanwhile was started
            // by a message.
            let still = self.idle(&live, record.id, volume);
            let is_idle = still.is_some_and(|(_, now)| now == messages);
            let open = live.open.volumes.get_mut(&volume);
            match open.filter(|_| is_idle && self.leaves(volume).unwrap_or(false)) {
                Some(open) => {
                    open.waits_for_lease = true;
                    self.volumes.leases().end(volume)
                }
                None => {
                    handle.unsuspend();
                    return Ok(());
                }
            }
        };
        let Some(generation) = generation else {
            return Ok(());
        };
        let released = self
            .cluster
            .meta
            .release_lease(volume, record.node, generation);
        released.await.map(drop).map_err(meta_failure)?;
        tracing::info!(
            socket = record.socket,
            volume = %record.target.name(),
            "gave the lease back: the attachment is about to move to another node"
        );
        Ok(())
    }

    /// The handle of a volume that is leased here, and whose one attachment has no ring that runs or is being
    /// started; and how many messages its session has seen.
    fn idle(&self, live: &Live<'_>, id: AttachmentId, volume: VolumeId) -> Option<(Handle, u64)> {
        let State::Up { session, .. } = &live.attached.served.get(&id)?.state else {
            return None;
        };
        let state = session.state();
        let open = live.open.volumes.get(&volume)?;
        let is_leased = !open.waits_for_lease && !self.volumes.leases().lost().contains(&volume);
        let is_idle = state.rings == 0 && state.messages % 2 == 0;
        (is_leased && open.users == 1 && is_idle).then(|| (open.handle.clone(), state.messages))
    }
}

impl Attachments {
    /// A node of its own has nobody to move attachments to or from.
    pub(crate) fn require_cluster(&self, verb: &str) -> Result<()> {
        match self.cluster.has_network {
            true => Ok(()),
            false => Err(Failure::invalid(
                format!(
                    "this node is a cluster of its own: there is no other node to {verb} attachments"
                ),
                "make a cluster with `penstock init` and `penstock join`",
            )),
        }
    }
}

/// Whether the volume of an attachment waits for its lease here.
fn waits(live: &Live<'_>, id: AttachmentId) -> bool {
    let volume = live
        .attached
        .served
        .get(&id)
        .map(|served: &Served| served.volume);
    let open = volume.and_then(|volume| live.open.volumes.get(&volume));
    open.is_some_and(|open| open.waits_for_lease)
}

fn is_leaving(records: &[Attachment], volume: VolumeId, own: NodeId) -> bool {
    records.iter().any(|one| {
        let AttachmentTarget::Volume { id, .. } = one.target;
        id == volume && one.node != own && one.options.incoming.is_some()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const STILL: Facts = Facts {
        incoming: None,
        leaves: false,
        waits_for_lease: false,
        is_running: false,
        is_shared: false,
    };

    #[test]
    fn lease_is_given_back_only_while_no_ring_runs() {
        let leaving = Facts {
            leaves: true,
            ..STILL
        };
        assert_eq!(step(leaving), Some(Step::GiveBack));
        for busy in [
            Facts {
                is_running: true,
                ..leaving
            },
            Facts {
                is_shared: true,
                ..leaving
            },
            STILL,
        ] {
            assert_eq!(step(busy), None, "{busy:?}");
        }
    }

    #[test]
    fn source_goes_on_if_its_guest_does_or_nobody_takes_over() {
        let given = Facts {
            leaves: true,
            waits_for_lease: true,
            ..STILL
        };
        assert_eq!(step(given), None, "the guest is on its way");
        let resumed = Facts {
            is_running: true,
            ..given
        };
        assert_eq!(step(resumed), Some(Step::TakeBack));
        let called_off = Facts {
            leaves: false,
            ..given
        };
        assert_eq!(step(called_off), Some(Step::TakeBack));
    }

    #[test]
    fn incoming_guest_takes_over_when_it_runs() {
        let incoming = Facts {
            incoming: Some(Incoming::Guest),
            waits_for_lease: true,
            ..STILL
        };
        assert_eq!(step(incoming), None);
        let running = Facts {
            is_running: true,
            ..incoming
        };
        assert_eq!(step(running), Some(Step::TakeOver));
        let moved = Facts {
            incoming: Some(Incoming::Move),
            ..incoming
        };
        assert_eq!(
            step(moved),
            Some(Step::TakeOver),
            "nobody waits for a guest"
        );
    }
}
