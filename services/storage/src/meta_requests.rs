//! What the data path asks of meta: replicas to be taken out, and taken in.

use std::collections::{HashSet, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use fabric::MetaRequest;
use fabric_types::{Epoch, NodeId, PgId};
use meta::{ClusterMap, GroupId, Member, Meta, ReplicaState};
use tokio::sync::Notify;
use tokio::task::JoinSet;

use crate::cluster_map::device_of;

/// Most questions that wait. Each is about another group and replica, so no cluster has more; one too many is
/// dropped, and said again with the next map.
const WAITING_MAX: usize = 1 << 17;
/// Questions under way at a time. Each may wait for seconds until the leader has heard of another replica.
const UNDER_WAY_MAX: usize = 64;
/// Pause before a question that was not granted is asked again, as long as its reason is there.
const PAUSE: Duration = Duration::from_millis(250);

/// One that is not granted is told of in the log, and then none of the others for so long: a thousand groups
/// may have one reason.
const REPORT_INTERVAL: Duration = Duration::from_secs(5);

/// Questions that wait to be asked. The data path puts them in, and never waits.
#[derive(Default)]
pub struct MetaRequests {
    waiting: Mutex<WaitingRequests>,
    more: Notify,
}

#[derive(Default)]
struct WaitingRequests {
    queue: VecDeque<MetaRequest>,
    /// Those in the queue and those under way.
    known: HashSet<MetaRequest>,
    reported_at: Option<Instant>,
}

impl MetaRequests {
    fn lock(&self) -> MutexGuard<'_, WaitingRequests> {
        // The two are changed together, and neither can fail.
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a question, unless it is known already.
    pub fn put(&self, ask: MetaRequest) {
        let mut waiting = self.lock();
        if waiting.known.len() < WAITING_MAX && waiting.known.insert(ask) {
            waiting.queue.push_back(ask);
            drop(waiting);
            self.more.notify_one();
        }
    }

    fn take(&self) -> Option<MetaRequest> {
        self.lock().queue.pop_front()
    }

    fn done(&self, ask: &MetaRequest) {
        self.lock().known.remove(ask);
    }

    /// One is not granted: of how many the log is to tell, if it is to.
    fn tell(&self, now: Instant) -> Option<usize> {
        let mut waiting = self.lock();
        let is_due = |told: Instant| now.duration_since(told) >= REPORT_INTERVAL;
        if !waiting.reported_at.is_none_or(is_due) {
            return None;
        }
        waiting.reported_at = Some(now);
        Some(waiting.known.len())
    }
}

/// Asks for as long as the task lives.
pub async fn serve(asks: Arc<MetaRequests>, meta: Meta) {
    let mut under_way = JoinSet::new();
    loop {
        while under_way.len() < UNDER_WAY_MAX
            && let Some(ask) = asks.take()
        {
            let (asks, meta) = (Arc::clone(&asks), meta.clone());
            under_way.spawn(async move {
                request_until_done(&asks, &meta, &ask).await;
                asks.done(&ask);
            });
        }
        tokio::select! {
            () = asks.more.notified(), if under_way.len() < UNDER_WAY_MAX => {}
            Some(_) = under_way.join_next() => {}
        }
    }
}

/// Asks until it is granted, or its reason is gone.
async fn request_until_done(asks: &MetaRequests, meta: &Meta, ask: &MetaRequest) {
    loop {
        let member = {
            let map = meta.map();
            reason(&map, ask, meta).cloned()
        };
        let Some(member) = member else { return };
        let refused = match *ask {
            MetaRequest::ReportFailed { pg, epoch, .. }
            | MetaRequest::ReportSlow { pg, epoch, .. } => {
                let report =
                    meta.report_failed(group(pg), member.device, member.incarnation, epoch);
                report.await.err()
            }
            MetaRequest::Promote { pg, since } => {
                let promote =
                    meta.promote_member(group(pg), member.device, member.incarnation, since);
                promote.await.err()
            }
        };
        let Some(error) = refused else { return };
        match asks.tell(Instant::now()) {
            Some(waiting) => {
                let what = what_is_asked(ask);
                tracing::info!(%error, waiting, "the metadata leader does not yet do what is asked: {what}");
            }
            None => tracing::debug!(?ask, %error, "not granted yet"),
        }
        tokio::time::sleep(PAUSE).await;
    }
}

fn what_is_asked(ask: &MetaRequest) -> String {
    let (pg, what) = match ask {
        MetaRequest::ReportFailed { pg, .. } => (pg, "take out a replica that does not answer"),
        MetaRequest::ReportSlow { pg, .. } => (pg, "take out a replica that is slow"),
        MetaRequest::Promote { pg, .. } => (pg, "count a replica here as in sync"),
    };
    format!("{what}, of placement group {}", group(*pg))
}

fn group(pg: PgId) -> GroupId {
    GroupId::from_u64(pg.base().0)
}

/// The member that a question is about, if the map still gives reason for it.
fn reason<'a>(map: &'a ClusterMap, ask: &MetaRequest, meta: &Meta) -> Option<&'a Member> {
    let own = (meta.node_id(), meta.incarnation());
    match *ask {
        MetaRequest::ReportFailed { pg, node, epoch } => failed(map, pg, node, epoch),
        // It is said once for as long as the replica is slow.
        MetaRequest::ReportSlow { pg, node, epoch } => receiving(map, pg, node, epoch),
        MetaRequest::Promote { pg, since } => compared(map, pg, since, own),
    }
}

/// A member that was sent writes under the map of the reporter, and still is.
fn receiving(map: &ClusterMap, pg: PgId, node: NodeId, epoch: Epoch) -> Option<&Member> {
    let device = device_of(map, group(pg), node)?;
    let member = map.group(group(pg))?.member(device)?;
    (member.is_receiving() && member.since.0 <= epoch.0).then_some(member)
}

/// The same, and it is the one that the reporter meant. On a node of several devices the name may have been
/// another one's by an older map; the data path says again by the newer one what has failed.
fn failed(map: &ClusterMap, pg: PgId, node: NodeId, epoch: Epoch) -> Option<&Member> {
    let member = receiving(map, pg, node, epoch)?;
    let group = map.group(group(pg))?;
    let devices = map.devices().filter(|other| other.node == member.node);
    let may_be_another = epoch.0 < group.epoch.0 && devices.count() > 1;
    (!may_be_another).then_some(member)
}

/// The member of this start of this node that has been syncing since then.
fn compared(
    map: &ClusterMap,
    pg: PgId,
    since: Epoch,
    own: (NodeId, meta::Incarnation),
) -> Option<&Member> {
    let mut members = map.group(group(pg))?.members.iter();
    members.find(|member| {
        (member.node, member.incarnation) == own
            && member.state == ReplicaState::Syncing
            && member.since.0 == since.0
    })
}

#[cfg(test)]
mod tests {
    use meta::{Command, DeviceId, UnixMillis};

    use super::*;
    use crate::cluster_map::tests::coming;

    fn ask(epoch: u64) -> MetaRequest {
        MetaRequest::ReportFailed {
            pg: PgId(1 << 32),
            node: NodeId(2),
            epoch: Epoch(epoch),
        }
    }

    #[test]
    fn a_question_is_asked_once_at_a_time() {
        let asks = MetaRequests::default();
        asks.put(ask(1));
        asks.put(ask(1));
        asks.put(ask(2));
        assert_eq!(asks.take(), Some(ask(1)));
        asks.put(ask(1));
        assert_eq!(asks.take(), Some(ask(2)));
        assert_eq!(asks.take(), None, "the first is under way still");
        asks.done(&ask(1));
        asks.put(ask(1));
        assert_eq!(asks.take(), Some(ask(1)));
    }

    #[test]
    fn of_many_that_are_not_granted_the_log_tells_once_in_a_while() {
        let asks = MetaRequests::default();
        (1..=3).for_each(|epoch| asks.put(ask(epoch)));
        let start = Instant::now();
        assert_eq!(asks.tell(start), Some(3));
        assert_eq!(asks.tell(start + REPORT_INTERVAL / 2), None);
        asks.done(&ask(1));
        assert_eq!(asks.tell(start + REPORT_INTERVAL), Some(2));
    }

    #[test]
    fn report_about_a_device_does_not_apply_to_its_replacement() {
        let (old, new) = (DeviceId(3), DeviceId(4));
        let mut machine = coming();
        let map = machine.map();
        let moving = |map: &ClusterMap| {
            let mut groups = map.groups();
            let group = groups.find(|group| group.member(new).is_some());
            group.expect("one is coming").clone()
        };
        let before = moving(&map);
        let pg = PgId(before.id().to_u64());
        let node = NodeId(3);
        let failed = |map: &ClusterMap, node: NodeId, epoch: Epoch| {
            let member = failed(map, pg, node, epoch);
            member.map(|member| member.device)
        };
        assert_eq!(failed(&map, node, before.epoch), Some(old));
        assert_eq!(failed(&map, node.incoming(), before.epoch), Some(new));
        let member = before.member(new).expect("it is coming");
        let promote = Command::Promote {
            group: before.id(),
            device: new,
            incarnation: member.incarnation,
            since: member.since,
            at: UnixMillis(0),
        };
        machine.apply(&promote).unwrap();
        let map = machine.map();
        let after = moving(&map);
        assert_eq!(
            failed(&map, node, before.epoch),
            None,
            "that was the old one"
        );
        assert_eq!(failed(&map, node, after.epoch), Some(new));
    }
}
