//! Filesystems.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use namespace::{Answer, Query};
use uuid::Uuid;

use super::{Meta, a_filesystem, a_filesystem_attachment};
use crate::command::{AttachmentKey, Command, FilesystemAttachmentSpec, FilesystemSpec};
use crate::error::MetaError;
use crate::groups::Filesystems;
use crate::ids::{NamespaceGroupId, NodeId, UnixMillis};
use crate::model::{Filesystem, FilesystemAttachment};
use crate::refusal::{FilesystemRefusal, Refusal};
use crate::report::RaftStatus;
use crate::state::tables::{FILESYSTEM_ATTACHMENTS, FILESYSTEMS};

/// A new filesystem is there in this time: its group may have to elect its first leader.
const MADE_WAIT_MAX: Duration = Duration::from_secs(20);
/// Pause before it is looked for again.
const MADE_PAUSE: Duration = Duration::from_millis(20);

impl Meta {
    /// Makes a filesystem; `uuid` tells a repeated call from another one. It can be used when this returns.
    pub async fn create_filesystem(
        &self,
        uuid: Uuid,
        filesystem: FilesystemSpec,
    ) -> Result<Filesystem, MetaError> {
        let command = Command::CreateFilesystem {
            uuid,
            filesystem,
            at: UnixMillis::now(),
        };
        let made = a_filesystem(self.propose(command).await?)?;
        let group = self.filesystems(made.group);
        let deadline = Instant::now() + MADE_WAIT_MAX;
        loop {
            let answers = group.read(vec![(made.id, Query::Statistics)]).await?;
            if let [Ok(Answer::Statistics(Some(_)))] = answers.as_slice() {
                return Ok(made);
            }
            if Instant::now() >= deadline {
                let detail = format!(
                    "filesystem {} is recorded, and its namespace group {} has not made it within {} s: see \
                     that its nodes are up; it is made once they are",
                    made.name,
                    made.group,
                    MADE_WAIT_MAX.as_secs()
                );
                return Err(MetaError::Failed { detail });
            }
            tokio::time::sleep(MADE_PAUSE).await;
        }
    }

    /// Begins to delete a filesystem, with all its files: nobody can attach it from now on. The leader of its
    /// group does the rest by itself; the name is free once the filesystem is listed no more. Repeating it is
    /// harmless.
    pub async fn delete_filesystem(&self, name: &str) -> Result<Filesystem, MetaError> {
        let (name, at) = (name.to_owned(), UnixMillis::now());
        let delete = Command::DeleteFilesystem { name, at };
        a_filesystem(self.propose(delete).await?)
    }

    /// The filesystem of this name.
    pub async fn get_filesystem(&self, name: &str) -> Result<Filesystem, MetaError> {
        let found = self.read(|view| FILESYSTEMS.get(view, name)).await?;
        Ok(found.ok_or_else(|| {
            Refusal::from(FilesystemRefusal::Unknown {
                name: name.to_owned(),
            })
        })?)
    }

    /// All filesystems, by name.
    pub async fn list_filesystems(&self) -> Result<Vec<Filesystem>, MetaError> {
        self.read(|view| FILESYSTEMS.all(view)).await
    }

    /// Records that a socket serves a filesystem.
    pub async fn create_filesystem_attachment(
        &self,
        attachment: FilesystemAttachmentSpec,
    ) -> Result<FilesystemAttachment, MetaError> {
        let at = UnixMillis::now();
        let create = Command::CreateFilesystemAttachment { attachment, at };
        a_filesystem_attachment(self.propose(create).await?)
    }

    /// Forgets an attachment of a filesystem.
    pub async fn delete_filesystem_attachment(
        &self,
        attachment: AttachmentKey,
    ) -> Result<FilesystemAttachment, MetaError> {
        let delete = Command::DeleteFilesystemAttachment { attachment };
        a_filesystem_attachment(self.propose(delete).await?)
    }

    /// All attachments of filesystems, of all nodes, oldest first.
    pub async fn list_filesystem_attachments(
        &self,
    ) -> Result<Vec<FilesystemAttachment>, MetaError> {
        self.read(|view| FILESYSTEM_ATTACHMENTS.all(view)).await
    }

    /// Those that a node serves, oldest first: what its daemon restores at start.
    pub async fn list_filesystem_attachments_of(
        &self,
        node: NodeId,
    ) -> Result<Vec<FilesystemAttachment>, MetaError> {
        let mut all = self.list_filesystem_attachments().await?;
        all.retain(|attachment| attachment.node == node);
        Ok(all)
    }

    /// How the namespace groups of this node stand, as far as it knows. Waits for nobody.
    #[must_use]
    pub fn namespace_groups(&self) -> BTreeMap<NamespaceGroupId, RaftStatus> {
        self.core.groups.status()
    }

    /// What is asked of the filesystems of a namespace group.
    #[must_use]
    pub fn filesystems(&self, group: NamespaceGroupId) -> Filesystems {
        Filesystems::new(Arc::clone(&self.core), group)
    }
}
