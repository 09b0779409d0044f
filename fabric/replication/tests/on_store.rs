//! Comparison and lease recovery over the chunk store that ships, on simulated disks.
//!
//! `PENSTOCK_SEED=n` runs one seed again, as in the store's own tests.

#[path = "on_store/execute.rs"]
mod execute;
#[path = "on_store/lease_recovery.rs"]
mod lease_recovery;
#[path = "on_store/resync.rs"]
mod resync;

use fabric_store::testing::{seeds, shard};
