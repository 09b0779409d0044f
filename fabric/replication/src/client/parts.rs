//! A read that no replica can serve in one: each has another bad block in it. It is then asked for block by
//! block, of whoever can read that one. Invariant *Verified*: it fails only if there is a block that nobody
//! can read.

use fabric_types::Command;
use fabric_types::block::BLOCK_BYTES;
use fabric_types::io::{IoError, IoResult};
use fabric_types::iov::{IoVecs, IovCursor};
use fabric_types::membership::Members;

use super::piece::Piece;

/// How far such a read is.
pub(super) struct Parts {
    /// All of it.
    whole: Command,
    /// First byte within the chunk that has not been asked for.
    next: u32,
    /// Buffers of the block that is asked for.
    list: Vec<libc::iovec>,
}

// SAFETY: the iovecs name the guest's buffers, as the piece's own list does.
unsafe impl Send for Parts {}

impl Piece {
    /// What the end of a read means: `None` if it goes on with the next block, which nobody has been asked
    /// for yet. To be asked with no answer outstanding.
    #[inline]
    pub(super) fn or_next_part(&mut self, result: IoResult, others: bool) -> Option<IoResult> {
        let is_bad = others && matches!(result, Err(IoError::Corrupt | IoError::Device(_)));
        if self.parts.is_none() && !is_bad {
            return Some(result);
        }
        self.next_part(result)
    }

    #[cold]
    fn next_part(&mut self, result: IoResult) -> Option<IoResult> {
        let whole = self
            .parts
            .as_ref()
            .map_or(self.request.command, |p| p.whole);
        let Command::Read {
            chunk,
            offset,
            buffers,
            len,
        } = whole
        else {
            return Some(result);
        };
        let (end, block) = (offset + len, BLOCK_BYTES as u32);
        let is_one = offset / block == (end - 1) / block;
        let is_over = |parts: &Parts| result.is_err() || parts.next == end;
        if self.parts.as_deref().map_or(is_one, is_over) {
            self.request.command = whole;
            self.parts = None;
            return Some(result);
        }
        let parts = self.parts.get_or_insert_with(|| {
            Box::new(Parts {
                whole,
                next: offset,
                list: Vec::new(),
            })
        });
        let from = parts.next;
        parts.next = end.min((from / block + 1) * block);
        // SAFETY: the piece's list of the guest's buffers is valid until it is done.
        let all = unsafe { std::slice::from_raw_parts(buffers.ptr, buffers.len as usize) };
        let mut cursor = IovCursor::default();
        cursor.seek(all, (from - offset) as usize);
        parts.list.clear();
        cursor.slice(all, (parts.next - from) as usize, &mut parts.list);
        self.request.command = Command::Read {
            chunk,
            offset: from,
            buffers: IoVecs {
                ptr: parts.list.as_ptr(),
                len: parts.list.len() as u32,
            },
            len: parts.next - from,
        };
        self.unreadable = Members::NONE;
        self.hedged = false;
        self.forget_answers();
        None
    }
}
