//! What the leader of a namespace group does by itself: it makes the group's voters and filesystems follow
//! the cluster map, and has the map say who votes. What it clears away is in `upkeep.rs`.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use namespace::{Answer, Operation, Query, Request, SessionId, Time};
use tokio::time::timeout;

use super::group::NamespaceGroup;
use crate::command::Command;
use crate::error::MetaError;
use crate::ids::{NamespaceGroupId, NodeId};
use crate::map::ClusterMap;
use crate::model::{Filesystem, FilesystemState};
use crate::net::ProposeError;
use crate::node::members::{MembershipPolicy, MembershipStep, next_step, take_step};
use crate::node::{Core, Wait};

/// The leader compares group and map at least this often.
const INTERVAL: Duration = Duration::from_millis(500);
/// Everybody may look into the root directory of a new filesystem, which is root's.
const ROOT_MODE: u16 = 0o755;

/// Looks after a group as long as it runs here.
pub(super) async fn look_after(core: Arc<Core>, group: Arc<NamespaceGroup>, id: NamespaceGroupId) {
    let mut map = core.map.clone();
    // Filesystems that are known to have their root.
    let mut made = BTreeSet::new();
    loop {
        let now = Arc::clone(&map.borrow_and_update());
        if group.leads() {
            if let Err(error) = follow_voters(&core, &group, id, &now).await {
                tracing::warn!(group = id.0, %error, "cannot say who votes in a namespace group yet");
            }
            let is_ready = |one: &&Filesystem| one.state == FilesystemState::Ready;
            let here = now.filesystems().filter(|one| one.group == id);
            for filesystem in here.filter(is_ready) {
                if made.contains(&filesystem.id) {
                    continue;
                }
                match make(&core, &group, filesystem).await {
                    Ok(()) => {
                        made.insert(filesystem.id);
                    }
                    // Somebody else leads, or it is tried again.
                    Err(error) => {
                        tracing::debug!(filesystem = %filesystem.name, %error, "it is not made yet");
                    }
                }
            }
        }
        if let Ok(Err(_)) = timeout(INTERVAL, map.changed()).await {
            // The node ends.
            return;
        }
    }
}

/// Changes the group by one step. The map learns of a new voter before, and of one that is gone after.
async fn follow_voters(
    core: &Core,
    group: &NamespaceGroup,
    id: NamespaceGroupId,
    map: &ClusterMap,
) -> Result<(), MetaError> {
    let step = next_step(&group.raft, map, MembershipPolicy::of_namespaces(id));
    let mut voters = group.voters();
    if let Some(MembershipStep::Vote(next)) = &step {
        voters.extend(next);
    }
    let mut groups = map.namespace_groups();
    let Some(record) = groups.find(|record| record.id == id) else {
        return Ok(());
    };
    let said: BTreeSet<NodeId> = record.voters.iter().copied().collect();
    if !record.is_founded || said != voters {
        // What leads but for a moment, or not any more, finds no majority.
        if group.read(Vec::new()).await.is_err() {
            return Ok(());
        }
        let say = Command::SetNamespaceGroupVoters {
            group: id,
            voters: voters.into_iter().collect(),
        };
        core.propose(say, Wait::PATIENT).await?.map(drop)?;
        // The next round sees it.
        return Ok(());
    }
    if let Some(step) = step {
        take_step(&group.raft, step).await;
    }
    Ok(())
}

/// Makes a filesystem's root, unless it is there.
async fn make(
    core: &Core,
    group: &NamespaceGroup,
    filesystem: &Filesystem,
) -> Result<(), MetaError> {
    let failed = |error: ProposeError| MetaError::Failed {
        detail: error.to_string(),
    };
    let id = filesystem.id;
    let answers = group.read(vec![(id, Query::Statistics)]).await;
    if let [Ok(Answer::Statistics(Some(_)))] = answers.map_err(failed)?.as_slice() {
        return Ok(());
    }
    // By a map that is behind, it would be made again after it was deleted, and nobody remove it any more.
    core.catch_up(Wait::PATIENT).await?;
    let now = core.map.borrow().filesystem(&filesystem.name).cloned();
    if now.as_ref() != Some(filesystem) {
        return Ok(());
    }
    let operation = Operation::CreateFilesystem {
        mode: ROOT_MODE,
        uid: 0,
        gid: 0,
    };
    let replies = group.apply(vec![(id, of_leader(operation))]).await;
    match replies.map_err(failed)?.into_iter().next() {
        Some(Err(error)) => Err(MetaError::Failed {
            detail: error.to_string(),
        }),
        Some(Ok(_)) | None => Ok(()),
    }
}

/// A request of the leader's own.
pub(crate) fn of_leader(operation: Operation) -> Request {
    Request {
        session: SessionId::NONE,
        slot: 0,
        sequence: 0,
        at: now(),
        operation,
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
