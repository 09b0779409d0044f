//! Takes what sessions send on their links.
//!
//! A session decides how much it sends. So its messages are taken on a thread for blocking work, not by a
//! worker of the runtime. A group uses one such thread at a time, a session has one turn among the others for
//! each call, and the coordinators are locked for a few messages at a time. However much one session sends,
//! an operation of another one waits for a part of one call.

use std::sync::Arc;

use fs_capabilities::{Gone, ToManager};
use namespace::{Ino, Namespace};

use super::coordination::{Coordination, SessionLink};
use crate::level::Level;
use crate::net::ProposeError;
use crate::storage::DbError;

/// Messages, with their claims, that are taken while the coordinators are locked. A single message may have
/// more claims.
const TAKEN_AT_ONCE: usize = 32;

impl Coordination {
    /// Takes messages of a session.
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
            // Held until the work ends, also if nobody waits for it.
            let _held = (turn, taking);
            coordination.take_all(of, term, first, messages)
        };
        let taken = tokio::task::spawn_blocking(take).await;
        taken.map_err(|error| ProposeError::Failed {
            detail: error.to_string(),
        })?
    }

    /// Takes them a few at a time.
    fn take_all(
        &self,
        of: SessionLink,
        term: u64,
        mut first: u64,
        messages: Vec<ToManager>,
    ) -> Result<Result<(), Gone>, ProposeError> {
        let splits_claims = self.map.borrow().level() >= Level::OFFERS;
        let checked = self.with(of.filesystem, term, |led, now| {
            let coordinator = &mut led.coordinator;
            coordinator.check(now, of.session, &messages, splits_claims)
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
            // Whoever waits for the lock may have it.
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
        // The records of this moment: operations end after they are applied, and wait for the lock to do so.
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
