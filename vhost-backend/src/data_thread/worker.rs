//! The loop of a data thread.

mod idle;
mod queues;

use std::io;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, sync_channel};
use std::thread::JoinHandle;
use std::time::Duration;

use super::handle::{Change, Command, Port, QueueId};
use super::poller::Poller;
use super::queue::{AnyQueue, Drain, Scratch};
use super::{PollMode, QueueConfig, QueueError, ThreadError, sched};
use crate::device::{DeviceEngine, DeviceOf};

use idle::{Idle, ParkedCheck, WaitsFor};
use queues::Queues;

/// Turns without work, while other queues of the thread are busy, after which a queue is left until it is
/// kicked.
const PARK_TURNS: u32 = 4096;
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

/// One data thread: its queues, their engine, and when it sleeps.
struct Worker<E: DeviceEngine> {
    engine: E,
    queues: Queues<E::Queue>,
    scratch: Scratch,
    poller: Poller,
    port: Arc<Port<DeviceOf<E>>>,
    commands: Receiver<Command<DeviceOf<E>>>,
    idle: Idle,
    parked: ParkedCheck,
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
            queues: Queues::new(),
            scratch: Scratch::default(),
            poller,
            port,
            commands,
            idle: Idle::new(mode),
            parked: ParkedCheck::new(),
            shutting_down: false,
        })
    }

    fn run(&mut self) {
        loop {
            if self.port.pending() {
                self.handle_commands();
            }
            let work = self.turn();
            if self.queues.are_draining() || self.shutting_down {
                if self.shutting_down {
                    self.queues.drain_all();
                }
                self.queues.finish_drained(&self.poller);
                if self.shutting_down && self.queues.is_empty() {
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

    /// Polls every hot queue once and the engine once.
    #[inline(always)]
    fn turn(&mut self) -> usize {
        let mut work = self.queues.poll(&mut self.engine, &mut self.scratch);
        if self.scratch.submitted {
            self.scratch.submitted = false;
            self.engine.kick();
        }
        if self.engine.must_reap() {
            work += self.queues.reap(&mut self.engine, &mut self.scratch);
        }
        work
    }

    #[inline(always)]
    fn worked(&mut self, work: usize) {
        self.idle.worked();
        if self.parked.worked(work) {
            self.tend_parked();
        }
    }

    /// While some queues keep the thread busy: parks those that are quiet, and looks for kicks of the parked.
    #[cold]
    fn tend_parked(&mut self) {
        if !self.queues.are_several() || self.idle.polls_always() || !self.parked.is_due() {
            return;
        }
        self.queues.park(PARK_TURNS);
        if self.queues.are_some_parked() {
            self.queues.wait(&mut self.poller, Some(Duration::ZERO));
        }
    }

    #[inline(always)]
    fn idle(&mut self) {
        if self.idle.is_time() {
            self.sleep_if_quiet();
        } else {
            std::hint::spin_loop();
        }
    }

    fn sleep_if_quiet(&mut self) {
        let polls_always = self.idle.polls_always();
        let must_poll = |queue: &AnyQueue<E::Queue>| {
            let is_served = queue.running() && queue.drain.is_none();
            is_served && (polls_always || queue.kick.is_none())
        };
        if self.queues.hot().any(must_poll) {
            return;
        }
        let waits_for = match self.engine.in_flight() {
            0 => WaitsFor::Guests,
            _ => WaitsFor::Devices,
        };
        if !self.idle.has_spun(waits_for) {
            return;
        }
        if self.queues.park(0) && !self.port.pending() {
            // A stalled queue is never parked.
            let stalled = self.queues.hot().any(AnyQueue::stalled);
            let retry = stalled && self.engine.in_flight() == 0;
            self.idle.sleeps(waits_for);
            let timeout = retry.then_some(STALL_SLEEP);
            self.queues.wait(&mut self.poller, timeout);
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
                            .for_each(|id| self.queues.drain(id, true, Drain(None)));
                    }
                }
                Command::Stop { id, gone, reply } => self.queues.drain(id, gone, Drain(reply)),
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
        self.idle.look_again();
    }

    fn start(
        &mut self,
        device: &Arc<DeviceOf<E>>,
        config: QueueConfig,
    ) -> Result<QueueId, QueueError> {
        if self.shutting_down {
            return Err(QueueError::ThreadGone);
        }
        let id = self.queues.next_id()?;
        let queue = Box::new(AnyQueue::new(device, config, id)?);
        if let Some(kick) = &queue.kick {
            self.poller.watch(id, kick).map_err(QueueError::Kick)?;
        }
        self.queues.insert(id, queue);
        Ok(id)
    }

    fn change(&mut self, id: QueueId, change: Change) -> Result<(), QueueError> {
        self.queues.find(id)?.change(change);
        self.queues.heat(id.slot);
        Ok(())
    }
}
