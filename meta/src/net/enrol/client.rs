//! The side that joins.

use std::io;
use std::sync::Arc;

use ring::digest::{SHA256, digest};
use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::CryptoProvider;
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::{
    CertificateError, ClientConfig, DigitallySignedStruct, RootCertStore, SignatureScheme,
};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use super::super::frame;
use super::{
    ALPN, ANSWER_BYTES_MAX, ANSWER_WAIT_MAX, Answer, EnrolmentEndpoint, EnrolmentReply,
    EnrolmentRequest, GREET_WAIT_MAX, Invitation, PROTOCOL, Question,
};
use crate::pki::node_name;

/// Why a node could not join.
#[derive(Debug, thiserror::Error)]
pub enum EnrolmentError {
    /// Nobody who could let it in was reached.
    #[error("cannot reach the cluster: {detail}")]
    Unreachable {
        /// Who was tried, and what came of it.
        detail: String,
    },
    /// Somebody answered there who is not of the cluster.
    #[error("{address} is not a node of the cluster that made this token: {detail}")]
    Stranger {
        /// Where.
        address: String,
        /// What is wrong.
        detail: String,
    },
    /// The certificate of a node of the cluster is not valid by the clock of this machine.
    #[error("{address} cannot be verified: {detail}")]
    Clock {
        /// Address that was tried.
        address: String,
        /// Difference between the clock and the validity of the certificate.
        detail: String,
    },
    /// The cluster refused.
    #[error("the cluster refuses: {reason}")]
    Refused {
        /// The reason, with a hint.
        reason: String,
    },
    /// The token may be used up by now.
    #[error("{address} did not answer in full ({detail}): the token may be used up")]
    Lost {
        /// Who.
        address: String,
        /// How.
        detail: String,
    },
}

/// Enrols this node, trying one endpoint after the other.
///
/// # Errors
/// See [`EnrolmentError`].
pub async fn enrol(
    invitation: &Invitation,
    question: EnrolmentRequest,
) -> Result<EnrolmentReply, EnrolmentError> {
    let question = Question {
        protocol: PROTOCOL,
        cluster: invitation.cluster,
        secret: invitation.token.secret().to_owned(),
        question,
    };
    let (mut tried, mut stranger, mut clock) = (Vec::new(), None, None);
    for endpoint in &invitation.endpoints {
        let address = endpoint.address.to_string();
        match timeout(GREET_WAIT_MAX, connect(invitation, endpoint)).await {
            Ok(Ok(stream)) => {
                return ask(stream, address, &question).await;
            }
            // TLS reports a wrong certificate with this kind.
            Ok(Err(error)) if error.kind() == io::ErrorKind::InvalidData => {
                match wrong_time(&error) {
                    Some(detail) => clock = Some(EnrolmentError::Clock { address, detail }),
                    None => {
                        let detail = error.to_string();
                        stranger = Some(EnrolmentError::Stranger { address, detail });
                    }
                }
            }
            Ok(Err(error)) => tried.push(format!("{address}: {error}")),
            Err(_) => tried.push(format!("{address}: no answer")),
        }
    }
    let detail = tried.join("; ");
    let failed = clock.or(stranger);
    Err(failed.unwrap_or(EnrolmentError::Unreachable { detail }))
}

/// Returns the difference between this machine's clock and the validity of a certificate, if that is the
/// error.
fn wrong_time(error: &io::Error) -> Option<String> {
    let error = error.get_ref()?.downcast_ref::<rustls::Error>()?;
    let rustls::Error::InvalidCertificate(wrong) = error else {
        return None;
    };
    let seconds = |from: UnixTime, to: UnixTime| to.as_secs().saturating_sub(from.as_secs());
    match wrong {
        CertificateError::NotValidYetContext { time, not_before } => Some(format!(
            "by the clock of this machine, its certificate becomes valid in {} s",
            seconds(*time, *not_before)
        )),
        CertificateError::ExpiredContext { time, not_after } => Some(format!(
            "by the clock of this machine, its certificate expired {} s ago",
            seconds(*not_after, *time)
        )),
        CertificateError::NotValidYet | CertificateError::Expired => {
            Some("by the clock of this machine, its certificate is not valid".to_owned())
        }
        _ => None,
    }
}

async fn connect(
    invitation: &Invitation,
    endpoint: &EnrolmentEndpoint,
) -> io::Result<TlsStream<TcpStream>> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let verifier = Arc::new(KnownAuthority {
        sha256: invitation.authority,
        provider: Arc::clone(&provider),
    });
    let mut config = ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])
        .map_err(io::Error::other)?
        .dangerous()
        .with_custom_certificate_verifier(verifier)
        .with_no_client_auth();
    config.alpn_protocols = vec![ALPN.to_vec()];
    let name = node_name(invitation.cluster, endpoint.node);
    let name = ServerName::try_from(name).expect("digits, letters, hyphens and dots");
    let stream = TcpStream::connect(endpoint.address).await?;
    TlsConnector::from(Arc::new(config))
        .connect(name, stream)
        .await
}

async fn ask(
    mut stream: TlsStream<TcpStream>,
    address: String,
    question: &Question,
) -> Result<EnrolmentReply, EnrolmentError> {
    let exchange = async {
        frame::send(&mut stream, 0, question).await?;
        frame::receive::<Answer>(&mut stream, ANSWER_BYTES_MAX).await
    };
    match timeout(ANSWER_WAIT_MAX, exchange).await {
        Ok(Ok((_, Ok(answer)))) => Ok(answer),
        Ok(Ok((_, Err(reason)))) => Err(EnrolmentError::Refused { reason }),
        Ok(Err(error)) => {
            let detail = match error.kind() {
                // TLS says more, of interest to nobody here.
                io::ErrorKind::UnexpectedEof => "the connection ended".to_owned(),
                _ => error.to_string(),
            };
            Err(EnrolmentError::Lost { address, detail })
        }
        Err(_) => {
            let detail = "no answer in time".to_owned();
            Err(EnrolmentError::Lost { address, detail })
        }
    }
}

/// Trusts the authority whose certificate has this hash, which the server sends along with its own.
#[derive(Debug)]
struct KnownAuthority {
    sha256: [u8; 32],
    provider: Arc<CryptoProvider>,
}

impl ServerCertVerifier for KnownAuthority {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        let is_it = |found: &&CertificateDer<'_>| digest(&SHA256, found).as_ref() == self.sha256;
        let authority = intermediates.iter().find(is_it);
        let authority = authority.ok_or(CertificateError::UnknownIssuer)?;
        let mut roots = RootCertStore::empty();
        roots.add(authority.clone().into_owned())?;
        let verifier = WebPkiServerVerifier::builder_with_provider(
            Arc::new(roots),
            Arc::clone(&self.provider),
        );
        let verifier = verifier
            .build()
            .map_err(|error| rustls::Error::General(error.to_string()))?;
        verifier.verify_server_cert(end_entity, &[], server_name, ocsp_response, now)
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Err(rustls::Error::General("only TLS 1.3 is spoken".to_owned()))
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        rustls::crypto::verify_tls13_signature(message, certificate, signed, algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider
            .signature_verification_algorithms
            .supported_schemes()
    }
}
