//! The requests of a queue that the engine has.

use fabric_types::io::Tag;

/// One place for each entry of the ring, by the index of a request's first descriptor.
pub(super) struct InFlight<T> {
    requests: Box<[T]>,
    /// Apart from the requests, so that a request has as few cache lines as its device needs.
    busy: Box<[bool]>,
    count: usize,
    /// Upper half of the tags of this queue.
    tag: u64,
}

impl<T: Default> InFlight<T> {
    /// For a ring of `size` entries, of the queue in place `slot` of its thread.
    pub(super) fn new(size: u16, slot: usize) -> Self {
        let size = usize::from(size);
        Self {
            requests: (0..size).map(|_| T::default()).collect(),
            busy: vec![false; size].into_boxed_slice(),
            count: 0,
            tag: (slot as u64) << 32,
        }
    }

    /// How many there are.
    #[inline(always)]
    pub(super) fn count(&self) -> usize {
        self.count
    }

    #[inline(always)]
    pub(super) fn is_busy(&self, id: u16) -> bool {
        self.busy[usize::from(id)]
    }

    /// The tag of a request. Bits 16 to 31 are left to the device.
    #[inline(always)]
    pub(super) fn tag(&self, id: u16) -> Tag {
        Tag(self.tag | u64::from(id))
    }

    /// What the device keeps of a request.
    #[inline(always)]
    pub(super) fn request(&mut self, id: u16) -> &mut T {
        &mut self.requests[usize::from(id)]
    }

    /// The request that a tag names, which must be here.
    #[inline(always)]
    pub(super) fn named(&mut self, tag: Tag) -> (u16, &mut T) {
        let id = tag.0 as u16;
        assert!(self.is_busy(id), "an answer to no request");
        (id, self.request(id))
    }

    /// The engine has the request.
    #[inline(always)]
    pub(super) fn begin(&mut self, id: u16) {
        self.busy[usize::from(id)] = true;
        self.count += 1;
    }

    /// The engine is done with it.
    #[inline(always)]
    pub(super) fn end(&mut self, id: u16) {
        self.busy[usize::from(id)] = false;
        self.count -= 1;
    }
}
