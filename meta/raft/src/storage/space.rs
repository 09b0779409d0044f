//! Free space in the file system under the database.
//!
//! A write that finds no space is made again until there is some, and to Raft that is a slow disk: were it
//! told of an error, it would end. The [`ballast`] gives it some. RocksDB refuses every write after the first
//! one that failed, until its own watch sees space again: it looks every five seconds, and wants as much as a
//! family's write buffer. Meanwhile what was acknowledged can be read, and requests that would change
//! something are refused by the users.

use std::time::Duration;

use rocksdb::ErrorKind;

use super::ballast;
use super::database::{Database, SpaceState};
use super::error::DbError;

/// Pause between two tries of a write that found no space.
const PAUSE: Duration = Duration::from_millis(500);
/// With less free space than this nothing new is made: the rest is for giving something back.
const FREE_BYTES_MIN: u64 = 1 << 20;

impl DbError {
    /// Whether trying again once there is space makes sense.
    fn is_out_of_space(&self) -> bool {
        match self {
            // RocksDB tells its sub-code in text only.
            Self::Rocks(error) => {
                error.kind() == ErrorKind::IOError
                    && error.as_ref().contains("No space left on device")
            }
            Self::Io(error) => error.kind() == std::io::ErrorKind::StorageFull,
            Self::Record(_) | Self::Damaged { .. } | Self::Refused(_) => false,
        }
    }
}

impl Database {
    /// Returns whether a write waits for space now.
    #[must_use]
    pub fn is_full(&self) -> bool {
        *self.space.borrow() == SpaceState::Full
    }

    /// Returns when a write has begun to wait for space.
    pub async fn full(&self) {
        let mut space = self.space.subscribe();
        // The sender lives in `self`, so it cannot be gone.
        let _ = space.wait_for(|space| *space == SpaceState::Full).await;
    }

    /// Returns whether there is so little space that nothing new should be made.
    #[must_use]
    pub fn is_nearly_full(&self) -> bool {
        self.free_is_below(FREE_BYTES_MIN) || ballast::is_wanting(self.dir())
    }

    /// Drops the ballast, or makes it again, by how much is free. To be called every second.
    pub fn tend_ballast(&self) {
        ballast::tend(self.dir());
    }

    /// Returns whether less than this is free, in bytes.
    #[must_use]
    pub fn free_is_below(&self, bytes: u64) -> bool {
        // Where it cannot be told, writes tell.
        rustix::fs::statvfs(self.dir())
            .is_ok_and(|stat| stat.f_bavail.saturating_mul(stat.f_frsize) < bytes)
    }

    /// Makes writes fail that find no space, from now on.
    pub fn give_up_waiting(&self) {
        self.space.send_replace(SpaceState::Closing);
    }

    /// Called with the error of a write: true, after a pause, if it is to be made again.
    pub(super) async fn may_try_again(&self, error: &DbError) -> bool {
        if !error.is_out_of_space() {
            return false;
        }
        ballast::drop_it(self.dir());
        self.space.send_if_modified(|space| {
            let news = *space == SpaceState::Enough;
            if news {
                tracing::error!(dir = %self.dir().display(), %error, "metadata writes wait for space");
                *space = SpaceState::Full;
            }
            news
        });
        let mut space = self.space.subscribe();
        let closing = space.wait_for(|space| *space == SpaceState::Closing);
        tokio::time::timeout(PAUSE, closing).await.is_err()
    }

    /// A write that had waited got through.
    pub(super) fn space_was_found(&self) {
        self.space.send_if_modified(|space| {
            let news = *space == SpaceState::Full;
            if news {
                tracing::info!(dir = %self.dir().display(), "metadata writes have space again");
                *space = SpaceState::Enough;
            }
            news
        });
    }
}
