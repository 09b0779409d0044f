//! How the tests make and open a store; the only place that names the implementation.

use fabric::store::api::{CoreParams, DeviceLabel, RecoveryReport};
use fabric::store::{self, ShardCore};

use crate::sim_disk::SimDisk;

/// A core as the rig drives it.
pub type Core = ShardCore;

/// The cluster of all simulated disks.
pub const CLUSTER: [u8; 16] = [0xc1; 16];

/// Writes an empty store.
pub fn format(disk: &mut SimDisk) -> Result<(), String> {
    let label = DeviceLabel {
        cluster: CLUSTER,
        device: [0xde; 16],
    };
    store::format(disk, label, false).map_err(|e| e.to_string())
}

/// Opens the store on the disk. `nonce` is what the shell would draw from the kernel.
pub fn open(
    disk: &mut SimDisk,
    params: &CoreParams,
    nonce: u64,
) -> Result<(Vec<Core>, RecoveryReport), String> {
    let mut bytes = [0x5e; 16];
    bytes[..8].copy_from_slice(&nonce.to_le_bytes());
    store::open(disk, params, bytes).map_err(|e| e.to_string())
}
