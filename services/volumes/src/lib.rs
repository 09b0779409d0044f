//! Volume service: volumes as people create and change them ([`Volumes`]), the leases of those that are open
//! on this node ([`Leases`]), import and export, and unfinished deletions, shrinks and imports.

mod daemon;
mod full;
mod leases;
mod leftovers;
mod metrics;
mod open;
mod routes;
mod transfer;
mod volumes;

pub use leases::Leases;
pub use open::{OpenVolume, OpenVolumes, VolumeUsers};
pub use routes::paths;
pub use volumes::{Volumes, check_name, import_name, serial};
