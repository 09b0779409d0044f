//! Requests of a hostile node, by connection or queue pair, executed on a replica with a store in memory:
//! `cargo +nightly fuzz run replica`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    fabric_testing::fuzzing::replica(data);
});
