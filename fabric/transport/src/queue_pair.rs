//! One end of a queue pair beside a connection ([`endpoint`]): what is agreed ([`pairing`]), how a message
//! lies in memory ([`message`], [`slots`]), and which memory the other side may reach ([`regions`],
//! [`registrar`]). What sends and receives is behind the traits of [`pair`]: a device, or what a test puts
//! there.

pub mod endpoint;
#[cfg(test)]
pub(crate) mod fake;
pub mod message;
pub mod pair;
pub mod pairing;
pub mod regions;
pub mod registrar;
pub mod slots;
