//! Devices in the configuration: their paths, and the sizes of device files.

pub mod refused;

use std::path::{Path, PathBuf};

use api::failure::{Failure, Result};
use api::size::Size;
use fabric_store::recovery::DEVICE_BYTES_MIN;
use serde::{Deserialize, Serialize};

use super::SizedDevice;

/// How a device file gets its space; the words are qemu-img's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Preallocation {
    /// As it is written: thin, and when the filesystem is full, guests' writes fail.
    Off,
    /// Reserved on the filesystem at once.
    Falloc,
    /// Reserved and written with zeroes: takes its time, and then every write is as fast as it will ever be.
    Full,
}

/// A device in the configuration: a path, or a path with a size (for files that are to be created).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(
    untagged,
    expecting = "a device is a path, or a table { path = \"…\", size = \"10G\" }"
)]
pub enum DeviceSpec {
    /// `"/dev/sdb"`.
    Path(PathBuf),
    /// `{ path = "/srv/penstock.img", size = "10G" }`.
    Sized(SizedDevice),
}

impl DeviceSpec {
    /// Path of the device.
    pub fn path(&self) -> &Path {
        match self {
            DeviceSpec::Path(path) => path,
            DeviceSpec::Sized(sized) => &sized.path,
        }
    }

    /// Size to create it with.
    pub fn size(&self) -> Option<Size> {
        match self {
            DeviceSpec::Path(_) => None,
            DeviceSpec::Sized(sized) => Some(sized.size),
        }
    }
}

impl std::str::FromStr for DeviceSpec {
    type Err = api::size::SizeError;

    /// `PATH` or `PATH:SIZE`. What follows a colon counts only when it is digits with a suffix, as in
    /// `/srv/a.img:10G`, because paths below /dev/disk/by-path have colons too.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text.rsplit_once(':') {
            Some((path, size)) if looks_like_size(size) => Ok(DeviceSpec::Sized(SizedDevice {
                path: path.into(),
                size: size.parse()?,
            })),
            _ => Ok(DeviceSpec::Path(text.into())),
        }
    }
}

fn looks_like_size(text: &str) -> bool {
    let letters = text.trim_start_matches(|c: char| c.is_ascii_digit() || c == '.');
    letters.len() < text.len()
        && !letters.is_empty()
        && letters.bytes().all(|b| b.is_ascii_alphabetic())
}

/// Refuses a size that no device can have.
pub fn check_device_size(size: Size) -> Result<()> {
    if size.0 >= DEVICE_BYTES_MIN {
        return Ok(());
    }
    let least = Size(DEVICE_BYTES_MIN.next_multiple_of(1 << 20));
    Err(Failure::invalid(
        format!("a device of {size} is too small"),
        format!("make it {least} at least"),
    ))
}
