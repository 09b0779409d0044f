//! Debian machines with systemd in QEMU, to install the package in, and a load that stands for a guest.
//!
//! A machine keeps its disk when it is started again, so that a reboot is a reboot. Nothing in it reaches a
//! network: what a test needs comes with it ([`Payload`]).

pub mod image;
pub mod machine;
pub mod payload;

pub use image::{Equipment, Release};
pub use machine::Machine;
pub use payload::Payload;
