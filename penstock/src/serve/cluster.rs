//! How a node looks at the cluster.

use std::time::Duration;

use api::failure::Result;
use meta::{Confirmed, LeaderReport, Meta};
use service::failures::meta_failure;
use service::view::View;

use super::node::Node;

/// The leader's memory is asked for this long; what it would add is left out then.
pub const REPORT_WAIT_MAX: Duration = Duration::from_millis(800);
impl Node {
    /// Whoever lists things reads by this: what it tells may be old while there is no leader.
    pub fn list_reader(&self) -> Meta {
        self.asked.or_last_known()
    }

    /// The cluster as it is now, for people: everything acknowledged before is seen. Waits for a leader.
    pub(super) async fn view(&self) -> Result<View> {
        self.view_by(&self.asked).await
    }

    /// The same, as this client reads it.
    pub(super) async fn view_by(&self, reader: &Meta) -> Result<View> {
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

    /// The cluster as this node has applied it, to tell what is wrong with it. Waits for nobody.
    pub(super) fn view_as_applied(&self, report: LeaderReport) -> Result<View> {
        let view = self.applied(report)?;
        match view.is_well() {
            // They tell since when something is wrong, and are many.
            true => Ok(view),
            false => self.with_events(view),
        }
    }

    /// The same without events.
    pub(super) fn applied(&self, report: LeaderReport) -> Result<View> {
        let applied = self.meta.applied();
        Ok(View {
            map: self.meta.map(),
            volumes: applied.volumes().map_err(meta_failure)?,
            attachments: applied.attachments().map_err(meta_failure)?,
            events: Vec::new(),
            report,
            raft: self.meta.raft_status(),
            is_alone: self.membership.is_none(),
            space_warnings: self.config().space_warnings,
        })
    }

    fn with_events(&self, view: View) -> Result<View> {
        let events = self.meta.applied().events(0, usize::MAX);
        Ok(View {
            events: events.map_err(meta_failure)?,
            ..view
        })
    }

    /// What the leader has heard; nothing if it does not answer soon.
    pub(super) async fn leader_report(&self) -> LeaderReport {
        let asked = tokio::time::timeout(REPORT_WAIT_MAX, self.meta.leader_report()).await;
        match asked {
            Ok(Ok(report)) => report,
            Ok(Err(_)) | Err(_) => LeaderReport::default(),
        }
    }
}
