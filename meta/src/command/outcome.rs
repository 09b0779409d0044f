//! Answers to commands.

use serde::{Deserialize, Serialize};

use crate::ids::NodeId;
use crate::model::{
    Attachment, Device, Export, Filesystem, FilesystemAttachment, Lease, Node, PlacementGroup,
    Pool, Volume,
};
use crate::refusal::Refusal;

/// What a command brought about.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// Nothing to tell.
    Done,
    /// The node as it is now.
    Node(Node),
    /// The number of the node that was let in.
    Admitted(NodeId),
    /// The placement group as it is now.
    Group(PlacementGroup),
    /// What became of several changes.
    Regrouped {
        /// How many were granted.
        granted: usize,
        /// Why others were not.
        refused: Vec<Refusal>,
    },
    /// The device as it is now (or was, when removed).
    Device(Device),
    /// The pool as it is now (or was, when deleted).
    Pool(Pool),
    /// The volume as it is now (or was, when removed).
    Volume(Volume),
    /// The lease as it is now.
    Lease(Lease),
    /// The attachment as it is now (or was, when deleted).
    Attachment(Attachment),
    /// The export as it is now (or was, when forgotten).
    Export(Export),
    /// The filesystem as it is now (or was, when its name became free).
    Filesystem(Filesystem),
    /// The attachment of a filesystem as it is now (or was, when deleted).
    FilesystemAttachment(FilesystemAttachment),
}

/// Answer to a command.
pub type Reply = Result<Outcome, Refusal>;
