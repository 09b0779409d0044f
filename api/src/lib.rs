//! The admin API: HTTP with JSON on a unix socket. [`types`] is what travels, [`client`] is the caller's end,
//! and [`server`] is what services build their routes from.
//!
//! Volume data travel as [`extents`], so that holes cost nothing and a cut stream is never taken for a whole
//! one.

pub mod body;
pub mod client;
pub mod confirmed;
pub mod extents;
pub mod failure;
pub mod hand_over;
pub mod lock;
pub mod metrics;
pub mod moment;
pub mod server;
pub mod size;
pub mod sparse;
pub mod types;
