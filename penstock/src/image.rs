//! Disk images: what goes into a volume and what comes out of one.

pub mod body;
pub mod export;
pub mod import;
mod progress;
mod qemu_img;
pub mod sparse;
