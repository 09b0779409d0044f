//! Who a node is to its peers: its certificate, and the CA that it trusts.
//!
//! Both ends present a certificate of the cluster's CA. It names its node as [`node_name`]; no other name in
//! it counts.

use std::sync::Arc;

use fabric_types::NodeId;
use rustls::client::verify_server_name;
use rustls::crypto::ring;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::server::{ParsedCertificate, WebPkiClientVerifier};
use rustls::{ClientConfig, RootCertStore, ServerConfig};

/// The DNS name that a node's certificate carries as a subject alternative name: `node-N.CLUSTER.penstock`,
/// with the cluster as a UUID is written. One certificate serves metadata's connections, too
/// (`meta::pki::node_name`).
pub fn node_name(cluster: [u8; 16], node: NodeId) -> String {
    let digits = u128::from_be_bytes(cluster);
    let part = |low: u32, bits: u32| digits >> low & ((1 << bits) - 1);
    let (a, b, c, d, e) = (
        part(96, 32),
        part(80, 16),
        part(64, 16),
        part(48, 16),
        part(0, 48),
    );
    format!("node-{node}.{a:08x}-{b:04x}-{c:04x}-{d:04x}-{e:012x}.penstock")
}

/// Why certificates are of no use.
#[derive(Debug, thiserror::Error)]
pub enum IdentityError {
    /// Not PEM, or nothing in it.
    #[error("cannot read {what}: {source}")]
    Pem {
        /// Which of the three.
        what: &'static str,
        /// Why.
        source: rustls::pki_types::pem::Error,
    },
    /// The CA cannot be used to check certificates.
    #[error("cannot use the cluster's CA: {0}")]
    Ca(String),
    /// Certificate and key do not go together, or are of a kind that is not supported.
    #[error("cannot use the node's certificate and key: {0}")]
    Node(#[source] rustls::Error),
}

/// A node's certificates, ready for use. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Identity {
    pub(super) client: Arc<ClientConfig>,
    pub(super) server: Arc<ServerConfig>,
}

impl Identity {
    /// From PEM: the CA's certificate, the node's certificate (followed by those in between, if any), and the
    /// node's key.
    pub fn from_pem(ca: &[u8], chain: &[u8], key: &[u8]) -> Result<Self, IdentityError> {
        let pem = |what| move |source| IdentityError::Pem { what, source };
        let certificates = |bytes: &[u8], what| {
            let all = CertificateDer::pem_slice_iter(bytes).collect::<Result<Vec<_>, _>>();
            match all {
                Ok(none) if none.is_empty() => {
                    Err(pem(what)(rustls::pki_types::pem::Error::NoItemsFound))
                }
                all => all.map_err(pem(what)),
            }
        };
        let mut roots = RootCertStore::empty();
        for certificate in certificates(ca, "the CA's certificate")? {
            roots
                .add(certificate)
                .map_err(|error| IdentityError::Ca(error.to_string()))?;
        }
        let chain = certificates(chain, "the node's certificate")?;
        let key = PrivateKeyDer::from_pem_slice(key).map_err(pem("the node's key"))?;
        Self::new(Arc::new(roots), chain, key)
    }

    fn new(
        roots: Arc<RootCertStore>,
        chain: Vec<CertificateDer<'static>>,
        key: PrivateKeyDer<'static>,
    ) -> Result<Self, IdentityError> {
        let provider = Arc::new(ring::default_provider());
        let versions: &[_] = &[&rustls::version::TLS13];
        let verifier =
            WebPkiClientVerifier::builder_with_provider(Arc::clone(&roots), Arc::clone(&provider))
                .build()
                .map_err(|error| IdentityError::Ca(error.to_string()))?;
        let mut server = ServerConfig::builder_with_provider(Arc::clone(&provider))
            .with_protocol_versions(versions)
            .map_err(IdentityError::Node)?
            .with_client_cert_verifier(verifier)
            .with_single_cert(chain.clone(), key.clone_key())
            .map_err(IdentityError::Node)?;
        // Connections live for months: nothing is gained by resuming one, and a ticket is one more thing that
        // lets a peer in.
        server.send_tls13_tickets = 0;
        server.alpn_protocols = vec![ALPN.to_vec()];
        let mut client = ClientConfig::builder_with_provider(provider)
            .with_protocol_versions(versions)
            .map_err(IdentityError::Node)?
            .with_root_certificates(roots)
            .with_client_auth_cert(chain, key)
            .map_err(IdentityError::Node)?;
        client.resumption = rustls::client::Resumption::disabled();
        client.alpn_protocols = vec![ALPN.to_vec()];
        Ok(Self {
            client: Arc::new(client),
            server: Arc::new(server),
        })
    }

    /// Random bytes for a direction's key.
    pub fn random_key(&self) -> Result<super::frame::Key, rustls::Error> {
        let mut key = [0; 16];
        let provider = self.client.crypto_provider();
        provider
            .secure_random
            .fill(&mut key)
            .map_err(|_| rustls::Error::FailedToGetRandomBytes)?;
        Ok(key)
    }
}

/// Keeps this protocol's connections apart from others under the same CA.
const ALPN: &[u8] = b"penstock-data";

/// What a certificate must name to be that of a node.
pub(super) fn server_name(cluster: [u8; 16], node: NodeId) -> ServerName<'static> {
    ServerName::try_from(node_name(cluster, node)).expect("a valid DNS name")
}

/// True if a certificate, whose chain was verified, is that of a node.
pub(super) fn names_node(
    certificate: &CertificateDer<'_>,
    cluster: [u8; 16],
    node: NodeId,
) -> bool {
    let parsed = ParsedCertificate::try_from(certificate);
    parsed.is_ok_and(|parsed| verify_server_name(&parsed, &server_name(cluster, node)).is_ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_name_of_a_node_is_a_contract() {
        // The same as in the test of `meta::pki`.
        let cluster = 0x0123_4567_89ab_cdef_0011_2233_4455_6677_u128.to_be_bytes();
        assert_eq!(
            node_name(cluster, NodeId(42)),
            "node-42.01234567-89ab-cdef-0011-223344556677.penstock"
        );
    }
}
