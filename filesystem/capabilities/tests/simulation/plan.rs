//! What a run is made of, and the mistakes that may be made in it.

use std::time::Duration;

use fs_capabilities::Settings;
use rand::Rng;
use rand_chacha::ChaCha8Rng;

pub const MILLI: u64 = 1_000_000;
pub const SECOND: u64 = 1000 * MILLI;

/// Clocks drift apart by at most one part in this: much more than true ones, so that it shows.
pub const DRIFT_BOUND: u32 = 20;
/// How long a heartbeat lasts, by the host's clock.
pub const LEASE: Duration = Duration::from_secs(4);
/// How long a leader leads after each round of its heartbeats, by its own clock.
pub const LEAD: Duration = Duration::from_millis(500);
/// What guests take at most from a reply's publication to their counting.
pub const GUEST_DELAY: Duration = Duration::from_millis(50);

/// Rules that the machines or their callers could forget. Each is broken at a machine's seam, by what it is
/// passed and what is done with its actions, so that what ships has no switch for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mistake {
    /// A holder answers recalls before its guests' validities have passed.
    SkipValidityWait,
    /// The manager counts a recall as answered when it is sent.
    GrantBeforeAnswer,
    /// A new leader knows of no sessions.
    SkipReclaim,
    /// Holders claim nothing.
    ClaimNothing,
    /// A session that is late is taken for ended.
    FenceWhenLate,
    /// A holder goes on after its heartbeat lease ended.
    HolderIgnoresLease,
    /// A deposed leader goes on.
    LeaderIgnoresLease,
    /// Validities that a crashed host gave are not waited for.
    ForgetGuestsOfCrashed,
    /// A file that is recalled is not written back.
    RecallWithoutFlush,
    /// All clocks are taken for equally fast.
    IgnoreDrift,
    /// A message of an old connection is taken for one of the present connection.
    AcceptOldMessages,
    /// A change does not wait for what other guests of its host were told.
    ForgetOtherGuests,
    /// A change of a child touches its directory's own attributes instead.
    WrongScope,
    /// Children's attributes are told with their directory's names, whoever writes them.
    CacheAnyChild,
    /// Exclusive files are asked for without their directory.
    ForgetDirectory,
    /// A host answers from its cache while a change of its own is under way.
    AnswerDuringChange,
    /// A guest is always told a validity.
    PromiseAlways,
}

impl Mistake {
    pub const ALL: [Self; 17] = [
        Self::SkipValidityWait,
        Self::GrantBeforeAnswer,
        Self::SkipReclaim,
        Self::ClaimNothing,
        Self::FenceWhenLate,
        Self::HolderIgnoresLease,
        Self::LeaderIgnoresLease,
        Self::ForgetGuestsOfCrashed,
        Self::RecallWithoutFlush,
        Self::IgnoreDrift,
        Self::AcceptOldMessages,
        Self::ForgetOtherGuests,
        Self::WrongScope,
        Self::CacheAnyChild,
        Self::ForgetDirectory,
        Self::AnswerDuringChange,
        Self::PromiseAlways,
    ];
}

/// A run.
#[derive(Debug, Clone)]
pub struct Plan {
    pub mistake: Option<Mistake>,
    pub hosts: usize,
    pub guests: usize,
    /// Nanoseconds between two acts of a guest, at most.
    pub pace: u64,
    /// Of a hundred acts, how many change a directory or attributes, and how many write.
    pub changes: u32,
    pub writes: u32,
    /// Nanoseconds between two failures of each kind on average; none if 0.
    pub breaks: u64,
    pub failovers: u64,
    pub crashes: u64,
    pub cuts: u64,
    /// Latest delay of a message.
    pub delay: u64,
    pub capabilities_max: usize,
    /// When failures end, when guests stop to act, and when all has to be done.
    pub heal_at: u64,
    pub stop_at: u64,
    pub end_at: u64,
}

impl Plan {
    /// A run with the failures that the mistake needs to show, if there is one.
    pub fn draw(rng: &mut ChaCha8Rng, mistake: Option<Mistake>) -> Self {
        let every = |rng: &mut ChaCha8Rng, seconds: u64| match rng.random_ratio(2, 3) {
            true => rng.random_range(1..=seconds) * SECOND,
            false => 0,
        };
        let drawn = Self {
            mistake,
            hosts: rng.random_range(2..=4),
            guests: rng.random_range(1..=2),
            pace: rng.random_range(50..=600) * MILLI,
            changes: rng.random_range(1..=15),
            writes: rng.random_range(1..=25),
            breaks: every(rng, 6),
            failovers: every(rng, 12),
            crashes: every(rng, 15),
            cuts: every(rng, 15),
            delay: rng.random_range(1..=100) * MILLI,
            capabilities_max: rng.random_range(2..=8),
            heal_at: 40 * SECOND,
            stop_at: 65 * SECOND,
            end_at: 85 * SECOND,
        };
        match mistake {
            Some(Mistake::AcceptOldMessages) => Self {
                breaks: SECOND,
                ..drawn
            },
            Some(Mistake::ForgetGuestsOfCrashed) => Self {
                crashes: 4 * SECOND,
                ..drawn
            },
            Some(Mistake::LeaderIgnoresLease) => Self {
                failovers: 4 * SECOND,
                ..drawn
            },
            _ => drawn,
        }
    }

    /// Without any failure.
    pub fn calm(rng: &mut ChaCha8Rng) -> Self {
        let plan = Self::draw(rng, None);
        Self {
            breaks: 0,
            failovers: 0,
            crashes: 0,
            cuts: 0,
            ..plan
        }
    }

    pub fn settings(&self) -> Settings {
        Settings {
            validity: Duration::from_secs(1),
            quiet: Duration::from_secs(1),
            guest_delay: GUEST_DELAY,
            answer_within: match self.mistake {
                Some(Mistake::FenceWhenLate) => Duration::from_millis(300),
                _ => Duration::from_secs(5),
            },
            idle: Duration::from_secs(8),
            drift_bound: match self.mistake {
                Some(Mistake::IgnoreDrift) => u32::MAX,
                _ => DRIFT_BOUND,
            },
            capabilities_max: self.capabilities_max,
            claims_at_once: 2,
        }
    }

    /// A holder's, which are the same unless it is mistaken.
    pub fn holder_settings(&self) -> Settings {
        let settings = self.settings();
        match self.mistake {
            // It gives a validity as always, and takes it for one of a nanosecond.
            Some(Mistake::SkipValidityWait) => Settings {
                validity: Duration::from_nanos(1),
                guest_delay: Duration::ZERO,
                ..settings
            },
            _ => settings,
        }
    }
}
