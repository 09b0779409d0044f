//! How the tests make and open a store; the only place that names the implementation.

use super::sim_disk::SimDisk;
use crate::ShardCore;
use crate::api::{CoreParams, DeviceLabel, RecoveryReport};

/// A core as the rig drives it.
pub type Core = ShardCore;

/// The cluster of all simulated disks.
pub const CLUSTER: [u8; 16] = [0xc1; 16];

/// Writes an empty store.
///
/// # Errors
/// What formatting says.
pub fn format(disk: &mut SimDisk) -> Result<(), String> {
    let label = DeviceLabel {
        cluster: CLUSTER,
        device: [0xde; 16],
    };
    crate::format(disk, label, false).map_err(|e| e.to_string())
}

/// Opens the store on the disk. `nonce` is what the shell would draw from the kernel.
///
/// # Errors
/// What opening says.
pub fn open(
    disk: &mut SimDisk,
    params: &CoreParams,
    nonce: u64,
) -> Result<(Vec<Core>, RecoveryReport), String> {
    let mut bytes = [0x5e; 16];
    bytes[..8].copy_from_slice(&nonce.to_le_bytes());
    crate::open(disk, params, bytes).map_err(|e| e.to_string())
}
