//! Memory that a device may reach.

use std::ops::{BitOr, Range};
use std::ptr::NonNull;
use std::sync::Arc;

use rdma_sys::{
    ibv_access_flags as flags, ibv_alloc_pd, ibv_dealloc_pd, ibv_dereg_mr, ibv_mr, ibv_pd,
    ibv_reg_mr, ibv_sge,
};

use super::address::RemoteKey;
use super::context::Context;
use super::error::{Operation, VerbsError, log_destroyed};

/// What may be done with memory. The device always reads it for us.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Access(pub(super) flags);

impl Access {
    /// Nothing but being read for us.
    pub const NONE: Self = Self(flags(0));
    /// The device writes it for us: receives, and what READs bring.
    pub const LOCAL_WRITE: Self = Self(flags::IBV_ACCESS_LOCAL_WRITE);
    /// Peers write it. A region that allows that must allow [`Self::LOCAL_WRITE`], too.
    pub const REMOTE_WRITE: Self = Self(flags::IBV_ACCESS_REMOTE_WRITE);
    /// Peers read it.
    pub const REMOTE_READ: Self = Self(flags::IBV_ACCESS_REMOTE_READ);
    /// Windows onto it may be bound.
    pub const WINDOWS: Self = Self(flags::IBV_ACCESS_MW_BIND);

    pub(super) fn bits(self) -> u32 {
        self.0.0
    }
}

impl BitOr for Access {
    type Output = Self;

    fn bitor(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

/// Which queue pairs, regions and windows may be used together. Clones are the same.
#[derive(Debug, Clone)]
pub struct ProtectionDomain(Arc<Domain>);

#[derive(Debug)]
struct Domain {
    raw: *mut ibv_pd,
    context: Context,
}

// SAFETY: the library's objects may be used by all threads at once; it locks where that is needed.
unsafe impl Send for Domain {}
// SAFETY: as above.
unsafe impl Sync for Domain {}

impl Drop for Domain {
    fn drop(&mut self) {
        // SAFETY: made by us, and whatever was made in it held it, so nothing is left.
        let code = unsafe { ibv_dealloc_pd(self.raw) };
        log_destroyed("protection domain", self.context.name(), code);
    }
}

impl ProtectionDomain {
    /// A protection domain of its own.
    pub fn new(context: &Context) -> Result<Self, VerbsError> {
        // SAFETY: the context is open.
        let raw = unsafe { ibv_alloc_pd(context.raw()) };
        if raw.is_null() {
            let operation = Operation::MakeProtectionDomain;
            return Err(VerbsError::last(operation, context.name()));
        }
        let context = context.clone();
        Ok(Self(Arc::new(Domain { raw, context })))
    }

    /// The device.
    pub fn context(&self) -> &Context {
        &self.0.context
    }

    /// Whether both are the same.
    pub fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    pub(super) fn raw(&self) -> *mut ibv_pd {
        self.0.raw
    }

    /// Opens memory to the device, and pins it.
    ///
    /// # Safety
    /// While the region lives, all of the memory stays mapped as it is, and may be written if `access` says
    /// that anyone writes. The device, and peers as far as `access` opens it to them, read and write it at
    /// any time: as long as they may, nobody has a reference to bytes which they write, nor an exclusive one
    /// to bytes which they read.
    pub unsafe fn register(
        &self,
        start: NonNull<u8>,
        bytes: usize,
        access: Access,
    ) -> Result<MemoryRegion, VerbsError> {
        let bits = access.bits() as i32;
        // SAFETY: the domain is there; that the memory is mapped is the caller's promise, and the kernel
        // looks, too.
        let raw = unsafe { ibv_reg_mr(self.raw(), start.as_ptr().cast(), bytes, bits) };
        if raw.is_null() {
            return Err(VerbsError::last(Operation::Register, self.context().name()));
        }
        Ok(MemoryRegion {
            raw,
            start: start.as_ptr() as u64,
            bytes,
            domain: self.clone(),
        })
    }
}

/// Memory that is open to a device. It is closed, and no more pinned, when this is dropped.
#[derive(Debug)]
pub struct MemoryRegion {
    raw: *mut ibv_mr,
    start: u64,
    bytes: usize,
    domain: ProtectionDomain,
}

// SAFETY: as for `Domain`; the memory itself is not touched through this.
unsafe impl Send for MemoryRegion {}
// SAFETY: as above.
unsafe impl Sync for MemoryRegion {}

impl Drop for MemoryRegion {
    fn drop(&mut self) {
        // SAFETY: made by us, destroyed once. Work requests that still name its key are refused by the device
        // from now on.
        let code = unsafe { ibv_dereg_mr(self.raw) };
        log_destroyed("memory region", self.domain.context().name(), code);
    }
}

impl MemoryRegion {
    /// Where the memory begins. A peer names places in it by these addresses.
    pub fn start(&self) -> u64 {
        self.start
    }

    /// Its length.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// The key that opens all of it to peers, as far as its access says.
    pub fn remote_key(&self) -> RemoteKey {
        // SAFETY: the region is there, and its key does not change.
        RemoteKey(unsafe { (*self.raw).rkey })
    }

    /// A part of it for a work request, by offsets; `None` if it is not within, or longer than a segment can
    /// be.
    pub fn segment(&self, range: Range<usize>) -> Option<Segment> {
        let bytes = range.end.checked_sub(range.start)?;
        if range.end > self.bytes {
            return None;
        }
        Some(Segment(ibv_sge {
            addr: self.start + range.start as u64,
            length: u32::try_from(bytes).ok()?,
            // SAFETY: the region is there, and its key does not change.
            lkey: unsafe { (*self.raw).lkey },
        }))
    }

    /// Where it was registered.
    pub fn domain(&self) -> &ProtectionDomain {
        &self.domain
    }

    pub(super) fn raw(&self) -> *mut ibv_mr {
        self.raw
    }
}

/// A part of a region, for work requests. It does not keep the region: a work request that is carried out
/// when the region is gone fails.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub struct Segment(pub(super) ibv_sge);

impl Segment {
    /// Its length.
    pub fn bytes(&self) -> u32 {
        self.0.length
    }
}

impl std::fmt::Debug for Segment {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter
            .debug_struct("Segment")
            .field("address", &self.0.addr)
            .field("bytes", &self.0.length)
            .finish()
    }
}
