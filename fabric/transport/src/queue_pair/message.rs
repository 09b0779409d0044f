//! Messages on a queue pair.
//!
//! A message is a frame's head ([`crate::frame`]), of which the first 512 bytes, padded, lie in a
//! slot's first piece. In the second lies a payload of up to 4 KiB; or, if the payload travels by windows or
//! there is none, what is left of a long list of CRCs.
//!
//! In front of the message's own header stand the windows that are open for the request, so that they are
//! under the frame's checksum: their number (4 bytes), and each one's address (8), key (4) and length (4),
//! little-endian. A request that names windows has its payload read from them, or its reply's written to
//! them.

use fabric_types::iov::IovCursor;

use super::pair::WINDOWS_MAX;
use super::slots::{HEAD_BYTES, PAYLOAD_BYTES, Slot, Slots};
use crate::frame::{self, CRC_BYTES, FRAME_BYTES, FrameError, Head, Kind, Message, Stamp};

const COUNT_BYTES: usize = 4;
const WINDOW_BYTES: usize = 16;

/// Memory of an end that is open to the other until a request is answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Window {
    /// Where it begins.
    pub address: u64,
    /// The key that opens it.
    pub key: u32,
    /// Its bytes.
    pub len: u32,
}

impl Window {
    fn encode(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.address.to_le_bytes());
        out.extend_from_slice(&self.key.to_le_bytes());
        out.extend_from_slice(&self.len.to_le_bytes());
    }

    fn parse(bytes: &[u8; WINDOW_BYTES]) -> Self {
        let part = |at: usize| *bytes[at..].first_chunk().expect("four bytes");
        Self {
            address: u64::from_le_bytes(*bytes.first_chunk().expect("eight bytes")),
            key: u32::from_le_bytes(part(8)),
            len: u32::from_le_bytes(part(12)),
        }
    }
}

/// Room to put messages together, used again and again.
#[derive(Debug, Default)]
pub struct Scratch {
    header: Vec<u8>,
    bytes: Vec<u8>,
}

/// Writes a message's head into a slot; returns how many bytes of it lie in the slot's page.
///
/// # Safety
/// Neither the device nor anybody else uses the slot now.
///
/// # Panics
/// If it does not fit: the sender's own mistake.
pub unsafe fn write(
    message: &Message<'_>,
    windows: &[Window],
    stamp: &mut Stamp,
    (slots, slot): (&Slots, Slot),
    scratch: &mut Scratch,
) -> u32 {
    let Scratch { header, bytes } = scratch;
    assert!(windows.len() <= WINDOWS_MAX);
    header.clear();
    header.extend_from_slice(&(windows.len() as u32).to_le_bytes());
    windows.iter().for_each(|window| window.encode(header));
    header.extend_from_slice(message.header);
    bytes.clear();
    Message { header, ..*message }.encode(stamp, bytes);
    let (head, rest) = bytes.split_at(bytes.len().min(HEAD_BYTES));
    // SAFETY: the caller's promise.
    unsafe {
        slots.set_head(slot, head);
        slots.set_page(slot, rest);
    }
    rest.len() as u32
}

/// A message that was received, its head checked. It lies in its slot until that is posted again.
#[derive(Debug, Clone, Copy)]
pub struct Received {
    /// The frame's head.
    pub head: Head,
    /// Where it lies.
    pub slot: Slot,
    /// Its payload lies in the slot.
    pub is_inside: bool,
    windows: usize,
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
    let (first, page) = unsafe { (slots.head(slot), slots.page(slot)) };
    let head = frame::parse(first, stamp)?;
    let overflow = head.bytes().saturating_sub(HEAD_BYTES);
    let body_end = head.bytes().min(HEAD_BYTES);
    if FRAME_BYTES + head.header_len > HEAD_BYTES || overflow > page.len() {
        return Err(FrameError::Field("header_len"));
    }
    head.check_body(&[&first[FRAME_BYTES..body_end], &page[..overflow]])?;
    let beyond = (len as usize).checked_sub(HEAD_BYTES);
    let beyond = beyond.ok_or(FrameError::Field("payload_len"))?;
    let is_inside = head.payload_len > 0 && overflow == 0 && beyond == head.payload_len as usize;
    if !is_inside && beyond != overflow {
        return Err(FrameError::Field("payload_len"));
    }
    let header = &first[FRAME_BYTES..FRAME_BYTES + head.header_len];
    let count = header.first_chunk().map(|count| u32::from_le_bytes(*count));
    let windows = count.ok_or(FrameError::Field("windows"))? as usize;
    if windows > WINDOWS_MAX || COUNT_BYTES + windows * WINDOW_BYTES > header.len() {
        return Err(FrameError::Field("windows"));
    }
    Ok(Received {
        head,
        slot,
        is_inside,
        windows,
    })
}

impl Received {
    /// The message's own header.
    ///
    /// # Safety
    /// The slot has not been posted again since, nor will it be while this is used.
    pub unsafe fn header<'a>(&self, slots: &'a Slots) -> &'a [u8] {
        // SAFETY: the caller's promise.
        let head = unsafe { slots.head(self.slot) };
        let from = FRAME_BYTES + COUNT_BYTES + self.windows * WINDOW_BYTES;
        &head[from..FRAME_BYTES + self.head.header_len]
    }

    /// Whether windows are open for the request.
    pub fn has_windows(&self) -> bool {
        self.windows > 0
    }

    /// The bytes of a request that go by its windows, which are `windows`: those of its payload or its
    /// reply's, or none if they lie in the slot. An error says why it is no such request.
    pub fn moved_by(&self, windows: &[Window]) -> Result<usize, &'static str> {
        let head = &self.head;
        if head.kind != Kind::Request {
            return Err("what is no request where requests go");
        }
        let bytes = head.payload_len.max(head.room) as usize;
        if windows.is_empty() {
            let fits = head.payload_len == 0 || self.is_inside;
            return match fits && bytes <= PAYLOAD_BYTES {
                true => Ok(0),
                false => Err("a request without windows that needs some"),
            };
        }
        let opened: u64 = windows.iter().map(|window| u64::from(window.len)).sum();
        let whole = windows.iter().all(|window| window.len > 0) && opened == bytes as u64;
        let one_way = head.payload_len == 0 || head.room == 0;
        match whole && one_way && !self.is_inside {
            true => Ok(bytes),
            false => Err("windows of another length than the data"),
        }
    }

    /// Puts the windows into `out`.
    ///
    /// # Safety
    /// As for [`header`](Self::header).
    pub unsafe fn windows(&self, slots: &Slots, out: &mut Vec<Window>) {
        out.clear();
        // SAFETY: the caller's promise.
        let head = unsafe { slots.head(self.slot) };
        let from = FRAME_BYTES + COUNT_BYTES;
        let each = head[from..from + self.windows * WINDOW_BYTES].chunks_exact(WINDOW_BYTES);
        out.extend(each.map(|bytes| Window::parse(bytes.try_into().expect("so many bytes"))));
    }

    /// Whether the payload, which lies in `list`, is what was announced.
    ///
    /// # Safety
    /// As for [`header`](Self::header), and the list and its memory are valid. That may change: it only
    /// spoils a checksum.
    pub unsafe fn is_intact(&self, slots: &Slots, list: &[libc::iovec]) -> bool {
        // SAFETY: the caller's promise.
        let (head, page) = unsafe { (slots.head(self.slot), slots.page(self.slot)) };
        let mut at = FRAME_BYTES + self.head.header_len;
        let mut cursor = IovCursor::default();
        let mut lens = frame::block_lens(self.head.skip, self.head.payload_len);
        lens.all(|len| {
            let mut announced = [0; CRC_BYTES];
            for (to, at) in announced.iter_mut().zip(at..) {
                *to = *head.get(at).unwrap_or_else(|| &page[at - HEAD_BYTES]);
            }
            at += CRC_BYTES;
            // SAFETY: the caller's promise.
            let crc = unsafe { cursor.crc(list, len) };
            crc == u32::from_le_bytes(announced)
        })
    }

    /// The payload that lies in the slot.
    ///
    /// # Safety
    /// As for [`header`](Self::header).
    pub unsafe fn inside<'a>(&self, slots: &'a Slots) -> &'a [u8] {
        // SAFETY: the caller's promise.
        let page = unsafe { slots.page(self.slot) };
        match self.is_inside {
            true => &page[..(self.head.payload_len as usize).min(PAYLOAD_BYTES)],
            false => &[],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fabric_types::checksum::crc32c;

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

    fn list(bytes: &[u8]) -> [libc::iovec; 1] {
        [libc::iovec {
            iov_base: bytes.as_ptr().cast_mut().cast(),
            iov_len: bytes.len(),
        }]
    }

    fn write_in(slots: &Slots, slot: Slot, message: &Message<'_>, windows: &[Window]) -> u32 {
        let (mut stamp, mut scratch) = (Stamp::new([1; 16]), Scratch::default());
        // SAFETY: nobody else uses the slots here.
        unsafe { write(message, windows, &mut stamp, (slots, slot), &mut scratch) }
    }

    fn read_in(slots: &Slots, slot: Slot, len: usize) -> Result<Received, FrameError> {
        // SAFETY: nobody else uses the slots here.
        unsafe { read(slots, slot, len as u32, &mut Stamp::new([1; 16])) }
    }

    #[test]
    fn message_round_trips_and_a_corrupted_one_is_refused() {
        let (slots, slot) = (Slots::default(), Slot(3));
        let payload: Vec<u8> = (0..4096u32).map(|i| (i / 3) as u8).collect();
        let crcs = [crc32c(&payload[..3584]), crc32c(&payload[3584..])];
        let len = HEAD_BYTES + payload.len();
        assert_eq!(
            write_in(&slots, slot, &message(b"header", &crcs, 4096), &[]),
            0
        );
        // SAFETY: nobody else uses the slots here.
        unsafe {
            slots.set_page(slot, &payload);
            let received = read_in(&slots, slot, len).unwrap();
            assert!(received.is_inside && !received.has_windows());
            assert_eq!(
                (received.header(&slots), received.head.pair),
                (&b"header"[..], 5)
            );
            let inside = received.inside(&slots);
            assert!(inside == payload && received.is_intact(&slots, &list(inside)));
            slots.payload(slot).add(4095).write(!payload[4095]);
            assert!(!received.is_intact(&slots, &list(received.inside(&slots))));
            assert!(read_in(&slots, slot, len - 512).is_err());
            let mut head = *slots.head(slot);
            for at in 0..received.head.bytes() {
                head[at] ^= 4;
                slots.set_head(slot, &head);
                assert!(read_in(&slots, slot, len).is_err(), "byte {at}");
                head[at] ^= 4;
            }
            slots.set_head(slot, &head);
            assert!(read_in(&slots, slot, len).is_ok());
        }
    }

    #[test]
    fn largest_windowed_payload_fits_and_its_checksums_verify() {
        let (slots, slot) = (Slots::default(), Slot(0));
        let len = frame::PAYLOAD_BYTES_MAX;
        let mut payload: Vec<u8> = (0..len).map(|i| (i / 5) as u8).collect();
        let mut crcs = Vec::new();
        let mut rest = &payload[..];
        for len in frame::block_lens(512, len) {
            let (block, others) = rest.split_at(len);
            crcs.push(crc32c(block));
            rest = others;
        }
        let windows: Vec<Window> = (1..=WINDOWS_MAX as u32)
            .map(|nth| Window {
                address: u64::from(nth) << 33,
                key: nth << 8,
                len: nth,
            })
            .collect();
        let header = [7; crate::shape::REQUEST_BYTES_MAX];
        let page_len = write_in(&slots, slot, &message(&header, &crcs, len), &windows);
        assert!(page_len > 0 && page_len as usize <= PAYLOAD_BYTES);
        let whole = HEAD_BYTES + page_len as usize;
        let received = read_in(&slots, slot, whole).unwrap();
        assert!(!received.is_inside && received.has_windows());
        // SAFETY: nobody else uses the slots here.
        unsafe {
            let mut told = Vec::new();
            received.windows(&slots, &mut told);
            assert_eq!((told, received.header(&slots)), (windows, &header[..]));
            assert!(received.is_intact(&slots, &list(&payload)));
            for at in [0, 100, payload.len() - 1] {
                payload[at] ^= 1;
                assert!(!received.is_intact(&slots, &list(&payload)), "byte {at}");
                payload[at] ^= 1;
            }
            assert!(read_in(&slots, slot, whole - 1).is_err());
            slots.payload(slot).add(9).write(1);
            assert!(
                read_in(&slots, slot, whole).is_err(),
                "a changed list of CRCs"
            );
        }
    }

    #[test]
    fn heads_that_claim_what_cannot_be_are_refused() {
        let (slots, slot) = (Slots::default(), Slot(0));
        let mut long = Vec::new();
        message(&[0; 600], &[], 0).encode(&mut Stamp::new([1; 16]), &mut long);
        // SAFETY: nobody else uses the slots here.
        unsafe { slots.set_head(slot, &long[..HEAD_BYTES]) };
        let read = read_in(&slots, slot, HEAD_BYTES);
        assert_eq!(read.err(), Some(FrameError::Field("header_len")));
        // No number of windows, one that is larger than the header, and one that is too large.
        for header in [&[][..], &[1, 0, 0, 0], &[17; 400]] {
            let mut bytes = Vec::new();
            message(header, &[], 0).encode(&mut Stamp::new([1; 16]), &mut bytes);
            // SAFETY: as above.
            unsafe { slots.set_head(slot, &bytes) };
            let read = read_in(&slots, slot, HEAD_BYTES);
            assert_eq!(read.err(), Some(FrameError::Field("windows")));
        }
    }
}
