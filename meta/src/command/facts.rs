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

    /// Removes claims that only the leader can judge: that a lease has run out, and the time by which offers
    /// end. Nodes that are not the leader remove them too, because any of them may become the leader at this
    /// moment.
    pub(crate) fn without_claims(mut self, now: UnixMillis) -> Self {
        self.remove_claims(now);
        self
    }

    fn remove_claims(&mut self, now: UnixMillis) {
        match self {
            Self::Authored { command, .. } => command.remove_claims(now),
            Self::GrantLease { expired, .. } => *expired = None,
            Self::TakeOverAttachment { expired, at, .. } => (*expired, *at) = (None, now),
            Self::CreateAttachment { at, .. }
            | Self::MoveAttachment { at, .. }
            | Self::OfferAttachment { at, .. }
            | Self::ExpireOffers { at } => *at = now,
            _ => {}
        }
    }

    /// When it was proposed, where it says so.
    pub(crate) fn at(&self) -> UnixMillis {
        match self {
            Self::Bootstrap { at, .. }
            | Self::RegisterNode { at, .. }
            | Self::SetNodeState { at, .. }
            | Self::SetNodeAdminState { at, .. }
            | Self::RemoveNode { at, .. }
            | Self::EvictNode { at, .. }
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
            | Self::OfferAttachment { at, .. }
            | Self::ExpireOffers { at }
            | Self::CreateExport { at, .. }
            | Self::CreateFilesystem { at, .. }
            | Self::DeleteFilesystem { at, .. }
            | Self::CreateSegmentVolume { at, .. }
            | Self::CreateFilesystemAttachment { at, .. }
            | Self::AssignExport { at, .. }
            | Self::BeginHistory { at, .. }
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::command::{AttachmentSpec, Author};
    use crate::ids::{AttachmentId, Generation, NodeId};
    use crate::model::AttachmentOptions;

    #[test]
    fn only_the_leader_decides_lease_expiry_and_the_time() {
        let (claimed, now) = (UnixMillis(1), UnixMillis(1000));
        let take_over = |expired, at| Command::TakeOverAttachment {
            attachment: AttachmentId(1),
            expired,
            at,
        };
        let grant = |expired| Command::GrantLease {
            volume: "disk".to_owned(),
            node: NodeId(2),
            expired,
            at: claimed,
        };
        let create = |at| Command::Authored {
            by: Author {
                node: NodeId(2),
                uid: None,
                forced: false,
            },
            at: claimed,
            command: Box::new(Command::CreateAttachment {
                attachment: AttachmentSpec {
                    volume: "disk".to_owned(),
                    node: NodeId(2),
                    socket: "/run/disk.sock".to_owned(),
                    queues: 1,
                    read_only: false,
                    options: AttachmentOptions::default(),
                },
                at,
            }),
        };
        let run_out = Some(Generation(1));
        for (command, left) in [
            (take_over(run_out, claimed), take_over(None, now)),
            (grant(run_out), grant(None)),
            (create(claimed), create(now)),
        ] {
            assert_eq!(command.without_claims(now), left);
        }
    }
}
