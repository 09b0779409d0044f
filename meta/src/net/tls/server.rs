//! The answering side.

use std::collections::BTreeMap;
use std::io;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::Handle;
use tokio::sync::{Semaphore, mpsc, oneshot};
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::timeout;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

use super::super::frame::{
    self, AboutGroupLinks, AboutGroupRaft, AboutGroups, AboutMap, FRAME_BYTES_MAX, HELLO_BYTES_MAX,
    Hello, Protocol, Purpose,
};
use super::super::{BoxFuture, PeerReply, PeerRequest};
use super::budget::{self, Budget, Held};
use super::{GREETING_WAIT_MAX, TlsError, TlsIdentity, prepare};
use crate::groups::{GroupCall, GroupReply};
use crate::ids::NodeId;
use crate::node::Peer;

/// Connections at a time; more wait in the kernel's queue.
const CONNECTIONS_MAX: usize = 2048;
/// Requests of one connection that are worked on at a time; then no more are read.
const REQUESTS_MAX: usize = 128;
/// A request must be complete so long after it began and its memory is reserved; then the connection ends, so
/// that a silent client holds no memory.
const FRAME_WAIT_MAX: Duration = Duration::from_secs(10);
/// Pause after the kernel gave no connection, for want of file descriptors mostly.
pub(in crate::net) const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// A socket on which peers may connect already; they are answered once it serves.
pub struct TlsListener {
    listener: TcpListener,
    address: SocketAddr,
    /// Runtime on which the server was bound, and on which it serves.
    runtime: Handle,
}

/// Answers peers. Ends, with all connections, when it is dropped.
pub struct TlsServer {
    address: SocketAddr,
    accepting: JoinHandle<()>,
}

impl Drop for TlsServer {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

impl TlsListener {
    /// Listens on an address.
    ///
    /// # Errors
    /// The address cannot be listened on.
    pub async fn bind(address: &str) -> Result<Self, TlsError> {
        let failed = |source| TlsError::Listen {
            address: address.to_owned(),
            source,
        };
        let listener = TcpListener::bind(address).await.map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        Ok(Self {
            listener,
            address,
            runtime: Handle::current(),
        })
    }

    /// Where it listens.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Starts to answer for this node, on the runtime that the server was bound on.
    #[must_use]
    pub fn serve(self, identity: TlsIdentity, peer: Peer) -> TlsServer {
        TlsServer {
            address: self.address,
            accepting: self.runtime.spawn(accept(self.listener, identity, peer)),
        }
    }
}

impl TlsServer {
    /// Where it listens.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }
}

/// What the connections share.
struct Server {
    identity: TlsIdentity,
    peer: Peer,
    /// Bytes that all of a purpose hold.
    totals: BTreeMap<Purpose, Arc<Semaphore>>,
    /// The newest connection of each node for each purpose.
    newest: Mutex<BTreeMap<(NodeId, Purpose), Newest>>,
    connections: AtomicU64,
}

/// Ends a connection when it is dropped: another one has taken its place.
struct Newest {
    number: u64,
    _place: oneshot::Sender<()>,
}

impl Server {
    fn newest(&self) -> MutexGuard<'_, BTreeMap<(NodeId, Purpose), Newest>> {
        // Whole after every statement.
        self.newest.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A node has one connection for a purpose: whoever connects again has lost the last one. So what it may
    /// hold is bounded.
    fn take_place(&self, place: (NodeId, Purpose)) -> (u64, oneshot::Receiver<()>) {
        let number = self.connections.fetch_add(1, Ordering::Relaxed);
        let (_place, replaced) = oneshot::channel();
        self.newest().insert(place, Newest { number, _place });
        (number, replaced)
    }

    fn leave_place(&self, place: (NodeId, Purpose), number: u64) {
        let mut newest = self.newest();
        if newest.get(&place).is_some_and(|one| one.number == number) {
            newest.remove(&place);
        }
    }
}

async fn accept(listener: TcpListener, identity: TlsIdentity, peer: Peer) {
    let slots = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    let server = Arc::new(Server {
        identity,
        peer,
        totals: Purpose::ALL
            .map(|purpose| (purpose, budget::total()))
            .into(),
        newest: Mutex::default(),
        connections: AtomicU64::default(),
    });
    // Connections end with this task.
    let mut connections = JoinSet::new();
    loop {
        while connections.try_join_next().is_some() {}
        let Ok(permit) = Arc::clone(&slots).acquire_owned().await else {
            return;
        };
        match listener.accept().await {
            Ok((stream, from)) => {
                let server = Arc::clone(&server);
                connections.spawn(async move {
                    if let Err(error) = serve(stream, &server).await {
                        tracing::info!(%from, %error, "a connection between metadata nodes ended");
                    }
                    drop(permit);
                });
            }
            Err(error) => {
                tracing::warn!(%error, "cannot accept connections of metadata nodes");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

async fn serve(stream: TcpStream, server: &Server) -> io::Result<()> {
    prepare(&stream)?;
    let greeted = timeout(GREETING_WAIT_MAX, greet(stream, server)).await;
    let (stream, hello) = greeted.map_err(|_| io::Error::from(io::ErrorKind::TimedOut))??;
    let (node, incarnation) = (hello.node, hello.incarnation);
    let budget = Budget::new(Arc::clone(&server.totals[&hello.purpose]));
    let place = (node, hello.purpose);
    let (number, replaced) = server.take_place(place);
    let ended = tokio::select! {
        ended = answer_on_its_runtime(hello.purpose, stream, budget, (&server.peer, node)) => ended,
        () = server.peer.until_removed(node) => Err(denied(removed(node))),
        () = server.peer.until_replaced(node, incarnation) => Err(denied(former(node))),
        // The sender is dropped, never used.
        _ = replaced => Ok(()),
    };
    server.leave_place(place, number);
    ended
}

/// Answers the requests of a connection: about the cluster map on this runtime, about namespace groups on
/// their runtime, which may be busy.
async fn answer_on_its_runtime(
    purpose: Purpose,
    stream: TlsStream<TcpStream>,
    budget: Budget,
    (peer, node): (&Peer, NodeId),
) -> io::Result<()> {
    if purpose == Purpose::Map {
        return answer_about(purpose, stream, budget, (peer, node)).await;
    }
    let owned = peer.clone();
    let answering = async move { answer_about(purpose, stream, budget, (&owned, node)).await };
    // The task ends with this connection.
    let mut task = JoinSet::new();
    task.spawn_on(answering, peer.group_runtime());
    match task.join_next().await {
        Some(Ok(ended)) => ended,
        Some(Err(error)) => Err(io::Error::other(error)),
        None => Ok(()),
    }
}

/// Answers the requests that a connection is for.
async fn answer_about(
    purpose: Purpose,
    stream: TlsStream<TcpStream>,
    budget: Budget,
    (peer, node): (&Peer, NodeId),
) -> io::Result<()> {
    match purpose {
        Purpose::Map => {
            let check = |request: &PeerRequest| peer.check_request(node, request);
            let peer = peer.clone();
            let handle = move |request: PeerRequest| -> BoxFuture<'static, PeerReply> {
                let peer = peer.clone();
                Box::pin(async move { peer.handle_from(node, request).await })
            };
            answer::<AboutMap, _, _, _>(stream, budget, (check, handle)).await
        }
        Purpose::Groups | Purpose::GroupRaft | Purpose::GroupLinks => {
            let check = |call: &GroupCall| match frame::purpose_of(&call.request) == purpose {
                true => peer.check_group_call(node, call),
                false => Err(format!(
                    "a message that is not for a connection of {purpose:?}"
                )),
            };
            let peer = peer.clone();
            let handle = move |call: GroupCall| -> BoxFuture<'static, GroupReply> {
                let peer = peer.clone();
                Box::pin(async move { peer.handle_group_from(node, call).await })
            };
            let work = (check, handle);
            match purpose {
                Purpose::GroupRaft => answer::<AboutGroupRaft, _, _, _>(stream, budget, work).await,
                Purpose::GroupLinks => {
                    answer::<AboutGroupLinks, _, _, _>(stream, budget, work).await
                }
                _ => answer::<AboutGroups, _, _, _>(stream, budget, work).await,
            }
        }
    }
}

fn removed(node: NodeId) -> String {
    format!("node {node} was removed from the cluster")
}

fn former(node: NodeId) -> String {
    format!("a newer start of node {node} has registered")
}

fn denied(detail: String) -> io::Error {
    io::Error::new(io::ErrorKind::PermissionDenied, detail)
}

/// Finds out who connects.
async fn greet(
    stream: TcpStream,
    Server { identity, peer, .. }: &Server,
) -> io::Result<(TlsStream<TcpStream>, Hello)> {
    let acceptor = TlsAcceptor::from(Arc::clone(&identity.server));
    let mut stream = acceptor.accept(stream).await?;
    let (_, hello): (_, Hello) = frame::receive(&mut stream, HELLO_BYTES_MAX).await?;
    let certificate = stream.get_ref().1.peer_certificates();
    let is_its_own = identity.is_for(certificate.and_then(<[_]>::first), hello.node);
    let mut agreed = hello.agree(identity.cluster, identity.history);
    let mut ours = identity.hello();
    ours.purpose = hello.purpose;
    if !is_its_own {
        agreed = Err(format!("its certificate is not for node {}", hello.node));
    } else if agreed.is_ok() && peer.is_removed(hello.node) {
        agreed = Err(removed(hello.node));
        ours.removed = true;
    } else if agreed.is_ok() && peer.is_former_start(hello.node, hello.incarnation) {
        agreed = Err(former(hello.node));
    }
    ours.refused = agreed.clone().err();
    frame::send(&mut stream, 0, &ours).await?;
    if let Err(detail) = agreed {
        stream.shutdown().await?;
        return Err(denied(detail));
    }
    peer.learn_address(hello.node, &hello.address);
    Ok((stream, hello))
}

/// Answers requests that pass the check, each in a task of its own, until the peer goes or says something
/// wrong. Nothing is read for which there is no budget.
async fn answer<P, S, C, H>(stream: S, budget: Budget, (check, handle): (C, H)) -> io::Result<()>
where
    P: Protocol,
    S: AsyncRead + AsyncWrite + Send + 'static,
    C: Fn(&P::Request) -> Result<(), String>,
    H: Fn(P::Request) -> BoxFuture<'static, P::Reply> + Clone + Send + 'static,
{
    let (mut reader, mut writer) = tokio::io::split(stream);
    let (replies, mut replied) = mpsc::channel::<(Vec<u8>, Held)>(REQUESTS_MAX);
    let slots = Arc::new(Semaphore::new(REQUESTS_MAX));
    // They end with this connection.
    let mut tasks = JoinSet::new();
    tasks.spawn(async move {
        while let Some((bytes, held)) = replied.recv().await {
            let sent = async {
                writer.write_all(&bytes).await?;
                writer.flush().await
            };
            if sent.await.is_err() {
                break;
            }
            drop(held);
        }
    });
    loop {
        while tasks.try_join_next().is_some() {}
        let Ok(permit) = Arc::clone(&slots).acquire_owned().await else {
            return Ok(());
        };
        let Some((number, request, held)) = receive::<P>(&mut reader, &budget).await? else {
            return Ok(());
        };
        check(&request).map_err(denied)?;
        if replies.is_closed() {
            return Ok(());
        }
        let (handle, budget, replies) = (handle.clone(), budget.clone(), replies.clone());
        tasks.spawn(async move {
            let _turn = match P::has_long_reply(&request) {
                true => Some(budget.long_reply().await),
                false => None,
            };
            let reply = handle(request).await;
            match frame::encode(number, &reply) {
                Ok(bytes) => {
                    let held = budget.exchange(held, bytes.len()).await;
                    // A connection that is over needs no answer.
                    drop(replies.send((bytes, held)).await);
                }
                Err(error) => tracing::error!(%error, "an answer to a metadata node"),
            }
            drop(permit);
        });
    }
}

/// The next request, with what it holds; nothing when the peer has gone.
async fn receive<P: Protocol>(
    reader: &mut (impl AsyncRead + Unpin),
    budget: &Budget,
) -> io::Result<Option<(u64, P::Request, Held)>> {
    let head = match frame::receive_head(reader, FRAME_BYTES_MAX).await {
        Ok(head) => head,
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
        Err(error) => return Err(error),
    };
    let held = budget.hold(head.bytes).await;
    let body = timeout(FRAME_WAIT_MAX, frame::receive_body(reader, head)).await;
    match body.map_err(|_| io::Error::from(io::ErrorKind::TimedOut))? {
        Ok(body) => Ok(Some((head.number, frame::decode(body).await?, held))),
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(None),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests;
