//! Whole sessions: a scripted front end on a socket, a real device on data threads, a RAM disk; and a device
//! that is no disk.

mod blkio;
mod connections;
mod echo;
mod faults;
mod inflight;
mod memory;
mod messages;
mod migration;
mod ring_sizes;
mod support;
