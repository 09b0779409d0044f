//! Attachments that are block devices of this machine: `/dev/penstock/NAME`.
//!
//! To the data path such an attachment is a socket as any other, whose front end is the helper of
//! [`BlockDevices`](crate::block_devices::BlockDevices). What is done here is to have the helper make
//! the device once the volume is served, and remove it before it is served no more.

use std::sync::Arc;
use std::time::Duration;

use api::failure::{Failure, Kind, Result};
use api::types::Attach;
use meta::{Attachment, AttachmentId};
use service::code::Code;
use service::found::Found;
use volumes::serial;

use crate::attachments::Attachments;

use crate::attachments::{Served, State};

/// The option by which meta remembers it. A node of a version without it makes a socket of that name.
pub const BLOCK: &str = "block";
/// Between two tries to make a device that could not be made.
const RETRY: Duration = Duration::from_secs(1);

/// A block device.
#[derive(Debug, Clone)]
pub struct Block {
    /// What the helper calls it.
    key: String,
    /// What the kernel calls it, once it is there.
    pub device: Option<String>,
    /// Why it is not.
    failure: Option<Failure>,
}

impl Block {
    /// The block device of an attachment, if it is one.
    pub fn of(attachment: &Attachment, volume: &meta::Volume) -> Option<Self> {
        is_block(attachment).then(|| Self {
            key: serial(volume),
            device: None,
            failure: None,
        })
    }

    /// What the helper calls it.
    pub fn key(&self) -> &str {
        &self.key
    }

    /// Why it is not there.
    pub fn problem(&self, link: &str) -> Option<Found> {
        let failure = self.failure.as_ref()?;
        Some(Found::new(
            Code::AttachmentNotServed,
            link,
            format!("block device {link} is not there: {}", failure.error),
            failure.hint.clone().unwrap_or_default(),
        ))
    }
}

/// Whether an attachment is a block device.
pub fn is_block(attachment: &Attachment) -> bool {
    attachment
        .options
        .extra
        .get(BLOCK)
        .is_some_and(|told| told == "true")
}

/// Fills in where the device of a request will be.
pub fn place(request: &mut Attach) -> Result<()> {
    if !request.block {
        return Ok(());
    }
    let link = format!("{}/{}", block_device::helper::LINKS, request.volume);
    if !request.socket.is_empty() && request.socket != link {
        return Err(Failure::invalid(
            "a block device has no socket",
            "leave the socket out, or --block",
        ));
    }
    if request.incoming {
        return Err(Failure::invalid(
            "a block device cannot come in from another node",
            "detach the volume there and attach it here",
        ));
    }
    request.socket = link;
    Ok(())
}

/// Keeps trying to make devices that are not there, and to have them served when the helper has ended.
pub fn keep(attachments: &Arc<Attachments>) {
    let weak = Arc::downgrade(attachments);
    tokio::spawn(async move {
        while let Some(attachments) = weak.upgrade() {
            if attachments.block_devices.has_lost_helper() {
                attachments.lose_helper().await;
            }
            for id in attachments.missing_block_devices().await {
                if let Err(failure) = attachments.make_block_device(id).await {
                    tracing::warn!(%failure, "make a block device");
                }
            }
            drop(attachments);
            tokio::time::sleep(RETRY).await;
        }
    });
}

impl Attachments {
    /// The helper has ended. Its devices wait for the next one.
    async fn lose_helper(&self) {
        let live = self.lock().await;
        if live
            .attached
            .served
            .values()
            .any(|served| served.block.is_some())
        {
            self.ending.end_for(Failure::plain(
                Kind::Failed,
                "the helper for block devices has ended, and only a new daemon starts another",
            ));
        }
    }

    async fn missing_block_devices(&self) -> Vec<AttachmentId> {
        let live = self.lock().await;
        let is_missing = |served: &Served| {
            matches!(served.state, State::Up { .. })
                && served
                    .block
                    .as_ref()
                    .is_some_and(|block| block.device.is_none())
        };
        let all = live.attached.served.iter();
        all.filter(|(_, served)| is_missing(served))
            .map(|(id, _)| *id)
            .collect()
    }

    /// Makes the device of an attachment whose volume is served, and waits for it.
    pub(crate) async fn make_block_device(&self, id: AttachmentId) -> Result<()> {
        let found = {
            let live = self.lock().await;
            let served = live.attached.served.get(&id);
            served.and_then(|served| Some((served.block.clone()?, served.socket.clone())))
        };
        let Some((block, link)) = found else {
            return Ok(());
        };
        let helper = self.block_devices.clone();
        let made = helper
            .ask(move |client| client.serve(block.key(), &link))
            .await;
        let mut live = self.lock().await;
        if let Some(block) = live
            .attached
            .served
            .get_mut(&id)
            .and_then(|served| served.block.as_mut())
        {
            block.device = made.as_ref().ok().cloned();
            block.failure = made.as_ref().err().cloned();
        }
        made.map(drop)
    }

    /// Whether a volume is a block device here, and whether that is there by now.
    pub async fn block_device_of(&self, volume: meta::VolumeId) -> Option<bool> {
        let live = self.lock().await;
        let mut served = live
            .attached
            .served
            .values()
            .filter(|one| one.volume == volume);
        served.find_map(|one| {
            let block = one.block.as_ref()?;
            Some(matches!(one.state, State::Up { .. }) && block.device.is_some())
        })
    }

    /// Removes the device of an attachment, unless somebody uses it.
    pub(crate) async fn remove_block_device(&self, id: AttachmentId, force: bool) -> Result<()> {
        let found = {
            let live = self.lock().await;
            live.attached
                .served
                .get(&id)
                .and_then(|served| served.block.clone())
        };
        let Some(block) = found else {
            return Ok(());
        };
        let helper = self.block_devices.clone();
        helper
            .ask(move |client| client.remove(block.key(), force))
            .await?;
        let mut live = self.lock().await;
        if let Some(block) = live
            .attached
            .served
            .get_mut(&id)
            .and_then(|served| served.block.as_mut())
        {
            block.device = None;
        }
        Ok(())
    }
}
