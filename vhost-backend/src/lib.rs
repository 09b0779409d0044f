//! The guest-facing layer: vhost-user sessions, virtqueues, the virtio-blk device model, and the data threads
//! that carry requests from guest rings to an [`Engine`](fabric_types::io::Engine) and its answers back.
//!
//! Whatever a guest or a front end writes may be hostile. It leads to an error of that queue or attachment
//! alone.

pub mod blk;
pub mod data_thread;
pub mod dirty;
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub mod fuzzing;
pub mod inflight;
pub mod memory;
pub mod ring;
pub mod session;
#[cfg(feature = "testing")]
pub mod testing;
