//! What each inode's value was and when, and whether reads saw one that they may see.

use std::collections::BTreeMap;

use namespace::Ino;

use crate::plan::SECOND;

/// A value was current from this time on, until the next one.
#[derive(Debug, Clone, Copy)]
struct Period {
    value: u64,
    from: u64,
}

#[derive(Debug, Default)]
pub struct Checker {
    history: BTreeMap<Ino, Vec<Period>>,
    pub failure: Option<String>,
    /// An operation that waited for too long.
    pub late: Option<String>,
    pub reads: u64,
    pub cached_reads: u64,
    /// The last of the numbers that tell values, requests and tasks apart.
    pub numbers: u64,
    pub changes: u64,
    pub writes: u64,
    /// The longest wait of an operation at a leader when nothing failed, in nanoseconds.
    pub wait_max: u64,
}

impl Checker {
    pub fn fail(&mut self, now: u64, what: String) {
        let seconds = now as f64 / SECOND as f64;
        self.failure
            .get_or_insert(format!("at {seconds:.3} s: {what}"));
    }

    fn periods(&mut self, ino: Ino) -> &mut Vec<Period> {
        let first = Period { value: 0, from: 0 };
        self.history.entry(ino).or_insert_with(|| vec![first])
    }

    pub fn current(&mut self, ino: Ino) -> u64 {
        self.periods(ino)
            .last()
            .expect("there is a first value")
            .value
    }

    /// A value is current from now on.
    pub fn change(&mut self, ino: Ino, value: u64, now: u64) {
        if self.current(ino) != value {
            self.periods(ino).push(Period { value, from: now });
        }
    }

    /// A read that began then has seen this value: it must have been current since.
    pub fn read(&mut self, ino: Ino, value: u64, began: u64, now: u64, who: &str) {
        self.reads += 1;
        let periods = self.periods(ino);
        let ends = periods
            .iter()
            .skip(1)
            .map(|next| next.from)
            .chain([u64::MAX]);
        let mut with_ends = periods.iter().zip(ends);
        let is_possible = with_ends
            .any(|(period, end)| period.value == value && end >= began && period.from <= now);
        if !is_possible {
            let current = self.current(ino);
            let ago = (now - began) as f64 / SECOND as f64;
            let what = format!("{who} read {value} of {ino:?}, which is {current}, in {ago:.3} s");
            self.fail(now, what);
        }
    }
}
