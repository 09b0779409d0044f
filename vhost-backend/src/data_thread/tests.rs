//! Tests of whole queues: a fake guest, a data thread, and a RAM disk whose completions are scripted.

mod basics;
mod latency;
mod lifecycle;
mod notify;
mod panics;
mod pings;
mod stalls;
mod support;
