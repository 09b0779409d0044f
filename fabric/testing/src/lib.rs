//! Doubles for tests of the layers above the fabric: a RAM disk behind the
//! [`Engine`](fabric_types::io::Engine) seam, and with the feature `fuzzing` hostile input as plain
//! functions.

#[cfg(feature = "fuzzing")]
pub mod fuzzing;
pub mod mem_engine;

pub use mem_engine::{Completion, MemEngine, MemVolume, OpKind};
