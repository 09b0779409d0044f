//! The log of what happened: bounded, for people.

use super::tables::{COUNTERS, EVENTS, NODES, POOL_HEALTH, POOLS, VOLUMES_BY_POOL};
use super::{Read, ReadError, Txn};
use crate::ids::UnixMillis;
use crate::model::{EVENTS_MAX, Event, EventKind, PoolHealth};

/// Adds an event; beyond [`EVENTS_MAX`] the oldest goes.
pub(super) fn push(txn: &mut Txn<'_>, at: UnixMillis, what: EventKind) -> Result<(), ReadError> {
    let mut counters = COUNTERS.get(txn, &())?.unwrap_or_default();
    let number = counters.event;
    counters.event += 1;
    COUNTERS.put(txn, &(), &counters);
    let event = Event {
        number,
        at,
        what,
        by: None,
    };
    EVENTS.put(txn, &number, &event);
    if let Some(oldest) = number.checked_sub(EVENTS_MAX) {
        EVENTS.delete(txn, &oldest);
    }
    Ok(())
}

/// Tells of pools whose health a command turned; `before` is how the records were.
pub(super) fn tell_health(
    before: &dyn Read,
    txn: &mut Txn<'_>,
    at: UnixMillis,
) -> Result<(), ReadError> {
    if !txn.has_written(POOL_HEALTH.prefix()) {
        return Ok(());
    }
    // The guests of a node that is alone lost power with it.
    let has_peers = NODES.all(txn)?.len() > 1;
    for pool in POOLS.all(txn)? {
        // Nobody misses replicas of nothing.
        if VOLUMES_BY_POOL.first_below(txn, &pool.id)?.is_none() {
            continue;
        }
        let old = POOL_HEALTH.get(before, &pool.id)?.unwrap_or_default();
        let new = POOL_HEALTH.get(txn, &pool.id)?.unwrap_or_default();
        let turned = |count: fn(&PoolHealth) -> u32| match (count(&old), count(&new)) {
            (0, now @ 1..) => Some(Some(now)),
            (1.., 0) => Some(None),
            _ => None,
        };
        let name = || pool.name.clone();
        if let Some(now) = turned(|health| health.degraded) {
            let what = match now {
                Some(groups) => EventKind::PoolDegraded {
                    pool: name(),
                    groups,
                },
                None => EventKind::PoolRecovered { pool: name() },
            };
            push(txn, at, what)?;
        }
        if let Some(now) = turned(|health| health.waiting) {
            let what = match now {
                Some(groups) => EventKind::PoolWaiting {
                    pool: name(),
                    groups,
                },
                None => EventKind::PoolWritable { pool: name() },
            };
            push(txn, at, what)?;
        }
        if new.power_lost > old.power_lost && has_peers {
            push(txn, at, EventKind::UnflushedLost { pool: name() })?;
        }
        if let Some(now) = turned(|health| health.moving) {
            let what = match now {
                Some(groups) => EventKind::RebalanceStarted {
                    pool: name(),
                    groups,
                },
                None => EventKind::RebalanceEnded { pool: name() },
            };
            push(txn, at, what)?;
        }
    }
    Ok(())
}
