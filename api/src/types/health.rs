//! Whether a human must act, and upon what.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::moment::Moment;

/// Whether a human must act.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Health {
    /// State word.
    pub state: HealthState,
    /// What is wrong; empty when all is well.
    pub problems: Vec<Problem>,
    /// What goes on without anything being wrong: nodes and devices being emptied, data moving to new
    /// devices.
    pub background_jobs: Vec<Problem>,
    /// What is not wrong, and good to know: pools that fill up or promise more than they have.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub notices: Vec<Problem>,
}

/// State word of [`Health`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum HealthState {
    /// Nothing is wrong.
    Ok,
    /// Something is: see the problems.
    Degraded,
}

/// Something that is wrong, or goes on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Problem {
    /// Which sort of problem, like `node-down`: the heading of its section in docs/RUNBOOK.md.
    pub code: String,
    /// What, naming the culprit.
    pub what: String,
    /// Since when; by the cluster's log of events, else when this daemon noticed. Absent while unknown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub since: Option<Moment>,
    /// What is being done about it, what that waits for, or what a person has to do.
    pub doing: String,
    /// Seconds that it will take at the present rate; absent where nothing tells.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub eta_s: Option<u64>,
    /// Nothing has failed yet: it is told so that it does not.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_warning: bool,
}
