//! Attachments: meta remembers them, sessions serve them.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::{Arc, Weak};

use api::failure::{Failure, Kind, Result};
use api::types::{Attach, Attachment, DetachQuery, Detached};
use fabric_transport::queue_pair::registrar::Registrar;
use meta::{
    AttachmentId, AttachmentKey, AttachmentOptions, AttachmentSpec, AttachmentTarget, Meta,
    VolumeId,
};
use vhost_backend::blk::{BlkDevice, BlkOptions};
use vhost_backend::memory::budget::{MemoryBudget, MemoryPolicy};
use vhost_backend::session::socket::Endpoint;
use volumes::{OpenVolumes, VolumeUsers, Volumes, serial};

use service::cluster::Cluster;
use service::code::Code;
use service::ending::Ending;
use service::failures::meta_failure;
use service::found::Found;
use service::prepared::Prepared;
use service::view::View;
use service::waiting::ended;
use storage::{Device, Handle, Session, Storage, Threads};
use tokio::sync::{Mutex, MutexGuard, Notify};

use crate::block::{self, Block};
use crate::block_devices::BlockDevices;
use crate::lost::Loss;
use crate::migration::Waiting;
use crate::options;
use crate::sockets::{attached_elsewhere, listen_on, restored, socket_failure};
use crate::write_cache::{self, WriteCacheKeeper};

/// An attachment of this node.
pub(crate) struct Served {
    /// What it serves.
    pub(crate) volume: VolumeId,
    pub(crate) socket: String,
    pub(crate) state: State,
    pub(crate) waiting: Waiting,
    /// It is a block device of this machine.
    pub(crate) block: Option<Block>,
}

pub(crate) enum State {
    Up {
        session: Session,
        device: Arc<Device>,
        /// Of an attachment that meta has.
        keeper: WriteCacheKeeper,
    },
    /// Its session is being closed.
    Detaching,
    /// It could not be restored; the reason.
    Failed(Failure),
    /// The lease of its volume is another node's: see [`lost`].
    Lost(Loss),
}

impl Served {
    /// Tells the guest that the volume's size changed.
    fn notify_resize(&self) {
        if let State::Up { session, .. } = &self.state {
            session.notify_config_changed();
        }
    }

    fn problem(&self) -> Option<Found> {
        let socket = &self.socket;
        let (why, hint) = match &self.state {
            State::Failed(failure) => (
                failure.error.clone(),
                failure.hint.clone().unwrap_or_default(),
            ),
            State::Lost(loss) => loss.describe(socket),
            State::Up { session, .. } if session.is_finished() => (
                "its session ended".to_owned(),
                "detach and attach it again".to_owned(),
            ),
            State::Up { .. } if self.waiting.is_overdue() => (
                "its guest waits for the lease of the volume, which another node has".to_owned(),
                "stop the guest that uses the volume there; a lease of a node that is down ends by itself"
                    .to_owned(),
            ),
            State::Up { .. } => {
                return self.block.as_ref().and_then(|block| block.problem(socket));
            }
            State::Detaching => return None,
        };
        let what = format!("attachment {socket} is not served: {why}");
        Some(Found::new(Code::AttachmentNotServed, socket, what, hint))
    }

    pub(crate) fn connected(&self) -> bool {
        matches!(&self.state, State::Up { session, .. } if session.state().connected)
    }
}

/// The attachments of this node.
pub struct Attachments {
    pub(crate) cluster: Cluster,
    pub(crate) config: Prepared,
    pub(crate) storage: Arc<Storage>,
    threads: Threads,
    /// Limit on the memory that all attachments map and pin.
    memory_budget: MemoryBudget,
    pub(crate) block_devices: BlockDevices,
    pub(crate) volumes: Arc<Volumes>,
    /// Locked only while the open volumes are locked.
    attached: Mutex<Attached>,
    /// Rings of an attachment were started or stopped.
    pub(crate) rings_changed: Arc<Notify>,
    pub(crate) ending: Ending,
}

/// Attachments that are served now.
#[derive(Default)]
pub(crate) struct Attached {
    /// Attachments, as many as meta has for this node.
    pub(crate) served: BTreeMap<AttachmentId, Served>,
    /// Attachments about whose move something is being done.
    pub(crate) migrating: BTreeSet<AttachmentId>,
}

/// Open volumes and attachments, both locked.
pub(crate) struct Live<'a> {
    /// Freed first: a task that locks the open volumes expects this unlocked.
    pub(crate) attached: MutexGuard<'a, Attached>,
    pub(crate) open: MutexGuard<'a, OpenVolumes>,
}

/// Parts of the daemon that attachments are served with.
pub struct Parts {
    /// Configuration and sandbox.
    pub config: Prepared,
    /// Data path.
    pub storage: Arc<Storage>,
    /// Data threads.
    pub threads: Threads,
    /// Memory that all attachments and filesystems may map and pin.
    pub memory_budget: MemoryBudget,
    /// Helper that makes block devices.
    pub block_devices: BlockDevices,
    /// Volumes to serve.
    pub volumes: Arc<Volumes>,
    /// Ends the daemon.
    pub ending: Ending,
}

impl Attachments {
    /// Serves nothing yet.
    pub fn new(cluster: Cluster, parts: Parts) -> Arc<Self> {
        let Parts {
            config,
            storage,
            threads,
            memory_budget,
            block_devices,
            volumes,
            ending,
        } = parts;
        let attachments = Arc::new(Self {
            cluster,
            config,
            storage,
            threads,
            memory_budget,
            block_devices,
            volumes,
            attached: Mutex::default(),
            rings_changed: Arc::default(),
            ending,
        });
        let users: Weak<Self> = Arc::downgrade(&attachments);
        attachments.volumes.set_users(users);
        attachments
    }

    /// The cluster that the attachments belong to.
    pub fn cluster(&self) -> &Cluster {
        &self.cluster
    }

    /// Locks open volumes and attachments: held from the first check to the last step of each change.
    pub(crate) async fn lock(&self) -> Live<'_> {
        let open = self.volumes.lock().await;
        let attached = self.attached();
        Live { attached, open }
    }

    /// The attachments, for a caller that has locked the open volumes.
    fn attached(&self) -> MutexGuard<'_, Attached> {
        let attached = self.attached.try_lock();
        attached.expect("locked only while the open volumes are locked")
    }

    /// All attachments of this node.
    pub async fn list(&self, reader: &Meta, everywhere: bool) -> Result<Vec<Attachment>> {
        let live = self.lock().await;
        let all = match everywhere {
            true => reader.list_attachments().await,
            false => reader.list_attachments_of(self.cluster.node_id()).await,
        };
        let all = all.map_err(meta_failure)?;
        Ok(all.into_iter().map(|a| self.shown(&live, a)).collect())
    }

    /// The attachments of this node, as far as it has applied what meta knows. Waits for no leader.
    pub async fn as_applied(&self) -> Result<Vec<Attachment>> {
        let live = self.lock().await;
        let own = self.own_as_applied()?.into_iter();
        Ok(own.map(|a| self.shown(&live, a)).collect())
    }

    /// Records of this node's attachments, as far as it has applied them.
    pub(crate) fn own_as_applied(&self) -> Result<Vec<meta::Attachment>> {
        let all = self.cluster.meta.applied().attachments();
        let own = all.map_err(meta_failure)?.into_iter();
        Ok(own.filter(|a| a.node == self.cluster.node_id()).collect())
    }

    /// Serves a volume on a socket, or as a block device.
    pub async fn attach(&self, mut request: Attach) -> Result<Attachment> {
        block::place(&mut request)?;
        if request.block {
            let helper = &self.block_devices;
            helper.ask(|client| client.probe()).await?;
        }
        let is_block = request.block;
        let attachment = self.attach_socket(request).await?;
        if is_block && let Err(failure) = self.make_block_device(attachment.id).await {
            if let Err(error) = self.detach_own(&attachment, true).await {
                tracing::warn!(failure = %error, "undo an attachment");
            }
            return Err(failure);
        }
        let live = self.lock().await;
        Ok(self.shown(&live, attachment))
    }

    async fn attach_socket(&self, request: Attach) -> Result<meta::Attachment> {
        let mut live = self.lock().await;
        let volume = self
            .cluster
            .asked
            .get_volume(&request.volume)
            .await
            .map_err(meta_failure)?;
        live.open.refuse_replaced(&volume)?;
        if volume.stale_tail_end_bytes.is_some() && !live.open.volumes.contains_key(&volume.id) {
            self.volumes
                .drop_stale_tail(&mut live.open, &volume)
                .await?;
        }
        let incoming = request.incoming.then_some(meta::Incoming::Guest);
        if request.incoming {
            self.require_cluster("take over")?;
        }
        let extra = options::of(&request)?;
        let spec = AttachmentSpec {
            volume: request.volume,
            node: self.cluster.node_id(),
            socket: request.socket,
            queues: request.queues,
            read_only: request.read_only,
            // Readers do not disturb each other.
            options: AttachmentOptions {
                shared: request.read_only,
                extra,
                incoming,
                ..AttachmentOptions::default()
            },
        };
        let attachment = self
            .cluster
            .asked
            .create_attachment(spec)
            .await
            .map_err(meta_failure)?;
        let free = match incoming {
            Some(_) => Ok(()),
            None => self.volumes.outwait_lease(&volume).await,
        };
        let served = match free {
            Ok(()) => self.serve(&mut live, &volume, &attachment).await,
            Err(failure) => Err(failure),
        };
        match served {
            Ok(served) => {
                live.attached.served.insert(attachment.id, served);
                Ok(attachment)
            }
            Err(failure) => {
                self.cluster
                    .meta
                    .delete_attachment(AttachmentKey::Id(attachment.id))
                    .await
                    .map_err(meta_failure)?;
                Err(failure)
            }
        }
    }

    pub(crate) async fn serve(
        &self,
        live: &mut Live<'_>,
        volume: &meta::Volume,
        attachment: &meta::Attachment,
    ) -> Result<Served> {
        let incoming = attachment.options.incoming;
        let handle = match incoming.is_some() || self.leaves(volume.id)? {
            true => {
                self.volumes
                    .open_without_lease(&mut live.open, volume)
                    .await?
            }
            false => self.volumes.open_in(&mut live.open, volume).await?,
        };
        let socket = attachment.socket.clone();
        let writeback = !attachment.options.write_through;
        let keeper = WriteCacheKeeper::new(self.cluster.meta.clone(), attachment.id, writeback);
        let options = BlkOptions {
            read_only: attachment.read_only,
            queues: attachment.queues,
            queue_size: options::queue_size(&attachment.options),
            writeback,
            keeper: Some(Arc::new(keeper.clone())),
            ..BlkOptions::default()
        };
        let block = Block::of(attachment, volume);
        let up = match device(volume, handle, options) {
            Ok(device) => self
                .listen_for(attachment, block.as_ref(), device.clone())
                .await
                .map(|session| State::Up {
                    session,
                    device,
                    keeper,
                }),
            Err(failure) => Err(failure),
        };
        match up {
            Ok(state) => Ok(Served {
                volume: volume.id,
                socket,
                state,
                waiting: Waiting::default(),
                block,
            }),
            Err(failure) => {
                self.volumes.close_in(&mut live.open, volume.id).await;
                Err(failure)
            }
        }
    }

    async fn listen_for(
        &self,
        attachment: &meta::Attachment,
        block: Option<&Block>,
        device: Arc<Device>,
    ) -> Result<Session> {
        let pins = options::is_pinned(&attachment.options);
        let Some(block) = block else {
            return self.listen(Path::new(&attachment.socket), device, pins);
        };
        let key = block.key().to_owned();
        let helper = &self.block_devices;
        let socket = helper.ask(move |client| client.listen(&key)).await?;
        let endpoint = Endpoint::from_fd(socket).map_err(|e| socket_failure(&e))?;
        // The kernel's bounce buffers are no memory that a network card reaches.
        self.serve_endpoint(endpoint, device, false)
    }

    /// Makes a socket with the configured access and serves `device` on it.
    pub fn listen(&self, path: &Path, device: Arc<Device>, pins: bool) -> Result<Session> {
        self.serve_endpoint(listen_on(&self.config, path)?, device, pins)
    }

    /// Serves `device` to whoever connects to `endpoint`, and pins its memory if it `pins` and data go over
    /// RDMA.
    pub fn serve_endpoint(
        &self,
        endpoint: Endpoint,
        device: Arc<Device>,
        pins: bool,
    ) -> Result<Session> {
        let registrar = match pins {
            true => self.storage.fabric().registrar(),
            false => Registrar::none(),
        };
        let memory = MemoryPolicy::new(registrar, self.memory_budget.clone());
        let session = Session::start(endpoint, device, self.threads.clone(), memory)
            .map_err(|e| Failure::plain(Kind::Failed, format!("cannot start a session: {e}")))?;
        let changed = Arc::clone(&self.rings_changed);
        session.observe(move |_| changed.notify_one());
        Ok(session)
    }

    /// Ends an attachment. Waits for its requests in flight, and nothing else waits with it. Until they are
    /// done the attachment is there, so that nobody else writes the volume beside them. One of another node
    /// is forgotten if that is down, and asked for.
    pub async fn detach(&self, query: &DetachQuery) -> Result<Detached> {
        let view = self.cluster.view().await?;
        let attachment = self.find(&view, query)?;
        let detached = Detached {
            volume: attachment.target.name().to_string(),
            socket: attachment.socket.clone(),
            node: view.node_name(attachment.node),
        };
        if attachment.node == self.cluster.node_id() {
            self.detach_own(&attachment, query.force).await?;
        } else {
            self.forget_attachment(&attachment).await?;
        }
        Ok(detached)
    }

    async fn detach_own(&self, attachment: &meta::Attachment, force: bool) -> Result<()> {
        self.remove_block_device(attachment.id, force).await?;
        if let Some(served) = self.take(attachment, force).await? {
            close(vec![served]).await;
        }
        let mut live = self.lock().await;
        if let Some(Served { volume, state, .. }) = live.attached.served.remove(&attachment.id)
            && matches!(state, State::Detaching)
        {
            self.volumes.close_in(&mut live.open, volume).await;
        }
        // What it serves is closed: this waits as long as it can.
        let key = AttachmentKey::Id(attachment.id);
        let deleted = self.cluster.meta.delete_attachment(key);
        deleted.await.map(drop).map_err(meta_failure)
    }

    /// Forgets an attachment of a node that is down. Its lease needs nothing: whoever opens the volume next
    /// is granted it once it has run out. Should that node only be cut off, it ends the attachment itself
    /// when it is heard of again ([`lost`]).
    async fn forget_attachment(&self, attachment: &meta::Attachment) -> Result<()> {
        let asked = self.cluster.asked.forced();
        let deleted = asked.delete_attachment(AttachmentKey::Id(attachment.id));
        deleted.await.map_err(meta_failure)?;
        tracing::warn!(
            volume = %attachment.target.name(), socket = attachment.socket, node = %attachment.node,
            "forgot an attachment of a node that is down"
        );
        Ok(())
    }

    /// Takes the session of an attachment, to be closed.
    async fn take(&self, attachment: &meta::Attachment, force: bool) -> Result<Option<Session>> {
        let mut live = self.lock().await;
        let Some(served) = live.attached.served.get_mut(&attachment.id) else {
            return Ok(None);
        };
        let socket = &attachment.socket;
        if served.connected() && !force && served.block.is_none() {
            return Err(Failure::new(
                Kind::Conflict,
                format!("a guest uses {socket}"),
                "detach the disk from the guest first, or repeat with --yes",
            ));
        }
        match std::mem::replace(&mut served.state, State::Detaching) {
            State::Up { session, .. } => Ok(Some(session)),
            State::Detaching => Err(Failure::new(
                Kind::Conflict,
                format!("{socket} is being detached already"),
                "wait until its requests in flight are done",
            )),
            closed @ (State::Failed(_) | State::Lost(_)) => {
                served.state = closed;
                Ok(None)
            }
        }
    }

    /// The attachment that is meant: one of this node if there is one.
    pub(crate) fn find(&self, view: &View, query: &DetachQuery) -> Result<meta::Attachment> {
        let target = query.target.as_str();
        let node = query.node.as_deref().map(|name| view.node(name));
        let node = node.transpose()?.map(|node| node.id);
        let own = self.cluster.node_id();
        let (mut found, mut elsewhere): (Vec<_>, Vec<_>) = view
            .attachments
            .iter()
            .filter(|a| a.socket == target || a.target.name().as_str() == target)
            .filter(|a| node.is_none_or(|node| node == a.node))
            .cloned()
            .partition(|a| a.node == own);
        match (found.len(), elsewhere.len()) {
            (1, _) => Ok(found.remove(0)),
            (0, 0) => Err(Failure::new(
                Kind::NotFound,
                match node {
                    Some(node) => {
                        let node = view.node_name(node);
                        format!("nothing is attached as '{target}' on node '{node}'")
                    }
                    None => format!("nothing is attached as '{target}'"),
                },
                "see `penstock attachment list`",
            )),
            (0, 1) if query.forget && view.is_down(elsewhere[0].node) => Ok(elsewhere.remove(0)),
            (0, n) if n > 1 && query.forget => {
                let names = elsewhere.iter().map(|a| view.node_name(a.node));
                Err(Failure::new(
                    Kind::Conflict,
                    format!(
                        "'{target}' names {n} attachments, on nodes {}",
                        names.collect::<Vec<_>>().join(", ")
                    ),
                    "name the one to forget by its node with --node, and by its socket",
                ))
            }
            (0, _) => Err(attached_elsewhere(view, target, elsewhere[0].node)),
            (n, _) => Err(Failure::new(
                Kind::Conflict,
                format!("volume '{target}' has {n} attachments"),
                "name the socket of the one to detach",
            )),
        }
    }

    /// Serves again what meta remembers. What cannot be served is told by `health` and stops nothing else.
    pub(crate) async fn restore(&self) -> Result<()> {
        let mut live = self.lock().await;
        let own = self
            .cluster
            .meta
            .list_attachments_of(self.cluster.node_id())
            .await;
        for attachment in own.map_err(meta_failure)? {
            // It is served after a check, because another node has chosen its socket.
            if attachment.options.incoming == Some(meta::Incoming::Move) {
                continue;
            }
            let AttachmentTarget::Volume { name, id } = &attachment.target;
            let volume = self
                .cluster
                .meta
                .get_volume(name)
                .await
                .map_err(meta_failure);
            // The kernel may have its device, be it served or not.
            let block = volume
                .as_ref()
                .ok()
                .and_then(|volume| Block::of(&attachment, volume));
            let served = match volume {
                Ok(volume) => self.serve(&mut live, &volume, &attachment).await,
                Err(failure) => Err(failure),
            };
            let served = match served {
                Ok(served) => served,
                Err(failure) => {
                    tracing::error!(socket = attachment.socket, %failure, "restore attachment");
                    Served {
                        volume: *id,
                        socket: attachment.socket.clone(),
                        state: self.closed(*id, failure).await,
                        waiting: Waiting::default(),
                        block,
                    }
                }
            };
            live.attached.served.insert(attachment.id, served);
        }
        Ok(())
    }

    /// Why attachments do not work.
    pub(crate) async fn attachment_problems(&self) -> Vec<Found> {
        let live = self.lock().await;
        let served = live.attached.served.values();
        let problem = |served: &Served| match &served.state {
            State::Up { session, .. } => restored(session, &served.socket).or(served.problem()),
            _ => served.problem(),
        };
        served.filter_map(problem).collect()
    }

    /// Ends all sessions; meta keeps the attachments for the next start.
    pub(crate) async fn close(&self) {
        let (mut sessions, mut volumes, mut keepers) = (Vec::new(), Vec::new(), Vec::new());
        let all = std::mem::take(&mut self.lock().await.attached.served);
        for served in all.into_values() {
            // A failed attachment's socket is not ours.
            if let State::Up {
                session, keeper, ..
            } = served.state
            {
                sessions.push(session);
                volumes.push(served.volume);
                keepers.push(keeper);
            }
        }
        close(sessions).await;
        write_cache::close_all(keepers).await;
        let mut live = self.lock().await;
        for volume in volumes {
            self.volumes.close_in(&mut live.open, volume).await;
        }
    }
}

impl VolumeUsers for Attachments {
    fn resized(&self, volume: VolumeId) {
        for served in self.attached().served.values() {
            if served.volume == volume {
                served.notify_resize();
            }
        }
    }

    fn writer(&self, volume: VolumeId) -> Option<String> {
        let writer = |served: &&Served| {
            served.volume == volume
                && served.connected()
                && matches!(&served.state, State::Up { device, .. } if !device.options().read_only)
        };
        let attached = self.attached();
        let found = attached.served.values().find(writer);
        found.map(|served| served.socket.clone())
    }
}

/// Closes sessions, each of which waits for its requests in flight. All begin at once: one that hangs keeps
/// no other from its end.
pub(crate) async fn close(sessions: Vec<Session>) {
    let closing: Vec<_> = sessions.into_iter().map(Session::begin_close).collect();
    for thread in closing {
        if ended(thread).await.is_err() {
            tracing::error!("thread of an attachment panicked");
        }
    }
}

/// The disk that a guest sees; what follows from the volume is filled into `options`.
pub fn device(volume: &meta::Volume, handle: Handle, options: BlkOptions) -> Result<Arc<Device>> {
    let options = BlkOptions {
        read_only: options.read_only || volume.read_only,
        serial: serial(volume),
        ..options
    };
    BlkDevice::new(handle, options).map_err(|e| Failure::plain(Kind::Invalid, e))
}
