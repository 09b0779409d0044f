//! The CRCs of what requests send: taken once for all replicas of a write.

use super::*;

/// Where the CRCs of a request were taken last: for all replicas of a write they are taken once.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Summed {
    id: u64,
    list: usize,
    memory: usize,
}

impl Summed {
    /// `None` if there is nothing to send.
    fn of(request: &Request, shape: &Shape) -> Option<Self> {
        let list = shape.payload.filter(|_| shape.payload_len > 0)?;
        // SAFETY: the list has an element, for the payload has bytes; it is valid until the answer.
        let memory = unsafe { (*list.ptr).iov_base }.addr();
        Some(Self {
            // Both replicas of a node are sent the same.
            id: request.id.base().0,
            list: list.ptr.addr(),
            memory,
        })
    }
}

/// The CRCs that were taken last.
#[derive(Default)]
pub(super) struct Sums {
    crcs: Vec<u32>,
    /// Of what; `None`: of nothing that may be sent once more.
    summed: Option<Summed>,
}

impl Sums {
    /// CRC32C of each block.
    pub fn crcs(&self) -> &[u32] {
        &self.crcs
    }

    /// What is sent next is another request's.
    pub fn forget(&mut self) {
        self.summed = None;
    }

    /// The vector, for CRCs of something else; [`give_back`](Self::give_back) ends the loan. Whoever changes
    /// it calls [`forget`](Self::forget).
    pub fn lend(&mut self) -> Vec<u32> {
        std::mem::take(&mut self.crcs)
    }

    /// See [`lend`](Self::lend).
    pub fn give_back(&mut self, crcs: Vec<u32>) {
        self.crcs = crcs;
    }

    /// Takes the CRCs of what a request sends, unless they have just been taken for another replica: a guest
    /// may change its buffer meanwhile, and all replicas are to take the same bytes or none.
    pub fn take(&mut self, request: &Request, shape: &Shape) {
        let Some((now, list)) = Summed::of(request, shape).zip(shape.payload) else {
            self.crcs.clear();
            self.summed = None;
            return;
        };
        if self.summed != Some(now) {
            // SAFETY: the list and the memory are valid until the answer.
            unsafe { shape::sums(&list, shape.skip, shape.payload_len, &mut self.crcs) };
            self.summed = Some(now);
        }
    }

    /// Takes those of this node's own copy of a write, if there are none yet; false if they differ from those
    /// that there are.
    fn matches(&mut self, request: &Request, copy: &Request) -> bool {
        let (shape, copied) = (shape_of(request), shape_of(copy));
        let Some((now, list)) = Summed::of(request, &shape).zip(copied.payload) else {
            return true;
        };
        let mut crcs = Vec::new();
        let to = match self.summed == Some(now) {
            true => &mut crcs,
            false => &mut self.crcs,
        };
        // SAFETY: the copy is valid until its answer.
        unsafe { shape::sums(&list, copied.skip, copied.payload_len, to) };
        let same = self.summed != Some(now) || crcs == self.crcs;
        self.summed = Some(now);
        same
    }
}

impl Lane {
    /// Reuses the checksums that were computed for this node's own replica of a write, if the other replicas
    /// have none yet. False if that replica's copy differs from what the others were sent.
    pub fn matches(&mut self, request: &Request, copy: &Request) -> bool {
        self.sums.matches(request, copy)
    }
}
