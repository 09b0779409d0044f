//! Processes the messages that sessions send on their links.
//!
//! A session decides how much it sends. Its messages are therefore processed on a thread for blocking work,
//! not on a worker of the runtime. A group uses one such thread at a time, sessions take turns call by call,
//! and the lock of the coordinators is held for a few messages at a time. However much one session sends,
//! operations of other sessions wait for a part of one call only.

use std::sync::Arc;

use fs_capabilities::{Gone, ToManager};
use namespace::{Ino, Namespace};

use super::coordination::{Coordination, SessionLink};
use crate::net::ProposeError;
use crate::storage::DbError;

/// Messages, including their claims, that are processed under one hold of the coordinators' lock. A single
/// message may have more claims.
const TAKEN_AT_ONCE: usize = 32;

impl Coordination {
    /// Processes messages of a session.
    ///
    /// # Errors
    /// This node does not lead.
    pub(super) async fn take(
        self: &Arc<Self>,
        of: SessionLink,
        first: u64,
        messages: Vec<ToManager>,
    ) -> Result<Result<(), Gone>, ProposeError> {
        let term = self.lead(of.filesystem).await?;
        let Some(turn) = self.turn(of, term)? else {
            return Ok(Err(Gone));
        };
        let turn = turn.lock_owned().await;
        let taking = Arc::clone(&self.taking).lock_owned().await;
        let coordination = Arc::clone(self);
        let take = move || {
            // Held until the work ends, even if the caller has gone.
            let _held = (turn, taking);
            coordination.take_all(of, term, first, messages)
        };
        let taken = tokio::task::spawn_blocking(take).await;
        taken.map_err(|error| ProposeError::Failed {
            detail: error.to_string(),
        })?
    }

    /// Processes the messages in small groups.
    fn take_all(
        &self,
        of: SessionLink,
        term: u64,
        mut first: u64,
        messages: Vec<ToManager>,
    ) -> Result<Result<(), Gone>, ProposeError> {
        let checked = self.with(of.filesystem, term, |led, now| {
            let coordinator = &mut led.coordinator;
            coordinator.check(now, of.session, &messages)
        })?;
        if checked.is_err() {
            return Ok(checked);
        }
        let mut messages = messages.into_iter().peekable();
        while messages.peek().is_some() {
            let mut weight = 0;
            let mut piece = Vec::new();
            while weight < TAKEN_AT_ONCE
                && let Some(message) = messages.next()
            {
                weight += message.weight();
                piece.push(message);
            }
            let next = first.saturating_add(piece.len() as u64);
            let taken = self.take_piece(of, term, first, piece)?;
            if taken.is_err() {
                return Ok(taken);
            }
            first = next;
            // Lets a waiting thread take the lock.
            std::thread::yield_now();
        }
        Ok(Ok(()))
    }

    fn take_piece(
        &self,
        of: SessionLink,
        term: u64,
        first: u64,
        messages: Vec<ToManager>,
    ) -> Result<Result<(), Gone>, ProposeError> {
        // Reads the current records: operations are applied before they end, and ending needs the lock.
        let place_of = |ino: Ino, _| {
            let records = &self.store.0;
            let found = records
                .read(|view| Ok::<_, DbError>(Namespace::new(view, of.filesystem).inode(ino).ok()));
            found.ok().flatten().map(|inode| inode.parent)
        };
        self.with(of.filesystem, term, |led, now| {
            let coordinator = &mut led.coordinator;
            coordinator.take(now, of.session, of.link, first, messages, place_of)
        })
    }
}
