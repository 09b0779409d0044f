//! Pools whose space becomes short, before writes wait for it.

use std::collections::BTreeMap;

use api::size::Size;
use meta::{DeviceId, DeviceReport, Pool};
use service::code::Code;
use service::found::Found;
use service::view::View;

/// What somebody has to see to at once, and what to keep an eye on.
pub fn short(view: &View, words: &BTreeMap<DeviceId, DeviceReport>) -> (Vec<Found>, Vec<Found>) {
    let (mut wrong, mut notices) = (Vec::new(), Vec::new());
    for pool in view.map.pools() {
        let limits = view.space_warnings;
        if let Some(fullest) = view.fullest(pool, words)
            && fullest.percent >= limits.near_full_percent
        {
            let what = format!(
                "pool {}: device {} is {} % full: {} of {}",
                pool.name,
                view.device_name(fullest.device.id),
                fullest.percent,
                Size(fullest.word.used_bytes),
                Size(fullest.word.capacity_bytes),
            );
            let doing = "add devices, or delete or move data: writes wait, and then fail by the volume's \
                         --on-full, once a device is full";
            let mut found = Found::new(Code::PoolFilling, pool.id, what, doing);
            found.problem.is_warning = true;
            match fullest.percent >= limits.critical_percent {
                true => wrong.push(found),
                false => notices.push(found),
            }
        }
        notices.extend(over_committed(view, pool));
    }
    (wrong, notices)
}

fn over_committed(view: &View, pool: &Pool) -> Option<Found> {
    view.is_over_committed(pool).then(|| {
        let (provisioned, capacity) = view.provisioned(pool);
        let copies = match pool.replicas {
            1 => String::new(),
            replicas => format!(" in {replicas} copies"),
        };
        Found::new(
            Code::PoolOverCommitted,
            pool.id,
            format!(
                "pool {}: its volumes may grow to {}{copies}, its devices hold {}",
                pool.name,
                Size(provisioned),
                Size(capacity)
            ),
            "nothing has to be done as long as there is room: see `penstock pool list`",
        )
    })
}
