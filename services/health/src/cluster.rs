//! What is wrong in the cluster, as the map, the log of events and the leader's memory tell it. Pure.

use std::collections::{BTreeMap, BTreeSet};

use api::moment::{Moment, duration};
use api::types::Problem;
use meta::{
    AUTHORITY_GRACE, AdminState, DeviceId, EventKind, Member, NODE_REPLACE_AFTER, Node, NodeId,
    NodeState, PlacementGroup, Pool, ReplicaState, Role, count_devices,
};
use service::code::Code;
use service::found::{Found, Pace, Work};
use service::view::View;

use storage::MAKE_ROOM;

mod capacity;
mod recovery;
pub(super) mod space;
#[cfg(test)]
mod tests;

/// A sync that failed so often in a row is told: once or twice is what a restart looks like.
const FAILURES_REPORTED: u32 = 3;

/// Tells the pace of work.
pub type Paces<'a> = &'a dyn Fn(Work) -> Pace;

/// What is wrong, and what goes on without being wrong. `here` tells by itself what is wrong with it.
pub fn problems(
    view: &View,
    here: NodeId,
    now: Moment,
    paces: Paces<'_>,
) -> (Vec<Found>, Vec<Found>) {
    let mut wrong = Vec::new();
    for node in view.map.nodes().filter(|n| n.state == NodeState::Down) {
        wrong.push(match node.incarnation.has_begun() {
            true => node_down(view, node, now, paces),
            false => not_started(view, node),
        });
    }
    wrong.extend(recovery::choosing(view));
    wrong.extend(voters_lacking(view));
    wrong.extend(devices(view, now));
    let in_use = view.pools_in_use();
    let pools: Vec<&Pool> = view
        .map
        .pools()
        .filter(|p| in_use.contains(&p.id))
        .collect();
    for pool in &pools {
        wrong.extend(pool_waiting(view, pool));
        wrong.extend(pool_degraded(view, pool, paces));
    }
    wrong.extend(capacity::lacking(view));
    wrong.extend(failing(view));
    wrong.extend(words(view, here));
    let mut jobs = background_jobs(view, &pools, paces);
    jobs.extend(recovery::unknown(view));
    (wrong, jobs)
}

/// Nodes that keep the metadata and do not vote yet: until they do, the loss of a node that votes may stop
/// the cluster.
fn voters_lacking(view: &View) -> Option<Found> {
    let (voters, wanted) = (view.raft.voters.len(), meta::voters_wanted(&view.map));
    let is_whole = voters >= wanted && !view.raft.is_changing;
    if wanted < 3 || is_whole {
        return None;
    }
    let votes = |node: &&Node| view.raft.voters.contains(&node.id);
    let names = view.map.nodes().filter(votes);
    let names: Vec<&str> = names.map(|node| node.name.as_str()).collect();
    let what = match view.raft.is_changing {
        true => format!(
            "the metadata voters are being changed to node {}",
            names.join(", ")
        ),
        false => format!(
            "the metadata has {voters} of {wanted} voters: node {}",
            names.join(", ")
        ),
    };
    let doing = "do not stop these nodes yet: others begin to vote by themselves, seconds after they started";
    Some(Found::new(Code::VotersLacking, "", what, doing))
}

/// Two nodes cannot outvote each other, so one of them votes alone, and everything depends on it.
pub fn single_voter(view: &View) -> Option<Found> {
    let raft = &view.raft;
    let may_vote = view
        .map
        .nodes()
        .filter(|node| node.roles.contains(&Role::Meta));
    if raft.is_changing || raft.voters.len() != 1 || may_vote.count() != 2 {
        return None;
    }
    let name = view.node_name(*raft.voters.first()?);
    let what =
        format!("the metadata has one voter, node {name}: without it the whole cluster stops");
    let doing = "let a third node with the role meta in, with `penstock join`: then any one of the three may \
                 fail";
    Some(Found::new(Code::SingleVoter, "", what, doing))
}

/// A node that was let in and has not been heard of yet.
fn not_started(view: &View, node: &Node) -> Found {
    let (id, name) = (node.id, &node.name);
    let since = view.last(|what| matches!(what, EventKind::NodeJoined { node } if *node == id));
    Found::new(
        Code::NodeNotStarted,
        id,
        format!("node {name} has joined and was not started yet"),
        format!("run `penstock serve` there, or forget it with `penstock node remove {name}`"),
    )
    .since(since)
}

fn node_down(view: &View, node: &Node, now: Moment, paces: Paces<'_>) -> Found {
    let name = &node.name;
    let since =
        view.last(|what| matches!(what, EventKind::NodeDown { node: id } if *id == node.id));
    let serves = view.attachments.iter().filter(|a| a.node == node.id);
    let what = match serves.count() {
        0 => format!("node {name} is down"),
        n => format!("node {name} is down, and with it the {n} attachments that it serves"),
    };
    let (doing, pace) = match node.admin_state {
        AdminState::Absent | AdminState::Draining => {
            let left = view.held_by(node.id).left;
            let doing = match left {
                0 => format!(
                    "it holds no data any more; start it, or remove it with `penstock node remove {name}`"
                ),
                _ => format!(
                    "its data are being rebuilt on other nodes, {left} placement groups are left; start it, \
                     or wait"
                ),
            };
            (doing, pace_of(Work::Node(node.id), left, paces))
        }
        AdminState::Active if !node.roles.contains(&Role::Storage) => (
            format!("start it, or forget it with `penstock node remove {name}`"),
            Pace::Unknown,
        ),
        AdminState::Active => away(view, node.id, since, now),
    };
    Found::new(Code::NodeDown, node.id, what, doing)
        .since(since)
        .paced(pace)
}

/// The pace of work; unknown if nothing of it is left.
fn pace_of(work: Work, left: usize, paces: Paces<'_>) -> Pace {
    match left {
        0 => Pace::Unknown,
        _ => paces(work),
    }
}

/// What becomes of the share of a node that is away.
fn away(view: &View, node: NodeId, since: Option<Moment>, now: Moment) -> (String, Pace) {
    let in_use = view.pools_in_use();
    let mut groups = view.map.groups();
    if groups.any(|group| in_use.contains(&group.pool) && is_alone_with(group, node)) {
        let told = "start it: nobody else has all data of some placement groups, whose I/O waits";
        return (told.to_owned(), Pace::Unknown);
    }
    let storage = || view.map.nodes().filter(|node| node.keeps_data());
    let up = storage().filter(|node| node.state == NodeState::Up).count();
    if storage().count() - up >= up {
        let told =
            "start it: with half of the storage nodes away, their data are not rebuilt elsewhere";
        return (told.to_owned(), Pace::Unknown);
    }
    (
        format!("start it: {}", share_goes(since, now)),
        Pace::Unknown,
    )
}

/// Whether a node has the only replica in sync of a group.
fn is_alone_with(group: &PlacementGroup, node: NodeId) -> bool {
    let mut in_sync = group.in_sync();
    in_sync.next().is_some_and(|member| member.node == node) && in_sync.next().is_none()
}

/// When others take the share of what is away since then.
fn share_goes(since: Option<Moment>, now: Moment) -> String {
    let after = NODE_REPLACE_AFTER.as_secs();
    let left = since.map(|since| after.saturating_sub(since.seconds_until(now)));
    match left {
        Some(left @ 1..) => format!("in {} its data are rebuilt elsewhere", duration(left)),
        _ => "its data are about to be rebuilt elsewhere".to_owned(),
    }
}

/// What becomes of the share of a device that its node could not open.
fn gone_without(view: &View, device: DeviceId, since: Option<Moment>, now: Moment) -> String {
    let (served, missing) = count_devices(&view.map);
    let share = match missing >= served {
        true => "with half of the devices missing, their data are not rebuilt elsewhere".to_owned(),
        false => share_goes(since, now),
    };
    format!(
        "bring it back and restart that node; {share}; `penstock device remove {device}` gives it up at once"
    )
}

fn devices(view: &View, now: Moment) -> Vec<Found> {
    let mut found = Vec::new();
    for device in view.map.devices() {
        let (id, path) = (device.id, &device.path);
        let Some(node) = view.map.node(device.node) else {
            continue;
        };
        let name = &node.name;
        if device.state == meta::DeviceState::Failed {
            let since =
                view.last(|w| matches!(w, EventKind::DeviceFailed { device, .. } if *device == id));
            let what = format!("device {path} of node {name} failed");
            let doing = format!(
                "its share is given to other devices; replace the disk, then `penstock device remove {id}`"
            );
            found.push(Found::new(Code::DeviceFailed, id, what, doing).since(since));
        } else if node.state == NodeState::Up && !view.map.is_served(device) {
            let since = view.last(|w| match w {
                EventKind::DeviceOffline { device, .. } => *device == id,
                EventKind::NodeRestarted { node } => *node == device.node,
                _ => false,
            });
            let (what, doing) = match device.state {
                meta::DeviceState::Offline => (
                    format!("node {name} goes on without device {path}, which it cannot open"),
                    gone_without(view, id, since, now),
                ),
                _ => (
                    format!("device {path} is not served by node {name}, which is up"),
                    format!("look at the log of node {name}: it has not opened this device"),
                ),
            };
            found.push(Found::new(Code::DeviceOffline, id, what, doing).since(since));
        }
    }
    found
}

fn pool_waiting(view: &View, pool: &Pool) -> Option<Found> {
    let waiting = view.groups_of(pool).waiting;
    if waiting == 0 {
        return None;
    }
    let name = &pool.name;
    let since = view.since(
        |what| matches!(what, EventKind::PoolWaiting { pool, .. } if pool == name),
        |what| matches!(what, EventKind::PoolWritable { pool } if pool == name),
    );
    let what = format!(
        "pool {name}: writes to {waiting} of {} placement groups wait, for fewer than {} replicas are in \
         sync",
        pool.placement_groups, pool.min_in_sync
    );
    Some(Found::new(Code::PoolWaiting, pool.id, what, missed(view, pool)).since(since))
}

fn pool_degraded(view: &View, pool: &Pool, paces: Paces<'_>) -> Option<Found> {
    let groups = view.groups_of(pool);
    if groups.degraded == 0 {
        return None;
    }
    let name = &pool.name;
    let since = view.since(
        |what| matches!(what, EventKind::PoolDegraded { pool, .. } if pool == name),
        |what| matches!(what, EventKind::PoolRecovered { pool } if pool == name),
    );
    let what = format!(
        "pool {name}: {} of {} placement groups have fewer than {} replicas in sync",
        groups.degraded, groups.total, pool.replicas
    );
    let doing = match groups.syncing {
        0 => missed(view, pool),
        n => format!("{n} are being synced; {}", missed(view, pool)),
    };
    Some(
        Found::new(Code::PoolDegraded, pool.id, what, doing)
            .since(since)
            .paced(paces(Work::Sync(pool.id))),
    )
}

/// What the groups of a pool that lack copies wait for.
fn missed(view: &View, pool: &Pool) -> String {
    let groups = view.map.groups().filter(|group| group.pool == pool.id);
    let lacking = groups.filter(|group| view.present(group) < usize::from(pool.replicas));
    let words = view.device_words();
    let is_full = |device: DeviceId| words.get(&device).is_some_and(|word| word.is_full);
    let (mut without_place, mut queued, mut headless) = (0, 0, 0);
    let mut away: BTreeSet<NodeId> = BTreeSet::new();
    let mut full: BTreeSet<DeviceId> = BTreeSet::new();
    for group in lacking {
        without_place += usize::from(group.wanted().count() < usize::from(pool.replicas));
        let is_back = |member: &Member| {
            let device = view.map.device(member.device);
            device.is_some_and(|device| view.map.is_served(device))
        };
        headless += usize::from(view.present(group) == 0 && group.in_sync().any(is_back));
        for member in view.lacking(group) {
            let device = view.map.device(member.device);
            match device.filter(|device| !view.map.is_served(device)) {
                Some(device) => {
                    away.insert(device.node);
                }
                None if is_full(member.device) => {
                    full.insert(member.device);
                }
                None => queued += usize::from(member.state != ReplicaState::Syncing),
            }
        }
    }
    let mut told = Vec::new();
    if !away.is_empty() {
        let names: Vec<String> = away.into_iter().map(|node| view.node_name(node)).collect();
        told.push(format!("waits for node {}", names.join(", ")));
    }
    if headless > 0 {
        told.push(format!(
            "{headless} groups wait {} s for those that may have newer data, and go on without them then",
            AUTHORITY_GRACE.as_secs()
        ));
    }
    if !full.is_empty() {
        let names: Vec<String> = full.into_iter().map(|id| view.device_name(id)).collect();
        told.push(format!(
            "device {} is full: {MAKE_ROOM}",
            names.join(", device ")
        ));
    }
    if queued > 0 {
        told.push(format!(
            "{queued} replicas wait for their turn to be synced"
        ));
    }
    if without_place > 0 {
        told.push(format!(
            "{without_place} groups find no place for all replicas on different {}s: add devices",
            pool.failure_domain
        ));
    }
    match told.is_empty() {
        // No promise: how long it takes is told as long as it gets on.
        true => "the missing replicas are being synced".to_owned(),
        false => told.join("; "),
    }
}

/// Members whose sync fails again and again, told once for each device.
fn failing(view: &View) -> Vec<Found> {
    let mut by_device: BTreeMap<DeviceId, (usize, u32, u64)> = BTreeMap::new();
    let failing = view.report.failing.iter();
    for one in failing.filter(|one| one.failures >= FAILURES_REPORTED) {
        let told = by_device.entry(one.device).or_default();
        told.0 += 1;
        told.1 = told.1.max(one.failures);
        told.2 = told.2.max(one.again_in_ms);
    }
    let tell = |(device, (groups, failures, again_in_ms)): (DeviceId, (usize, u32, u64))| {
        let name = view.device_name(device);
        let node = view
            .map
            .device(device)
            .map(|device| view.node_name(device.node));
        Found::new(
            Code::SyncFailing,
            device,
            format!(
                "{groups} placement groups cannot be synced to device {name}: up to {failures} attempts \
                 failed"
            ),
            format!(
                "each is retried within {} s; see the log of node {} for the cause",
                again_in_ms.div_ceil(1000),
                node.unwrap_or_default()
            ),
        )
    };
    by_device.into_iter().map(tell).collect()
}

/// What other nodes say is wrong with them.
fn words(view: &View, here: NodeId) -> Vec<Found> {
    let others = view.words().filter(|(node, _)| *node != here);
    let told = others.flat_map(|(node, word)| {
        let name = view.node_name(node);
        word.problems.iter().map(move |problem| Found {
            is_preliminary: false,
            of: format!("{node} {}", problem.what),
            problem: Problem {
                code: problem.code.clone(),
                what: format!("node {name}: {}", problem.what),
                since: problem.since.map(Moment::from),
                doing: problem.doing.clone(),
                eta_s: None,
                is_warning: false,
            },
        })
    });
    told.collect()
}

fn background_jobs(view: &View, pools: &[&Pool], paces: Paces<'_>) -> Vec<Found> {
    let mut found = Vec::new();
    let up = view.map.nodes().filter(|node| node.state == NodeState::Up);
    for node in up.filter(|node| node.admin_state == AdminState::Draining) {
        let since =
            view.last(|w| matches!(w, EventKind::NodeDraining { node: id } if *id == node.id));
        let left = view.held_by(node.id).left;
        let name = &node.name;
        let hint = format!(
            "`penstock node remove {name}` forgets it, `penstock node drain {name} --cancel` uses it again"
        );
        let (what, doing) = draining(&format!("node {name}"), left, &hint);
        let pace = pace_of(Work::Node(node.id), left, paces);
        let one = Found::new(Code::NodeEmptying, node.id, what, doing);
        found.push(one.since(since).paced(pace));
    }
    for device in view.map.devices().filter(|device| device.draining) {
        let id = device.id;
        let since =
            view.last(|w| matches!(w, EventKind::DeviceDraining { device, .. } if *device == id));
        let left = view.held(|held| held == id).left;
        let name = format!("device {}", view.device_name(id));
        let (what, doing) = draining(&name, left, "it is forgotten once nothing lies on it");
        let pace = pace_of(Work::Device(id), left, paces);
        let one = Found::new(Code::DeviceEmptying, id, what, doing);
        found.push(one.since(since).paced(pace));
    }
    found.extend(upgrade(view));
    for pool in pools {
        let moving = view.groups_of(pool).moving;
        if moving > 0 {
            let name = &pool.name;
            let since = view
                .last(|w| matches!(w, EventKind::RebalanceStarted { pool, .. } if pool == name));
            let what = format!("pool {name}: {moving} placement groups move to other devices");
            let doing = "each replica stays where it is until its successor has everything";
            found.push(
                Found::new(Code::PoolMoving, pool.id, what, doing)
                    .since(since)
                    .paced(paces(Work::Move(pool.id))),
            );
        }
    }
    found
}

/// Some nodes know a higher feature level than the cluster has.
fn upgrade(view: &View) -> Option<Found> {
    let level = view.map.level();
    let knows = |node: &Node| {
        let mut known = view.report.levels.iter();
        known.find(|one| one.node == node.id).map(|one| one.level)
    };
    let newest = view.map.nodes().filter_map(knows).max()?;
    let older = view.map.nodes().filter(|node| knows(node) < Some(newest));
    let older: Vec<String> = older
        .map(|node| match (knows(node), node.version.as_str()) {
            (None, _) => format!("{} (not heard of)", node.name),
            (Some(_), "") => node.name.to_string(),
            (Some(_), version) => format!("{} (penstock {version})", node.name),
        })
        .collect();
    (newest > level && !older.is_empty()).then(|| {
        let what = format!(
            "the cluster is being upgraded: it keeps feature level {level} until all nodes know {newest}"
        );
        let doing = format!(
            "upgrade or remove node {}; only the features of level {newest} wait for that",
            older.join(", ")
        );
        Found::new(Code::Upgrade, "", what, doing)
    })
}

/// What goes on, and what is being done.
fn draining(name: &str, left: usize, when_empty: &str) -> (String, String) {
    match left {
        0 => (format!("{name} is empty"), when_empty.to_owned()),
        _ => (
            format!("{name} is being emptied, {left} placement groups are left"),
            "its replicas move to other devices while I/O goes on".to_owned(),
        ),
    }
}
