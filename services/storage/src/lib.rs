//! Storage service: the devices of this node, the data path upon them ([`Storage`]), and what people do with
//! devices ([`Devices`]) and pools ([`Pools`]).

mod cluster_map;
mod copier;
mod daemon;
pub mod damage;
mod device_list;
mod devices;
mod garbage;
mod hand_over;
mod marks;
mod meta_requests;
mod metrics;
mod pools;
mod routes;
pub mod selection;
mod storage;
mod used;

pub use copier::Copier;
pub use daemon::{FileNames, StorageService};
pub use device_list::DeviceList;
pub use devices::Devices;
pub use pools::Pools;
pub use routes::paths;
pub use storage::{
    Background, Device, Handle, LocalDevice, MAKE_ROOM, Session, Storage, Threads, fabric_failure,
    on_full,
};
pub use used::{Used, UsedBytes};
