//! Disks that are plugged into a guest, and unplugged, while it runs: by QMP, as libvirt does it.

use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

use crate::process::wait_until;
use crate::vm::{Disk, Vm};

/// The guest is asked to let go of a disk, and does so within a second or two unless it is very busy.
const UNPLUG_LIMIT: Duration = Duration::from_secs(120);
/// Functions of one PCI slot: so many ports fit into it.
const PORTS_PER_SLOT: u8 = 8;
/// First slot of the ports; those below are taken by what the guest has anyway.
const FIRST_SLOT: u8 = 0x10;

/// QEMU's arguments for so many ports.
pub(crate) fn port_args(ports: u8) -> Vec<String> {
    let port = |index: u8| {
        let slot = FIRST_SLOT + index / PORTS_PER_SLOT;
        let function = index % PORTS_PER_SLOT;
        let number = index + 1;
        format!(
            "pcie-root-port,id=port{index},bus=pcie.0,chassis={number},slot={number},\
             addr={slot:#x}.{function:#x},multifunction=on"
        )
    };
    (0..ports)
        .flat_map(|index| ["-device".to_owned(), port(index)])
        .collect()
}

/// QEMU's names for the disk in a port.
fn names(port: u8) -> (String, String) {
    (format!("plugged{port}"), format!("chardev-plugged{port}"))
}

impl Vm {
    /// Plugs a disk into a free port. The guest finds it a moment later.
    pub fn plug(&mut self, port: u8, disk: &Disk) -> Result<()> {
        let (device, chardev) = names(port);
        let socket = disk.socket.to_str().context("the socket is not UTF-8")?;
        let backend = json!({
            "type": "socket",
            "data": {
                "addr": { "type": "unix", "data": { "path": socket } },
                "server": false,
                "reconnect": 1,
            },
        });
        self.qmp()
            .execute("chardev-add", json!({ "id": chardev, "backend": backend }))?;
        self.qmp()
            .execute(
                "device_add",
                json!({
                    "driver": "vhost-user-blk-pci",
                    "id": device,
                    "bus": format!("port{port}"),
                    "chardev": chardev,
                    "num-queues": disk.queues,
                    "queue-size": disk.queue_size,
                }),
            )
            .with_context(|| format!("plug a disk into port {port}"))?;
        Ok(())
    }

    /// Asks the guest to let go of the disk in a port, and takes it away when the guest has.
    pub fn unplug(&mut self, port: u8) -> Result<()> {
        let (device, chardev) = names(port);
        self.qmp().execute("device_del", json!({ "id": device }))?;
        wait_until(UNPLUG_LIMIT, || {
            Ok((!self.is_plugged(&device)?).then_some(()))
        })
        .with_context(|| format!("the guest keeps the disk in port {port}"))?;
        // QEMU frees the device a moment after its name, and only then its end of the connection.
        let chardev = json!({ "id": chardev });
        wait_until(UNPLUG_LIMIT, || {
            let removed = self.qmp().execute("chardev-remove", chardev.clone());
            match removed {
                Ok(_) => Ok(Some(())),
                Err(error) if error.to_string().contains("is busy") => Ok(None),
                Err(error) => Err(error),
            }
        })
        .with_context(|| format!("QEMU keeps the connection of port {port}"))
    }

    fn is_plugged(&mut self, device: &str) -> Result<bool> {
        let path = json!({ "path": "/machine/peripheral" });
        let listed = self.qmp().execute("qom-list", path)?;
        let Value::Array(children) = listed else {
            bail!("qom-list: {listed}");
        };
        Ok(children.iter().any(|child| child["name"] == device))
    }
}
