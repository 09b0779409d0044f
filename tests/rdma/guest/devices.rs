//! What there is.

use anyhow::Result;
use fabric_rdma::verbs::device::DeviceList;
use fabric_rdma::verbs::fork::fork_safety;

use super::kit::{self, PORT};

/// Prints devices, limits, ports and GIDs.
pub fn show() -> Result<()> {
    let list = DeviceList::get()?;
    println!("devices: {}", list.len());
    for device in list.iter() {
        let context = device.open()?;
        let limits = context.limits()?;
        println!("device {}: {limits:?}", device.name());
        println!("windows of type 2: {}", limits.window_kinds.has_type_2());
        println!("forks: {:?}", fork_safety());
        kit::address(&context)?;
        println!("port {PORT}: {:?}", context.port(PORT)?);
        for entry in context.gids(PORT)? {
            let kind = entry.kind.map_or("?".to_owned(), |kind| kind.to_string());
            let interface = entry.interface.as_deref().unwrap_or("?");
            println!("gid {}: {} {kind} {interface}", entry.index, entry.gid);
        }
        // The port became active before anyone listened; whatever is told, nothing is told for ever.
        while let Some(event) = context.next_event()? {
            println!("event: {event:?}");
        }
    }
    Ok(())
}
