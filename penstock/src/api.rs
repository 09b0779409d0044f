//! The admin API: HTTP with JSON on a unix socket. [`types`] is what travels, [`server`] and [`client`] are
//! its ends.
//!
//! Volume data travel as [`extents`], so that holes cost nothing and a cut stream is never taken for a whole
//! one.

pub mod client;
pub mod confirmed;
pub mod extents;
pub mod hand_over;
pub mod join;
pub mod metrics;
pub mod openapi;
pub mod server;
pub mod types;
