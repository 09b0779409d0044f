//! Attachments for domains: made, found, ended.

use std::time::{Duration, Instant};

use api::client::{Client, encode};
use api::failure::{Failure, Kind, Result};
use api::types::{Attach, Attachment, AttachmentState, Detached};
use hyper::Method;
use libvirt::domain::NeededVolume;
use serde::de::DeserializeOwned;

/// How long a guest's end of a connection may outlive its disk: QEMU closes it once the disk is gone.
const CLOSE_MAX: Duration = Duration::from_secs(10);
/// Between two looks.
const LOOK_INTERVAL: Duration = Duration::from_millis(100);

/// Where a guest's data come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Source {
    /// The guest starts here.
    Fresh,
    /// The guest runs on another host, which still writes.
    Incoming,
}

/// An attachment that a domain's disk can connect to.
#[derive(Debug)]
pub struct Ready {
    /// The attachment.
    pub attachment: Attachment,
    /// Whether it was made just now, and not before.
    pub is_new: bool,
}

/// All attachments of this node.
pub async fn list(client: &Client) -> Result<Vec<Attachment>> {
    client.get("/v1/attachments").await
}

/// Makes an attachment for a disk, or takes the one that waits on its socket. One with too few queues is made
/// anew.
pub async fn ready(client: &Client, needed: &NeededVolume, source: Source) -> Result<Ready> {
    let all = list(client).await?;
    if let Some(found) = all.into_iter().find(|one| one.socket == needed.socket) {
        if let Some(failure) = unfit(&found, needed) {
            return Err(failure);
        }
        if found.queues >= needed.queues {
            return Ok(Ready {
                attachment: found,
                is_new: false,
            });
        }
        end(client, &found.socket).await?;
    }
    let attachment = create(client, needed, source).await?;
    Ok(Ready {
        attachment,
        is_new: true,
    })
}

/// Why a disk cannot use an attachment that is there.
fn unfit(found: &Attachment, needed: &NeededVolume) -> Option<Failure> {
    let (socket, volume) = (&found.socket, &found.volume);
    if *volume != needed.volume {
        return Some(Failure::new(
            Kind::Conflict,
            format!("{socket} serves volume '{volume}', not '{}'", needed.volume),
            format!("detach it first: penstock detach {socket}"),
        ));
    }
    if found.state == AttachmentState::Connected {
        return Some(Failure::new(
            Kind::Conflict,
            format!("a guest uses volume '{volume}' on {socket}"),
            "shut that guest down, or take the disk from it, first",
        ));
    }
    (found.read_only != needed.is_read_only).then(|| {
        let (is, wanted) = match found.read_only {
            true => ("read-only", "for writing"),
            false => ("for writing", "read-only"),
        };
        Failure::new(
            Kind::Conflict,
            format!("volume '{volume}' is attached {is} on {socket}, and is needed {wanted}"),
            format!("detach it first: penstock detach {socket}"),
        )
    })
}

/// Makes an attachment.
pub async fn create(client: &Client, needed: &NeededVolume, source: Source) -> Result<Attachment> {
    let request = Attach {
        block: false,
        volume: needed.volume.clone(),
        socket: needed.socket.clone(),
        queues: needed.queues,
        queue_size: Some(needed.queue_size),
        read_only: needed.is_read_only,
        pin_memory: true,
        incoming: source == Source::Incoming,
    };
    client.call(Method::POST, "/v1/attachments", &request).await
}

/// Ends an attachment that no guest uses; waits a moment for one that is about to go.
pub async fn end(client: &Client, socket: &str) -> Result<Detached> {
    end_at(client, "/v1/attachments", socket).await
}

/// The same for one of the attachments at this path of the admin API.
pub async fn end_at<T: DeserializeOwned>(client: &Client, path: &str, socket: &str) -> Result<T> {
    let begin = Instant::now();
    let path = format!("{path}?target={}", encode(socket));
    loop {
        let ended = client.call(Method::DELETE, &path, &()).await;
        match ended {
            Err(failure) if failure.kind == Kind::Conflict && begin.elapsed() < CLOSE_MAX => {
                tokio::time::sleep(LOOK_INTERVAL).await;
            }
            other => return other,
        }
    }
}
