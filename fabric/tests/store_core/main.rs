//! What the chunk store promises beside surviving crashes: versions, fences, layers, bounds; and its figures.

mod disk;
mod faults;
mod figures;
mod rig;
mod semantics;
