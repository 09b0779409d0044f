//! `penstock device add`.

use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use api::client::Client;
use api::failure::{Failure, Kind, Result};
use api::types::{ConfigOrigin, ConfigValue, Device, DeviceAdd};
use config::datadir::default_device_in;
use config::devices::refused;
use config::{self, DeviceSpec};
use fabric_store::file::{DeviceError, DeviceFile};
use hyper::Method;
use rustix::fs::FileType;
use sandbox::{is_block_device, is_roots};

use crate::commands::{absolute, print_json};

/// Runs the verb.
pub async fn run(client: &Client, json: bool, device: &DeviceSpec) -> Result<()> {
    let request = DeviceAdd {
        path: absolute("device", device.path())?,
        size_bytes: device.size().map(|size| size.0),
    };
    let device = add(client, &request).await?;
    if json {
        return print_json(&device);
    }
    eprintln!("penstock: {}", after_addition(&device));
    Ok(())
}

/// A daemon that may not open a block device is handed the open device.
async fn add(client: &Client, request: &DeviceAdd) -> Result<Device> {
    let ask = || client.call(Method::POST, "/v1/devices", request);
    let path = Path::new(&request.path);
    let denied = match ask().await {
        Err(failure) if failure.kind == Kind::Denied && is_block_device(path) => failure,
        answer => return answer,
    };
    if !is_roots(path) {
        // The daemon could lead this command to something else.
        let hint = "name the disk by a path below /dev, in a directory where only root writes";
        return Err(Failure::new(Kind::Denied, denied.error, hint));
    }
    let values: Vec<ConfigValue> = client.get("/v1/config").await?;
    let devices: Vec<Device> = client.get("/v1/devices").await?;
    check_configured(&values, &devices, path).map_err(|(what, hint)| {
        Failure::new(Kind::Denied, format!("{}; {what}", denied.error), hint)
    })?;
    let owned = path.to_owned();
    let device = tokio::task::spawn_blocking(move || open(&owned)).await;
    let device = device.map_err(|e| Failure::plain(Kind::Failed, e))??;
    let _kept = client.hand_over(path, device).await?;
    ask().await
}

/// Opens a block device, for the daemon.
fn open(path: &Path) -> Result<OwnedFd> {
    let device = DeviceFile::open(path).map_err(|e| match &e {
        DeviceError::Os { source, .. } if source.kind() == io::ErrorKind::PermissionDenied => {
            let what = format!("cannot open device {}: permission denied", path.display());
            let hint = match rustix::process::geteuid().is_root() {
                true => "the kernel denies it to root: allow the device in this container",
                false => "run this as root",
            };
            Failure::new(Kind::Denied, what, hint)
        }
        _ => refused::failure(&e),
    })?;
    let device = OwnedFd::from(device);
    // By now the path may lead to something else.
    let found = rustix::fs::fstat(&device).map_err(|e| Failure::plain(Kind::Failed, e))?;
    match FileType::from_raw_mode(found.st_mode) {
        FileType::BlockDevice => Ok(device),
        _ => Err(Failure::plain(
            Kind::Conflict,
            format!("{} is no block device any more", path.display()),
        )),
    }
}

/// Refuses a device that the daemon's next start could not open, and a configuration that forgets another:
/// what is wrong, and what to do. `values` are in force, `devices` those of the cluster.
fn check_configured(
    values: &[ConfigValue],
    devices: &[Device],
    path: &Path,
) -> Result<(), (String, String)> {
    let shown = path.display();
    let by_option =
        |value: &ConfigValue| value.key == "devices" && value.origin == ConfigOrigin::Option;
    let file = values.iter().find_map(|value| value.file.as_ref());
    let Some(file) = file.filter(|_| !values.iter().any(by_option)) else {
        return Err((
            "its devices are named where it is started, not in a file".to_owned(),
            format!("start it anew, with {shown} among them"),
        ));
    };
    if !file.is_file() {
        // The daemon says where it is; reading something else could do anything.
        return Err((
            format!("its configuration {} is no file here", file.display()),
            format!("name {shown} under `devices` where it reads them, and restart it"),
        ));
    }
    let named = match config::read(file) {
        Ok(file) => file.devices.unwrap_or_default(),
        Err(failure) => return Err((failure.error, failure.hint.unwrap_or_default())),
    };
    let named: Vec<&Path> = named.iter().map(DeviceSpec::path).collect();
    let real = |path: &Path| path.canonicalize().unwrap_or_else(|_| path.to_owned());
    if let Some(other) = named
        .iter()
        .find(|one| **one != path && real(one) == real(path))
    {
        let other = other.display();
        return Err((
            format!("{} names this disk as {other}", file.display()),
            format!("add it by that path: `penstock device add {other}`"),
        ));
    }
    let is_open = |path: &Path| {
        let mut here = devices.iter().filter(|one| one.memory_bytes.is_some());
        here.any(|one| Path::new(&one.path) == path)
    };
    let mut needed = devices_in_force(values);
    needed.retain(|path| is_open(path));
    // Those that were handed over since the start.
    let blocks = devices.iter().map(|one| PathBuf::from(&one.path));
    needed.extend(blocks.filter(|path| is_open(path) && is_block_device(path)));
    needed.push(path.to_owned());
    needed.sort();
    needed.dedup();
    let lacking = needed
        .iter()
        .filter(|path| !named.contains(&path.as_path()));
    let lacking: Vec<String> = lacking.map(|path| path.display().to_string()).collect();
    match lacking.is_empty() {
        true => Ok(()),
        false => Err((
            "without a change of the configuration its next start could not open it either"
                .to_owned(),
            format!(
                "name {} under `devices` in {}, and repeat this: no restart is needed",
                lacking.join(" and "),
                file.display()
            ),
        )),
    }
}

/// What the daemon's configuration names, or the default device if it names none: a list replaces that.
fn devices_in_force(values: &[ConfigValue]) -> Vec<PathBuf> {
    let of = |key: &str| {
        let value = values.iter().find(|value| value.key == key)?;
        let line = format!("{key} = {}", config::as_toml(&value.value));
        config::parse(&line, "in force").ok()
    };
    match of("devices").and_then(|file| file.devices) {
        Some(devices) => devices.iter().map(|one| one.path().to_owned()).collect(),
        None => {
            let data = of("data").and_then(|file| file.data);
            data.as_deref().map(default_device_in).into_iter().collect()
        }
    }
}

/// What an addition came to.
fn after_addition(device: &Device) -> String {
    let (path, node) = (&device.path, &device.node);
    match device.id {
        Some(id) => format!("device {path} of node {node} is in service, with number {id}"),
        None => format!(
            "device {path} is added to node {node} and not in service yet: `penstock device list` shows it \
             with a number when it is. A disk that this cluster has used before is in service after the next \
             start of that node's daemon"
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn value(key: &str, value: impl Into<serde_json::Value>, file: Option<&Path>) -> ConfigValue {
        let origin = match file {
            Some(_) => ConfigOrigin::File,
            None => ConfigOrigin::Option,
        };
        ConfigValue {
            key: key.to_owned(),
            value: value.into(),
            origin,
            file: file.map(Path::to_owned),
        }
    }

    fn open_device(path: &str) -> Device {
        serde_json::from_value(serde_json::json!({
            "id": 3, "node": "one", "path": path, "class": "disk", "state": "ok",
            "capacity_bytes": 1, "groups": 7, "memory_bytes": 1
        }))
        .unwrap()
    }

    #[test]
    fn the_file_has_to_name_what_the_next_start_needs() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("penstock.toml");
        let file = Some(path.as_path());
        let check = |text: &str, values: &[ConfigValue], disk: &str| {
            std::fs::write(&path, text).unwrap();
            let devices = [open_device("/srv/p/devices/0.img"), open_device("/dev/a")];
            check_configured(values, &devices, Path::new(disk))
        };
        let default = [value("data", "/srv/p", file)];
        let (_, hint) = check("", &default, "/dev/b").unwrap_err();
        let both = "name /dev/b and /srv/p/devices/0.img under";
        assert!(hint.starts_with(both), "{hint}");
        let both = "devices = [\"/srv/p/devices/0.img\", \"/dev/b\"]";
        check(both, &default, "/dev/b").unwrap();

        // One that is in force and not open was removed.
        let named = [value("devices", vec!["/dev/a", "/dev/gone"], file)];
        let (_, hint) = check("devices = [\"/dev/b\"]", &named, "/dev/b").unwrap_err();
        assert!(hint.starts_with("name /dev/a under"), "{hint}");
        check("devices = [\"/dev/a\", \"/dev/b\"]", &named, "/dev/b").unwrap();

        let by_option = [
            value("devices", vec!["/dev/a"], None),
            value("threads", 2, file),
        ];
        for values in [&by_option[..], &by_option[..1]] {
            let (what, _) =
                check("devices = [\"/dev/a\", \"/dev/b\"]", values, "/dev/b").unwrap_err();
            assert!(what.contains("where it is started"), "{what}");
        }
    }

    #[test]
    fn a_disk_has_one_name() {
        let dir = tempfile::tempdir().unwrap();
        let (path, link) = (dir.path().join("penstock.toml"), dir.path().join("by-id"));
        std::os::unix::fs::symlink("/dev/null", &link).unwrap();
        std::fs::write(
            &path,
            format!("devices = [{:?}]", link.display().to_string()),
        )
        .unwrap();
        let values = [value("threads", 2, Some(&path))];
        let (_, hint) = check_configured(&values, &[], Path::new("/dev/null")).unwrap_err();
        assert!(
            hint.ends_with(&format!("add {}`", link.display())),
            "{hint}"
        );
        check_configured(&values, &[], &link).unwrap();
    }
}
