//! Hostile input, as plain functions: the fuzz targets call them with what the fuzzer finds, the tests with
//! random bytes.
//!
//! A function returns if all is well and panics if the guest got where it must not.

mod engine;
mod input;
mod oracle;
mod packed;
mod shared;

use std::sync::Arc;

use fabric_types::io::Volume;

use crate::blk::{BlkDevice, BlkOptions, BlkQueue};
use crate::data_thread::handle::QueueId;
use crate::data_thread::queue::{AnyQueue, Drain, Scratch};
use crate::memory::MemoryView;
use crate::ring::{
    Chain, MAX_SEGMENTS, PackedRing, PackedRingConfig, Ring, SplitRing, SplitRingConfig,
};
use crate::testing::{FakeGuest, GUEST_BASE};

pub use oracle::{OracleReach, oracle};

use engine::HostileEngine;
use input::{Input, MEMORY_BYTES, RingInput, change_headers};
use shared::Shared;

/// How far an input got.
#[derive(Debug, Clone, Copy, Default)]
pub struct BlkReach {
    /// Requests that the engine took.
    pub requests: usize,
    /// Changes of guest memory while a request had some of its ranges with the engine and no room for the
    /// rest.
    pub changes_half_way: usize,
}

/// Turns of the thread between two changes of the guest's memory.
const TURNS: usize = 8;
/// Turns after which everything in flight must have been answered.
const DRAIN_TURNS: usize = 100_000;

thread_local! {
    static GUEST: Arc<FakeGuest> = Arc::new(FakeGuest::new(MEMORY_BYTES));
    static SHARED: Shared = Shared::new();
}

/// A volume of an odd size.
#[derive(Debug, Clone)]
pub(crate) struct FuzzVolume;

impl Volume for FuzzVolume {
    fn size_bytes(&self) -> u64 {
        (1 << 20) + 512
    }
}

/// The guest of this thread, with nothing left of the input before: what an input does must depend on it
/// alone.
fn empty_guest() -> Arc<FakeGuest> {
    let guest = GUEST.with(Arc::clone);
    let start = guest.host(crate::memory::GuestAddr(GUEST_BASE), MEMORY_BYTES);
    // SAFETY: `host` checked the range, which nobody else uses.
    unsafe { start.write_bytes(0, MEMORY_BYTES as usize) };
    guest
}

/// Walks chains off a ring of either kind that a guest filled with anything. Every piece handed out lies in
/// guest memory, and there are never more than a chain may have. Returns how many chains were whole.
pub fn ring(data: &[u8]) -> usize {
    let guest = empty_guest();
    let mut input = Input::new(data);
    let layout = RingInput::new(&mut input);
    layout.fill(&guest, &mut input);
    let mut view = MemoryView::new(Arc::clone(guest.memory()));
    let (desc, avail, used) = (layout.desc, layout.avail, layout.used);
    let (size, event_idx, indirect) = (layout.size, layout.event_idx, layout.indirect);
    if layout.is_packed() {
        let config = PackedRingConfig {
            size,
            desc,
            driver: avail,
            device: used,
            event_idx,
            indirect,
        };
        return match PackedRing::new(config, layout.base, None, &mut view) {
            Ok((ring, _)) => walk_all(&guest, ring, &layout, &mut view, &mut input),
            Err(_) => 0,
        };
    }
    let config = SplitRingConfig {
        size,
        desc,
        avail,
        used,
        event_idx,
        indirect,
    };
    match SplitRing::new(config, layout.base as u16, &mut view) {
        Ok(ring) => walk_all(&guest, ring, &layout, &mut view, &mut input),
        Err(_) => 0,
    }
}

fn walk_all(
    guest: &FakeGuest,
    mut ring: impl Ring,
    layout: &RingInput,
    view: &mut MemoryView,
    input: &mut Input<'_>,
) -> usize {
    let (mut chain, mut whole) = (Chain::default(), 0);
    while !input.is_empty() {
        if walk_some(guest, &mut ring, view, &mut chain, &mut whole).is_err() {
            break;
        }
        layout.fill(guest, input);
    }
    whole
}

fn walk_some(
    guest: &FakeGuest,
    ring: &mut impl Ring,
    view: &mut MemoryView,
    chain: &mut Chain,
    whole: &mut usize,
) -> Result<(), crate::ring::RingError> {
    ring.disarm();
    if ring.arm()? {
        let count = ring.available()?;
        ring.prefetch(count, view);
        for _ in 0..count {
            let id = ring.take()?;
            ring.walk(id, view, chain)?;
            check_pieces(guest, &chain.readable, chain.readable_bytes);
            check_pieces(guest, &chain.writable, chain.writable_bytes);
            ring.answer(id, 1);
            *whole += 1;
        }
        ring.publish();
    }
    ring.interrupt_due();
    Ok(())
}

/// All pieces are in the guest's memory and sum up to what is said of them.
fn check_pieces(guest: &FakeGuest, pieces: &[libc::iovec], bytes: u64) {
    assert!(pieces.len() <= MAX_SEGMENTS);
    let base = guest.host(crate::memory::GuestAddr(GUEST_BASE), MEMORY_BYTES) as usize;
    for piece in pieces {
        let at = (piece.iov_base as usize)
            .checked_sub(base)
            .expect("a piece before guest memory");
        assert!(
            piece.iov_len > 0 && at + piece.iov_len <= MEMORY_BYTES as usize,
            "a piece outside guest memory"
        );
    }
    assert_eq!(
        pieces.iter().map(|piece| piece.iov_len as u64).sum::<u64>(),
        bytes
    );
}

/// Serves a queue whose guest writes anything at any time, with a record of requests in flight that says
/// anything, on an engine that answers at once, later, in any order, with errors, or has no room. Every
/// request that reaches the engine is sound, every request that was taken is answered or the queue is broken,
/// and a stop always comes to an end.
pub fn blk(data: &[u8]) -> BlkReach {
    let mut reach = BlkReach::default();
    let guest = empty_guest();
    let mut input = Input::new(data);
    let layout = RingInput::new(&mut input);
    layout.fill(&guest, &mut input);
    let options = BlkOptions {
        read_only: input.byte() % 8 == 0,
        serial: "fuzz".into(),
        ..BlkOptions::default()
    };
    let device = BlkDevice::new(FuzzVolume, options).expect("the options are possible");
    let id = QueueId {
        slot: 0,
        generation: 1,
    };
    let mut config = layout.config(&guest);
    SHARED.with(|shared| shared.add(&guest, &mut config, &mut input));
    let queue = AnyQueue::<BlkQueue<HostileEngine<'_>>>::new(&device, config, id);
    let Ok(mut queue) = queue else {
        return reach;
    };
    let mut engine = HostileEngine::new(&guest, input.byte());
    let mut scratch = Scratch::default();
    while !input.is_empty() {
        for _ in 0..TURNS {
            turn(&mut queue, &mut engine, &mut scratch);
        }
        queue.arm();
        queue.disarm();
        reach.changes_half_way += usize::from(engine.half_way());
        if input.byte() % 2 == 0 {
            change_headers(&guest, &mut input);
        } else {
            layout.fill(&guest, &mut input);
        }
        engine.reseed(input.byte());
    }
    queue.drain = Some(Drain(None));
    for _ in 0..DRAIN_TURNS {
        if queue.drained() {
            assert_eq!(engine.pending(), 0, "an answer is missing");
            reach.requests = engine.accepted();
            return reach;
        }
        turn(&mut queue, &mut engine, &mut scratch);
    }
    panic!("the queue cannot be stopped");
}

fn turn<'a>(
    queue: &mut AnyQueue<BlkQueue<HostileEngine<'a>>>,
    engine: &mut HostileEngine<'a>,
    scratch: &mut Scratch,
) {
    use fabric_types::io::Engine;
    queue.poll(engine, scratch);
    engine.kick();
    engine.reap(&mut |tag, result| queue.complete(tag, result, scratch));
    if queue.unpublished() > 0 {
        queue.publish();
        queue.signal();
    }
}

#[cfg(test)]
mod tests;
