//! One export: what is seen of it, and the step that follows.

use std::sync::Arc;
use std::time::Instant;

use api::failure::{Failure, Kind, Result};
use api::types::{Attach, DetachQuery};
use meta::{AttachmentKey, AttachmentTarget, MetaError, NodeState, VolumeId};
use nfs::core::{self, AddressSeen, AttachmentSeen, LeaseSeen, Reason, Seen, Step, Wanted};
use nfs::wire::{ExportState, Question};
use service::failures::meta_failure;

use crate::exports::Exports;

use crate::exports::plan;

/// Most steps of one round: there are fewer states.
const STEPS_MAX: usize = 12;
/// Most virtqueues of an export's block device.
const QUEUES_MAX: u16 = 4;

/// An export as a step is chosen for it.
struct View {
    /// As meta has it; absent if it has been forgotten.
    record: Option<meta::Export>,
    /// As this machine has it.
    here: Option<ExportState>,
    volume: Option<VolumeId>,
    wanted: Wanted,
    seen: Seen,
}

impl Exports {
    /// Takes steps until the next one has to wait, or there is none.
    pub(crate) async fn advance(self: &Arc<Self>, name: &str) {
        for _ in 0..STEPS_MAX {
            let taken = self.take_step(name).await;
            let mut all = self.progress();
            let progress = all.entry(name.to_owned()).or_default();
            let step = match taken {
                Ok(step) => step,
                Err(failure) => {
                    if progress.failure.as_ref() != Some(&failure) {
                        tracing::error!(export = name, %failure, "serve an NFS export");
                    }
                    progress.failure = Some(failure);
                    progress.is_at_rest = false;
                    break;
                }
            };
            progress.is_at_rest = step == Step::Rest;
            progress.waits_for = match step {
                Step::Wait(reason) => Some(words(reason)),
                _ => None,
            };
            if matches!(step, Step::Rest | Step::Wait(_)) {
                progress.failure = None;
                break;
            }
            tracing::info!(export = name, ?step, "NFS export");
        }
        self.end_round(name);
    }

    fn end_round(&self, name: &str) {
        let own = self.cluster.node_id();
        let applied = self.cluster.meta.applied().exports().unwrap_or_default();
        let is_own = applied
            .iter()
            .any(|export| export.name.as_str() == name && export.node == own);
        let mut all = self.progress();
        if let Some(progress) = all.get_mut(name) {
            progress.is_busy = false;
            // What is neither assigned to this node nor left on it is of no interest.
            if progress.is_at_rest && !is_own {
                all.remove(name);
            }
        }
    }

    async fn take_step(self: &Arc<Self>, name: &str) -> Result<Step> {
        let view = self.see(name).await?;
        let step = core::next(view.wanted, &view.seen);
        self.carry_out_step(name, &view, step).await?;
        Ok(step)
    }

    async fn see(&self, name: &str) -> Result<View> {
        let own = self.cluster.node_id();
        let applied = self.cluster.meta.applied();
        let exports = applied.exports().map_err(meta_failure)?;
        let record = exports
            .into_iter()
            .find(|export| export.name.as_str() == name);
        let state = self.ask(|client| client.look()).await?;
        let here = state.exports.into_iter().find(|one| one.plan.name == name);
        let volume = match (&record, &here) {
            (Some(record), _) => Some(record.volume_id),
            (None, Some(here)) => {
                let volumes = applied.volumes().map_err(meta_failure)?.into_iter();
                let mut of_name = volumes.filter(|volume| volume.name.as_str() == here.plan.volume);
                of_name.next().map(|volume| volume.id)
            }
            (None, None) => None,
        };
        let wanted = match &record {
            Some(record) if record.node != own => Wanted::Elsewhere,
            Some(record) if record.state == meta::ExportState::Deleting => Wanted::Deleted,
            Some(_) => Wanted::Here,
            None => Wanted::Elsewhere,
        };
        let wants_address = match (&here, &record) {
            (Some(here), _) => here.plan.address.is_some(),
            (None, Some(record)) => record.address.is_some(),
            (None, None) => false,
        };
        let address = match (
            wants_address,
            here.as_ref().is_some_and(|one| one.has_address),
        ) {
            (false, _) => AddressSeen::Unwanted,
            (true, true) => AddressSeen::Present,
            (true, false) => AddressSeen::Absent,
        };
        let seen = Seen {
            attachment: self.attachment_seen(volume).await?,
            lease: self.lease_seen(volume),
            mounted: here.as_ref().is_some_and(|one| one.mounted),
            published: here.as_ref().is_some_and(|one| one.published),
            address,
        };
        Ok(View {
            record,
            here,
            volume,
            wanted,
            seen,
        })
    }

    async fn attachment_seen(&self, volume: Option<VolumeId>) -> Result<AttachmentSeen> {
        let Some(volume) = volume else {
            return Ok(AttachmentSeen::None);
        };
        if let Some(device) = self.attachments.block_device_of(volume).await {
            return Ok(AttachmentSeen::Own { device });
        }
        let all = self
            .cluster
            .meta
            .applied()
            .attachments()
            .map_err(meta_failure)?;
        let own = self.cluster.node_id();
        // One of this node that is not served any more is about to be gone.
        let other = all
            .into_iter()
            .find(|one| is_of(one, volume) && one.node != own);
        Ok(other.map_or(AttachmentSeen::None, |one| {
            let map = self.cluster.meta.map();
            let node = map.node(one.node);
            AttachmentSeen::Other {
                is_down: node.is_none_or(|node| node.state == NodeState::Down),
            }
        }))
    }

    fn lease_seen(&self, volume: Option<VolumeId>) -> LeaseSeen {
        let until = volume.and_then(|volume| self.volumes.lease_valid_until(volume));
        match until {
            None => LeaseSeen::NotOwn,
            Some(until) if until > Instant::now() => LeaseSeen::Held,
            Some(_) => LeaseSeen::Expired,
        }
    }

    async fn carry_out_step(self: &Arc<Self>, name: &str, view: &View, step: Step) -> Result<()> {
        let owned = || name.to_owned();
        let lets_go = matches!(step, Step::Unpublish | Step::Unmount { .. });
        if lets_go && !matches!(view.seen.attachment, AttachmentSeen::Own { .. }) {
            self.fail_requests(name, view.volume).await?;
        }
        match step {
            Step::Rest | Step::Wait(_) => Ok(()),
            Step::ForgetDead => self.forget_dead(view.volume).await,
            Step::Attach => self.attach_for_export(record(view)?).await,
            Step::Mount => {
                let plan = plan(record(view)?)?;
                self.carry_out(Question::Mount { plan }).await
            }
            Step::Publish => {
                let (name, scope) = (owned(), self.scope()?);
                self.carry_out(Question::Publish { name, scope }).await
            }
            Step::SetAddress => self.set_address(name, view.volume).await,
            Step::DropAddress => {
                let mut addresses = self.addresses.lock().await;
                addresses.remove(name);
                self.carry_out(Question::DropAddress { name: owned() })
                    .await
            }
            Step::Unpublish => {
                // One that ran out by itself is not renewed either.
                self.addresses.lock().await.remove(name);
                self.carry_out(Question::Unpublish { name: owned() }).await
            }
            Step::Unmount { fenced } => self.unmount(name, fenced).await,
            Step::Detach => self.detach_for_export(view).await,
            Step::ForgetExport => self
                .cluster
                .asked
                .export_withdrawn(name)
                .await
                .map_err(meta_failure),
        }
    }

    async fn unmount(self: &Arc<Self>, name: &str, fenced: bool) -> Result<()> {
        let question = Question::Unmount {
            name: name.to_owned(),
            fenced,
        };
        self.carry_out(question).await?;
        let failing = self.failing.lock().await.remove(name);
        match failing {
            Some(failing) => self.attachments.remove_failing_device(failing).await,
            None => Ok(()),
        }
    }

    /// Requests to a device whose attachment is gone wait for ever: they are to fail, so that the NFS server
    /// and the file system let go of it.
    async fn fail_requests(self: &Arc<Self>, name: &str, volume: Option<VolumeId>) -> Result<()> {
        let mut all = self.failing.lock().await;
        if all.contains_key(name) {
            return Ok(());
        }
        let volumes = self
            .cluster
            .meta
            .applied()
            .volumes()
            .map_err(meta_failure)?;
        let Some(volume) = volumes.into_iter().find(|one| Some(one.id) == volume) else {
            return Ok(());
        };
        if let Some(failing) = self
            .attachments
            .fail_leftover_device(&volume, queues())
            .await?
        {
            all.insert(name.to_owned(), failing);
        }
        Ok(())
    }

    async fn set_address(&self, name: &str, volume: Option<VolumeId>) -> Result<()> {
        let mut addresses = self.addresses.lock().await;
        let valid = volume.and_then(|id| Some((id, self.address_valid_s(id)?)));
        // The next look sees the lease run out.
        let Some((volume, valid_s)) = valid else {
            return Ok(());
        };
        let name = name.to_owned();
        let question = Question::SetAddress {
            name: name.clone(),
            valid_s,
        };
        self.carry_out(question).await?;
        addresses.insert(name, volume);
        Ok(())
    }

    async fn forget_dead(&self, volume: Option<VolumeId>) -> Result<()> {
        let all = self
            .cluster
            .asked
            .list_attachments()
            .await
            .map_err(meta_failure)?;
        let map = self.cluster.meta.map();
        for one in all {
            let is_down = map
                .node(one.node)
                .is_none_or(|node| node.state == NodeState::Down);
            if volume.is_some_and(|volume| is_of(&one, volume)) && is_down {
                let deleted = self
                    .cluster
                    .asked
                    .delete_attachment(AttachmentKey::Id(one.id))
                    .await;
                deleted.map_err(|error| cannot_take_over(&one, error))?;
            }
        }
        Ok(())
    }

    async fn attach_for_export(&self, export: &meta::Export) -> Result<()> {
        let volume = self
            .cluster
            .asked
            .get_volume(&export.volume)
            .await
            .map_err(meta_failure)?;
        // Here nothing else waits with it, as it would while attachments are changed.
        self.volumes.outwait_lease(&volume).await?;
        self.attachments
            .attach(block_request(&export.volume))
            .await
            .map(drop)
    }

    async fn detach_for_export(&self, view: &View) -> Result<()> {
        let volume = match (&view.record, &view.here) {
            (Some(record), _) => record.volume.to_string(),
            (None, Some(here)) => here.plan.volume.clone(),
            (None, None) => return Ok(()),
        };
        self.detach_block(&volume).await
    }

    /// Ends the attachment that makes a volume a block device here.
    pub(crate) async fn detach_block(&self, volume: &str) -> Result<()> {
        let query = DetachQuery {
            target: format!("{}/{volume}", block_device::helper::LINKS),
            force: false,
            forget: false,
            node: Some(self.cluster.node_id().to_string()),
        };
        match self.attachments.detach(&query).await {
            Err(failure) if failure.kind == Kind::NotFound => Ok(()),
            done => done.map(drop),
        }
    }

    /// What all NFS nodes of this cluster call themselves towards clients.
    fn scope(&self) -> Result<String> {
        let map = self.cluster.meta.map();
        let cluster = map.cluster().ok_or_else(|| {
            Failure::plain(Kind::Failed, "this node does not know its cluster yet")
        })?;
        Ok(format!("penstock-{}", cluster.uuid))
    }
}

/// Virtqueues of an export's block device.
fn queues() -> u16 {
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    u16::try_from(cpus).unwrap_or(u16::MAX).min(QUEUES_MAX)
}

/// Makes a volume a block device of this node.
pub fn block_request(volume: &str) -> Attach {
    Attach {
        volume: volume.to_owned(),
        socket: String::new(),
        block: true,
        queues: queues(),
        queue_size: None,
        read_only: false,
        pin_memory: true,
        incoming: false,
    }
}

fn is_of(attachment: &meta::Attachment, volume: VolumeId) -> bool {
    let AttachmentTarget::Volume { id, .. } = &attachment.target;
    *id == volume
}

/// Why the attachment of a node that is down stays. This NFS node takes over from another NFS node alone: the
/// guest of a host may need the volume again.
fn cannot_take_over(attachment: &meta::Attachment, error: MetaError) -> Failure {
    let failure = meta_failure(error);
    if failure.kind != Kind::Denied {
        return failure;
    }
    let (name, socket) = (attachment.target.name(), &attachment.socket);
    Failure::new(
        Kind::Denied,
        format!("volume '{name}' is attached at {socket} on a node that is down and no NFS node"),
        format!(
            "start that node, or run `penstock detach {socket} --force` on a node with the role meta"
        ),
    )
}

fn record(view: &View) -> Result<&meta::Export> {
    let record = view.record.as_ref();
    record.ok_or_else(|| Failure::plain(Kind::Failed, "the export was forgotten meanwhile"))
}

fn words(reason: Reason) -> &'static str {
    match reason {
        Reason::OtherNode => "another node has its volume attached still",
        Reason::Device => "its block device is not there yet",
        Reason::Lease => "this node has not got the lease of its volume",
    }
}
