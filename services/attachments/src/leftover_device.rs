//! Block devices whose attachment was forgotten while this daemon was not there to remove them.
//!
//! The kernel has the device still, and requests to it wait for a daemon: a file system on it could not even
//! be unmounted. So the device is served once more, by a volume without a lease, whose requests all fail.
//! Then whoever uses it can let go, and the device is removed.

use std::sync::Arc;

use api::failure::{Failure, Kind, Result};
use meta::VolumeId;
use vhost_backend::blk::BlkOptions;
use vhost_backend::session::socket::Endpoint;
use volumes::serial;

use crate::attachments::Attachments;
use storage::Session;

use crate::attachments::{close, device};
use crate::sockets::socket_failure;

/// A block device whose requests fail, until it is removed.
pub struct FailingDevice {
    volume: VolumeId,
    key: String,
    session: Session,
}

impl Attachments {
    /// Has requests to a leftover device of a volume fail. None if there is no such device.
    pub async fn fail_leftover_device(
        self: &Arc<Self>,
        volume: &meta::Volume,
        queues: u16,
    ) -> Result<Option<FailingDevice>> {
        let link = format!("{}/{}", block_device::helper::LINKS, volume.name);
        let mut live = self.lock().await;
        // One that is served here is no leftover.
        let is_there = block_device::helper::is_in_kernel(&serial(volume));
        if live.open.volumes.contains_key(&volume.id) || !is_there {
            return Ok(None);
        }
        let handle = self
            .volumes
            .open_without_lease(&mut live.open, volume)
            .await?;
        handle.revoke();
        let options = BlkOptions {
            queues,
            queue_size: block_device::RING_SIZE_MAX,
            ..BlkOptions::default()
        };
        let started = match device(volume, handle, options) {
            Ok(device) => self.start_failing(volume, &link, device).await,
            Err(failure) => Err(failure),
        };
        if started.is_err() {
            self.volumes.close_in(&mut live.open, volume.id).await;
        }
        started.map(Some)
    }

    async fn start_failing(
        &self,
        volume: &meta::Volume,
        link: &str,
        device: Arc<storage::Device>,
    ) -> Result<FailingDevice> {
        let key = serial(volume);
        let helper = self.block_devices.clone();
        let listened = key.clone();
        let socket = helper.ask(move |client| client.listen(&listened)).await?;
        let endpoint = Endpoint::from_fd(socket).map_err(|e| socket_failure(&e))?;
        let session = self.serve_endpoint(endpoint, device, false)?;
        let (served, link) = (key.clone(), link.to_owned());
        let connected = helper.ask(move |client| client.serve(&served, &link)).await;
        if let Err(failure) = connected {
            close(vec![session]).await;
            return Err(failure);
        }
        tracing::warn!(volume = %volume.name, "requests to a leftover block device fail from now on");
        Ok(FailingDevice {
            volume: volume.id,
            key,
            session,
        })
    }

    /// Removes the device. Nobody uses it by now.
    pub async fn remove_failing_device(&self, failing: FailingDevice) -> Result<()> {
        let FailingDevice {
            volume,
            key,
            session,
        } = failing;
        let helper = self.block_devices.clone();
        let removed = helper.ask(move |client| client.remove(&key, true)).await;
        close(vec![session]).await;
        let mut live = self.lock().await;
        self.volumes.close_in(&mut live.open, volume).await;
        removed.map_err(|failure| Failure {
            kind: Kind::Failed,
            ..failure
        })
    }
}
