//! How a node joins: over TLS that only one side has a certificate for, it shows the secret of its invitation
//! and its public key, and gets its number, its certificate and whatever else a node keeps.
//!
//! The invitation names the cluster's authority by the SHA-256 of its certificate, so the joining node knows
//! whom it talks to before it says the secret. What it says and hears are one frame each.

mod client;
mod invitation;
mod server;

use std::collections::BTreeSet;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::ids::NodeId;
use crate::level::Level;
use crate::model::{Labels, Role};

pub use client::{EnrolmentError, enrol};
pub use invitation::{EnrolmentEndpoint, Invitation, InvitationError};
pub use server::{EnrolmentCredentials, EnrolmentServer};

/// Protocol name in the TLS handshake.
const ALPN: &[u8] = b"penstock-enrol";
/// Longest question; more is not read of somebody who is not known.
const QUESTION_BYTES_MAX: u32 = 8 << 10;
/// Longest answer.
const ANSWER_BYTES_MAX: u32 = 64 << 10;
/// Connection, handshake and question must be done in this time.
const GREET_WAIT_MAX: Duration = Duration::from_secs(5);
/// Somebody who wants to join waits this long for metadata without a leader.
const LEADER_WAIT_MAX: Duration = Duration::from_secs(5);
/// The answer must be there in this time. Longer than metadata look for a leader.
const ANSWER_WAIT_MAX: Duration = Duration::from_secs(30);
/// Version of this protocol.
const PROTOCOL: u16 = 1;

/// What a joining node says.
#[derive(Clone, Serialize, Deserialize)]
pub struct EnrolmentRequest {
    /// What it is to be called.
    pub name: String,
    /// Roles that it asks for, unless `takes_granted`.
    pub roles: BTreeSet<Role>,
    /// True if it takes all roles that its token grants.
    pub takes_granted: bool,
    /// Roles without which it does not join, with `takes_granted`.
    pub needs: BTreeSet<Role>,
    /// Where it stands.
    pub labels: Labels,
    /// Where peers reach its metadata service.
    pub control_address: String,
    /// Where hosts reach its devices.
    pub data_address: String,
    /// Version of the software that it runs.
    pub version: String,
    /// The highest feature level that it knows.
    pub level: Level,
    /// The public half of its key.
    pub public_key: Vec<u8>,
}

/// What it gets.
#[derive(Clone, Serialize, Deserialize)]
pub struct EnrolmentReply {
    /// Its number.
    pub node: NodeId,
    /// Its roles.
    pub roles: BTreeSet<Role>,
    /// The authority's certificate, as PEM.
    pub ca: String,
    /// Its own, as PEM.
    pub certificate: String,
    /// The authority's key, as PEM, for a node that lets others join.
    pub ca_key: Option<String>,
    /// The history of the cluster's metadata, if that is not the first one.
    pub history: Option<Uuid>,
}

/// The frame of a question.
#[derive(Serialize, Deserialize)]
pub(super) struct Question {
    protocol: u16,
    cluster: Uuid,
    secret: String,
    question: EnrolmentRequest,
}

/// The frame of an answer; a refusal is for people.
pub(super) type Answer = Result<EnrolmentReply, String>;
