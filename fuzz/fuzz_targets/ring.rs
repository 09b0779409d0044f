//! Chains off a ring that a guest filled with anything: `cargo +nightly fuzz run ring`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    vhost_backend::fuzzing::ring(data);
});
