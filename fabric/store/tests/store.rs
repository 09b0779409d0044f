//! Tests of the chunk store against a simulated disk that delays, reorders, drops and tears what was not
//! flushed.
//!
//! Every test that draws random numbers names its seed when it fails; `PENSTOCK_SEED=n` runs just that one
//! again. `PENSTOCK_HISTORIES=k` runs `k` times as many histories, for long soaks.

#[path = "store/bit_flip.rs"]
mod bit_flip;
#[path = "store/buffer.rs"]
mod buffer;
#[path = "store/clean.rs"]
mod clean;
#[path = "store/compare.rs"]
mod compare;
#[path = "store/crash.rs"]
mod crash;
#[path = "store/device_errors.rs"]
mod device_errors;
#[path = "store/full.rs"]
mod full;
#[path = "store/history.rs"]
mod history;
#[path = "store/host_full.rs"]
mod host_full;
#[path = "store/lost_leaf.rs"]
mod lost_leaf;
#[path = "store/memory.rs"]
mod memory;
#[path = "store/model.rs"]
mod model;
#[path = "store/numbering.rs"]
mod numbering;
#[path = "store/open.rs"]
mod open;
#[path = "store/order.rs"]
mod order;
#[path = "store/reference.rs"]
mod reference;
#[path = "store/replicate.rs"]
mod replicate;
#[path = "store/rig.rs"]
mod rig;
#[path = "store/scrub.rs"]
mod scrub;
#[path = "store/space_map.rs"]
mod space_map;
#[path = "store/stored.rs"]
mod stored;
#[path = "store/wrap.rs"]
mod wrap;

use fabric_store::testing::sim_disk::{self, image};
use fabric_store::testing::{factory, map_pages, seeds, shard, uncounted};
