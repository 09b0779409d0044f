//! Log entries of a namespace from arbitrary bytes, applied and checked: `cargo +nightly fuzz run namespace`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    namespace::fuzzing::batch(data);
});
