//! Tests of the real binary: each starts its own daemon in a directory of its own.

mod cluster;
mod configuration;
mod contract;
mod conventions;
mod devices;
mod events;
mod foreign_images;
mod found;
mod front;
mod fs_verbs;
mod full_host;
mod guests;
mod harness;
mod idle;
mod images;
mod lifecycle;
mod metrics;
mod privileges;
mod stats;
mod supervision;
mod support;
mod transfers;
mod usage;
mod used;
mod verbs;
