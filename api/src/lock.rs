//! Which process holds a lock on a file, without touching the lock.

use std::fs::Metadata;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// The process that has taken a data directory. Looks without touching the lock: a daemon that starts now
/// must not find it held.
pub fn holder(path: &Path) -> Option<u32> {
    lock_holder(&std::fs::metadata(path.join("lock")).ok()?)
}

/// The process that holds a lock on a file or device (flock). Looks without touching the lock.
pub fn lock_holder(found: &Metadata) -> Option<u32> {
    let (major, minor) = (libc::major(found.dev()), libc::minor(found.dev()));
    let file = format!("{major:02x}:{minor:02x}:{}", found.ino());
    let locks = std::fs::read_to_string("/proc/locks").ok()?;
    locks.lines().find_map(|line| {
        // 1: FLOCK  ADVISORY  WRITE 1234 fe:00:5678 0 EOF
        let fields: Vec<&str> = line.split_whitespace().collect();
        let is_held = fields.get(1) == Some(&"FLOCK") && fields.get(5) == Some(&file.as_str());
        is_held.then(|| fields.get(4)?.parse().ok())?
    })
}
