//! A host that is removed reaches nothing any more, nor does whoever took its credentials.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::AsRawFd;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail, ensure};
use cluster_rig::guest::{SOON, goes_on, ledger};
use cluster_rig::{Cluster, ClusterOptions, Load};
use fabric_transport::handshake::{Handshake, HandshakeError};
use fabric_transport::hello::{CREDIT_BYTES, CREDIT_REQUESTS, Hello, Refused, VERSIONS, Wire};
use fabric_transport::identity::Identity;
use fabric_types::{Incarnation, NodeId};
use guest_rig::paths::penstock_binary;
use guest_rig::process::{enter_namespace, run, wait_until};
use meta::net::{PeerReply, PeerRequest, TlsIdentity, TlsTransport, Transport, TransportError};
use openraft::BasicNode;
use uuid::Uuid;

const CONTROL_PORT: u16 = 7470;
const DATA_PORT: u16 = 7471;
/// An answer to a handshake comes within this; a node says nothing for a while to one that it does not know.
const ANSWER_LIMIT: Duration = Duration::from_secs(10);

/// What is in a node's directory `cluster`.
#[derive(Clone)]
struct Credentials {
    cluster: Uuid,
    node: u64,
    ca: String,
    certificate: String,
    key: String,
}

impl Credentials {
    fn of(cluster: &Cluster, node: u8) -> Result<Self> {
        let dir = cluster.node(node)?.daemon().data().join("cluster");
        let read = |name: &str| fs::read_to_string(dir.join(name)).context(name.to_owned());
        let record: serde_json::Value = serde_json::from_str(&read("node.json")?)?;
        let name = record["cluster"].as_str().context("no cluster")?;
        Ok(Self {
            cluster: name.parse()?,
            node: record["node"].as_u64().context("no node")?,
            ca: read("ca.pem")?,
            certificate: read("node.pem")?,
            key: read("node.key")?,
        })
    }

    /// Asks a node for what any node of the cluster may ask.
    fn ask_control(&self, target: u64, address: &str) -> Result<PeerReply, TransportError> {
        let (ca, certificate, key) = (&self.ca, &self.certificate, &self.key);
        let own = NodeId(self.node);
        let identity = TlsIdentity::from_pem(self.cluster, own, ca, certificate, key)
            .expect("they were good yesterday");
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .expect("a runtime");
        let address = BasicNode::new(format!("{address}:{CONTROL_PORT}"));
        runtime.block_on(async move {
            let transport = TlsTransport::new(identity);
            let request = PeerRequest::WasRemoved { node: NodeId(1) };
            transport.call(NodeId(target), &address, request).await
        })
    }

    /// Says hello to a node's data path; why it is refused, if it is.
    fn knock_at_data(&self, target: u64, address: &str) -> Result<Option<Refused>> {
        let (ca, certificate) = (self.ca.as_bytes(), self.certificate.as_bytes());
        let identity = Identity::from_pem(ca, certificate, self.key.as_bytes())?;
        let hello = Hello {
            versions: (*VERSIONS.start(), *VERSIONS.end()),
            cluster: *self.cluster.as_bytes(),
            node: NodeId(self.node),
            to: NodeId(target),
            incarnation: Incarnation(1),
            wire: Wire::Tls,
            credit_requests: CREDIT_REQUESTS,
            credit_bytes: CREDIT_BYTES,
            key: [1; 16],
            refusal: None,
        };
        let mut handshake = Handshake::connect(&identity, hello)?;
        let address: SocketAddr = format!("{address}:{DATA_PORT}").parse()?;
        let mut stream = TcpStream::connect(address)?;
        stream.set_read_timeout(Some(ANSWER_LIMIT))?;
        loop {
            let out = handshake.outgoing().to_vec();
            stream.write_all(&out)?;
            handshake.sent(out.len());
            if handshake.is_done() {
                return Ok(None);
            }
            let mut bytes = [0; 4096];
            match stream.read(&mut bytes)? {
                0 => bail!("the connection was closed without a word"),
                got => match handshake.received(&bytes[..got]) {
                    Ok(()) => {}
                    Err(HandshakeError::Refused(refused)) => return Ok(Some(refused)),
                    Err(error) => return Err(error.into()),
                },
            }
        }
    }
}

/// Runs something in a node's network.
fn within<T: Send + 'static>(
    namespace: &str,
    what: impl FnOnce() -> T + Send + 'static,
) -> Result<T> {
    let namespace = File::open(Path::new("/run/netns").join(namespace))?;
    let thread = std::thread::spawn(move || {
        // SAFETY: setns(2) changes the network of this thread alone, which ends with `what`.
        let entered = unsafe { libc::setns(namespace.as_raw_fd(), libc::CLONE_NEWNET) };
        match entered {
            0 => Ok(what()),
            _ => Err(std::io::Error::last_os_error()),
        }
    });
    let outcome = thread.join().map_err(|_| anyhow!("it panicked"))?;
    outcome.context("enter a node's network")
}

/// The ports of a node at which another one has connections that stand.
fn connected(cluster: &mut Cluster, node: u8, peer: u8) -> Result<Vec<u16>> {
    let network = cluster.network()?;
    let (namespace, peer) = (network.namespace(node), network.address(peer));
    let mut command = Command::new("ss");
    command.args(["-Htn", "state", "established", "dst", &peer]);
    enter_namespace(&mut command, &namespace)?;
    let local = |line: &str| {
        let address = line.split_whitespace().nth(2)?;
        address.rsplit_once(':')?.1.parse().ok()
    };
    let ports = run(&mut command)?;
    let ports = ports.lines().filter_map(local);
    Ok(ports
        .filter(|port| [CONTROL_PORT, DATA_PORT].contains(port))
        .collect())
}

fn signal(cluster: &Cluster, node: u8, signal: libc::c_int) -> Result<()> {
    let pid = cluster.node(node)?.daemon().pid()?;
    // SAFETY: a signal to a process that the rig has started and not waited for.
    let sent = unsafe { libc::kill(i32::try_from(pid)?, signal) };
    ensure!(sent == 0, "{}", std::io::Error::last_os_error());
    Ok(())
}

/// Lets a host in with a token that grants nothing else; returns its number.
fn join_host(cluster: &mut Cluster) -> Result<u8> {
    let create = ["token", "create"];
    let token = cluster.node(1)?.daemon().cli(&create)?;
    let host = cluster.add_machine()?;
    let more = [token.trim(), "--roles", "host,meta"];
    let refused = cluster.init_or_join(host, "join", &more);
    let told = format!("{:#}", refused.err().context("it got other roles")?);
    ensure!(told.contains("grants the roles host"), "{told}");
    cluster.init_or_join(host, "join", &[token.trim()])?;
    let key = cluster.node(host)?.daemon().data().join("cluster/ca.key");
    ensure!(!key.exists(), "a host got the authority's key");
    cluster.node_mut(host)?.start()?;
    Ok(host)
}

fn is_refused(cluster: &Cluster, host: u8, command: &[&str]) -> Result<()> {
    let refused = cluster.node(host)?.daemon().cli(command);
    let told = format!("{:#}", refused.err().context("a host may do that")?);
    ensure!(
        told.contains("run this on a node with the role meta"),
        "{told}"
    );
    Ok(())
}

#[test]
fn a_removed_host_and_its_stolen_credentials_get_nothing() -> Result<()> {
    let mut cluster = Cluster::start(ClusterOptions::new(penstock_binary()?, 3))?;
    let host = join_host(&mut cluster)?;
    let socket = cluster.node(host)?.daemon().disk("disk", "256M", 1)?;
    let load = Load::start(&socket, ledger());
    goes_on(&cluster, &load, "the start on a host")?;
    for command in [
        &["token", "create"][..],
        &["pool", "create", "mine", "--replicas", "1"],
        &["node", "drain", "node2", "--yes"],
        &["node", "remove", "node2", "--yes"],
    ] {
        is_refused(&cluster, host, command)?;
    }
    goes_on(&cluster, &load, "what a host may not do")?;

    let credentials = Credentials::of(&cluster, host)?;
    let namespace = cluster.network()?.namespace(host);
    let ask = |cluster: &Cluster, node: u8| -> Result<_> {
        let (address, credentials) = (cluster.address(node), credentials.clone());
        within(&namespace, move || {
            credentials.ask_control(node.into(), &address)
        })
    };
    let before = ask(&cluster, 1)?;
    ensure!(before.is_ok(), "before its removal: {before:?}");
    // Its daemon is there all the time, and does not hear of its removal: its connections stand as far as it
    // can tell.
    let stand = |cluster: &mut Cluster| -> Result<usize> {
        let mut all = 0;
        for node in 1..=3 {
            all += connected(cluster, node, host)?.len();
        }
        Ok(all)
    };
    let count = stand(&mut cluster)?;
    ensure!(count >= 3, "{count} connections");
    signal(&cluster, host, libc::SIGSTOP)?;
    load.abandon()?;
    cluster.forget(host)?;
    wait_until(SOON, || Ok((stand(&mut cluster)? == 0).then_some(())))
        .with_context(|| format!("its connections stand\n{}", cluster.report()))?;
    for node in 1..=3 {
        let answer = ask(&cluster, node)?;
        let removed = matches!(answer, Err(TransportError::Removed { .. }));
        ensure!(removed, "node {node} says {answer:?}");
        let (address, credentials) = (cluster.address(node), credentials.clone());
        let knock = move || credentials.knock_at_data(node.into(), &address);
        let answer = within(&namespace, knock)??;
        ensure!(
            answer == Some(Refused::NotMember),
            "node {node} says {answer:?}"
        );
    }

    signal(&cluster, host, libc::SIGCONT)?;
    cluster.wait("it learns of its removal", SOON, |cluster| {
        let log = cluster.node(host)?.daemon().log();
        Ok(log
            .contains("was removed from the cluster and serves nothing")
            .then_some(()))
    })?;
    // It may be connecting at this moment, to be refused; whoever is let in stays.
    wait_until(SOON, || Ok((stand(&mut cluster)? == 0).then_some(())))
        .with_context(|| format!("it got in again\n{}", cluster.report()))?;
    // It has ended by itself.
    cluster.discard(host)?;
    cluster.wait_ready().map(drop)
}
