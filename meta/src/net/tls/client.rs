//! The asking side: a connection for each peer, made when needed and again after a pause.

use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use openraft::BasicNode;
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tokio::runtime::Handle;
use tokio::sync::{mpsc, oneshot};
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use super::super::frame::{
    self, AboutGroupLinks, AboutGroupRaft, AboutGroups, AboutMap, FRAME_BYTES_MAX, HELLO_BYTES_MAX,
    Hello, Protocol, Purpose,
};
use super::super::{AddressSource, BoxFuture, PeerReply, PeerRequest, Transport, TransportError};
use super::addresses::AddressBook;
use super::{CONNECT_WAIT_MAX, GREETING_WAIT_MAX, TlsIdentity, prepare};
use crate::groups::{GroupCall, GroupReply, GroupRequest};
use crate::ids::NodeId;

/// Pause after a connection could not be made; doubled up to the maximum with each further failure.
const BACKOFF_MIN: Duration = Duration::from_millis(50);
/// See [`BACKOFF_MIN`].
const BACKOFF_MAX: Duration = Duration::from_secs(2);
/// Requests that wait to be sent to one peer; more wait in their callers.
const QUEUE_LENGTH: usize = 64;
/// Smallest number of waiting callers of one peer at which abandoned ones are removed.
const PRUNE_MIN: usize = 64;

/// Calls peers over TLS.
pub struct TlsTransport {
    /// Runs calls about the cluster map. Callers on other runtimes open no connection that heartbeats wait
    /// for, so a busy runtime does not delay them.
    runtime: Handle,
    addresses: Arc<AddressBook>,
    about_map: Arc<PeerConnections<AboutMap>>,
    about_groups: PeerConnections<AboutGroups>,
    about_group_raft: PeerConnections<AboutGroupRaft>,
    about_group_links: PeerConnections<AboutGroupLinks>,
}

/// Connections for one purpose, one to each peer.
struct PeerConnections<P: Protocol> {
    identity: TlsIdentity,
    addresses: Arc<AddressBook>,
    peers: Mutex<BTreeMap<NodeId, Arc<ConnectionSlot<P>>>>,
}

/// Why there is no connection.
#[derive(Debug, thiserror::Error)]
enum Failed {
    #[error("the peer says that this node was removed from the cluster")]
    Removed,
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// The way to one peer. One caller at a time waits for the connection.
struct ConnectionSlot<P: Protocol> {
    state: tokio::sync::Mutex<State<P>>,
}

struct State<P: Protocol> {
    link: Option<ClientLink<P>>,
    attempt: Option<Attempt>,
    failures: u32,
    /// Earliest start of the next attempt, unless there are addresses that have not failed.
    not_before: Option<Instant>,
    failed_at: Vec<String>,
}

impl<P: Protocol> Default for ConnectionSlot<P> {
    fn default() -> Self {
        let state = State {
            link: None,
            attempt: None,
            failures: 0,
            not_before: None,
            failed_at: Vec::new(),
        };
        Self {
            state: tokio::sync::Mutex::new(state),
        }
    }
}

type Connected = Result<Answered, Failed>;

/// A peer that has answered.
struct Answered {
    stream: TlsStream<TcpStream>,
    /// Address of the connection.
    address: String,
    /// Address that the peer announces; empty if it announces none.
    announced: String,
}

/// A connection that is being made, in a task of its own: a call that is given up leaves it to the next one.
/// A heartbeat has 100 ms, and a loaded peer takes longer for a handshake.
struct Attempt {
    /// Addresses to try in turn.
    candidates: Vec<String>,
    /// One task, which ends with this set.
    task: JoinSet<Connected>,
}

impl Attempt {
    fn new(
        identity: TlsIdentity,
        target: NodeId,
        candidates: Vec<String>,
        purpose: Purpose,
    ) -> Self {
        let (to, mut task) = (candidates.clone(), JoinSet::new());
        task.spawn(async move { connect_to_any(&identity, target, &to, purpose).await });
        Self { candidates, task }
    }

    /// Waits for its end. What is dropped meanwhile is the waiting alone.
    async fn end(&mut self) -> Connected {
        match self.task.join_next().await {
            Some(Ok(connected)) => connected,
            Some(Err(error)) => Err(io::Error::other(error).into()),
            None => Err(io::Error::other("it has ended before").into()),
        }
    }
}

/// By the numbers of their requests.
type Senders<R> = BTreeMap<u64, oneshot::Sender<R>>;
type Waiting<R> = Arc<Mutex<Option<Senders<R>>>>;

/// A connection that lives.
struct ClientLink<P: Protocol> {
    /// Remote address.
    address: String,
    /// Address that the peer announced when the connection was opened. The connection is dropped when the
    /// peer announces another one.
    announced: Option<String>,
    next: u64,
    queue: mpsc::Sender<Vec<u8>>,
    /// Who waits for an answer; absent once the connection is over.
    waiting: Waiting<P::Reply>,
    /// Number of waiting callers at which abandoned ones are removed.
    prune_at: usize,
    tasks: [JoinHandle<()>; 2],
}

impl<P: Protocol> Drop for ClientLink<P> {
    fn drop(&mut self) {
        self.tasks.iter().for_each(JoinHandle::abort);
    }
}

fn lock<R>(waiting: &Waiting<R>) -> MutexGuard<'_, Option<Senders<R>>> {
    // The map is whole after every statement.
    waiting.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Tries one address after the other. Returns "connection refused" only if all addresses refused.
async fn connect_to_any(
    identity: &TlsIdentity,
    target: NodeId,
    candidates: &[String],
    purpose: Purpose,
) -> Connected {
    let mut failed = None;
    for address in candidates {
        match connect(identity, target, address, purpose).await {
            Ok((stream, announced)) => {
                let address = address.clone();
                return Ok(Answered {
                    stream,
                    address,
                    announced,
                });
            }
            Err(Failed::Removed) => return Err(Failed::Removed),
            Err(error) => {
                failed = Some(match failed {
                    Some(before) if !is_gone(&before) => before,
                    Some(_) | None => error,
                });
            }
        }
    }
    let unknown = || io::Error::new(io::ErrorKind::NotFound, "its address is not known").into();
    Err(failed.unwrap_or_else(unknown))
}

fn is_gone(failed: &Failed) -> bool {
    matches!(failed, Failed::Io(error) if error.kind() == io::ErrorKind::ConnectionRefused)
}

/// Returns the connection and the address that the peer announces.
async fn connect(
    identity: &TlsIdentity,
    target: NodeId,
    address: &str,
    purpose: Purpose,
) -> Result<(TlsStream<TcpStream>, String), Failed> {
    let no_answer = |_| io::Error::new(io::ErrorKind::TimedOut, "it does not answer");
    let stream = timeout(CONNECT_WAIT_MAX, TcpStream::connect(address)).await;
    let stream = stream.map_err(no_answer)??;
    prepare(&stream)?;
    let greeted = timeout(GREETING_WAIT_MAX, greet(identity, target, stream, purpose)).await;
    greeted.map_err(no_answer)?
}

/// Shows who connects, and finds out who answers.
async fn greet(
    identity: &TlsIdentity,
    target: NodeId,
    stream: TcpStream,
    purpose: Purpose,
) -> Result<(TlsStream<TcpStream>, String), Failed> {
    let connector = TlsConnector::from(Arc::clone(&identity.client));
    let name = identity.name_of(target);
    let mut stream = connector.connect(name, stream).await?;
    let mut hello = identity.hello();
    hello.purpose = purpose;
    frame::send(&mut stream, 0, &hello).await?;
    let (_, answer): (_, Hello) = frame::receive(&mut stream, HELLO_BYTES_MAX).await?;
    if answer.removed {
        return Err(Failed::Removed);
    }
    let refused = |detail| io::Error::new(io::ErrorKind::PermissionDenied, detail);
    answer
        .agree(identity.cluster, identity.history)
        .map_err(refused)?;
    if answer.purpose != purpose {
        return Err(refused("it answered for another purpose".to_owned()).into());
    }
    if answer.node != target {
        return Err(refused(format!("node {} answered", answer.node)).into());
    }
    Ok((stream, answer.address))
}

impl TlsTransport {
    /// Calls peers in the name of this node. Connections about the cluster map use the current runtime,
    /// others the runtime of their callers.
    ///
    /// # Panics
    /// If called outside of a runtime.
    #[must_use]
    pub fn new(identity: TlsIdentity) -> Self {
        Self::with_hints(identity, Vec::new())
    }

    /// Like [`Self::new`], but also tries these addresses, which may belong to any node. Each is tried for
    /// every peer that is not found elsewhere, so there should be few.
    #[must_use]
    pub fn with_hints(identity: TlsIdentity, hints: Vec<String>) -> Self {
        let addresses = Arc::new(AddressBook::with_hints(hints));
        Self {
            runtime: Handle::current(),
            about_map: Arc::new(PeerConnections::new(&identity, &addresses)),
            about_groups: PeerConnections::new(&identity, &addresses),
            about_group_raft: PeerConnections::new(&identity, &addresses),
            about_group_links: PeerConnections::new(&identity, &addresses),
            addresses,
        }
    }
}

impl<P: Protocol> PeerConnections<P> {
    fn new(identity: &TlsIdentity, addresses: &Arc<AddressBook>) -> Self {
        Self {
            identity: identity.clone(),
            addresses: Arc::clone(addresses),
            peers: Mutex::default(),
        }
    }

    fn slot(&self, target: NodeId) -> Arc<ConnectionSlot<P>> {
        let mut peers = self.peers.lock().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(peers.entry(target).or_default())
    }

    /// Makes a connection, or waits for the one that is being made.
    async fn stream(
        &self,
        state: &mut State<P>,
        target: NodeId,
        address: &str,
    ) -> Result<Answered, TransportError> {
        let unreachable = |detail: String| TransportError::Unreachable { target, detail };
        let candidates = self.addresses.candidates(target, address);
        if state
            .attempt
            .as_ref()
            .is_none_or(|attempt| attempt.candidates != candidates)
        {
            let is_early = |moment| Instant::now() < moment;
            if state.failed_at == candidates && state.not_before.is_some_and(is_early) {
                return Err(unreachable(
                    "it could not be reached a moment ago".to_owned(),
                ));
            }
            let identity = self.identity.clone();
            state.attempt = Some(Attempt::new(identity, target, candidates, P::PURPOSE));
        }
        let attempt = state.attempt.as_mut().expect("it was just made");
        let connected = attempt.end().await;
        let tried = state.attempt.take().map(|attempt| attempt.candidates);
        match connected {
            Ok(answered) => {
                state.failures = 0;
                state.not_before = None;
                let book = &self.addresses;
                book.learn(target, &answered.address, AddressSource::Other);
                book.learn(target, &answered.announced, AddressSource::Itself);
                Ok(answered)
            }
            Err(failed) => {
                let pause = BACKOFF_MIN.saturating_mul(1 << state.failures.min(8));
                state.failures += 1;
                state.not_before = Some(Instant::now() + pause.min(BACKOFF_MAX));
                state.failed_at = tried.unwrap_or_default();
                Err(match failed {
                    Failed::Removed => TransportError::Removed { target },
                    failed if is_gone(&failed) => TransportError::Gone { target },
                    Failed::Io(error) => unreachable(error.to_string()),
                })
            }
        }
    }

    /// Hands a request to the connection, which is made if there is none. The answer comes later.
    async fn begin(
        &self,
        target: NodeId,
        address: &str,
        request: &P::Request,
    ) -> Result<oneshot::Receiver<P::Reply>, TransportError> {
        let unreachable = |detail: String| TransportError::Unreachable { target, detail };
        let slot = self.slot(target);
        let mut state = slot.state.lock().await;
        let alive = |link: &ClientLink<P>| {
            let addresses = (link.address.as_str(), link.announced.as_deref());
            let is_current = self.addresses.is_current(target, address, addresses);
            is_current && lock(&link.waiting).is_some()
        };
        if !state.link.as_ref().is_some_and(alive) {
            state.link = None;
            let answered = self.stream(&mut state, target, address).await?;
            let announced = self.addresses.announced(target);
            state.link = Some(ClientLink::new(
                answered.address,
                announced,
                answered.stream,
            ));
        }
        let link = state.link.as_mut().expect("it was just made");
        let number = link.next;
        link.next += 1;
        let bytes =
            frame::encode(number, request).map_err(|error| unreachable(error.to_string()))?;
        let (sender, receiver) = oneshot::channel();
        match lock(&link.waiting).as_mut() {
            Some(waiting) => {
                // Removes abandoned callers. The threshold grows with the number that remains, so each caller
                // is checked a few times only, however many wait.
                if waiting.len() >= link.prune_at {
                    waiting.retain(|_, sender| !sender.is_closed());
                    link.prune_at = PRUNE_MIN.max(2 * waiting.len());
                }
                waiting.insert(number, sender);
            }
            None => return Err(unreachable("the connection just ended".to_owned())),
        }
        let (queue, detail) = (link.queue.clone(), "the connection just ended".to_owned());
        drop(state);
        match queue.send(bytes).await {
            Ok(()) => Ok(receiver),
            Err(_) => Err(unreachable(detail)),
        }
    }

    /// Sends a request and waits for its answer.
    async fn call(
        &self,
        target: NodeId,
        address: &BasicNode,
        request: P::Request,
    ) -> Result<P::Reply, TransportError> {
        let answer = self.begin(target, &address.addr, &request).await?;
        answer.await.map_err(|_| TransportError::Lost {
            target,
            detail: "the connection ended before its answer".to_owned(),
        })
    }

    /// The connection ends with the last call that has the slot.
    fn forget(&self, node: NodeId) {
        let mut peers = self.peers.lock().unwrap_or_else(PoisonError::into_inner);
        peers.remove(&node);
    }
}

impl<P: Protocol> ClientLink<P> {
    fn new(address: String, announced: Option<String>, stream: TlsStream<TcpStream>) -> Self {
        let (mut reader, mut writer) = tokio::io::split(stream);
        let (queue, mut queued) = mpsc::channel::<Vec<u8>>(QUEUE_LENGTH);
        let waiting: Waiting<P::Reply> = Arc::new(Mutex::new(Some(BTreeMap::new())));
        let answers = Arc::clone(&waiting);
        let reading = async move {
            loop {
                let received = frame::receive::<P::Reply>(&mut reader, FRAME_BYTES_MAX).await;
                let Ok((number, reply)) = received else { break };
                let sender = lock(&answers).as_mut().and_then(|all| all.remove(&number));
                if let Some(sender) = sender {
                    // Whoever asked may have given up.
                    let _ = sender.send(reply);
                }
            }
            *lock(&answers) = None;
        };
        let asked = Arc::clone(&waiting);
        let writing = async move {
            while let Some(bytes) = queued.recv().await {
                let sent = async {
                    writer.write_all(&bytes).await?;
                    writer.flush().await
                };
                if sent.await.is_err() {
                    break;
                }
            }
            *lock(&asked) = None;
        };
        Self {
            address,
            announced,
            next: 1,
            queue,
            waiting,
            prune_at: PRUNE_MIN,
            tasks: [tokio::spawn(reading), tokio::spawn(writing)],
        }
    }
}

impl Transport for TlsTransport {
    fn call<'a>(
        &'a self,
        target: NodeId,
        address: &'a BasicNode,
        request: PeerRequest,
    ) -> BoxFuture<'a, Result<PeerReply, TransportError>> {
        let (connections, address) = (Arc::clone(&self.about_map), address.clone());
        let call = async move { connections.call(target, &address, request).await };
        Box::pin(async move {
            // The task ends with this call.
            let mut task = JoinSet::new();
            task.spawn_on(call, &self.runtime);
            let ended = |detail: String| Err(TransportError::Lost { target, detail });
            match task.join_next().await {
                Some(Ok(answer)) => answer,
                Some(Err(error)) => ended(error.to_string()),
                None => ended("the call ended before its answer".to_owned()),
            }
        })
    }

    fn call_group<'a>(
        &'a self,
        target: NodeId,
        address: &'a BasicNode,
        call: GroupCall,
    ) -> BoxFuture<'a, Result<GroupReply, TransportError>> {
        match call.request {
            GroupRequest::Raft(_) => Box::pin(self.about_group_raft.call(target, address, call)),
            GroupRequest::Link(..) => Box::pin(self.about_group_links.call(target, address, call)),
            _ => Box::pin(self.about_groups.call(target, address, call)),
        }
    }

    fn forget(&self, node: NodeId) {
        self.addresses.forget(node);
        self.about_map.forget(node);
        self.about_groups.forget(node);
        self.about_group_raft.forget(node);
        self.about_group_links.forget(node);
    }

    fn learn(&self, node: NodeId, address: &str, source: AddressSource) {
        self.addresses.learn(node, address, source);
    }
}
