//! Attachments: meta remembers them, sessions serve them.

use std::path::Path;
use std::sync::Arc;

use meta::{AttachmentKey, AttachmentOptions, AttachmentSpec, VolumeId};
use vhost_backend::blk::{BlkDevice, BlkOptions, SERIAL_BYTES};
use vhost_backend::session::socket::{Endpoint, Listener, SocketError, SocketOptions};

use crate::api::types::{Attach, Attachment, AttachmentState, Counters};
use crate::failure::{Failure, Kind, Result};

use super::node::{Live, NODE, Node, meta_failure};
use super::storage::{Device, Handle, Session};

/// An attachment of this node.
pub struct Served {
    /// What it serves.
    pub volume: VolumeId,
    socket: String,
    state: State,
}

enum State {
    Up {
        session: Session,
        device: Arc<Device>,
    },
    /// It could not be restored; the reason.
    Failed(Failure),
}

impl Served {
    /// Tells the guest that the volume's size changed.
    pub fn notify_resize(&self) {
        if let State::Up { session, .. } = &self.state {
            session.notify_resize();
        }
    }

    fn connected(&self) -> bool {
        matches!(&self.state, State::Up { session, .. } if session.state().connected)
    }
}

impl Node {
    /// All attachments.
    pub async fn attachments(&self) -> Result<Vec<Attachment>> {
        let live = self.live.lock().await;
        let all = self.meta.list_attachments().await.map_err(meta_failure)?;
        Ok(all.into_iter().map(|a| shown(&live, a)).collect())
    }

    /// Serves a volume on a socket.
    pub async fn attach(&self, request: Attach) -> Result<Attachment> {
        let mut live = self.live.lock().await;
        let volume = self
            .meta
            .get_volume(&request.volume)
            .await
            .map_err(meta_failure)?;
        let spec = AttachmentSpec {
            volume: request.volume,
            node: NODE,
            socket: request.socket,
            queues: request.queues,
            read_only: request.read_only,
            // Readers do not disturb each other.
            options: AttachmentOptions {
                shared: request.read_only,
                ..AttachmentOptions::default()
            },
        };
        let attachment = self
            .meta
            .create_attachment(spec)
            .await
            .map_err(meta_failure)?;
        let served = self.serve(&mut live, &volume, &attachment).await;
        match served {
            Ok(served) => {
                live.attachments.insert(attachment.id, served);
                Ok(shown(&live, attachment))
            }
            Err(failure) => {
                self.meta
                    .delete_attachment(AttachmentKey::Id(attachment.id))
                    .await
                    .map_err(meta_failure)?;
                Err(failure)
            }
        }
    }

    async fn serve(
        &self,
        live: &mut Live,
        volume: &meta::Volume,
        attachment: &meta::Attachment,
    ) -> Result<Served> {
        let handle = self.open_in(live, volume).await?;
        let socket = attachment.socket.clone();
        let up =
            device(volume, handle, attachment.queues, attachment.read_only).and_then(|device| {
                let session = self.listen(Path::new(&socket), device.clone())?;
                Ok(State::Up { session, device })
            });
        match up {
            Ok(state) => Ok(Served {
                volume: volume.id,
                socket,
                state,
            }),
            Err(failure) => {
                self.close_in(live, volume.id).await;
                Err(failure)
            }
        }
    }

    /// Makes a socket with the configured access and serves `device` on it.
    pub(super) fn listen(&self, path: &Path, device: Arc<Device>) -> Result<Session> {
        let access = self.config().socket_access;
        let options = SocketOptions {
            path: path.to_owned(),
            mode: access.mode,
            owner: (access.uid, access.gid),
        };
        let listener = Listener::bind(&options).map_err(|e| socket_failure(&e))?;
        self.serve_endpoint(Endpoint::Listening(listener), device)
    }

    /// Serves `device` to whoever connects to `endpoint`.
    pub(super) fn serve_endpoint(
        &self,
        endpoint: Endpoint,
        device: Arc<Device>,
    ) -> Result<Session> {
        Session::start(endpoint, device, self.threads.clone())
            .map_err(|e| Failure::plain(Kind::Failed, format!("cannot start a session: {e}")))
    }

    /// Ends the attachment on socket `target`, or of volume `target`.
    pub async fn detach(&self, target: &str, force: bool) -> Result<()> {
        let mut live = self.live.lock().await;
        let attachment = self.find(target).await?;
        let connected = live
            .attachments
            .get(&attachment.id)
            .is_some_and(Served::connected);
        if connected && !force {
            return Err(Failure::new(
                Kind::Conflict,
                format!("a guest uses {}", attachment.socket),
                "detach the disk from the guest first, or force it",
            ));
        }
        self.meta
            .delete_attachment(AttachmentKey::Id(attachment.id))
            .await
            .map_err(meta_failure)?;
        if let Some(served) = live.attachments.remove(&attachment.id) {
            let (volume, up) = (served.volume, matches!(served.state, State::Up { .. }));
            close(vec![served]).await;
            if up {
                self.close_in(&mut live, volume).await;
            }
        }
        Ok(())
    }

    async fn find(&self, target: &str) -> Result<meta::Attachment> {
        let all = self.meta.list_attachments().await.map_err(meta_failure)?;
        let mut found: Vec<_> = all
            .into_iter()
            .filter(|a| a.socket == target || a.target.name().as_str() == target)
            .collect();
        match found.len() {
            1 => Ok(found.remove(0)),
            0 => Err(Failure::new(
                Kind::NotFound,
                format!("nothing is attached as '{target}'"),
                "see `penstock attachments list`",
            )),
            n => Err(Failure::new(
                Kind::Conflict,
                format!("volume '{target}' has {n} attachments"),
                "name the socket of the one to detach",
            )),
        }
    }

    /// Serves again what meta remembers. What cannot be served is told by `health` and stops nothing else.
    pub(super) async fn restore_attachments(&self) -> Result<()> {
        let mut live = self.live.lock().await;
        for attachment in self.meta.list_attachments().await.map_err(meta_failure)? {
            let name = attachment.target.name().as_str();
            let volume = self.meta.get_volume(name).await.map_err(meta_failure)?;
            let served = match self.serve(&mut live, &volume, &attachment).await {
                Ok(served) => served,
                Err(failure) => {
                    tracing::error!(socket = attachment.socket, %failure, "restore attachment");
                    let (volume, socket) = (volume.id, attachment.socket.clone());
                    Served {
                        volume,
                        socket,
                        state: State::Failed(failure),
                    }
                }
            };
            live.attachments.insert(attachment.id, served);
        }
        Ok(())
    }

    /// Why attachments do not work, one line each.
    pub(super) async fn attachment_problems(&self) -> Vec<String> {
        let live = self.live.lock().await;
        live.attachments
            .values()
            .filter_map(|served| match &served.state {
                State::Failed(failure) => Some(format!(
                    "attachment {} is not served: {failure}",
                    served.socket
                )),
                State::Up { .. } => None,
            })
            .collect()
    }

    /// Ends all sessions; meta keeps the attachments for the next start.
    pub(super) async fn close_attachments(&self) {
        let mut live = self.live.lock().await;
        let all = std::mem::take(&mut live.attachments);
        let volumes: Vec<VolumeId> = all
            .values()
            .filter(|served| matches!(served.state, State::Up { .. }))
            .map(|served| served.volume)
            .collect();
        close(all.into_values().collect()).await;
        for volume in volumes {
            self.close_in(&mut live, volume).await;
        }
    }
}

impl Live {
    /// Socket of a guest that is connected to a volume and may write it.
    pub(super) fn writer(&self, volume: VolumeId) -> Option<&str> {
        let writer = |served: &&Served| {
            served.volume == volume
                && served.connected()
                && matches!(&served.state, State::Up { device, .. } if !device.options().read_only)
        };
        let found = self.attachments.values().find(writer);
        found.map(|served| served.socket.as_str())
    }
}

/// Closing a session waits for its requests in flight, so it happens beside the control plane's own threads.
async fn close(all: Vec<Served>) {
    let closed = tokio::task::spawn_blocking(move || {
        for served in all {
            if let State::Up { session, .. } = served.state {
                session.close();
            }
            // A failed attachment's socket is not ours.
        }
    });
    if let Err(e) = closed.await {
        tracing::error!(error = %e, "close attachments");
    }
}

/// The disk that a guest sees.
pub fn device(
    volume: &meta::Volume,
    handle: Handle,
    queues: u16,
    read_only: bool,
) -> Result<Arc<Device>> {
    let mut serial = volume.uuid.simple().to_string();
    serial.truncate(SERIAL_BYTES);
    let options = BlkOptions {
        read_only: read_only || volume.read_only,
        serial,
        queues,
    };
    BlkDevice::new(handle, options).map_err(|e| Failure::plain(Kind::Invalid, e))
}

fn shown(live: &Live, attachment: meta::Attachment) -> Attachment {
    let mut shown = Attachment {
        socket: attachment.socket,
        volume: attachment.target.name().to_string(),
        queues: attachment.queues,
        read_only: attachment.read_only,
        state: AttachmentState::Failed,
        queues_running: 0,
        last_error: None,
        counters: Counters::default(),
    };
    let served = live.attachments.get(&attachment.id);
    if let Some(State::Up { session, device }) = served.map(|served| &served.state) {
        let state = session.state();
        shown.state = match state.connected {
            true => AttachmentState::Connected,
            false => AttachmentState::Listening,
        };
        shown.queues_running = state.rings;
        shown.last_error = state.last_error;
        shown.counters = counters(device);
    }
    shown
}

fn counters(device: &Device) -> Counters {
    let c = device.counters();
    Counters {
        reads: c.reads,
        writes: c.writes,
        read_bytes: c.read_bytes,
        write_bytes: c.written_bytes,
        flushes: c.flushes,
        discards: c.discards + c.write_zeroes,
        errors: c.errors,
    }
}

/// Why a socket cannot be used.
pub fn socket_failure(e: &SocketError) -> Failure {
    let kind = match e {
        SocketError::InUse(_) | SocketError::Locked(..) | SocketError::NotASocket(_) => {
            Kind::Conflict
        }
        SocketError::TooLong(_) | SocketError::WrongDescriptor => Kind::Invalid,
        SocketError::NoDirectory(_) => Kind::NotFound,
        SocketError::Os { .. } => Kind::Failed,
    };
    Failure::plain(kind, e)
}
