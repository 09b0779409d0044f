//! Bytes in, frames out: the receiving half of a connection, without the socket.
//!
//! Heads, and payloads that come along with them, arrive in a staging area of fixed size. Where the rest of a
//! payload is to go the owner says as soon as its head is there; from then on [`Reader::space`] names that
//! memory first, so that a large payload is received in place.

use fabric_types::iov::{IoVecs, IovCursor};

use super::frame::{self, FRAME_BYTES, FrameError, HEAD_BYTES_MAX, Head, Key, Stamp};

/// Bytes of the staging area. At most so much of a payload is copied; seven 4 KiB replies fit, so that they
/// cost one system call.
pub const STAGING_BYTES: usize = 32 << 10;

/// Plaintext of a TLS record at most; after all complete frames were taken out there is always so much room
/// in the staging area.
pub const RECORD_BYTES: usize = 16 << 10;

const _: () = assert!(STAGING_BYTES >= HEAD_BYTES_MAX + RECORD_BYTES);

/// Most elements of the list that [`Reader::space`] gives, as the kernel takes them.
pub const IOVECS_MAX: usize = 1024;

/// How far the present frame is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Progress {
    /// More bytes are needed.
    Bytes,
    /// The head is there: [`Reader::take_payload`] is due. Until then nothing behind it is looked at.
    Head,
    /// All is there: [`Reader::finish`] is due.
    Frame {
        /// Every block of the payload has the CRC that was announced for it.
        intact: bool,
    },
}

#[derive(Clone, Copy)]
enum State {
    /// Waits for a frame header.
    Header,
    /// Waits for the rest of this head.
    Body(Head),
    /// The head is complete, its payload has no place yet.
    Placeless(Head),
    /// So much of the payload is missing.
    Payload { head: Head, left: usize },
}

/// The machine.
pub struct Reader {
    stamp: Stamp,
    staging: Box<[u8]>,
    /// What is in use of it. The present frame's head begins at `start`.
    start: usize,
    end: usize,
    /// Bytes of the present frame that follow its head in the staging area and are used up.
    copied: usize,
    state: State,
    list: IoVecs,
    cursor: IovCursor,
}

// SAFETY: the list describes memory that whoever placed a payload keeps valid, on whatever thread.
unsafe impl Send for Reader {}

/// No place is needed for nothing.
pub const NOWHERE: IoVecs = IoVecs {
    ptr: std::ptr::NonNull::dangling().as_ptr(),
    len: 0,
};

impl Reader {
    /// For the first frame under this key.
    pub fn new(key: Key) -> Self {
        Self {
            stamp: Stamp::new(key),
            staging: vec![0; STAGING_BYTES].into(),
            start: 0,
            end: 0,
            copied: 0,
            state: State::Header,
            list: NOWHERE,
            cursor: IovCursor::default(),
        }
    }

    /// Appends where the next bytes go: the rest of the payload, then the staging area. Never nothing, unless
    /// a frame waits for a place.
    pub fn space(&mut self, out: &mut Vec<libc::iovec>) {
        self.compact();
        if let State::Payload { left, .. } = self.state {
            let mut cursor = self.cursor;
            cursor.slice(self.list(), left, out);
            if out.len() >= IOVECS_MAX {
                out.truncate(IOVECS_MAX);
                return;
            }
        }
        let free = &mut self.staging[self.end..];
        if !free.is_empty() {
            out.push(libc::iovec {
                iov_base: free.as_mut_ptr().cast(),
                iov_len: free.len(),
            });
        }
    }

    /// So many bytes were put where [`space`](Self::space) said.
    pub fn received(&mut self, bytes: usize) {
        let mut staged = bytes;
        if let State::Payload { left, .. } = &mut self.state {
            let placed = staged.min(*left);
            *left -= placed;
            staged -= placed;
            // SAFETY: `take_payload`'s promise: the list is valid until the frame is finished.
            let list = unsafe { slice(&self.list) };
            self.cursor.skip(list, placed);
        }
        assert!(
            staged <= self.staging.len() - self.end,
            "more than there was space for"
        );
        self.end += staged;
    }

    /// Takes bytes that are elsewhere (decrypted, or left over from the handshake). There must be room for
    /// what does not belong to the present payload: [`RECORD_BYTES`] if every complete frame has been
    /// finished.
    pub fn push(&mut self, bytes: &[u8]) {
        let mut rest = bytes;
        if let State::Payload { left, .. } = &mut self.state {
            let (placed, more) = rest.split_at(rest.len().min(*left));
            *left -= placed.len();
            rest = more;
            // SAFETY: `take_payload`'s promise.
            let list = unsafe { slice(&self.list) };
            // SAFETY: as above, and the memory is writable.
            unsafe { self.cursor.copy_to(list, placed) };
        }
        self.compact();
        self.staging[self.end..self.end + rest.len()].copy_from_slice(rest);
        self.end += rest.len();
    }

    /// Looks at what is there. To be asked again after each step that it demands.
    pub fn progress(&mut self) -> Result<Progress, FrameError> {
        if let State::Header = self.state {
            let bytes = &self.staging[self.start..self.end];
            if bytes.len() < FRAME_BYTES {
                return Ok(Progress::Bytes);
            }
            self.state = State::Body(frame::parse(bytes, &mut self.stamp)?);
        }
        if let State::Body(head) = self.state {
            let bytes = &self.staging[self.start..self.end];
            let Some(body) = bytes.get(FRAME_BYTES..head.bytes()) else {
                return Ok(Progress::Bytes);
            };
            head.check_body(&[body])?;
            self.state = State::Placeless(head);
        }
        match self.state {
            State::Payload { head, left: 0 } => Ok(Progress::Frame {
                intact: self.is_intact(&head),
            }),
            State::Payload { .. } => Ok(Progress::Bytes),
            _ => Ok(Progress::Head),
        }
    }

    /// The present frame's head.
    ///
    /// # Panics
    /// If [`progress`](Self::progress) did not say that it is there.
    pub fn head(&self) -> Head {
        match self.state {
            State::Placeless(head) | State::Payload { head, .. } => head,
            State::Header | State::Body(_) => panic!("no head yet"),
        }
    }

    /// The message's header.
    pub fn header(&self) -> &[u8] {
        let from = self.start + FRAME_BYTES;
        &self.staging[from..from + self.head().header_len]
    }

    /// Says where the payload goes.
    ///
    /// # Safety
    /// The list and the memory hold the payload's bytes, and are valid until the frame is finished or the
    /// reader dropped. The memory may be a guest's and change.
    pub unsafe fn take_payload(&mut self, to: IoVecs) {
        let head = self.head();
        self.list = to;
        self.cursor = IovCursor::default();
        let from = self.start + head.bytes();
        let have = (self.end - from).min(head.payload_len as usize);
        // SAFETY: the caller's promise.
        unsafe {
            self.cursor
                .copy_to(slice(&to), &self.staging[from..from + have]);
        }
        if from + have == self.end {
            self.end = from;
            self.copied = 0;
        } else {
            self.copied = have;
        }
        self.state = State::Payload {
            head,
            left: head.payload_len as usize - have,
        };
    }

    /// Goes on to the next frame.
    pub fn finish(&mut self) {
        assert!(
            matches!(self.state, State::Payload { left: 0, .. }),
            "the frame is not complete"
        );
        self.start += self.head().bytes() + self.copied;
        self.copied = 0;
        self.list = NOWHERE;
        self.state = State::Header;
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        }
    }

    /// Goes on behind a frame that has no payload.
    pub fn skip_bare(&mut self) -> Result<(), FrameError> {
        if self.head().payload_len > 0 {
            return Err(FrameError::Field("payload_len"));
        }
        // SAFETY: nothing is written to an empty list.
        unsafe { self.take_payload(NOWHERE) };
        self.finish();
        Ok(())
    }

    fn list(&self) -> &[libc::iovec] {
        // SAFETY: `take_payload`'s promise.
        unsafe { slice(&self.list) }
    }

    /// Moves what is in the staging area to its beginning when less than half of it is left behind.
    fn compact(&mut self) {
        if self.start > 0 && self.staging.len() - self.end < self.staging.len() / 2 {
            self.staging.copy_within(self.start..self.end, 0);
            self.end -= self.start;
            self.start = 0;
        }
    }

    fn is_intact(&self, head: &Head) -> bool {
        let from = self.start + FRAME_BYTES + head.header_len;
        let announced = self.staging[from..from + 4 * head.crc_count].chunks_exact(4);
        let mut cursor = IovCursor::default();
        let lens = frame::block_lens(head.skip, head.payload_len);
        announced.zip(lens).all(|(crc, len)| {
            // SAFETY: `take_payload`'s promise; a change meanwhile only spoils the sum.
            let sum = unsafe { cursor.crc(self.list(), len) };
            crc == sum.to_le_bytes()
        })
    }
}

/// # Safety
/// The list is valid for as long as the slice is used.
unsafe fn slice<'a>(list: &IoVecs) -> &'a [libc::iovec] {
    // SAFETY: the caller's promise.
    unsafe { std::slice::from_raw_parts(list.ptr, list.len as usize) }
}
