//! A node that uses keys which it was not given, or was given for a request that is answered: the card
//! refuses it, and the requests go on by other ways.

use std::collections::HashMap;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use anyhow::{Context as _, Result, ensure};
use fabric_rdma::card::Card;
use fabric_transport::counts::Count;
use fabric_transport::queue_pair::message::Window;
use fabric_transport::queue_pair::pair::{Body, Done, Pair, Port, Reach, Side};
use fabric_transport::queue_pair::pairing::End;
use fabric_transport::queue_pair::regions::RegionCounts;
use fabric_transport::queue_pair::slots::{Slot, Slots};
use fabric_types::registrar::Registered;

use super::lanes::World;

/// What a card says of a key that opens nothing.
const REFUSED: &str = "IBV_WC_REM_ACCESS_ERR";

/// Which key takes the place of one that was given.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Key {
    /// One that was given to nobody.
    Forged,
    /// That of a request which is answered.
    Stale,
}

/// What is to be done once, and what has come of it.
#[derive(Debug, Default)]
struct Plot {
    wanted: Option<(Key, Reach)>,
    /// Why the queue pair failed on which it was done.
    refused: Option<String>,
}

/// A card that does so.
pub struct Forger {
    card: Arc<Card>,
    plot: Arc<Mutex<Plot>>,
}

impl Forger {
    fn plot(&self) -> MutexGuard<'_, Plot> {
        self.plot.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Port for Forger {
    fn open(&self, slots: &Arc<Slots>, side: Side) -> Result<Box<dyn Pair>, String> {
        Ok(Box::new(ForgingPair {
            pair: self.card.open(slots, side)?,
            plot: Arc::clone(&self.plot),
            given: HashMap::new(),
            answered: None,
            has_forged: false,
        }))
    }

    unsafe fn register(&self, start: NonNull<u8>, bytes: usize) -> Result<Registered, String> {
        // SAFETY: the caller's promise.
        unsafe { self.card.register(start, bytes) }
    }

    fn counts(&self) -> RegionCounts {
        self.card.counts()
    }
}

struct ForgingPair {
    pair: Box<dyn Pair>,
    plot: Arc<Mutex<Plot>>,
    /// Windows of requests that are not answered, by their keys.
    given: HashMap<u32, Window>,
    /// The window of the request that was answered last. The answer closes it before anything that follows
    /// arrives.
    answered: Option<Window>,
    has_forged: bool,
}

impl ForgingPair {
    /// The windows to be used instead of those that were given.
    fn replaced(&mut self, windows: &[Window], reach: Reach) -> Vec<Window> {
        let mut windows = windows.to_vec();
        self.given
            .extend(windows.iter().map(|window| (window.key, *window)));
        let mut plot = self.plot.lock().unwrap_or_else(PoisonError::into_inner);
        let Some((key, of)) = plot.wanted else {
            return windows;
        };
        let window = match key {
            Key::Forged => Some(Window {
                key: windows[0].key.wrapping_add(1),
                ..windows[0]
            }),
            Key::Stale => self.answered.map(|answered| Window {
                len: answered.len.min(windows[0].len),
                ..answered
            }),
        };
        if let Some(window) = window.filter(|_| of == reach) {
            windows[0] = window;
            plot.wanted = None;
            self.has_forged = true;
        }
        windows
    }
}

impl Pair for ForgingPair {
    fn end(&self) -> End {
        self.pair.end()
    }

    fn connect(&mut self, peer: &End) -> Result<(), String> {
        self.pair.connect(peer)
    }

    fn room(&self) -> usize {
        self.pair.room()
    }

    fn is_busy(&self) -> bool {
        self.pair.is_busy()
    }

    fn reaches(&mut self, part: &libc::iovec) -> bool {
        self.pair.reaches(part)
    }

    fn receive(&mut self, slot: Slot) {
        self.pair.receive(slot);
    }

    unsafe fn send(&mut self, slot: Slot, body: Body<'_>, closes: Option<u32>) {
        let closed = closes.and_then(|key| self.given.remove(&key));
        self.answered = closed.or(self.answered);
        // SAFETY: the caller's promise.
        unsafe { self.pair.send(slot, body, closes) };
    }

    unsafe fn open(
        &mut self,
        parts: &[libc::iovec],
        reach: Reach,
        token: u32,
        windows: &mut Vec<Window>,
    ) -> bool {
        // SAFETY: the caller's promise.
        unsafe { self.pair.open(parts, reach, token, windows) }
    }

    fn close(&mut self, token: u32, closed: Option<u32>) -> Result<bool, String> {
        self.pair.close(token, closed)
    }

    unsafe fn read(&mut self, to: NonNull<u8>, windows: &[Window], token: u32) {
        let windows = self.replaced(windows, Reach::Read);
        // SAFETY: the caller's promise: no window is longer than the one whose place it takes.
        unsafe { self.pair.read(to, &windows, token) };
    }

    unsafe fn write(&mut self, from: NonNull<u8>, len: u32, windows: &[Window]) {
        let windows = self.replaced(windows, Reach::Write);
        // SAFETY: as above.
        unsafe { self.pair.write(from, len, &windows) };
    }

    fn flush(&mut self) -> Result<(), String> {
        self.pair.flush()
    }

    fn poll(&mut self, done: &mut Vec<Done>) -> Result<(), String> {
        let polled = self.pair.poll(done);
        if let (Err(reason), true) = (&polled, self.has_forged) {
            let mut plot = self.plot.lock().unwrap_or_else(PoisonError::into_inner);
            // What is flushed with it has no reason of its own.
            let known = plot.refused.as_deref().unwrap_or_default();
            if !known.contains(REFUSED) {
                plot.refused = Some(reason.clone());
            }
        }
        polled
    }

    fn end_all(&mut self, done: &mut Vec<Done>) -> bool {
        // The other end may notice first: then the reason is still to be taken.
        let _ = self.poll(done);
        self.pair.end_all(done)
    }

    fn arm(&mut self) -> Result<(), String> {
        self.pair.arm()
    }

    fn heard(&mut self) {
        self.pair.heard();
    }

    fn wait_fd(&self) -> BorrowedFd<'_> {
        self.pair.wait_fd()
    }
}

pub fn forgery(address: &str) -> Result<()> {
    let mut forger = None;
    let mut world = World::new(address.parse()?, |card| {
        let plot = Arc::default();
        let made = forger.insert(Arc::new(Forger { card, plot }));
        Arc::<Forger>::clone(made)
    })?;
    let forger = forger.context("the serving node has a card")?;
    for key in [Key::Forged, Key::Stale] {
        for reach in [Reach::Read, Reach::Write] {
            world.until_by_rdma()?;
            // So that there is one that is answered.
            world.load(200)?;
            let torn = world.of(0, Count::FailedPair);
            *forger.plot() = Plot {
                wanted: Some((key, reach)),
                refused: None,
            };
            world.load(400)?;
            let plot = std::mem::take(&mut *forger.plot());
            ensure!(plot.wanted.is_none(), "{key:?} {reach:?} was not done");
            let refused = plot
                .refused
                .with_context(|| format!("{key:?} {reach:?} was not refused"))?;
            println!("{key:?} {reach:?}: {refused}");
            ensure!(refused.contains(REFUSED));
            ensure!(world.of(0, Count::FailedPair) > torn);
        }
    }
    world.until_by_rdma()?;
    world.load(200)?;
    println!("refused, and nothing lost: ok");
    Ok(())
}
