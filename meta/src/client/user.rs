//! Which user of this node asks for a change: events name it.

use std::future::Future;

tokio::task_local! {
    static UID: u32;
}

/// Runs work that a user of this node asked for. What the work changes through a [`Meta`](crate::Meta) is
/// done in that user's name; not what tasks do that it spawns, unless they are wrapped as well.
pub async fn as_user<F: Future>(uid: Option<u32>, work: F) -> F::Output {
    match uid {
        Some(uid) => UID.scope(uid, work).await,
        None => work.await,
    }
}

/// The user whose request this task serves, if it serves one.
#[must_use]
pub fn caller_uid() -> Option<u32> {
    UID.try_with(|uid| *uid).ok()
}
