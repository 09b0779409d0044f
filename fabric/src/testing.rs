//! Doubles for the tests of the layers above: a RAM disk behind the [`Engine`](crate::io::Engine) seam.

pub mod mem_engine;

pub use mem_engine::{Completion, MemEngine, MemVolume, OpKind};
