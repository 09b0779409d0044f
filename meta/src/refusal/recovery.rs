//! Why metadata that went on after a disaster are not changed as asked.

use serde::{Deserialize, Serialize};

use super::RefusalKind;
use crate::ids::{DeviceId, Incarnation};

/// Refusals about the recovery of metadata.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RecoveryRefusal {
    /// It is written to the log of a node that does not run.
    #[error(
        "a recovery cannot be asked of a running cluster: see `penstock cluster recover --help`"
    )]
    NotWhileRunning,
    /// Replicas are not being chosen.
    #[error(
        "nothing waits for this: the metadata of this cluster are not being restored from a backup"
    )]
    NothingToChoose,
    /// What devices hold of volumes is not known yet.
    #[error(
        "the metadata were restored from a backup, and which numbers volumes may have is not known before \
         all devices are back: see `penstock health`, and run `penstock meta resume` first"
    )]
    Choosing,
    /// No cluster comes to such an epoch.
    #[error(
        "device {device} tells of epoch {epoch}: it is damaged, or its node is not to be trusted"
    )]
    NoSuchEpoch {
        /// The device.
        device: DeviceId,
        /// The epoch.
        epoch: crate::ids::Epoch,
    },
    /// Devices are not back that may lack less than those that are.
    #[error(
        "{} not back, and may hold what no other device has: start their nodes, and see `penstock device \
         list`; if they are gone for good, repeat this with --without-missing, which goes on with what the \
         others have",
        Missing(.devices)
    )]
    DevicesMissing {
        /// The devices.
        devices: Vec<DeviceId>,
    },
    /// No device of a pool with volumes is there.
    #[error(
        "no device is back that could take over placement group {group}: start a node that has one"
    )]
    NobodyLeft {
        /// The group.
        group: crate::model::GroupId,
    },
    /// Another start of the node serves the device by now.
    #[error("device {device} is served by another start of its node than {claimed}: look again")]
    OtherStart {
        /// The device.
        device: DeviceId,
        /// The start that was named.
        claimed: Incarnation,
    },
}

impl RecoveryRefusal {
    pub(super) fn kind(&self) -> RefusalKind {
        match self {
            Self::NotWhileRunning => RefusalKind::Denied,
            _ => RefusalKind::Conflict,
        }
    }
}

/// `devices 3, 4 are`.
struct Missing<'a>(&'a [DeviceId]);

impl std::fmt::Display for Missing<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let numbers: Vec<String> = self.0.iter().map(DeviceId::to_string).collect();
        match numbers.as_slice() {
            [one] => write!(f, "device {one} is"),
            all => write!(f, "devices {} are", all.join(", ")),
        }
    }
}
