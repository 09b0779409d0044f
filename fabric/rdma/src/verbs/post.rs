//! Chains of work requests that are posted together. They are made once, with room, and used again and again.

use rdma_sys::{
    bind_mw_t, bind_mw_tso_union_t, ibv_mw_bind_info, ibv_recv_wr, ibv_send_flags, ibv_send_wr,
    ibv_sge, ibv_wr_opcode, imm_data_invalidated_rkey_union_t, qp_type_t, rdma_t, wr_t, xrc_t,
};

use super::address::RemoteKey;
use super::memory::Segment;

const EMPTY_SEGMENT: ibv_sge = ibv_sge {
    addr: 0,
    length: 0,
    lkey: 0,
};

// The bindings wrote this structure by hand: it must be as long as C's.
#[cfg(target_pointer_width = "64")]
const _: () = assert!(size_of::<ibv_send_wr>() == 128);

/// A place in a peer's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RemotePlace {
    /// The address there.
    pub address: u64,
    /// The key that opens it.
    pub key: RemoteKey,
}

/// What a work request does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Work {
    /// Sends a message, which takes one of the peer's receives.
    Send,
    /// The same, with a number.
    SendWithImmediate(u32),
    /// The same, and invalidates a key of the peer.
    SendWithInvalidate(RemoteKey),
    /// Writes the peer's memory.
    Write(RemotePlace),
    /// Reads the peer's memory.
    Read(RemotePlace),
    /// Invalidates a key of ours, which must be bound ([`super::window`] tells why). Has no payload.
    LocalInvalidate(RemoteKey),
}

/// How a work request is carried out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SendFlags {
    /// A completion tells when it has succeeded. What fails tells in any case.
    pub signalled: bool,
    /// It begins only when the READs and invalidations before it are done.
    pub fenced: bool,
}

impl SendFlags {
    /// With a completion.
    pub const SIGNALLED: Self = Self {
        signalled: true,
        fenced: false,
    };
    /// Without a completion, unless it fails.
    pub const SILENT: Self = Self {
        signalled: false,
        fenced: false,
    };

    /// The same, after the READs and invalidations before it.
    pub const fn fenced(mut self) -> Self {
        self.fenced = true;
        self
    }

    fn flags(self) -> ibv_send_flags {
        let mut flags = ibv_send_flags(0);
        if self.signalled {
            flags |= ibv_send_flags::IBV_SEND_SIGNALED;
        }
        if self.fenced {
            flags |= ibv_send_flags::IBV_SEND_FENCE;
        }
        flags
    }
}

/// What a work request moves.
#[derive(Debug, Clone, Copy)]
pub enum Payload<'a> {
    /// Memory that the device reads or writes while it carries out the request.
    Segments(&'a [Segment]),
    /// Bytes that are copied now, of a message or a WRITE.
    Inline(&'a [u8]),
}

impl Payload<'_> {
    /// Nothing.
    pub const NONE: Self = Self::Segments(&[]);
}

/// Why a work request does not fit into its chain.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ChainError {
    /// The chain is full.
    #[error("the chain has room for {0} work requests")]
    Full(usize),
    /// Too many segments.
    #[error("a work request has {0} segments at most")]
    Segments(usize),
    /// Too many bytes to be copied.
    #[error("a work request has {0} bytes of its own at most")]
    Inline(usize),
    /// It brings bytes, or moves none.
    #[error("only messages and writes have bytes of their own")]
    NotInline,
}

/// Room in a chain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ChainShape {
    /// Work requests.
    pub requests: usize,
    /// Segments of each.
    pub segments: usize,
    /// Bytes of each that are copied.
    pub inline_bytes: usize,
}

/// Work requests that are posted together by [`super::queue_pair::QueuePair::post`], which empties the chain.
pub struct SendChain {
    shape: ChainShape,
    used: usize,
    requests: Box<[ibv_send_wr]>,
    segments: Box<[ibv_sge]>,
    inline: Box<[u8]>,
}

// SAFETY: its pointers lead into its own boxes, and are set and used within a call that has an exclusive
// reference.
unsafe impl Send for SendChain {}

impl SendChain {
    /// An empty chain with room.
    pub fn new(shape: ChainShape) -> Self {
        Self {
            shape,
            used: 0,
            requests: (0..shape.requests).map(|_| empty_request()).collect(),
            // Bytes that are copied take a segment, too.
            segments: vec![EMPTY_SEGMENT; shape.requests * shape.segments.max(1)].into(),
            inline: vec![0; shape.requests * shape.inline_bytes].into(),
        }
    }

    /// Work requests in it.
    pub fn len(&self) -> usize {
        self.used
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.used == 0
    }

    /// Forgets what is in it.
    pub fn clear(&mut self) {
        self.used = 0;
    }

    /// Gives the last work request a completion, when it has succeeded, too.
    pub fn signal_last(&mut self) {
        if let Some(last) = self.requests[..self.used].last_mut() {
            last.send_flags |= ibv_send_flags::IBV_SEND_SIGNALED.0;
        }
    }

    /// Appends a work request; its completion has `id`.
    pub fn push(
        &mut self,
        id: u64,
        work: Work,
        payload: Payload<'_>,
        flags: SendFlags,
    ) -> Result<(), ChainError> {
        if self.used == self.shape.requests {
            return Err(ChainError::Full(self.shape.requests));
        }
        let mut flags = flags.flags();
        let count = match payload {
            Payload::Segments(segments) => self.put_segments(segments)?,
            Payload::Inline(_) if matches!(work, Work::Read(_) | Work::LocalInvalidate(_)) => {
                return Err(ChainError::NotInline);
            }
            Payload::Inline(bytes) => {
                flags |= ibv_send_flags::IBV_SEND_INLINE;
                self.put_inline(bytes)?
            }
        };
        let request = &mut self.requests[self.used];
        request.wr_id = id;
        request.num_sge = count;
        request.send_flags = flags.0;
        set_work(request, work);
        self.used += 1;
        Ok(())
    }

    fn put_segments(&mut self, segments: &[Segment]) -> Result<i32, ChainError> {
        if segments.len() > self.shape.segments {
            return Err(ChainError::Segments(self.shape.segments));
        }
        let start = self.used * self.shape.segments.max(1);
        for (place, segment) in self.segments[start..].iter_mut().zip(segments) {
            *place = segment.0;
        }
        Ok(segments.len() as i32)
    }

    fn put_inline(&mut self, bytes: &[u8]) -> Result<i32, ChainError> {
        if bytes.len() > self.shape.inline_bytes {
            return Err(ChainError::Inline(self.shape.inline_bytes));
        }
        let start = self.used * self.shape.inline_bytes;
        let place = &mut self.inline[start..start + bytes.len()];
        place.copy_from_slice(bytes);
        self.segments[self.used * self.shape.segments.max(1)] = ibv_sge {
            addr: place.as_ptr() as u64,
            length: bytes.len() as u32,
            lkey: 0,
        };
        Ok(i32::from(!bytes.is_empty()))
    }

    /// Links the requests; null if there is none. The pointers are valid until the chain is touched again.
    pub(super) fn link(&mut self) -> *mut ibv_send_wr {
        let first = self.requests.as_mut_ptr();
        let segments = self.segments.as_mut_ptr();
        let each = self.shape.segments.max(1);
        for (index, request) in self.requests[..self.used].iter_mut().enumerate() {
            request.sg_list = segments.wrapping_add(index * each);
            request.next = if index + 1 < self.used {
                first.wrapping_add(index + 1)
            } else {
                std::ptr::null_mut()
            };
        }
        if self.used == 0 {
            return std::ptr::null_mut();
        }
        first
    }

    /// Which request a pointer into the chain leads to.
    pub(super) fn index_of(&self, request: *const ibv_send_wr) -> Option<usize> {
        let bytes = (request as usize).checked_sub(self.requests.as_ptr() as usize)?;
        Some(bytes / size_of::<ibv_send_wr>()).filter(|index| *index < self.used)
    }

    pub(super) fn shape(&self) -> ChainShape {
        self.shape
    }
}

fn set_work(request: &mut ibv_send_wr, work: Work) {
    let number = &mut request.imm_data_invalidated_rkey_union;
    let place = &mut request.wr;
    let remote = |place: RemotePlace| wr_t {
        rdma: rdma_t {
            remote_addr: place.address,
            rkey: place.key.0,
        },
    };
    request.opcode = match work {
        Work::Send => ibv_wr_opcode::IBV_WR_SEND,
        Work::SendWithImmediate(immediate) => {
            number.imm_data = immediate.to_be();
            ibv_wr_opcode::IBV_WR_SEND_WITH_IMM
        }
        Work::SendWithInvalidate(key) => {
            number.invalidated_rkey = key.0;
            ibv_wr_opcode::IBV_WR_SEND_WITH_INV
        }
        Work::Write(to) => {
            *place = remote(to);
            ibv_wr_opcode::IBV_WR_RDMA_WRITE
        }
        Work::Read(from) => {
            *place = remote(from);
            ibv_wr_opcode::IBV_WR_RDMA_READ
        }
        Work::LocalInvalidate(key) => {
            number.invalidated_rkey = key.0;
            ibv_wr_opcode::IBV_WR_LOCAL_INV
        }
    };
}

pub(super) fn empty_request() -> ibv_send_wr {
    ibv_send_wr {
        wr_id: 0,
        next: std::ptr::null_mut(),
        sg_list: std::ptr::null_mut(),
        num_sge: 0,
        opcode: ibv_wr_opcode::IBV_WR_SEND,
        send_flags: 0,
        imm_data_invalidated_rkey_union: imm_data_invalidated_rkey_union_t { imm_data: 0 },
        wr: wr_t {
            rdma: rdma_t {
                remote_addr: 0,
                rkey: 0,
            },
        },
        qp_type: qp_type_t {
            xrc: xrc_t { remote_srqn: 0 },
        },
        bind_mw_tso_union: bind_mw_tso_union_t {
            bind_mw: bind_mw_t {
                mw: std::ptr::null_mut(),
                rkey: 0,
                bind_info: ibv_mw_bind_info {
                    mr: std::ptr::null_mut(),
                    addr: 0,
                    length: 0,
                    mw_access_flags: 0,
                },
            },
        },
    }
}

/// Receives that are posted together by [`super::queue_pair::QueuePair::post_receives`], which empties the
/// chain.
pub struct ReceiveChain {
    each: usize,
    used: usize,
    requests: Box<[ibv_recv_wr]>,
    segments: Box<[ibv_sge]>,
}

// SAFETY: as for `SendChain`.
unsafe impl Send for ReceiveChain {}

impl ReceiveChain {
    /// An empty chain with room for so many receives, each of so many segments.
    pub fn new(requests: usize, segments: usize) -> Self {
        let empty = ibv_recv_wr {
            wr_id: 0,
            next: std::ptr::null_mut(),
            sg_list: std::ptr::null_mut(),
            num_sge: 0,
        };
        Self {
            each: segments,
            used: 0,
            requests: vec![empty; requests].into(),
            segments: vec![EMPTY_SEGMENT; requests * segments].into(),
        }
    }

    /// Receives in it.
    pub fn len(&self) -> usize {
        self.used
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.used == 0
    }

    /// Forgets what is in it.
    pub fn clear(&mut self) {
        self.used = 0;
    }

    /// Appends a receive into `segments`, one after the other; its completion has `id`.
    pub fn push(&mut self, id: u64, segments: &[Segment]) -> Result<(), ChainError> {
        if self.used == self.requests.len() {
            return Err(ChainError::Full(self.requests.len()));
        }
        if segments.len() > self.each {
            return Err(ChainError::Segments(self.each));
        }
        let start = self.used * self.each;
        for (place, segment) in self.segments[start..].iter_mut().zip(segments) {
            *place = segment.0;
        }
        let request = &mut self.requests[self.used];
        request.wr_id = id;
        request.num_sge = segments.len() as i32;
        self.used += 1;
        Ok(())
    }

    /// As [`SendChain::link`].
    pub(super) fn link(&mut self) -> *mut ibv_recv_wr {
        let first = self.requests.as_mut_ptr();
        let segments = self.segments.as_mut_ptr();
        for (index, request) in self.requests[..self.used].iter_mut().enumerate() {
            request.sg_list = segments.wrapping_add(index * self.each);
            request.next = if index + 1 < self.used {
                first.wrapping_add(index + 1)
            } else {
                std::ptr::null_mut()
            };
        }
        if self.used == 0 {
            return std::ptr::null_mut();
        }
        first
    }

    /// As [`SendChain::index_of`].
    pub(super) fn index_of(&self, request: *const ibv_recv_wr) -> Option<usize> {
        let bytes = (request as usize).checked_sub(self.requests.as_ptr() as usize)?;
        Some(bytes / size_of::<ibv_recv_wr>()).filter(|index| *index < self.used)
    }

    pub(super) fn segments(&self) -> usize {
        self.each
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: ChainShape = ChainShape {
        requests: 2,
        segments: 1,
        inline_bytes: 4,
    };

    fn segment() -> Segment {
        Segment(ibv_sge {
            addr: 0x1000,
            length: 8,
            lkey: 5,
        })
    }

    #[test]
    fn a_chain_refuses_what_does_not_fit_and_stays_as_it_is() {
        let mut chain = SendChain::new(SHAPE);
        let (send, silent) = (Work::Send, SendFlags::SILENT);
        let two = [segment(), segment()];
        let inline = |bytes| Payload::Inline(bytes);
        assert_eq!(
            chain.push(1, send, Payload::Segments(&two), silent),
            Err(ChainError::Segments(1))
        );
        assert_eq!(
            chain.push(1, send, inline(&[0; 5]), silent),
            Err(ChainError::Inline(4))
        );
        let read = Work::Read(RemotePlace {
            address: 1,
            key: RemoteKey(2),
        });
        assert_eq!(
            chain.push(1, read, inline(&[0; 2]), silent),
            Err(ChainError::NotInline)
        );
        assert!(chain.is_empty());
        assert!(chain.link().is_null());
        for id in 0..2 {
            chain.push(id, send, Payload::NONE, silent).unwrap();
        }
        assert_eq!(
            chain.push(2, send, Payload::NONE, silent),
            Err(ChainError::Full(2))
        );
        assert_eq!(chain.len(), 2);
    }

    #[test]
    fn chain_links_its_work_requests_and_their_segments() {
        let mut chain = SendChain::new(SHAPE);
        chain
            .push(7, Work::Send, Payload::Inline(b"abc"), SendFlags::SILENT)
            .unwrap();
        chain
            .push(
                8,
                Work::Send,
                Payload::Segments(&[segment()]),
                SendFlags::SIGNALLED,
            )
            .unwrap();
        let first = chain.link();
        // SAFETY: the chain is not touched while the pointers are used.
        let (first, second) = unsafe { (&*first, &*(*first).next) };
        assert_eq!((first.wr_id, second.wr_id), (7, 8));
        assert!(second.next.is_null());
        // SAFETY: both have one segment, the first of bytes in the chain.
        unsafe {
            let inline = *first.sg_list;
            let bytes =
                std::slice::from_raw_parts(inline.addr as *const u8, inline.length as usize);
            assert_eq!(bytes, b"abc");
            assert_eq!((*second.sg_list).addr, 0x1000);
        }
        assert_eq!(chain.index_of(second), Some(1));
        assert_eq!(chain.index_of(std::ptr::null()), None);
    }

    #[test]
    fn receives_are_linked_likewise() {
        let mut chain = ReceiveChain::new(2, 2);
        chain.push(1, &[segment(), segment()]).unwrap();
        chain.push(2, &[]).unwrap();
        assert_eq!(chain.push(3, &[]), Err(ChainError::Full(2)));
        let first = chain.link();
        // SAFETY: the chain is not touched while the pointers are used.
        let (first, second) = unsafe { (&*first, &*(*first).next) };
        assert_eq!((first.num_sge, second.num_sge), (2, 0));
        assert_eq!(chain.index_of(second), Some(1));
        chain.clear();
        let three = [segment(), segment(), segment()];
        assert_eq!(chain.push(1, &three), Err(ChainError::Segments(2)));
    }
}
