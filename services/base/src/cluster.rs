//! The cluster as a service reads and changes it.

use std::time::Duration;

use api::failure::Result;
use config::SpaceWarnings;
use meta::{Confirmed, LeaderReport, Meta, NodeId};

use crate::failures::meta_failure;
use crate::view::View;

/// The leader's memory is asked for this long; what it would add is left out then.
pub const REPORT_WAIT_MAX: Duration = Duration::from_millis(800);
/// A request of a person waits this long for metadata without a leader. Several times the duration of an
/// election.
pub const PEOPLE_WAIT_MAX: Duration = Duration::from_secs(5);

/// Handle of the cluster's metadata.
#[derive(Clone)]
pub struct Cluster {
    /// Waits for a leader as long as necessary.
    pub meta: Meta,
    /// Waits [`PEOPLE_WAIT_MAX`] for a leader: for requests of people.
    pub asked: Meta,
    /// This node has a network. A node without one is the only node of its cluster.
    pub has_network: bool,
    space_warnings: SpaceWarnings,
}

impl Cluster {
    /// The cluster of the node whose metadata client is `meta`.
    pub fn new(meta: Meta, has_network: bool, space_warnings: SpaceWarnings) -> Self {
        Self {
            asked: meta.within(PEOPLE_WAIT_MAX),
            meta,
            has_network,
            space_warnings,
        }
    }

    /// This node.
    pub fn node_id(&self) -> NodeId {
        self.meta.node_id()
    }

    /// Name of this node; its number until the cluster knows the name.
    pub fn node_name(&self) -> String {
        let (map, id) = (self.meta.map(), self.meta.node_id());
        map.node(id).map_or(id.to_string(), |n| n.name.to_string())
    }

    /// Metadata client for lists: without a leader its answers may be old.
    pub fn list_reader(&self) -> Meta {
        self.asked.or_last_known()
    }

    /// The cluster as it is now: contains everything acknowledged before. Waits for a leader.
    pub async fn view(&self) -> Result<View> {
        self.view_by(&self.asked).await
    }

    /// The cluster as `reader` reads it.
    pub async fn view_by(&self, reader: &Meta) -> Result<View> {
        let volumes = reader.list_volumes().await.map_err(meta_failure)?;
        let report = match reader.confirmed() {
            Confirmed::Now => self.leader_report().await,
            Confirmed::Ago(_) | Confirmed::BeforeStart => LeaderReport::default(),
        };
        let view = View {
            volumes,
            ..self.applied(report)?
        };
        self.with_events(view)
    }

    /// The cluster as this node has applied it, to find problems. Waits for nobody.
    pub fn view_as_applied(&self, report: LeaderReport) -> Result<View> {
        let view = self.applied(report)?;
        match view.is_well() {
            // Events only say since when a problem exists, and there are many.
            true => Ok(view),
            false => self.with_events(view),
        }
    }

    /// Like [`view_as_applied`](Self::view_as_applied), without events.
    pub fn applied(&self, report: LeaderReport) -> Result<View> {
        let applied = self.meta.applied();
        Ok(View {
            map: self.meta.map(),
            volumes: applied.volumes().map_err(meta_failure)?,
            attachments: applied.attachments().map_err(meta_failure)?,
            events: Vec::new(),
            report,
            raft: self.meta.raft_status(),
            space_warnings: self.space_warnings,
        })
    }

    fn with_events(&self, view: View) -> Result<View> {
        let events = self.meta.applied().events(0, usize::MAX);
        Ok(View {
            events: events.map_err(meta_failure)?,
            ..view
        })
    }

    /// Reports of nodes to the leader; empty if the leader does not answer soon.
    pub async fn leader_report(&self) -> LeaderReport {
        let asked = tokio::time::timeout(REPORT_WAIT_MAX, self.meta.leader_report()).await;
        match asked {
            Ok(Ok(report)) => report,
            Ok(Err(_)) | Err(_) => LeaderReport::default(),
        }
    }
}
