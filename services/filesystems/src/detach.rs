//! How attachments of filesystems end: detached here, or forgotten while their node is down.
//!
//! What a forgotten attachment had open is ended by the leader of the filesystem's group, once the node's
//! heartbeat lease has ended. Should the node only be cut off, it ends the attachment itself when it is heard
//! of again.

use api::failure::{Failure, Kind, Result};
use api::types::{FilesystemDetachQuery, FilesystemDetached};
use meta::AttachmentKey;
use service::failures::meta_failure;
use service::view::View;

use crate::filesystems::FilesystemService;
use ::attachments::sockets::attached_elsewhere;

use crate::attachments::{close_sessions, take};

impl FilesystemService {
    /// Ends an attachment of this node, and waits for its requests in flight; or forgets one of another node
    /// that is down, if that is asked for.
    pub async fn detach(&self, query: &FilesystemDetachQuery) -> Result<FilesystemDetached> {
        let all = self.cluster.asked.list_filesystem_attachments().await;
        let all = all.map_err(meta_failure)?;
        let view = self.cluster.view().await?;
        let attachment = match query.forget {
            true => forgettable(&view, all, query)?,
            false => self.own_attachment(&view, all, &query.target)?,
        };
        let key = AttachmentKey::Id(attachment.id);
        let deleted = match query.forget {
            true => {
                let asked = self.cluster.asked.forced();
                asked.delete_filesystem_attachment(key).await
            }
            false => {
                self.end_attachment(&attachment, query.force).await?;
                self.cluster.meta.delete_filesystem_attachment(key).await
            }
        };
        deleted.map_err(meta_failure)?;
        let node = view.node_name(attachment.node);
        if query.forget {
            tracing::warn!(
                filesystem = %attachment.name, socket = attachment.socket, node,
                "forgot an attachment of a node that is down"
            );
        }
        Ok(FilesystemDetached {
            filesystem: attachment.name.to_string(),
            socket: attachment.socket,
            node,
        })
    }

    async fn end_attachment(
        &self,
        attachment: &meta::FilesystemAttachment,
        force: bool,
    ) -> Result<()> {
        let session = {
            let mut live = self.live.lock().await;
            match live.attachments.get_mut(&attachment.id) {
                Some(served) => take(served, force)?,
                None => None,
            }
        };
        if let Some(session) = session {
            close_sessions(vec![session]).await;
        }
        let mut live = self.live.lock().await;
        live.attachments.remove(&attachment.id);
        Ok(())
    }

    /// Ends attachments of this node that were forgotten while nobody heard of it.
    pub(crate) async fn end_forgotten_attachments(&self) {
        let served: Vec<_> = {
            let live = self.live.lock().await;
            live.attachments.keys().copied().collect()
        };
        if served.is_empty() {
            return;
        }
        // Read after that: whatever is served had a record before.
        let Ok(all) = self.cluster.asked.list_filesystem_attachments().await else {
            return;
        };
        for id in served {
            if all.iter().any(|one| one.id == id) {
                continue;
            }
            let session = {
                let mut live = self.live.lock().await;
                let Some(served) = live.attachments.get_mut(&id) else {
                    continue;
                };
                match take(served, true) {
                    Ok(session) => session,
                    // Whoever detaches it does the rest.
                    Err(_) => continue,
                }
            };
            tracing::warn!("an attachment of a filesystem was forgotten elsewhere, and ends");
            if let Some(session) = session {
                close_sessions(vec![session]).await;
            }
            self.live.lock().await.attachments.remove(&id);
        }
    }

    fn own_attachment(
        &self,
        view: &View,
        all: Vec<meta::FilesystemAttachment>,
        target: &str,
    ) -> Result<meta::FilesystemAttachment> {
        let named = all.into_iter().filter(|one| is_meant(one, target));
        let (mut own, elsewhere): (Vec<_>, Vec<_>) =
            named.partition(|one| one.node == self.cluster.node_id());
        match (own.len(), elsewhere.first()) {
            (1, _) => Ok(own.remove(0)),
            (0, None) => Err(not_attached(target)),
            (0, Some(other)) => Err(attached_elsewhere(view, target, other.node)),
            (n, _) => Err(Failure::new(
                Kind::Conflict,
                format!("filesystem '{target}' has {n} attachments on this node"),
                "name the socket of the one to detach",
            )),
        }
    }
}

pub(crate) fn is_meant(one: &meta::FilesystemAttachment, target: &str) -> bool {
    one.socket == target || one.name.as_str() == target
}

pub(crate) fn not_attached(target: &str) -> Failure {
    Failure::new(
        Kind::NotFound,
        format!("nothing is attached as '{target}'"),
        "see `penstock attachment list`",
    )
}

/// The attachment to forget: its node is down.
fn forgettable(
    view: &View,
    all: Vec<meta::FilesystemAttachment>,
    query: &FilesystemDetachQuery,
) -> Result<meta::FilesystemAttachment> {
    let target = query.target.as_str();
    let node = query.node.as_deref().map(|name| view.node(name));
    let node = node.transpose()?.map(|node| node.id);
    let meant = all.into_iter().filter(|one| is_meant(one, target));
    let mut meant: Vec<_> = meant
        .filter(|one| node.is_none_or(|node| node == one.node))
        .collect();
    match meant.as_slice() {
        [] => Err(not_attached(target)),
        [one] if view.is_down(one.node) => Ok(meant.remove(0)),
        [one] => Err(attached_elsewhere(view, target, one.node)),
        several => {
            let names = several.iter().map(|one| view.node_name(one.node));
            let names = names.collect::<Vec<_>>().join(", ");
            Err(Failure::new(
                Kind::Conflict,
                format!(
                    "'{target}' names {} attachments, on nodes {names}",
                    several.len()
                ),
                "name the one to forget by its node with --node, and by its socket",
            ))
        }
    }
}
