//! Health service: problems of this node and of the cluster, with their beginning and remedy ([`Health`]);
//! events and metrics. Answers soon whatever hangs.

mod cluster;
mod daemon;
mod events;
mod health;
mod metrics;
mod monitor;
mod notices;
mod routes;

pub use health::{Health, leader_missed};
pub use metrics::{Listening, listen};
pub use routes::paths;
