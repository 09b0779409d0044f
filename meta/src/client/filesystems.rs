//! Filesystems.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use namespace::{Answer, Query};
use uuid::Uuid;

use super::Meta;
use crate::command::{Command, FilesystemSpec, Outcome};
use crate::error::MetaError;
use crate::groups::Filesystems;
use crate::ids::{NamespaceGroupId, UnixMillis};
use crate::level::Level;
use crate::model::Filesystem;
use crate::refusal::{FilesystemRefusal, Refusal};
use crate::report::RaftStatus;
use crate::state::tables::FILESYSTEMS;

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
        // Older programs would not understand what is proposed.
        if self.map().level() < Level::FILESYSTEMS {
            return Err(MetaError::Refused(FilesystemRefusal::LevelTooLow.into()));
        }
        let command = Command::CreateFilesystem {
            uuid,
            filesystem,
            at: UnixMillis::now(),
        };
        let made = match self.propose(command).await? {
            Outcome::Filesystem(filesystem) => filesystem,
            other => return Err(super::unexpected(&other)),
        };
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
