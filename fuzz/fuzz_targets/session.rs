//! A vhost-user session on arbitrary bytes: `cargo +nightly fuzz run session`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    vhost_backend::session::fuzzing::session_bytes(data);
});
