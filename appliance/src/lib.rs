//! What Penstock's bootable image does on the machine that runs it: takes its seed, becomes a node, shows its
//! state on the console, and updates itself.
//!
//! Begin with [`seed`], what a machine is told at its first boot, and [`machine`], what it keeps of that.
//! [`prepare`] runs at every boot, before the network is up; [`first_boot`] until the machine is a node;
//! [`update`] writes the other slot of [`layout`] and decides which one stays.
//!
//! **Invariants.** A disk that has anything on it is never taken. Whatever is written is written so that a
//! loss of power leaves the old or the new: files by rename, slots before the boot loader is told of them.
//! Steps can be done again.

pub mod console;
pub mod disks;
mod files;
pub mod first_boot;
pub mod layout;
pub mod machine;
pub mod network;
pub mod prepare;
mod process;
pub mod seed;
pub mod soft_roce;
pub mod update;
