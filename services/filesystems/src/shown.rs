//! Filesystems as people see them.

use api::failure::{Failure, Kind, Result};
use api::types::{Filesystem, FilesystemAttachment, FilesystemSession, FilesystemState};
use meta::{Filesystems, LinkCall, LinkReply, MetaError};
use namespace::{Answer, Query, SessionId, Statistics};
use service::failures::meta_failure;

use crate::filesystems::FilesystemService;

/// A group without a leader is waited for this long when filesystems are shown.
const ANSWER_WAIT_MAX: std::time::Duration = std::time::Duration::from_secs(3);
/// Sessions that are asked for at a time.
const PAGE: u32 = 1000;

fn opened_at(session: &namespace::Session) -> meta::UnixMillis {
    let seconds = u64::try_from(session.opened_at.seconds).unwrap_or_default();
    meta::UnixMillis(seconds.saturating_mul(1000))
}

/// What a filesystem's group answers in time.
async fn within<T>(
    filesystem: &meta::Filesystem,
    asked: impl Future<Output = std::result::Result<T, MetaError>>,
) -> Result<T> {
    let answered = tokio::time::timeout(ANSWER_WAIT_MAX, asked).await;
    let answered = answered.map_err(|_| {
        let group = filesystem.group;
        Failure::plain(
            Kind::Failed,
            format!("namespace group {group} does not answer"),
        )
    })?;
    answered.map_err(meta_failure)
}

/// What a filesystem's group answers to one question.
pub(crate) async fn ask(
    group: &Filesystems,
    filesystem: &meta::Filesystem,
    query: Query,
) -> Result<Answer> {
    let asked = group.read(vec![(filesystem.id, query)]);
    let answers = within(filesystem, asked).await?;
    match answers.into_iter().next() {
        Some(Ok(answer)) => Ok(answer),
        Some(Err(error)) => Err(Failure::plain(Kind::Failed, error)),
        None => Err(Failure::plain(Kind::Failed, "no answer")),
    }
}

/// An answer to another question.
pub(crate) fn unfit(answer: &Answer) -> Failure {
    Failure::plain(
        Kind::Failed,
        format!("the namespace group answered {answer:?}"),
    )
}

impl FilesystemService {
    /// What a filesystem holds.
    pub(crate) async fn statistics_of(&self, filesystem: &meta::Filesystem) -> Result<Statistics> {
        if filesystem.state == meta::FilesystemState::Lost {
            return Err(Failure::plain(
                Kind::Failed,
                "its names are lost with the nodes that kept them: delete it",
            ));
        }
        match self.question(filesystem, Query::Statistics).await? {
            Answer::Statistics(Some(statistics)) => Ok(statistics),
            _ => Err(Failure::plain(
                Kind::Failed,
                "its namespace group has not made it yet",
            )),
        }
    }

    pub(crate) async fn sessions_of(
        &self,
        filesystem: &meta::Filesystem,
    ) -> Result<Vec<FilesystemSession>> {
        let map = self.cluster.meta.map();
        let (mut sessions, mut from) = (Vec::new(), SessionId(0));
        loop {
            let answer = self.question(filesystem, Query::Sessions { from, max: PAGE });
            let Answer::Sessions(page) = answer.await? else {
                return Ok(sessions);
            };
            let Some((last, _)) = page.last() else {
                return Ok(sessions);
            };
            from = SessionId(last.0 + 1);
            for (_, session) in page {
                sessions.push(FilesystemSession {
                    node: map.node_name(meta::NodeId(session.node)),
                    since: opened_at(&session).into(),
                });
            }
        }
    }

    /// Capabilities that sessions hold.
    pub(crate) async fn capabilities_of(&self, filesystem: &meta::Filesystem) -> Result<u64> {
        let group = self.cluster.meta.filesystems(filesystem.group);
        let asked = group.link(filesystem.id, LinkCall::Counts);
        match within(filesystem, asked).await? {
            LinkReply::Counts(counts) => Ok(counts.capabilities as u64),
            other => Err(Failure::plain(Kind::Failed, format!("{other:?}"))),
        }
    }

    async fn question(&self, filesystem: &meta::Filesystem, query: Query) -> Result<Answer> {
        ask(
            &self.cluster.meta.filesystems(filesystem.group),
            filesystem,
            query,
        )
        .await
    }

    pub(crate) fn show(
        &self,
        filesystem: &meta::Filesystem,
        found: Result<Statistics>,
        attachments: &[FilesystemAttachment],
    ) -> Filesystem {
        let map = self.cluster.meta.map();
        let pool = map.pool(filesystem.pool);
        let statistics = found.as_ref().ok();
        let name = filesystem.name.to_string();
        let own = attachments.iter().filter(|one| one.filesystem == name);
        let mut groups = map.namespace_groups();
        let group = groups.find(|group| group.id == filesystem.group);
        let voters = group.map_or(&[][..], |group| &group.voters);
        let raft = self
            .cluster
            .meta
            .namespace_groups()
            .remove(&filesystem.group);
        let leader = raft.and_then(|raft| raft.leader);
        Filesystem {
            id: filesystem.uuid.to_string(),
            pool: pool.map_or_else(String::new, |pool| pool.name.to_string()),
            state: match filesystem.state {
                meta::FilesystemState::Ready => FilesystemState::Ready,
                meta::FilesystemState::Deleting => FilesystemState::Deleting,
                meta::FilesystemState::Lost => FilesystemState::Lost,
            },
            names_on: voters.iter().map(|id| map.node_name(*id)).collect(),
            leader: leader.map(|id| map.node_name(id)),
            inodes: statistics.map(|one| one.inodes),
            named_bytes: statistics.map(|one| one.named_bytes),
            freed_bytes: statistics.map(|one| one.freed_bytes),
            sessions: None,
            capabilities: None,
            problem: found.as_ref().err().map(|failure| failure.error.clone()),
            attachments: own.cloned().collect(),
            created_at: filesystem.created_at.into(),
            name,
        }
    }
}
