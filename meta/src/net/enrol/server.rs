//! The side that lets nodes in.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use rustls::ServerConfig;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio::io::AsyncWriteExt;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::timeout;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

use super::super::frame;
use super::super::tls::{ACCEPT_PAUSE, TlsError};
use super::{
    ALPN, ANSWER_WAIT_MAX, Answer, EnrolmentReply, EnrolmentRequest, GREET_WAIT_MAX,
    LEADER_WAIT_MAX, PROTOCOL, QUESTION_BYTES_MAX, Question,
};
use crate::client::Meta;
use crate::command::{Command, NodeSpec};
use crate::error::MetaError;
use crate::ids::{Incarnation, UnixMillis};
use crate::model::{Node, Role, Token};
use crate::pki::{ClusterCa, JoinToken};
use crate::refusal::{JoinRefusal, MapRefusal};

/// Connections at a time; more wait in the kernel's queue, so a flood of them makes joining slow and nothing
/// else.
const CONNECTIONS_MAX: usize = 16;

/// What a node needs to let others in.
pub struct EnrolmentCredentials {
    /// The authority.
    pub ca: ClusterCa,
    /// Its certificate, as PEM.
    pub ca_certificate: String,
    /// The node's own, as PEM.
    pub certificate: String,
    /// Its key, as PEM.
    pub key: String,
}

/// Lets nodes in. Ends when it is dropped.
pub struct EnrolmentServer {
    address: SocketAddr,
    accepting: JoinHandle<()>,
}

impl Drop for EnrolmentServer {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

impl EnrolmentServer {
    /// Listens for nodes that want to join.
    ///
    /// # Errors
    /// The credentials are no good, or the address cannot be listened on.
    pub async fn start(
        address: &str,
        credentials: EnrolmentCredentials,
        meta: Meta,
    ) -> Result<Self, TlsError> {
        let config = config(&credentials)?;
        let failed = |source| TlsError::Listen {
            address: address.to_owned(),
            source,
        };
        let listener = TcpListener::bind(address).await.map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        let handler = Arc::new(EnrolmentHandler {
            credentials,
            asked: meta.within(LEADER_WAIT_MAX),
            meta,
            config: Arc::new(config),
        });
        let accepting = tokio::spawn(accept(listener, handler));
        Ok(Self { address, accepting })
    }

    /// Where it listens.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }
}

struct EnrolmentHandler {
    credentials: EnrolmentCredentials,
    meta: Meta,
    /// The same, as long as nothing is done that would have to be undone.
    asked: Meta,
    config: Arc<ServerConfig>,
}

/// The node's certificate, and the authority's behind it: who joins knows only the hash of that.
fn config(credentials: &EnrolmentCredentials) -> Result<ServerConfig, TlsError> {
    let bad = |what| {
        move |error: rustls::pki_types::pem::Error| TlsError::BadPem {
            what,
            detail: error.to_string(),
        }
    };
    let certificate =
        |pem: &str, what| CertificateDer::from_pem_slice(pem.as_bytes()).map_err(bad(what));
    let chain = vec![
        certificate(&credentials.certificate, "the node's certificate")?,
        certificate(&credentials.ca_certificate, "the cluster's certificate")?,
    ];
    let key = PrivateKeyDer::from_pem_slice(credentials.key.as_bytes())
        .map_err(bad("the node's private key"))?;
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut config = ServerConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])?
        .with_no_client_auth()
        .with_single_cert(chain, key)?;
    config.send_tls13_tickets = 0;
    config.alpn_protocols = vec![ALPN.to_vec()];
    Ok(config)
}

async fn accept(listener: TcpListener, handler: Arc<EnrolmentHandler>) {
    let slots = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    // Connections end with this task.
    let mut connections = JoinSet::new();
    loop {
        while connections.try_join_next().is_some() {}
        let Ok(permit) = Arc::clone(&slots).acquire_owned().await else {
            return;
        };
        match listener.accept().await {
            Ok((stream, from)) => {
                let handler = Arc::clone(&handler);
                connections.spawn(async move {
                    if let Err(error) = serve(stream, from, &handler).await {
                        tracing::info!(%from, %error, "a join failed");
                    }
                    drop(permit);
                });
            }
            Err(error) => {
                tracing::warn!(%error, "cannot accept nodes that want to join");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

async fn serve(stream: TcpStream, from: SocketAddr, handler: &EnrolmentHandler) -> io::Result<()> {
    let late = |_| io::Error::from(io::ErrorKind::TimedOut);
    let (mut stream, question) = timeout(GREET_WAIT_MAX, greet(stream, handler))
        .await
        .map_err(late)??;
    let answer = timeout(ANSWER_WAIT_MAX, handler.answer(question)).await;
    let answer: Answer = answer.unwrap_or_else(|_| Err("it took too long: try again".to_owned()));
    match &answer {
        Ok(admitted) => tracing::info!(%from, node = admitted.node.0, "a node joined"),
        Err(reason) => tracing::warn!(%from, reason, "a node was not let in"),
    }
    let end = async {
        frame::send(&mut stream, 0, &answer).await?;
        stream.shutdown().await
    };
    timeout(GREET_WAIT_MAX, end).await.map_err(late)?
}

async fn greet(
    stream: TcpStream,
    handler: &EnrolmentHandler,
) -> io::Result<(TlsStream<TcpStream>, Question)> {
    let acceptor = TlsAcceptor::from(Arc::clone(&handler.config));
    let mut stream = acceptor.accept(stream).await?;
    let (_, question) = frame::receive(&mut stream, QUESTION_BYTES_MAX).await?;
    Ok((stream, question))
}

impl EnrolmentHandler {
    /// Lets a node in, or says why not. Without a valid token the answer says nothing else: not the
    /// cluster's feature level, nor names or addresses of its nodes.
    async fn answer(&self, asked: Question) -> Answer {
        let told = |error: &dyn std::fmt::Display| error.to_string();
        let secret = JoinToken::from_text(&asked.secret);
        let found = self.asked.get_join_token(&secret).await;
        let token = found.map_err(|error| {
            tracing::warn!(%error, "cannot check a join token");
            "it cannot check join tokens now: try again".to_owned()
        })?;
        let token = token.ok_or_else(|| told(&JoinRefusal::UnknownToken))?;
        if token.expires_at <= UnixMillis::now() {
            return Err(told(&JoinRefusal::ExpiredToken));
        }
        if asked.protocol != PROTOCOL {
            return Err(format!(
                "it speaks version {} of joining, and this node {PROTOCOL}: install the same version of \
                 penstock on both",
                asked.protocol
            ));
        }
        let cluster = self.asked.cluster().await.map_err(|error| told(&error))?;
        if cluster.uuid != asked.cluster {
            let (ours, theirs) = (cluster.uuid, asked.cluster);
            return Err(told(&MapRefusal::OtherCluster { ours, theirs }));
        }
        let question = asked.question;
        if question.level < cluster.level {
            return Err(format!(
                "it runs penstock {}, which knows feature level {}, and this cluster has level {}: install a \
                 newer version there",
                question.version, question.level, cluster.level
            ));
        }
        let key = &question.public_key;
        // Before the token is used up: what would be refused afterwards.
        self.credentials
            .ca
            .issue(cluster_probe(), key)
            .map_err(|error| told(&error))?;
        let nodes = self
            .asked
            .list_nodes()
            .await
            .map_err(|error| told(&error))?;
        let is_namesake = |node: &&Node| node.name.as_str() == question.name;
        if let Some(other) = nodes.iter().find(is_namesake) {
            let (name, holder) = (question.name, other.id);
            return Err(told(&MapRefusal::NodeNameTaken { name, holder }));
        }
        let address = &question.control_address;
        if let Some(other) = nodes.iter().find(|node| node.control_address == *address) {
            return Err(format!(
                "node {} is at {address} already: choose another address with --listen, or remove that node \
                 first",
                other.name
            ));
        }
        let asked = match question.takes_granted {
            true => &question.needs,
            false => &question.roles,
        };
        JoinRefusal::check_roles(&token, asked).map_err(|error| told(&error))?;
        self.admit(&secret, question, token).await
    }

    async fn admit(&self, secret: &JoinToken, question: EnrolmentRequest, token: Token) -> Answer {
        let told = |error: &dyn std::fmt::Display| error.to_string();
        let granted = token.roles;
        let roles = match question.takes_granted {
            true => granted.clone(),
            false => question.roles,
        };
        let redeemed = self.asked.redeem_join_token(secret, &roles).await;
        let node = redeemed.map_err(|error| match error {
            MetaError::Interrupted { .. } => format!(
                "{error}; if the token is refused then, make a new one with `penstock token create`"
            ),
            error => told(&error),
        })?;
        let issued = self.credentials.ca.issue(node, &question.public_key);
        let certificate = issued.map_err(|error| told(&error))?;
        // The key makes nodes: it goes to those alone whose token says so.
        let keeps_key = granted.contains(&Role::Meta) && roles.contains(&Role::Meta);
        let name = question.name;
        let spec = NodeSpec {
            id: node,
            name: name.clone(),
            roles: roles.clone(),
            granted,
            incarnation: Incarnation::default(),
            labels: question.labels,
            control_address: question.control_address,
            data_address: question.data_address,
            version: question.version,
            // It says so itself once it runs.
            boot: String::new(),
            level: question.level,
        };
        // The leader finds it by that, and sends it the metadata once it runs.
        let register = Command::RegisterNode {
            node: spec,
            replaces: Incarnation::default(),
            at: UnixMillis::now(),
        };
        let mut registered = self.meta.propose(register.clone()).await;
        if matches!(registered, Err(MetaError::Interrupted { .. })) {
            // Said twice it changes nothing, and the token is used up.
            registered = self.meta.propose(register).await;
        }
        registered.map_err(|error| {
            format!("{error}; the token is used up: make a new one with `penstock token create`, and remove \
                node {name} if \
                     `penstock node list` shows it")
        })?;
        let map = self.meta.map();
        let recovery = map.cluster().and_then(|cluster| cluster.recovery.as_ref());
        Ok(EnrolmentReply {
            node,
            roles,
            history: recovery.map(|recovery| recovery.history),
            ca: self.credentials.ca_certificate.clone(),
            certificate,
            ca_key: keeps_key.then(|| self.credentials.ca.key_pem().to_owned()),
        })
    }
}

/// A number that no node has, to see whether a key can be certified at all.
fn cluster_probe() -> crate::ids::NodeId {
    crate::ids::NodeId(0)
}
