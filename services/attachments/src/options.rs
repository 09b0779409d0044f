//! Options of an attachment that meta stores and this daemon interprets.

use std::collections::BTreeMap;

use api::failure::{Failure, Result};
use api::types::Attach;
use meta::AttachmentOptions;
use vhost_backend::blk::QUEUE_SIZE_DEFAULT;
use vhost_backend::ring::MAX_QUEUE_SIZE;

use crate::block::BLOCK;

/// Absent unless the guest's memory must not be pinned.
const PIN: &str = "pin";
/// Size of the virtual machine's virtqueues. Absent for QEMU's default, and for a block device.
const QUEUE_SIZE: &str = "queue_size";

/// Returns the options of a request.
pub(crate) fn of(request: &Attach) -> Result<BTreeMap<String, String>> {
    if let Some(size) = request.queue_size
        && (!size.is_power_of_two() || size > MAX_QUEUE_SIZE || request.block)
    {
        return Err(Failure::invalid(
            format!("invalid queue size {size}"),
            format!("use a power of two up to {MAX_QUEUE_SIZE}; omit it for a block device"),
        ));
    }
    let pin = (!request.pin_memory).then(|| (PIN.to_owned(), false.to_string()));
    let block = request.block.then(|| (BLOCK.to_owned(), true.to_string()));
    let size = request.queue_size;
    let size = size.map(|size| (QUEUE_SIZE.to_owned(), size.to_string()));
    Ok(pin.into_iter().chain(block).chain(size).collect())
}

/// Returns whether the guest's memory may be pinned.
pub(crate) fn is_pinned(options: &AttachmentOptions) -> bool {
    options.extra.get(PIN).is_none_or(|value| value != "false")
}

/// Queue size that requests are limited to.
pub(crate) fn queue_size(options: &AttachmentOptions) -> u16 {
    let value = options.extra.get(QUEUE_SIZE);
    match value.and_then(|text| text.parse().ok()) {
        Some(size) => size,
        None if options.extra.contains_key(BLOCK) => block_device::RING_SIZE_MAX,
        None => QUEUE_SIZE_DEFAULT,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn attach(block: bool, queue_size: Option<u16>) -> Attach {
        Attach {
            volume: "a".to_owned(),
            socket: String::new(),
            block,
            queues: 1,
            queue_size,
            read_only: false,
            pin_memory: true,
            incoming: false,
        }
    }

    #[test]
    fn queue_size_is_the_requested_one_or_a_default() {
        for (block, asked, kept) in [
            (false, None, 128),
            (false, Some(16), 16),
            (false, Some(32768), 32768),
            (true, None, 256),
        ] {
            let options = AttachmentOptions {
                extra: of(&attach(block, asked)).unwrap(),
                ..AttachmentOptions::default()
            };
            assert_eq!(queue_size(&options), kept);
        }
        for (block, asked) in [(false, 0), (false, 100), (false, 40000), (true, 256)] {
            assert!(of(&attach(block, Some(asked))).is_err(), "{asked}");
        }
    }
}
