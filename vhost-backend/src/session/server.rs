//! The thread of an attachment: accepts, serves, drains, and accepts again.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use super::Shared;
use super::codec::encode_request;
use super::machine::Offer;
use super::message::code;
use super::protocol::{Host, MessageError, Session};
use super::socket::Listener;
use super::wire::{self, Waiter, WireError};

/// How long to let be after `accept` failed for want of descriptors or memory.
const ACCEPT_PAUSE: Duration = Duration::from_millis(500);

/// Why a connection ended.
#[derive(Debug, thiserror::Error)]
enum End<E: std::error::Error + 'static> {
    #[error(transparent)]
    Wire(#[from] WireError),
    #[error(transparent)]
    Message(#[from] MessageError<E>),
}

/// Where front ends come from.
pub(super) enum Served {
    /// The attachment has it, too, and makes its socket again.
    Listening(Arc<Listener>),
    /// It ends with the thread, so that the front end notices.
    Connected(OwnedFd),
}

/// Everything the thread owns.
pub(super) struct Server<F> {
    offer: Offer,
    make_host: F,
    shared: Arc<Shared>,
}

impl<H: Host, F: FnMut() -> H> Server<F> {
    pub(super) fn new(offer: Offer, make_host: F, shared: Arc<Shared>) -> Self {
        Self {
            offer,
            make_host,
            shared,
        }
    }

    pub(super) fn run(mut self, served: &Served) {
        match served {
            Served::Listening(listener) => self.listen(listener),
            Served::Connected(connection) => self.serve(connection, None),
        }
    }

    fn listen(&mut self, listener: &Listener) {
        while !self.shared.stopping() {
            match next(listener, &self.shared) {
                Ok(Some(connection)) => self.serve(&connection, Some(listener)),
                Ok(None) => {}
                Err(error) => {
                    tracing::error!(%error, "cannot accept a front end, trying again");
                    pause(&self.shared);
                }
            }
        }
    }

    fn serve(&mut self, connection: &OwnedFd, listener: Option<&Listener>) {
        self.shared.update(|state| {
            state.connected = true;
            state.connections += 1;
        });
        tracing::info!("front end connected");
        let mut visit = Visit {
            session: Session::new(self.offer, (self.make_host)()),
            shared: &self.shared,
            others: listener,
        };
        let end = visit.converse(connection.as_fd());
        visit.session.end();
        let last_error = match end {
            End::Wire(WireError::Closed | WireError::Stopping) => {
                tracing::info!("front end disconnected");
                None
            }
            error => {
                tracing::warn!(%error, "connection to the front end ended");
                Some(error.to_string())
            }
        };
        self.shared.update(|state| {
            state.connected = false;
            state.rings = 0;
            state.last_error = last_error;
        });
    }
}

/// One connection.
struct Visit<'a, H> {
    session: Session<H>,
    shared: &'a Shared,
    /// The listener, until it was said that somebody waits there.
    others: Option<&'a Listener>,
}

impl<H: Host> Visit<'_, H> {
    /// Handles messages until the connection ends; returns why.
    fn converse(&mut self, connection: BorrowedFd<'_>) -> End<H::Error> {
        loop {
            if let Err(end) = self.exchange(connection) {
                return end;
            }
        }
    }

    fn exchange(&mut self, connection: BorrowedFd<'_>) -> Result<(), End<H::Error>> {
        let frame = wire::receive(connection, self)?;
        // Before the message is carried out: who sees an even count and no ring knows that none runs, nor
        // is being started.
        self.shared.update(|state| state.messages += 1);
        let answer = self.session.handle(frame);
        self.publish();
        let answer = answer?;
        if let Some(answer) = answer {
            wire::send(connection, &answer.bytes, answer.fd.as_ref(), self)?;
        }
        Ok(())
    }

    fn publish(&self) {
        let rings = self.session.machine().running().count() as u16;
        self.shared.update(|state| {
            if state.rings == 0 && rings > 0 {
                // The configuration may have changed while nobody was connected, and a front end that
                // reconnects does not read it again by itself. It does when told so, once its device runs.
                self.shared.config_changed.store(true, Ordering::Release);
            }
            state.rings = rings;
            state.messages += 1;
        });
    }
}

impl<H: Host> Waiter for Visit<'_, H> {
    fn wait(&mut self, socket: BorrowedFd<'_>, events: PollFlags) -> Result<(), WireError> {
        loop {
            if self.shared.config_changed.load(Ordering::Acquire) {
                self.tell_config_changed();
            }
            let mut fds = vec![
                PollFd::from_borrowed_fd(socket, events),
                PollFd::new(&self.shared.wake, PollFlags::IN),
            ];
            let others = self.others.map(Listener::socket);
            fds.extend(
                others
                    .iter()
                    .map(|socket| PollFd::from_borrowed_fd(socket.as_fd(), PollFlags::IN)),
            );
            match poll(&mut fds, None) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
            let ready: Vec<bool> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
            if ready[1] {
                self.shared.drain_wake();
            }
            if self.shared.stopping() {
                return Err(WireError::Stopping);
            }
            if ready.get(2) == Some(&true) {
                tracing::warn!("another front end waits until the connected one has gone");
                self.others = None;
            }
            if ready[0] {
                return Ok(());
            }
        }
    }
}

impl<H: Host> Visit<'_, H> {
    fn tell_config_changed(&self) {
        let Some(channel) = self.session.config_change_channel() else {
            return;
        };
        self.shared.config_changed.store(false, Ordering::Release);
        let message = encode_request(code::BACKEND_CONFIG_CHANGE_MSG);
        match wire::send_some(channel.as_fd(), &message, None) {
            Ok(count) if count == message.len() => {
                tracing::debug!("front end told of the new configuration");
            }
            // A channel that full holds messages of the same content, still unread.
            Err(Errno::AGAIN) => {}
            Ok(_) => tracing::warn!(
                "front end reads no messages: it was not told of the new configuration"
            ),
            Err(error) => {
                tracing::warn!(%error, "front end could not be told of the new configuration");
            }
        }
    }
}

/// The next front end, or `None` after a wake-up.
fn next(listener: &Listener, shared: &Shared) -> Result<Option<OwnedFd>, std::io::Error> {
    let socket = listener.socket();
    let (ready, woken) = wire::wait_either(socket.as_fd(), PollFlags::IN, shared.wake.as_fd())?;
    if woken {
        shared.drain_wake();
        // Nobody is connected: the next front end reads the configuration by itself.
        shared.config_changed.store(false, Ordering::Release);
    }
    if !ready || shared.stopping() {
        return Ok(None);
    }
    Ok(listener.accept()?)
}

/// Waits a while, or until woken.
fn pause(shared: &Shared) {
    let timeout = Timespec {
        tv_sec: 0,
        tv_nsec: i64::from(ACCEPT_PAUSE.subsec_nanos()),
    };
    let _ = poll(
        &mut [PollFd::new(&shared.wake, PollFlags::IN)],
        Some(&timeout),
    );
}
