//! The guest-facing layer: vhost-user sessions, virtqueues, and the data threads that carry requests from
//! guest rings to an engine and its answers back. Which device the guest sees is behind the traits of
//! [`device`]; virtio-blk on an [`Engine`](fabric_types::io::Engine) is the one here, and the crate
//! `fs-device` has virtio-fs.
//!
//! Whatever a guest or a front end writes may be hostile. It leads to an error of that queue or attachment
//! alone.

pub mod blk;
mod clock;
pub mod counter;
pub mod data_thread;
pub mod device;
pub mod dirty;
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub mod fuzzing;
pub mod inflight;
pub mod latency;
pub mod memory;
pub mod ring;
pub mod session;
#[cfg(feature = "testing")]
pub mod testing;
