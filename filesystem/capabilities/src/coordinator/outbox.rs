//! Messages to one session, numbered on its link, until they are acknowledged.

use std::collections::VecDeque;

use serde::{Deserialize, Serialize};

use crate::limits::{ANSWERS_MAX, MESSAGES_MAX};
use crate::message::{Link, ToHolder};

/// A link is not the session's present one with this leader, or messages of it are lost. The holder connects
/// anew.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("the link is not the session's, or messages of it are lost")]
pub struct Gone;

/// Messages to one session and their acknowledgement.
#[derive(Debug)]
pub(super) struct Outbox {
    pub(super) link: Link,
    /// Messages that came on this link.
    pub(super) taken: u64,
    /// Messages that were sent on it.
    pub(super) sent: u64,
    /// The last of them, not acknowledged yet.
    messages: VecDeque<ToHolder>,
    /// Number of grants and refusals in `messages`.
    answers: usize,
    /// Largest number of recalls in `messages`.
    recalls_max: usize,
}

impl Outbox {
    /// Creates an outbox for a session that holds at most `held_max` capabilities.
    pub(super) fn new(link: Link, held_max: usize) -> Self {
        Self {
            link,
            taken: 0,
            sent: 0,
            messages: VecDeque::new(),
            answers: 0,
            // A recall is repeated once if less may be kept than before.
            recalls_max: held_max.saturating_mul(2),
        }
    }

    /// Adds a message. Returns false if too many are not acknowledged.
    pub(super) fn push(&mut self, message: ToHolder) -> bool {
        self.answers += usize::from(is_answer(&message));
        self.sent += 1;
        self.messages.push_back(message);
        let recalls = self.messages.len() - self.answers;
        self.answers <= ANSWERS_MAX && recalls <= self.recalls_max
    }

    /// Returns the next messages after a number, at most [`MESSAGES_MAX`].
    pub(super) fn behind(&mut self, behind: u64) -> Result<Vec<ToHolder>, Gone> {
        let acknowledged = self.sent - self.messages.len() as u64;
        let newly = behind.checked_sub(acknowledged).ok_or(Gone)?;
        let newly = usize::try_from(newly).map_err(|_| Gone)?;
        if newly > self.messages.len() {
            return Err(Gone);
        }
        let acknowledged = self.messages.drain(..newly);
        self.answers -= acknowledged.filter(is_answer).count();
        Ok(self.messages.iter().take(MESSAGES_MAX).cloned().collect())
    }
}

/// Returns whether the message answers a request. Only the session bounds the number of answers.
fn is_answer(message: &ToHolder) -> bool {
    matches!(message, ToHolder::Grant { .. } | ToHolder::Refuse { .. })
}
