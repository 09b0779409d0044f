//! The production engine on real files: io_uring, direct I/O and the chunk store together.

mod engine {
    mod devices;
    mod guests;
    mod leases;
    mod rig;
}
