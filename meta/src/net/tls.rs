//! Peers over TCP with mutual TLS.
//!
//! One connection for each direction, pair of nodes and purpose. Requests on it are numbered and answered in
//! any order, so a piece of a snapshot or a slow command does not hold up a heartbeat. Both sides check that
//! the other's certificate was made by the cluster's authority **for the node that it says it is**.

mod addresses;
mod budget;
mod client;
mod server;

use std::sync::Arc;
use std::time::Duration;

use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::ServerCertVerifier;
use rustls::crypto::ring;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::server::{ParsedCertificate, WebPkiClientVerifier};
use rustls::{ClientConfig, RootCertStore, ServerConfig};
use tokio::net::TcpStream;
use uuid::Uuid;

use super::frame::Hello;
use crate::ids::{Incarnation, NodeId};
use crate::pki::node_name;

pub use client::TlsTransport;
pub(super) use server::ACCEPT_PAUSE;
pub use server::{TlsListener, TlsServer};

/// A peer's kernel must answer in this time.
const CONNECT_WAIT_MAX: Duration = Duration::from_secs(2);
/// Then both sides must be known in this time, also if one is short of processors.
const GREETING_WAIT_MAX: Duration = Duration::from_secs(10);
/// A connection on which sent data stay unacknowledged for this long is over.
const UNACKNOWLEDGED_MAX: Duration = Duration::from_secs(5);
/// Protocol name in the TLS handshake.
const ALPN: &[u8] = b"penstock-meta";

/// Why certificates and key cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// Not PEM, or not what is expected in it.
    #[error("{what} cannot be read: {detail}")]
    BadPem {
        /// Which.
        what: &'static str,
        /// What is wrong.
        detail: String,
    },
    /// They do not fit together.
    #[error("the certificates cannot be used: {0}")]
    Rustls(#[from] rustls::Error),
    /// Peers would turn the node away, and it would wait for them without end.
    #[error(
        "the node's certificate is not one that this cluster's authority made for node {node}: {source}"
    )]
    Foreign {
        /// Who the node says it is.
        node: NodeId,
        /// What its peers would say.
        source: rustls::Error,
    },
    /// No root to trust.
    #[error("the cluster's certificate cannot be used: {0}")]
    Verifier(#[from] rustls::server::VerifierBuilderError),
    /// The address cannot be listened on.
    #[error("cannot listen on {address}: {source}")]
    Listen {
        /// The address.
        address: String,
        /// Why not.
        source: std::io::Error,
    },
}

/// Who a node is on the network. Cheap to clone.
#[derive(Clone)]
pub struct TlsIdentity {
    cluster: Uuid,
    node: NodeId,
    incarnation: Incarnation,
    history: Option<Uuid>,
    /// Address at which peers reach this node; empty if they do not.
    address: String,
    /// Its certificate, and what a verifier wants beside it.
    chain: Vec<CertificateDer<'static>>,
    /// Who knows the cluster's certificates.
    servers: Arc<WebPkiServerVerifier>,
    client: Arc<ClientConfig>,
    server: Arc<ServerConfig>,
}

impl TlsIdentity {
    /// From PEM: the authority's certificate, the node's certificate and its key. It speaks for no particular
    /// start of the node; see [`Self::of_start`].
    ///
    /// # Errors
    /// They cannot be read, or do not fit together.
    pub fn from_pem(
        cluster: Uuid,
        node: NodeId,
        ca: &str,
        certificate: &str,
        key: &str,
    ) -> Result<Self, TlsError> {
        let bad = |what| {
            move |error: rustls::pki_types::pem::Error| TlsError::BadPem {
                what,
                detail: error.to_string(),
            }
        };
        let chain = CertificateDer::pem_slice_iter(certificate.as_bytes())
            .collect::<Result<Vec<_>, _>>()
            .map_err(bad("the node's certificate"))?;
        let key =
            PrivateKeyDer::from_pem_slice(key.as_bytes()).map_err(bad("the node's private key"))?;
        let mut roots = RootCertStore::empty();
        for root in CertificateDer::pem_slice_iter(ca.as_bytes()) {
            roots.add(root.map_err(bad("the cluster's certificate"))?)?;
        }
        let (roots, provider) = (Arc::new(roots), Arc::new(ring::default_provider()));
        let clients =
            WebPkiClientVerifier::builder_with_provider(Arc::clone(&roots), Arc::clone(&provider))
                .build()?;
        let servers =
            WebPkiServerVerifier::builder_with_provider(roots, Arc::clone(&provider)).build()?;
        let mut server = ServerConfig::builder_with_provider(Arc::clone(&provider))
            .with_protocol_versions(&[&rustls::version::TLS13])?
            .with_client_cert_verifier(clients)
            .with_single_cert(chain.clone(), key.clone_key())?;
        server.alpn_protocols = vec![ALPN.to_vec()];
        let mut client = ClientConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&rustls::version::TLS13])?
            .with_webpki_verifier(Arc::clone(&servers))
            .with_client_auth_cert(chain.clone(), key)?;
        client.alpn_protocols = vec![ALPN.to_vec()];
        Ok(Self {
            cluster,
            node,
            incarnation: Incarnation::default(),
            history: None,
            address: String::new(),
            chain,
            servers,
            client: Arc::new(client),
            server: Arc::new(server),
        })
    }

    /// Speaks for this start of the node's process. Peers turn it away once a newer one has registered.
    #[must_use]
    pub fn of_start(self, incarnation: Incarnation) -> Self {
        Self {
            incarnation,
            ..self
        }
    }

    /// Its metadata are of this history; see [`crate::recovery`].
    #[must_use]
    pub fn of_history(self, history: Option<Uuid>) -> Self {
        Self { history, ..self }
    }

    /// Sets the address at which peers reach this node's metadata service. Every connection announces it, so
    /// that peers find a node whose address changed.
    #[must_use]
    pub fn reached_at(self, address: String) -> Self {
        Self { address, ..self }
    }

    /// What it says first on a connection.
    fn hello(&self) -> Hello {
        let mut hello = Hello::new(self.cluster, self.node, self.incarnation);
        hello.history = self.history;
        hello.address.clone_from(&self.address);
        hello
    }

    /// Looks at the node's own certificate as its peers will. Whether it is good now is not asked: a clock
    /// that is wrong may be set right while the node runs.
    ///
    /// # Errors
    /// [`TlsError::Foreign`]: they would turn the node away.
    pub fn check(&self) -> Result<(), TlsError> {
        use rustls::CertificateError::{Expired, ExpiredContext, NotValidYet, NotValidYetContext};

        let name = self.name_of(self.node);
        let (own, others) = self.chain.split_first().expect("rustls has taken it");
        let now = UnixTime::now();
        match self
            .servers
            .verify_server_cert(own, others, &name, &[], now)
        {
            Ok(_)
            | Err(rustls::Error::InvalidCertificate(
                Expired | ExpiredContext { .. } | NotValidYet | NotValidYetContext { .. },
            )) => Ok(()),
            Err(source) => Err(TlsError::Foreign {
                node: self.node,
                source,
            }),
        }
    }

    fn name_of(&self, node: NodeId) -> ServerName<'static> {
        let name = node_name(self.cluster, node);
        ServerName::try_from(name).expect("digits, letters, hyphens and dots")
    }

    /// Whether a certificate that the authority made was made for this node.
    fn is_for(&self, certificate: Option<&CertificateDer<'_>>, node: NodeId) -> bool {
        let parsed = certificate.and_then(|found| ParsedCertificate::try_from(found).ok());
        parsed.is_some_and(|parsed| {
            rustls::client::verify_server_name(&parsed, &self.name_of(node)).is_ok()
        })
    }
}

/// What both sides want of a socket: no delay, and an end when the peer is gone.
fn prepare(stream: &TcpStream) -> std::io::Result<()> {
    stream.set_nodelay(true)?;
    let millis = u32::try_from(UNACKNOWLEDGED_MAX.as_millis()).unwrap_or(u32::MAX);
    rustix::net::sockopt::set_tcp_user_timeout(stream, millis)?;
    Ok(())
}
