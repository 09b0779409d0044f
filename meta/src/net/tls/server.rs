//! The answering side.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::io::AsyncWriteExt;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, mpsc};
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::timeout;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

use super::super::frame::{self, FRAME_BYTES_MAX, HELLO_BYTES_MAX, Hello};
use super::super::{PeerReply, PeerRequest};
use super::{CONNECT_WAIT_MAX, TlsError, TlsIdentity, prepare};
use crate::ids::NodeId;
use crate::node::Peer;

/// Connections at a time; more wait in the kernel's queue.
const CONNECTIONS_MAX: usize = 2048;
/// Requests of one connection that are worked on at a time; then no more are read.
const REQUESTS_MAX: usize = 128;
/// Pause after the kernel gave no connection, for want of file descriptors mostly.
pub(in crate::net) const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// A socket on which peers may connect already; they are answered once it serves.
pub struct TlsListener {
    listener: TcpListener,
    address: SocketAddr,
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
        Ok(Self { listener, address })
    }

    /// Where it listens.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Answers with this node from now on.
    #[must_use]
    pub fn serve(self, identity: TlsIdentity, peer: Peer) -> TlsServer {
        TlsServer {
            address: self.address,
            accepting: tokio::spawn(accept(self.listener, identity, peer)),
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

async fn accept(listener: TcpListener, identity: TlsIdentity, peer: Peer) {
    let room = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    // Connections end with this task.
    let mut connections = JoinSet::new();
    loop {
        while connections.try_join_next().is_some() {}
        let Ok(permit) = Arc::clone(&room).acquire_owned().await else {
            return;
        };
        match listener.accept().await {
            Ok((stream, from)) => {
                let (identity, peer) = (identity.clone(), peer.clone());
                connections.spawn(async move {
                    if let Err(error) = serve(stream, &identity, peer).await {
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

async fn serve(stream: TcpStream, identity: &TlsIdentity, peer: Peer) -> io::Result<()> {
    prepare(&stream)?;
    let greeted = timeout(CONNECT_WAIT_MAX, greet(stream, identity)).await;
    let (stream, node) = greeted.map_err(|_| io::Error::from(io::ErrorKind::TimedOut))??;
    answer(stream, node, peer).await
}

/// Finds out who connects.
async fn greet(
    stream: TcpStream,
    identity: &TlsIdentity,
) -> io::Result<(TlsStream<TcpStream>, NodeId)> {
    let acceptor = TlsAcceptor::from(Arc::clone(&identity.server));
    let mut stream = acceptor.accept(stream).await?;
    let (_, hello): (_, Hello) = frame::receive(&mut stream, HELLO_BYTES_MAX).await?;
    let certificate = stream.get_ref().1.peer_certificates();
    let is_its_own = identity.is_for(certificate.and_then(<[_]>::first), hello.node);
    let mut agreed = hello.agree(identity.cluster);
    if !is_its_own {
        agreed = Err(format!("its certificate is not for node {}", hello.node));
    }
    let mut ours = Hello::new(identity.cluster, identity.node);
    ours.refused = agreed.clone().err();
    frame::send(&mut stream, 0, &ours).await?;
    if let Err(detail) = agreed {
        stream.shutdown().await?;
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, detail));
    }
    Ok((stream, hello.node))
}

/// Answers requests, each in a task of its own, until the peer goes or says something wrong.
async fn answer(stream: TlsStream<TcpStream>, node: NodeId, peer: Peer) -> io::Result<()> {
    let (mut reader, mut writer) = tokio::io::split(stream);
    let (replies, mut replied) = mpsc::channel::<Vec<u8>>(REQUESTS_MAX);
    let room = Arc::new(Semaphore::new(REQUESTS_MAX));
    // They end with this connection.
    let mut tasks = JoinSet::new();
    tasks.spawn(async move {
        while let Some(bytes) = replied.recv().await {
            let sent = async {
                writer.write_all(&bytes).await?;
                writer.flush().await
            };
            if sent.await.is_err() {
                break;
            }
        }
    });
    loop {
        while tasks.try_join_next().is_some() {}
        let Ok(permit) = Arc::clone(&room).acquire_owned().await else {
            return Ok(());
        };
        let (number, request) =
            match frame::receive::<PeerRequest>(&mut reader, FRAME_BYTES_MAX).await {
                Ok(received) => received,
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(()),
                Err(error) => return Err(error),
            };
        if replies.is_closed() {
            return Ok(());
        }
        let (peer, replies) = (peer.clone(), replies.clone());
        tasks.spawn(async move {
            let reply: PeerReply = peer.handle_from(node, request).await;
            match frame::encode(number, &reply) {
                // A connection that is over needs no answer.
                Ok(bytes) => drop(replies.send(bytes).await),
                Err(error) => tracing::error!(%error, "an answer to a metadata node"),
            }
            drop(permit);
        });
    }
}
