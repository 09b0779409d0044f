//! What happened, as a number that two runs of one seed share, and as text for whoever looks for a cause.

use crate::queue::At;

/// See the module.
#[derive(Debug, Clone)]
pub struct Trace {
    hash: u64,
    events: u64,
    print: bool,
}

impl Trace {
    /// An empty trace; `print` shows it on standard error.
    pub fn new(print: bool) -> Self {
        Self {
            hash: 0xcbf2_9ce4_8422_2325,
            events: 0,
            print,
        }
    }

    /// Notes an event: its numbers go into the hash, its text is made only to be printed.
    pub fn note(&mut self, at: At, numbers: &[u64], text: impl FnOnce() -> String) {
        self.events += 1;
        for number in [at.0].iter().chain(numbers) {
            self.hash = (self.hash ^ number).wrapping_mul(0x0000_0100_0000_01b3);
            self.hash ^= self.hash >> 29;
        }
        if self.print {
            eprintln!("{at} {}", text());
        }
    }

    /// Whether anybody reads the text.
    pub fn prints(&self) -> bool {
        self.print
    }

    /// The number.
    pub fn hash(&self) -> u64 {
        self.hash
    }

    /// Events so far.
    pub fn events(&self) -> u64 {
        self.events
    }
}
