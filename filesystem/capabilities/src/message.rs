//! What a holder and the leader's manager say to each other, and the numbers that tell old from new.

use namespace::Ino;
use serde::{Deserialize, Serialize};

use crate::kind::Kind;

/// A grant. Each has a number of its own, for ever: a message that names an older grant of the same inode is
/// recognised.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct GrantId {
    /// The leader's term.
    pub term: u64,
    /// Counted by that leader from 1.
    pub number: u64,
}

/// One connection between a session and a leader. All messages carry it, so that what is left of an earlier
/// connection is recognised.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Link {
    /// The leader's term.
    pub term: u64,
    /// Counted by the session from 1 over all its connections.
    pub round: u64,
}

/// A capability that a holder says it holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Claim {
    /// The inode.
    pub ino: Ino,
    /// The grant.
    pub grant: GrantId,
    /// Its kind now.
    pub kind: Kind,
}

/// From a holder to the manager.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum ToManager {
    /// Claims all that the session holds, or what is left of it after [`Self::SomeClaims`]. The session holds
    /// nothing else. Claims are the first messages on each connection.
    Claims(Vec<Claim>),
    /// Asks for a capability.
    Request {
        /// The inode.
        ino: Ino,
        /// What is asked for.
        kind: Kind,
        /// The directory that has the file's only name, for [`Kind::FileExclusive`]; none if it has several
        /// names, or none. Nobody may go on caching the file's attributes as those of that directory's child.
        /// The leader compares this with its records when the request comes, and answers a wrong one itself
        /// with [`Refusal::Moved`].
        parent: Option<Ino>,
    },
    /// A capability was given up, recalled or not: nothing of it is used any more by the session or its
    /// guests, and what was buffered is flushed.
    Dropped {
        /// The inode.
        ino: Ino,
        /// The grant.
        grant: GrantId,
        /// What is kept of it: [`Kind::FileRead`] of [`Kind::FileExclusive`], or nothing.
        kept: Option<Kind>,
    },
    /// Claims a part of what the session holds: more claims follow. For a session that holds more than
    /// [`Settings::claims_at_once`](crate::Settings).
    SomeClaims(Vec<Claim>),
}

impl ToManager {
    /// Claims, with more behind them or not.
    pub fn claims(claims: Vec<Claim>, is_last: bool) -> Self {
        match is_last {
            true => Self::Claims(claims),
            false => Self::SomeClaims(claims),
        }
    }
}

/// From the manager to a holder.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum ToHolder {
    /// Grants a capability. It takes the place of what the session held of that inode.
    Grant {
        /// The inode.
        ino: Ino,
        /// The grant.
        grant: GrantId,
        /// What may be done.
        kind: Kind,
    },
    /// Refuses a request.
    Refuse {
        /// The inode.
        ino: Ino,
        /// What was asked for.
        kind: Kind,
        /// Why.
        refusal: Refusal,
    },
    /// Wants a capability back.
    Recall {
        /// The inode.
        ino: Ino,
        /// The grant. A holder that does not hold it answers at once.
        grant: GrantId,
        /// What the holder may keep.
        keep: Option<Kind>,
    },
}

/// Why a request or an operation does not go on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub enum Refusal {
    /// The session has ended, or is unknown.
    #[error("the session has ended")]
    SessionEnded,
    /// The session waits for too much, or holds twice as much as it may: it does not answer recalls.
    #[error("the session waits for too much, or holds too many capabilities")]
    TooMany,
    /// The file's names have changed: its directory may be another one. Ask again with the present one.
    #[error("the file was moved, linked or unlinked")]
    Moved,
}
