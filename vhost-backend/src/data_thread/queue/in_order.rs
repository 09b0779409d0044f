//! Answers in the order of the requests, while a guest is migrated.
//!
//! If the daemon is gone when the guest is stopped, its front end knows nothing but the used index, and the
//! destination goes on there (QEMU's `virtio_queue_restore_last_avail_idx`; the record of requests in flight
//! stays behind). It would do again what was answered out of order, over what the guest has written since,
//! and leave out what was not. So long as the guest's memory is logged, an answer waits for those before it:
//! then whatever lies behind the used index has no answer, and all before has one.

use std::collections::VecDeque;

/// What was taken off a ring, and what of it waits for the answers before it.
#[derive(Debug)]
pub(super) struct InOrder {
    taken: VecDeque<u16>,
    /// Bytes written, by the request's first descriptor.
    done: Box<[Option<u32>]>,
}

impl InOrder {
    /// For a ring of `size` entries, of which `replay` was taken by an earlier daemon, the first one last.
    pub(super) fn new(size: u16, replay: &[u16]) -> Self {
        let mut taken = VecDeque::with_capacity(usize::from(size));
        taken.extend(replay.iter().rev());
        let done = vec![None; usize::from(size)].into_boxed_slice();
        Self { taken, done }
    }

    /// A request was taken off the ring.
    pub(super) fn take(&mut self, id: u16) {
        self.taken.push_back(id);
    }

    /// The one that was taken last is on the ring again.
    pub(super) fn untake(&mut self) {
        self.taken.pop_back();
    }

    /// A request has its answer, which tells of so many bytes.
    pub(super) fn finish(&mut self, id: u16, written: u32) {
        self.done[usize::from(id)] = Some(written);
    }

    /// The next answer that the guest may see.
    pub(super) fn next(&mut self) -> Option<(u16, u32)> {
        let id = *self.taken.front()?;
        let written = self.done[usize::from(id)].take()?;
        self.taken.pop_front();
        Some((id, written))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(order: &mut InOrder) -> Vec<u16> {
        std::iter::from_fn(|| order.next())
            .map(|(id, _)| id)
            .collect()
    }

    #[test]
    fn an_answer_waits_for_those_before_it() {
        let mut order = InOrder::new(8, &[5, 7]);
        (0..3).for_each(|id| order.take(id));
        order.finish(5, 1);
        order.finish(1, 1);
        assert_eq!(all(&mut order), [0; 0], "7 was taken first");
        order.finish(7, 1);
        assert_eq!(all(&mut order), [7, 5]);
        order.untake();
        order.finish(0, 1);
        assert_eq!(all(&mut order), [0, 1]);
        order.take(2);
        order.finish(2, 1);
        assert_eq!(all(&mut order), [2], "its head is free again");
    }
}
