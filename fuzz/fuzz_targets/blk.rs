//! A whole queue with a hostile guest and an unreliable engine: `cargo +nightly fuzz run blk`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    vhost_backend::fuzzing::blk(data);
});
