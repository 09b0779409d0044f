//! Common parts of the daemon's services: names of problems ([`code`]), their reports ([`found`]), the
//! cluster's metadata ([`cluster`]) and a view of it ([`view`]), the daemon's configuration ([`prepared`]),
//! and waiting ([`waiting`]). The daemon runs each service by the trait [`Service`].

pub mod cluster;
pub mod code;
pub mod ending;
pub mod failures;
pub mod found;
pub mod metrics;
pub mod pace;
pub mod prepared;
pub mod service;
pub mod view;
pub mod waiting;

pub use service::{BoxFuture, Service};
