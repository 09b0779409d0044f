//! Files that are read from front to back are read ahead, into the cache.

use std::collections::{HashMap, VecDeque};
use std::future::pending;
use std::sync::Mutex;

use fuse_codec::Handle;
use futures_util::StreamExt;
use futures_util::future::{Either, select};
use futures_util::stream::FuturesUnordered;
use namespace::Ino;

use super::Span;
use crate::backend::Backend;
use crate::client::Client;
use crate::data::{EXTENTS_MAX, spans_of};
use crate::sync::{Signal, lock};

/// How much is read ahead of whoever begins to read a file.
const WINDOW_MIN: u64 = 128 << 10;

/// How much is read ahead at most. Each read doubles it up to that.
const WINDOW_MAX: u64 = 2 << 20;

/// At most this share of the cache is read ahead of one reader.
const CACHE_SHARE: u64 = 64;

/// How far a read may be off the end of those before it: kernels send several at a time, and they come in any
/// order.
const SLACK: u64 = 1 << 20;

/// Open files of a mount of which it is known where they are read. With more, the oldest is forgotten.
const SEQUENCES_MAX: usize = 1024;

/// Ranges of a client that wait for being read ahead. A further one is not read ahead.
const WAITING_MAX: usize = 64;

/// Ranges of a client that are read ahead at a time.
const AT_ONCE_MAX: usize = 8;

/// Where the open files of a mount are read.
#[derive(Default)]
pub(crate) struct Sequences(Mutex<Table>);

#[derive(Default)]
struct Table {
    files: HashMap<(Handle, Ino), Sequence>,
    /// In the order in which they were first read. Numbers of handles are not used again.
    order: VecDeque<(Handle, Ino)>,
}

/// Where a file is read.
#[derive(Debug, Clone, Copy, Default)]
struct Sequence {
    /// The end of what was read.
    end: u64,
    /// The end of what was read ahead.
    ahead: u64,
    /// How much is read ahead; 0 if it is not read in order.
    window: u64,
}

/// A range of a file to be read ahead.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Range {
    ino: Ino,
    from: u64,
    to: u64,
}

/// What is to be read ahead.
#[derive(Default)]
pub(crate) struct ReadAhead {
    waiting: Mutex<VecDeque<Range>>,
    wake: Signal,
}

impl Sequences {
    /// A file of this size was read. The range to be read ahead now, of at most `window_max` bytes, if there
    /// is one.
    pub(crate) fn note(
        &self,
        file: (Handle, Ino),
        (from, to): (u64, u64),
        size: u64,
        window_max: u64,
    ) -> Option<(u64, u64)> {
        let mut table = lock(&self.0);
        let table = &mut *table;
        if !table.files.contains_key(&file) {
            if table.order.len() >= SEQUENCES_MAX {
                let oldest = table.order.pop_front();
                oldest.and_then(|oldest| table.files.remove(&oldest));
            }
            table.order.push_back(file);
        }
        let sequence = table.files.entry(file).or_default();
        sequence.note((from, to), size, window_max)
    }
}

impl Sequence {
    fn note(&mut self, (from, to): (u64, u64), size: u64, window_max: u64) -> Option<(u64, u64)> {
        let is_next =
            from <= self.end.saturating_add(SLACK) && to.saturating_add(SLACK) >= self.end;
        if !is_next {
            *self = Self {
                end: to,
                ahead: to,
                window: 0,
            };
            return None;
        }
        self.end = self.end.max(to);
        self.ahead = self.ahead.max(self.end);
        self.window = (self.window * 2)
            .clamp(WINDOW_MIN, WINDOW_MAX)
            .min(window_max);
        let to = self.end.saturating_add(self.window).min(size);
        // Not in small pieces.
        let is_much = to.saturating_sub(self.ahead) >= self.window / 2 || to == size;
        if to <= self.ahead || !is_much {
            return None;
        }
        Some((std::mem::replace(&mut self.ahead, to), to))
    }
}

impl ReadAhead {
    fn add(&self, range: Range) {
        let mut waiting = lock(&self.waiting);
        if waiting.len() < WAITING_MAX {
            waiting.push_back(range);
            drop(waiting);
            self.wake.notify();
        }
    }

    fn next(&self) -> Option<Range> {
        lock(&self.waiting).pop_front()
    }
}

impl<B: Backend> Client<B> {
    /// A guest has read a file of this size: what follows is read ahead if it reads in order.
    pub(crate) fn note_read(
        &self,
        sequences: &Sequences,
        (handle, ino): (Handle, Ino),
        range: (u64, u64),
        size: u64,
    ) {
        let window_max = self.data.capacity_bytes() / CACHE_SHARE;
        if window_max < WINDOW_MIN {
            return;
        }
        let ahead = sequences.note((handle, ino), range, size, window_max);
        if let Some((from, to)) = ahead {
            self.read_ahead.add(Range { ino, from, to });
        }
    }

    /// Reads ahead until the client is being ended.
    pub(crate) async fn run_read_ahead(&self) {
        let mut reads = FuturesUnordered::new();
        loop {
            let (wake, closing) = (self.read_ahead.wake.listen(), self.life.closing.listen());
            if self.life.is_closing() {
                return;
            }
            while reads.len() < AT_ONCE_MAX {
                let Some(range) = self.read_ahead.next() else {
                    break;
                };
                reads.push(self.read_range_ahead(range));
            }
            let is_full = reads.len() >= AT_ONCE_MAX;
            let next = async {
                match reads.next().await {
                    Some(()) => {}
                    None => pending().await,
                }
            };
            let wake = async {
                // A signal that is gone is one that came.
                let _ = wake.await;
                if is_full {
                    // It has to wait for its turn.
                    pending::<()>().await;
                }
            };
            let work = select(Box::pin(next), Box::pin(wake));
            if let Either::Right(_) = select(work, closing).await {
                return;
            }
        }
    }

    async fn read_range_ahead(&self, Range { ino, from, to }: Range) {
        // If that fails, whoever reads on is told.
        let Ok(look) = self.look_to_read(ino, (from, to), EXTENTS_MAX).await else {
            return;
        };
        let to = to.min(look.inode.size);
        let spans = spans_of(&look.extents, (from, to));
        let spans: Vec<(Span, u64)> = spans.map(|(_, span, epoch)| (span, epoch)).collect();
        self.fetch_ahead(&spans).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: (Handle, Ino) = (Handle(1), Ino(7));
    const SIZE: u64 = 16 << 20;

    fn note(sequences: &Sequences, from: u64, length: u64) -> Option<(u64, u64)> {
        sequences.note(FILE, (from, from + length), SIZE, WINDOW_MAX)
    }

    #[test]
    fn a_file_read_in_order_is_read_ahead_farther_and_farther() {
        let sequences = Sequences::default();
        let kib = |from: u64, to: u64| Some((from << 10, to << 10));
        assert_eq!(note(&sequences, 0, 64 << 10), kib(64, 192));
        assert_eq!(note(&sequences, 64 << 10, 64 << 10), kib(192, 384));
        assert_eq!(note(&sequences, 128 << 10, 64 << 10), kib(384, 704));
        let (mut at, mut end) = (192 << 10, 704 << 10);
        while at < SIZE {
            if let Some((from, to)) = note(&sequences, at, 64 << 10) {
                assert_eq!(from, end, "without gaps, and nothing twice");
                let window = to - (at + (64 << 10));
                assert!(window <= WINDOW_MAX && to <= SIZE);
                end = to;
            }
            at += 64 << 10;
        }
        assert_eq!(end, SIZE, "never beyond the end");
    }

    #[test]
    fn reads_that_come_in_another_order_are_in_order_still() {
        let sequences = Sequences::default();
        note(&sequences, 128 << 10, 128 << 10);
        assert!(note(&sequences, 0, 128 << 10).is_some());
        assert!(note(&sequences, 256 << 10, 128 << 10).is_some());
    }

    #[test]
    fn a_file_read_here_and_there_is_not_read_ahead() {
        let sequences = Sequences::default();
        for at in [8, 3, 12, 1, 6, 14, 9] {
            assert_eq!(note(&sequences, at << 20, 4096), None);
        }
        assert!(
            note(&sequences, (9 << 20) + 4096, 4096).is_some(),
            "it goes on"
        );
    }

    #[test]
    fn no_more_open_files_are_remembered_than_there_is_room_for() {
        let sequences = Sequences::default();
        for number in 0..3 * SEQUENCES_MAX as u64 {
            sequences.note((Handle(number), Ino(7)), (0, 1), SIZE, WINDOW_MAX);
        }
        let table = lock(&sequences.0);
        assert_eq!(table.files.len(), SEQUENCES_MAX);
        assert_eq!(table.order.len(), SEQUENCES_MAX);
    }

    #[test]
    fn what_waits_is_bounded() {
        let ahead = ReadAhead::default();
        for from in 0..3 * WAITING_MAX as u64 {
            let (ino, to) = (Ino(7), from + 1);
            ahead.add(Range { ino, from, to });
        }
        assert_eq!(std::iter::from_fn(|| ahead.next()).count(), WAITING_MAX);
    }
}
