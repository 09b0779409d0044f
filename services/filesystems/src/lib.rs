//! Filesystem service: filesystems as people create and delete them, this node's clients of them and their
//! attachments ([`FilesystemService`]), and reclaim of unused space by the leader of a namespace group.

mod attachments;
mod backend;
mod daemon;
mod damaged;
mod detach;
mod figures;
mod filesystems;
mod reclaim;
mod routes;
mod segment_io;
mod segments;
mod shown;

pub use filesystems::FilesystemService;
pub use routes::paths;
