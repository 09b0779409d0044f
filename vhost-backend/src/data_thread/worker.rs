//! The loop of a data thread.

use std::io;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use fabric_types::io::Tag;

use super::handle::{Change, Command, Port, QueueId};
use super::poller::{Poller, Spin, Woken};
use super::queue::{AnyQueue, Drain, Scratch};
use super::{MAX_THREAD_QUEUES, PollMode, QueueConfig, QueueError, ThreadError, sched};
use crate::device::{DeviceEngine, DeviceOf};

/// Turns without work between two looks at the clock.
const CLOCK_TURNS: u32 = 16;
/// Turns without work, while other queues of the thread are busy, after which a queue is left until it is
/// kicked.
const PARK_TURNS: u32 = 4096;
/// Requests and turns after which a busy thread looks at the clock for its parked queues.
const PARKED_CREDITS: usize = 64;
/// How often a busy thread looks for kicks of its parked queues.
const PARKED_INTERVAL: Duration = Duration::from_micros(50);
/// How long to sleep when a request waits for room in an engine that has nothing in flight.
const STALL_SLEEP: Duration = Duration::from_millis(1);

type Spawned<E> = (Arc<Port<DeviceOf<E>>>, JoinHandle<()>);

/// Starts a data thread and waits until its engine stands.
pub(super) fn spawn<E: DeviceEngine>(
    thread: usize,
    mode: PollMode,
    cpu: Option<usize>,
    make_engine: impl FnOnce() -> io::Result<E> + Send + 'static,
) -> Result<Spawned<E>, ThreadError> {
    let start = move |source| ThreadError::Start { thread, source };
    let (port, commands) = Port::new().map_err(start)?;
    let (ready, outcome) = sync_channel(1);
    let mailbox = Arc::clone(&port);
    let body = move || {
        match Worker::new(thread, mode, cpu, make_engine, mailbox, commands) {
            Ok(mut worker) => {
                // Made after the worker, so that it acts before anything of the worker is dropped.
                let _abort = AbortOnPanic;
                // The starter waits for this; the channel holds one value.
                let _ = ready.send(Ok(()));
                worker.run();
            }
            Err(error) => {
                let _ = ready.send(Err(error));
            }
        }
    };
    let join = std::thread::Builder::new()
        .name(format!("data-{thread}"))
        .spawn(body)
        .map_err(start)?;
    outcome
        .recv()
        .unwrap_or_else(|_| Err(start(io::Error::other("it ended at once"))))?;
    Ok((port, join))
}

/// Devices may still be writing into guest memory when a data thread panics, so dropping its queues, which
/// unmaps it, is not safe, and dropping its engine first would keep all its guests waiting for a device. The
/// process dies instead, and the next one does again what was in flight.
struct AbortOnPanic;

impl Drop for AbortOnPanic {
    fn drop(&mut self) {
        if std::thread::panicking() {
            std::process::abort();
        }
    }
}

struct Worker<E: DeviceEngine> {
    engine: E,
    queues: Vec<Option<Box<AnyQueue<E::Queue>>>>,
    /// Places of the queues that are polled.
    hot: Vec<usize>,
    /// Which of them is polled first in the next turn.
    first: usize,
    /// Places of queues whose requests the engine finished in this turn.
    touched: Vec<usize>,
    scratch: Scratch,
    poller: Poller,
    port: Arc<Port<DeviceOf<E>>>,
    commands: Receiver<Command<DeviceOf<E>>>,
    mode: PollMode,
    guest_spin: Spin,
    device_spin: Spin,
    /// When a turn without work was first seen after the last work.
    idle_since: Option<Instant>,
    idle_turns: u32,
    /// Set from a sleep until the work after it.
    slept: bool,
    /// Whether requests were in flight when it slept.
    slept_for_device: bool,
    parked_credits: usize,
    parked_looked: Instant,
    /// Queues that are being drained.
    draining: usize,
    generation: u64,
    shutting_down: bool,
}

impl<E: DeviceEngine> Worker<E> {
    fn new(
        thread: usize,
        mode: PollMode,
        cpu: Option<usize>,
        make_engine: impl FnOnce() -> io::Result<E>,
        port: Arc<Port<DeviceOf<E>>>,
        commands: Receiver<Command<DeviceOf<E>>>,
    ) -> Result<Self, ThreadError> {
        if let Some(cpu) = cpu {
            sched::pin(cpu).map_err(|source| ThreadError::Pin {
                thread,
                cpu,
                source,
            })?;
        }
        sched::shorten_slices();
        let engine = make_engine().map_err(|source| ThreadError::Engine { thread, source })?;
        let poller = Poller::new(port.wake_fd(), engine.wait_fd())
            .map_err(|source| ThreadError::Start { thread, source })?;
        Ok(Self {
            engine,
            queues: Vec::new(),
            hot: Vec::new(),
            first: 0,
            touched: Vec::new(),
            scratch: Scratch::default(),
            poller,
            port,
            commands,
            mode,
            guest_spin: Spin::for_guests(mode),
            device_spin: Spin::for_devices(mode),
            idle_since: None,
            idle_turns: 0,
            slept: false,
            slept_for_device: false,
            parked_credits: 0,
            parked_looked: Instant::now(),
            draining: 0,
            generation: 0,
            shutting_down: false,
        })
    }

    fn run(&mut self) {
        loop {
            if self.port.pending() {
                self.handle_commands();
            }
            let work = self.turn();
            if self.draining > 0 || self.shutting_down {
                self.finish_drained();
                if self.shutting_down && self.queues.iter().all(Option::is_none) {
                    return;
                }
            }
            if work > 0 {
                self.worked(work);
            } else {
                self.idle();
            }
        }
    }

    /// Polls every hot queue once and the engine once. Each turn begins with another queue: whatever room the
    /// engine has is not the same queue's every time.
    #[inline(always)]
    fn turn(&mut self) -> usize {
        let mut work = 0;
        let count = self.hot.len();
        self.first = if self.first + 1 < count {
            self.first + 1
        } else {
            0
        };
        for at in (self.first..count).chain(0..self.first) {
            work += self.poll_queue(at);
        }
        if self.scratch.submitted {
            self.scratch.submitted = false;
            self.engine.kick();
        }
        if self.engine.must_reap() {
            work += self.reap();
        }
        work
    }

    #[inline(always)]
    fn poll_queue(&mut self, at: usize) -> usize {
        let Some(queue) = self.queues[self.hot[at]].as_deref_mut() else {
            return 0;
        };
        let moved = queue.poll(&mut self.engine, &mut self.scratch);
        queue.idle_turns = if moved > 0 {
            0
        } else {
            queue.idle_turns.saturating_add(1)
        };
        moved
    }

    fn reap(&mut self) -> usize {
        let (queues, touched, scratch) = (&mut self.queues, &mut self.touched, &mut self.scratch);
        let mut done = |tag: Tag, outcome| {
            let slot = (tag.0 >> 32) as usize;
            let Some(queue) = queues.get_mut(slot).and_then(|queue| queue.as_deref_mut()) else {
                return;
            };
            if queue.unpublished() == 0 {
                touched.push(slot);
            }
            queue.complete(tag, outcome, scratch);
        };
        let count = self.engine.reap(&mut done);
        while let Some(slot) = self.touched.pop() {
            // A guest that has an answer is likely to ask again, and need not kick for it: said before it has
            // the answer.
            self.heat(slot);
            let Some(queue) = self.queues[slot].as_deref_mut() else {
                continue;
            };
            if queue.unpublished() > 0 {
                queue.publish();
                queue.signal();
            }
        }
        count
    }

    /// Polls a queue from now on.
    fn heat(&mut self, slot: usize) {
        let Some(queue) = self
            .queues
            .get_mut(slot)
            .and_then(|queue| queue.as_deref_mut())
        else {
            return;
        };
        queue.idle_turns = 0;
        if !queue.hot {
            queue.hot = true;
            queue.disarm();
            self.hot.push(slot);
        }
    }

    #[inline(always)]
    fn worked(&mut self, work: usize) {
        self.idle_turns = 0;
        if self.slept {
            self.slept = false;
            if let Some(since) = self.idle_since {
                let gap = since.elapsed();
                match self.slept_for_device {
                    true => self.device_spin.slept(gap),
                    false => self.guest_spin.slept(gap),
                }
            }
        }
        self.idle_since = None;
        self.parked_credits += work + 1;
        if self.parked_credits >= PARKED_CREDITS {
            self.parked_credits = 0;
            self.tend_parked();
        }
    }

    /// While some queues keep the thread busy: parks those that are quiet, and looks for kicks of the parked.
    #[cold]
    fn tend_parked(&mut self) {
        if self.queues.len() <= 1 || self.mode == PollMode::Always {
            return;
        }
        let now = Instant::now();
        if now - self.parked_looked < PARKED_INTERVAL {
            return;
        }
        self.parked_looked = now;
        self.park(PARK_TURNS);
        if self.hot.len() < self.queues.len() {
            self.wait(Some(Duration::ZERO));
        }
    }

    /// Leaves quiet queues until they are kicked. Returns false if one of them turned out to have work.
    fn park(&mut self, quiet_turns: u32) -> bool {
        let queues = &mut self.queues;
        let mut quiet = true;
        self.hot.retain(|&slot| {
            let Some(queue) = queues[slot].as_deref_mut() else {
                return false;
            };
            let parkable = queue.kick.is_some() || !queue.running();
            if !parkable || queue.stalled() || queue.idle_turns < quiet_turns {
                return true;
            }
            if queue.arm() {
                queue.disarm();
                quiet = false;
                return true;
            }
            queue.hot = false;
            false
        });
        quiet
    }

    #[inline(always)]
    fn idle(&mut self) {
        self.idle_turns += 1;
        if self.mode == PollMode::Never || self.idle_turns % CLOCK_TURNS == 0 {
            self.idle_slow();
        } else {
            std::hint::spin_loop();
        }
    }

    fn idle_slow(&mut self) {
        self.idle_turns = 0;
        let running = |queue: &AnyQueue<E::Queue>| queue.running() && queue.drain.is_none();
        let must_poll = |queue: &&AnyQueue<E::Queue>| {
            running(queue) && (self.mode == PollMode::Always || queue.kick.is_none())
        };
        if self.hot_queues().any(|queue| must_poll(&queue)) {
            return;
        }
        let since = *self.idle_since.get_or_insert_with(Instant::now);
        let for_device = self.engine.in_flight() > 0;
        let spin = match for_device {
            true => &self.device_spin,
            false => &self.guest_spin,
        };
        if !self.slept && since.elapsed() < spin.window() {
            return;
        }
        if self.park(0) && !self.port.pending() {
            // A stalled queue is never parked.
            let stalled = self.hot_queues().any(AnyQueue::stalled);
            let retry = stalled && self.engine.in_flight() == 0;
            self.slept = true;
            self.slept_for_device = for_device;
            self.wait(retry.then_some(STALL_SLEEP));
        }
    }

    fn hot_queues(&self) -> impl Iterator<Item = &AnyQueue<E::Queue>> {
        self.hot
            .iter()
            .filter_map(|&slot| self.queues[slot].as_deref())
    }

    fn wait(&mut self, timeout: Option<Duration>) {
        // At most as many places as there are queues, so the list does not grow here.
        let (queues, touched) = (&self.queues, &mut self.touched);
        self.poller.wait(timeout, |woken| {
            if let Woken::Queue { slot, generation } = woken {
                let known = queues.get(slot).and_then(Option::as_deref);
                if known.is_some_and(|queue| queue.generation as u32 == generation) {
                    touched.push(slot);
                }
            }
        });
        while let Some(slot) = self.touched.pop() {
            self.heat(slot);
        }
    }

    fn handle_commands(&mut self) {
        self.port.begin();
        while let Ok(command) = self.commands.try_recv() {
            match command {
                Command::Start {
                    device,
                    config,
                    reply,
                } => {
                    // Who asked may have given up; then its handle never existed, and nobody would stop the
                    // queue.
                    let outcome = self.start(&device, *config);
                    let id = outcome.as_ref().ok().copied();
                    if reply.send(outcome).is_err() {
                        id.into_iter()
                            .for_each(|id| self.drain(id, true, Drain(None)));
                    }
                }
                Command::Stop { id, gone, reply } => self.drain(id, gone, Drain(reply)),
                Command::Change { id, change, reply } => {
                    let outcome = self.change(id, change);
                    let _ = reply.send(outcome);
                }
                Command::Ping { reply } => {
                    // Who asked may not wait any more.
                    let _ = reply.send(Ok(()));
                }
                Command::Shutdown => self.shutting_down = true,
            }
        }
        // The thread must look at its queues once more before it sleeps.
        self.idle_since = None;
        self.slept = false;
    }

    fn start(
        &mut self,
        device: &Arc<DeviceOf<E>>,
        config: QueueConfig,
    ) -> Result<QueueId, QueueError> {
        let slot = self
            .queues
            .iter()
            .position(Option::is_none)
            .unwrap_or(self.queues.len());
        if slot >= MAX_THREAD_QUEUES {
            return Err(QueueError::Full);
        }
        if self.shutting_down {
            return Err(QueueError::ThreadGone);
        }
        self.generation += 1;
        let id = QueueId {
            slot,
            generation: self.generation,
        };
        let queue = Box::new(AnyQueue::new(device, config, id)?);
        if let Some(kick) = &queue.kick {
            self.poller.watch(id, kick).map_err(QueueError::Kick)?;
        }
        if slot == self.queues.len() {
            self.queues.push(None);
            self.touched.reserve(self.queues.len() + 1);
            self.hot.reserve(self.queues.len() + 1);
        }
        self.queues[slot] = Some(queue);
        self.hot.push(slot);
        Ok(id)
    }

    fn queue(&mut self, id: QueueId) -> Result<&mut AnyQueue<E::Queue>, QueueError> {
        let queue = self
            .queues
            .get_mut(id.slot)
            .and_then(|queue| queue.as_deref_mut());
        queue
            .filter(|queue| queue.generation == id.generation)
            .ok_or(QueueError::Stopped)
    }

    fn change(&mut self, id: QueueId, change: Change) -> Result<(), QueueError> {
        self.queue(id)?.change(change);
        self.heat(id.slot);
        Ok(())
    }

    fn drain(&mut self, id: QueueId, gone: bool, drain: Drain) {
        match self.queue(id) {
            Ok(queue) if queue.drain.is_none() => {
                queue.stop_taking(gone);
                queue.drain = Some(drain);
                self.draining += 1;
                self.heat(id.slot);
            }
            _ => answer(drain, Err(QueueError::Stopped)),
        }
    }

    /// Does what waited for queues to have nothing in flight.
    #[cold]
    fn finish_drained(&mut self) {
        for slot in 0..self.queues.len() {
            let Some(queue) = self.queues[slot].as_deref_mut() else {
                continue;
            };
            if self.shutting_down && queue.drain.is_none() {
                queue.stop_taking(true);
                queue.drain = Some(Drain(None));
                self.draining += 1;
            }
            if !queue.drained() {
                continue;
            }
            let Some(drain) = queue.drain.take() else {
                continue;
            };
            self.draining -= 1;
            if let Some(kick) = &queue.kick {
                self.poller.forget(kick);
            }
            let base = queue.close();
            self.queues[slot] = None;
            self.hot.retain(|&hot| hot != slot);
            answer(drain, Ok(base));
        }
    }
}

/// Answers who asked for a stop, if anybody waits.
fn answer(drain: Drain, outcome: Result<u32, QueueError>) {
    if let Some(reply) = drain.0 {
        reply.try_send(outcome).unwrap_or(());
    }
}
