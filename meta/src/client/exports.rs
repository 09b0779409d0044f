//! NFS exports.

use uuid::Uuid;

use super::{Meta, an_export};
use crate::command::{Command, ExportSpec};
use crate::error::MetaError;
use crate::ids::{NodeId, UnixMillis};
use crate::model::Export;
use crate::refusal::{ExportRefusal, Refusal};
use crate::state::tables::EXPORTS;

impl Meta {
    /// Says that an NFS node is to export a volume, as the file system `fsid`.
    pub async fn create_export(&self, fsid: Uuid, export: ExportSpec) -> Result<Export, MetaError> {
        let at = UnixMillis::now();
        an_export(
            self.propose(Command::CreateExport { fsid, export, at })
                .await?,
        )
    }

    /// Says that `to` is to serve an export from now on. Refused if that is not `from`'s any more, or if that
    /// can go on and it is not `planned`.
    pub async fn assign_export(
        &self,
        name: &str,
        (from, to): (NodeId, NodeId),
        planned: bool,
    ) -> Result<Export, MetaError> {
        let command = Command::AssignExport {
            name: name.to_owned(),
            from,
            to,
            planned,
            at: UnixMillis::now(),
        };
        an_export(self.propose(command).await?)
    }

    /// Begins to delete an export: its NFS node takes it down. The volume stays.
    pub async fn delete_export(&self, name: &str) -> Result<Export, MetaError> {
        let name = name.to_owned();
        an_export(self.propose(Command::DeleteExport { name }).await?)
    }

    /// Forgets an export that this node has taken down. Repeating it is harmless.
    pub async fn export_withdrawn(&self, name: &str) -> Result<(), MetaError> {
        let command = Command::ExportWithdrawn {
            name: name.to_owned(),
            node: self.node_id(),
            at: UnixMillis::now(),
        };
        self.propose(command).await.map(drop)
    }

    /// The export of this name.
    pub async fn get_export(&self, name: &str) -> Result<Export, MetaError> {
        let export = self.read(|view| EXPORTS.get(view, name)).await?;
        Ok(export.ok_or_else(|| {
            Refusal::from(ExportRefusal::Unknown {
                name: name.to_owned(),
            })
        })?)
    }

    /// All exports, by name.
    pub async fn list_exports(&self) -> Result<Vec<Export>, MetaError> {
        self.read(|view| EXPORTS.all(view)).await
    }
}
