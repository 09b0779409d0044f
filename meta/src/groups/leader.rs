//! What the leader of a namespace group does by itself: it makes the group's voters and filesystems follow
//! the cluster map.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use namespace::{Answer, FilesystemId, Operation, Query, Request, SessionId, Time};
use tokio::sync::watch;

use super::group::NamespaceGroup;
use crate::ids::NamespaceGroupId;
use crate::map::ClusterMap;
use crate::net::ProposeError;
use crate::node::members::{Wanted, follow_map};

/// The leader compares group and map at least this often.
const INTERVAL: Duration = Duration::from_millis(500);
/// Who owns the root directory of a new filesystem: root. Everybody may look.
const ROOT_MODE: u16 = 0o755;

/// Looks after a group as long as it runs here.
pub(super) async fn keep(
    group: Arc<NamespaceGroup>,
    id: NamespaceGroupId,
    mut map: watch::Receiver<Arc<ClusterMap>>,
) {
    // Filesystems that are known to have their root.
    let mut made = BTreeSet::new();
    loop {
        let now = Arc::clone(&map.borrow_and_update());
        if group.leads() {
            follow_map(&group.raft, &now, Wanted::of_namespaces(id)).await;
            let wanted = now
                .filesystems()
                .filter(|filesystem| filesystem.group == id);
            for filesystem in wanted.map(|filesystem| filesystem.id) {
                if made.contains(&filesystem) {
                    continue;
                }
                match make(&group, filesystem).await {
                    Ok(()) => {
                        made.insert(filesystem);
                    }
                    // Somebody else leads, or it is tried again.
                    Err(error) => {
                        tracing::debug!(?filesystem, %error, "a filesystem is not made yet")
                    }
                }
            }
        }
        // When the map changes no more, the node ends, and this with it.
        let _ = tokio::time::timeout(INTERVAL, map.changed()).await;
    }
}

/// Makes a filesystem's root, unless it is there.
async fn make(group: &NamespaceGroup, filesystem: FilesystemId) -> Result<(), ProposeError> {
    let answers = group.read(vec![(filesystem, Query::Statistics)]).await?;
    if let [Ok(Answer::Statistics(Some(_)))] = answers.as_slice() {
        return Ok(());
    }
    let operation = Operation::CreateFilesystem {
        mode: ROOT_MODE,
        uid: 0,
        gid: 0,
    };
    let request = Request {
        session: SessionId::NONE,
        slot: 0,
        sequence: 0,
        at: now(),
        operation,
    };
    let replies = group.apply(vec![(filesystem, request)]).await?;
    match replies.into_iter().next() {
        Some(Err(error)) => Err(ProposeError::Failed {
            detail: error.to_string(),
        }),
        Some(Ok(_)) | None => Ok(()),
    }
}

fn now() -> Time {
    let since = SystemTime::now()
        .duration_since(SystemTime::UNIX_EPOCH)
        .unwrap_or_default();
    Time {
        seconds: i64::try_from(since.as_secs()).unwrap_or(i64::MAX),
        nanoseconds: since.subsec_nanos(),
    }
}
