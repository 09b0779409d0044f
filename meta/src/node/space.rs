//! Looks after the space that is kept for the metadata.

use std::sync::Arc;
use std::time::Duration;

use super::Core;

/// Between two looks.
const LOOK_INTERVAL: Duration = Duration::from_secs(1);

/// Does so until the node ends.
pub(super) async fn keep_ballast(core: Arc<Core>) {
    loop {
        tokio::time::sleep(LOOK_INTERVAL).await;
        let core = Arc::clone(&core);
        // A disk that hangs holds up nothing else.
        let look = tokio::task::spawn_blocking(move || {
            if let Some(db) = core.db() {
                db.database().tend_ballast();
            }
        });
        if look.await.is_err() {
            return;
        }
    }
}
