//! Windows of type 2: keys for a part of a region, which one queue pair's peer may use until they are
//! invalidated.
//!
//! A window is bound by a work request, so what opens it and the message that tells the peer its key are
//! posted together. It is invalidated by a work request of ours, or by the peer's message (SEND with
//! invalidate), and can then be bound anew. Each binding has a key of its own; after 256 of them keys come
//! again, so whoever binds often takes windows in turn.
//!
//! A key is invalidated once, by one of the two. Where the peer may do it, we do not: to take back what it
//! keeps, drop the window, after the queue pair has failed. The specification forgives a second time, but rxe
//! of Linux 6.1 brings the kernel down.
//!
//! rxe has another fault: it refuses a peer what is outside the window's region, but not what is outside the
//! window within it.

use std::ops::Range;
use std::sync::Arc;

use rdma_sys::{
    ibv_alloc_mw, ibv_dealloc_mw, ibv_mw, ibv_mw_bind_info, ibv_mw_type, ibv_send_flags,
    ibv_send_wr, ibv_wr_opcode,
};

use super::address::RemoteKey;
use super::error::{Operation, VerbsError, log_destroyed};
use super::memory::{Access, MemoryRegion, ProtectionDomain};
use super::post::empty_request;
use super::queue_pair::QueuePair;

/// The part of a key that is the holder's to choose.
const KEY_MASK: u32 = 0xff;

/// A memory window of type 2. What it is bound to lives at least as long as the binding.
#[derive(Debug)]
pub struct MemoryWindow {
    raw: *mut ibv_mw,
    /// Dropped after the window itself.
    binding: Option<Binding>,
    domain: ProtectionDomain,
}

/// What a window leans on. A region cannot be closed, and a queue pair not destroyed, under a window.
#[derive(Debug)]
struct Binding {
    _region: Arc<MemoryRegion>,
    _queue_pair: Arc<QueuePair>,
}

// SAFETY: the library's objects may be used by all threads at once; it locks where that is needed.
unsafe impl Send for MemoryWindow {}
// SAFETY: as above; nothing changes it through a shared reference.
unsafe impl Sync for MemoryWindow {}

impl Drop for MemoryWindow {
    fn drop(&mut self) {
        // SAFETY: made by us, destroyed once; its key opens nothing from now on.
        let code = unsafe { ibv_dealloc_mw(self.raw) };
        log_destroyed("memory window", self.domain.context().name(), code);
    }
}

/// Why a window cannot be bound.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum BindError {
    /// It is bound.
    #[error("the window is bound, and must be invalidated first")]
    Bound,
    /// Window and region are of different protection domains.
    #[error("the region is of another protection domain than the window")]
    Domain,
    /// The range is empty, or not within the region.
    #[error("the range is empty, or not within the region")]
    Range,
}

impl MemoryWindow {
    /// A window that is not bound.
    pub fn new(domain: &ProtectionDomain) -> Result<Self, VerbsError> {
        // SAFETY: the domain is there. A device without windows answers with an error.
        let raw = unsafe { ibv_alloc_mw(domain.raw(), ibv_mw_type::IBV_MW_TYPE_2) };
        match raw {
            Some(raw) if !raw.is_null() => Ok(Self {
                raw,
                binding: None,
                domain: domain.clone(),
            }),
            _ => {
                let name = domain.context().name();
                Err(VerbsError::last(Operation::MakeWindow, name))
            }
        }
    }

    /// The key of its latest binding.
    pub fn key(&self) -> RemoteKey {
        // SAFETY: the window is there, and its key changes with an exclusive reference only.
        RemoteKey(unsafe { (*self.raw).rkey })
    }

    /// The key of its next binding.
    pub fn key_to_be(&self) -> RemoteKey {
        next_key(self.key())
    }

    /// Whether it was bound, and not said to be invalidated.
    pub fn is_bound(&self) -> bool {
        self.binding.is_some()
    }

    /// A work request that opens the part `range` of `region`, by offsets, to the peer of the queue pair on
    /// which it is posted ([`QueuePair::post_bound`]).
    ///
    /// A binding that fails puts the queue pair into error; the window is then of no more use.
    pub fn bind<'a>(
        &'a mut self,
        id: u64,
        region: &'a Arc<MemoryRegion>,
        range: Range<usize>,
        access: Access,
    ) -> Result<Bind<'a>, BindError> {
        if self.is_bound() {
            return Err(BindError::Bound);
        }
        if !region.domain().is_same(&self.domain) {
            return Err(BindError::Domain);
        }
        let bytes = range.end.saturating_sub(range.start);
        if bytes == 0 || range.end > region.bytes() {
            return Err(BindError::Range);
        }
        let key = self.key_to_be();
        let mut request = empty_request();
        request.wr_id = id;
        request.opcode = ibv_wr_opcode::IBV_WR_BIND_MW;
        request.bind_mw_tso_union.bind_mw = rdma_sys::bind_mw_t {
            mw: self.raw,
            rkey: key.0,
            bind_info: ibv_mw_bind_info {
                mr: region.raw(),
                addr: region.start() + range.start as u64,
                length: bytes as u64,
                mw_access_flags: access.bits(),
            },
        };
        Ok(Bind {
            window: self,
            region,
            request,
            key,
        })
    }

    /// To be told when the key has been invalidated.
    ///
    /// # Safety
    /// It has been: our work request for that succeeded, or the peer's message did it
    /// ([`super::completion::Completion::invalidated`]). Told too early, the region may be dropped under the
    /// window; the device then refuses to close it, and the peer reaches memory that its owner believes to be
    /// closed.
    pub unsafe fn invalidated(&mut self) {
        self.binding = None;
    }
}

/// A binding that is not posted yet.
pub struct Bind<'a> {
    window: &'a mut MemoryWindow,
    region: &'a Arc<MemoryRegion>,
    request: ibv_send_wr,
    key: RemoteKey,
}

impl Bind<'_> {
    /// The key that the peer shows once it is posted.
    pub fn key(&self) -> RemoteKey {
        self.key
    }

    /// The same, with a completion when it has succeeded, too.
    pub fn signalled(mut self) -> Self {
        self.request.send_flags |= ibv_send_flags::IBV_SEND_SIGNALED.0;
        self
    }

    pub(super) fn domain(&self) -> &ProtectionDomain {
        &self.window.domain
    }

    pub(super) fn is_posted(&self) -> bool {
        self.window.is_bound()
    }

    pub(super) fn request(&mut self) -> &mut ibv_send_wr {
        &mut self.request
    }

    /// The library took it.
    pub(super) fn posted(&mut self, queue_pair: &Arc<QueuePair>) {
        // SAFETY: the window is there, and this is the exclusive reference to it. The library wants the
        // holder to note the key.
        unsafe { (*self.window.raw).rkey = self.key.0 };
        self.window.binding = Some(Binding {
            _region: Arc::clone(self.region),
            _queue_pair: Arc::clone(queue_pair),
        });
    }
}

/// The next key of a window: the number of the window stays, what its holder chooses changes.
fn next_key(key: RemoteKey) -> RemoteKey {
    RemoteKey(key.0 & !KEY_MASK | key.0.wrapping_add(1) & KEY_MASK)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_of_a_window_change_in_their_lowest_byte_only() {
        assert_eq!(next_key(RemoteKey(0x1234_5600)), RemoteKey(0x1234_5601));
        assert_eq!(next_key(RemoteKey(0xffff_ffff)), RemoteKey(0xffff_ff00));
    }
}
