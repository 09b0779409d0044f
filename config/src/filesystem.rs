//! What serves filesystems to guests.

use api::failure::{Failure, Result};
use api::size::Size;

use super::keys::FilesystemTable;

/// Memory for cached file data when nothing is configured.
const CACHE_DEFAULT: u64 = 256 << 20;

/// Bytes of cached file data.
pub(super) fn cache_bytes(table: Option<&FilesystemTable>) -> Result<u64> {
    let memory = rustix::system::sysinfo();
    let memory = memory.totalram as u64 * u64::from(memory.mem_unit);
    bounded(table.and_then(|table| table.cache), memory)
}

fn bounded(cache: Option<Size>, memory: u64) -> Result<u64> {
    let Some(Size(bytes)) = cache else {
        return Ok(CACHE_DEFAULT.min(memory / 8));
    };
    if bytes > memory {
        return Err(Failure::invalid(
            format!(
                "filesystem.cache = {} is more than the {} of memory that this machine has",
                Size(bytes),
                Size(memory)
            ),
            "lower it",
        ));
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cache_is_never_larger_than_the_memory() {
        let mib = |count: u64| count << 20;
        assert_eq!(bounded(None, mib(16 << 10)).unwrap(), mib(256));
        assert_eq!(bounded(None, mib(1 << 10)).unwrap(), mib(128));
        assert_eq!(bounded(Some(Size(0)), mib(1)).unwrap(), 0);
        assert_eq!(bounded(Some(Size(mib(8))), mib(8)).unwrap(), mib(8));
        let told = bounded(Some(Size(mib(9))), mib(8)).unwrap_err().to_string();
        assert!(
            told.contains("filesystem.cache = 9M is more than the 8M"),
            "{told}"
        );
    }
}
