//! Two ends of a handshake, by hand.

use super::*;

/// A certificate authority of a cluster.
pub struct Authority {
    certificate: String,
    issuer: rcgen::Issuer<'static, rcgen::KeyPair>,
}

impl Authority {
    pub fn new() -> Self {
        let key = rcgen::KeyPair::generate().unwrap();
        let mut params = rcgen::CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        let certificate = params.self_signed(&key).unwrap().pem();
        Self {
            certificate,
            issuer: rcgen::Issuer::new(params, key),
        }
    }

    /// A node's identity that trusts `trusted`; valid until so long from now.
    pub fn identity(&self, node: u64, trusted: &Self, valid: Duration) -> Identity {
        self.with_names(vec![node_name(CLUSTER, NodeId(node))], trusted, valid)
    }

    fn with_names(&self, names: Vec<String>, trusted: &Self, valid: Duration) -> Identity {
        let key = rcgen::KeyPair::generate().unwrap();
        let mut params = rcgen::CertificateParams::new(names).unwrap();
        params.not_before = (SystemTime::now() - Duration::from_secs(7200)).into();
        params.not_after = (SystemTime::now() - Duration::from_secs(3600) + valid).into();
        let certificate = params.signed_by(&key, &self.issuer).unwrap().pem();
        Identity::from_pem(
            trusted.certificate.as_bytes(),
            certificate.as_bytes(),
            key.serialize_pem().as_bytes(),
        )
        .unwrap()
    }
}

/// The cluster of its nodes.
pub const CLUSTER: [u8; 16] = [7; 16];
/// How long certificates are good for.
pub const DAY: Duration = Duration::from_secs(24 * 3600);

fn hello(node: u64, to: u64, wire: Wire) -> Hello {
    Hello {
        versions: (*VERSIONS.start(), *VERSIONS.end()),
        cluster: CLUSTER,
        node: NodeId(node),
        to: NodeId(to),
        incarnation: Incarnation(node * 10),
        wire,
        credit_requests: CREDIT_REQUESTS,
        credit_bytes: CREDIT_BYTES,
        key: [node as u8; 16],
        refusal: None,
    }
}

struct Pair {
    client: Handshake,
    server: Handshake,
    moved: usize,
}

impl Pair {
    fn new(client: (&Identity, Hello), server: (&Identity, Hello)) -> Self {
        Self {
            client: Handshake::connect(client.0, client.1).unwrap(),
            server: Handshake::accept(server.0, server.1).unwrap(),
            moved: 0,
        }
    }

    /// Carries bytes in pieces until nothing moves or `most` bytes have passed; the first error of either
    /// end.
    fn run(&mut self, piece: usize, most: usize) -> Result<(), HandshakeError> {
        let mut outcome = Ok(());
        loop {
            let before = self.moved;
            for to_server in [true, false] {
                let (from, to) = match to_server {
                    true => (&mut self.client, &mut self.server),
                    false => (&mut self.server, &mut self.client),
                };
                let out = from.outgoing();
                let bytes = out[..out.len().min(piece).min(most - self.moved)].to_vec();
                from.sent(bytes.len());
                self.moved += bytes.len();
                if !bytes.is_empty() && !to.is_done() {
                    outcome = outcome.and(to.received(&bytes));
                }
            }
            if self.moved == before {
                return outcome;
            }
        }
    }
}

fn both_wires() -> [Wire; 2] {
    [Wire::Tls, Wire::Crc]
}

#[test]
fn two_nodes_of_a_cluster_agree_however_the_bytes_are_cut() {
    let ca = Authority::new();
    let (one, two) = (ca.identity(1, &ca, DAY), ca.identity(2, &ca, DAY));
    for wire in both_wires() {
        for piece in [1, 7, 100, 100_000] {
            let mut pair = Pair::new((&one, hello(1, 2, wire)), (&two, hello(2, 0, wire)));
            pair.run(piece, usize::MAX).unwrap();
            let (client, server) = (pair.client.finish(), pair.server.finish());
            assert_eq!(client.agreed.peer, NodeId(2));
            assert_eq!(server.agreed.peer, NodeId(1));
            assert_eq!(client.agreed.send_key, server.agreed.receive_key);
            assert_eq!(client.agreed.receive_key, server.agreed.send_key);
            assert_eq!(client.session.is_some(), wire == Wire::Tls);
            assert!(client.rest.is_empty() && server.rest.is_empty());
        }
    }
}

#[test]
fn a_certificate_longer_than_a_record_is_taken() {
    let ca = Authority::new();
    let names = |node| {
        let more = (0..800).map(|n| format!("another-name-of-the-node-{n}.penstock"));
        more.chain([node_name(CLUSTER, NodeId(node))]).collect()
    };
    let one = ca.with_names(names(1), &ca, DAY);
    let two = ca.with_names(names(2), &ca, DAY);
    for piece in [1000, 100_000] {
        let wire = Wire::Crc;
        let mut pair = Pair::new((&one, hello(1, 2, wire)), (&two, hello(2, 0, wire)));
        pair.run(piece, usize::MAX).unwrap();
        assert!(pair.moved > 2 * 20_000);
        assert!(pair.client.is_done() && pair.server.is_done());
    }
}

/// What the first request is, after the handshake, under TLS or not.
fn speak(established: &mut Established, text: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    match &mut established.session {
        Some(session) => session.encrypt(text, &mut out).unwrap(),
        None => out.extend_from_slice(text),
    }
    out
}

#[test]
fn what_is_said_first_behind_the_handshake_is_heard() {
    let ca = Authority::new();
    let (one, two) = (ca.identity(1, &ca, DAY), ca.identity(2, &ca, DAY));
    let text = b"the first bytes behind the handshake, longer than a record's header";
    for wire in both_wires() {
        let mut pair = Pair::new((&one, hello(1, 2, wire)), (&two, hello(2, 0, wire)));
        pair.run(100_000, usize::MAX).unwrap();
        let mut client = pair.client.finish();
        let mut server = pair.server.finish();
        let bytes = speak(&mut client, text);
        let heard = match &mut server.session {
            None => bytes,
            Some(session) => {
                let (mut heard, mut incoming) = (Vec::new(), bytes);
                let processed = session
                    .process(&mut incoming, &mut Vec::new(), &mut |data| {
                        heard.extend_from_slice(data);
                    })
                    .unwrap();
                assert_eq!(processed.state, State::Data);
                heard
            }
        };
        assert_eq!(heard, text);
    }
}

#[test]
fn plain_bytes_that_come_with_the_last_tls_record_are_kept() {
    let ca = Authority::new();
    let (one, two) = (ca.identity(1, &ca, DAY), ca.identity(2, &ca, DAY));
    let wire = Wire::Crc;
    let mut pair = Pair::new((&one, hello(1, 2, wire)), (&two, hello(2, 0, wire)));
    // All but what the client says last.
    let mut last = Vec::new();
    while !pair.client.is_done() {
        let out = pair.client.outgoing().to_vec();
        pair.client.sent(out.len());
        if pair.client.is_done() {
            last = out;
            break;
        }
        pair.server.received(&out).unwrap();
        let back = pair.server.outgoing().to_vec();
        pair.server.sent(back.len());
        pair.client.received(&back).unwrap();
    }
    assert!(!last.is_empty());
    last.extend_from_slice(b"plain");
    pair.server.received(&last).unwrap();
    assert!(pair.server.is_done());
    assert_eq!(pair.server.finish().rest, b"plain");
}

#[test]
fn a_certificate_that_is_not_good_is_refused() {
    let (ca, other) = (Authority::new(), Authority::new());
    let good = ca.identity(2, &ca, DAY);
    let bad = [
        ("wrong CA", other.identity(1, &ca, DAY)),
        ("expired", ca.identity(1, &ca, Duration::ZERO)),
    ];
    for (what, identity) in bad {
        for wire in both_wires() {
            let mut as_client =
                Pair::new((&identity, hello(1, 2, wire)), (&good, hello(2, 0, wire)));
            let outcome = as_client.run(100_000, usize::MAX);
            assert!(matches!(outcome, Err(HandshakeError::Tls(_))), "{what}");
            assert!(!as_client.server.is_done());
            let mut as_server =
                Pair::new((&good, hello(2, 1, wire)), (&identity, hello(1, 0, wire)));
            let outcome = as_server.run(100_000, usize::MAX);
            assert!(matches!(outcome, Err(HandshakeError::Tls(_))), "{what}");
            assert!(!as_server.client.is_done());
        }
    }
}

#[test]
fn a_node_with_anothers_certificate_is_refused() {
    let ca = Authority::new();
    let (three, two) = (ca.identity(3, &ca, DAY), ca.identity(2, &ca, DAY));
    let wire = Wire::Tls;
    let mut pair = Pair::new((&three, hello(1, 2, wire)), (&two, hello(2, 0, wire)));
    let outcome = pair.run(100_000, usize::MAX);
    assert!(matches!(
        outcome,
        Err(HandshakeError::Refused(Refused::Certificate))
    ));
    assert_eq!(pair.server.refused(), Some(Refused::Certificate));
    // And the other way round: it is TLS that looks for the name of the node that was meant.
    let mut pair = Pair::new((&two, hello(2, 1, wire)), (&three, hello(1, 0, wire)));
    let outcome = pair.run(100_000, usize::MAX);
    assert!(matches!(outcome, Err(HandshakeError::Tls(_))));
}

#[test]
fn node_of_another_cluster_under_the_same_ca_is_refused() {
    let ca = Authority::new();
    let good = ca.identity(2, &ca, DAY);
    let stranger = ca.with_names(vec![node_name([8; 16], NodeId(1))], &ca, DAY);
    let wire = Wire::Tls;
    let mut pair = Pair::new((&stranger, hello(1, 2, wire)), (&good, hello(2, 0, wire)));
    pair.run(100_000, usize::MAX).unwrap_err();
    assert_eq!(pair.server.refused(), Some(Refused::Certificate));
    let mut pair = Pair::new((&good, hello(2, 1, wire)), (&stranger, hello(1, 0, wire)));
    let outcome = pair.run(100_000, usize::MAX);
    assert!(matches!(outcome, Err(HandshakeError::Tls(_))));
}

#[test]
fn another_cluster_version_or_node_is_refused_and_told_why() {
    let ca = Authority::new();
    // A client of another cluster gets as far as that only if the certificate names that cluster, too.
    let names = [CLUSTER, [8; 16]].map(|cluster| node_name(cluster, NodeId(2)));
    let (one, two) = (
        ca.identity(1, &ca, DAY),
        ca.with_names(names.into(), &ca, DAY),
    );
    let client = hello(1, 2, Wire::Tls);
    let server = hello(2, 0, Wire::Tls);
    let cases = [
        (
            Hello {
                cluster: [8; 16],
                ..client
            },
            server,
            Refused::Cluster,
        ),
        (
            Hello {
                versions: (90, 91),
                ..client
            },
            server,
            Refused::Version,
        ),
        (
            client,
            Hello {
                node: NodeId(9),
                ..server
            },
            Refused::Node,
        ),
    ];
    for (client, server, refused) in cases {
        let mut pair = Pair::new((&one, client), (&two, server));
        let outcome = pair.run(100_000, usize::MAX);
        assert!(
            matches!(outcome, Err(HandshakeError::Refused(told)) if told == refused),
            "{refused:?}: {outcome:?}"
        );
        assert_eq!(pair.server.refused(), Some(refused));
    }
}

#[test]
fn handshake_cut_at_any_byte_never_completes_on_both_sides() {
    let ca = Authority::new();
    let (one, two) = (ca.identity(1, &ca, DAY), ca.identity(2, &ca, DAY));
    for wire in both_wires() {
        let start = || Pair::new((&one, hello(1, 2, wire)), (&two, hello(2, 0, wire)));
        let mut whole = start();
        whole.run(1000, usize::MAX).unwrap();
        let (total, mut cut) = (whole.moved, 0);
        while cut < total - 80 {
            let mut pair = start();
            pair.run(1000, cut).unwrap();
            assert!(!(pair.client.is_done() && pair.server.is_done()), "{cut}");
            cut += 13;
        }
        // The length of signatures differs by a few bytes; what matters lies at the end.
        for cut in total - 80..total + 80 {
            let mut pair = start();
            pair.run(1000, cut).unwrap();
        }
    }
}

#[test]
fn garbage_instead_of_a_handshake_is_refused() {
    let ca = Authority::new();
    let two = ca.identity(2, &ca, DAY);
    let mut random = ChaCha8Rng::seed_from_u64(1);
    for round in 0..200 {
        let mut server = Handshake::accept(&two, hello(2, 0, Wire::Tls)).unwrap();
        let mut garbage = vec![0u8; 2000];
        random.fill(&mut garbage[..]);
        if round % 2 == 0 {
            // Looks like the first record of a handshake.
            garbage[..5].copy_from_slice(&[22, 3, 1, 2, 0]);
        }
        assert!(server.received(&garbage).is_err());
        assert!(!server.is_done());
    }
}

#[test]
fn unauthenticated_client_that_sends_endlessly_is_refused() {
    let ca = Authority::new();
    let two = ca.identity(2, &ca, DAY);
    let mut server = Handshake::accept(&two, hello(2, 0, Wire::Tls)).unwrap();
    // The header of a record that is never complete.
    let mut refused = server.received(&[22, 3, 1, 0x40, 0]).is_err();
    for _ in 0..100 {
        refused |= server.received(&[0; 1000]).is_err();
    }
    assert!(refused);
}

#[test]
fn certificates_that_are_no_pem_are_refused_with_a_name() {
    let error = Identity::from_pem(b"nothing", b"", b"").unwrap_err();
    assert!(error.to_string().contains("the CA's certificate"));
}
