//! What meta keeps of an attachment for this daemon to interpret.

use std::collections::BTreeMap;

use meta::AttachmentOptions;
use vhost_backend::blk::QUEUE_SIZE_DEFAULT;
use vhost_backend::ring::MAX_QUEUE_SIZE;

use crate::api::types::Attach;
use crate::failure::{Failure, Result};

use super::block::BLOCK;

/// Absent while the guest's memory may be pinned.
const PIN: &str = "pin";
/// Entries of the virtual machine's virtqueues. Absent for QEMU's, and for a block device.
const QUEUE_SIZE: &str = "queue_size";

/// The options that a request asks for.
pub(super) fn of(request: &Attach) -> Result<BTreeMap<String, String>> {
    if let Some(size) = request.queue_size
        && (!size.is_power_of_two() || size > MAX_QUEUE_SIZE || request.block)
    {
        return Err(Failure::invalid(
            format!("virtqueues of {size} entries are not possible"),
            format!(
                "give a power of two up to {MAX_QUEUE_SIZE}, and none for a block device, which makes its own"
            ),
        ));
    }
    let pin = (!request.pin_memory).then(|| (PIN.to_owned(), false.to_string()));
    let block = request.block.then(|| (BLOCK.to_owned(), true.to_string()));
    let size = request.queue_size;
    let size = size.map(|size| (QUEUE_SIZE.to_owned(), size.to_string()));
    Ok(pin.into_iter().chain(block).chain(size).collect())
}

/// Whether the guest's memory may be pinned.
pub(super) fn is_pinned(options: &AttachmentOptions) -> bool {
    options.extra.get(PIN).is_none_or(|told| told != "false")
}

/// Entries of the virtqueues that requests are made to fit.
pub(super) fn queue_size(options: &AttachmentOptions) -> u16 {
    let told = options.extra.get(QUEUE_SIZE);
    match told.and_then(|text| text.parse().ok()) {
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
    fn queue_sizes_are_those_asked_for_or_of_who_makes_the_rings() {
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
