//! Messages on a queue pair: a frame's head in a slot's first piece, padded, and its payload in the second.

use super::slots::{HEAD_BYTES, PAYLOAD_BYTES, Slot, Slots};
use crate::checksum::crc32c;
use crate::net::tcp::frame::{self, CRC_BYTES, FRAME_BYTES, FrameError, Head, Message, Stamp};
use crate::net::tcp::shape::Shape;

/// A message that was received, its head checked.
pub struct Received {
    /// The frame's head.
    pub head: Head,
    bytes: [u8; HEAD_BYTES],
}

/// Whether both ways of the exchange fit messages.
pub fn fits(shape: &Shape) -> bool {
    let most = PAYLOAD_BYTES as u32;
    shape.payload_len <= most && shape.room <= most
}

/// Writes a message's head into a slot. `scratch` is a place to work in.
///
/// # Safety
/// Neither the device nor anybody else uses the slot now.
pub unsafe fn write(
    message: &Message<'_>,
    stamp: &mut Stamp,
    slots: &Slots,
    slot: Slot,
    scratch: &mut Vec<u8>,
) {
    scratch.clear();
    message.encode(stamp, scratch);
    // SAFETY: the caller's promise.
    unsafe { slots.set_head(slot, scratch) };
}

/// Reads the message of `len` bytes that was received in a slot.
///
/// # Safety
/// The slot has not been posted again.
pub unsafe fn read(
    slots: &Slots,
    slot: Slot,
    len: u32,
    stamp: &mut Stamp,
) -> Result<Received, FrameError> {
    // SAFETY: the caller's promise.
    let bytes = unsafe { slots.head(slot) };
    let head = frame::parse(&bytes, stamp)?;
    let body = bytes.get(FRAME_BYTES..head.bytes());
    head.check_body(body.ok_or(FrameError::Field("header_len"))?)?;
    if len as usize != HEAD_BYTES + head.payload_len as usize {
        return Err(FrameError::Field("payload_len"));
    }
    Ok(Received { head, bytes })
}

impl Received {
    /// The message's own header.
    pub fn header(&self) -> &[u8] {
        &self.bytes[FRAME_BYTES..FRAME_BYTES + self.head.header_len]
    }

    /// Whether the payload is what was announced.
    ///
    /// # Safety
    /// It is the one that was received with this, and neither the device nor anybody else writes there.
    pub unsafe fn is_intact(&self, slots: &Slots, slot: Slot) -> bool {
        let len = self.head.payload_len as usize;
        // SAFETY: within the slot, for `read` has compared it with what was received; and the caller's promise.
        let payload = unsafe { std::slice::from_raw_parts(slots.payload(slot), len) };
        let from = FRAME_BYTES + self.head.header_len;
        let announced = self.bytes[from..self.head.bytes()].chunks_exact(CRC_BYTES);
        let mut rest = payload;
        let lens = frame::block_lens(self.head.skip, self.head.payload_len);
        announced.zip(lens).all(|(crc, len)| {
            let (block, others) = rest.split_at(len);
            rest = others;
            crc == crc32c(block).to_le_bytes()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::net::tcp::frame::Kind;

    fn message<'a>(header: &'a [u8], crcs: &'a [u32], payload_len: u32) -> Message<'a> {
        Message {
            kind: Kind::Request,
            pair: 5,
            header,
            crcs,
            payload_len,
            room: 0,
            skip: 512,
        }
    }

    #[test]
    fn a_message_is_read_as_it_was_written_and_a_changed_one_is_refused() {
        let (slots, slot) = (Slots::default(), Slot(3));
        let payload: Vec<u8> = (0..4096u32).map(|i| (i / 3) as u8).collect();
        let crcs = [crc32c(&payload[..3584]), crc32c(&payload[3584..])];
        let (mut send, mut scratch) = (Stamp::new([1; 16]), Vec::new());
        let len = (HEAD_BYTES + payload.len()) as u32;
        // SAFETY: nobody else uses the slots here.
        unsafe {
            write(
                &message(b"header", &crcs, 4096),
                &mut send,
                &slots,
                slot,
                &mut scratch,
            );
            slots
                .payload(slot)
                .copy_from(payload.as_ptr(), payload.len());
            let read = |slots: &Slots, len| read(slots, slot, len, &mut Stamp::new([1; 16]));
            let received = read(&slots, len).unwrap();
            assert_eq!((received.header(), received.head.pair), (&b"header"[..], 5));
            assert!(received.is_intact(&slots, slot));
            slots.payload(slot).add(4095).write(!payload[4095]);
            assert!(!received.is_intact(&slots, slot));
            assert!(read(&slots, len - 512).is_err());
            let mut head = slots.head(slot);
            for at in 0..received.head.bytes() {
                head[at] ^= 4;
                slots.set_head(slot, &head);
                assert!(read(&slots, len).is_err(), "byte {at}");
                head[at] ^= 4;
            }
            slots.set_head(slot, &head);
            assert!(read(&slots, len).is_ok());
        }
    }

    #[test]
    fn a_head_that_claims_to_be_longer_than_its_slot_is_refused() {
        let (slots, slot) = (Slots::default(), Slot(0));
        let mut long = Vec::new();
        message(&[0; 600], &[], 0).encode(&mut Stamp::new([1; 16]), &mut long);
        // SAFETY: nobody else uses the slots here.
        let read = unsafe {
            slots.set_head(slot, &long[..HEAD_BYTES]);
            read(&slots, slot, HEAD_BYTES as u32, &mut Stamp::new([1; 16]))
        };
        assert_eq!(read.err(), Some(FrameError::Field("header_len")));
    }
}
