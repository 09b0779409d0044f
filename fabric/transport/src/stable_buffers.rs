//! Copies of the writes that this node's own replica takes beside others.
//!
//! The others are sent bytes with checksums that were taken once, and refuse bytes that do not match. The own
//! replica has no wire on which its bytes could be compared: it would store what the guest's buffer holds
//! when the store comes to it, under the version under which the others hold something else. So it is given a
//! copy, which is compared with the same checksums.

use fabric_types::iov::{IoVecs, copy_from};
use fabric_types::message::PIECES_MAX;
use fabric_types::slab::{Key, Slab};
use fabric_types::{Command, Reply, Request, RequestId};

use super::pool::{Buffer, Pool};

/// Memory kept for copies. Beyond it they come from the heap, bounded by what a client has in flight.
const STABLE_BYTES: usize = 16 << 20;

/// Copies at once: each write may go to two devices of this node, see [`incoming`](fabric_types::incoming).
const COPIES_MAX: u32 = 2 * PIECES_MAX;

/// Where a copy lies.
enum Memory {
    None,
    Pool(Buffer),
    /// Only named by the list.
    Heap {
        _bytes: Box<[u8]>,
    },
}

struct Copy {
    id: RequestId,
    list: libc::iovec,
    memory: Memory,
}

// SAFETY: the list names memory that the copy owns.
unsafe impl Send for Copy {}

/// The copies of a data thread.
pub struct StableBuffers {
    copies: Slab<Copy>,
    pool: Pool,
}

impl StableBuffers {
    /// None yet.
    pub fn new() -> Self {
        let empty = || Copy {
            id: RequestId(0),
            list: libc::iovec {
                iov_base: std::ptr::null_mut(),
                iov_len: 0,
            },
            memory: Memory::None,
        };
        Self {
            copies: Slab::new(COPIES_MAX, empty),
            pool: Pool::new(STABLE_BYTES),
        }
    }

    /// The same write with a copy of its data; `None` if it is no write. To be given back by
    /// [`finish`](Self::finish) under the name that it has now.
    ///
    /// # Safety
    /// The request's list and memory are valid. The memory may change meanwhile.
    pub unsafe fn copy(&mut self, request: &Request) -> Option<Request> {
        let Command::Write {
            chunk,
            offset,
            buffers,
            len,
            fua,
            urgent,
        } = request.command
        else {
            return None;
        };
        let slot = self.copies.take()?;
        let bytes = len as usize;
        let (memory, at) = match self.pool.take(bytes.max(1)) {
            Some(buffer) => {
                let at = buffer.as_ptr();
                (Memory::Pool(buffer), at)
            }
            None => {
                let mut heap = vec![0; bytes].into_boxed_slice();
                let at = heap.as_mut_ptr();
                (Memory::Heap { _bytes: heap }, at)
            }
        };
        // SAFETY: the copy has so many bytes and nobody else uses them; the list is valid by the caller's
        // promise.
        unsafe {
            let list = std::slice::from_raw_parts(buffers.ptr, buffers.len as usize);
            copy_from(list, 0, std::slice::from_raw_parts_mut(at, bytes));
        }
        self.copies[slot] = Copy {
            id: request.id,
            list: libc::iovec {
                iov_base: at.cast(),
                iov_len: bytes,
            },
            memory,
        };
        let buffers = IoVecs {
            ptr: &raw const self.copies[slot].list,
            len: 1,
        };
        Some(Request {
            id: RequestId(self.copies.key(slot).0),
            command: Command::Write {
                chunk,
                offset,
                buffers,
                len,
                fua,
                urgent,
            },
            ..*request
        })
    }

    /// The answer to a copy, under the name of the request that was copied; the store is done with it.
    ///
    /// # Panics
    /// If there is no such copy: two answers to one request would mix up guests' memory.
    pub fn finish(&mut self, reply: &Reply) -> Reply {
        let slot = self.copies.find(Key(reply.id.0)).expect("answered once");
        let copy = &mut self.copies[slot];
        let id = copy.id;
        if let Memory::Pool(buffer) = std::mem::replace(&mut copy.memory, Memory::None) {
            self.pool.give_back(buffer);
        }
        self.copies.give_back(slot);
        Reply { id, ..*reply }
    }
}

impl Default for StableBuffers {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fuzzing::request;
    use fabric_types::Incarnation;

    #[test]
    fn a_copy_stays_as_it_was_and_answers_for_its_request() {
        let mut memory = vec![1u8; 8192];
        let list = [libc::iovec {
            iov_base: memory.as_mut_ptr().cast(),
            iov_len: 8192,
        }];
        let mut stable_buffers = StableBuffers::new();
        let write = request(77, true, 512, &list, 8192);
        for _ in 0..3 {
            // SAFETY: the list lies above.
            let copy = unsafe { stable_buffers.copy(&write) }.unwrap();
            memory.fill(2);
            let Command::Write { buffers, .. } = copy.command else {
                panic!();
            };
            let mut seen = vec![0; 8192];
            // SAFETY: the copy is valid until it is finished.
            unsafe { copy_from(std::slice::from_raw_parts(buffers.ptr, 1), 0, &mut seen) };
            assert!(seen.iter().all(|&byte| byte == 1));
            let reply = Reply {
                id: copy.id,
                incarnation: Incarnation(1),
                result: Ok(()),
            };
            assert_eq!(stable_buffers.finish(&reply).id, RequestId(77));
            memory.fill(1);
        }
        let read = request(78, false, 512, &list, 8192);
        // SAFETY: as above.
        assert!(unsafe { stable_buffers.copy(&read) }.is_none());
    }
}
