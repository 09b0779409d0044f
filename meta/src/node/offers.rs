//! Ends expired offers of attachments and expired incoming attachments.

use std::sync::Arc;
use std::time::Duration;

use openraft::ServerState;

use super::Core;
use crate::command::Command;
use crate::error::MetaError;
use crate::ids::UnixMillis;
use crate::model::Attachment;
use crate::state::tables::ATTACHMENTS;

/// Interval between two checks. An expired offer is refused even before it is removed.
const CHECK_INTERVAL: Duration = Duration::from_secs(10);

/// Checks for expired offers until the node stops.
pub(super) async fn expire(core: Arc<Core>) {
    loop {
        tokio::time::sleep(CHECK_INTERVAL).await;
        if core.raft.metrics().borrow().state != ServerState::Leader {
            continue;
        }
        let at = UnixMillis::now();
        match core.view(|view| ATTACHMENTS.all(view)) {
            Ok(all) if all.iter().any(|one| is_over(one, at)) => {
                // If this leader was deposed, the next one does it.
                let _ = core.propose_here(Command::ExpireOffers { at }).await;
            }
            Ok(_) => {}
            Err(MetaError::Stopped) => return,
            Err(error) => tracing::warn!(%error, "failed to look for expired offers"),
        }
    }
}

fn is_over(attachment: &Attachment, at: UnixMillis) -> bool {
    let offer = attachment.offer.map(|offer| offer.expires_at);
    let end = offer.or(attachment.expires_at);
    end.is_some_and(|end| end <= at)
}
