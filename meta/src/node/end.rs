//! The end of the metadata service that this node did not ask for. Raft ends when it cannot write, or when it
//! meets what must not be, and does not begin again within the process; and a node that was removed, or is
//! too old, has nothing left to do.

use raft_host::RaftHandle;

use super::Core;
use crate::error::MetaError;

impl Core {
    /// Why Raft has ended; `None` while it runs.
    pub(super) fn death(&self) -> Option<String> {
        death_of(&self.raft)
    }

    /// Returns when Raft has ended, or the cluster does not want this node any more, with the reason.
    pub(crate) async fn ended(&self) -> MetaError {
        let mut metrics = self.raft.metrics();
        let raft_ended = async { while metrics.changed().await.is_ok() {} };
        tokio::select! {
            () = raft_ended => {}
            error = self.unwanted() => return error,
        }
        let detail = self.death().unwrap_or_else(|| "it ended".to_owned());
        MetaError::Failed { detail }
    }
}

/// Why a group's Raft machine has ended; `None` while it runs.
pub(crate) fn death_of(raft: &RaftHandle) -> Option<String> {
    let metrics = raft.metrics();
    let running = metrics.borrow().running_state.clone();
    match running {
        Err(error) => Some(error.to_string()),
        // A panic says nothing there, but drops the other end.
        Ok(()) => metrics
            .has_changed()
            .is_err()
            .then(|| "it panicked, and the log says where".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use crate::node::{MetaConfig, MetaNode};

    /// Far beyond what it takes.
    const WAIT_MAX: Duration = Duration::from_secs(60);

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn raft_panic_is_reported_and_ends_the_service() {
        let dir = tempfile::tempdir().unwrap();
        let config = MetaConfig::embedded("test");
        let node = MetaNode::open(dir.path(), config).await.unwrap();
        let meta = node.meta();
        assert_eq!(meta.problem(), None);
        let early = tokio::time::timeout(Duration::from_millis(50), meta.ended()).await;
        assert!(early.is_err(), "{early:?}");

        let died = node
            .core
            .raft
            .with_state(|_| panic!("as a test wants it"))
            .await;
        let died: Result<(), _> = died;
        assert!(died.is_err());
        let why = tokio::time::timeout(WAIT_MAX, meta.ended()).await.unwrap();
        assert!(why.to_string().contains("panicked"), "{why}");
        let problem = meta.problem().unwrap();
        assert!(problem.contains("panicked"), "{problem}");
    }
}
