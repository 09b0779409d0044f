//! The memory that a takeover's requests point into.

use fabric_types::block::{BLOCK_BYTES, Block, BlockStamp};
use fabric_types::membership::REPLICAS_MAX;

use super::BLOCKS;

/// See the module.
#[derive(Debug)]
pub(super) struct Memory {
    /// What each member has, by block of the page.
    pub(super) stamps: [[BlockStamp; BLOCKS]; REPLICAS_MAX],
    pub(super) stamps_iovs: [libc::iovec; REPLICAS_MAX],
    /// The block that is copied.
    pub(super) block: Block,
    pub(super) block_iov: libc::iovec,
}

const NO_IOV: libc::iovec = libc::iovec {
    iov_base: std::ptr::null_mut(),
    iov_len: 0,
};

impl Memory {
    /// Blank; it stays where it is.
    pub(super) fn new() -> Box<Self> {
        Box::new(Self {
            stamps: [[BlockStamp::default(); BLOCKS]; REPLICAS_MAX],
            stamps_iovs: [NO_IOV; REPLICAS_MAX],
            block: Block([0; BLOCK_BYTES]),
            block_iov: NO_IOV,
        })
    }
}
