//! Data of volumes that are gone. Whoever deletes a volume drops what its own devices hold; the other nodes find out by
//! looking.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use meta::LayerId;

use crate::failure::Result;

use super::node::{Node, meta_failure};

/// Pause between two looks.
const PAUSE: Duration = Duration::from_secs(120);

/// Goes on looking for as long as the node lives. A node of its own need not: what it did not finish is a leftover.
pub fn keep_dropping(node: &Arc<Node>) {
    if node.membership.is_none() {
        return;
    }
    let node = Arc::downgrade(node);
    tokio::spawn(async move {
        while let Some(node) = node.upgrade() {
            match node.drop_garbage().await {
                Ok(0) => {}
                Ok(layers) => tracing::info!(layers, "dropped data of volumes that are gone"),
                Err(failure) => tracing::warn!(%failure, "drop data of volumes that are gone"),
            }
            drop(node);
            tokio::time::sleep(PAUSE).await;
        }
    });
}

impl Node {
    /// Drops layers of which meta knows no volume; how many.
    async fn drop_garbage(&self) -> Result<usize> {
        let held = self.storage.layers().await?;
        // Asked after the devices were: a volume is known before anything of it is stored, and its layers' numbers are
        // never used again.
        let volumes = self.meta.list_volumes().await.map_err(meta_failure)?;
        let garbage = garbage(held, volumes.iter().flat_map(|volume| &volume.layers));
        self.storage.drop_layers(&garbage).await?;
        Ok(garbage.len())
    }
}

fn garbage<'a>(held: Vec<LayerId>, known: impl Iterator<Item = &'a LayerId>) -> Vec<LayerId> {
    let known: BTreeSet<&LayerId> = known.collect();
    held.into_iter()
        .filter(|layer| !known.contains(layer))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_no_volume_has_is_dropped() {
        let layers = |ids: &[u64]| ids.iter().copied().map(LayerId).collect::<Vec<_>>();
        let known = layers(&[1, 3]);
        assert_eq!(
            garbage(layers(&[1, 2, 3, 4]), known.iter()),
            layers(&[2, 4])
        );
        assert_eq!(garbage(layers(&[1]), known.iter()), layers(&[]));
    }
}
