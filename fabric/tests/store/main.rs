//! The chunk store on a simulated disk.

mod crash;
mod disk;
mod history;
mod model;
mod rig;
