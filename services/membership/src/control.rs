//! A node's metadata service and its connections to other nodes, if it is one of several.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use api::failure::{Failure, Kind, Result};
use config::identity::{self, Identity, Settings, host_name};
use config::{Transport, Wire, check_roles};
use fabric_transport::control::NetConfig;
use fabric_transport::identity::Identity as DataIdentity;
use fabric_transport::queue_pair::pair::{Offered, Port};
use meta::net::enrol::{EnrolmentCredentials, EnrolmentServer};
use meta::net::{TlsIdentity, TlsListener, TlsServer, TlsTransport};
use meta::pki::ClusterCa;
use meta::{
    Incarnation, Level, Meta, MetaConfig, MetaError, MetaNode, NodeSpec, OpenError, RaftTuning,
    Role, Start,
};
use service::failures::ended_failure;
use service::prepared::Prepared;
use tokio::runtime::Handle;

use crate::cluster_runtime::ClusterRuntime;

/// A start that has not reached the cluster by then says so, and goes on trying.
const REACH_REPORTED_AFTER: Duration = Duration::from_secs(5);

/// Called with the metadata client while a start waits for a leader that has heard of this node; with `None`
/// once it does not wait any more.
pub type WaitsForLeader = dyn Fn(Option<Meta>) + Send + Sync;

/// The metadata service, and what other nodes reach of this one.
pub struct Control {
    node: MetaNode,
    network: Option<Network>,
    /// Runtime of both. Dropped last.
    runtime: ClusterRuntime,
}

/// Of a node of several.
struct Network {
    identity: Arc<Identity>,
    settings: Settings,
    data: NetConfig,
    /// Ended when dropped.
    _control: TlsServer,
    _enrol: Option<EnrolmentServer>,
}

/// The card that carries a node's data, or why there is none.
#[cfg(feature = "rdma")]
fn card(settings: &Settings) -> std::result::Result<Arc<dyn Port>, String> {
    let card = fabric_rdma::card::Card::open(settings.listen)?;
    tracing::info!(card = card.name(), "data may go over RDMA");
    Ok(Arc::new(card))
}

#[cfg(not(feature = "rdma"))]
fn card(_: &Settings) -> std::result::Result<Arc<dyn Port>, String> {
    Err("this penstock was built without RDMA".to_owned())
}

/// Whether data may go over RDMA, by the settings and by what the machine has.
fn pairs(settings: &Settings) -> Result<Offered> {
    let must = match settings.transport {
        Transport::Tcp => return Ok(Offered::No("this node's `transport` is `tcp`".to_owned())),
        Transport::Auto => false,
        Transport::Rdma => true,
    };
    let (found, hint) = match settings.wire {
        Wire::Tls => (
            Err("data between nodes are encrypted, which no RDMA card does".to_owned()),
            "set wire to crc on all nodes if nobody else is on the storage network, or transport to auto or \
             tcp",
        ),
        Wire::Crc => (
            card(settings),
            "`penstock rdma check --address ADDRESS` says what to fix; or set transport to auto or tcp",
        ),
    };
    match found {
        Ok(card) => Ok(Offered::Port(card)),
        Err(reason) if must => Err(Failure::new(
            Kind::Invalid,
            format!("transport is rdma, but RDMA cannot be used: {reason}"),
            hint,
        )),
        Err(reason) => {
            tracing::info!(reason, "data go over TCP");
            Ok(Offered::No(reason))
        }
    }
}

/// What the rest of the node needs to know of the network.
#[derive(Clone)]
pub struct Membership {
    pub(crate) identity: Arc<Identity>,
    pub(crate) settings: Settings,
}

impl Membership {
    /// Certificate and key by which nodes are let in, if this node has them.
    pub fn authority(&self) -> Option<(String, String)> {
        let key = self.identity.ca_key.clone()?;
        Some((self.identity.ca.clone(), key))
    }
}

pub(crate) fn failed(e: impl std::fmt::Display) -> Failure {
    Failure::plain(Kind::Failed, e)
}

impl Control {
    /// Opens the metadata. Of several nodes, returns when the cluster knows of this start: from then on
    /// devices may be registered.
    pub async fn open(
        config: &Prepared,
        meta_dir: PathBuf,
        waits: &WaitsForLeader,
    ) -> Result<Self> {
        let runtime = ClusterRuntime::start()?;
        let Some(identity) = Identity::load(&config.data)? else {
            if config.peers.is_told() {
                return Err(Failure::invalid(
                    format!(
                        "{} holds no node of a cluster, but listen, name, labels, roles, wire or a port is \
                         set",
                        config.data.display()
                    ),
                    "make a cluster with `penstock init` or join one with `penstock join` first, or leave \
                     those out",
                ));
            }
            let mut meta_config = MetaConfig {
                group_runtime: Some(Handle::current()),
                ..MetaConfig::embedded(host_name())
            };
            meta_config.node.boot = boot_id();
            let opened = runtime.run(MetaNode::open(meta_dir, meta_config)).await?;
            return Ok(Control {
                node: opened.map_err(|e| alone_failure(e, &config.data))?,
                network: None,
                runtime,
            });
        };
        let settings = identity.record.settings.clone().with(&config.peers);
        let hints = config.peers.hints.iter();
        let hints = hints.map(|hint| hint.control(settings.control_port).to_string());
        let hints: Vec<String> = hints.collect();
        settings.check_ports(identity.ca_key.is_some())?;
        check_roles(settings.roles.contains(&Role::Storage), &config.devices)?;
        let dirs = (config.data.as_path(), meta_dir);
        let network = (settings, hints);
        Self::open_one_of_several(runtime, Arc::new(identity), network, dirs, waits).await
    }

    async fn open_one_of_several(
        runtime: ClusterRuntime,
        identity: Arc<Identity>,
        (settings, hints): (Settings, Vec<String>),
        (data_dir, meta_dir): (&Path, PathBuf),
        waits: &WaitsForLeader,
    ) -> Result<Self> {
        let record = &identity.record;
        let (ca, certificate, key) = (&identity.ca, &identity.certificate, &identity.key);
        let credentials = TlsIdentity::from_pem(record.cluster, record.node, ca, certificate, key);
        let unfit = |e: String| invalid_credentials(data_dir, &e);
        let credentials = credentials.map_err(|e| unfit(e.to_string()))?;
        credentials.check().map_err(|e| unfit(e.to_string()))?;
        let incarnation = meta::draw_incarnation();
        let credentials = credentials
            .of_start(incarnation)
            .of_history(record.history)
            .reached_at(settings.control().to_string());
        let transport = {
            let on_runtime = runtime.handle();
            let _entered = on_runtime.enter();
            TlsTransport::with_hints(credentials.clone(), hints)
        };
        let data = NetConfig {
            listen: settings.data(),
            identity: DataIdentity::from_pem(ca.as_bytes(), certificate.as_bytes(), key.as_bytes())
                .map_err(|e| unfit(e.to_string()))?,
            wire: match settings.wire {
                Wire::Tls => fabric_transport::hello::Wire::Tls,
                Wire::Crc => fabric_transport::hello::Wire::Crc,
            },
            pairs: pairs(&settings)?,
        };
        let address = settings.control().to_string();
        let listener = runtime.run(async move { TlsListener::bind(&address).await });
        let listener = listener.await?.map_err(listen_failure)?;
        let config = meta_config(&identity, &settings, incarnation, transport);
        let opened = runtime.run(MetaNode::open(meta_dir, config)).await?;
        let node = opened.map_err(failed)?;
        // Before anybody hears of this node, and so may count on it.
        if let Err(failure) = identity::note_begun(data_dir) {
            shutdown(node).await;
            return Err(failure);
        }
        let control = listener.serve(credentials, node.peer());
        let enrol = match start_enrolment(&identity, &settings, node.meta()).await {
            Ok(enrol) => enrol,
            Err(failure) => {
                drop(control);
                shutdown(node).await;
                return Err(failure);
            }
        };
        waits(Some(node.meta()));
        let known = wait_until_known(&node.meta(), &settings).await;
        waits(None);
        if let Err(error) = known {
            drop((control, enrol));
            shutdown(node).await;
            return Err(ended_failure(error, data_dir));
        }
        let network = Network {
            identity,
            settings,
            data,
            _control: control,
            _enrol: enrol,
        };
        Ok(Control {
            node,
            network: Some(network),
            runtime,
        })
    }

    /// Runtime for heartbeats, leases and failovers.
    pub fn runtime(&self) -> Handle {
        self.runtime.handle()
    }

    /// The client side of the metadata.
    pub fn meta(&self) -> Meta {
        self.node.meta()
    }

    /// How the data path takes part in the network, if there is one.
    pub fn data(&self) -> Option<NetConfig> {
        self.network.as_ref().map(|network| network.data.clone())
    }

    /// Whether this node stores data on devices of its own.
    pub fn stores_data(&self) -> bool {
        let network = self.network.as_ref();
        network.is_none_or(|network| network.settings.roles.contains(&Role::Storage))
    }

    /// What the rest of the node needs to know of the network.
    pub fn membership(&self) -> Option<Membership> {
        self.network.as_ref().map(|network| Membership {
            identity: Arc::clone(&network.identity),
            settings: network.settings.clone(),
        })
    }

    /// Ends it in order.
    pub async fn shutdown(self) {
        drop(self.network);
        shutdown(self.node).await;
    }
}

async fn shutdown(node: MetaNode) {
    if let Err(error) = node.shutdown().await {
        tracing::error!(%error, "close the metadata");
    }
}

/// Identity of the machine's boot; empty, with a word in the log, if the kernel does not tell.
fn boot_id() -> String {
    const PATH: &str = "/proc/sys/kernel/random/boot_id";
    match std::fs::read_to_string(PATH) {
        Ok(id) => id.trim().to_owned(),
        Err(error) => {
            tracing::warn!(%error, "cannot read {PATH}: each start counts as one after a loss of power");
            String::new()
        }
    }
}

fn meta_config(
    identity: &Identity,
    settings: &Settings,
    incarnation: Incarnation,
    transport: TlsTransport,
) -> MetaConfig {
    let record = &identity.record;
    let cluster = record.cluster;
    MetaConfig {
        node: NodeSpec {
            id: record.node,
            name: settings.name.clone(),
            roles: settings.roles.clone(),
            granted: BTreeSet::new(),
            incarnation,
            labels: settings.labels.clone(),
            control_address: settings.control().to_string(),
            data_address: settings.data().to_string(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            boot: boot_id(),
            level: Level::KNOWN,
        },
        address: settings.control().to_string(),
        history: record.history,
        start: match record.bootstrap {
            Some(bootstrap) => Start::Found {
                cluster,
                replicas: bootstrap.replicas,
                min_in_sync: bootstrap.min_in_sync,
            },
            None => Start::Join { cluster },
        },
        tuning: RaftTuning::default(),
        transport: Arc::new(transport),
        group_runtime: Some(Handle::current()),
    }
}

/// A node that has the authority's key lets others in.
async fn start_enrolment(
    identity: &Identity,
    settings: &Settings,
    meta: Meta,
) -> Result<Option<EnrolmentServer>> {
    let Some(key) = &identity.ca_key else {
        return Ok(None);
    };
    let credentials = EnrolmentCredentials {
        ca: ClusterCa::load(identity.record.cluster, key).map_err(failed)?,
        ca_certificate: identity.ca.clone(),
        certificate: identity.certificate.clone(),
        key: identity.key.clone(),
    };
    let address = settings.enrol().to_string();
    let server = EnrolmentServer::start(&address, credentials, meta).await;
    server.map(Some).map_err(listen_failure)
}

/// Why the metadata of a node without an identity cannot be opened.
fn alone_failure(e: OpenError, data_dir: &Path) -> Failure {
    let hint = match &e {
        OpenError::OneOfSeveral { .. } => format!(
            "{} is missing, which says who that node is: bring it back from a backup, or have the others \
             forget the node with \
             `penstock node remove` and join anew with another data directory",
            data_dir.join("cluster").display()
        ),
        _ => return failed(e),
    };
    Failure::new(Kind::Failed, e, hint)
}

fn invalid_credentials(data_dir: &Path, e: &str) -> Failure {
    Failure::new(
        Kind::Failed,
        format!(
            "this node cannot prove who it is with ca.pem, node.pem and node.key in {}: {e}",
            data_dir.join("cluster").display()
        ),
        "bring those files back from a backup, or have the others forget this node with `penstock node \
         remove` and join anew \
         with another data directory",
    )
}

fn listen_failure(e: meta::net::TlsError) -> Failure {
    Failure::new(Kind::Failed, e, identity::LISTEN_HINT)
}

/// Waits until the leader has heard of this start of the process. Fails when that will never be.
async fn wait_until_known(meta: &Meta, settings: &Settings) -> std::result::Result<(), MetaError> {
    let mut valid = meta.watch_heartbeat();
    let known = async {
        tokio::select! {
            _ = valid.wait_for(Option::is_some) => Ok(()),
            error = meta.ended() => Err(error),
        }
    };
    let mut known = std::pin::pin!(known);
    if let Ok(known) = tokio::time::timeout(REACH_REPORTED_AFTER, &mut known).await {
        return known;
    }
    eprintln!(
        "penstock: waiting for the cluster: no metadata leader has answered yet; others reach this node at \
         {}; if they have new addresses too, start it with --peer ADDRESS, an address that one of them has \
         now",
        settings.control()
    );
    known.await
}

#[cfg(test)]
mod tests {
    use super::*;
    use config::Peers;

    /// At an address of documentation (RFC 5737), which belongs to no card.
    fn told(transport: Transport, wire: Wire) -> Result<Offered> {
        let mut settings = Settings::new(&Peers {
            listen: Some([192, 0, 2, 1].into()),
            ..Peers::default()
        })?;
        (settings.transport, settings.wire) = (transport, wire);
        pairs(&settings)
    }

    #[test]
    fn unavailable_rdma_is_an_error_if_required_and_a_note_if_not() {
        for wire in [Wire::Tls, Wire::Crc] {
            let refused = told(Transport::Rdma, wire).unwrap_err();
            assert!(
                refused.to_string().contains("transport is rdma"),
                "{refused}"
            );
            for transport in [Transport::Auto, Transport::Tcp] {
                let Ok(Offered::No(reason)) = told(transport, wire) else {
                    panic!("{transport:?} with {wire:?} starts without RDMA")
                };
                assert!(!reason.is_empty());
            }
        }
        let encrypted = told(Transport::Rdma, Wire::Tls).unwrap_err();
        assert!(encrypted.to_string().contains("encrypted"), "{encrypted}");
    }
}
