//! What the chunk store promises beside surviving crashes: versions, fences, layers, bounds; and its figures.

mod disk;
mod faults;
mod figures;
mod recovery;
mod rig;
mod semantics;
