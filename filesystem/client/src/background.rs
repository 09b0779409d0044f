//! What a client does besides serving requests: it reads ahead, lets go of orphans, settles requests of
//! unknown outcome, seals retired segments, notes access times, and opens another session when the present
//! one has ended.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::{Either, join, join_all, join3, select, select_all};
use namespace::{Answer, Ino, Operation, Query, Removed, SegmentState};

use crate::backend::Backend;
use crate::client::Client;
use crate::open_inodes::Release;
use crate::session::Session;
use crate::throttle::FREED_MIN;

/// How often the client looks after its session.
const ROUND: Duration = Duration::from_secs(2);

/// Operations that are done at a time in the background.
pub(crate) const AT_ONCE_MAX: usize = 32;

/// Freed bytes for which a segment is sealed while it is written. Each segment is a volume: few are made for
/// little.
const FREED_MAX: u64 = 4 << 30;

/// In a smaller pool, one part in so many of its free space is enough.
const FREED_SHARE: u64 = 16;

/// Orphans that are asked for at a time.
const HELD_MAX: u32 = 1024;

/// Queries for held orphans in one round. If guests keep more than these return, the next round continues
/// after them, so inodes that other hosts remove stay that much longer.
const HELD_QUESTIONS_MAX: usize = 16;

/// Orphans that are checked under one hold of the lock when some are given up.
const GIVEN_UP_AT_ONCE_MAX: usize = 1024;

impl<B: Backend> Client<B> {
    /// Works until [`Client::shutdown`]. To be polled once for each client: without, nothing is cached.
    pub async fn run(self: Arc<Self>) {
        let caching = join(self.run_cache(), self.run_read_ahead());
        join3(self.look_after(), caching, self.run_buffer()).await;
    }

    async fn look_after(&self) {
        let mut round = Box::pin(self.backend.sleep(ROUND));
        loop {
            let signals = [
                self.life.closing.listen(),
                self.open.wake.listen(),
                self.access_times.wake.listen(),
                self.throttle.wake.listen(),
            ];
            if self.life.is_closing() {
                return;
            }
            if self.note_access_times().await | self.release_noted_orphans().await {
                continue;
            }
            if self.seal_if_wanted().await {
                continue;
            }
            if let Either::Right(_) = select(select_all(signals), &mut round).await {
                self.look_after_session().await;
                self.open.free_former();
                round = Box::pin(self.backend.sleep(ROUND));
            }
        }
    }

    /// Notes accesses, once each: they never fail anything. Whether there were some.
    async fn note_access_times(&self) -> bool {
        let accesses = self.access_times.begin(AT_ONCE_MAX);
        let notes = accesses.iter().map(|(ino, atime)| async {
            let note = Operation::SetAccessTime {
                ino: *ino,
                atime: *atime,
            };
            if self.apply(note).await.is_ok() {
                self.counters.access_times.add(1);
            }
            self.access_times.end(*ino);
        });
        join_all(notes).await;
        !accesses.is_empty()
    }

    /// Releases noted orphans that no guest uses. Returns whether there were any.
    pub(crate) async fn release_noted_orphans(&self) -> bool {
        let now = self.backend.monotonic();
        let releases = self.open.begin_releases(now, AT_ONCE_MAX);
        let is_some = !releases.is_empty();
        if let Some(session) = self.sessions.current() {
            let releases = releases.into_iter();
            join_all(releases.map(|release| self.release_orphan(&session, release))).await;
        }
        is_some
    }

    /// Releases an orphan. If that fails, a later round repeats it.
    async fn release_orphan(&self, session: &Arc<Session>, release: Release) {
        let operation = Operation::ReleaseOrphan {
            ino: release.ino,
            session: session.id,
        };
        if self.apply_in(session, operation).await.is_ok() {
            self.counters.orphans_released.add(1);
            // What is cached or buffered of it is of no use here any more.
            self.cache.removed(&Removed {
                ino: release.ino,
                nlink: 0,
                kept: false,
            });
        }
    }

    /// One round.
    async fn look_after_session(&self) {
        self.close_former_sessions().await;
        let Some(session) = self.sessions.current() else {
            return;
        };
        if let Ok(false) = self.has_ended(&session).await {
            // If that fails, the next operation or the next round tries again.
            let _ = self.settle_doubts(&session).await;
            self.retire_wasted_segment(&session, true).await;
            session.segments.seal_retired(self, &session).await;
            self.release_held_orphans(&session).await;
            self.give_up_orphans().await;
        }
        if session.is_over() {
            // If that fails, the next change or the next round tries again.
            let _ = self.session().await;
        }
    }

    /// Seals the segment that is written if it holds much that is freed, where somebody wants that. Whether
    /// somebody did.
    async fn seal_if_wanted(&self) -> bool {
        let is_wanted = self.throttle.take_wish_to_seal();
        if let Some(session) = self.sessions.current().filter(|_| is_wanted) {
            self.retire_wasted_segment(&session, false).await;
            session.segments.seal_retired(self, &session).await;
        }
        is_wanted
    }

    /// Gives back the leases of former sessions' segments.
    pub(crate) async fn close_former_sessions(&self) {
        for session in self.sessions.take_former() {
            session.segments.retire_current();
            session.segments.seal_retired(self, &session).await;
            if session.segments.retired() > 0 {
                self.sessions.put_former(session);
            }
        }
    }

    /// Retires a segment of which most is freed, or a good part where the pool is short of space: only sealed
    /// segments give space back. A segment that is still written stays, unless a lot of it is freed, or much
    /// for the pool. Whether it is written is seen from one round to the next.
    async fn retire_wasted_segment(&self, session: &Session, is_round: bool) {
        let Some(id) = session.segments.current() else {
            return;
        };
        let query = Query::Segments { from: id, max: 1 };
        let Ok(answered) = self.backend.read(query, None).await else {
            return;
        };
        let Ok(Answer::Segments(found)) = answered.answer else {
            return;
        };
        let Some((_, record)) = found.into_iter().find(|(found, _)| *found == id) else {
            return;
        };
        let SegmentState::Open(gaps) = record.state else {
            return;
        };
        let gaps: u64 = gaps.iter().map(|(from, to)| to - from).sum();
        let named = record.written - gaps;
        let freed = named - record.live;
        let is_idle = is_round && session.segments.note_named(id, named);
        let space = self.backend.space();
        let is_short = space.is_some_and(|space| space.is_short());
        let is_wasted = freed >= FREED_MIN && (freed >= record.live || is_short);
        let is_much = space.is_some_and(|space| {
            let share = space.free_bytes / FREED_SHARE;
            freed >= share.max(FREED_MIN)
        });
        if is_much || is_wasted && (is_idle || freed >= FREED_MAX) {
            session.segments.retire(id);
        }
    }

    /// Releases orphans that the session holds and no guest uses.
    async fn release_held_orphans(&self, session: &Arc<Session>) {
        for _ in 0..HELD_QUESTIONS_MAX {
            let from = self.open.begin_held();
            let answer = self.held(session.id, from, HELD_MAX).await;
            let (now, found) = (self.backend.monotonic(), self.open.moment());
            for ino in answer.iter().flatten() {
                self.open.note_held(now, *ino, found);
            }
            self.open.end_held();
            let Ok(held) = answer else {
                return;
            };
            while self.release_noted_orphans().await {}
            // A short answer is not the last one: answers are bounded in bytes too.
            let Some(last) = held.last() else {
                self.open.set_held_from(Ino(0));
                return;
            };
            self.open.set_held_from(Ino(last.0 + 1));
        }
    }

    /// Gives up removed files that no guest has open if the pool is short of space. Otherwise they stay until
    /// kernels forget them.
    async fn give_up_orphans(&self) {
        if !self.backend.space().is_some_and(|space| space.is_short()) {
            return;
        }
        let (mut from, mut count) = (Some(Ino(0)), 0);
        while let Some(next) = from {
            let now = self.backend.monotonic();
            let given_up = self.open.give_up(now, next, GIVEN_UP_AT_ONCE_MAX);
            from = given_up.0;
            count += given_up.1;
            while self.release_noted_orphans().await {}
        }
        if count > 0 {
            tracing::warn!(
                count,
                "released removed files that are not open although guests' kernels have looked them up: \
                 the pool is short of space"
            );
        }
    }
}
