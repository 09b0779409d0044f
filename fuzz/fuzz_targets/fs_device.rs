//! Chains of a virtio-fs guest from arbitrary bytes: `cargo +nightly fuzz run fs_device`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    fs_device::fuzzing::chains(data);
});
