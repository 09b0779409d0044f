//! Operations of hosts pass the group's [`Coordination`](super::coordination): each waits until nobody else
//! uses anything cached that it changes, is proposed, and ends once it is certain what became of it.

use std::sync::Arc;
use std::time::Instant;

use fs_capabilities::{Footprint, Refusal, footprint};
use namespace::{Error, FilesystemId, Namespace, Operation, Outcome, Reply, Request};

use super::blocking;
use super::coordination::Admitted;
use super::group::NamespaceGroup;
use super::places::Place;
use crate::net::ProposeError;
use crate::storage::DbError;

/// How often an operation begins anew because the records have changed while it waited.
const TRIES_MAX: usize = 64;
/// Pause before it is tried again to find out what became of an operation.
const SETTLE_PAUSE: std::time::Duration = std::time::Duration::from_millis(200);

impl NamespaceGroup {
    /// Has an operation done once nobody else uses anything cached that it changes. It goes on to its end
    /// also if nobody waits for it.
    pub(super) async fn apply_coordinated(
        self: &Arc<Self>,
        filesystem: FilesystemId,
        request: Request,
        place: Place,
    ) -> Result<Reply, ProposeError> {
        let group = Arc::clone(self);
        let done = tokio::spawn(async move {
            let _place = place;
            group.coordinate(filesystem, request).await
        });
        done.await.unwrap_or(Err(ProposeError::Unknown))
    }

    async fn coordinate(
        self: Arc<Self>,
        filesystem: FilesystemId,
        request: Request,
    ) -> Result<Reply, ProposeError> {
        let admitted = match self.admit(filesystem, &request).await? {
            Ok(admitted) => admitted,
            Err(refusal) => return self.refused(filesystem, &request, refusal).await,
        };
        let opens = matches!(request.operation, Operation::OpenSession { .. });
        let asked = Instant::now();
        let done = self.apply(vec![(filesystem, request)]).await;
        if done.is_ok() {
            self.coordination.confirmed(asked);
        }
        match admitted {
            Some(admitted) if is_certain(&done) => self.coordination.end(&admitted),
            Some(admitted) => {
                tokio::spawn(Arc::clone(&self).settle(admitted));
            }
            None => {}
        }
        let reply = done?.pop().ok_or(ProposeError::Unknown)?;
        if let (true, Ok(Outcome::Session(session))) = (opens, &reply) {
            self.coordination.session_opened(filesystem, *session).await;
        }
        Ok(reply)
    }

    /// Waits until nothing is in the operation's way; none if it touches nothing that is cached.
    async fn admit(
        self: &Arc<Self>,
        filesystem: FilesystemId,
        request: &Request,
    ) -> Result<Result<Option<Admitted>, Refusal>, ProposeError> {
        let (group, operation) = (Arc::clone(self), request.operation.clone());
        let look = move || group.footprint(filesystem, &operation);
        let looked = blocking::read(look).await;
        let mut touched = looked.map_err(|error| failed(&error))??;
        for _ in 0..TRIES_MAX {
            if touched == Footprint::default() {
                return Ok(Ok(None));
            }
            let admitted = self
                .coordination
                .admit(filesystem, request.session, touched.clone())
                .await?;
            let admitted = match admitted {
                Ok(admitted) => admitted,
                Err(refusal) => return Ok(Err(refusal)),
            };
            // The same records were read just now: they are in memory.
            match self.footprint(filesystem, &request.operation) {
                Ok(now) if now == touched => return Ok(Ok(Some(admitted))),
                now => {
                    self.coordination.end(&admitted);
                    touched = now?;
                }
            }
        }
        Err(ProposeError::Unknown)
    }

    fn footprint(
        &self,
        filesystem: FilesystemId,
        operation: &Operation,
    ) -> Result<Footprint, ProposeError> {
        let found = self.store.0.read(|view| {
            let namespace = Namespace::new(view, filesystem);
            Ok::<_, DbError>(footprint(&namespace, operation)?)
        });
        found.map_err(|error| failed(&error))
    }

    /// An operation was not let go on, and not done.
    async fn refused(
        &self,
        filesystem: FilesystemId,
        request: &Request,
        refusal: Refusal,
    ) -> Result<Reply, ProposeError> {
        match refusal {
            Refusal::SessionEnded => {
                let session = request.session;
                let query = namespace::Query::Sessions {
                    from: session,
                    max: 1,
                };
                let answers = self.read(vec![(filesystem, query)]).await?;
                let is_open = match answers.first() {
                    Some(Ok(namespace::Answer::Sessions(found))) => {
                        let mut found = found.iter();
                        found.any(|(id, record)| *id == session && !record.ending)
                    }
                    _ => false,
                };
                match is_open {
                    // It is about to be ended.
                    true => Err(ProposeError::Unknown),
                    false => Ok(Err(Error::Stale)),
                }
            }
            Refusal::TooMany | Refusal::Moved => Err(ProposeError::Unknown),
        }
    }

    /// An operation may be applied at any time, or never: what comes behind it in the log tells that it is
    /// not to come any more.
    async fn settle(self: Arc<Self>, admitted: Admitted) {
        while self.coordination.leads_still(&admitted) {
            match self.apply(Vec::new()).await {
                Ok(_) | Err(ProposeError::Stopped) => break,
                Err(_) => tokio::time::sleep(SETTLE_PAUSE).await,
            }
        }
        self.coordination.end(&admitted);
    }
}

/// Whether it is known what became of an operation.
fn is_certain<T>(done: &Result<T, ProposeError>) -> bool {
    match done {
        Ok(_) | Err(ProposeError::Refused { .. } | ProposeError::NoSpace { begun: false, .. }) => {
            true
        }
        Err(_) => false,
    }
}

fn failed(error: &dyn std::error::Error) -> ProposeError {
    let detail = error.to_string();
    ProposeError::Failed { detail }
}
