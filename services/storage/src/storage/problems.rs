//! What is wrong with the devices of this node.

use std::collections::BTreeMap;
use std::time::Duration;

use api::moment::Moment;
use api::size::Size;
use config::StoreKind;
use fabric::DeviceStatus;
use fabric_store::api::ScrubFinding;
use service::code::Code;
use service::found::Found;

use crate::damage::{self, Owners};
use crate::selection::{LeftOut, Origin};

use super::{Storage, free_bytes, holes};

/// With less free space than this under a sparse device file, `health` warns: writes are about to fail.
const HOST_FREE_BYTES_MIN: u64 = 1 << 30;

impl Storage {
    /// Blocks of this node's devices that are damaged, as far as they are listed.
    pub fn bad_blocks(&self) -> Vec<ScrubFinding> {
        let devices = self.fabric.devices().into_iter();
        devices.flat_map(|device| device.scrub.findings).collect()
    }

    /// How many blocks were written again from other replicas since the start, by the paths of devices.
    pub fn repaired_blocks(&self) -> BTreeMap<String, u64> {
        let devices = self.fabric.devices().into_iter();
        let repaired = devices.map(|device| (device.path.display().to_string(), device.scrub));
        repaired
            .map(|(path, scrub)| (path, scrub.repaired_blocks))
            .collect()
    }

    /// What a human must act upon. Of a device that is not in the map any more nothing is expected.
    pub fn problems(&self, map: &meta::ClusterMap, owners: &Owners) -> Vec<Found> {
        let mut problems = Vec::new();
        if self.kind == StoreKind::Null {
            problems.push(Found::new(
                Code::NullStore,
                "",
                "the null store drops every write",
                "start the daemon without --store null to store anything",
            ));
        }
        if let Some(stall) = self.fabric.sync_stall() {
            let lasted = stall.since.elapsed();
            problems.extend(sync_stalled(stall.groups, lasted, Moment::now()));
        }
        for device in self.fabric.devices() {
            let path = device.path.display().to_string();
            let told = damage::told(&path, &device.scrub, owners);
            problems.extend(told);
            problems.extend(shortage(&device));
        }
        let is_expected = |one: &&LeftOut| match one.origin {
            Origin::Known(id) => map.device(id).is_some(),
            Origin::Added | Origin::Named => true,
        };
        let left_out = self.left_out();
        for one in left_out.iter().filter(is_expected) {
            let (what, doing) = one.describe();
            let path = one.path.display();
            problems.push(Found::new(Code::DeviceLeftOut, path, what, doing));
        }
        problems
    }
}

/// Attempts to sync replicas that have brought nothing for this long are told.
const SYNC_STALLED_AFTER: Duration = Duration::from_secs(60);

/// What to do about a full device.
pub const MAKE_ROOM: &str =
    "delete volumes, trim in guests, or add devices with `penstock device add`";

/// Placement groups whose replicas on this node cannot be brought up to date.
fn sync_stalled(groups: u32, lasted: Duration, now: Moment) -> Option<Found> {
    if lasted < SYNC_STALLED_AFTER {
        return None;
    }
    let since = now.to_millis().0.saturating_sub(lasted.as_millis() as u64);
    let found = Found::new(
        Code::SyncStalled,
        "",
        format!(
            "{groups} placement groups cannot be synced to this node: they are not progressing"
        ),
        "each attempt fails and is repeated; see the log of this node for the cause",
    );
    Some(found.since(Some(meta::UnixMillis(since).into())))
}

fn shortage(device: &DeviceStatus) -> Option<Found> {
    let path = device.path.display();
    if let Err(error) = std::fs::metadata(&device.path)
        && error.kind() == std::io::ErrorKind::NotFound
    {
        return Some(Found::new(
            Code::DeviceFileGone,
            &path,
            format!(
                "nothing is at {path} any more: what is stored there goes when this daemon ends"
            ),
            "do not stop the daemon; move the data to another device with `penstock device remove`, or copy \
             volumes with `penstock volume export`",
        ));
    }
    if let Some(free) = short_of_room(device) {
        let effect = match device.is_full {
            true => "it refuses writes",
            false => "writes will be refused",
        };
        return Some(Found::new(
            Code::HostFilesystemShort,
            &path,
            format!("the filesystem under device {path} has only {free} free: {effect}"),
            "make room on it",
        ));
    }
    if device.is_full {
        let (free, total) = (Size(device.free_bytes), Size(device.total_bytes));
        let what = format!("device {path} is full: it refuses writes, with {free} of {total} free");
        let doing = MAKE_ROOM;
        return Some(Found::new(Code::DeviceFull, path, what, doing));
    }
    None
}

/// Free space under a sparse device file, when writes are about to find none.
fn short_of_room(device: &DeviceStatus) -> Option<Size> {
    let found = std::fs::metadata(&device.path)
        .ok()
        .filter(std::fs::Metadata::is_file)?;
    let holes = holes(&found);
    let free = free_bytes(device.path.parent()?).ok()?;
    (free < holes.min(HOST_FREE_BYTES_MIN)).then_some(Size(free))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn replicas_that_do_not_get_on_are_told_after_a_while() {
        let at = |ms| Moment::from(meta::UnixMillis(ms));
        let told = |lasted| sync_stalled(3, lasted, at(500_000));
        assert_eq!(told(SYNC_STALLED_AFTER - Duration::from_millis(1)), None);
        let found = told(SYNC_STALLED_AFTER).expect("it is told");
        assert!(
            found.problem.what.contains("3 placement groups"),
            "{found:?}"
        );
        assert_eq!(found.problem.since, Some(at(440_000)));
    }
}
