//! The rig for tests and demonstrations with a real guest: builds a small Debian guest once, boots it in QEMU
//! on vhost-user disks, runs shell scripts inside it, and starts, kills and asks the `penstock` daemon.
//!
//! Shared by the guest tests of this package, by `cargo xtask demo` and by the benchmarks.

pub mod accel;
pub mod agent;
pub mod complaints;
pub mod daemon;
pub mod form;
mod hotplug;
pub mod image;
pub mod initramfs;
pub mod network;
pub mod paths;
pub mod process;
pub mod qmp;
pub mod storage_daemon;
pub mod tools;
pub mod vm;

pub use accel::Accel;
pub use agent::Output;
pub use daemon::{Daemon, DaemonOptions};
pub use form::Form;
pub use image::{GuestImage, Recipe};
pub use initramfs::GuestFile;
pub use network::{Nic, Switch};
pub use storage_daemon::StorageDaemon;
pub use tools::Tool;
pub use vm::{BANDWIDTH_MAX, Boot, Booting, Destination, Disk, MigrationState, Tree, Vm, VmConfig};
