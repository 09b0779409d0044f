//! `penstock device …`.

mod add;
mod scrub;

use api::client::{Client, encode};
use api::failure::Result;
use api::size::Size;
use api::types::{Device, DeviceRemoveQuery, DeviceState};
use hyper::Method;

use crate::args::DeviceCommand;
use crate::table::Table;

use super::{confirm, or_dash, path_or_name, print, print_json};

/// Runs a verb.
pub async fn run(verb: DeviceCommand, client: &Client, json: bool) -> Result<()> {
    match verb {
        DeviceCommand::List => list(client, json).await,
        DeviceCommand::Scrub(verb) => scrub::run(verb, client, json).await,
        DeviceCommand::Add { device } => add::run(client, json, &device).await,
        DeviceCommand::Remove {
            device,
            cancel,
            accept_data_loss,
            yes,
        } => {
            let query = DeviceRemoveQuery {
                off: cancel,
                accept_data_loss,
            };
            remove(client, json, &device, (&query, yes)).await
        }
    }
}

async fn list(client: &Client, json: bool) -> Result<()> {
    let devices: Vec<Device> = client.get("/v1/devices").await?;
    if json {
        return print_json(&devices);
    }
    let mut table = Table::new([
        ">ID",
        "NODE",
        "DEVICE",
        "STATE",
        ">CAPACITY",
        ">USED",
        ">FREE",
        ">GROUPS",
        "SCRUB",
    ]);
    for d in &devices {
        if let Some(reason) = &d.reason {
            eprintln!("penstock: device {} is not open: {reason}", d.path);
        }
    }
    for d in devices {
        let scrub = d.scrub.map(|scrub| {
            format!(
                "{} passes, {} blocks, {} errors, {} repaired, {} bad now",
                scrub.passes, scrub.blocks, scrub.errors, scrub.repaired, scrub.bad
            )
        });
        let size =
            |bytes: Option<u64>| or_dash(bytes.map(|b| Size(b).to_string()).unwrap_or_default());
        table.row([
            or_dash(d.id.map(|id| id.to_string()).unwrap_or_default()),
            d.node,
            d.path,
            d.state.word().to_owned(),
            Size(d.capacity_bytes).to_string(),
            size(d.used_bytes),
            size(d.free_bytes),
            d.groups.to_string(),
            or_dash(scrub.unwrap_or_default()),
        ]);
    }
    print(|mut out| table.print(&mut out))
}

async fn remove(
    client: &Client,
    json: bool,
    name: &str,
    (query, yes): (&DeviceRemoveQuery, bool),
) -> Result<()> {
    let devices: Vec<Device> = client.get("/v1/devices").await?;
    let is_number = name.parse::<u64>().is_ok();
    let paths = devices.iter().map(|d| d.path.as_str());
    let name = path_or_name("device", name, is_number, paths)?;
    let known = devices
        .iter()
        .find(|d| d.path == name || d.id.is_some_and(|id| id.to_string() == name));
    if let (Some(device), false) = (known, query.off) {
        let (path, node) = (&device.path, &device.node);
        let what = match query.accept_data_loss {
            true => {
                format!("forget device {path} of node '{node}', and all data that only it has,")
            }
            false => format!("move all data off device {path} of node '{node}' and forget it"),
        };
        confirm::confirm(&what, yes)?;
    }
    let DeviceRemoveQuery {
        off,
        accept_data_loss,
    } = query;
    let path = format!(
        "/v1/devices/{}?off={off}&accept_data_loss={accept_data_loss}",
        encode(&name)
    );
    let device: Device = client.call(Method::DELETE, &path, &()).await?;
    if json {
        return print_json(&device);
    }
    eprintln!("penstock: {}", after_removal(&device, *off));
    Ok(())
}

/// What a removal, or calling one off, came to.
fn after_removal(device: &Device, off: bool) -> String {
    let path = &device.path;
    let left = device.groups_left.unwrap_or(device.groups);
    match device.state {
        DeviceState::Removed => format!("device {path} is removed"),
        _ if off => format!("device {path} may hold data again"),
        DeviceState::Offline | DeviceState::Failed => format!(
            "device {path} is gone: what it held is rebuilt elsewhere from other replicas, {left} placement \
             groups are left; it is removed then, see `penstock device list`"
        ),
        _ => format!(
            "device {path} is being emptied, {left} placement groups are left; it is removed once it is \
             empty, see `penstock device list`"
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_removal_says_what_was_done() {
        let told = |state, off| {
            let device = Device {
                state,
                ..serde_json::from_value(serde_json::json!({
                    "id": 3, "node": "one", "path": "/dev/sdx", "class": "disk", "state": "ok",
                    "capacity_bytes": 1, "groups": 7, "groups_left": 5
                }))
                .unwrap()
            };
            after_removal(&device, off)
        };
        assert!(told(DeviceState::Removed, false).ends_with("is removed"));
        for gone in [DeviceState::Offline, DeviceState::Failed] {
            let line = told(gone, false);
            assert!(
                line.contains("is gone") && line.contains("5 placement groups"),
                "{line}"
            );
            assert!(!line.contains("may hold data again"), "{line}");
        }
        assert!(told(DeviceState::Draining, false).contains("being emptied, 5"));
        for state in [DeviceState::Ok, DeviceState::Offline] {
            assert!(told(state, true).ends_with("may hold data again"));
        }
    }
}
