//! Metadata nodes as whole: opened, killed, damaged, and several talking to each other.
//!
//! One program for all, because each one that opens a node compiles and links openraft and RocksDB.

mod cluster;
mod common;
mod damage;
mod enrol;
mod filesystems;
mod full;
mod leaders;
mod majority;
mod recovery;
mod restart;
mod stored;
mod tls;
mod unheard;
mod upgrade;
