//! What is wrong, since when, what is being done about it, and how long that takes. Answers soon whatever
//! hangs: what does not answer is itself told.

mod cluster;

use std::time::{Duration, Instant};

use api::failure::Result;
use api::moment::Moment;
use api::types::{Health, HealthState, Problem};
use config::StoreKind;
use meta::{HEARTBEAT_LEASE, NodeId, RaftStatus};
use service::code::Code;
use service::found::Found;
use service::view::View;
use service::waiting::blocking;

use super::damage::Owners;
use super::nfs::orphans;
use super::node::Node;

/// Devices and attachments are looked at for this long; then it is told that they do not answer.
const LOOK_WAIT_MAX: Duration = Duration::from_millis(800);
/// A leader that this node has not heard of for this long is missed. An election takes less.
const LEADER_MISSED_AFTER: Duration = Duration::from_secs(4);

/// What is wrong, by whose it is.
pub struct Problems {
    /// On this node.
    pub local: Vec<Found>,
    /// In the cluster, and on other nodes.
    pub cluster: Vec<Found>,
    /// What goes on and is not wrong.
    pub background_jobs: Vec<Found>,
    /// What is good to know.
    pub notices: Vec<Found>,
}

impl Node {
    /// What is wrong, and what goes on.
    pub async fn health(&self) -> Result<Health> {
        let view = self.view_as_applied(self.leader_report().await)?;
        let wrong = self.health_of(&view).await;
        let problems = wrong.local.into_iter().chain(wrong.cluster);
        let problems: Vec<Problem> = problems.map(|found| found.problem).collect();
        Ok(Health {
            state: match problems.is_empty() {
                true => HealthState::Ok,
                false => HealthState::Degraded,
            },
            problems,
            background_jobs: shown(wrong.background_jobs),
            notices: shown(wrong.notices),
        })
    }

    /// The same, by whose it is.
    pub(super) async fn health_of(&self, view: &View) -> Problems {
        let (devices, attachments) = tokio::join!(self.device_problems(), self.served_problems());
        let mut local = devices;
        let meta = self.meta.problem();
        let (what, doing) = meta.as_deref().map(split).unzip();
        local.extend(
            what.map(|what| Found::new(Code::MetadataService, "", what, doing.unwrap_or_default())),
        );
        local.extend(attachments);
        local.extend(self.leftover_problems());
        local.extend(self.leases.problems());
        local.extend(self.export_problems());
        let now = Moment::now();
        let paces = |work| self.monitor.pace(work);
        let (mut cluster, mut background_jobs) =
            cluster::problems(view, self.meta.node_id(), now, &paces);
        let (short, mut notices) = cluster::space::short(view, &self.reported_space(view));
        cluster.extend(short);
        notices.extend(cluster::single_voter(view));
        let exports = self.meta.applied().exports().unwrap_or_default();
        cluster.extend(orphans(view, &exports));
        // Of a service that has stopped the reason is told.
        if meta.is_none() {
            cluster.splice(0..0, self.leader_missed(view, now));
        }
        let all = local
            .iter_mut()
            .chain(&mut cluster)
            .chain(&mut background_jobs)
            .chain(&mut notices);
        self.monitor.stamp(all, now);
        Problems {
            local,
            cluster,
            background_jobs,
            notices,
        }
    }

    async fn device_problems(&self) -> Vec<Found> {
        let (storage, map) = (self.storage.clone(), self.meta.map());
        let applied = self.meta.applied();
        let volumes = applied.volumes().unwrap_or_default();
        let filesystems = applied.filesystems().unwrap_or_default();
        let mut owners = Owners::new(&volumes, &filesystems);
        let devices = storage.clone();
        let bad = blocking(move || Ok(devices.bad_blocks()));
        // Devices that do not answer are told below.
        if let Ok(Ok(bad)) = tokio::time::timeout(LOOK_WAIT_MAX, bad).await {
            owners.set_files(self.files_of(&owners.segment_blocks(&bad)).await);
        }
        let look = blocking(move || Ok(storage.problems(&map, &owners)));
        match tokio::time::timeout(LOOK_WAIT_MAX, look).await {
            Ok(Ok(problems)) => problems,
            Ok(Err(failure)) => {
                vec![Found::new(Code::DevicesSilent, "", failure.to_string(), "")]
            }
            Err(_) => vec![Found::new(
                Code::DevicesSilent,
                "",
                "the devices of this node do not answer",
                "look at its log and the kernel's",
            )],
        }
    }

    async fn served_problems(&self) -> Vec<Found> {
        let look = async {
            let mut problems = self.attachment_problems().await;
            problems.extend(self.filesystem_problems().await);
            problems.extend(self.held_problems().await);
            problems
        };
        match tokio::time::timeout(LOOK_WAIT_MAX, look).await {
            Ok(problems) => self.monitor.remember_served(problems),
            // A change is under way, and may wait for metadata: then that is told as well.
            Err(_) => self.monitor.served_before(),
        }
    }

    /// Whether this node hears of no leader.
    fn leader_missed(&self, view: &View, now: Moment) -> Option<Found> {
        let silent = self.leader_silent_for();
        if silent < LEADER_MISSED_AFTER {
            return None;
        }
        let found = Found::new(
            Code::LeaderMissed,
            "",
            format!(
                "this node {}",
                leader_missed(self.meta.node_id(), &view.raft, &|id| view.node_name(id))
            ),
            "nothing in the cluster can be changed; guests' I/O goes on until their leases run out, then it \
             waits; start the nodes that are down, or repair the network; other nodes are shown as last \
             known",
        );
        let since = now.to_millis().0.saturating_sub(silent.as_millis() as u64);
        Some(found.since(Some(meta::UnixMillis(since).into())))
    }

    /// How long ago a leader that had a majority heard of this node.
    pub(super) fn leader_silent_for(&self) -> Duration {
        let now = Instant::now();
        match self.meta.heartbeat_valid_until() {
            Some(until) => {
                HEARTBEAT_LEASE.saturating_sub(until.saturating_duration_since(now))
                    + now.saturating_duration_since(until)
            }
            None => self.uptime(),
        }
    }

    /// Whether this node drops what it is given.
    pub(super) fn is_null(&self) -> bool {
        self.config().store == StoreKind::Null
    }
}

fn shown(found: Vec<Found>) -> Vec<Problem> {
    found.into_iter().map(|found| found.problem).collect()
}

/// Whom a node misses that hears of no leader.
pub(super) fn leader_missed(
    here: NodeId,
    raft: &RaftStatus,
    name: &dyn Fn(NodeId) -> String,
) -> String {
    let voters = raft.voters.iter().map(|id| match *id == here {
        true => format!("{} (this node)", name(*id)),
        false => name(*id),
    });
    let voters: Vec<String> = voters.collect();
    if voters.is_empty() {
        return "has not heard from its cluster yet".to_owned();
    }
    format!(
        "hears of no metadata leader: {} of the {} voters {} must run and reach each other",
        voters.len() / 2 + 1,
        voters.len(),
        voters.join(", ")
    )
}

/// A line "what is wrong; what to do" in its parts.
pub fn split(line: &str) -> (String, String) {
    match line.split_once("; ") {
        Some((what, doing)) => (what.to_owned(), doing.to_owned()),
        None => (line.to_owned(), String::new()),
    }
}
