//! What this node has kept as events, so that people find out afterwards: pools that fill up or promise more
//! than they have, which the leader of the metadata tells, and data of this node's devices that are damaged
//! or were repaired.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use api::failure::Result;
use config::SpaceWarnings;
use meta::{DeviceId, DeviceReport, EventKind, Name, NodeId, Notice, Pool};
use service::code::Code;
use service::found::Found;
use service::view::View;
use service::waiting::blocking;

use crate::health::Health;

/// A pool has room again when its fill level is this much below the limit, so that a level that swings around
/// a limit gives one notice.
const HYSTERESIS_PERCENT: u8 = 5;
/// A pool that was full counts as such for so long: a device may take and refuse writes in turn.
const FULL_PAUSE: Duration = Duration::from_secs(300);
/// Devices are asked for their repairs this long.
const REPAIRED_WAIT_MAX: Duration = Duration::from_millis(500);
/// What changes of a device's damage is told after this long, not block by block: events are few.
const DAMAGE_PAUSE: Duration = Duration::from_secs(900);

/// The notices that have been recorded.
#[derive(Default)]
pub struct Notices(Mutex<NoticeState>);

#[derive(Default)]
struct NoticeState {
    /// What was said of pools; unknown to a node that does not lead.
    pools: Option<PoolsTold>,
    /// When pools were full last.
    full: BTreeMap<Name, Instant>,
    /// By the paths of devices.
    damage: BTreeMap<String, DamageTold>,
}

impl NoticeState {
    /// Pools that are full, or were a short while ago.
    fn lately_full(&mut self, full: Vec<Name>, now: Instant) -> BTreeSet<Name> {
        self.full.extend(full.into_iter().map(|pool| (pool, now)));
        self.full
            .retain(|_, at| now.saturating_duration_since(*at) < FULL_PAUSE);
        self.full.keys().cloned().collect()
    }
}

/// What events say of pools.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct PoolsTold {
    /// How full they are; not of those that have room.
    fill: BTreeMap<Name, u8>,
    /// Those whose volumes may grow to more than their devices hold.
    over_committed: BTreeSet<Name>,
}

impl PoolsTold {
    fn take(&mut self, what: &EventKind) {
        match what {
            EventKind::PoolNearFull { pool, percent } => {
                self.fill.insert(pool.clone(), *percent);
            }
            EventKind::PoolHasRoom { pool, .. } => {
                self.fill.remove(pool);
            }
            EventKind::PoolOverCommitted { pool } => {
                self.over_committed.insert(pool.clone());
            }
            EventKind::PoolCovered { pool } => {
                self.over_committed.remove(pool);
            }
            EventKind::PoolCreated { pool, .. } | EventKind::PoolDeleted { pool } => {
                self.fill.remove(pool);
                self.over_committed.remove(pool);
            }
            _ => {}
        }
    }

    /// Forgets pools that are not there any more: another one may get the name.
    fn keep(&mut self, is_there: &dyn Fn(&Name) -> bool) {
        self.fill.retain(|pool, _| is_there(pool));
        self.over_committed.retain(is_there);
    }

    /// Pools that were full and are only nearly so are to be told when they are full again.
    fn settle(&mut self, heard: &[(Name, u8)], limits: SpaceWarnings) {
        for (pool, percent) in heard {
            if let Some(told) = self.fill.get_mut(pool)
                && *told == 100
                && *percent >= has_room_below(limits)
            {
                *told = *percent;
            }
        }
    }

    /// What events said.
    fn of<'a>(events: impl IntoIterator<Item = &'a EventKind>) -> Self {
        let mut said = Self::default();
        events.into_iter().for_each(|what| said.take(what));
        said
    }
}

/// The last notice about a device.
#[derive(Debug, Clone, PartialEq, Eq)]
struct DamageTold {
    /// Its damage; none after its repair.
    what: Option<String>,
    /// How many of its blocks had been written again from other replicas when that was told last.
    repaired_blocks: u64,
    at: Instant,
}

impl Notices {
    fn lock(&self) -> MutexGuard<'_, NoticeState> {
        // What a panic leaves half done is told once more at worst.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Health {
    /// Has events kept of what is new. What cannot be kept now is tried again at the next look.
    pub(crate) async fn keep_notices(&self, view: &View, local: &[Found]) -> Result<()> {
        let storage = self.storage.clone();
        let repaired = blocking(move || Ok(storage.repaired_blocks()));
        // Devices that do not answer have repaired nothing that could be told.
        let repaired = tokio::time::timeout(REPAIRED_WAIT_MAX, repaired).await;
        let repaired = repaired.ok().and_then(Result::ok).unwrap_or_default();
        for (notice, (device, what)) in self.new_damage(local, &repaired) {
            if self.cluster.meta.note(notice).await.is_ok() {
                // The log of the store has the numbers of layers.
                match &what {
                    Some(what) => tracing::warn!("{what}"),
                    None => tracing::info!("device {device}: nothing is damaged any more"),
                }
                let repaired = repaired.get(&device).copied().unwrap_or(0);
                let told = &mut self.notices.lock().damage;
                note_told(told, device, (what, repaired), Instant::now());
            }
        }
        if view.raft.leader != Some(self.cluster.node_id()) {
            self.notices.lock().pools = None;
            return Ok(());
        }
        for notice in self.new_of_pools(view)? {
            let what = notice.event();
            if self.cluster.meta.note(notice).await.is_ok()
                && let Some(pools) = &mut self.notices.lock().pools
            {
                pools.take(&what);
            }
        }
        Ok(())
    }

    fn new_damage(
        &self,
        local: &[Found],
        repaired: &BTreeMap<String, u64>,
    ) -> Vec<(Notice, (String, Option<String>))> {
        let told = self.notices.lock();
        let found = (local, repaired);
        damage(self.cluster.node_id(), &told.damage, found, Instant::now())
    }

    fn new_of_pools(&self, view: &View) -> Result<Vec<Notice>> {
        if self.notices.lock().pools.is_none() {
            let events = self.cluster.meta.applied().events(0, usize::MAX);
            let events = events.map_err(service::failures::meta_failure)?;
            let said = PoolsTold::of(events.iter().map(|event| &event.what));
            self.notices.lock().pools = Some(said);
        }
        let words = self.devices.reported_space(view);
        let full = view.map.pools().filter(|pool| is_full(view, pool, &words));
        let full: Vec<Name> = full.map(|pool| pool.name.clone()).collect();
        let lately_full = self.notices.lock().lately_full(full, Instant::now());
        let heard = view.map.pools().filter_map(|pool| {
            let percent = match lately_full.contains(&pool.name) {
                true => 100,
                false => view.fullest(pool, &words)?.percent,
            };
            Some((pool.name.clone(), percent))
        });
        let heard: Vec<(Name, u8)> = heard.collect();
        // A pool without a device promises nothing that could be compared.
        let promised = view.map.pools().filter(|pool| view.provisioned(pool).1 > 0);
        let promised = promised.map(|pool| {
            let is_over = view.is_over_committed(pool);
            (pool.name.clone(), is_over)
        });
        let promised: Vec<(Name, bool)> = promised.collect();
        let mut told = self.notices.lock();
        let Some(told) = &mut told.pools else {
            return Ok(Vec::new());
        };
        told.keep(&|name| view.map.pools().any(|pool| pool.name == *name));
        told.settle(&heard, view.space_warnings);
        let mut notices = fill(&told.fill, &heard, view.space_warnings);
        notices.extend(commitment(&told.over_committed, promised));
        Ok(notices)
    }
}

/// Whether a device of a pool refuses writes for want of space, however much of it is in use.
fn is_full(view: &View, pool: &Pool, words: &BTreeMap<DeviceId, DeviceReport>) -> bool {
    let mut words = view.usable(pool).filter_map(|device| words.get(&device.id));
    words.any(|word| word.is_full)
}

/// The fill level below which a pool has room again.
fn has_room_below(limits: SpaceWarnings) -> u8 {
    let near_full = limits.near_full_percent;
    near_full - HYSTERESIS_PERCENT.min(near_full / 2)
}

/// What to tell of pools that promise more than they have, and of those that do not any more.
fn commitment(told: &BTreeSet<Name>, promised: Vec<(Name, bool)>) -> Vec<Notice> {
    let notice = |(pool, is_over): (Name, bool)| match (is_over, told.contains(&pool)) {
        (true, false) => Some(Notice::PoolOverCommitted { pool }),
        (false, true) => Some(Notice::PoolCovered { pool }),
        _ => None,
    };
    promised.into_iter().filter_map(notice).collect()
}

/// What to tell of pools: each limit once on the way up, and that there is room again.
fn fill(told: &BTreeMap<Name, u8>, heard: &[(Name, u8)], limits: SpaceWarnings) -> Vec<Notice> {
    let reached = |percent: u8| {
        let limits = [limits.near_full_percent, limits.critical_percent, 100];
        limits.into_iter().filter(|limit| percent >= *limit).max()
    };
    let mut notices = Vec::new();
    for (pool, percent) in heard {
        let before = told.get(pool).copied().unwrap_or(0);
        let (pool, percent) = (pool.clone(), *percent);
        if reached(percent) > reached(before) {
            notices.push(Notice::PoolNearFull { pool, percent });
        } else if reached(before).is_some() && percent < has_room_below(limits) {
            notices.push(Notice::PoolHasRoom { pool, percent });
        }
    }
    notices
}

/// What to tell of damaged data: of each device what is new, and when nothing is damaged any more, be it that
/// all was repaired before it could be told. With the device and its damage. `repaired`: how many blocks of
/// each device were written again.
fn damage(
    node: NodeId,
    told: &BTreeMap<String, DamageTold>,
    (local, repaired): (&[Found], &BTreeMap<String, u64>),
    now: Instant,
) -> Vec<(Notice, (String, Option<String>))> {
    // A look at which the devices did not answer says nothing.
    if local.iter().any(|found| found.is(Code::DevicesSilent)) {
        return Vec::new();
    }
    let damaged = local.iter().filter(|found| found.is(Code::DataDamaged));
    let damaged: BTreeMap<&str, (String, bool)> = damaged
        .map(|found| {
            let text = (fit(&found.problem.what), found.is_preliminary);
            (found.of.as_str(), text)
        })
        .collect();
    let may_tell = |told: &DamageTold| now.saturating_duration_since(told.at) >= DAMAGE_PAUSE;
    let mut notices = Vec::new();
    for (device, (what, is_preliminary)) in &damaged {
        let before = told.get(*device);
        if !is_preliminary
            && before.is_none_or(|told| told.what.as_ref() != Some(what) && may_tell(told))
        {
            let what = what.clone();
            let notice = Notice::DataDamaged {
                what: what.clone(),
                node,
            };
            notices.push((notice, ((*device).to_owned(), Some(what))));
        }
    }
    let devices: BTreeSet<&String> = told.keys().chain(repaired.keys()).collect();
    for device in devices {
        let before = told.get(device);
        let was_damaged = before.is_some_and(|told| told.what.is_some());
        let blocks = repaired.get(device).copied().unwrap_or(0);
        let new = blocks.saturating_sub(before.map_or(0, |told| told.repaired_blocks));
        let is_new = was_damaged || new > 0;
        if is_new && before.is_none_or(may_tell) && !damaged.contains_key(device.as_str()) {
            let what = match new {
                0 => format!("device {device}"),
                1 => format!("device {device}: 1 block was written again from another replica"),
                _ => {
                    format!("device {device}: {new} blocks were written again from other replicas")
                }
            };
            let what = fit(&what);
            notices.push((Notice::DataRepaired { what, node }, (device.clone(), None)));
        }
    }
    notices
}

/// Records the last notice about a device: its damage, or the number of its repaired blocks.
fn note_told(
    told: &mut BTreeMap<String, DamageTold>,
    device: String,
    (what, repaired): (Option<String>, u64),
    at: Instant,
) {
    let before = told.get(&device).map_or(0, |told| told.repaired_blocks);
    // Of repairs is told once nothing is damaged any more.
    let repaired_blocks = if what.is_some() { before } else { repaired };
    let new = DamageTold {
        what,
        repaired_blocks,
        at,
    };
    told.insert(device, new);
}

/// As long as a notice may be, and one line.
fn fit(text: &str) -> String {
    let mut end = text.len().min(Notice::TEXT_MAX);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    text[..end].replace(char::is_control, " ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pool() -> Name {
        "default".parse().unwrap()
    }

    /// Notices about a pool whose fill level takes these values in turn.
    fn told_of(percents: &[u8]) -> Vec<String> {
        let mut told = PoolsTold::default();
        let mut texts = Vec::new();
        for percent in percents {
            let heard = [(pool(), *percent)];
            told.settle(&heard, SpaceWarnings::default());
            for notice in fill(&told.fill, &heard, SpaceWarnings::default()) {
                told.take(&notice.event());
                texts.push(match notice {
                    Notice::PoolNearFull { percent, .. } => format!("full {percent}"),
                    Notice::PoolHasRoom { percent, .. } => format!("room {percent}"),
                    other => panic!("{other:?}"),
                });
            }
        }
        texts
    }

    #[test]
    fn a_pool_that_fills_up_is_told_at_each_limit_once() {
        assert_eq!(told_of(&[10, 79]), [""; 0]);
        assert_eq!(
            told_of(&[79, 80, 79, 81, 90, 89, 95, 80, 76]),
            ["full 80", "full 90"]
        );
        assert_eq!(
            told_of(&[100, 74, 10, 80]),
            ["full 100", "room 74", "full 80"]
        );
        assert_eq!(
            told_of(&[92, 100, 80, 100, 10]),
            ["full 92", "full 100", "full 100", "room 10"]
        );
    }

    #[test]
    fn a_pool_counts_as_full_for_a_while() {
        let mut state = NoticeState::default();
        let begun = Instant::now();
        let mut look = |full: Vec<Name>, after| !state.lately_full(full, begun + after).is_empty();
        assert!(!look(vec![], Duration::ZERO));
        assert!(look(vec![pool()], Duration::ZERO));
        assert!(look(vec![], FULL_PAUSE / 2));
        assert!(look(vec![pool()], FULL_PAUSE / 2));
        assert!(look(vec![], FULL_PAUSE));
        assert!(!look(vec![], 2 * FULL_PAUSE));
    }

    #[test]
    fn a_pool_that_is_gone_is_forgotten() {
        let mut told = PoolsTold::default();
        told.take(&EventKind::PoolOverCommitted { pool: pool() });
        told.keep(&|_| true);
        assert!(told.over_committed.contains(&pool()));
        told.keep(&|_| false);
        assert_eq!(told, PoolsTold::default());
    }

    #[test]
    fn what_a_pool_promises_is_told_when_it_changes() {
        let mut told = PoolsTold::default();
        let mut look = |is_over| {
            let notices = commitment(&told.over_committed, vec![(pool(), is_over)]);
            notices.iter().for_each(|notice| told.take(&notice.event()));
            notices
        };
        let pool = pool();
        assert_eq!(look(false), []);
        assert_eq!(
            look(true),
            [Notice::PoolOverCommitted { pool: pool.clone() }]
        );
        assert_eq!(look(true), []);
        assert_eq!(look(false), [Notice::PoolCovered { pool }]);
        assert_eq!(look(false), []);
    }

    #[test]
    fn a_new_leader_knows_what_was_told() {
        let full = EventKind::PoolNearFull {
            pool: pool(),
            percent: 85,
        };
        let room = EventKind::PoolHasRoom {
            pool: pool(),
            percent: 70,
        };
        let over = EventKind::PoolOverCommitted { pool: pool() };
        let deleted = EventKind::PoolDeleted { pool: pool() };
        let events = [full.clone(), over, room, full, deleted];
        let said = |count: usize| {
            let said = PoolsTold::of(&events[..count]);
            let percent = said.fill.get(&pool()).copied();
            (percent, said.over_committed.contains(&pool()))
        };
        assert_eq!(said(1), (Some(85), false));
        assert_eq!(said(3), (None, true));
        assert_eq!(said(4), (Some(85), true));
        assert_eq!(said(5), (None, false));
    }

    #[test]
    fn damage_is_told_when_it_comes_grows_and_goes() {
        let begun = Instant::now();
        let found = |what: &str| {
            [
                Found::new(Code::DataDamaged, "/dev/sda", what, ""),
                Found::new(Code::DeviceFull, "/dev/sda", "y", ""),
            ]
        };
        let mut told = BTreeMap::new();
        let mut look_at = |local: &[Found], repaired_blocks: u64, pauses: u32| {
            let at = begun + pauses * DAMAGE_PAUSE;
            let repaired = BTreeMap::from([("/dev/sda".to_owned(), repaired_blocks)]);
            let notices = damage(NodeId(3), &told, (local, &repaired), at);
            for (_, (device, what)) in notices.clone() {
                note_told(&mut told, device, (what, repaired_blocks), at);
            }
            let notices = notices.into_iter().map(|(notice, _)| notice);
            notices.collect::<Vec<_>>()
        };
        let damaged = |what: &str| Notice::DataDamaged {
            what: what.to_owned(),
            node: NodeId(3),
        };
        let repaired = |how: &str| Notice::DataRepaired {
            what: format!("device /dev/sda{how}"),
            node: NodeId(3),
        };
        let mut look = |local: &[Found], pauses| look_at(local, 0, pauses);
        assert_eq!(look(&found("1 block"), 0), [damaged("1 block")]);
        assert_eq!(look(&found("1 block"), 2), []);
        assert_eq!(look(&found("2 blocks"), 3), [damaged("2 blocks")]);
        // Neither growth nor what comes and goes is told at each look.
        assert_eq!(look(&found("3 blocks"), 3), []);
        assert_eq!(look(&[], 3), []);
        // Devices that do not answer are not repaired.
        assert_eq!(look(&[Found::new(Code::DevicesSilent, "", "", "")], 4), []);
        assert_eq!(look(&[], 4), [repaired("")]);
        assert_eq!(look(&[], 5), []);
        assert_eq!(look(&found("1 block"), 5), [damaged("1 block")]);
        // What other replicas have is repaired before anybody looks.
        let how = ": 2 blocks were written again from other replicas";
        assert_eq!(look_at(&found("1 block"), 2, 6), []);
        assert_eq!(look_at(&[], 2, 6), [repaired(how)]);
        assert_eq!(look_at(&[], 3, 6), [], "few events");
        let how = ": 1 block was written again from another replica";
        assert_eq!(look_at(&[], 3, 7), [repaired(how)]);
        assert_eq!(look_at(&[], 3, 8), []);
        // What was repaired beside what is still damaged is told at the end.
        assert_eq!(look_at(&found("1 block"), 5, 9), [damaged("1 block")]);
        let how = ": 2 blocks were written again from other replicas";
        assert_eq!(look_at(&[], 5, 10), [repaired(how)]);
        // Files whose names are about to be known are told with them.
        let mut awaited = found("1 block");
        awaited[0].is_preliminary = true;
        assert_eq!(look_at(&awaited, 5, 12), []);
        assert_eq!(look_at(&found("1 block"), 5, 12), [damaged("1 block")]);
    }

    #[test]
    fn texts_are_one_line_and_cut_between_characters() {
        assert_eq!(fit("ä\nb"), "ä b");
        let long = "ä".repeat(Notice::TEXT_MAX);
        assert_eq!(fit(&long).len(), Notice::TEXT_MAX);
        assert_eq!(fit(&format!("a{long}")).len(), Notice::TEXT_MAX - 1);
    }
}
