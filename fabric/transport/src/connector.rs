//! The thread that makes connections: it listens, dials, shakes hands and repeats what failed, and hands what
//! is ready to a data thread.
//!
//! One listener for the node, not one per data thread (`SO_REUSEPORT`): the kernel would deal connections by
//! a hash, and a cluster has few, so that one thread could get all and another none. Here the thread that
//! serves fewest gets the next. And signatures, a millisecond of them for each connection, do not hold up
//! guests.

use std::collections::HashMap;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use fabric_types::NodeId;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, sockopt};
use rustix::time::Timespec;

use super::backoff::Backoff;
use super::control::{ConnectorCommand, Control};
use super::handshake::{Established, Handshake, HandshakeError};
use super::hello::Refused;
use super::inbox::{Inbox, InboxMessage};
use super::members::Admission;

/// Connections of other nodes that may be shaking hands at once; for a further one the oldest is closed, so
/// that whoever says nothing keeps nobody out who is quick.
const ACCEPTS_MAX: usize = 64;

/// Connections of other nodes that a data thread serves; with all of them full further ones are closed.
const SERVED_MAX: u32 = 1024;

/// Longest time from connecting, or being connected to, until all is agreed.
const HANDSHAKE_TIME_MAX: Duration = Duration::from_secs(2);

/// A peer that is not in this node's map waits so long for a newer one; then it is refused, and connects
/// again. Less than its own patience, so that it hears why.
const ADMISSION_TIME_MAX: Duration = Duration::from_secs(1);

/// Bytes read at once during a handshake.
const READ_BYTES: usize = 4096;

/// Without traffic: when the kernel asks whether the peer is there, how often, and when it gives up.
const KEEPALIVE_IDLE: Duration = Duration::from_secs(30);
const KEEPALIVE_EVERY: Duration = Duration::from_secs(5);
const KEEPALIVE_PROBES: u32 = 3;

/// With unacknowledged data: when the kernel gives up.
const USER_TIMEOUT_MS: u32 = 10_000;

/// Why there is no connection.
#[derive(Debug, thiserror::Error)]
enum ConnectError {
    #[error(transparent)]
    Socket(#[from] io::Error),
    #[error(transparent)]
    Handshake(#[from] HandshakeError),
    #[error("the peer closed the connection")]
    Closed,
    #[error("no answer in time")]
    Time,
    #[error("the node has no address")]
    Unknown,
}

/// A connection that is being made.
struct Pending {
    fd: OwnedFd,
    /// Not connected yet.
    connecting: bool,
    handshake: Handshake,
    deadline: Instant,
    /// When a peer that is not in the map is refused.
    admitted_by: Instant,
}

enum Attempt {
    /// The next one is due then.
    At(Instant),
    Now(Box<Pending>),
}

struct Dial {
    lane: usize,
    node: NodeId,
    backoff: Backoff,
    attempt: Attempt,
}

struct Thread {
    inbox: Arc<Inbox>,
    serves: bool,
}

/// The thread.
pub struct Connector {
    control: Arc<Control>,
    listener: TcpListener,
    threads: HashMap<usize, Thread>,
    dials: Vec<Dial>,
    accepts: Vec<Pending>,
    /// Somebody was there to serve connections. Before that, while the node starts, they wait:
    /// one that is accepted and closed would be tried anew at once, again and again.
    has_served: bool,
}

impl Connector {
    /// With a listener that does not block.
    pub fn new(control: Arc<Control>, listener: TcpListener) -> Self {
        Self {
            control,
            listener,
            threads: HashMap::new(),
            dials: Vec::new(),
            accepts: Vec::new(),
            has_served: false,
        }
    }

    /// Runs until it is told to stop.
    pub fn run(mut self) {
        loop {
            self.control.eventfd.clear();
            while let Some(command) = self.control.next_command() {
                match command {
                    ConnectorCommand::Register {
                        lane,
                        inbox,
                        serves,
                    } => {
                        self.has_served |= serves;
                        self.threads.insert(lane, Thread { inbox, serves });
                    }
                    ConnectorCommand::Unregister { lane } => {
                        self.threads.remove(&lane);
                        self.dials.retain(|dial| dial.lane != lane);
                    }
                    ConnectorCommand::Dial { lane, node, failed } => self.dial(lane, node, failed),
                    ConnectorCommand::LookAtMembers => {
                        self.threads
                            .values()
                            .for_each(|thread| thread.inbox.eventfd.signal());
                    }
                    ConnectorCommand::Stop => return,
                }
            }
            self.accept();
            self.advance_dials();
            self.advance_accepts();
            self.wait();
        }
    }

    fn dial(&mut self, lane: usize, node: NodeId, failed: bool) {
        if self.dials.iter().any(|d| d.lane == lane && d.node == node) {
            return;
        }
        let mut backoff = Backoff::default();
        let now = Instant::now();
        let at = match failed {
            true => now + backoff.failed(self.control.random()),
            false => now,
        };
        self.dials.push(Dial {
            lane,
            node,
            backoff,
            attempt: Attempt::At(at),
        });
    }

    fn advance_dials(&mut self) {
        let mut at = 0;
        while at < self.dials.len() {
            let dial = &mut self.dials[at];
            let Some(thread) = self.threads.get(&dial.lane) else {
                self.dials.swap_remove(at);
                continue;
            };
            match dial.advance(&self.control) {
                Ok(None) => at += 1,
                Ok(Some((fd, established))) => {
                    tracing::info!(node = %dial.node, wire = ?established.agreed.wire, "connected");
                    thread
                        .inbox
                        .post(InboxMessage::Connected(dial.node, fd, established));
                    self.dials.swap_remove(at);
                }
                Err(error) => {
                    let failures = dial.backoff.failures();
                    let pause = dial.backoff.failed(self.control.random());
                    dial.attempt = Attempt::At(Instant::now() + pause);
                    let node = dial.node;
                    // Once for each time that it was good before; then it is known.
                    if failures == 0 {
                        tracing::warn!(%node, %error, "cannot connect, trying on");
                    } else {
                        tracing::debug!(%node, %error, failures, "cannot connect");
                    }
                    if let ConnectError::Unknown = error {
                        thread.inbox.post(InboxMessage::Unknown(node));
                        self.dials.swap_remove(at);
                    } else {
                        thread.inbox.post(InboxMessage::Unreachable(node));
                        at += 1;
                    }
                }
            }
        }
    }

    fn accept(&mut self) {
        while self.has_served {
            match self.listener.accept() {
                Ok((stream, address)) => self.accepted(stream, address),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(error) => {
                    // One that was reset meanwhile, or no descriptor left.
                    tracing::warn!(%error, "cannot accept a connection");
                    return;
                }
            }
        }
    }

    fn accepted(&mut self, stream: std::net::TcpStream, address: SocketAddr) {
        if self.accepts.len() >= ACCEPTS_MAX {
            tracing::debug!(%address, "too many connections at once, the oldest is closed");
            self.accepts.remove(0);
        }
        let begin = || -> Result<Pending, ConnectError> {
            stream.set_nonblocking(true)?;
            let hello = self.control.hello(NodeId(0))?;
            let now = Instant::now();
            Ok(Pending {
                handshake: Handshake::accept(&self.control.identity, hello)?.asking(),
                fd: stream.into(),
                connecting: false,
                deadline: now + HANDSHAKE_TIME_MAX,
                admitted_by: now + ADMISSION_TIME_MAX,
            })
        };
        match begin() {
            Ok(pending) => self.accepts.push(pending),
            Err(error) => tracing::warn!(%address, %error, "cannot take a connection"),
        }
    }

    fn advance_accepts(&mut self) {
        let mut at = 0;
        while at < self.accepts.len() {
            match self.accepts[at].advance(&self.control) {
                Ok(false) => {
                    at += 1;
                    continue;
                }
                Ok(true) => {
                    let done = self.accepts.remove(at);
                    self.hand_over(done);
                }
                Err(error) => {
                    let peer = self.accepts.remove(at);
                    let address = rustix::net::getpeername(&peer.fd).ok();
                    tracing::info!(?address, %error, "a connection was refused");
                }
            }
        }
    }

    /// Gives an accepted connection to the thread that serves fewest.
    fn hand_over(&self, done: Pending) {
        let threads = self.threads.values().filter(|thread| thread.serves);
        let load = |thread: &&Thread| thread.inbox.served.load(Ordering::Acquire);
        let Some(thread) = threads.min_by_key(load).filter(|t| load(t) < SERVED_MAX) else {
            match self.threads.values().any(|thread| thread.serves) {
                true => tracing::warn!("no data thread has room for a connection, it is closed"),
                // The node stops.
                false => tracing::debug!("no data thread for a connection, it is closed"),
            }
            return;
        };
        let (fd, established) = done.finish();
        tracing::info!(node = %established.agreed.peer, wire = ?established.agreed.wire, "serving");
        thread.inbox.served.fetch_add(1, Ordering::AcqRel);
        thread.inbox.post(InboxMessage::Accepted(fd, established));
    }

    /// Sleeps until there is something to do.
    fn wait(&self) {
        let mut fds = vec![PollFd::from_borrowed_fd(
            self.control.eventfd.fd(),
            PollFlags::IN,
        )];
        if self.has_served {
            fds.push(PollFd::new(&self.listener, PollFlags::IN));
        }
        let mut next: Option<Instant> = None;
        let mut until = |at: Instant| next = Some(next.map_or(at, |known| known.min(at)));
        let dials = self.dials.iter().filter_map(|dial| match &dial.attempt {
            Attempt::At(at) => {
                until(*at);
                None
            }
            Attempt::Now(pending) => Some(&**pending),
        });
        let dials: Vec<_> = dials.collect();
        for pending in dials.into_iter().chain(&self.accepts) {
            until(pending.next_look());
            fds.push(PollFd::new(&pending.fd, pending.interest()));
        }
        let timeout = next.map(|at| at.saturating_duration_since(Instant::now()));
        let timeout = timeout.map(|left| Timespec {
            tv_sec: left.as_secs() as i64,
            tv_nsec: i64::from(left.subsec_nanos()),
        });
        // Interrupted or not, the next turn looks.
        let _ = poll(&mut fds, timeout.as_ref());
    }
}

impl Dial {
    fn advance(
        &mut self,
        control: &Control,
    ) -> Result<Option<(OwnedFd, Box<Established>)>, ConnectError> {
        if let Attempt::At(at) = self.attempt {
            if at > Instant::now() {
                return Ok(None);
            }
            let address = control.address_of(self.node).ok_or(ConnectError::Unknown)?;
            let hello = control.hello(self.node)?;
            let handshake = Handshake::connect(&control.identity, hello)?;
            let deadline = Instant::now() + HANDSHAKE_TIME_MAX;
            self.attempt = Attempt::Now(Box::new(Pending {
                fd: connect(address)?,
                connecting: true,
                handshake,
                deadline,
                admitted_by: deadline,
            }));
        }
        let Attempt::Now(pending) = &mut self.attempt else {
            return Ok(None);
        };
        if !pending.advance(control)? {
            return Ok(None);
        }
        let none = Attempt::At(Instant::now());
        match std::mem::replace(&mut self.attempt, none) {
            Attempt::Now(done) => Ok(Some(done.finish())),
            Attempt::At(_) => Ok(None),
        }
    }
}

impl Pending {
    fn interest(&self) -> PollFlags {
        match self.connecting || !self.handshake.outgoing().is_empty() {
            true => PollFlags::OUT | PollFlags::IN,
            false => PollFlags::IN,
        }
    }

    fn finish(self) -> (OwnedFd, Box<Established>) {
        (self.fd, Box::new(self.handshake.finish()))
    }

    /// When it is to be looked at though nothing comes.
    fn next_look(&self) -> Instant {
        match self.handshake.asked() {
            Some(_) => self.admitted_by.min(self.deadline),
            None => self.deadline,
        }
    }

    /// Answers a peer that asks to be let in; false if it has to wait for a newer map.
    fn admit(&mut self, control: &Control) -> Result<bool, ConnectError> {
        let Some((node, incarnation)) = self.handshake.asked() else {
            return Ok(false);
        };
        let refusal = match control.admit(node, incarnation) {
            Admission::Welcome => None,
            Admission::Refused(refused) => Some(refused),
            Admission::NotYet if Instant::now() >= self.admitted_by => Some(Refused::NotMember),
            Admission::NotYet => return Ok(false),
        };
        self.handshake.admit(refusal)?;
        Ok(true)
    }

    /// Goes as far as it can; true when all is agreed.
    fn advance(&mut self, control: &Control) -> Result<bool, ConnectError> {
        let outcome = self.exchange(control);
        if outcome.is_err() {
            // What tells the peer the reason, if the socket takes it.
            let _ = self.send();
        }
        match outcome? {
            true => {
                tune(&self.fd)?;
                Ok(true)
            }
            false if Instant::now() >= self.deadline => Err(ConnectError::Time),
            false => Ok(false),
        }
    }

    fn exchange(&mut self, control: &Control) -> Result<bool, ConnectError> {
        if self.connecting {
            match connected(&self.fd)? {
                true => self.connecting = false,
                false => return Ok(false),
            }
        }
        loop {
            let sent_all = self.send()?;
            if let (Some(refused), true) = (self.handshake.refused(), sent_all) {
                return Err(HandshakeError::from(refused).into());
            }
            if self.handshake.is_done() {
                return Ok(true);
            }
            if self.admit(control)? {
                continue;
            }
            let mut bytes = [0; READ_BYTES];
            match rustix::net::recv(&self.fd, &mut bytes[..], rustix::net::RecvFlags::DONTWAIT) {
                Ok((_, 0)) => return Err(ConnectError::Closed),
                Ok((_, got)) => self.handshake.received(&bytes[..got])?,
                Err(Errno::AGAIN) => return Ok(false),
                Err(Errno::INTR) => {}
                Err(error) => return Err(io::Error::from(error).into()),
            }
        }
    }

    /// True if all is sent.
    fn send(&mut self) -> Result<bool, ConnectError> {
        let flags = rustix::net::SendFlags::DONTWAIT | rustix::net::SendFlags::NOSIGNAL;
        while !self.handshake.outgoing().is_empty() {
            match rustix::net::send(&self.fd, self.handshake.outgoing(), flags) {
                Ok(bytes) => self.handshake.sent(bytes),
                Err(Errno::AGAIN) => return Ok(false),
                Err(Errno::INTR) => {}
                Err(error) => return Err(io::Error::from(error).into()),
            }
        }
        Ok(true)
    }
}

fn connect(address: SocketAddr) -> Result<OwnedFd, ConnectError> {
    let family = match address {
        SocketAddr::V4(_) => AddressFamily::INET,
        SocketAddr::V6(_) => AddressFamily::INET6,
    };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let fd = rustix::net::socket_with(family, SocketType::STREAM, flags, None)
        .map_err(io::Error::from)?;
    match rustix::net::connect(&fd, &address) {
        Ok(()) | Err(Errno::INPROGRESS) => Ok(fd),
        Err(error) => Err(io::Error::from(error).into()),
    }
}

/// Whether a socket that was connecting is connected.
fn connected(fd: &OwnedFd) -> Result<bool, ConnectError> {
    let zero = Timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    let mut fds = [PollFd::from_borrowed_fd(fd.as_fd(), PollFlags::OUT)];
    if poll(&mut fds, Some(&zero)).map_err(io::Error::from)? == 0 {
        return Ok(false);
    }
    let outcome = sockopt::socket_error(fd).map_err(io::Error::from)?;
    outcome.map_err(io::Error::from)?;
    Ok(true)
}

fn tune(fd: &OwnedFd) -> Result<(), ConnectError> {
    let set = || -> rustix::io::Result<()> {
        sockopt::set_tcp_nodelay(fd, true)?;
        sockopt::set_socket_keepalive(fd, true)?;
        sockopt::set_tcp_keepidle(fd, KEEPALIVE_IDLE)?;
        sockopt::set_tcp_keepintvl(fd, KEEPALIVE_EVERY)?;
        sockopt::set_tcp_keepcnt(fd, KEEPALIVE_PROBES)?;
        sockopt::set_tcp_user_timeout(fd, USER_TIMEOUT_MS)
    };
    Ok(set().map_err(io::Error::from)?)
}
