//! `penstock device scrub …`.

use api::client::{Client, encode};
use api::failure::Result;
use api::moment::duration;
use api::types::{Device, Scrub, ScrubSet, ScrubState};
use hyper::Method;

use crate::args::ScrubCommand;
use crate::commands::{or_dash, path_or_name, print, print_json};
use crate::table::Table;

/// Bytes of a block that is compared with its checksum.
const BLOCK_BYTES: u64 = 4096;

/// Runs a verb.
pub async fn run(verb: ScrubCommand, client: &Client, json: bool) -> Result<()> {
    match verb {
        ScrubCommand::Start { device } => set(client, json, device, true).await,
        ScrubCommand::Status => show(&devices(client).await?, json),
        ScrubCommand::Stop { device } => set(client, json, device, false).await,
    }
}

/// Those of the node that is asked: of others it does not know how far they are.
async fn devices(client: &Client) -> Result<Vec<Device>> {
    let mut devices: Vec<Device> = client.get("/v1/devices").await?;
    devices.retain(|device| device.scrub.is_some());
    Ok(devices)
}

async fn set(client: &Client, json: bool, device: Option<String>, run: bool) -> Result<()> {
    let known = devices(client).await?;
    let names = match device {
        Some(name) => {
            let is_number = name.parse::<u64>().is_ok();
            let paths = known.iter().map(|device| device.path.as_str());
            vec![path_or_name("device", &name, is_number, paths)?]
        }
        None => known.into_iter().map(|device| device.path).collect(),
    };
    let mut set = Vec::new();
    for name in names {
        let path = format!("/v1/devices/{}/scrub", encode(&name));
        let device: Device = client.call(Method::PUT, &path, &ScrubSet { run }).await?;
        set.push(device);
    }
    if json {
        return print_json(&set);
    }
    for device in set {
        match run {
            true => eprintln!("penstock: device {} is being read", device.path),
            false => eprintln!(
                "penstock: device {} is not being read any more",
                device.path
            ),
        }
    }
    Ok(())
}

fn show(devices: &[Device], json: bool) -> Result<()> {
    if json {
        return print_json(&devices);
    }
    let mut table = Table::new([
        "DEVICE",
        "SCRUB",
        ">PASSES",
        ">BLOCKS",
        ">ERRORS",
        ">REPAIRED",
        ">BAD NOW",
    ]);
    for device in devices {
        let scrub = device.scrub.unwrap_or_default();
        table.row([
            device.path.clone(),
            or_dash(state(device, &scrub)),
            scrub.passes.to_string(),
            scrub.blocks.to_string(),
            scrub.errors.to_string(),
            scrub.repaired.to_string(),
            scrub.bad.to_string(),
        ]);
    }
    print(|mut out| table.print(&mut out))
}

fn state(device: &Device, scrub: &Scrub) -> String {
    match scrub.state {
        ScrubState::Running => {
            let used = device.used_bytes.unwrap_or(0) / BLOCK_BYTES;
            let done = scrub.pass_blocks.unwrap_or(0) * 100;
            // What is used changes meanwhile; and the map is not read by it.
            let percent = done.checked_div(used).unwrap_or(0).min(99);
            format!("{percent} %")
        }
        ScrubState::Resting => {
            let next = scrub.next_s.map(duration);
            next.map_or_else(String::new, |next| format!("in {next}"))
        }
        ScrubState::Off => "off".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_scrub_says_how_far_it_is_or_when_it_begins() {
        let device: Device = serde_json::from_value(serde_json::json!({
            "node": "n1", "path": "/dev/sda", "class": "disk", "state": "ok", "groups": 0,
            "capacity_bytes": 1 << 30, "used_bytes": 400 * BLOCK_BYTES,
        }))
        .unwrap();
        let told = |state, pass_blocks, next_s| {
            let scrub = Scrub {
                state,
                pass_blocks,
                next_s,
                ..Scrub::default()
            };
            super::state(&device, &scrub)
        };
        assert_eq!(told(ScrubState::Running, Some(100), None), "25 %");
        assert_eq!(told(ScrubState::Running, Some(4000), None), "99 %");
        assert_eq!(told(ScrubState::Resting, None, Some(7200)), "in 2 h");
        assert_eq!(told(ScrubState::Off, None, None), "off");
    }
}
