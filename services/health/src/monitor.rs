//! Memory between two checks: when each problem appeared, and the last answer of each service.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use api::moment::Moment;
use meta::{DeviceId, DeviceReport};
use service::found::Found;

/// Memory between checks.
#[derive(Default)]
pub struct Monitor(Mutex<MonitorState>);

#[derive(Default)]
struct MonitorState {
    /// When problems of these names were seen first.
    seen: BTreeMap<(String, String), Moment>,
    /// Problems that each service reported last.
    reported: BTreeMap<&'static str, Vec<Found>>,
    /// Reports of nodes on their devices.
    devices: BTreeMap<DeviceId, DeviceReport>,
}

impl Monitor {
    fn lock(&self) -> MutexGuard<'_, MonitorState> {
        // Each entry is whole after every statement.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps the reports of nodes on their devices.
    pub fn remember_devices(&self, words: BTreeMap<DeviceId, DeviceReport>) {
        self.lock().devices = words;
    }

    /// Reports of nodes on their devices at the last check. Waits for nobody.
    pub fn device_words(&self) -> BTreeMap<DeviceId, DeviceReport> {
        self.lock().devices.clone()
    }

    /// Keeps the problems of a service, and returns them.
    pub fn remember(&self, service: &'static str, problems: Vec<Found>) -> Vec<Found> {
        self.lock().reported.insert(service, problems.clone());
        problems
    }

    /// The problems that a service reported last.
    pub fn last_of(&self, service: &'static str) -> Vec<Found> {
        self.lock()
            .reported
            .get(service)
            .cloned()
            .unwrap_or_default()
    }

    /// Fills in since when problems are there that do not say it; forgets those that are not there any more.
    pub fn stamp<'a>(&self, found: impl Iterator<Item = &'a mut Found>, now: Moment) {
        let mut state = self.lock();
        let mut seen = BTreeMap::new();
        for one in found {
            let key = (one.problem.code.clone(), one.of.clone());
            let first = state.seen.get(&key).copied().unwrap_or(now);
            one.problem.since.get_or_insert(first);
            seen.insert(key, first);
        }
        state.seen = seen;
    }
}

#[cfg(test)]
mod tests {
    use service::code::Code;

    use super::*;

    #[test]
    fn a_problem_keeps_its_beginning_until_it_is_gone() {
        let monitor = Monitor::default();
        let at = |ms: u64| Moment::from(meta::UnixMillis(ms));
        let stamped = |now| {
            let mut found = [Found::new(Code::NodeDown, "a", "what", "")];
            monitor.stamp(found.iter_mut(), now);
            found[0].problem.since
        };
        assert_eq!(stamped(at(1000)), Some(at(1000)));
        assert_eq!(stamped(at(2000)), Some(at(1000)));
        monitor.stamp([].iter_mut(), at(3000));
        assert_eq!(stamped(at(4000)), Some(at(4000)));
    }
}
