//! Soft RoCE devices (rdma_rxe) that no longer take connections.
//!
//! Messages of queue pair 1 (InfiniBand: general services) set an RDMA connection up. On soft RoCE that
//! queue pair was found in its error state, for good, on machines whose card had been down or whose
//! floating address had moved away (Linux 6.12). From then on clients try to connect without an end. So
//! such a device is made anew before an export comes to this machine, and whenever its address is renewed.
//! Connections that the device still has break, and are made again.

use std::path::Path;

use serde::Deserialize;

use super::Result;
use super::command::succeed;

/// Every RDMA device of this machine, by name.
const DEVICES: &str = "/sys/class/infiniband";

/// A queue pair, as `rdma -j resource show qp` lists it.
#[derive(Debug, Deserialize)]
struct QueuePair {
    ifname: String,
    #[serde(rename = "type")]
    kind: String,
    state: String,
}

/// Makes those soft RoCE devices anew that take no connections any more.
pub fn renew() {
    let devices = std::fs::read_dir(DEVICES).into_iter().flatten().flatten();
    let mut names = devices.filter_map(|entry| entry.file_name().into_string().ok());
    if !names.any(|name| card_below(Path::new(DEVICES), &name).is_some()) {
        return;
    }
    // The tool that made them is there.
    let Ok(listed) = succeed("rdma", ["-j", "resource", "show", "qp"]) else {
        return;
    };
    for device in broken(&listed) {
        let Some(card) = card_below(Path::new(DEVICES), &device) else {
            continue;
        };
        match make_anew(&device, &card) {
            Ok(()) => tracing::warn!(
                device,
                card,
                "this soft RoCE device took no connections: made anew"
            ),
            Err(error) => tracing::error!(device, card, %error, "make a soft RoCE device anew"),
        }
    }
}

fn make_anew(device: &str, card: &str) -> Result<()> {
    succeed("rdma", ["link", "delete", device])?;
    succeed(
        "rdma",
        ["link", "add", device, "type", "rxe", "netdev", card],
    )?;
    Ok(())
}

/// Devices whose queue pair for general services is in its error state.
fn broken(listed: &str) -> Vec<String> {
    let pairs: Vec<QueuePair> = serde_json::from_str(listed).unwrap_or_else(|error| {
        tracing::warn!(%error, "what `rdma resource show qp` lists");
        Vec::new()
    });
    let general = pairs.into_iter().filter(|pair| pair.kind == "GSI");
    general
        .filter(|pair| pair.state == "ERR")
        .map(|pair| pair.ifname)
        .collect()
}

/// The network card of a soft RoCE device; hardware has no such file.
fn card_below(devices: &Path, device: &str) -> Option<String> {
    let card = std::fs::read_to_string(devices.join(device).join("parent")).ok()?;
    Some(card.trim().to_owned()).filter(|card| !card.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_whose_general_services_are_in_error_is_broken() {
        let listed = r#"[
            {"ifindex":1,"ifname":"rxe0","port":1,"lqpn":1,"type":"GSI","state":"ERR","sq-psn":2},
            {"ifindex":1,"ifname":"rxe0","port":1,"lqpn":17,"rqpn":18,"type":"RC","state":"ERR","comm":"x"},
            {"ifindex":2,"ifname":"rxe1","port":1,"lqpn":1,"type":"GSI","state":"RTS","sq-psn":56}]"#;
        assert_eq!(broken(listed), ["rxe0"]);
        assert_eq!(broken("[]"), [""; 0]);
        assert_eq!(broken("no list"), [""; 0]);
    }

    #[test]
    fn only_a_soft_device_has_a_card_below() {
        let devices = tempfile::tempdir().unwrap();
        for device in ["rxe0", "mlx5_0"] {
            std::fs::create_dir(devices.path().join(device)).unwrap();
        }
        std::fs::write(devices.path().join("rxe0/parent"), "eth0\n").unwrap();
        assert_eq!(card_below(devices.path(), "rxe0").as_deref(), Some("eth0"));
        assert_eq!(card_below(devices.path(), "mlx5_0"), None);
    }
}
