//! The node at a glance.

use api::failure::{Failure, Kind, Result};
use api::types::{AttachmentState, ConfigOrigin, ConfigValue, PeerTransport, Status};
use config::identity::Identity;
use config::{Origin, StoreKind, Value};
use service::view::is_listed;
use service::waiting::blocking;

use super::node::Node;

impl Node {
    /// What it goes by, and where each value comes from.
    pub async fn configuration(&self) -> Result<Vec<ConfigValue>> {
        let data = self.config().data.clone();
        let identity = blocking(move || Identity::load(&data)).await?;
        let settings = identity.map(|identity| {
            let kept = identity.record.settings;
            kept.with(&self.config().peers)
        });
        let values = self.config().in_force(settings.as_ref()).into_iter();
        Ok(values.map(shown).collect())
    }

    /// The node at a glance. Waits for no leader.
    pub async fn status(&self) -> Result<Status> {
        let health = self.health.health().await?;
        let map = self.cluster.meta.map();
        let cluster = map.cluster().ok_or_else(|| {
            Failure::new(
                Kind::Failed,
                "this node knows no cluster yet",
                "wait until it has joined one",
            )
        })?;
        let volumes = self.cluster.meta.applied().volumes();
        let volumes = volumes.map_err(service::failures::meta_failure)?;
        let attached = self.attachments.as_applied().await?;
        let connected = |a: &&_| is_connected(a);
        let devices = self.storage.storage.local();
        let roles = map
            .node(self.cluster.meta.node_id())
            .map(|node| &node.roles);
        Ok(Status {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            is_starting: false,
            cluster_id: cluster.uuid.to_string(),
            feature_level: cluster.level.0,
            roles: roles
                .into_iter()
                .flatten()
                .map(meta::Role::to_string)
                .collect(),
            data: self.config().data.clone(),
            pid: std::process::id(),
            uptime_s: self.health.uptime().as_secs(),
            store: match self.config().store == StoreKind::Null {
                false => "file",
                true => "null",
            }
            .to_owned(),
            threads: self.config().threads,
            open_files_max: sandbox::limits::open_files_max(),
            volumes: volumes.iter().filter(|v| is_listed(v)).count(),
            guests: attached.iter().filter(connected).count(),
            attachments: attached.len(),
            capacity_bytes: devices.iter().map(|d| d.capacity_bytes).sum(),
            used_bytes: devices.iter().map(|d| d.used_bytes).sum(),
            privileges: sandbox::in_force(
                self.config().privileges.user.as_ref(),
                &self.config().confinement,
            ),
            block_devices: attachments::interface(),
            recovery: self.recovery().to_vec(),
            transports: self.transports(),
            health,
        })
    }
}

impl Node {
    fn transports(&self) -> Vec<PeerTransport> {
        let map = self.cluster.meta.map();
        let name = |node: fabric_types::NodeId| map.node_name(node.base());
        // A node that was removed is no peer any more, though connections to it may be left.
        let peer_routes = self.storage.storage.fabric().peer_routes().into_iter();
        let peer_routes = peer_routes.filter(|(node, _)| map.node(node.base()).is_some());
        let told = peer_routes.map(|(node, way)| PeerTransport {
            node: name(node),
            rdma: way.rdma,
            tcp: way.tcp,
            why_not_rdma: way.why_not,
        });
        told.collect()
    }
}

fn is_connected(attachment: &api::types::Attachment) -> bool {
    attachment.state == AttachmentState::Connected
}

fn shown(value: Value) -> ConfigValue {
    let Value { key, value, origin } = value;
    let (origin, file) = match origin {
        Origin::Option => (ConfigOrigin::Option, None),
        Origin::Variable => (ConfigOrigin::Variable, None),
        Origin::File(file) => (ConfigOrigin::File, Some(file)),
        Origin::Node => (ConfigOrigin::Node, None),
        Origin::Default => (ConfigOrigin::Default, None),
    };
    ConfigValue {
        key,
        // JSON supports all values of a configuration file: text, numbers, lists and tables.
        value: serde_json::to_value(value).unwrap_or_default(),
        origin,
        file,
    }
}
