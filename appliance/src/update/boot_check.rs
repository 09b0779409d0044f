//! After each boot: whether the slot on trial stays.

use std::time::{Duration, Instant};

use anyhow::Result;

use super::boot_loaders::BootLoaders;
use super::{Places, Record, State};
use crate::machine::Machine;

/// Between two looks.
const INTERVAL: Duration = Duration::from_secs(2);

/// What became of the slot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// No slot is on trial.
    NoTrial,
    /// The new version stays.
    Kept,
    /// The machine runs the version before again.
    FellBack,
    /// The new version is not well; the machine has to be restarted, and runs the version before then.
    Restart,
}

/// Decides, at the latest after `limit`. `unwell` says what is wrong with the machine, if anything is; a
/// machine that is no node is well once it runs.
///
/// # Errors
/// The record or the EFI system partition cannot be read or written.
pub fn boot_check(
    machine: &Machine,
    places: &Places,
    limit: Duration,
    unwell: &mut dyn FnMut() -> Option<String>,
) -> Result<Outcome> {
    let Some(record) = Record::load(machine)? else {
        return Ok(Outcome::NoTrial);
    };
    let runs = places.running_root_hash()? == record.root_hash;
    let loaders = BootLoaders { esp: &places.esp };
    match (record.state, runs) {
        // A loss of power just before the record said `Written`: the boot loaders had been told already.
        (State::Written | State::Writing, true) => {
            if let Some(reason) = wait_until_well(limit, unwell) {
                machine.tell(&format!(
                    "version {} is not well, version {} is started again: {reason}",
                    record.version, record.before
                ));
                return Ok(Outcome::Restart);
            }
            loaders.keep(places.running_slot(super::install::partition_uuid)?)?;
            Record {
                state: State::Good,
                ..record.clone()
            }
            .keep(machine)?;
            machine.tell(&format!(
                "updated from version {} to {}",
                record.before, record.version
            ));
            Ok(Outcome::Kept)
        }
        // The new slot was tried, or a loss of power came before that: then it may be installed again.
        (State::Written | State::Writing, false) => {
            loaders.forget(places.running_slot(super::install::partition_uuid)?.other())?;
            Record {
                state: State::FellBack,
                ..record.clone()
            }
            .keep(machine)?;
            let told = machine.message().unwrap_or_default();
            let why = match (record.state, told.split_once("started again: ")) {
                (State::Writing, _) => "it was not written to its end",
                (_, Some((_, why))) => why,
                (_, None) => "it did not start",
            };
            machine.tell(&format!(
                "the update to version {} was taken back, version {} runs: {why}",
                record.version, record.before
            ));
            Ok(Outcome::FellBack)
        }
        _ => Ok(Outcome::NoTrial),
    }
}

fn wait_until_well(limit: Duration, unwell: &mut dyn FnMut() -> Option<String>) -> Option<String> {
    let begin = Instant::now();
    loop {
        let reason = unwell()?;
        if begin.elapsed() >= limit {
            return Some(reason);
        }
        std::thread::sleep(INTERVAL.min(limit));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_that_becomes_well_in_time_is_well() {
        let mut left = 1;
        let mut unwell = || {
            left -= 1;
            (left >= 0).then(|| "no quorum".to_owned())
        };
        assert_eq!(wait_until_well(Duration::from_millis(5), &mut unwell), None);
        let reason = wait_until_well(Duration::ZERO, &mut || Some("no quorum".to_owned()));
        assert_eq!(reason.as_deref(), Some("no quorum"));
    }

    #[test]
    fn without_an_update_nothing_is_decided() {
        let dir = tempfile::tempdir().expect("a directory");
        let outcome = boot_check(
            &Machine::at(dir.path()),
            &Places::default(),
            Duration::ZERO,
            &mut || None,
        );
        assert_eq!(outcome.expect("no trial"), Outcome::NoTrial);
    }
}
