//! A read that no replica can serve in one: each has another bad block in it. It is then asked for block by
//! block, of whoever can read that one. Invariant *Verified*: it fails only if there is a block that nobody
//! can read.

use fabric_types::Command;
use fabric_types::block::BLOCK_BYTES;
use fabric_types::ids::ChunkKey;
use fabric_types::iov::{IoVecs, IovCursor};

/// How far such a read is.
pub(super) struct Parts {
    chunk: ChunkKey,
    /// All of it.
    offset: u32,
    len: u32,
    buffers: IoVecs,
    /// First byte within the chunk that has not been asked for.
    next: u32,
    /// Buffers of the block that is asked for.
    list: Vec<libc::iovec>,
}

// SAFETY: the iovecs name the guest's buffers, as the piece's own list does.
unsafe impl Send for Parts {}

impl Parts {
    /// Of this command, before its first block; `None` if it is no read, or one of a single block.
    pub(super) fn of(command: Command) -> Option<Box<Self>> {
        let Command::Read {
            chunk,
            offset,
            buffers,
            len,
        } = command
        else {
            return None;
        };
        let block = BLOCK_BYTES as u32;
        let is_one = offset / block == (offset + len - 1) / block;
        (!is_one).then(|| {
            Box::new(Self {
                chunk,
                offset,
                len,
                buffers,
                next: offset,
                list: Vec::new(),
            })
        })
    }

    /// The read of all of it.
    pub(super) fn whole(&self) -> Command {
        Command::Read {
            chunk: self.chunk,
            offset: self.offset,
            buffers: self.buffers,
            len: self.len,
        }
    }

    /// The read of the next block, with no answer outstanding; `None` behind the last one.
    pub(super) fn next(&mut self) -> Option<Command> {
        let (from, end, block) = (self.next, self.offset + self.len, BLOCK_BYTES as u32);
        if from == end {
            return None;
        }
        self.next = end.min((from / block + 1) * block);
        let len = self.next - from;
        // SAFETY: the piece's list of the guest's buffers is valid until it is done.
        let all =
            unsafe { std::slice::from_raw_parts(self.buffers.ptr, self.buffers.len as usize) };
        let mut cursor = IovCursor::default();
        cursor.seek(all, (from - self.offset) as usize);
        self.list.clear();
        cursor.slice(all, len as usize, &mut self.list);
        Some(Command::Read {
            chunk: self.chunk,
            offset: from,
            buffers: IoVecs {
                ptr: self.list.as_ptr(),
                len: self.list.len() as u32,
            },
            len,
        })
    }
}
