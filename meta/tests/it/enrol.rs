//! Nodes that want to join, over real sockets on loopback.

use std::io::ErrorKind;
use std::net::SocketAddr;
use std::time::{Duration, SystemTime};

use crate::common::until;
use meta::net::enrol::{
    EnrolmentCredentials, EnrolmentEndpoint, EnrolmentError, EnrolmentReply, EnrolmentRequest,
    EnrolmentServer, Invitation, enrol,
};
use meta::pki::{ClusterCa, JoinToken, NodeKey, fingerprint};
use meta::{Labels, Level, MetaNode, NodeId, NodeSpec, Role};
use tokio::net::TcpStream;

/// Where node 2 of the cluster is.
const TAKEN: &str = "192.0.2.2:7470";

/// A cluster of one that lets others in, with a second node that is known.
struct Host {
    _dir: tempfile::TempDir,
    node: MetaNode,
    authority: [u8; 32],
    server: EnrolmentServer,
}

/// Validity of certificates that are valid now.
const DAY: Duration = Duration::from_secs(24 * 3600);

impl Host {
    async fn start() -> Self {
        Self::certified(SystemTime::now() - DAY).await
    }

    /// Creates a node whose certificate is valid for two days from then on.
    async fn certified(from: SystemTime) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let node = crate::common::open(dir.path()).await;
        let other = NodeSpec {
            control_address: TAKEN.to_owned(),
            ..NodeSpec::new(NodeId(2), "taken")
        };
        node.meta().register_node(other).await.unwrap();
        let (ca, ca_certificate) = ClusterCa::generate(node.cluster_uuid()).unwrap();
        let authority = fingerprint(&ca_certificate).unwrap();
        let key = NodeKey::generate().unwrap();
        let credentials = EnrolmentCredentials {
            certificate: ca
                .issue_for(NodeId(1), &key.public_key(), from, 2 * DAY)
                .unwrap(),
            key: key.to_pem(),
            ca,
            ca_certificate,
        };
        let server = EnrolmentServer::start("127.0.0.1:0", credentials, node.meta());
        Self {
            _dir: dir,
            server: server.await.unwrap(),
            node,
            authority,
        }
    }

    async fn token(&self) -> JoinToken {
        let (meta, roles) = (self.node.meta(), Role::all());
        let token = meta.create_join_token(Duration::from_secs(3600), &roles);
        token.await.unwrap()
    }

    async fn join(
        &self,
        token: &JoinToken,
        question: EnrolmentRequest,
    ) -> Result<EnrolmentReply, EnrolmentError> {
        let address: SocketAddr = self.server.address();
        let invitation = Invitation {
            cluster: self.node.cluster_uuid(),
            authority: self.authority,
            token: token.clone(),
            endpoints: vec![EnrolmentEndpoint {
                node: NodeId(1),
                address,
            }],
        };
        enrol(&invitation, question).await
    }
}

fn question(name: &str) -> EnrolmentRequest {
    EnrolmentRequest {
        name: name.to_owned(),
        roles: Role::all(),
        takes_granted: false,
        needs: std::collections::BTreeSet::new(),
        labels: Labels::default(),
        control_address: "192.0.2.9:7470".to_owned(),
        data_address: String::new(),
        version: "0.0.0".to_owned(),
        level: Level::KNOWN,
        public_key: NodeKey::generate().unwrap().public_key(),
    }
}

fn refusal(answer: Result<EnrolmentReply, EnrolmentError>) -> String {
    match answer {
        Err(EnrolmentError::Refused { reason }) => reason,
        Err(error) => panic!("{error}"),
        Ok(admitted) => panic!("node {} was let in", admitted.node),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_has_no_good_token_learns_nothing_of_the_cluster() {
    let host = Host::start().await;
    // Each would be refused with a reason that tells of the cluster.
    let questions = || {
        [
            question("node9"),
            question("taken"),
            EnrolmentRequest {
                control_address: TAKEN.to_owned(),
                ..question("node9")
            },
            EnrolmentRequest {
                level: Level(Level::KNOWN.0 - 1),
                ..question("node9")
            },
            EnrolmentRequest {
                public_key: vec![1],
                ..question("node9")
            },
        ]
    };
    let guessed = JoinToken::draw();
    let used = host.token().await;
    host.join(&used, question("node3")).await.unwrap();
    for token in [&guessed, &used] {
        for question in questions() {
            let told = refusal(host.join(token, question).await);
            assert!(told.contains("used already"), "{told}");
            assert!(!told.contains("taken") && !told.contains(TAKEN), "{told}");
        }
    }
    let good = host.token().await;
    let told = refusal(host.join(&good, question("taken")).await);
    assert!(told.contains("\"taken\" is taken: "), "{told}");
    host.node.shutdown().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_wrong_clock_is_distinguished_from_another_authority() {
    let now = SystemTime::now();
    for (from, says) in [(now + DAY, "valid in 86"), (now - 3 * DAY, "expired 86")] {
        let host = Host::certified(from).await;
        let token = host.token().await;
        let message = host.join(&token, question("node9")).await.err().unwrap();
        assert!(matches!(message, EnrolmentError::Clock { .. }), "{message}");
        let text = message.to_string();
        assert!(
            text.contains("clock of this machine") && text.contains(says),
            "{text}"
        );
        host.node.shutdown().await.unwrap();
    }
    // A certificate of another authority is not an error of the clock.
    let mut host = Host::start().await;
    host.authority = [7; 32];
    let message = host
        .join(&host.token().await, question("node9"))
        .await
        .err()
        .unwrap();
    assert!(
        matches!(message, EnrolmentError::Stranger { .. }),
        "{message}"
    );
    host.node.shutdown().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sixteen_strangers_that_say_nothing_are_cut_off() {
    let host = Host::start().await;
    let mut silent = Vec::new();
    for _ in 0..16 {
        let stranger = TcpStream::connect(host.server.address()).await.unwrap();
        silent.push(stranger);
    }
    let token = host.token().await;
    // It may give up before they are cut off, and its token is good still.
    until(async || host.join(&token, question("node3")).await.ok()).await;
    // It got in when one of those had been cut off, and not before.
    let is_over = |stranger: &TcpStream| {
        let read = stranger.try_read(&mut [0]);
        !matches!(read, Err(error) if error.kind() == ErrorKind::WouldBlock)
    };
    assert!(silent.iter().any(is_over));
    host.node.shutdown().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_question_of_more_than_8_kib_is_not_read() {
    let host = Host::start().await;
    let token = host.token().await;
    let answer = host.join(&token, question(&"x".repeat(8 << 10))).await;
    assert!(
        matches!(answer, Err(EnrolmentError::Lost { .. })),
        "it was answered"
    );
    // The token is good still, and somebody else is let in.
    host.join(&token, question("node3")).await.unwrap();
    host.node.shutdown().await.unwrap();
}
