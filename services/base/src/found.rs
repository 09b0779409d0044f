//! Problems that services find, and background work.

use std::time::Duration;

use api::moment::{Moment, duration};
use api::types::Problem;
use meta::{DeviceId, NodeId, PoolId};

use crate::code::Code;

/// Background work that ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Work {
    /// A node is being emptied, or its share given to others.
    Node(NodeId),
    /// A device is being emptied.
    Device(DeviceId),
    /// A pool's groups come to have all copies in sync.
    Sync(PoolId),
    /// A pool's groups move.
    Move(PoolId),
}

/// A problem, and by what it is known again while its numbers change.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Found {
    /// Subject of the problem: a node, a device, a pool.
    pub of: String,
    /// The problem.
    pub problem: Problem,
    /// More is about to be known of it: it is no event yet.
    pub is_preliminary: bool,
}

impl Found {
    /// A problem of which nobody knows since when it is there.
    pub fn new(
        code: Code,
        of: impl ToString,
        what: impl Into<String>,
        doing: impl Into<String>,
    ) -> Self {
        Found {
            of: of.to_string(),
            problem: Problem {
                code: code.word().to_owned(),
                what: what.into(),
                since: None,
                doing: doing.into(),
                eta_s: None,
                is_warning: false,
            },
            is_preliminary: false,
        }
    }

    /// Returns true if the problem has this code.
    pub fn is(&self, code: Code) -> bool {
        self.problem.code == code.word()
    }

    /// Sets the time since when the problem exists.
    pub fn since(mut self, since: Option<Moment>) -> Self {
        self.problem.since = since;
        self
    }

    /// Adds the estimated time until the problem is solved, or that work on it has stalled.
    pub fn paced(mut self, pace: Pace) -> Self {
        self.problem.eta_s = pace.eta_s();
        if let Pace::Stalled(lasted) = pace {
            let lasted = duration(lasted.as_secs());
            let told = format!(
                "not progressing, or with very large placement groups: none was finished for {lasted}"
            );
            let doing = &mut self.problem.doing;
            *doing = match doing.is_empty() {
                true => told,
                false => format!("{doing}; {told}"),
            };
        }
        self
    }
}

/// The pace of work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pace {
    /// It has just begun, or not moved for a while.
    Unknown,
    /// Seconds to completion at the present rate.
    Left(u64),
    /// Time without progress.
    Stalled(Duration),
}

impl Pace {
    /// Returns the seconds to completion, if they are known.
    pub fn eta_s(self) -> Option<u64> {
        match self {
            Self::Left(eta_s) => Some(eta_s),
            Self::Unknown | Self::Stalled(_) => None,
        }
    }
}
