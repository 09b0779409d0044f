//! The memory that a takeover's requests point into.

use super::BLOCKS;
use crate::core::membership::REPLICAS_MAX;
use crate::proto::message::BlockStamp;
use crate::store::device::BLOCK_BYTES;

/// The data of a block, aligned as devices like it.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(4096))]
pub(super) struct Block(pub(super) [u8; BLOCK_BYTES]);

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
