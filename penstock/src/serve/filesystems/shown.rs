//! Filesystems as people see them.

use namespace::{Answer, Query, SessionId, Statistics};

use crate::api::types::{Filesystem, FilesystemAttachment, FilesystemSession, FilesystemState};
use crate::failure::{Failure, Kind, Result};
use crate::serve::node::{Node, meta_failure};

/// A group without a leader is waited for this long when filesystems are shown.
const ANSWER_WAIT_MAX: std::time::Duration = std::time::Duration::from_secs(3);
/// Sessions that are asked for at a time.
const PAGE: u32 = 1000;

fn opened_at(session: &namespace::Session) -> meta::UnixMillis {
    let seconds = u64::try_from(session.opened_at.seconds).unwrap_or_default();
    meta::UnixMillis(seconds.saturating_mul(1000))
}

impl Node {
    /// What a filesystem holds.
    pub(super) async fn statistics_of(&self, filesystem: &meta::Filesystem) -> Result<Statistics> {
        match self.question(filesystem, Query::Statistics).await? {
            Answer::Statistics(Some(statistics)) => Ok(statistics),
            _ => Err(Failure::plain(
                Kind::Failed,
                "its namespace group has not made it yet",
            )),
        }
    }

    pub(super) async fn sessions_of(
        &self,
        filesystem: &meta::Filesystem,
    ) -> Result<Vec<FilesystemSession>> {
        let map = self.meta.map();
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
                let node = map.node(meta::NodeId(session.node));
                sessions.push(FilesystemSession {
                    node: node
                        .map_or_else(|| session.node.to_string(), |node| node.name.to_string()),
                    since: opened_at(&session).into(),
                });
            }
        }
    }

    async fn question(&self, filesystem: &meta::Filesystem, query: Query) -> Result<Answer> {
        let group = self.meta.filesystems(filesystem.group);
        let asked = group.read(vec![(filesystem.id, query)]);
        let answered = tokio::time::timeout(ANSWER_WAIT_MAX, asked).await;
        let answers = answered.map_err(|_| {
            Failure::plain(
                Kind::Failed,
                format!("namespace group {} does not answer", filesystem.group),
            )
        })?;
        let answer = answers.map_err(meta_failure)?.into_iter().next();
        match answer {
            Some(Ok(answer)) => Ok(answer),
            Some(Err(error)) => Err(Failure::plain(Kind::Failed, error)),
            None => Err(Failure::plain(Kind::Failed, "no answer")),
        }
    }

    pub(super) fn filesystem_shown(
        &self,
        filesystem: &meta::Filesystem,
        found: Result<Statistics>,
        attachments: &[FilesystemAttachment],
    ) -> Filesystem {
        let map = self.meta.map();
        let pool = map.pool(filesystem.pool);
        let statistics = found.as_ref().ok();
        let name = filesystem.name.to_string();
        let own = attachments.iter().filter(|one| one.filesystem == name);
        Filesystem {
            id: filesystem.uuid.to_string(),
            pool: pool.map_or_else(String::new, |pool| pool.name.to_string()),
            state: match filesystem.state {
                meta::FilesystemState::Ready => FilesystemState::Ready,
                meta::FilesystemState::Deleting => FilesystemState::Deleting,
            },
            inodes: statistics.map(|one| one.inodes),
            named_bytes: statistics.map(|one| one.named_bytes),
            freed_bytes: statistics.map(|one| one.freed_bytes),
            sessions: None,
            problem: found.as_ref().err().map(|failure| failure.error.clone()),
            attachments: own.cloned().collect(),
            created_at: filesystem.created_at.into(),
            name,
        }
    }
}
