//! Either end of a connection between nodes on arbitrary bytes: `cargo +nightly fuzz run wire`. The first
//! byte says whether checksums are made to fit.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    if let Some((first, rest)) = data.split_first() {
        fabric_transport::fuzzing::bytes(rest, first % 4 != 0);
    }
});
