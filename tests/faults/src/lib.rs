//! Devices that fail on purpose: a file that loses what was not flushed when its power is cut.

pub mod power;
mod volatile;

pub use power::{PoweredDevice, Survival};
