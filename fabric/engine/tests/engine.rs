//! The production engine on real files: io_uring, direct I/O and the chunk store together.

#[path = "common/single_node.rs"]
mod single_node;

mod engine {
    mod cleaning;
    mod devices;
    mod evidence;
    mod guests;
    mod hotplug;
    mod leases;
    mod lost_leaf;
    mod rig;
    mod stored;
}
