//! The cluster's certificate authority, certificates of nodes, and the tokens that let a node join.
//!
//! One authority per cluster, made with it. A node makes its own key, which never leaves it, and asks for a
//! certificate with the public half; it is granted to who already has one, or once to the bearer of a join
//! token. The certificate names node and cluster as the DNS name of [`node_name`], which peers check on both
//! sides of a connection.

use std::fmt;
use std::time::{Duration, SystemTime};

use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa,
    Issuer, KeyPair, KeyUsagePurpose, PKCS_ECDSA_P256_SHA256, PublicKeyData, SignatureAlgorithm,
};
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::ids::NodeId;

/// Certificates are good from this long before they are made, for clocks that are behind.
const BACKDATED: Duration = Duration::from_secs(24 * 3600);
/// A node's certificate is good for this long.
pub const NODE_CERTIFICATE_LIFETIME: Duration = Duration::from_secs(10 * 365 * 24 * 3600);
/// The authority is good for this long.
const CA_LIFETIME: Duration = Duration::from_secs(30 * 365 * 24 * 3600);
/// Length of an uncompressed point on the curve P-256: what a public key must have.
const PUBLIC_KEY_BYTES: usize = 65;

/// How the text of a token begins.
const TOKEN_PREFIX: &str = "penstock-";

/// SHA-256 of a certificate in PEM, by which a joining node knows the authority.
///
/// # Errors
/// It is no certificate.
pub fn fingerprint(certificate: &str) -> Result<[u8; 32], rustls::pki_types::pem::Error> {
    use rustls::pki_types::pem::PemObject;
    let certificate = rustls::pki_types::CertificateDer::from_pem_slice(certificate.as_bytes())?;
    let digest = ring::digest::digest(&ring::digest::SHA256, &certificate);
    let mut bytes = [0; 32];
    bytes.copy_from_slice(digest.as_ref());
    Ok(bytes)
}

/// The name that the certificate of a node bears.
#[must_use]
pub fn node_name(cluster: Uuid, node: NodeId) -> String {
    format!("node-{node}.{cluster}.penstock")
}

/// A certificate could not be made.
#[derive(Debug, thiserror::Error)]
pub enum PkiError {
    /// The cryptographic library refused.
    #[error("cannot make a certificate: {0}")]
    Make(#[from] rcgen::Error),
    /// Not a public key of the right kind.
    #[error(
        "the node's public key cannot be used: it has {found} bytes instead of {PUBLIC_KEY_BYTES}"
    )]
    BadPublicKey {
        /// Its length.
        found: usize,
    },
}

/// The key of a node.
pub struct NodeKey {
    pair: KeyPair,
}

impl fmt::Debug for NodeKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("NodeKey")
    }
}

impl NodeKey {
    /// A new one.
    ///
    /// # Errors
    /// The system gives no random numbers.
    pub fn generate() -> Result<Self, PkiError> {
        Ok(Self {
            pair: KeyPair::generate()?,
        })
    }

    /// The secret, as PEM: for a file that only the daemon reads.
    #[must_use]
    pub fn to_pem(&self) -> String {
        self.pair.serialize_pem()
    }

    /// The public half: for [`ClusterCa::issue`].
    #[must_use]
    pub fn public_key(&self) -> Vec<u8> {
        self.pair.public_key_raw().to_vec()
    }
}

/// A public key that came over the network.
struct PublicKey<'a>(&'a [u8]);

impl PublicKeyData for PublicKey<'_> {
    fn der_bytes(&self) -> &[u8] {
        self.0
    }

    fn algorithm(&self) -> &'static SignatureAlgorithm {
        &PKCS_ECDSA_P256_SHA256
    }
}

/// The authority of a cluster, with its key.
pub struct ClusterCa {
    cluster: Uuid,
    issuer: Issuer<'static, KeyPair>,
    key_pem: String,
}

impl fmt::Debug for ClusterCa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ClusterCa")
            .field("cluster", &self.cluster)
            .finish_non_exhaustive()
    }
}

impl ClusterCa {
    /// Makes the authority of a new cluster. The second result is its certificate as PEM, which every node
    /// keeps to know its peers by.
    ///
    /// # Errors
    /// The system gives no random numbers.
    pub fn generate(cluster: Uuid) -> Result<(Self, String), PkiError> {
        let pair = KeyPair::generate()?;
        let key_pem = pair.serialize_pem();
        let params = ca_params(cluster);
        let certificate = params.self_signed(&pair)?.pem();
        let issuer = Issuer::new(params, pair);
        let ca = Self {
            cluster,
            issuer,
            key_pem,
        };
        Ok((ca, certificate))
    }

    /// The authority again, from the key that [`ClusterCa::key_pem`] gave.
    ///
    /// # Errors
    /// It is no key.
    pub fn load(cluster: Uuid, key_pem: &str) -> Result<Self, PkiError> {
        let pair = KeyPair::from_pem(key_pem)?;
        Ok(Self {
            cluster,
            issuer: Issuer::new(ca_params(cluster), pair),
            key_pem: key_pem.to_owned(),
        })
    }

    /// The secret, as PEM: whoever has it can make nodes.
    #[must_use]
    pub fn key_pem(&self) -> &str {
        &self.key_pem
    }

    /// A certificate, as PEM, for a node with this public key.
    ///
    /// # Errors
    /// The public key is none.
    pub fn issue(&self, node: NodeId, public_key: &[u8]) -> Result<String, PkiError> {
        let from = SystemTime::now() - BACKDATED;
        self.issue_for(
            node,
            public_key,
            from,
            BACKDATED + NODE_CERTIFICATE_LIFETIME,
        )
    }

    /// The same for a given time.
    ///
    /// # Errors
    /// The public key is none.
    pub fn issue_for(
        &self,
        node: NodeId,
        public_key: &[u8],
        from: SystemTime,
        lifetime: Duration,
    ) -> Result<String, PkiError> {
        if public_key.len() != PUBLIC_KEY_BYTES {
            let found = public_key.len();
            return Err(PkiError::BadPublicKey { found });
        }
        let name = node_name(self.cluster, node);
        let mut params = CertificateParams::new(vec![name.clone()])?;
        params.distinguished_name = common_name(&name);
        params.not_before = from.into();
        params.not_after = (from + lifetime).into();
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![
            ExtendedKeyUsagePurpose::ServerAuth,
            ExtendedKeyUsagePurpose::ClientAuth,
        ];
        let certificate = params.signed_by(&PublicKey(public_key), &self.issuer)?;
        Ok(certificate.pem())
    }
}

fn common_name(name: &str) -> DistinguishedName {
    let mut distinguished = DistinguishedName::new();
    // 64 characters are allowed there; the whole name is in the alternative names.
    let short: String = name.chars().take(64).collect();
    distinguished.push(DnType::CommonName, short);
    distinguished
}

fn ca_params(cluster: Uuid) -> CertificateParams {
    let now = SystemTime::now();
    let mut params = CertificateParams::default();
    params.distinguished_name = common_name(&format!("penstock cluster {cluster}"));
    params.not_before = (now - BACKDATED).into();
    params.not_after = (now + CA_LIFETIME).into();
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![
        KeyUsagePurpose::KeyCertSign,
        KeyUsagePurpose::DigitalSignature,
    ];
    params
}

/// SHA-256 of a join token: what the cluster keeps of it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct TokenHash([u8; 32]);

impl fmt::Display for TokenHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for TokenHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl From<TokenHash> for String {
    fn from(hash: TokenHash) -> Self {
        hash.to_string()
    }
}

impl TryFrom<String> for TokenHash {
    type Error = &'static str;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        let mut bytes = [0; 32];
        if text.len() != 64 || !text.is_ascii() {
            return Err("a hash has 64 hexadecimal digits");
        }
        for (byte, digits) in bytes.iter_mut().zip(text.as_bytes().chunks(2)) {
            let digits = std::str::from_utf8(digits).map_err(|_| "not a hash")?;
            *byte = u8::from_str_radix(digits, 16).map_err(|_| "not a hash")?;
        }
        Ok(Self(bytes))
    }
}

impl TokenHash {
    pub(crate) fn bytes(&self) -> &[u8; 32] {
        &self.0
    }
}

/// A secret that lets one node join, once.
#[derive(Clone, PartialEq, Eq)]
pub struct JoinToken(String);

impl fmt::Debug for JoinToken {
    /// Never the secret: logs are read by others.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "JoinToken({})", self.hash())
    }
}

impl JoinToken {
    /// A new one, of 256 random bits (244, as each UUID has 122).
    #[must_use]
    pub fn draw() -> Self {
        let mut bits = [0; 32];
        bits[..16].copy_from_slice(Uuid::new_v4().as_bytes());
        bits[16..].copy_from_slice(Uuid::new_v4().as_bytes());
        Self::from_bits(bits)
    }

    /// The random part, for [`crate::net::enrol::Invitation`].
    #[must_use]
    pub(crate) fn bits(&self) -> [u8; 32] {
        let digits = self.0.trim_start_matches(TOKEN_PREFIX);
        let mut bits = [0; 32];
        for (byte, digits) in bits.iter_mut().zip(digits.as_bytes().chunks(2)) {
            let digits = std::str::from_utf8(digits).unwrap_or_default();
            *byte = u8::from_str_radix(digits, 16).unwrap_or_default();
        }
        bits
    }

    /// The token with this random part.
    #[must_use]
    pub(crate) fn from_bits(bits: [u8; 32]) -> Self {
        let digits: String = bits.iter().map(|byte| format!("{byte:02x}")).collect();
        Self(format!("{TOKEN_PREFIX}{digits}"))
    }

    /// As somebody typed it.
    #[must_use]
    pub fn from_text(text: &str) -> Self {
        Self(text.trim().to_owned())
    }

    /// To be handed to whoever adds the node, and kept nowhere.
    #[must_use]
    pub fn secret(&self) -> &str {
        &self.0
    }

    /// What the cluster keeps.
    #[must_use]
    pub fn hash(&self) -> TokenHash {
        let digest = ring::digest::digest(&ring::digest::SHA256, self.0.as_bytes());
        let mut hash = [0; 32];
        hash.copy_from_slice(digest.as_ref());
        TokenHash(hash)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_kept_as_a_hash_only() {
        let token = JoinToken::draw();
        assert_ne!(token, JoinToken::draw());
        assert_eq!(
            JoinToken::from_text(&format!(" {}\n", token.secret())),
            token
        );
        let stored = serde_json::to_string(&token.hash()).unwrap();
        assert!(!stored.contains(token.secret()) && !format!("{token:?}").contains(token.secret()));
        assert_eq!(
            serde_json::from_str::<TokenHash>(&stored).unwrap(),
            token.hash()
        );
        for bad in ["\"\"", "\"zz\"", &format!("\"{}\"", "é".repeat(32))] {
            assert!(serde_json::from_str::<TokenHash>(bad).is_err());
        }
    }

    #[test]
    fn the_name_of_a_node_is_a_contract() {
        // The same as in the test of `fabric_transport::identity`.
        let cluster = Uuid::from_u128(0x0123_4567_89ab_cdef_0011_2233_4455_6677);
        assert_eq!(
            node_name(cluster, NodeId(42)),
            "node-42.01234567-89ab-cdef-0011-223344556677.penstock"
        );
    }

    #[test]
    fn an_authority_is_the_same_after_it_was_stored() {
        let cluster = Uuid::from_u128(7);
        let (ca, _) = ClusterCa::generate(cluster).unwrap();
        let again = ClusterCa::load(cluster, ca.key_pem()).unwrap();
        let key = NodeKey::generate().unwrap();
        assert!(again.issue(NodeId(1), &key.public_key()).is_ok());
        assert!(matches!(
            again.issue(NodeId(1), &[1, 2, 3]),
            Err(PkiError::BadPublicKey { found: 3 })
        ));
    }
}
