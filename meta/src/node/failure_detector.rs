//! The shell around [`Watch`]: heartbeats sent and taken, leadership confirmed, plans proposed.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::watch;
use tokio::time::timeout;

use super::Core;
use super::report::NodeReports;
use crate::client::Meta;
use crate::command::{Command, Heard, NodeSpec, Outcome};
use crate::error::MetaError;
use crate::ids::{DeviceId, Incarnation, NodeId, UnixMillis};
use crate::level::Level;
use crate::model::GroupId;
use crate::net::{HeartbeatReply, ProposeError};
use crate::report::NodeReport;
use crate::watch::{HEARTBEAT_INTERVAL, HEARTBEAT_LEASE, WITNESS_WAIT_MAX, Watch, has_witness};

/// The leader confirms its leadership and plans this often.
const PLAN_INTERVAL: Duration = Duration::from_millis(250);
/// When the map changed there may be something to do at once: then it plans after this pause, in which more
/// changes come.
const PLAN_PAUSE: Duration = Duration::from_millis(20);
/// A leader that finds no majority in this time does not count as one.
const CONFIRM_WAIT_MAX: Duration = Duration::from_secs(1);
/// A heartbeat without an answer for this long is given up, and the next one sent.
const BEAT_WAIT_MAX: Duration = Duration::from_secs(1);

/// What a node knows from heartbeats, its own and those of others.
pub(crate) struct FailureDetector {
    /// The beginning of the watch's time.
    origin: Instant,
    leading: Mutex<Leading>,
    /// Counts the heartbeats that came in.
    heard: watch::Sender<u64>,
    /// Until when this node may serve.
    valid_until: watch::Sender<Option<Instant>>,
}

#[derive(Default)]
pub(super) struct Leading {
    pub(super) watch: Watch,
    /// What nodes said of themselves.
    pub(super) words: NodeReports,
    /// The term in which this node leads.
    term: Option<u64>,
    /// When it last asked a majority that confirmed it.
    confirmed: Option<Instant>,
}

impl Default for FailureDetector {
    fn default() -> Self {
        Self {
            origin: Instant::now(),
            leading: Mutex::default(),
            heard: watch::Sender::default(),
            valid_until: watch::Sender::default(),
        }
    }
}

impl FailureDetector {
    pub(super) fn lock(&self) -> MutexGuard<'_, Leading> {
        // A panic between two statements leaves at worst a heartbeat uncounted.
        self.leading.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn since_origin(&self, moment: Instant) -> Duration {
        moment.saturating_duration_since(self.origin)
    }

    /// A majority confirmed that this node leads in `term`; it was asked at `asked`.
    fn confirmed(&self, term: u64, asked: Instant) {
        let mut leading = self.lock();
        if leading.term != Some(term) {
            leading.term = Some(term);
            let now = self.since_origin(asked);
            leading.watch.lead(now);
            leading.words.clear();
        }
        leading.confirmed = Some(asked);
        drop(leading);
        // Reports wait for a leader to be sure of itself, too.
        self.heard
            .send_modify(|count| *count = count.wrapping_add(1));
    }

    /// For how long this node has led, and who was heard of in the last `span`; nothing if it does not lead.
    pub(super) fn heard_as_leader(&self, span: Duration) -> Option<(Duration, Vec<NodeId>)> {
        let now = self.since_origin(Instant::now());
        let leading = self.lock();
        let led_for = leading.watch.led_for(now)?;
        let heard = leading.watch.heard_since(now.saturating_sub(span));
        Some((led_for, heard.into_iter().map(|one| one.node).collect()))
    }

    /// The term in which this node leads, if it does.
    pub(super) fn leading_term(&self) -> Option<u64> {
        let leading = self.lock();
        leading.term.filter(|_| leading.watch.leads())
    }

    fn deposed(&self) {
        *self.lock() = Leading::default();
    }

    /// Keeps a node's word in place of its last, or forgets it; false if this node does not lead.
    pub(super) fn keep_word(&self, node: NodeId, word: NodeReport, is_known: bool) -> bool {
        let mut leading = self.lock();
        if !leading.watch.leads() {
            return false;
        }
        match is_known {
            true => leading.words.insert(node, (Instant::now(), word)),
            false => leading.words.remove(&node),
        };
        true
    }

    /// Takes a heartbeat. How long ago this node was confirmed to lead, if it does.
    fn take(
        &self,
        node: NodeId,
        incarnation: Incarnation,
        level: Level,
        now: Instant,
    ) -> Option<Duration> {
        let mut leading = self.lock();
        let confirmed = leading.confirmed?;
        let at = self.since_origin(now);
        leading.watch.heard(node, incarnation, at);
        leading.watch.note_level(node, incarnation, level);
        drop(leading);
        self.heard
            .send_modify(|count| *count = count.wrapping_add(1));
        Some(now.saturating_duration_since(confirmed))
    }
}

impl Core {
    pub(crate) fn valid_until(&self) -> watch::Receiver<Option<Instant>> {
        self.failure_detector.valid_until.subscribe()
    }

    /// The leader's side of a heartbeat.
    pub(crate) fn beat_here(
        &self,
        node: NodeId,
        incarnation: Incarnation,
        level: Level,
    ) -> Result<HeartbeatReply, ProposeError> {
        let taken = self
            .failure_detector
            .take(node, incarnation, level, Instant::now());
        let Some(confirmed_ago) = taken else {
            let leader = self.raft.metrics().borrow().current_leader;
            let leader = leader.filter(|leader| *leader != self.id);
            return Err(ProposeError::NotLeader { leader });
        };
        let map = self.map.borrow();
        let known = map.node(node);
        Ok(HeartbeatReply {
            is_known: known.is_some_and(|node| node.incarnation == incarnation),
            confirmed_ago_ms: u64::try_from(confirmed_ago.as_millis()).unwrap_or(u64::MAX),
        })
    }

    /// Adds to a client's report what only the leader knows: who has been heard of since it came in.
    pub(super) async fn find_witness(&self, command: Command) -> Command {
        let Command::ReportFailed {
            group,
            device,
            incarnation,
            epoch,
            at,
            ..
        } = command
        else {
            return command;
        };
        let arrived = Instant::now();
        self.note_report(group, device);
        let mut beats = self.failure_detector.heard.subscribe();
        let heard = loop {
            let (heard, leads) = self.witnesses(arrived);
            let suffices = has_witness(&self.map.borrow(), group, device, &heard);
            let left = WITNESS_WAIT_MAX.saturating_sub(arrived.elapsed());
            if suffices || !leads || left.is_zero() {
                break heard;
            }
            // The end of the wait is seen above; the sender lives in `self`.
            let _ = timeout(left, beats.changed()).await;
        };
        Command::ReportFailed {
            group,
            device,
            incarnation,
            epoch,
            heard,
            at,
        }
    }

    /// The watch is told of a report.
    fn note_report(&self, group: GroupId, device: DeviceId) {
        let map = Arc::clone(&self.map.borrow());
        let mut leading = self.failure_detector.lock();
        leading.watch.member_reported(&map, group, device);
    }

    /// Who is known to live at or after a moment, and whether this node leads, or is about to.
    fn witnesses(&self, moment: Instant) -> (Vec<Heard>, bool) {
        let (mut heard, mut leads) = {
            let leading = self.failure_detector.lock();
            let heard = leading
                .watch
                .heard_since(self.failure_detector.since_origin(moment));
            (heard, leading.watch.leads())
        };
        if leads {
            // The leader need not tell itself that it lives.
            heard.retain(|one| one.node != self.id);
            heard.push(Heard {
                node: self.id,
                incarnation: self.incarnation,
            });
        } else {
            // Elected, and not confirmed yet.
            leads = self.raft.metrics().borrow().current_leader == Some(self.id);
        }
        (heard, leads)
    }

    /// One round of the watch.
    async fn watch_once(self: &Arc<Self>) {
        if self.follow_hearing().await {
            self.failure_detector.deposed();
            return;
        }
        let asked = Instant::now();
        let confirmed = timeout(CONFIRM_WAIT_MAX, self.read_index_here()).await;
        if !matches!(confirmed, Ok(Ok(_))) {
            self.failure_detector.deposed();
            return;
        }
        let term = self.raft.metrics().borrow().current_term;
        self.failure_detector.confirmed(term, asked);
        let commands = {
            let map = Arc::clone(&self.map.borrow());
            let now = self.failure_detector.since_origin(Instant::now());
            let mut leading = self.failure_detector.lock();
            leading.watch.plan(&map, now, UnixMillis::now())
        };
        for command in commands {
            match self.propose_here(command).await {
                Ok(Ok(Outcome::Regrouped { granted, refused })) => {
                    tracing::info!(granted, refused = refused.len(), "placement groups changed");
                }
                Ok(Ok(_)) => {}
                // The map moved on since it was planned.
                Ok(Err(refusal)) => tracing::debug!(%refusal, "a plan came too late"),
                Err(_) => return,
            }
        }
    }

    /// Sends one heartbeat, and registers this start of the process if the leader does not know it.
    async fn beat_once(self: &Arc<Self>, spec: &NodeSpec) -> Result<(), MetaError> {
        let sent = Instant::now();
        let answer = timeout(
            BEAT_WAIT_MAX,
            self.beat(spec.id, spec.incarnation, spec.level),
        )
        .await;
        let Ok(beat) = answer else {
            // The leader may be elsewhere now, or not reach this node to say that it leads. The next
            // heartbeat does not wait for the search.
            self.leader_wanted.notify_one();
            return Ok(());
        };
        let beat = beat?;
        let confirmed_ago = Duration::from_millis(beat.confirmed_ago_ms);
        // The leader's word is as old as its own confirmation.
        let until = sent + HEARTBEAT_LEASE.saturating_sub(confirmed_ago);
        if beat.is_known {
            self.failure_detector.valid_until.send_if_modified(|known| {
                let later = known.is_none_or(|known| known < until);
                if later {
                    *known = Some(until);
                }
                later
            });
            return Ok(());
        }
        Meta::new(Arc::clone(self))
            .register_node(spec.clone())
            .await?;
        Ok(())
    }
}

/// Plans as long as the node lives.
pub(super) async fn watch(core: Arc<Core>) {
    let mut map = core.map.clone();
    let mut lead = core.raft.server_metrics();
    loop {
        core.watch_once().await;
        // Marked as seen before it is looked at: what changes meanwhile is not overslept.
        let changed = tokio::select! {
            changed = map.changed() => changed,
            // Who is elected learns at once who lives: guests' writes may wait for that.
            changed = lead.changed() => changed,
            () = tokio::time::sleep(PLAN_INTERVAL) => Ok(()),
        };
        if changed.is_err() {
            // The database is closed, and the node with it.
            return;
        }
        tokio::time::sleep(PLAN_PAUSE).await;
    }
}

/// Sends heartbeats as long as the node lives.
pub(super) async fn beat(core: Arc<Core>, spec: NodeSpec) {
    let mut ticks = tokio::time::interval(HEARTBEAT_INTERVAL);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut told = false;
    loop {
        ticks.tick().await;
        match core.beat_once(&spec).await {
            Ok(()) => told = false,
            Err(MetaError::Stopped) => return,
            Err(error) if core.note_unwanted(&error) => return,
            // Said once: it is repeated until it goes well.
            Err(error) if !told => {
                told = true;
                tracing::warn!(%error, "cannot tell the metadata leader that this node lives");
            }
            Err(_) => {}
        }
    }
}
