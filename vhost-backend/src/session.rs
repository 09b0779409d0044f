//! vhost-user sessions: one attachment, its socket, and the front ends that connect to it in turn.
//!
//! | part | what it does |
//! |---|---|
//! | [`message`] | numbers, structures and limits of the protocol |
//! | [`codec`] | bytes and descriptors to typed requests, replies to bytes |
//! | [`machine`] | what each request means: request in, ordered actions out |
//! | [`protocol`] | one connection: decode, plan, perform, answer |
//! | [`host`] | carries out actions on a device |
//! | [`wire`], [`socket`] | reading and writing the socket, making one at a path |
//!
//! Everything but the last two rows and this file is free of input and output, and is tested and fuzzed that
//! way. Each attachment has one thread of its own, which sleeps unless a front end speaks; it never touches a
//! ring.

pub mod codec;
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub mod fuzzing;
pub mod host;
pub mod machine;
pub mod message;
pub mod protocol;
mod server;
pub mod socket;
pub mod wire;

use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread::JoinHandle;

use rustix::event::{EventfdFlags, eventfd};

use crate::data_thread::Threads;
use crate::device::{DeviceEngine, DeviceOf};
use crate::memory::budget::MemoryPolicy;
use host::DeviceHost;
use machine::Offer;
use protocol::Host;
use server::{Served, Server};
use socket::{Endpoint, Listener, SocketError};

/// Stack of a session thread: its frames are small, its buffers are on the heap.
const STACK_BYTES: usize = 256 * 1024;

/// What an attachment is doing, for listings.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct AttachmentState {
    /// A front end is connected.
    pub connected: bool,
    /// Connections served since the attachment was made.
    pub connections: u64,
    /// Rings that run now.
    pub rings: u16,
    /// Counts begins and ends of the front end's messages: odd while one is carried out. Only a message
    /// starts a ring.
    pub messages: u64,
    /// How the last connection ended, if not by the front end's hanging up.
    pub last_error: Option<String>,
}

/// What the session thread and its owner share.
#[derive(Debug)]
struct Shared {
    /// Wakes the session thread to look at the switches below.
    wake: OwnedFd,
    stop: AtomicBool,
    config_changed: AtomicBool,
    state: Mutex<AttachmentState>,
    observer: OnceLock<Observer>,
}

/// Who is told that rings were started or stopped, or a front end came or went.
struct Observer(Box<dyn Fn(&AttachmentState) + Send + Sync>);

impl std::fmt::Debug for Observer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Observer")
    }
}

impl Shared {
    fn wake(&self) {
        // An eventfd refuses a write only when its counter is full, and then it is awake.
        let _ = rustix::io::write(&self.wake, &1_u64.to_ne_bytes());
    }

    fn drain_wake(&self) {
        let _ = rustix::io::read(&self.wake, &mut [0; 8]);
    }

    fn stopping(&self) -> bool {
        self.stop.load(Ordering::Acquire)
    }

    fn update(&self, change: impl FnOnce(&mut AttachmentState)) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let before = (state.connected, state.rings);
        change(&mut state);
        if before == (state.connected, state.rings) {
            return;
        }
        let now = state.clone();
        drop(state);
        if let Some(Observer(observer)) = self.observer.get() {
            observer(&now);
        }
    }
}

/// A vhost-user socket that serves one device to one guest.
///
/// Front ends are served in turn: while one is connected, the next waits. When a connection ends its rings
/// are stopped and drained, and the socket goes on listening. Dropping an attachment closes it.
#[derive(Debug)]
pub struct Attachment {
    shared: Arc<Shared>,
    /// None if one connection was handed over, which the thread has.
    listener: Option<Arc<Listener>>,
    thread: Option<JoinHandle<()>>,
}

impl Attachment {
    /// Serves `device` to the front ends that connect to `endpoint`, its rings on `threads`. `memory` says
    /// how much of its guest's memory is mapped, and whether it is opened to the network.
    pub fn start<E: DeviceEngine + 'static>(
        endpoint: Endpoint,
        device: Arc<DeviceOf<E>>,
        threads: Arc<Threads<E>>,
        memory: MemoryPolicy,
    ) -> io::Result<Self> {
        let offer = host::offer(&*device);
        Self::spawn(endpoint, offer, move || {
            let (device, threads) = (Arc::clone(&device), Arc::clone(&threads));
            DeviceHost::new(device, threads, memory.account())
        })
    }

    fn spawn<H: Host>(
        endpoint: Endpoint,
        offer: Offer,
        make_host: impl FnMut() -> H + Send + 'static,
    ) -> io::Result<Self> {
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let shared = Arc::new(Shared {
            wake,
            stop: AtomicBool::new(false),
            config_changed: AtomicBool::new(false),
            state: Mutex::default(),
            observer: OnceLock::new(),
        });
        let server = Server::new(offer, make_host, Arc::clone(&shared));
        let served = match endpoint {
            Endpoint::Listening(listener) => Served::Listening(Arc::new(listener)),
            Endpoint::Connected(connection) => Served::Connected(connection),
        };
        let listener = match &served {
            Served::Listening(listener) => Some(Arc::clone(listener)),
            Served::Connected(_) => None,
        };
        let thread = std::thread::Builder::new()
            .name("vhost-session".into())
            .stack_size(STACK_BYTES)
            .spawn(move || server.run(&served))?;
        Ok(Self {
            shared,
            listener,
            thread: Some(thread),
        })
    }

    /// Tells the front end that the configuration space has changed, as it does when a volume is resized.
    /// Without a front end there is nobody to tell: the next one reads it anyway.
    pub fn notify_config_changed(&self) {
        self.shared.config_changed.store(true, Ordering::Release);
        self.shared.wake();
    }

    /// Has `observer` called with the new state whenever rings were started or stopped, or a front end came
    /// or went. It is called by the session's thread before that serves anybody else, and must not wait. Only
    /// the first one is taken.
    pub fn observe(&self, observer: impl Fn(&AttachmentState) + Send + Sync + 'static) {
        let _ = self.shared.observer.set(Observer(Box::new(observer)));
    }

    /// Makes the socket again if somebody removed its file: front ends would not find it any more. A
    /// connected one notices nothing.
    ///
    /// # Errors
    /// It is gone and cannot be made.
    pub fn restore_socket(&self) -> Result<(), SocketError> {
        let Some(listener) = &self.listener else {
            return Ok(());
        };
        if listener.restore()? {
            tracing::warn!("the socket's file was removed: it is made again");
            self.shared.wake();
        }
        Ok(())
    }

    /// What the attachment is doing.
    pub fn state(&self) -> AttachmentState {
        let state = self.shared.state.lock();
        state.unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Whether the attachment has ended by itself: the one connection that was handed over is gone.
    pub fn is_finished(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// Disconnects the front end, drains its rings and removes the socket. Blocks until the last request is
    /// answered.
    pub fn close(mut self) {
        self.shut_down();
    }

    /// Begins to close the session and returns its thread, which ends when the last request is answered. See
    /// [`close`](Self::close).
    pub fn begin_close(mut self) -> JoinHandle<()> {
        self.stop();
        let thread = self.thread.take();
        thread.expect("only close takes the thread")
    }

    fn stop(&self) {
        self.shared.stop.store(true, Ordering::Release);
        self.shared.wake();
    }

    fn shut_down(&mut self) {
        self.stop();
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("session thread panicked");
        }
    }
}

impl Drop for Attachment {
    fn drop(&mut self) {
        self.shut_down();
    }
}

#[cfg(test)]
mod tests;
