//! Messages to one session, numbered on its link, until they are acknowledged.

use std::collections::VecDeque;

use serde::{Deserialize, Serialize};

use crate::message::{Link, ToHolder};

/// A link is not the session's present one with this leader, or messages of it are lost. The holder connects
/// anew.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("the link is not the session's, or messages of it are lost")]
pub struct Gone;

#[derive(Debug)]
pub(super) struct Outbox {
    pub(super) link: Link,
    /// Messages that came on this link.
    pub(super) taken: u64,
    /// Messages that were sent on it.
    pub(super) sent: u64,
    /// The last of them, not acknowledged yet.
    messages: VecDeque<ToHolder>,
}

impl Outbox {
    pub(super) fn new(link: Link) -> Self {
        Self {
            link,
            taken: 0,
            sent: 0,
            messages: VecDeque::new(),
        }
    }

    pub(super) fn push(&mut self, message: ToHolder) {
        self.sent += 1;
        self.messages.push_back(message);
    }

    pub(super) fn behind(&mut self, behind: u64) -> Result<Vec<ToHolder>, Gone> {
        let acknowledged = self.sent - self.messages.len() as u64;
        let newly = behind.checked_sub(acknowledged).ok_or(Gone)?;
        let newly = usize::try_from(newly).map_err(|_| Gone)?;
        if newly > self.messages.len() {
            return Err(Gone);
        }
        self.messages.drain(..newly);
        Ok(self.messages.iter().cloned().collect())
    }
}
