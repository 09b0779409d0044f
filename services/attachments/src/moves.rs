//! Moves of attachments without a guest, from this node or to it.

use std::path::Path;
use std::time::{Duration, Instant};

use api::failure::{Failure, Kind, Result};
use api::types::{DetachQuery, Move, Moved};
use meta::{Attachment, AttachmentKey, Incoming, MetaError, NodeId};
use service::failures::meta_failure;
use service::view::View;

use crate::attachments::{Attachments, Live};

use crate::block;
use crate::migration::MOVE_WAIT_MAX;

/// Pause between two checks of whether the other node has taken over an attachment.
const MOVE_POLL: Duration = Duration::from_millis(50);

impl Attachments {
    /// Serves an attachment that another node moves to this one. Returns true if it was not served before.
    pub(crate) async fn serve_moved(&self, live: &mut Live<'_>, record: &Attachment) -> bool {
        let is_new = record.options.incoming == Some(Incoming::Move)
            && !live.attached.served.contains_key(&record.id);
        if !is_new {
            return false;
        }
        let served = match self.check_moved(live, record) {
            Ok(()) => match self.cluster.meta.get_volume(record.target.name()).await {
                Ok(volume) => self.serve(live, &volume, record).await,
                Err(error) => Err(meta_failure(error)),
            },
            Err(failure) => Err(failure),
        };
        match served {
            Ok(served) => {
                live.attached.served.insert(record.id, served);
                self.rings_changed.notify_one();
            }
            Err(failure) => {
                tracing::error!(%failure, socket = record.socket, "failed to serve moved attachment");
                let refused = self
                    .cluster
                    .meta
                    .delete_attachment(AttachmentKey::Incoming(record.id));
                if let Err(error) = refused.await {
                    tracing::warn!(%error, socket = record.socket, "failed to refuse moved attachment");
                }
            }
        }
        true
    }

    /// Checks the socket's name, which another node has chosen: it must not be a block device of this
    /// machine, or look like the socket `NAME.sock` of another volume or filesystem.
    fn check_moved_name(&self, record: &Attachment) -> Result<()> {
        if block::is_block(record) {
            return Err(Failure::plain(
                Kind::Denied,
                format!("{} would be a block device of this node", record.socket),
            ));
        }
        let stem = Path::new(&record.socket).file_stem();
        let Some(name) = stem.and_then(|stem| stem.to_str()) else {
            return Ok(());
        };
        if record.target.name().as_str() == name {
            return Ok(());
        }
        let applied = self.cluster.meta.applied();
        let volumes = applied.volumes().map_err(meta_failure)?;
        let filesystems = applied.filesystems().map_err(meta_failure)?;
        let is_anothers = volumes.iter().any(|one| one.name.as_str() == name)
            || filesystems.iter().any(|one| one.name.as_str() == name);
        match is_anothers {
            false => Ok(()),
            true => Err(Failure::new(
                Kind::Denied,
                format!("{} is the socket of '{name}' by its name", record.socket),
                "name another one with --socket",
            )),
        }
    }

    /// Checks the socket's path, which another node has chosen: it must be in a directory for sockets of this
    /// node.
    fn check_moved(&self, live: &Live<'_>, record: &Attachment) -> Result<()> {
        self.check_moved_name(record)?;
        let dir = Path::new(&record.socket).parent();
        let config = &self.config;
        let configured = config
            .privileges
            .socket_dirs
            .iter()
            .map(|dir| dir.as_path());
        let mut served = live.attached.served.values();
        let is_known = dir.is_some_and(|dir| {
            configured
                .chain([config.data.as_path()])
                .any(|known| known == dir)
                || served.any(|one| Path::new(&one.socket).parent() == Some(dir))
        });
        match is_known {
            true => Ok(()),
            false => Err(Failure::new(
                Kind::Denied,
                format!(
                    "{} is not in a directory for sockets of this node",
                    record.socket
                ),
                "add its directory to socket_dirs in the configuration, or name another one with --socket",
            )),
        }
    }

    /// Moves an attachment without a guest to another node. Returns its new place.
    pub async fn move_to(&self, request: Move) -> Result<Moved> {
        self.require_cluster("move")?;
        let view = self.cluster.view().await?;
        let query = DetachQuery {
            target: request.target,
            force: false,
            forget: false,
            node: None,
        };
        let source = self.find(&view, &query)?;
        let node = view.node(&request.to)?;
        let (name, id) = (node.name.to_string(), node.id);
        self.check_move(&view, &source, id).await?;
        let socket = request.socket.unwrap_or_else(|| source.socket.clone());
        let offered = self.cluster.asked.move_attachment(source.id, id, &socket);
        let offered = offered.await.map_err(meta_failure)?;
        self.rings_changed.notify_one();
        let moved = self.wait_moved(&source, &offered).await?;
        match moved {
            true => Ok(Moved {
                volume: source.target.name().to_string(),
                socket,
                node: name,
            }),
            false => Err(Failure::new(
                Kind::Failed,
                format!("node '{name}' did not take over {socket}: nothing was moved"),
                format!(
                    "check the log of node '{name}', and that the directory of the socket exists there"
                ),
            )),
        }
    }

    /// Checks that the source and the destination of a move are valid.
    async fn check_move(&self, view: &View, source: &Attachment, to: NodeId) -> Result<()> {
        let name = view.node_name(to);
        if block::is_block(source) {
            return Err(Failure::new(
                Kind::Conflict,
                format!("{} is a block device of its node", source.socket),
                format!(
                    "detach it there, and attach it on node '{name}': penstock attach volume {} --block",
                    source.target.name()
                ),
            ));
        }
        if to == source.node {
            return Err(Failure::new(
                Kind::Conflict,
                format!(
                    "'{}' is attached on node '{name}' already",
                    source.target.name()
                ),
                "name another node with --to",
            ));
        }
        if view.is_down(to) {
            return Err(Failure::new(
                Kind::Conflict,
                format!("node '{name}' is down"),
                "start it, or name another node with --to",
            ));
        }
        let live = self.lock().await;
        match live.attached.served.get(&source.id) {
            Some(served) if served.connected() => Err(Failure::new(
                Kind::Conflict,
                format!("a guest uses {}", source.socket),
                format!(
                    "shut the guest down first, or migrate it live: `penstock attachment offer {volume} --to \
                     {name}` here, `penstock attach volume {volume} --socket PATH --incoming` on node \
                     '{name}', then migrate",
                    volume = source.target.name()
                ),
            )),
            _ => Ok(()),
        }
    }

    /// Waits until the other node has taken over or refused. Returns false if the source is unchanged.
    async fn wait_moved(&self, source: &Attachment, offered: &Attachment) -> Result<bool> {
        let begin = Instant::now();
        loop {
            let records = self
                .cluster
                .asked
                .list_attachments()
                .await
                .map_err(meta_failure)?;
            let is_there = |id| records.iter().any(|one| one.id == id);
            match (is_there(source.id), is_there(offered.id)) {
                (false, _) => return Ok(true),
                (true, false) => return Ok(false),
                (true, true) if begin.elapsed() < MOVE_WAIT_MAX => {
                    tokio::time::sleep(MOVE_POLL).await;
                }
                (true, true) => {
                    let called_off = self
                        .cluster
                        .asked
                        .delete_attachment(AttachmentKey::Incoming(offered.id));
                    // If this is refused, the other node took over or refused meanwhile: the records show
                    // which.
                    match called_off.await {
                        Ok(_) | Err(MetaError::Refused(_)) => {}
                        Err(error) => return Err(meta_failure(error)),
                    }
                }
            }
        }
    }
}
