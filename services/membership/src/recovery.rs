//! Backup of the metadata, and what an operator decides after a disaster.

use api::failure::Result;
use meta::recovery::Authority;
use service::failures::meta_failure;

use crate::nodes::Nodes;

impl Nodes {
    /// All metadata of the cluster in one file.
    pub async fn backup(&self) -> Result<Vec<u8>> {
        let authority = self.membership.as_ref().and_then(|membership| {
            let (certificate, key) = membership.authority()?;
            Some(Authority { certificate, key })
        });
        self.cluster
            .asked
            .backup(authority)
            .await
            .map_err(meta_failure)
    }

    /// After a restoration: replicas are chosen by what devices say.
    pub async fn resume(&self, without_missing: bool) -> Result<()> {
        let chosen = self.cluster.asked.choose_replicas(without_missing).await;
        chosen.map_err(meta_failure)
    }

    /// Data of volumes that the metadata do not know are given up.
    pub async fn forget_unknown(&self) -> Result<()> {
        self.cluster
            .asked
            .forget_unknown()
            .await
            .map_err(meta_failure)
    }
}
