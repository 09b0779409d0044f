//! Devices that a node of several goes on without: what they held others have. They are never made anew or
//! formatted, and as long as one is missing nothing else is made either: what is blank now may have been it.

use std::path::{Path, PathBuf};

use api::failure::{Failure, Kind, Result};
use fabric::FabricError;
use fabric_store::file::OpenedAhead;
use meta::DeviceId;
use uuid::Uuid;

use super::{Content, Named, look};

/// A device that is not opened, though this node is told to have it.
#[derive(Debug, Clone)]
pub struct LeftOut {
    /// Where it should be.
    pub path: PathBuf,
    /// Why not.
    pub failure: Failure,
    /// Who says that this node has it.
    pub origin: Origin,
}

/// Who says that a node has a device that it does not open.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Origin {
    /// The list of devices that were added; nothing lies on it yet.
    Added,
    /// The configuration; meta does not know it.
    Named,
    /// Meta: it holds replicas.
    Known(DeviceId),
}

impl LeftOut {
    /// A device that meta knows, and that could not be opened.
    pub fn known(device: &meta::Device, failure: Failure) -> Self {
        LeftOut {
            path: PathBuf::from(&device.path),
            failure,
            origin: Origin::Known(device.id),
        }
    }

    /// A store that was found and could not be opened; `device` is what meta knows of it.
    pub fn unopened(path: &Path, device: Option<&meta::Device>, error: &FabricError) -> Self {
        LeftOut {
            path: path.to_owned(),
            failure: Failure::plain(Kind::Failed, error),
            origin: device.map_or(Origin::Named, |device| Origin::Known(device.id)),
        }
    }

    /// What a person is told: what is wrong, and what becomes of it.
    pub fn describe(&self) -> (String, String) {
        let (shown, failure) = (self.path.display(), &self.failure);
        match self.origin {
            Origin::Added => (
                format!("device {shown} was added and cannot be used: {failure}"),
                format!(
                    "fix that and repeat `penstock device add`, or take it back with `penstock device remove \
                     {shown}`"
                ),
            ),
            Origin::Named => (
                format!("device {shown} is not used: {failure}"),
                "fix that and restart the daemon".to_owned(),
            ),
            Origin::Known(id) => (
                format!(
                    "device {shown} (number {id}) cannot be opened, and this node goes on without it: {}",
                    failure.error
                ),
                format!(
                    "bring it back and restart the daemon, and it gets what it missed; if it is gone for \
                     good, give it up with \
                     `penstock device remove {id}`"
                ),
            ),
        }
    }
}

/// Takes out of `named` what this node goes on without: the devices that are `missing`, and whatever is not a
/// store. `failed` are named paths that could not be looked at.
pub(super) fn go_without(
    named: &mut Vec<Named>,
    failed: Vec<(PathBuf, Failure)>,
    missing: &[&meta::Device],
    cluster: Uuid,
) -> Result<Vec<LeftOut>> {
    // One that another process has is well: whoever started that is told.
    if let Some((_, failure)) = failed.iter().find(|(_, f)| f.kind == Kind::Conflict) {
        return Err(failure.clone());
    }
    let mut left_out = Vec::new();
    for device in missing {
        let path = Path::new(&device.path);
        let why = failed.iter().find(|(failed, _)| failed == path);
        let found = named.iter().find(|named| named.path == path);
        if why.is_none() && found.is_none() {
            refuse_unnamed(device, cluster)?;
        }
        let failure = match (why, found.map(|named| &named.content)) {
            (Some((_, failure)), _) => failure.clone(),
            (None, Some(Content::Unlabelled)) => gone("is blank or was wiped", device),
            (None, Some(Content::Store(_))) => gone("has another one in its place", device),
            (None, Some(Content::Absent) | None) => gone("is missing", device),
        };
        left_out.push(LeftOut::known(device, failure));
    }
    let is_told = |path: &Path| missing.iter().any(|one| Path::new(&one.path) == path);
    let others = failed.into_iter().filter(|(path, _)| !is_told(path));
    left_out.extend(others.map(|(path, failure)| LeftOut {
        path,
        failure,
        origin: Origin::Named,
    }));
    let is_store = |one: &Named| matches!(one.content, Content::Store(_));
    let (stores, blank) = named.drain(..).partition(is_store);
    *named = stores;
    let blank: Vec<Named> = blank;
    let unreported = blank.into_iter().filter(|one| !is_told(&one.path));
    left_out.extend(unreported.map(|one| LeftOut {
        failure: not_made(&missing[0].path),
        path: one.path,
        origin: Origin::Named,
    }));
    Ok(left_out)
}

fn gone(how: &str, device: &meta::Device) -> Failure {
    let path = &device.path;
    Failure::plain(Kind::NotFound, format!("device {path} {how}"))
}

fn not_made(missing: &str) -> Failure {
    Failure::new(
        Kind::Conflict,
        format!(
            "nothing is made or formatted while device {missing} is missing, for it may be that one"
        ),
        format!("bring {missing} back, or give it up with `penstock device remove`"),
    )
}

/// A device that is well and only not named any more is none that a node has to go without.
fn refuse_unnamed(device: &meta::Device, cluster: Uuid) -> Result<()> {
    let found = look(Path::new(&device.path), cluster, &OpenedAhead::default());
    match found {
        Ok(Content::Store(id)) if id == device.uuid => Err(super::not_named(&device.path)),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use meta::{DeviceState, Incarnation, Name, NodeId, UnixMillis};

    use super::*;

    fn device(id: u64, path: &str) -> meta::Device {
        meta::Device {
            id: DeviceId(id),
            uuid: Uuid::from_u128(u128::from(id)),
            node: NodeId(1),
            path: path.to_owned(),
            size_bytes: 1 << 30,
            class: Name::parse("file").unwrap(),
            state: DeviceState::Online,
            incarnation: Incarnation(1),
            draining: false,
            added_at: UnixMillis(0),
        }
    }

    fn named(path: &str, content: Content) -> Named {
        Named {
            path: path.into(),
            size: None,
            content,
        }
    }

    fn store(id: u128) -> Content {
        Content::Store(Uuid::from_u128(id))
    }

    fn told(left_out: &[LeftOut]) -> Vec<(String, Origin, String)> {
        let told = left_out.iter().map(|one| {
            let path = one.path.display().to_string();
            (path, one.origin, one.failure.error.clone())
        });
        told.collect()
    }

    #[test]
    fn content_in_place_of_a_missing_device_is_left_untouched() {
        let lost = [
            device(1, "/no/absent"),
            device(2, "/no/blank"),
            device(3, "/no/bad"),
            device(4, "/no/other"),
            device(5, "/no/unnamed"),
        ];
        let mut all = vec![
            named("/no/absent", Content::Absent),
            named("/no/blank", Content::Unlabelled),
            named("/no/other", store(9)),
            named("/no/well", store(8)),
        ];
        let bad = Failure::plain(Kind::Failed, "input/output error");
        let missing: Vec<&meta::Device> = lost.iter().collect();
        let failed = vec![("/no/bad".into(), bad)];
        let left_out = go_without(&mut all, failed, &missing, Uuid::nil()).unwrap();
        let known = |path: &str, id, why: &str| {
            let (path, why) = (path.to_owned(), why.to_owned());
            (path, Origin::Known(DeviceId(id)), why)
        };
        assert_eq!(
            told(&left_out),
            [
                known("/no/absent", 1, "device /no/absent is missing"),
                known("/no/blank", 2, "device /no/blank is blank or was wiped"),
                known("/no/bad", 3, "input/output error"),
                known(
                    "/no/other",
                    4,
                    "device /no/other has another one in its place"
                ),
                known("/no/unnamed", 5, "device /no/unnamed is missing"),
            ]
        );
        let kept: Vec<_> = all.iter().map(|one| one.path.to_str().unwrap()).collect();
        assert_eq!(kept, ["/no/other", "/no/well"]);
        let (what, doing) = left_out[2].describe();
        assert!(what.contains("/no/bad (number 3)"), "{what}");
        assert!(what.contains("input/output error"), "{what}");
        assert!(doing.contains("penstock device remove 3"), "{doing}");
    }

    #[test]
    fn nothing_is_made_elsewhere_while_a_device_is_missing() {
        let lost = device(1, "/no/sda");
        let mut all = vec![
            named("/no/sdb", Content::Unlabelled),
            named("/no/new", Content::Absent),
        ];
        let bad = Failure::plain(Kind::Failed, "input/output error");
        let failed = vec![("/no/sdc".into(), bad)];
        let left_out = go_without(&mut all, failed, &[&lost], Uuid::nil()).unwrap();
        assert!(all.is_empty());
        let paths: Vec<_> = told(&left_out).into_iter().map(|(path, ..)| path).collect();
        assert_eq!(paths, ["/no/sda", "/no/sdc", "/no/sdb", "/no/new"]);
        assert!(left_out[2].failure.error.contains("/no/sda is missing"));
    }

    #[test]
    fn a_device_that_another_process_has_stops_the_start() {
        let lost = device(1, "/no/sda");
        let busy = Failure::plain(Kind::Conflict, "in use");
        let failed = vec![("/no/sda".into(), busy.clone())];
        let refused = go_without(&mut Vec::new(), failed, &[&lost], Uuid::nil());
        assert_eq!(refused.unwrap_err(), busy);
    }
}
