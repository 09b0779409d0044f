//! Attachments of filesystems: meta remembers them, sessions serve them.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use api::failure::{Failure, Kind, Result};
use api::types::{AttachmentState, FilesystemAttach, FilesystemAttachment, RequestStats};
use fabric_transport::queue_pair::registrar::Registrar;
use fs_device::{FsCounters, FsDevice, FsOptions, LatencyClass};
use fs_service::MountedFilesystem;
use meta::{AttachmentKey, FilesystemAttachmentSpec, FilesystemState, Meta};
use service::code::Code;
use service::failures::meta_failure;
use service::found::Found;
use service::waiting::ended;
use vhost_backend::memory::budget::MemoryPolicy;
use vhost_backend::session::socket::Endpoint;

use crate::filesystems::FilesystemService;
use ::attachments::sockets::{listen_on, request_stats, restored};
use storage::Session;

use crate::backend::ClusterBackend;
use crate::filesystems::LiveFilesystems;

/// A filesystem as a guest sees it.
type Device = FsDevice<MountedFilesystem<ClusterBackend>>;

/// An attachment of this node.
pub struct ServedFilesystem {
    filesystem: String,
    socket: String,
    state: State,
}

enum State {
    Up {
        session: Session,
        device: Arc<Device>,
        began: Instant,
    },
    /// Its session is being closed.
    Detaching,
    /// It could not be restored; the reason.
    Failed(Failure),
}

/// What an attachment has done.
pub struct Figures<'a> {
    pub(crate) filesystem: &'a str,
    pub(crate) socket: &'a str,
    pub(crate) counters: FsCounters,
    /// In the order of [`LatencyClass::ALL`].
    pub(crate) latencies: [RequestStats; LatencyClass::ALL.len()],
    pub(crate) is_connected: bool,
    /// Time since the attachment is served.
    pub(crate) age: Duration,
}

impl ServedFilesystem {
    fn is_connected(&self) -> bool {
        matches!(&self.state, State::Up { session, .. } if session.state().connected)
    }

    /// What it has done; nothing if it is not served.
    pub(crate) fn figures(&self) -> Option<Figures<'_>> {
        let State::Up { device, began, .. } = &self.state else {
            return None;
        };
        let counters = device.counters();
        let latencies = LatencyClass::ALL.map(|class| {
            let bytes = match class {
                LatencyClass::Read => counters.read_bytes,
                LatencyClass::Write => counters.written_bytes,
                LatencyClass::Sync | LatencyClass::Metadata => 0,
            };
            request_stats(bytes, &device.latencies(class))
        });
        Some(Figures {
            age: began.elapsed(),
            filesystem: &self.filesystem,
            socket: &self.socket,
            counters,
            latencies,
            is_connected: self.is_connected(),
        })
    }

    fn problem(&self) -> Option<Found> {
        let socket = &self.socket;
        let (why, hint) = match &self.state {
            State::Failed(failure) => (
                failure.error.clone(),
                failure.hint.clone().unwrap_or_default(),
            ),
            State::Up { session, .. } if session.is_finished() => (
                "its session ended".to_owned(),
                "detach and attach it again".to_owned(),
            ),
            State::Up { .. } | State::Detaching => return None,
        };
        let what = format!("attachment {socket} is not served: {why}");
        Some(Found::new(Code::AttachmentNotServed, socket, what, hint))
    }

    pub(crate) fn show(&self) -> (AttachmentState, Option<String>) {
        match &self.state {
            State::Up { session, .. } => {
                let state = session.state();
                let word = match state.connected {
                    _ if session.is_finished() => AttachmentState::Failed,
                    true => AttachmentState::Connected,
                    false => AttachmentState::Listening,
                };
                (word, state.last_error)
            }
            State::Detaching => (AttachmentState::Detaching, None),
            State::Failed(failure) => (AttachmentState::Failed, Some(failure.error.clone())),
        }
    }
}

impl FilesystemService {
    /// The attachments of filesystems on this node.
    pub async fn attachments(&self, reader: &Meta) -> Result<Vec<FilesystemAttachment>> {
        let own = reader
            .list_filesystem_attachments_of(self.cluster.node_id())
            .await;
        let own = own.map_err(meta_failure)?.into_iter();
        let live = self.live.lock().await;
        Ok(own.map(|one| self.attachment_shown(&live, one)).collect())
    }

    /// The attachments of filesystems on all nodes.
    pub async fn attachments_everywhere(&self, reader: &Meta) -> Result<Vec<FilesystemAttachment>> {
        let all = reader.list_filesystem_attachments().await;
        let all = all.map_err(meta_failure)?.into_iter();
        let live = self.live.lock().await;
        Ok(all.map(|one| self.attachment_shown(&live, one)).collect())
    }

    fn attachment_shown(
        &self,
        live: &LiveFilesystems,
        attachment: meta::FilesystemAttachment,
    ) -> FilesystemAttachment {
        let served = live.attachments.get(&attachment.id);
        let is_own = attachment.node == self.cluster.node_id();
        let (state, error) = match (served, is_own) {
            (Some(served), _) => served.show(),
            (None, true) => (
                AttachmentState::Failed,
                Some("it was made and is not served: detach it and attach it again".to_owned()),
            ),
            // Only that node knows whether a guest is there.
            (None, false) => (AttachmentState::Elsewhere, None),
        };
        FilesystemAttachment {
            filesystem: attachment.name.to_string(),
            socket: attachment.socket,
            node: self.cluster.meta.map().node_name(attachment.node),
            tag: attachment.tag,
            queues: attachment.queues,
            read_only: attachment.read_only,
            state,
            error,
        }
    }

    /// Serves a filesystem on a socket, now and after every start of the daemon.
    pub async fn attach(&self, request: FilesystemAttach) -> Result<FilesystemAttachment> {
        let mut live = self.live.lock().await;
        let spec = FilesystemAttachmentSpec {
            filesystem: request.filesystem,
            node: self.cluster.node_id(),
            socket: request.socket,
            tag: request.tag,
            queues: request.queues,
            read_only: request.read_only,
        };
        let attachment = self.cluster.asked.create_filesystem_attachment(spec).await;
        let attachment = attachment.map_err(meta_failure)?;
        if live.attachments.contains_key(&attachment.id) {
            // Said twice.
            return Ok(self.attachment_shown(&live, attachment));
        }
        match self.serve_filesystem(&mut live, &attachment).await {
            Ok(served) => {
                live.attachments.insert(attachment.id, served);
                Ok(self.attachment_shown(&live, attachment))
            }
            Err(failure) => {
                let key = AttachmentKey::Id(attachment.id);
                let deleted = self.cluster.meta.delete_filesystem_attachment(key).await;
                deleted.map_err(meta_failure)?;
                Err(failure)
            }
        }
    }

    async fn serve_filesystem(
        &self,
        live: &mut LiveFilesystems,
        attachment: &meta::FilesystemAttachment,
    ) -> Result<ServedFilesystem> {
        let filesystem = self.cluster.meta.get_filesystem(&attachment.name).await;
        let filesystem = filesystem.map_err(meta_failure)?;
        if filesystem.state == FilesystemState::Lost {
            return Err(Failure::new(
                Kind::Conflict,
                format!("the names of filesystem '{}' are lost", attachment.name),
                "detach it, and delete it with `penstock fs delete`",
            ));
        }
        let client = self.client(live, &filesystem).await?;
        let options = FsOptions {
            tag: attachment.tag.clone(),
            request_queues: attachment.queues,
            read_only: attachment.read_only,
        };
        let mounted = MountedFilesystem::new(&client, attachment.read_only);
        let device = FsDevice::new(mounted, options)
            .map_err(|error| Failure::plain(Kind::Invalid, error))?;
        let endpoint = listen_on(&self.config, Path::new(&attachment.socket))?;
        let session = self.serve_device(endpoint, &device).await?;
        Ok(ServedFilesystem {
            filesystem: filesystem.name.to_string(),
            socket: attachment.socket.clone(),
            state: State::Up {
                session,
                device,
                began: Instant::now(),
            },
        })
    }

    async fn serve_device(&self, endpoint: Endpoint, device: &Arc<Device>) -> Result<Session> {
        let threads = self.threads().await?;
        // Guests' data are copied on their way: no card reaches their memory.
        let memory = MemoryPolicy::new(Registrar::none(), self.memory_budget.clone());
        let session = Session::start(endpoint, Arc::clone(device), threads, memory)
            .map_err(|e| Failure::plain(Kind::Failed, format!("cannot start a session: {e}")))?;
        let of_session = Arc::clone(device);
        session.observe(move |state| {
            // A guest that is gone without a word has nothing open any more.
            if !state.connected {
                of_session.end_session();
            }
        });
        Ok(session)
    }

    /// Serves again what meta remembers. What cannot be served is told by `health` and stops nothing else.
    pub(crate) async fn restore(&self) -> Result<()> {
        let all = self.cluster.meta.list_filesystem_attachments().await;
        let own = self.cluster.node_id();
        let mut live = self.live.lock().await;
        for attachment in all.map_err(meta_failure)? {
            if attachment.node != own {
                continue;
            }
            let served = self.serve_filesystem(&mut live, &attachment).await;
            let served = served.unwrap_or_else(|failure| {
                tracing::error!(socket = attachment.socket, %failure, "restore attachment");
                ServedFilesystem {
                    filesystem: attachment.name.to_string(),
                    socket: attachment.socket.clone(),
                    state: State::Failed(failure),
                }
            });
            live.attachments.insert(attachment.id, served);
        }
        Ok(())
    }

    /// Why attachments of filesystems do not work.
    pub(crate) async fn attachment_problems(&self) -> Vec<Found> {
        let live = self.live.lock().await;
        let served = live.attachments.values();
        let problem = |served: &ServedFilesystem| match &served.state {
            State::Up { session, .. } => restored(session, &served.socket).or(served.problem()),
            _ => served.problem(),
        };
        served.filter_map(problem).collect()
    }
}

/// Takes the session of an attachment, to be closed.
pub(crate) fn take(
    served: &mut ServedFilesystem,
    force: bool,
) -> Result<Option<(Session, Arc<Device>)>> {
    let socket = &served.socket;
    if served.is_connected() && !force {
        return Err(Failure::new(
            Kind::Conflict,
            format!("a guest uses {socket}"),
            "unmount the filesystem in the guest and remove its device first, or repeat with --yes",
        ));
    }
    match std::mem::replace(&mut served.state, State::Detaching) {
        State::Up {
            session, device, ..
        } => Ok(Some((session, device))),
        State::Detaching => Err(Failure::new(
            Kind::Conflict,
            format!("{socket} is being detached already"),
            "wait until its requests in flight are done",
        )),
        State::Failed(_) => Ok(None),
    }
}

/// Closes attachments' sessions; what is not served is left.
pub(crate) async fn close(served: Vec<ServedFilesystem>) {
    let up = served.into_iter().filter_map(|one| match one.state {
        State::Up {
            session, device, ..
        } => Some((session, device)),
        State::Detaching | State::Failed(_) => None,
    });
    close_sessions(up.collect()).await;
}

/// Closes sessions, each of which waits for its requests in flight. All begin at once, so that a slow one
/// does not delay the others. The work continues if the caller is gone.
pub(crate) async fn close_sessions(sessions: Vec<(Session, Arc<Device>)>) {
    let closing = sessions.into_iter().map(|(session, device)| {
        let thread = session.begin_close();
        tokio::spawn(async move {
            if ended(thread).await.is_err() {
                tracing::error!("thread of an attachment panicked");
            }
            device.end_session();
        })
    });
    for closed in closing.collect::<Vec<_>>() {
        if let Err(error) = closed.await {
            tracing::error!(%error, "close an attachment");
        }
    }
}
