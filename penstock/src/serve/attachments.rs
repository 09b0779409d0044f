//! Attachments: meta remembers them, sessions serve them.

use std::path::Path;
use std::sync::Arc;

use meta::{
    AttachmentId, AttachmentKey, AttachmentOptions, AttachmentSpec, AttachmentTarget, Meta,
    NodeState, VolumeId,
};
use vhost_backend::blk::{BlkDevice, BlkOptions, ModeKeeper, SERIAL_BYTES};
use vhost_backend::session::socket::{Endpoint, Listener, SocketError, SocketOptions};

use crate::api::types::{Attach, Attachment, AttachmentState, Counters};
use crate::failure::{Failure, Kind, Result};

use super::monitor::Found;
use super::node::{Live, Node, meta_failure};
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
    /// Its session is being closed.
    Detaching,
    /// It could not be restored; the reason.
    Failed(Failure),
}

/// Keeps with an attachment what its guest chose.
#[derive(Clone)]
struct Keeper {
    meta: Meta,
    attachment: AttachmentId,
    /// The session's thread is none of the runtime's.
    runtime: tokio::runtime::Handle,
}

impl std::fmt::Debug for Keeper {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Keeper")
            .field("attachment", &self.attachment)
            .finish_non_exhaustive()
    }
}

impl ModeKeeper for Keeper {
    fn keep(&self, writeback: bool) -> std::result::Result<(), String> {
        let kept = self.meta.set_write_through(self.attachment, !writeback);
        self.runtime
            .block_on(kept)
            .map(drop)
            .map_err(|e| e.to_string())
    }
}

impl Served {
    /// Tells the guest that the volume's size changed.
    pub fn notify_resize(&self) {
        if let State::Up { session, .. } = &self.state {
            session.notify_resize();
        }
    }

    fn problem(&self) -> Option<Found> {
        let socket = &self.socket;
        let (why, mend) = match &self.state {
            State::Failed(failure) => (
                failure.error.clone(),
                failure.mend.clone().unwrap_or_default(),
            ),
            State::Up { session, .. } if session.is_finished() => (
                "its session ended".to_owned(),
                "detach and attach it again".to_owned(),
            ),
            State::Up { .. } | State::Detaching => return None,
        };
        let what = format!("attachment {socket} is not served: {why}");
        Some(Found::new(format!("attachment {socket}"), what, mend))
    }

    fn connected(&self) -> bool {
        matches!(&self.state, State::Up { session, .. } if session.state().connected)
    }
}

impl Node {
    /// All attachments of this node.
    pub async fn attachments(&self) -> Result<Vec<Attachment>> {
        let live = self.live.lock().await;
        let own = self.asked.list_attachments_of(self.meta.node_id()).await;
        let all = own.map_err(meta_failure)?;
        Ok(all.into_iter().map(|a| shown(&live, a)).collect())
    }

    /// The attachments of this node, as far as it has applied what meta knows. Waits for no leader.
    pub(super) async fn attachments_as_applied(&self) -> Result<Vec<Attachment>> {
        let live = self.live.lock().await;
        let all = self.meta.applied().attachments().map_err(meta_failure)?;
        let mine = all.into_iter().filter(|a| a.node == self.meta.node_id());
        Ok(mine.map(|a| shown(&live, a)).collect())
    }

    /// Serves a volume on a socket.
    pub async fn attach(&self, request: Attach) -> Result<Attachment> {
        let mut live = self.live.lock().await;
        let volume = self
            .asked
            .get_volume(&request.volume)
            .await
            .map_err(meta_failure)?;
        live.refuse_replaced(&volume)?;
        if volume.stale_tail_end_bytes.is_some() && !live.volumes.contains_key(&volume.id) {
            self.drop_stale_tail(&mut live, &volume).await?;
        }
        let spec = AttachmentSpec {
            volume: request.volume,
            node: self.meta.node_id(),
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
            .asked
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
        let options = BlkOptions {
            read_only: attachment.read_only,
            queues: attachment.queues,
            writeback: !attachment.options.write_through,
            keeper: Some(Arc::new(Keeper {
                meta: self.meta.clone(),
                attachment: attachment.id,
                runtime: tokio::runtime::Handle::current(),
            })),
            ..BlkOptions::default()
        };
        let up = device(volume, handle, options).and_then(|device| {
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

    /// Ends the attachment on socket `target`, or of volume `target`. Waits for its requests in flight, and nothing else waits
    /// with it. Until they are done the attachment is there, so that nobody else writes the volume beside them.
    pub async fn detach(&self, target: &str, force: bool) -> Result<()> {
        let attachment = self.find(target).await?;
        if let Some(served) = self.take(&attachment, force).await? {
            close(vec![served]).await;
        }
        let mut live = self.live.lock().await;
        if let Some(Served { volume, state, .. }) = live.attachments.remove(&attachment.id)
            && matches!(state, State::Detaching)
        {
            self.close_in(&mut live, volume).await;
        }
        // What it serves is closed: this waits as long as it can.
        let deleted = self
            .meta
            .delete_attachment(AttachmentKey::Id(attachment.id));
        deleted.await.map(drop).map_err(meta_failure)
    }

    /// Takes the session of an attachment, to be closed.
    async fn take(&self, attachment: &meta::Attachment, force: bool) -> Result<Option<Session>> {
        let mut live = self.live.lock().await;
        let Some(served) = live.attachments.get_mut(&attachment.id) else {
            return Ok(None);
        };
        let socket = &attachment.socket;
        if served.connected() && !force {
            return Err(Failure::new(
                Kind::Conflict,
                format!("a guest uses {socket}"),
                "detach the disk from the guest first, or force it",
            ));
        }
        match std::mem::replace(&mut served.state, State::Detaching) {
            State::Up { session, .. } => Ok(Some(session)),
            State::Detaching => Err(Failure::new(
                Kind::Conflict,
                format!("{socket} is being detached already"),
                "wait until its requests in flight are done",
            )),
            failed @ State::Failed(_) => {
                served.state = failed;
                Ok(None)
            }
        }
    }

    async fn find(&self, target: &str) -> Result<meta::Attachment> {
        let all = self.asked.list_attachments().await.map_err(meta_failure)?;
        let own = self.meta.node_id();
        let (mut found, elsewhere): (Vec<_>, Vec<_>) = all
            .into_iter()
            .filter(|a| a.socket == target || a.target.name().as_str() == target)
            .partition(|a| a.node == own);
        match found.len() {
            1 => Ok(found.remove(0)),
            0 if !elsewhere.is_empty() => Err(self.attached_elsewhere(target, elsewhere[0].node)),
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

    fn attached_elsewhere(&self, target: &str, node: meta::NodeId) -> Failure {
        let map = self.meta.map();
        let is_down = map.node(node).is_some_and(|n| n.state == NodeState::Down);
        match is_down {
            true => Failure::new(
                Kind::NotFound,
                format!("'{target}' is attached on node {node}, which is down"),
                format!(
                    "start that node and detach it there; if it is gone for good, `penstock node remove {node}` forgets its \
                     attachments, too"
                ),
            ),
            false => Failure::new(
                Kind::NotFound,
                format!("'{target}' is attached on node {node}"),
                "detach it there",
            ),
        }
    }

    /// Serves again what meta remembers. What cannot be served is told by `health` and stops nothing else.
    pub(super) async fn restore_attachments(&self) -> Result<()> {
        let mut live = self.live.lock().await;
        let own = self.meta.list_attachments_of(self.meta.node_id()).await;
        for attachment in own.map_err(meta_failure)? {
            let AttachmentTarget::Volume { name, id } = &attachment.target;
            let served = match self.meta.get_volume(name).await.map_err(meta_failure) {
                Ok(volume) => self.serve(&mut live, &volume, &attachment).await,
                Err(failure) => Err(failure),
            };
            let served = served.unwrap_or_else(|failure| {
                tracing::error!(socket = attachment.socket, %failure, "restore attachment");
                Served {
                    volume: *id,
                    socket: attachment.socket.clone(),
                    state: State::Failed(failure),
                }
            });
            live.attachments.insert(attachment.id, served);
        }
        Ok(())
    }

    /// Why attachments do not work.
    pub(super) async fn attachment_problems(&self) -> Vec<Found> {
        let live = self.live.lock().await;
        let served = live.attachments.values();
        served.filter_map(Served::problem).collect()
    }

    /// Ends all sessions; meta keeps the attachments for the next start.
    pub(super) async fn close_attachments(&self) {
        let (mut sessions, mut volumes) = (Vec::new(), Vec::new());
        let all = std::mem::take(&mut self.live.lock().await.attachments);
        for served in all.into_values() {
            // A failed attachment's socket is not ours.
            if let State::Up { session, .. } = served.state {
                sessions.push(session);
                volumes.push(served.volume);
            }
        }
        close(sessions).await;
        let mut live = self.live.lock().await;
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

/// Closing a session waits for its requests in flight, so it happens beside the control plane's own threads, and for each
/// session by itself: one that hangs keeps no other from its end.
async fn close(sessions: Vec<Session>) {
    let mut closing = tokio::task::JoinSet::new();
    for session in sessions {
        closing.spawn_blocking(move || session.close());
    }
    while let Some(closed) = closing.join_next().await {
        if let Err(e) = closed {
            tracing::error!(error = %e, "close an attachment");
        }
    }
}

/// The disk that a guest sees; what follows from the volume is filled into `options`.
pub fn device(volume: &meta::Volume, handle: Handle, options: BlkOptions) -> Result<Arc<Device>> {
    let mut serial = volume.uuid.simple().to_string();
    serial.truncate(SERIAL_BYTES);
    let options = BlkOptions {
        read_only: options.read_only || volume.read_only,
        serial,
        ..options
    };
    BlkDevice::new(handle, options).map_err(|e| Failure::plain(Kind::Invalid, e))
}

fn shown(live: &Live, attachment: meta::Attachment) -> Attachment {
    let mut shown = Attachment {
        socket: attachment.socket,
        volume: attachment.target.name().to_string(),
        queues: attachment.queues,
        read_only: attachment.read_only,
        write_through: attachment.options.write_through,
        state: AttachmentState::Failed,
        queues_running: 0,
        last_error: None,
        counters: Counters::default(),
    };
    match live.attachments.get(&attachment.id).map(|s| &s.state) {
        Some(State::Up { session, device }) => {
            let state = session.state();
            shown.state = match state.connected {
                _ if session.is_finished() => AttachmentState::Failed,
                true => AttachmentState::Connected,
                false => AttachmentState::Listening,
            };
            shown.queues_running = state.rings;
            shown.last_error = state.last_error;
            shown.write_through = !device.writeback();
            shown.counters = counters(device);
        }
        Some(State::Detaching) => shown.state = AttachmentState::Detaching,
        Some(State::Failed(_)) | None => {}
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
