//! What the leader of a namespace group clears away: sessions whose hosts are gone, inodes that nobody has
//! open any more, and filesystems that were deleted.
//!
//! All of it is done in bounded steps between other operations, and is found again by whoever leads next: the
//! records and the cluster map say what is left to do.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use namespace::{
    Answer, FilesystemId, ITEMS_MAX, Ino, Operation, Orphan, Outcome, Query, Session, SessionId,
};
use tokio::task::JoinSet;
use tokio::time::sleep;

use super::group::NamespaceGroup;
use super::leader::of_leader;
use super::sessions::SilentNodes;
use crate::command::Command;
use crate::error::MetaError;
use crate::ids::NamespaceGroupId;
use crate::map::ClusterMap;
use crate::model::{Filesystem, FilesystemState, SegmentOf, VolumeState};
use crate::net::ProposeError;
use crate::node::{Core, Wait};
use crate::state::segment;

/// Pause between rounds while there is nothing to do.
const IDLE_PAUSE: Duration = Duration::from_millis(500);
/// Pause between rounds while there is: what guests wait for goes on in between.
const BUSY_PAUSE: Duration = Duration::from_millis(5);
/// Steps for one filesystem in one round, each a log entry. Others have their turn then.
const STEPS_MAX: usize = 16;
/// Extents or attributes of one orphan that one operation removes. Few, so that the entry does not keep
/// others waiting.
const REAP_LIMIT: u32 = 256;
/// Records of a deleted filesystem that one operation removes.
const DROP_LIMIT: u32 = 1024;
/// Orphans that are looked at in one round.
const ORPHANS_MAX: u32 = 256;
/// Segments' volumes whose deletion is begun in one round.
const VOLUMES_MAX: usize = 64;

/// What a round left.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Left {
    Nothing,
    More,
}

/// What a leader remembers between rounds.
#[derive(Default)]
struct Upkeep {
    silent: SilentNodes,
    /// Where each filesystem's orphans are looked at next: many may be held for long.
    next_orphan: BTreeMap<FilesystemId, Ino>,
}

/// Keeps the filesystems of a group in order, as long as the group runs here and whenever it leads.
pub(super) async fn keep(core: Arc<Core>, group: Arc<NamespaceGroup>, id: NamespaceGroupId) {
    let mut upkeep = Upkeep::default();
    loop {
        let mut pause = IDLE_PAUSE;
        match group.leads() {
            // It has not looked, so it cannot say since when a node is silent.
            false => upkeep = Upkeep::default(),
            true => {
                let map = Arc::clone(&core.map.borrow());
                for filesystem in map.filesystems().filter(|one| one.group == id) {
                    match upkeep.round(&core, &group, &map, filesystem).await {
                        Ok(Left::Nothing) => {}
                        Ok(Left::More) => pause = BUSY_PAUSE,
                        // Somebody else leads, or it is tried again.
                        Err(error) => {
                            tracing::debug!(filesystem = %filesystem.name, %error, "cannot clear away yet");
                        }
                    }
                }
            }
        }
        sleep(pause).await;
    }
}

impl Upkeep {
    async fn round(
        &mut self,
        core: &Core,
        group: &NamespaceGroup,
        map: &ClusterMap,
        filesystem: &Filesystem,
    ) -> Result<Left, MetaError> {
        let id = filesystem.id;
        if filesystem.state == FilesystemState::Deleting {
            return delete(core, group, id).await;
        }
        let ended = self.end_sessions(core, group, map, id).await?;
        let reaped = self.reap(group, id).await?;
        Ok(match (ended, reaped) {
            (Left::Nothing, Left::Nothing) => Left::Nothing,
            _ => Left::More,
        })
    }

    /// Ends the sessions whose hosts are gone, and goes on with those whose end was begun.
    async fn end_sessions(
        &mut self,
        core: &Core,
        group: &NamespaceGroup,
        map: &ClusterMap,
        filesystem: FilesystemId,
    ) -> Result<Left, MetaError> {
        let mut over = sessions(group, filesystem).await?;
        let now = Instant::now();
        over.retain(|(_, one)| one.ending || self.silent.is_over(one, map, now));
        if over.iter().any(|(_, session)| !session.ending) {
            // A session is never newer than the registration of its start: what is certain by all that was
            // acknowledged by now, is certain.
            core.catch_up(Wait::PATIENT).await?;
            let (map, now) = (Arc::clone(&core.map.borrow()), Instant::now());
            over.retain(|(_, one)| one.ending || self.silent.is_over(one, &map, now));
        }
        end_all(group, filesystem, over).await
    }

    /// Empties and removes orphans that nobody holds.
    async fn reap(
        &mut self,
        group: &NamespaceGroup,
        filesystem: FilesystemId,
    ) -> Result<Left, MetaError> {
        let from = self.next_orphan.get(&filesystem).copied();
        let query = Query::Orphans {
            from: from.unwrap_or_default(),
            max: ORPHANS_MAX,
        };
        let Some(Answer::Orphans(orphans)) = ask(group, filesystem, query).await? else {
            return Ok(Left::Nothing);
        };
        let mut steps = 0;
        for (ino, orphan) in &orphans {
            if *orphan != Orphan::Emptying {
                continue;
            }
            let reap = Operation::Reap {
                ino: *ino,
                limit: REAP_LIMIT,
            };
            loop {
                if steps == STEPS_MAX {
                    self.next_orphan.insert(filesystem, *ino);
                    return Ok(Left::More);
                }
                steps += 1;
                if step(group, filesystem, reap.clone()).await? == Left::Nothing {
                    break;
                }
            }
        }
        match orphans.last() {
            // Behind it there may be more: those are looked at without delay.
            Some((last, _)) if orphans.len() >= ORPHANS_MAX as usize => {
                self.next_orphan.insert(filesystem, Ino(last.0 + 1));
                Ok(Left::More)
            }
            _ => {
                self.next_orphan.remove(&filesystem);
                Ok(Left::Nothing)
            }
        }
    }
}

/// Removes what the group has of a deleted filesystem, then begins to delete its segments, and says at last
/// that nothing is left.
async fn delete(
    core: &Core,
    group: &NamespaceGroup,
    filesystem: FilesystemId,
) -> Result<Left, MetaError> {
    // Whoever has one lost its attachment before the deletion began, and writes no more.
    let open = sessions(group, filesystem).await?;
    if end_all(group, filesystem, open).await? == Left::More {
        return Ok(Left::More);
    }
    let remove = Operation::DropFilesystem { limit: DROP_LIMIT };
    for _ in 0..STEPS_MAX {
        if step(group, filesystem, remove.clone()).await? == Left::Nothing {
            return delete_segments(core, filesystem).await;
        }
    }
    Ok(Left::More)
}

async fn delete_segments(core: &Core, filesystem: FilesystemId) -> Result<Left, MetaError> {
    // All that were made before the deletion began; none was made since.
    core.catch_up(Wait::PATIENT).await?;
    let mut volumes = core.view(|view| segment::volumes(view, filesystem))?;
    volumes.retain(|volume| volume.state == VolumeState::Ready);
    let is_long = volumes.len() > VOLUMES_MAX;
    for volume in volumes.into_iter().take(VOLUMES_MAX) {
        let Some(SegmentOf { segment, .. }) = volume.segment else {
            continue;
        };
        let delete = Command::DeleteSegmentVolume {
            filesystem,
            segment,
        };
        core.propose(delete, Wait::PATIENT).await?.map(drop)?;
    }
    if is_long {
        return Ok(Left::More);
    }
    let id = filesystem;
    let dropped = Command::FilesystemDropped { id };
    core.propose(dropped, Wait::PATIENT).await?.map(drop)?;
    Ok(Left::Nothing)
}

/// The sessions of a filesystem; none of one that is not there.
async fn sessions(
    group: &NamespaceGroup,
    filesystem: FilesystemId,
) -> Result<Vec<(SessionId, Session)>, MetaError> {
    let query = Query::Sessions {
        from: SessionId(0),
        max: ITEMS_MAX as u32,
    };
    match ask(group, filesystem, query).await? {
        Some(Answer::Sessions(sessions)) => Ok(sessions),
        _ => Ok(Vec::new()),
    }
}

async fn end_all(
    group: &NamespaceGroup,
    filesystem: FilesystemId,
    sessions: Vec<(SessionId, Session)>,
) -> Result<Left, MetaError> {
    fence(group, filesystem, &sessions).await?;
    let mut steps = 0;
    for (session, record) in sessions {
        tracing::info!(
            filesystem = filesystem.0,
            session = session.0,
            node = record.node,
            "ending a session"
        );
        let end = Operation::EndSession { session };
        loop {
            if steps == STEPS_MAX {
                return Ok(Left::More);
            }
            steps += 1;
            if step(group, filesystem, end.clone()).await? == Left::Nothing {
                break;
            }
        }
    }
    Ok(Left::Nothing)
}

/// Waits until nothing that the sessions held is used any more: until then, whoever leads next has to know
/// of them.
async fn fence(
    group: &NamespaceGroup,
    filesystem: FilesystemId,
    sessions: &[(SessionId, Session)],
) -> Result<(), MetaError> {
    let mut fences = JoinSet::new();
    for (session, _) in sessions.iter().filter(|(_, record)| !record.ending) {
        let (coordination, session) = (Arc::clone(&group.coordination), *session);
        fences.spawn(async move { coordination.fence(filesystem, session).await });
    }
    while let Some(fenced) = fences.join_next().await {
        fenced
            .unwrap_or(Err(ProposeError::Stopped))
            .map_err(failed)?;
    }
    Ok(())
}

/// The answer to a question; nothing if the filesystem is not there, or not any more.
async fn ask(
    group: &NamespaceGroup,
    filesystem: FilesystemId,
    query: Query,
) -> Result<Option<Answer>, MetaError> {
    let answers = group.read(vec![(filesystem, query)]).await;
    let answer = answers.map_err(failed)?.into_iter().next();
    Ok(answer.and_then(Result::ok))
}

/// Has a step of the leader's own done. What is refused is not there any more, or was taken up by somebody:
/// then there is nothing to do for now.
async fn step(
    group: &NamespaceGroup,
    filesystem: FilesystemId,
    operation: Operation,
) -> Result<Left, MetaError> {
    let replies = group.apply(vec![(filesystem, of_leader(operation))]).await;
    match replies.map_err(failed)?.into_iter().next() {
        Some(Ok(Outcome::Step { done: false })) => Ok(Left::More),
        _ => Ok(Left::Nothing),
    }
}

fn failed(error: ProposeError) -> MetaError {
    MetaError::Failed {
        detail: error.to_string(),
    }
}
