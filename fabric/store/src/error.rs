//! Why a device cannot be formatted or opened. Every message names the place and what to do.

use std::io;

/// See the module.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The device failed.
    #[error(
        "cannot {what} at byte {offset} of the device: {source}; check the device and its cabling"
    )]
    Io {
        /// Verb and object.
        what: &'static str,
        /// Where.
        offset: u64,
        /// Why.
        source: io::Error,
    },
    /// No label.
    #[error("the device has no Penstock label; format it with `penstock device add`")]
    NotFormatted,
    /// Label present, both copies damaged.
    #[error(
        "both labels (byte 0 and byte {last}) of the device are damaged; restore one or format the device \
         anew"
    )]
    LabelDamaged {
        /// Offset of the second copy.
        last: u64,
    },
    /// A newer or older format.
    #[error(
        "the device has format version {found}, this program reads {known}; use the matching Penstock version"
    )]
    Version {
        /// On the device.
        found: u32,
        /// Of this program.
        known: u32,
    },
    /// Of another cluster.
    #[error(
        "the device belongs to cluster {found}, not to {expected}; remove it there, or give the right device"
    )]
    OtherCluster {
        /// On the device.
        found: String,
        /// Wanted.
        expected: String,
    },
    /// Formatting would destroy a store.
    #[error(
        "the device already holds a store of cluster {cluster}; give another device, or confirm overwriting \
         it"
    )]
    AlreadyFormatted {
        /// Whose.
        cluster: String,
    },
    /// Too small.
    #[error("the device has {bytes} bytes, at least {least} are needed")]
    TooSmall {
        /// Capacity.
        bytes: u64,
        /// Least capacity.
        least: u64,
    },
    /// Shorter than when it was formatted.
    #[error("the device has {found} bytes but had {formatted} when formatted; restore its size")]
    Shrunk {
        /// Capacity now.
        found: u64,
        /// Capacity then.
        formatted: u64,
    },
    /// No superblock of a shard is left.
    #[error(
        "no valid superblock of shard {shard} (first copy at byte {offset}); replace the device and \
         resynchronise it"
    )]
    SuperblockDamaged {
        /// Shard.
        shard: u32,
        /// First of four places.
        offset: u64,
    },
    /// Damage in the map.
    #[error(
        "damaged {what} of shard {shard} at byte {offset}; replace the device and resynchronise it from a \
         replica"
    )]
    Damaged {
        /// Which structure.
        what: &'static str,
        /// Shard.
        shard: u32,
        /// Where.
        offset: u64,
    },
    /// A batch that was durable is gone.
    #[error(
        "log batch {lsn} of shard {shard} was durable and is missing or damaged (near byte {offset}); \
         replace the device and resynchronise it from a replica"
    )]
    LogDamaged {
        /// Shard.
        shard: u32,
        /// Which batch.
        lsn: u64,
        /// A damaged header, or the start of the window.
        offset: u64,
    },
    /// Recovery could not write its checkpoint.
    #[error("cannot write the recovery checkpoint of shard {shard}: {}", describe(*errno))]
    Checkpoint {
        /// Shard.
        shard: u32,
        /// Errno.
        errno: i32,
    },
}

/// A device's error, with a hint.
fn describe(errno: i32) -> String {
    if matches!(errno, libc::ENOSPC | libc::EDQUOT) {
        return "the file system of the device file is full; make room on it".to_owned();
    }
    format!("device error {errno}; check the device")
}

/// Lower-case hex, for identities.
#[must_use]
pub fn hex(bytes: &[u8; 16]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_file_system_is_no_broken_device() {
        let describe = |errno| OpenError::Checkpoint { shard: 0, errno }.to_string();
        assert!(describe(libc::ENOSPC).contains("make room"));
        assert!(describe(libc::EIO).contains("check the device"));
    }
}
