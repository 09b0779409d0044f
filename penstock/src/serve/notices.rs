//! What this node has kept as events, so that people find out afterwards: pools that fill up, which the
//! leader of the metadata tells, and data of this node's devices that are damaged or were repaired.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use meta::{Event, EventKind, Level, Name, NodeId, Notice};

use super::cluster::View;
use super::health::code::Code;
use super::monitor::Found;
use super::node::Node;
use crate::config::SpaceWarnings;
use crate::failure::Result;

/// A pool has room again when its fill level is this much below the limit, so that a level that swings around
/// a limit gives one notice.
const HYSTERESIS_PERCENT: u8 = 5;
/// What changes of a device's damage is told after this long, not block by block: events are few.
const DAMAGE_PAUSE: Duration = Duration::from_secs(900);

/// The notices that have been recorded.
#[derive(Default)]
pub struct Notices(Mutex<NoticeState>);

#[derive(Default)]
struct NoticeState {
    /// How full pools were said to be; unknown to a node that does not lead.
    pools: Option<BTreeMap<Name, u8>>,
    /// By the paths of devices.
    damage: BTreeMap<String, DamageTold>,
}

/// The last notice about a device.
#[derive(Debug, Clone, PartialEq, Eq)]
struct DamageTold {
    /// Its damage; none after its repair.
    what: Option<String>,
    at: Instant,
}

impl Notices {
    fn lock(&self) -> MutexGuard<'_, NoticeState> {
        // What a panic leaves half done is told once more at worst.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Node {
    /// Has events kept of what is new. What cannot be kept now is tried again at the next look.
    pub(super) async fn keep_notices(&self, view: &View, local: &[Found]) -> Result<()> {
        if view.map.level() < Level::AUDIT {
            return Ok(());
        }
        for (notice, (device, what)) in self.new_damage(local) {
            if self.meta.note(notice).await.is_ok() {
                let at = Instant::now();
                let told = DamageTold { what, at };
                self.notices.lock().damage.insert(device, told);
            }
        }
        if view.raft.leader != Some(self.meta.node_id()) {
            self.notices.lock().pools = None;
            return Ok(());
        }
        for (notice, (pool, percent)) in self.new_fill(view)? {
            if self.meta.note(notice).await.is_ok()
                && let Some(pools) = &mut self.notices.lock().pools
            {
                pools.insert(pool, percent);
            }
        }
        Ok(())
    }

    fn new_damage(&self, local: &[Found]) -> Vec<(Notice, (String, Option<String>))> {
        let told = self.notices.lock();
        damage(self.meta.node_id(), &told.damage, local, Instant::now())
    }

    fn new_fill(&self, view: &View) -> Result<Vec<(Notice, (Name, u8))>> {
        if self.notices.lock().pools.is_none() {
            let events = self.meta.applied().events(0, usize::MAX);
            let events = events.map_err(super::node::meta_failure)?;
            self.notices.lock().pools = Some(said(&events));
        }
        let words = self.reported_space(view);
        let heard = view.map.pools().filter_map(|pool| {
            let fullest = view.fullest(pool, &words)?;
            Some((pool.name.clone(), fullest.percent))
        });
        let heard: Vec<(Name, u8)> = heard.collect();
        let told = self.notices.lock();
        Ok(match &told.pools {
            Some(told) => fill(told, &heard, view.space_warnings),
            None => Vec::new(),
        })
    }
}

/// How full pools were said to be last.
fn said(events: &[Event]) -> BTreeMap<Name, u8> {
    let mut said = BTreeMap::new();
    for event in events {
        match &event.what {
            EventKind::PoolNearFull { pool, percent } => {
                said.insert(pool.clone(), *percent);
            }
            EventKind::PoolHasRoom { pool, .. }
            | EventKind::PoolCreated { pool, .. }
            | EventKind::PoolDeleted { pool } => {
                said.remove(pool);
            }
            _ => {}
        }
    }
    said
}

/// What to tell of pools: each limit once on the way up, and that there is room again.
fn fill(
    told: &BTreeMap<Name, u8>,
    heard: &[(Name, u8)],
    limits: SpaceWarnings,
) -> Vec<(Notice, (Name, u8))> {
    let reached = |percent: u8| {
        let limits = [limits.near_full_percent, limits.critical_percent];
        limits.into_iter().filter(|limit| percent >= *limit).max()
    };
    let hysteresis = HYSTERESIS_PERCENT.min(limits.near_full_percent / 2);
    let mut notices = Vec::new();
    for (pool, percent) in heard {
        let before = told.get(pool).copied().unwrap_or(0);
        let (name, percent) = (pool.clone(), *percent);
        if reached(percent) > reached(before) {
            let notice = Notice::PoolNearFull {
                pool: name.clone(),
                percent,
            };
            notices.push((notice, (name, percent)));
        } else if reached(before).is_some() && reached(percent.saturating_add(hysteresis)).is_none()
        {
            let notice = Notice::PoolHasRoom {
                pool: name.clone(),
                percent,
            };
            notices.push((notice, (name, percent)));
        }
    }
    notices
}

/// What to tell of damaged data: of each device what is new, and when nothing is damaged any more. With the
/// device and its damage.
fn damage(
    node: NodeId,
    told: &BTreeMap<String, DamageTold>,
    local: &[Found],
    now: Instant,
) -> Vec<(Notice, (String, Option<String>))> {
    // A look at which the devices did not answer says nothing.
    if local.iter().any(|found| found.is(Code::DevicesSilent)) {
        return Vec::new();
    }
    let damaged = local.iter().filter(|found| found.is(Code::DataDamaged));
    let damaged: BTreeMap<&str, String> = damaged
        .map(|found| (found.of.as_str(), fit(&found.problem.what)))
        .collect();
    let may_tell = |told: &DamageTold| now.saturating_duration_since(told.at) >= DAMAGE_PAUSE;
    let mut notices = Vec::new();
    for (device, what) in &damaged {
        let before = told.get(*device);
        if before.is_none_or(|told| told.what.as_ref() != Some(what) && may_tell(told)) {
            let what = what.clone();
            let notice = Notice::DataDamaged {
                what: what.clone(),
                node,
            };
            notices.push((notice, ((*device).to_owned(), Some(what))));
        }
    }
    for (device, told) in told {
        if told.what.is_some() && may_tell(told) && !damaged.contains_key(device.as_str()) {
            let what = fit(&format!("device {device}"));
            notices.push((Notice::DataRepaired { what, node }, (device.clone(), None)));
        }
    }
    notices
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
        let mut told = BTreeMap::new();
        let mut texts = Vec::new();
        for percent in percents {
            let notices = fill(&told, &[(pool(), *percent)], SpaceWarnings::default());
            for (notice, (pool, percent)) in notices {
                texts.push(match notice {
                    Notice::PoolNearFull { percent, .. } => format!("full {percent}"),
                    Notice::PoolHasRoom { percent, .. } => format!("room {percent}"),
                    other => panic!("{other:?}"),
                });
                told.insert(pool, percent);
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
    }

    #[test]
    fn a_new_leader_knows_what_was_told() {
        let event = |number, what| Event {
            number,
            at: meta::UnixMillis(number),
            what,
            by: None,
        };
        let full = EventKind::PoolNearFull {
            pool: pool(),
            percent: 85,
        };
        let room = EventKind::PoolHasRoom {
            pool: pool(),
            percent: 70,
        };
        let events = [event(1, full.clone()), event(2, room), event(3, full)];
        assert_eq!(said(&events), [(pool(), 85)].into());
        assert_eq!(said(&events[..2]), BTreeMap::new());
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
        let mut look = |local: &[Found], pauses: u32| {
            let at = begun + pauses * DAMAGE_PAUSE;
            let notices = damage(NodeId(3), &told, local, at);
            for (_, (device, what)) in notices.clone() {
                told.insert(device, DamageTold { what, at });
            }
            let notices = notices.into_iter().map(|(notice, _)| notice);
            notices.collect::<Vec<_>>()
        };
        let damaged = |what: &str| Notice::DataDamaged {
            what: what.to_owned(),
            node: NodeId(3),
        };
        let (what, node) = ("device /dev/sda".to_owned(), NodeId(3));
        let repaired = Notice::DataRepaired { what, node };
        assert_eq!(look(&found("1 block"), 0), [damaged("1 block")]);
        assert_eq!(look(&found("1 block"), 2), []);
        assert_eq!(look(&found("2 blocks"), 3), [damaged("2 blocks")]);
        // Neither growth nor what comes and goes is told at each look.
        assert_eq!(look(&found("3 blocks"), 3), []);
        assert_eq!(look(&[], 3), []);
        // Devices that do not answer are not repaired.
        assert_eq!(look(&[Found::new(Code::DevicesSilent, "", "", "")], 4), []);
        assert_eq!(look(&[], 4), [repaired]);
        assert_eq!(look(&[], 5), []);
        assert_eq!(look(&found("1 block"), 5), [damaged("1 block")]);
    }

    #[test]
    fn texts_are_one_line_and_cut_between_characters() {
        assert_eq!(fit("ä\nb"), "ä b");
        let long = "ä".repeat(Notice::TEXT_MAX);
        assert_eq!(fit(&long).len(), Notice::TEXT_MAX);
        assert_eq!(fit(&format!("a{long}")).len(), Notice::TEXT_MAX - 1);
    }
}
