//! How many bytes of requests and replies the connections of peers hold. A connection that has no budget left
//! is not read: its peer waits, and nobody else does.

use std::sync::Arc;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::super::frame::FRAME_BYTES_MAX;

/// Bytes that one connection holds: its requests until they are done, then their replies until they are sent.
/// At that its next request is not read.
const CONNECTION_BYTES_MAX: u32 = 32 << 20;
/// The same of all connections for one purpose together, without small frames.
const TOTAL_BYTES_MAX: usize = 256 << 20;
/// A frame that is not longer does not count in the total, so that long ones of others never hold up a
/// heartbeat. There are at most 128 for each of its requests and replies on a connection, and one connection
/// for each node and purpose.
const SMALL_BYTES_MAX: u32 = 64 << 10;

// The longest frame fits, or it would wait for ever.
const _: () = assert!(FRAME_BYTES_MAX <= CONNECTION_BYTES_MAX);
const _: () = assert!(CONNECTION_BYTES_MAX as usize <= TOTAL_BYTES_MAX);

/// What all connections share.
pub(super) fn total() -> Arc<Semaphore> {
    Arc::new(Semaphore::new(TOTAL_BYTES_MAX))
}

/// The budget of one connection.
#[derive(Clone)]
pub(super) struct Budget {
    own: Arc<Semaphore>,
    total: Arc<Semaphore>,
    /// Replies that may be long are made one after the other.
    long: Arc<Semaphore>,
}

/// Bytes that are held until this is dropped.
#[derive(Default)]
pub(super) struct Held(
    #[expect(dead_code, reason = "held, not looked at")] [Option<OwnedSemaphorePermit>; 2],
);

impl Budget {
    pub(super) fn new(total: Arc<Semaphore>) -> Self {
        Self {
            own: Arc::new(Semaphore::new(CONNECTION_BYTES_MAX as usize)),
            total,
            long: Arc::new(Semaphore::new(1)),
        }
    }

    /// Waits until so many bytes may be held.
    pub(super) async fn hold(&self, bytes: u32) -> Held {
        // A frame has no more; beyond that it would wait for ever.
        let bytes = bytes.min(FRAME_BYTES_MAX);
        let own = take(&self.own, bytes).await;
        let total = match bytes > SMALL_BYTES_MAX {
            true => take(&self.total, bytes).await,
            false => None,
        };
        Held([own, total])
    }

    /// A request is done: gives back what it held, and waits until its reply may be held instead.
    pub(super) async fn exchange(&self, held: Held, bytes: usize) -> Held {
        drop(held);
        self.hold(u32::try_from(bytes).unwrap_or(FRAME_BYTES_MAX))
            .await
    }

    /// The turn of a reply that may be long.
    pub(super) async fn long_reply(&self) -> Option<OwnedSemaphorePermit> {
        take(&self.long, 1).await
    }
}

/// They are never closed, so there is always a permit in the end.
async fn take(from: &Arc<Semaphore>, permits: u32) -> Option<OwnedSemaphorePermit> {
    Arc::clone(from).acquire_many_owned(permits).await.ok()
}
