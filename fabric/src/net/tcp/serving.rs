//! Requests of other nodes between their first byte and the last byte of their answer, and the memory of their data.

use super::caller::LinkError;
use super::frame::Head;
use super::pool::{Buffer, Pool};
use super::reader::NOWHERE;
use super::responder;
use super::shape;
use crate::core::slab::{Key, Slab};
use crate::proto::{Request, RequestId};
use crate::store::device::IoVecs;

/// Requests of other nodes that a data thread has at once; with more its connections are not read until one is answered.
pub const SERVINGS_MAX: u32 = 2048;

/// One of them.
#[derive(Clone, Copy)]
pub struct Serving {
    /// The connection, by its key among the thread's.
    pub link: Key,
    /// What pairs the reply with the request.
    pub pair: u64,
    /// What it takes of the connection's credit.
    pub cost: u32,
    /// What the peer calls it.
    pub id: RequestId,
    /// Where in its block its payload begins.
    pub skip: u16,
    /// Bytes that its reply has if all goes well.
    pub room: u32,
    /// With the replica.
    asked: bool,
    list: libc::iovec,
}

/// All of a data thread.
pub struct Servings {
    slots: Slab<(Serving, Option<Buffer>)>,
    pool: Pool,
    asked: usize,
    /// Something was freed since somebody who waits for room was told.
    freed: bool,
}

impl Servings {
    /// None, their memory to come from this pool.
    pub fn new(pool: Pool) -> Self {
        let empty = Serving {
            link: Key(0),
            pair: 0,
            cost: 0,
            id: RequestId(0),
            skip: 0,
            room: 0,
            asked: false,
            list: libc::iovec {
                iov_base: std::ptr::null_mut(),
                iov_len: 0,
            },
        };
        Self {
            slots: Slab::new(SERVINGS_MAX, || (empty, None)),
            pool,
            asked: 0,
            freed: false,
        }
    }

    /// A request begins. `None`: there is no room, it has to wait until another is done.
    pub fn begin(
        &mut self,
        link: Key,
        head: &Head,
        header: &[u8],
    ) -> Result<Option<u32>, LinkError> {
        let request = shape::decode(header, NOWHERE)?;
        let shape = shape::of(&request.command);
        let said = (head.payload_len, head.room, head.skip);
        if said != (shape.payload_len, shape.room, shape.skip) {
            return Err(LinkError::Protocol("a request of another length"));
        }
        // It has either.
        let bytes = shape.payload_len.max(shape.room) as usize;
        if self.slots.free() == 0 {
            return Ok(None);
        }
        let buffer = match bytes {
            0 => None,
            bytes => match self.pool.take(bytes) {
                Some(buffer) => Some(buffer),
                None => return Ok(None),
            },
        };
        let slot = self.slots.take().expect("one is free");
        let serving = Serving {
            link,
            pair: head.pair,
            cost: responder::cost(head),
            id: request.id,
            skip: head.skip,
            room: head.room,
            asked: false,
            list: libc::iovec {
                iov_base: buffer
                    .as_ref()
                    .map_or(std::ptr::null_mut(), Buffer::as_ptr)
                    .cast(),
                iov_len: bytes,
            },
        };
        self.slots[slot] = (serving, buffer);
        Ok(Some(slot))
    }

    /// It is complete: the request to be handed out, under the key of its slot.
    pub fn complete(&mut self, slot: u32, header: &[u8]) -> Result<Request, LinkError> {
        let mut request = shape::decode(header, self.list(slot))?;
        request.id = RequestId(self.slots.key(slot).0);
        self.slots[slot].0.asked = true;
        self.asked += 1;
        Ok(request)
    }

    /// It was answered.
    pub fn answered(&mut self, slot: u32) {
        if std::mem::take(&mut self.slots[slot].0.asked) {
            self.asked -= 1;
        }
    }

    /// Requests handed out and not answered.
    pub fn asked(&self) -> usize {
        self.asked
    }

    /// Its memory; valid until it is freed.
    pub fn list(&self, slot: u32) -> IoVecs {
        let (serving, buffer) = &self.slots[slot];
        match buffer {
            Some(_) => IoVecs {
                ptr: &raw const serving.list,
                len: 1,
            },
            None => NOWHERE,
        }
    }

    /// The slot of a request that was handed out.
    pub fn find(&self, key: Key) -> Option<u32> {
        self.slots.find(key)
    }

    /// It is done with.
    pub fn free(&mut self, slot: u32) {
        if let Some(buffer) = self.slots[slot].1.take() {
            self.pool.give_back(buffer);
        }
        self.slots.give_back(slot);
        self.freed = true;
    }

    /// Whether there may be room now that there was not before; to be asked on behalf of those who wait for it.
    pub fn take_freed(&mut self) -> bool {
        std::mem::take(&mut self.freed)
    }

    /// The same, without having looked yet.
    pub fn has_freed(&self) -> bool {
        self.freed
    }
}

impl std::ops::Index<u32> for Servings {
    type Output = Serving;

    fn index(&self, slot: u32) -> &Serving {
        &self.slots[slot].0
    }
}
