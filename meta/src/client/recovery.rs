//! Calls about backups, and about metadata that went on after a disaster.

use super::Meta;
use crate::command::Command;
use crate::error::MetaError;
use crate::ids::UnixMillis;
use crate::model::DeviceEvidence;
use crate::recovery::Authority;

impl Meta {
    /// All metadata in one file, with everything that was acknowledged before this call. `authority` goes
    /// with them, so that nodes that lost theirs can be let in again.
    ///
    /// # Errors
    /// No leader answers, or this node's metadata cannot be read.
    pub async fn backup(&self, authority: Option<Authority>) -> Result<Vec<u8>, MetaError> {
        self.read(|_| Ok(())).await?;
        self.core.backup(authority).await
    }

    /// Tells what a device of this node says of its groups and layers.
    pub async fn report_evidence(&self, evidence: DeviceEvidence) -> Result<(), MetaError> {
        let at = UnixMillis::now();
        let report = Command::ReportEvidence { evidence, at };
        self.propose(report).await.map(drop)
    }

    /// Says that all devices are back that will come: which replicas count is decided by what they say.
    pub async fn choose_replicas(&self, without_missing: bool) -> Result<(), MetaError> {
        let at = UnixMillis::now();
        let choose = Command::ChooseReplicas {
            without_missing,
            at,
        };
        self.propose(choose).await.map(drop)
    }

    /// Gives up what devices hold of volumes that the metadata do not know.
    pub async fn forget_unknown(&self) -> Result<(), MetaError> {
        let at = UnixMillis::now();
        self.propose(Command::ForgetUnknown { at }).await.map(drop)
    }
}
