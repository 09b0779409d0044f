//! How long calls wait. A daemon that can do nothing without an answer waits long; a person wants to know
//! soon, and whom to look after.

use std::time::{Duration, Instant};

use super::{Meta, user};
use crate::command::{Command, Outcome};
use crate::error::MetaError;
use crate::ids::UnixMillis;
use crate::model::Author;
use crate::node::Wait;
use crate::state::ReadError;
use crate::storage::View;

/// A command whose leader was found late has this long at least: it would end with an unknown outcome else.
const COMMIT_WAIT_MIN: Duration = Duration::from_secs(2);

impl Meta {
    /// The same for somebody who waits: a call for which there is no leader within this time fails, and says
    /// which voters this node does not reach. A command is sent only once a leader has shown that a majority
    /// follows it, so that one that fails has mostly changed nothing. Give it longer than an election takes.
    #[must_use]
    pub fn within(&self, wait: Duration) -> Self {
        Self {
            deadline: Some(wait),
            ..self.clone()
        }
    }

    /// The same, for what is done by `--force`: events say so.
    #[must_use]
    pub fn forced(&self) -> Self {
        Self {
            is_forced: true,
            ..self.clone()
        }
    }

    /// Has a command committed and applied.
    pub(crate) async fn propose(&self, command: Command) -> Result<Outcome, MetaError> {
        let command = self.authored(command);
        let Some(within) = self.deadline else {
            return Ok(self.core.propose(command, Wait::PATIENT).await??);
        };
        let end = Instant::now() + within;
        let confirmed = self.core.confirm_leader(all_in(within)).await;
        let reply = match confirmed {
            Ok(()) => {
                let left = end.saturating_duration_since(Instant::now());
                let wait = all_in(left.max(COMMIT_WAIT_MIN));
                self.core.propose(command, wait).await
            }
            Err(error) => Err(error),
        };
        match reply {
            Ok(reply) => Ok(reply?),
            Err(error) => Err(self.explained(error, true).await),
        }
    }

    /// Adds who asks for a change.
    fn authored(&self, command: Command) -> Command {
        let by = Author {
            node: self.node_id(),
            uid: user::caller_uid(),
            forced: self.is_forced,
        };
        command.by(by, UnixMillis::now())
    }

    /// Runs a function on records that hold everything acknowledged before this call, unless the caller is
    /// content with less, see [`Meta::or_last_known`].
    pub(super) async fn read<T>(
        &self,
        read: impl FnOnce(&View<'_>) -> Result<T, ReadError>,
    ) -> Result<T, MetaError> {
        if !self.has_met_no_leader() {
            let caught_up = self
                .core
                .catch_up(self.deadline.map_or(Wait::PATIENT, all_in));
            match caught_up.await {
                Err(MetaError::NoLeader { .. }) if self.note_no_leader() => {}
                Err(error) if self.deadline.is_some() => {
                    return Err(self.explained(error, false).await);
                }
                caught_up => caught_up?,
            }
        }
        self.core.view(read)
    }

    /// Adds whom this node reaches.
    async fn explained(&self, error: MetaError, is_command: bool) -> MetaError {
        match error {
            MetaError::NoLeader { waited, .. } => MetaError::NoLeader {
                waited,
                is_command,
                reach: self.core.reach().await,
            },
            MetaError::Interrupted { .. } => MetaError::Interrupted {
                reach: self.core.reach().await,
            },
            error => error,
        }
    }
}

fn all_in(within: Duration) -> Wait {
    Wait {
        leader: within,
        commit: within,
    }
}
