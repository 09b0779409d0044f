//! Our split ring beside another implementation of it, rust-vmm's `virtio-queue`, on the same memory.
//!
//! Both find the same chains, or both find none. Where ours refuses what the other one takes, there is a rule
//! of ours that it does not have ([`is_stricter`]); the other way round there is none. Then both write the
//! same answers and come to the same decisions about interrupts and kicks.

use std::sync::Arc;

use virtio_queue::desc::split::Descriptor;
use virtio_queue::{Queue, QueueOwnedT, QueueT};
use vm_memory::Bytes;

use super::input::{Input, RingInput};
use super::{check_pieces, empty_guest};
use crate::memory::{GuestAddr, GuestMemory, MemoryView};
use crate::ring::{
    Chain, MAX_INDIRECT, MAX_QUEUE_SIZE, MAX_SEGMENTS, Ring, RingError, SplitRing, SplitRingConfig,
};
use crate::testing::FakeGuest;

/// Bytes of a descriptor.
const DESC_BYTES: u64 = 16;
/// Bytes of an entry of the used ring, and of its head.
const USED_BYTES: u64 = 8;
const USED_HEADER_BYTES: u64 = 4;

/// How far an input got.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct OracleReach {
    /// Chains that both found.
    pub same: usize,
    /// Chains that both refused.
    pub refused: usize,
    /// Chains that only ours refused.
    pub stricter: usize,
    /// Times both agreed whether to interrupt the guest.
    pub interrupts: usize,
}

/// Both rings, on the memory of one guest.
struct Pair<'a> {
    guest: &'a FakeGuest,
    layout: &'a RingInput,
    view: MemoryView,
    ours: SplitRing,
    theirs: Queue,
    chain: Chain,
    reach: OracleReach,
}

/// Fills a split ring with anything, again and again, and compares what both implementations make of it.
pub fn oracle(data: &[u8]) -> OracleReach {
    let guest = empty_guest();
    let mut data = data.to_vec();
    if let Some(first) = data.first_mut() {
        // Split rings only.
        *first &= !16;
    }
    let mut input = Input::new(&data);
    let layout = RingInput::new(&mut input);
    layout.fill(&guest, &mut input);
    let Some(mut pair) = Pair::new(&guest, &layout) else {
        return OracleReach::default();
    };
    while !input.is_empty() {
        if pair.turn().is_none() {
            break;
        }
        layout.fill(&guest, &mut input);
    }
    pair.reach
}

impl<'a> Pair<'a> {
    /// None if the ring cannot be used as it lies there.
    fn new(guest: &'a FakeGuest, layout: &'a RingInput) -> Option<Self> {
        let mut view = MemoryView::new(Arc::clone(guest.memory()));
        let config = SplitRingConfig {
            size: layout.size,
            desc: layout.desc,
            avail: layout.avail,
            used: layout.used,
            event_idx: layout.event_idx,
            indirect: layout.indirect,
        };
        let ours = SplitRing::new(config, layout.base as u16, &mut view).ok();
        let theirs = their_queue(guest.memory(), layout);
        if theirs.is_none() {
            // The other one wants more alignment, and room for events that were not negotiated.
            let unlike = layout.desc.0 % DESC_BYTES != 0 || !layout.event_idx;
            assert!(
                ours.is_none() || unlike,
                "a ring that the other implementation refuses"
            );
        }
        let (ours, mut theirs) = (ours?, theirs?);
        theirs.set_next_used(ours.next_used());
        Some(Self {
            guest,
            layout,
            view,
            ours,
            theirs,
            chain: Chain::default(),
            reach: OracleReach::default(),
        })
    }

    fn memory(&self) -> &'a GuestMemory {
        self.guest.memory()
    }

    /// Takes what is available and answers it. None once ours serves the ring no more.
    fn turn(&mut self) -> Option<()> {
        let (ours, theirs) = (self.ours.available(), self.their_chains());
        let (Ok(count), Some(theirs)) = (&ours, &theirs) else {
            assert_eq!(ours.is_ok(), theirs.is_some(), "{ours:?}");
            return None;
        };
        assert_eq!(usize::from(*count), theirs.len(), "available requests");
        for (head, descs) in theirs {
            self.compare(*head, descs)?;
        }
        let heads = theirs.iter().map(|(head, _)| *head);
        self.answer(&heads.collect::<Vec<u16>>());
        let (ours, theirs) = (
            self.ours.arm(),
            self.theirs.enable_notification(self.memory()),
        );
        let more = ours.ok()?;
        assert_eq!(Some(more), theirs.ok(), "more requests");
        // Rings may lie on top of each other. Ours has then seen an index that is not looked at again.
        (!more).then_some(())
    }

    /// Heads and descriptors of all that is available; none if the index jumped.
    fn their_chains(&mut self) -> Option<Vec<(u16, Vec<Descriptor>)>> {
        let chains = self.theirs.iter(self.memory()).ok()?;
        let chain = |chain: virtio_queue::DescriptorChain<&GuestMemory>| {
            (chain.head_index(), chain.collect())
        };
        Some(chains.map(chain).collect())
    }

    /// Compares one chain. None if it is none.
    fn compare(&mut self, head: u16, descs: &[Descriptor]) -> Option<()> {
        let taken = self.ours.take();
        let walked = taken.and_then(|id| {
            assert_eq!(id, head, "the next request");
            self.ours.walk(id, &mut self.view, &mut self.chain)
        });
        // It tells of no error: a chain that breaks off just ends.
        let is_whole = descs.last().is_some_and(|desc| !desc.has_next());
        match walked {
            Ok(()) => {
                assert!(is_whole, "a chain that the other implementation refuses");
                self.compare_pieces(descs);
                self.reach.same += 1;
                Some(())
            }
            Err(error) => {
                if is_whole {
                    assert!(
                        self.is_stricter(error, head, descs),
                        "{error}, but the other implementation finds {descs:?}"
                    );
                    self.reach.stricter += 1;
                } else {
                    self.reach.refused += 1;
                }
                None
            }
        }
    }

    fn compare_pieces(&self, descs: &[Descriptor]) {
        let chain = &self.chain;
        check_pieces(self.guest, &chain.readable, chain.readable_bytes);
        check_pieces(self.guest, &chain.writable, chain.writable_bytes);
        for (pieces, is_writable) in [(&chain.readable, false), (&chain.writable, true)] {
            let wanted = descs
                .iter()
                .filter(|desc| desc.is_write_only() == is_writable && desc.len() > 0);
            let wanted = wanted.map(|desc| {
                let host = self.memory().translate(desc.addr(), u64::from(desc.len()));
                (host.expect("checked by ours"), desc.len() as usize)
            });
            let found = pieces
                .iter()
                .map(|piece| (piece.iov_base.cast::<u8>(), piece.iov_len));
            assert!(found.eq(wanted), "pieces, writable: {is_writable}");
        }
    }

    /// Whether a rule of ours forbids what the other implementation found.
    fn is_stricter(&self, error: RingError, head: u16, descs: &[Descriptor]) -> bool {
        let table = self.table(head);
        let is_outside = |addr, len| len > 0 && self.memory().translate(addr, len).is_none();
        match error {
            RingError::Order => descs.iter().enumerate().any(|(at, desc)| {
                let before = &descs[..at];
                !desc.is_write_only() && before.iter().any(|d| d.is_write_only() && d.len() > 0)
            }),
            RingError::BufferAddress { .. } => descs
                .iter()
                .chain(&table)
                .any(|desc| is_outside(desc.addr(), u64::from(desc.len()))),
            RingError::TooManySegments => descs.len() > MAX_SEGMENTS,
            RingError::IndirectNotNegotiated => table.is_some() && !self.layout.indirect,
            RingError::IndirectNested => table.is_some_and(|table| table.has_next()),
            RingError::IndirectLength(bytes) => bytes > MAX_INDIRECT * DESC_BYTES as u32,
            _ => false,
        }
    }

    /// The indirect descriptor of a chain.
    fn table(&self, head: u16) -> Option<Descriptor> {
        let mut index = head;
        for _ in 0..self.layout.size {
            let at = GuestAddr(self.layout.desc.0 + DESC_BYTES * u64::from(index));
            let desc = self.memory().read_obj::<Descriptor>(at).ok()?;
            if desc.refers_to_indirect_table() {
                return Some(desc);
            }
            if !desc.has_next() || desc.next() >= self.layout.size {
                return None;
            }
            index = desc.next();
        }
        None
    }

    /// Answers requests with both, one after the other, and compares what they wrote.
    fn answer(&mut self, heads: &[u16]) {
        if heads.is_empty() {
            return;
        }
        for &head in heads {
            self.ours.answer(head, u32::from(head) * 3);
        }
        self.ours.publish();
        let ours = self.used_ring();
        for &head in heads {
            let outcome = self
                .theirs
                .add_used(self.memory(), head, u32::from(head) * 3);
            outcome.expect("the ring is in memory");
        }
        assert_eq!(ours, self.used_ring(), "used ring");
        assert_eq!(self.ours.next_used(), self.theirs.next_used());
        // Without events it interrupts for everything.
        if self.layout.event_idx {
            let wanted = self.theirs.needs_notification(self.memory());
            assert_eq!(Some(self.ours.interrupt_due()), wanted.ok(), "interrupt");
            self.reach.interrupts += 1;
        }
    }

    fn used_ring(&self) -> Vec<u8> {
        let bytes = USED_HEADER_BYTES + USED_BYTES * u64::from(self.layout.size);
        self.guest.read(self.layout.used, bytes as usize)
    }
}

fn their_queue(memory: &GuestMemory, layout: &RingInput) -> Option<Queue> {
    let mut queue = Queue::new(MAX_QUEUE_SIZE).ok()?;
    queue.try_set_size(layout.size).ok()?;
    queue.try_set_desc_table_address(layout.desc).ok()?;
    queue.try_set_avail_ring_address(layout.avail).ok()?;
    queue.try_set_used_ring_address(layout.used).ok()?;
    queue.set_event_idx(layout.event_idx);
    queue.set_next_avail(layout.base as u16);
    queue.set_ready(true);
    queue.is_valid(memory).then_some(queue)
}
