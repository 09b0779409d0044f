//! Filesystems. They can be made and shown; this version does not serve them to guests yet.

use meta::{DEFAULT_POOL, FilesystemSpec, Meta};
use uuid::Uuid;

use crate::api::types::{
    Filesystem, FilesystemAttach, FilesystemAttachment, FilesystemCreate, FilesystemDetached,
    FilesystemState,
};
use crate::failure::{Failure, Kind, Result};

use super::node::{Node, done_unseen, meta_failure};

impl Node {
    /// All filesystems.
    pub async fn filesystems(&self, reader: &Meta) -> Result<Vec<Filesystem>> {
        let all = reader.list_filesystems().await.map_err(meta_failure)?;
        let mut shown = Vec::new();
        for one in all {
            shown.push(filesystem_shown(reader, one).await?);
        }
        Ok(shown)
    }

    /// One filesystem.
    pub async fn filesystem(&self, name: &str) -> Result<Filesystem> {
        let found = self.asked.get_filesystem(name).await;
        filesystem_shown(&self.asked, found.map_err(meta_failure)?).await
    }

    /// Creates an empty filesystem.
    pub async fn filesystem_create(&self, request: FilesystemCreate) -> Result<Filesystem> {
        let spec = FilesystemSpec {
            name: request.name,
            pool: request.pool.unwrap_or_else(|| DEFAULT_POOL.to_owned()),
        };
        let made = self.asked.create_filesystem(Uuid::new_v4(), spec).await;
        let shown = filesystem_shown(&self.asked, made.map_err(meta_failure)?).await;
        shown.map_err(done_unseen)
    }

    /// Deletes a filesystem.
    pub async fn filesystem_delete(&self, _name: &str) -> Result<()> {
        Err(not_built("delete a filesystem"))
    }

    /// The attachments of filesystems on this node.
    pub async fn filesystem_attachments(
        &self,
        _reader: &Meta,
    ) -> Result<Vec<FilesystemAttachment>> {
        Ok(Vec::new())
    }

    /// Serves a filesystem on a socket.
    pub async fn filesystem_attach(
        &self,
        _request: FilesystemAttach,
    ) -> Result<FilesystemAttachment> {
        Err(not_built("attach a filesystem"))
    }

    /// Ends an attachment of a filesystem.
    pub async fn filesystem_detach(
        &self,
        _target: &str,
        _force: bool,
    ) -> Result<FilesystemDetached> {
        Err(not_built("detach a filesystem"))
    }
}

async fn filesystem_shown(reader: &Meta, filesystem: meta::Filesystem) -> Result<Filesystem> {
    let pools = reader.list_pools().await.map_err(meta_failure)?;
    let pool = pools.iter().find(|pool| pool.id == filesystem.pool);
    Ok(Filesystem {
        name: filesystem.name.to_string(),
        id: filesystem.uuid.to_string(),
        pool: pool.map_or_else(String::new, |pool| pool.name.to_string()),
        state: FilesystemState::Ready,
        inodes: None,
        named_bytes: None,
        freed_bytes: None,
        sessions: None,
        problem: Some("this version does not ask its namespace group".to_owned()),
        attachments: Vec::new(),
        created_at: filesystem.created_at.into(),
    })
}

fn not_built(what: &str) -> Failure {
    Failure::plain(
        Kind::Failed,
        format!("cannot {what}: not built yet in this version"),
    )
}
