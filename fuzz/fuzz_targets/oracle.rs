//! Our split ring beside rust-vmm's `virtio-queue` on the same memory: `cargo +nightly fuzz run oracle`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    vhost_backend::fuzzing::oracle(data);
});
