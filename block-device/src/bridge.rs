//! The thread of one block device: between the kernel's driver and a session with the daemon.
//!
//! Requests and answers do not pass here: the daemon's data threads work on the driver's rings. What passes
//! are interrupts (VDUSE has no eventfd for them), changes of the configuration, and the driver's starts and
//! resets. When the daemon goes, the thread connects again for as long as it takes; the driver waits.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use rustix::event::{PollFd, PollFlags};
use vmm_sys_util::eventfd::EventFd;

use crate::frontend::{Served, Session, SessionError};
use crate::record::Record;
use crate::session_loop::{FailureLog, RETRY, borrow, event, wait};
use crate::vduse::{Asked, Device, Question};

/// Status bit: the driver is ready, its rings run (virtio 1.2, section 2.1).
const DRIVER_OK: u8 = 4;

/// What the thread serves.
#[derive(Debug)]
pub struct Parts {
    /// The kernel's device.
    pub device: Device,
    /// Rings that it has.
    pub queues: u16,
    /// Where the daemon serves the volume.
    pub socket: PathBuf,
    /// The record of requests in flight.
    pub record: Record,
}

/// The running thread. Dropping it ends the thread; the kernel's device stays.
#[derive(Debug)]
pub struct Bridge {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    wake: EventFd,
    stop: AtomicBool,
}

impl Bridge {
    /// Starts it. Goes on with rings that ran when the process before this one ended.
    pub fn start(parts: Parts) -> io::Result<Self> {
        let shared = Arc::new(Shared {
            wake: event()?,
            stop: AtomicBool::new(false),
        });
        let mut worker = Worker::new(parts, Arc::clone(&shared))?;
        let thread = std::thread::Builder::new()
            .name("block-device".into())
            .spawn(move || worker.run())?;
        Ok(Self {
            shared,
            thread: Some(thread),
        })
    }
}

impl Drop for Bridge {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        // An eventfd refuses only when its counter is full, and then it is awake.
        let _ = self.shared.wake.write(1);
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("a block device's thread panicked");
        }
    }
}

/// The eventfds of a ring.
#[derive(Debug)]
struct Events {
    kick: EventFd,
    call: EventFd,
}

struct Worker {
    parts: Parts,
    shared: Arc<Shared>,
    rings: Vec<Events>,
    /// The driver's rings run.
    started: bool,
    session: Option<Session>,
    failures: FailureLog,
}

impl Worker {
    fn new(parts: Parts, shared: Arc<Shared>) -> io::Result<Self> {
        let mut rings = Vec::new();
        let mut is_ready = false;
        for index in 0..parts.queues {
            let events = Events {
                kick: event()?,
                call: event()?,
            };
            is_ready |= parts.device.ring(index)?.is_some();
            rings.push(events);
        }
        let started = is_ready && parts.record.is_there();
        if !started {
            parts.record.end()?;
        }
        Ok(Self {
            parts,
            shared,
            rings,
            started,
            session: None,
            failures: FailureLog::default(),
        })
    }

    fn run(&mut self) {
        while !self.shared.stop.load(Ordering::Acquire) {
            if self.started && self.session.is_none() {
                self.connect();
            }
            if let Err(error) = self.turn() {
                tracing::error!(%error, "block device");
                std::thread::sleep(RETRY);
            }
        }
    }

    /// Waits for something to do, and does it.
    fn turn(&mut self) -> io::Result<()> {
        let mut fds = vec![
            PollFd::new(&self.parts.device, PollFlags::IN),
            PollFd::from_borrowed_fd(borrow(&self.shared.wake), PollFlags::IN),
        ];
        let calls = self.rings.iter().map(|ring| borrow(&ring.call));
        fds.extend(calls.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)));
        if let Some(session) = &self.session {
            fds.push(PollFd::from_borrowed_fd(session.socket(), PollFlags::IN));
            fds.push(PollFd::from_borrowed_fd(session.channel(), PollFlags::IN));
        }
        let is_waiting = self.started && self.session.is_none();
        let ready = wait(fds, is_waiting)?;
        for (index, ring) in self.rings.iter().enumerate() {
            if ready[2 + index] {
                let _ = ring.call.read();
                self.interrupt(index as u16);
            }
        }
        let channels = 2 + self.rings.len();
        if ready.get(channels + 1) == Some(&true) {
            self.configure();
        }
        if ready.get(channels) == Some(&true) {
            tracing::info!("the daemon has gone; the device waits for it");
            self.session = None;
        }
        if ready[0]
            && let Some(question) = self.parts.device.question()?
        {
            self.answer(question)?;
        }
        Ok(())
    }

    fn interrupt(&self, index: u16) {
        // A ring that the driver has just let go of refuses.
        if let Err(error) = self.parts.device.interrupt(index) {
            tracing::debug!(%error, index, "interrupt the driver");
        }
    }

    /// The configuration space has changed.
    fn configure(&mut self) {
        let Some(session) = &mut self.session else {
            return;
        };
        session.drain_channel();
        match session.read_config() {
            Ok(config) => {
                if let Err(error) = self.parts.device.set_config(&config) {
                    tracing::error!(%error, "tell the driver of a new configuration");
                }
            }
            Err(error) => self.lost(&error),
        }
    }

    fn answer(&mut self, question: Question) -> io::Result<()> {
        let mut base = None;
        match question.asked {
            Asked::Status(0) => self.reset()?,
            Asked::Status(status) => {
                if status & DRIVER_OK != 0 && !self.started {
                    self.parts.record.begin()?;
                    self.started = true;
                }
            }
            Asked::RingState { index } => base = self.stop_ring(index)?,
            // The session is made anew, and gets the new memory.
            Asked::Remap => self.stop_rings(),
            Asked::Unknown(kind) => tracing::warn!(kind, "the kernel asked an unknown question"),
        }
        self.parts.device.answer(question, base)
    }

    fn reset(&mut self) -> io::Result<()> {
        self.stop_rings();
        self.started = false;
        self.parts.record.end()
    }

    /// Stops all rings and ends the session.
    fn stop_rings(&mut self) {
        for index in 0..self.parts.queues {
            let stopped = self
                .session
                .as_mut()
                .map(|session| session.stop_ring(index));
            if let Some(Err(error)) = stopped {
                self.lost(&error);
            }
        }
        self.session = None;
    }

    fn stop_ring(&mut self, index: u16) -> io::Result<Option<u16>> {
        match self
            .session
            .as_mut()
            .map(|session| session.stop_ring(index))
        {
            Some(Ok(base)) => return Ok(Some(base)),
            Some(Err(error)) => self.lost(&error),
            None => {}
        }
        Ok(self.parts.device.ring(index)?.map(|ring| ring.base))
    }

    fn connect(&mut self) {
        match self.session_with_rings() {
            Ok(session) => {
                self.session = Some(session);
                self.failures.succeeded();
                // Its answers may have come while nobody listened.
                for index in 0..self.parts.queues {
                    self.interrupt(index);
                }
                self.configure();
                tracing::info!("the daemon serves the device");
            }
            Err(error) => self.lost(&error),
        }
    }

    fn session_with_rings(&self) -> Result<Session, SessionError> {
        let device = &self.parts.device;
        let kernel = SessionError::Kernel;
        let mut session = Session::connect(&self.parts.socket, device.features().map_err(kernel)?)?;
        let mut rings = Vec::new();
        for (index, events) in self.rings.iter().enumerate() {
            if let Some(ring) = device.ring(index as u16).map_err(kernel)? {
                // A reset forgets it.
                let set = device.set_kick(index as u16, borrow(&events.kick));
                set.map_err(kernel)?;
                rings.push(Served {
                    index: index as u16,
                    ring,
                    kick: &events.kick,
                    call: &events.call,
                });
            }
        }
        session.start(
            &device.memory().map_err(kernel)?,
            &self.parts.record,
            &rings,
        )?;
        Ok(session)
    }

    fn lost(&mut self, error: &SessionError) {
        self.session = None;
        self.failures.failed(error);
    }
}
