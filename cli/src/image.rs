//! Disk images: what goes into a volume and what comes out of one.

mod compressed;
mod confined;
pub mod export;
mod format;
pub mod import;
mod progress;
mod qemu_img;
