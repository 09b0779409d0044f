//! Ending the daemon for a failure that only a new process mends.

use std::sync::Arc;

use api::failure::Failure;
use tokio::sync::watch;

/// Handle to end the daemon.
#[derive(Debug, Clone)]
pub struct Ending(Arc<watch::Sender<Option<Failure>>>);

impl Default for Ending {
    fn default() -> Self {
        Self(Arc::new(watch::Sender::new(None)))
    }
}

impl Ending {
    /// Ends the daemon: guests wait for its next start.
    pub fn end_for(&self, failure: Failure) {
        self.0.send_replace(Some(failure));
    }

    /// Returns the failure once [`end_for`](Self::end_for) was called.
    pub async fn requested(&self) -> Failure {
        let mut ending = self.0.subscribe();
        match ending.wait_for(Option::is_some).await.as_deref() {
            Ok(Some(failure)) => failure.clone(),
            // `self` keeps the sender.
            Ok(None) | Err(_) => std::future::pending().await,
        }
    }
}
