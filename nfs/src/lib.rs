//! NFS exports of volumes. A volume carries XFS, is mounted on one NFS node at a time from a block device of
//! that node, and is exported there by the kernel's NFS server. Why so: `docs/decisions/0014-nfs-gateway.md`.
//!
//! | part | what it does |
//! |---|---|
//! | [`core`] | which step an NFS node takes next for an export: pure; begin here |
//! | [`placement`] | which NFS node takes an export over: pure |
//! | [`plan`] | what an export is: clients, floating address, options of the kernel's NFS server |
//! | [`records`] | which clients may reclaim their locks: pure |
//! | [`wire`] | messages between daemon and helper |
//! | [`client`] | the daemon's end |
//! | [`helper`] | the process with the rights: formats, mounts, exports, sets addresses |
//!
//! **Architecture Invariant:** `core`, `placement`, `plan` and `records` contain no clock, file, socket or
//! process. They are told what was seen and say what to do.
//!
//! **Architecture Invariant:** this crate knows neither meta nor the data path. Whether a node may mount is
//! told by the daemon, from the lease of the volume.

pub mod client;
pub mod core;
pub mod helper;
pub mod placement;
pub mod plan;
pub mod records;
pub mod wire;
