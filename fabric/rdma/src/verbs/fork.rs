//! What becomes of registered memory when the process forks.
//!
//! A device reads and writes the pages that were there when the memory was registered. A fork makes private
//! pages shared with the child until one of the two writes, and who writes first gets a copy: if that is the
//! parent, the device goes on with a page that the parent does not see any more. Since Linux 5.12 the kernel
//! copies such pages for the child at once, and there is nothing to do. For older ones the library can keep
//! registered pages from children altogether, at a price for each registration.
//!
//! Guests' memory is shared, so it is never copied, and forks do not matter to it. Buffers of messages are
//! private.

use std::sync::Once;

use rdma_sys::{IBV_FORK_ENABLED, IBV_FORK_UNNEEDED};

/// How registered memory is protected from forks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ForkSafety {
    /// The kernel does what is needed.
    Unneeded,
    /// The library keeps registered pages from children.
    Enabled,
    /// Not at all: no fork may happen while private memory is registered.
    Disabled,
}

/// How registered memory is protected, once a device has been opened.
pub fn fork_safety() -> ForkSafety {
    // SAFETY: reads a variable of the library.
    match unsafe { rdma_sys::ibv_is_fork_initialized() } {
        IBV_FORK_UNNEEDED => ForkSafety::Unneeded,
        IBV_FORK_ENABLED => ForkSafety::Enabled,
        _ => ForkSafety::Disabled,
    }
}

/// Asks the library to protect registered memory where the kernel does not. It must hear of that before the
/// first registration.
pub(super) fn protect_once() {
    static ASKED: Once = Once::new();
    ASKED.call_once(|| {
        // SAFETY: has no arguments; called once.
        let code = unsafe { rdma_sys::ibv_fork_init() };
        if code != 0 {
            let error = std::io::Error::from_raw_os_error(code.saturating_abs());
            tracing::warn!(%error, "registered memory is not protected from forks");
        }
    });
}
