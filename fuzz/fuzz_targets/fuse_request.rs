//! A FUSE request of arbitrary bytes: `cargo +nightly fuzz run fuse_request`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    fuse_codec::fuzzing::request(data);
});
