//! What is wrong, since when, what is being done about it, and how long that takes. Answers soon whatever
//! hangs: what does not answer is itself told.

use std::sync::Arc;
use std::time::{Duration, Instant};

use api::failure::Result;
use api::moment::Moment;
use api::types::{self, HealthState, Problem};
use meta::{HEARTBEAT_LEASE, NodeId, NodeReport, ProblemReport, RaftStatus};
use service::Service;
use service::cluster::Cluster;
use service::code::Code;
use service::found::Found;
use service::pace::{LOOK_PAUSE, Paces};
use service::view::{View, work};
use storage::{Devices, Storage};

use crate::cluster;
use crate::monitor::Monitor;
use crate::notices::Notices;

/// A node's report that does not reach the leader within this is sent again later.
const TELL_WAIT_MAX: Duration = Duration::from_secs(2);
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

/// Health of the node and of the cluster.
pub struct Health {
    pub(crate) cluster: Cluster,
    pub(crate) storage: Arc<Storage>,
    pub(crate) devices: Arc<Devices>,
    paces: Arc<Paces>,
    /// Services whose problems and figures are shown, in order.
    pub(crate) services: Vec<Arc<dyn Service>>,
    pub(crate) monitor: Monitor,
    pub(crate) notices: Notices,
    started: Instant,
}

impl Health {
    /// Health of a node that runs `services`.
    pub fn new(
        cluster: Cluster,
        (storage, devices): (Arc<Storage>, Arc<Devices>),
        paces: Arc<Paces>,
        services: Vec<Arc<dyn Service>>,
    ) -> Self {
        Self {
            cluster,
            storage,
            devices,
            paces,
            services,
            monitor: Monitor::default(),
            notices: Notices::default(),
            started: Instant::now(),
        }
    }

    /// Time since the start.
    pub fn uptime(&self) -> Duration {
        self.started.elapsed()
    }

    /// Checks every few seconds while `self` is held: records events, and reports the state of this node to
    /// the leader, so that any node can show it.
    pub(crate) fn keep(self: &Arc<Self>) {
        let weak = Arc::downgrade(self);
        tokio::spawn(async move {
            let mut has_failed = false;
            while let Some(health) = weak.upgrade() {
                match health.look().await {
                    Ok(()) => has_failed = false,
                    // Logged once: it is repeated.
                    Err(failure) if !has_failed => {
                        has_failed = true;
                        tracing::warn!(%failure, "failed to check the health of the node");
                    }
                    Err(_) => {}
                }
                drop(health);
                tokio::time::sleep(LOOK_PAUSE).await;
            }
        });
    }

    async fn look(self: &Arc<Self>) -> Result<()> {
        let report = self.cluster.leader_report().await;
        let view = self.cluster.view_as_applied(report)?;
        self.paces.note(&work(&view), Instant::now());
        self.monitor
            .remember_devices(self.devices.reported_space(&view));
        let local = self.health_of(&view).await.local;
        // Without a leader nothing is kept; that must not hold up what follows.
        let kept = tokio::time::timeout(TELL_WAIT_MAX, self.keep_notices(&view, &local)).await;
        if let Ok(Err(failure)) = kept {
            tracing::warn!(%failure, "keep what was noticed as events");
        }
        let problem = |found: Found| ProblemReport {
            code: found.problem.code,
            what: found.problem.what,
            since: found.problem.since.map(Moment::to_millis),
            doing: found.problem.doing,
        };
        let word = NodeReport {
            devices: self.devices.device_words(&view.map),
            problems: local.into_iter().map(problem).collect(),
        };
        // Without a leader nobody would tell of it anyway.
        let _ = tokio::time::timeout(TELL_WAIT_MAX, self.cluster.meta.tell(word)).await;
        Ok(())
    }

    /// What is wrong, and what goes on.
    pub async fn health(self: &Arc<Self>) -> Result<types::Health> {
        let view = self
            .cluster
            .view_as_applied(self.cluster.leader_report().await)?;
        let wrong = self.health_of(&view).await;
        let problems = wrong.local.into_iter().chain(wrong.cluster);
        let problems: Vec<Problem> = problems.map(|found| found.problem).collect();
        Ok(types::Health {
            state: match problems.is_empty() {
                true => HealthState::Ok,
                false => HealthState::Degraded,
            },
            problems,
            background_jobs: shown(wrong.background_jobs),
            notices: shown(wrong.notices),
        })
    }

    /// Problems and jobs, by node and cluster.
    async fn health_of(self: &Arc<Self>, view: &View) -> Problems {
        let looks = self.services.iter().map(|service| {
            let (health, service) = (Arc::clone(self), Arc::clone(service));
            tokio::spawn(async move { health.problems_of(&service).await })
        });
        let mut local = Vec::new();
        for look in looks.collect::<Vec<_>>() {
            match look.await {
                Ok(problems) => local.extend(problems),
                Err(error) => tracing::error!(%error, "failed to ask a service for its problems"),
            }
        }
        let meta = self.cluster.meta.problem();
        let (what, doing) = meta.as_deref().map(split).unzip();
        local.extend(
            what.map(|what| Found::new(Code::MetadataService, "", what, doing.unwrap_or_default())),
        );
        let now = Moment::now();
        let paces = |work| self.paces.of(work);
        let (mut cluster, mut background_jobs) =
            cluster::problems(view, self.cluster.node_id(), now, &paces);
        let (short, mut notices) = cluster::space::short(view, &self.devices.reported_space(view));
        cluster.extend(short);
        notices.extend(cluster::single_voter(view));
        for service in &self.services {
            cluster.extend(service.cluster_problems(view));
        }
        // The reason why the metadata service has stopped is a problem already.
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

    /// Problems that a service reports in time; else those that it reported last.
    async fn problems_of(&self, service: &Arc<dyn Service>) -> Vec<Found> {
        let name = service.name();
        match tokio::time::timeout(service.answers_within(), service.problems()).await {
            Ok(problems) => self.monitor.remember(name, problems),
            // A change is under way, and may wait for metadata: that is then a problem of its own.
            Err(_) => self.monitor.last_of(name),
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
                leader_missed(self.cluster.node_id(), &view.raft, &|id| view.node_name(id))
            ),
            "nothing in the cluster can be changed; guests' I/O goes on until their leases run out, then it \
             waits; start the nodes that are down, or repair the network; other nodes are shown as last \
             known",
        );
        let since = now.to_millis().0.saturating_sub(silent.as_millis() as u64);
        Some(found.since(Some(meta::UnixMillis(since).into())))
    }

    /// How long ago a leader that had a majority heard of this node.
    pub fn leader_silent_for(&self) -> Duration {
        let now = Instant::now();
        match self.cluster.meta.heartbeat_valid_until() {
            Some(until) => {
                HEARTBEAT_LEASE.saturating_sub(until.saturating_duration_since(now))
                    + now.saturating_duration_since(until)
            }
            None => self.started.elapsed(),
        }
    }
}

fn shown(found: Vec<Found>) -> Vec<Problem> {
    found.into_iter().map(|found| found.problem).collect()
}

/// Whom a node misses that hears of no leader.
pub fn leader_missed(here: NodeId, raft: &RaftStatus, name: &dyn Fn(NodeId) -> String) -> String {
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
