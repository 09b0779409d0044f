//! The threads of one nbd device: one reads requests from the socket and submits them to the virtqueue, the
//! other completes them and keeps the session with the daemon.
//!
//! When the kernel drops the connection (a request timed out), requests in flight are completed before the
//! device is reconnected: a write that the kernel requeues must not run beside its first attempt. What a
//! dead daemon had in flight is resubmitted from the record, as a guest's requests are; what a dead helper
//! had, the kernel requeues.

use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use rustix::event::{PollFd, PollFlags};
use vmm_sys_util::eventfd::EventFd;

use super::kernel::Device;
use super::memory::{Data, Memory, Places, SLOT_BYTES};
use super::protocol::{self, Geometry, Kind, REQUEST_BYTES, Request, feature, request_type};
use super::requests::{Next, Requests};
use crate::frontend::{Served, Session, SessionError};
use crate::record::Record;
use crate::session_loop::{FailureLog, RETRY, borrow, event, wait};

/// What is served.
#[derive(Debug)]
pub struct Parts {
    /// Name of the kernel's device.
    pub name: String,
    /// Where the daemon serves the volume.
    pub socket: PathBuf,
    /// The record of requests in flight.
    pub record: Record,
}

/// A device that is served. Dropping it ends that; the kernel's device stays, and its requests wait.
#[derive(Debug)]
pub struct Server {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

/// What both threads have.
#[derive(Debug)]
struct Shared {
    device: Device,
    memory: Memory,
    state: Mutex<State>,
    /// Slots were freed, or all is to end.
    changed: Condvar,
    kick: EventFd,
    call: EventFd,
    wake: EventFd,
    stop: AtomicBool,
}

#[derive(Debug)]
struct State {
    /// To the kernel.
    stream: Arc<UnixStream>,
    requests: Requests,
    places: Places,
    discard_bytes_max: u32,
}

impl Server {
    /// Serves the kernel's device of this name, and makes it if it is not there.
    pub fn start(parts: Parts) -> io::Result<Self> {
        // The virtqueue is new: the kernel requeues what was in flight on the old one.
        parts.record.begin()?;
        let session = Session::connect(&parts.socket, feature::USED).map_err(io::Error::other)?;
        let geometry = Geometry::of(session.offer());
        let discard_bytes_max = protocol::discard_bytes_max(&session.offer().config);
        let (stream, kernels) = UnixStream::pair()?;
        let device = match Device::find(&parts.name) {
            Some(device) => {
                device.reconnect(kernels.as_fd())?;
                device.resize(geometry.size_bytes)?;
                device
            }
            None => Device::make(&parts.name, geometry, kernels.as_fd())?,
        };
        let shared = Arc::new(Shared {
            device,
            memory: Memory::new()?,
            state: Mutex::new(State {
                stream: Arc::new(stream),
                requests: Requests::default(),
                places: Places::default(),
                discard_bytes_max,
            }),
            changed: Condvar::new(),
            kick: event()?,
            call: event()?,
            wake: event()?,
            stop: AtomicBool::new(false),
        });
        let mut answering = Answering {
            shared: Arc::clone(&shared),
            parts,
            session: Some(session),
            failures: FailureLog::default(),
        };
        answering.start_ring();
        let taking = Arc::clone(&shared);
        let mut server = Self {
            shared,
            threads: Vec::new(),
        };
        let threads = &mut server.threads;
        threads.push(thread("nbd-answers", move || answering.run())?);
        threads.push(thread("nbd-requests", move || taking.take_requests())?);
        Ok(server)
    }

    /// The kernel's device.
    pub fn device(&self) -> &Device {
        &self.shared.device
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let shared = &self.shared;
        shared.stop.store(true, Ordering::Release);
        // Both have nobody to tell: a socket that was shut down, an eventfd that is awake already.
        let _ = shared.lock().stream.shutdown(std::net::Shutdown::Both);
        let _ = shared.wake.write(1);
        shared.changed.notify_all();
        for thread in self.threads.drain(..) {
            if thread.join().is_err() {
                tracing::error!("a thread of an nbd device panicked");
            }
        }
    }
}

fn thread(name: &str, run: impl FnOnce() + Send + 'static) -> io::Result<JoinHandle<()>> {
    std::thread::Builder::new().name(name.into()).spawn(run)
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_stopping(&self) -> bool {
        self.stop.load(Ordering::Acquire)
    }

    /// Takes requests until the device is gone, or all is to end.
    fn take_requests(&self) {
        while !self.is_stopping() {
            let stream = Arc::clone(&self.lock().stream);
            match self.take_from(&stream) {
                Ok(()) => return,
                Err(error) if self.is_stopping() => {
                    tracing::debug!(%error, "the device is served no more");
                }
                Err(error) => {
                    let device = self.device.path();
                    tracing::warn!(%error, device = %device.display(), "the kernel dropped the connection");
                    self.reconnect();
                }
            }
        }
    }

    /// Takes requests from a socket. Ends in order when the kernel removes the device.
    fn take_from(&self, stream: &UnixStream) -> io::Result<()> {
        let mut bytes = [0; REQUEST_BYTES];
        loop {
            (&*stream).read_exact(&mut bytes)?;
            let request = Request::parse(&bytes)
                .ok_or_else(|| io::Error::other("what came is no request of nbd's"))?;
            match request.kind {
                Kind::Disconnect => return Ok(()),
                Kind::Unknown => self.refuse(stream, request)?,
                Kind::Read | Kind::Write { .. } if request.length > protocol::DATA_BYTES_MAX => {
                    return Err(io::Error::other("a request is longer than nbd's may be"));
                }
                _ => self.take(stream, request)?,
            }
        }
    }

    fn refuse(&self, mut stream: &UnixStream, request: Request) -> io::Result<()> {
        // Under the lock: answers do not mix.
        let _state = self.lock();
        stream.write_all(&protocol::answer(request.cookie, libc::EOPNOTSUPP as u32))
    }

    /// Puts a request on the ring, piece by piece.
    fn take(&self, stream: &UnixStream, request: Request) -> io::Result<()> {
        let (id, longest) = {
            let mut state = self.lock();
            let longest = match request.kind {
                Kind::Trim => state.discard_bytes_max,
                _ => SLOT_BYTES as u32,
            };
            (
                state.requests.begin(request.kind, request.cookie),
                longest.max(512),
            )
        };
        let mut done = 0;
        while done < request.length || (request.kind == Kind::Flush && done == 0) {
            let bytes = (request.length - done).min(longest);
            let Some(slot) = self.wait_for_slot(id, bytes) else {
                return Err(io::Error::other("the device is served no more"));
            };
            let offset = request.offset + u64::from(done);
            let filled = self.fill(stream, request.kind, slot, offset, bytes);
            let mut state = self.lock();
            let (header, data) = match filled {
                Ok(filled) => filled,
                Err(error) => {
                    state.requests.give_back(id, slot);
                    state.requests.break_off(id);
                    return Err(error);
                }
            };
            self.memory.submit(&mut state.places, slot, header, data);
            drop(state);
            self.kick();
            done += bytes.max(1);
        }
        let mut state = self.lock();
        let next = state.requests.is_whole(id);
        self.go_on(&mut state, next);
        Ok(())
    }

    /// Header and data of a piece of a request.
    fn fill(
        &self,
        mut stream: &UnixStream,
        kind: Kind,
        slot: u16,
        offset: u64,
        bytes: u32,
    ) -> io::Result<([u8; 16], Data)> {
        Ok(match kind {
            Kind::Write { .. } => {
                self.memory.fill(slot, bytes as usize, &mut stream)?;
                let header = protocol::header(request_type::OUT, offset);
                (header, Data::Out(bytes))
            }
            Kind::Read => (protocol::header(request_type::IN, offset), Data::In(bytes)),
            Kind::Trim => {
                let what = protocol::discarded(offset, bytes);
                self.memory.fill(slot, what.len(), &mut &what[..])?;
                let header = protocol::header(request_type::DISCARD, 0);
                (header, Data::Out(what.len() as u32))
            }
            Kind::Flush | Kind::Disconnect | Kind::Unknown => {
                (protocol::header(request_type::FLUSH, 0), Data::None)
            }
        })
    }

    fn wait_for_slot(&self, id: u64, bytes: u32) -> Option<u16> {
        let mut state = self.lock();
        loop {
            if self.is_stopping() {
                return None;
            }
            if let Some(slot) = state.requests.take_slot(id, bytes) {
                return Some(slot);
            }
            let waited = self.changed.wait(state);
            state = waited.unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Reconnects the device, once no request of the old connection is in flight.
    fn reconnect(&self) {
        let mut state = self.lock();
        while !state.requests.are_done() && !self.is_stopping() {
            let waited = self.changed.wait(state);
            state = waited.unwrap_or_else(PoisonError::into_inner);
        }
        if self.is_stopping() {
            return;
        }
        let connected = UnixStream::pair().and_then(|(stream, kernels)| {
            self.device.reconnect(kernels.as_fd())?;
            Ok(stream)
        });
        match connected {
            Ok(stream) => state.stream = Arc::new(stream),
            Err(error) => {
                tracing::error!(%error, "reconnect the nbd device");
                drop(state);
                std::thread::sleep(RETRY);
            }
        }
    }

    fn kick(&self) {
        // Refused only when its counter is full, and then the daemon is awake.
        let _ = self.kick.write(1);
    }

    /// Takes answers from the ring.
    fn take_answers(&self) {
        let mut state = self.lock();
        while let Some((slot, success)) = self.memory.answered(&mut state.places) {
            let next = state.requests.answered(slot, success);
            self.go_on(&mut state, next);
        }
        self.changed.notify_all();
    }

    fn go_on(&self, state: &mut State, next: Next) {
        match next {
            Next::Nothing => {}
            Next::Flush(slot) => {
                let header = protocol::header(request_type::FLUSH, 0);
                self.memory
                    .submit(&mut state.places, slot, header, Data::None);
                self.kick();
            }
            Next::Answer(answer) => {
                let error = if answer.failed { libc::EIO as u32 } else { 0 };
                let mut stream = &*state.stream;
                let sent = stream
                    .write_all(&protocol::answer(answer.cookie, error))
                    .and_then(|()| {
                        let mut data = answer.data.iter();
                        data.try_for_each(|(slot, bytes)| {
                            self.memory.drain(*slot, *bytes as usize, &mut stream)
                        })
                    });
                if let Err(error) = sent {
                    // The connection is dead: the kernel requeues the request.
                    tracing::debug!(%error, "answer the kernel");
                }
                state.requests.free(answer);
                self.changed.notify_all();
            }
        }
    }
}

/// The thread that takes answers, and keeps the session with the daemon.
struct Answering {
    shared: Arc<Shared>,
    parts: Parts,
    session: Option<Session>,
    failures: FailureLog,
}

impl Answering {
    fn run(&mut self) {
        while !self.shared.is_stopping() {
            if self.session.is_none() {
                self.connect();
            }
            if let Err(error) = self.turn() {
                tracing::error!(%error, "nbd device");
                std::thread::sleep(RETRY);
            }
        }
        // In order: the daemon has answered what it had of the ring, or keeps it in the record.
        self.session = None;
    }

    /// Waits for something to do, and does it.
    fn turn(&mut self) -> io::Result<()> {
        let shared = Arc::clone(&self.shared);
        let mut fds = vec![
            PollFd::from_borrowed_fd(borrow(&shared.wake), PollFlags::IN),
            PollFd::from_borrowed_fd(borrow(&shared.call), PollFlags::IN),
        ];
        if let Some(session) = &self.session {
            fds.push(PollFd::from_borrowed_fd(session.socket(), PollFlags::IN));
            fds.push(PollFd::from_borrowed_fd(session.channel(), PollFlags::IN));
        }
        let ready = wait(fds, self.session.is_none())?;
        if ready[1] {
            let _ = shared.call.read();
            shared.take_answers();
        }
        if ready.get(3) == Some(&true) {
            self.configure();
        }
        if ready.get(2) == Some(&true) {
            tracing::info!("the daemon has gone; the device waits for it");
            self.session = None;
        }
        Ok(())
    }

    /// The configuration space has changed.
    fn configure(&mut self) {
        let Some(session) = &mut self.session else {
            return;
        };
        session.drain_channel();
        match session.read_config() {
            Ok(config) => {
                self.shared.lock().discard_bytes_max = protocol::discard_bytes_max(&config);
                let size = protocol::size_bytes(&config);
                if let Err(error) = self.shared.device.resize(size) {
                    tracing::error!(%error, "resize the nbd device");
                }
            }
            Err(error) => self.lost(&error),
        }
    }

    fn connect(&mut self) {
        match Session::connect(&self.parts.socket, feature::USED) {
            Ok(session) => {
                self.session = Some(session);
                self.start_ring();
            }
            Err(error) => self.lost(&error),
        }
    }

    /// Has the daemon serve the ring.
    fn start_ring(&mut self) {
        let shared = Arc::clone(&self.shared);
        let Some(session) = &mut self.session else {
            return;
        };
        // What was answered already is no longer in flight.
        shared.take_answers();
        let started = {
            let state = shared.lock();
            let served = Served {
                index: 0,
                ring: shared.memory.ring(&state.places),
                kick: &shared.kick,
                call: &shared.call,
            };
            shared
                .memory
                .regions()
                .map_err(SessionError::Channel)
                .and_then(|regions| session.start(&regions, &self.parts.record, &[served]))
        };
        match started {
            Ok(()) => {
                self.failures.succeeded();
                shared.kick();
                // Its answers may have come while nobody listened.
                shared.take_answers();
                self.configure();
                tracing::info!("the daemon serves the device");
            }
            Err(error) => self.lost(&error),
        }
    }

    fn lost(&mut self, error: &SessionError) {
        self.session = None;
        self.failures.failed(error);
    }
}
