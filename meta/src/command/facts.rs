//! What is to be known of a command before it is applied.

use super::Command;
use crate::ids::UnixMillis;

impl Command {
    /// Whether it is refused where space has become short.
    pub(crate) fn makes_something_new(&self) -> bool {
        matches!(
            self.change(),
            Self::CreatePool { .. }
                | Self::CreateVolume { .. }
                | Self::ResizeVolume { .. }
                | Self::CreateAttachment { .. }
                | Self::MoveAttachment { .. }
                | Self::CreateExport { .. }
                | Self::CreateFilesystem { .. }
                | Self::CreateSegmentVolume { .. }
                | Self::CreateFilesystemAttachment { .. }
        )
    }

    /// When it was proposed, where it says so.
    pub(crate) fn at(&self) -> UnixMillis {
        match self {
            Self::Bootstrap { at, .. }
            | Self::RegisterNode { at, .. }
            | Self::SetNodeState { at, .. }
            | Self::SetNodeAdminState { at, .. }
            | Self::RemoveNode { at, .. }
            | Self::RemoveLost { at, .. }
            | Self::RaiseLevel { at, .. }
            | Self::LoseDevice { at, .. }
            | Self::CreateToken { at, .. }
            | Self::RedeemToken { at, .. }
            | Self::RegisterDevice { at, .. }
            | Self::SetDeviceState { at, .. }
            | Self::DrainDevice { at, .. }
            | Self::RemoveDevice { at, .. }
            | Self::ReportFailed { at, .. }
            | Self::Regroup { at, .. }
            | Self::Promote { at, .. }
            | Self::CreatePool { at, .. }
            | Self::CreateVolume { at, .. }
            | Self::GrantLease { at, .. }
            | Self::CreateAttachment { at, .. }
            | Self::TakeOverAttachment { at, .. }
            | Self::MoveAttachment { at, .. }
            | Self::CreateExport { at, .. }
            | Self::CreateFilesystem { at, .. }
            | Self::DeleteFilesystem { at, .. }
            | Self::CreateSegmentVolume { at, .. }
            | Self::CreateFilesystemAttachment { at, .. }
            | Self::AssignExport { at, .. }
            | Self::BeginHistory { at, .. }
            | Self::SettleGroups { at, .. }
            | Self::ReportEvidence { at, .. }
            | Self::ChooseReplicas { at, .. }
            | Self::ForgetUnknown { at }
            | Self::ExportWithdrawn { at, .. }
            | Self::Authored { at, .. }
            | Self::RecordNotice { at, .. } => *at,
            _ => UnixMillis::default(),
        }
    }
}
