//! The one order of everything that happens.

use std::cmp::{Ordering, Reverse};
use std::collections::BinaryHeap;
use std::fmt;
use std::ops::Add;

/// Simulated time in microseconds since the cluster was made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct At(pub u64);

/// A length of simulated time in microseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct Span(pub u64);

impl Span {
    /// So many milliseconds.
    pub const fn millis(millis: u64) -> Self {
        Self(millis * 1000)
    }

    /// So many seconds.
    pub const fn seconds(seconds: u64) -> Self {
        Self(seconds * 1_000_000)
    }
}

impl Add<Span> for At {
    type Output = Self;

    fn add(self, span: Span) -> Self {
        Self(self.0 + span.0)
    }
}

impl At {
    /// How long after `earlier`; zero if it was not.
    pub fn since(self, earlier: Self) -> Span {
        Span(self.0.saturating_sub(earlier.0))
    }
}

impl fmt::Display for At {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:>4}.{:06}", self.0 / 1_000_000, self.0 % 1_000_000)
    }
}

struct Entry<E> {
    at: At,
    tie: u32,
    number: u64,
    event: E,
}

impl<E> Entry<E> {
    fn key(&self) -> (At, u32, u64) {
        (self.at, self.tie, self.number)
    }
}

impl<E> PartialEq for Entry<E> {
    fn eq(&self, other: &Self) -> bool {
        self.key() == other.key()
    }
}

impl<E> Eq for Entry<E> {}

impl<E> PartialOrd for Entry<E> {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl<E> Ord for Entry<E> {
    fn cmp(&self, other: &Self) -> Ordering {
        self.key().cmp(&other.key())
    }
}

/// Events by time; those of the same moment in the order that the tie-break says, which comes from the seed.
pub struct Queue<E> {
    heap: BinaryHeap<Reverse<Entry<E>>>,
    number: u64,
}

impl<E> Default for Queue<E> {
    fn default() -> Self {
        Self {
            heap: BinaryHeap::new(),
            number: 0,
        }
    }
}

impl<E> Queue<E> {
    /// Adds an event.
    pub fn push(&mut self, at: At, tie: u32, event: E) {
        self.number += 1;
        self.heap.push(Reverse(Entry {
            at,
            tie,
            number: self.number,
            event,
        }));
    }

    /// Takes the next event.
    pub fn pop(&mut self) -> Option<(At, E)> {
        self.heap.pop().map(|Reverse(e)| (e.at, e.event))
    }

    /// When the next event is due.
    pub fn next_at(&self) -> Option<At> {
        self.heap.peek().map(|Reverse(e)| e.at)
    }

    /// Events that wait.
    pub fn len(&self) -> usize {
        self.heap.len()
    }

    /// Whether none waits.
    pub fn is_empty(&self) -> bool {
        self.heap.is_empty()
    }
}
