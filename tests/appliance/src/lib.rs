//! The appliance in QEMU: images of it, and machines that are told what to be, restarted, updated, and robbed
//! of their power.
//!
//! Scripts run in a machine by the rig's agent, which comes in as a credential from the hypervisor: the image
//! has nothing for tests in it.

pub mod images;
pub mod machine;
pub mod payload;
pub mod screen;
pub mod seed;

pub use images::Images;
pub use machine::{Bus, Config, Firmware, Machine};
pub use seed::{Seed, Way};
