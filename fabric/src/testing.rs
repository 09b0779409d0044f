//! Doubles for tests: a RAM disk behind the [`Engine`](crate::io::Engine) seam for the layers above, and with
//! the feature `testing` a disk below the chunk store that loses, tears and reorders what disks may.

#[cfg(all(feature = "testing", any(test, feature = "fuzzing")))]
pub mod fuzzing;
pub mod mem_engine;
#[cfg(feature = "testing")]
pub mod sim_disk;

pub use mem_engine::{Completion, MemEngine, MemVolume, OpKind};
