//! The asking side: a connection for each peer, made when needed and again after a pause.

use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use openraft::BasicNode;
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinHandle;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use super::super::frame::{self, FRAME_BYTES_MAX, HELLO_BYTES_MAX, Hello};
use super::super::{BoxFuture, PeerReply, PeerRequest, Transport, TransportError};
use super::{CONNECT_WAIT_MAX, TlsIdentity, prepare};
use crate::ids::NodeId;

/// Pause after a connection could not be made; doubled up to the maximum with each further failure.
const BACKOFF_MIN: Duration = Duration::from_millis(50);
/// See [`BACKOFF_MIN`].
const BACKOFF_MAX: Duration = Duration::from_secs(2);
/// Requests that wait to be sent to one peer; more wait in their callers.
const QUEUE_LENGTH: usize = 64;

/// Calls peers over TLS.
pub struct TlsTransport {
    identity: TlsIdentity,
    peers: Mutex<BTreeMap<NodeId, Arc<ConnectionSlot>>>,
}

/// Why there is no connection.
#[derive(Debug, thiserror::Error)]
enum Failed {
    #[error("the peer says that this node was removed from the cluster")]
    Removed,
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// The way to one peer. One caller at a time makes the connection.
#[derive(Default)]
struct ConnectionSlot {
    state: tokio::sync::Mutex<State>,
}

#[derive(Default)]
struct State {
    link: Option<ClientLink>,
    failures: u32,
    not_before: Option<Instant>,
}

type Waiting = Arc<Mutex<Option<BTreeMap<u64, oneshot::Sender<PeerReply>>>>>;

/// A connection that lives.
struct ClientLink {
    address: String,
    next: u64,
    queue: mpsc::Sender<Vec<u8>>,
    /// Who waits for an answer; absent once the connection is over.
    waiting: Waiting,
    tasks: [JoinHandle<()>; 2],
}

impl Drop for ClientLink {
    fn drop(&mut self) {
        self.tasks.iter().for_each(JoinHandle::abort);
    }
}

fn lock(waiting: &Waiting) -> MutexGuard<'_, Option<BTreeMap<u64, oneshot::Sender<PeerReply>>>> {
    // The map is whole after every statement.
    waiting.lock().unwrap_or_else(PoisonError::into_inner)
}

impl TlsTransport {
    /// Calls in the name of this node.
    #[must_use]
    pub fn new(identity: TlsIdentity) -> Self {
        Self {
            identity,
            peers: Mutex::default(),
        }
    }

    fn slot(&self, target: NodeId) -> Arc<ConnectionSlot> {
        let mut peers = self.peers.lock().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(peers.entry(target).or_default())
    }

    async fn connect(&self, target: NodeId, address: &str) -> Result<TlsStream<TcpStream>, Failed> {
        let stream = TcpStream::connect(address).await?;
        prepare(&stream)?;
        let connector = TlsConnector::from(Arc::clone(&self.identity.client));
        let name = self.identity.name_of(target);
        let mut stream = connector.connect(name, stream).await?;
        let hello = self.identity.hello();
        frame::send(&mut stream, 0, &hello).await?;
        let (_, answer): (_, Hello) = frame::receive(&mut stream, HELLO_BYTES_MAX).await?;
        if answer.removed {
            return Err(Failed::Removed);
        }
        let refused = |detail| io::Error::new(io::ErrorKind::PermissionDenied, detail);
        answer.agree(self.identity.cluster).map_err(refused)?;
        if answer.node != target {
            return Err(refused(format!("node {} answered", answer.node)).into());
        }
        Ok(stream)
    }

    /// Hands a request to the connection, which is made if there is none. The answer comes later.
    async fn begin(
        &self,
        target: NodeId,
        address: &str,
        request: &PeerRequest,
    ) -> Result<oneshot::Receiver<PeerReply>, TransportError> {
        let unreachable = |detail: String| TransportError::Unreachable { target, detail };
        let slot = self.slot(target);
        let mut state = slot.state.lock().await;
        let alive = |link: &ClientLink| link.address == address && lock(&link.waiting).is_some();
        if !state.link.as_ref().is_some_and(alive) {
            state.link = None;
            let now = Instant::now();
            if state.not_before.is_some_and(|moment| now < moment) {
                return Err(unreachable(
                    "it could not be reached a moment ago".to_owned(),
                ));
            }
            // Should this call be given up meanwhile, that counts as a failure, too.
            let pause = BACKOFF_MIN.saturating_mul(1 << state.failures.min(8));
            state.failures += 1;
            state.not_before = Some(now + pause.min(BACKOFF_MAX));
            let made = timeout(CONNECT_WAIT_MAX, self.connect(target, address)).await;
            let stream = made
                .map_err(|_| unreachable("it does not answer".to_owned()))?
                .map_err(|error| match error {
                    Failed::Removed => TransportError::Removed { target },
                    Failed::Io(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
                        TransportError::Gone { target }
                    }
                    Failed::Io(error) => unreachable(error.to_string()),
                })?;
            state.failures = 0;
            state.not_before = None;
            state.link = Some(ClientLink::new(address.to_owned(), stream));
        }
        let link = state.link.as_mut().expect("it was just made");
        let number = link.next;
        link.next += 1;
        let bytes =
            frame::encode(number, request).map_err(|error| unreachable(error.to_string()))?;
        let (sender, receiver) = oneshot::channel();
        match lock(&link.waiting).as_mut() {
            Some(waiting) => {
                // Callers that gave up are of no interest any more.
                waiting.retain(|_, sender| !sender.is_closed());
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
}

impl ClientLink {
    fn new(address: String, stream: TlsStream<TcpStream>) -> Self {
        let (mut reader, mut writer) = tokio::io::split(stream);
        let (queue, mut queued) = mpsc::channel::<Vec<u8>>(QUEUE_LENGTH);
        let waiting: Waiting = Arc::new(Mutex::new(Some(BTreeMap::new())));
        let answers = Arc::clone(&waiting);
        let reading = async move {
            loop {
                let received = frame::receive::<PeerReply>(&mut reader, FRAME_BYTES_MAX).await;
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
            next: 1,
            queue,
            waiting,
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
        Box::pin(async move {
            let answer = self.begin(target, &address.addr, &request).await?;
            answer.await.map_err(|_| TransportError::Lost {
                target,
                detail: "the connection ended before its answer".to_owned(),
            })
        })
    }

    fn forget(&self, node: NodeId) {
        // The connection ends with the last call that has the slot.
        let mut peers = self.peers.lock().unwrap_or_else(PoisonError::into_inner);
        peers.remove(&node);
    }
}
