//! Memory of one queue pair: what messages are received into and sent from.
//!
//! A slot is two pieces: 512 bytes for a message's head, and a page of its own for a payload, so that a
//! device can write a payload from where it was received, and read one to where it is sent from.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::ptr::NonNull;

use fabric_types::block::BLOCK_BYTES;

/// Bytes of a slot for the head.
pub const HEAD_BYTES: usize = 512;
/// Bytes of a slot for the payload; a longer one does not go along with a message.
pub const PAYLOAD_BYTES: usize = BLOCK_BYTES;
/// Receives that are posted: so many requests may be unanswered.
pub const RECEIVES: u16 = 128;
/// Slots to send from. More than receives: a reply may have freed its credit before it is known that it
/// arrived.
pub const SENDS: u16 = 160;

const SLOTS: usize = RECEIVES as usize + SENDS as usize;
/// The heads lie in front, on pages of their own.
const HEADS_BYTES: usize = (SLOTS * HEAD_BYTES).next_multiple_of(BLOCK_BYTES);

/// All bytes of it.
pub const BYTES: usize = HEADS_BYTES + SLOTS * PAYLOAD_BYTES;

/// A slot; those below [`RECEIVES`] receive.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Slot(pub u16);

impl Slot {
    /// Those that receive.
    pub fn receives() -> impl DoubleEndedIterator<Item = Self> {
        (0..RECEIVES).map(Self)
    }

    /// Those that are sent from.
    pub fn sends() -> impl DoubleEndedIterator<Item = Self> {
        (RECEIVES..RECEIVES + SENDS).map(Self)
    }

    /// Where its head lies.
    pub fn head_at(self) -> usize {
        usize::from(self.0) * HEAD_BYTES
    }

    /// Where its payload lies.
    pub fn payload_at(self) -> usize {
        HEADS_BYTES + usize::from(self.0) * PAYLOAD_BYTES
    }
}

/// See the module. A store may work on it when the queue pair is gone, so it is kept by whoever uses it.
#[derive(Debug)]
pub struct Slots {
    start: NonNull<u8>,
}

// SAFETY: the memory has no owner of its own: the queue pair's
// protocol decides who uses which slot when, see `head`.
unsafe impl Send for Slots {}
// SAFETY: as above.
unsafe impl Sync for Slots {}

fn layout() -> Layout {
    Layout::from_size_align(BYTES, BLOCK_BYTES).expect("a small size, a power of two")
}

impl Default for Slots {
    /// Zeroed.
    fn default() -> Self {
        // SAFETY: the size is not zero.
        let start = unsafe { alloc_zeroed(layout()) };
        let start = NonNull::new(start).unwrap_or_else(|| handle_alloc_error(layout()));
        Self { start }
    }
}

impl Slots {
    /// The first byte.
    pub fn start(&self) -> NonNull<u8> {
        self.start
    }

    /// A slot's payload.
    pub fn payload(&self, slot: Slot) -> *mut u8 {
        self.start.as_ptr().wrapping_add(slot.payload_at())
    }

    /// A slot's head.
    ///
    /// # Safety
    /// Nobody writes there, the device included, while it is used.
    pub unsafe fn head(&self, slot: Slot) -> &[u8; HEAD_BYTES] {
        let from = self.start.as_ptr().wrapping_add(slot.head_at());
        // SAFETY: the slot lies within, and the caller's promise.
        unsafe { &*from.cast::<[u8; HEAD_BYTES]>() }
    }

    /// A slot's page.
    ///
    /// # Safety
    /// As for [`head`](Self::head).
    pub unsafe fn page(&self, slot: Slot) -> &[u8; PAYLOAD_BYTES] {
        // SAFETY: as above.
        unsafe { &*self.payload(slot).cast::<[u8; PAYLOAD_BYTES]>() }
    }

    /// Writes the first bytes of a slot's page.
    ///
    /// # Safety
    /// Neither the device nor anybody else uses the slot now.
    ///
    /// # Panics
    /// If there are more than it has.
    pub unsafe fn set_page(&self, slot: Slot, bytes: &[u8]) {
        assert!(bytes.len() <= PAYLOAD_BYTES, "too long for a slot");
        // SAFETY: as above; the bytes are borrowed, and so not the slot's.
        unsafe { self.payload(slot).copy_from(bytes.as_ptr(), bytes.len()) };
    }

    /// Writes a slot's head, the rest of it zero.
    ///
    /// # Safety
    /// Neither the device nor anybody else uses the slot now.
    ///
    /// # Panics
    /// If it is too long.
    pub unsafe fn set_head(&self, slot: Slot, bytes: &[u8]) {
        let mut head = [0; HEAD_BYTES];
        head[..bytes.len()].copy_from_slice(bytes);
        let to = self.start.as_ptr().wrapping_add(slot.head_at());
        // SAFETY: as above.
        unsafe { to.cast::<[u8; HEAD_BYTES]>().write(head) };
    }
}

impl Drop for Slots {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout, and nobody else has it any more.
        unsafe { dealloc(self.start.as_ptr(), layout()) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_do_not_overlap_and_payloads_have_pages_of_their_own() {
        let slots = Slots::default();
        let all: Vec<Slot> = Slot::receives().chain(Slot::sends()).collect();
        assert_eq!(all.len(), SLOTS);
        for (nth, slot) in all.iter().enumerate() {
            // SAFETY: nobody else uses them.
            unsafe {
                slots.set_head(*slot, &[nth as u8; HEAD_BYTES]);
                slots.payload(*slot).write_bytes(nth as u8, PAYLOAD_BYTES);
            }
            assert_eq!(slots.payload(*slot).addr() % BLOCK_BYTES, 0);
        }
        for (nth, slot) in all.iter().enumerate() {
            // SAFETY: as above.
            let (head, payload) = unsafe { (slots.head(*slot), slots.payload(*slot).read()) };
            assert_eq!((head[0], head[HEAD_BYTES - 1]), (nth as u8, nth as u8));
            assert_eq!(payload, nth as u8);
        }
    }
}
