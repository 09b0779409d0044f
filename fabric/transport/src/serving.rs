//! Requests of other nodes between their first byte and the last byte of their answer, and the memory of
//! their data.

use std::sync::Arc;

use fabric_types::iov::IoVecs;
use fabric_types::slab::{Key, Slab};
use fabric_types::{Request, RequestId};

use super::caller::LinkError;
use super::frame::Head;
use super::pool::{Buffer, Pool};
use super::reader::NOWHERE;
use super::responder;
use super::shape::{self, Shape};
use crate::queue_pair::pair::Port;
use crate::queue_pair::slots::{Slot, Slots};

/// Requests of other nodes that a data thread has at once; with more its connections are not read until one
/// is answered.
pub const SERVINGS_MAX: u32 = 2048;

/// How a request came, and how it is answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Route {
    /// On the connection.
    Connection,
    /// By the queue pair beside it.
    QueuePairEndpoint {
        /// Which of the connection.
        number: u32,
        /// Where the request lies.
        received: Slot,
        /// Where the reply's payload is to lie, if it has one.
        reply: Option<Slot>,
    },
}

/// One of them.
#[derive(Clone, Copy)]
pub struct Serving {
    /// The connection, by its key among the thread's.
    pub link: Key,
    /// What pairs the reply with the request.
    pub pair: u64,
    /// What it takes of the connection's credit; nothing if it came by the queue pair.
    pub cost: Option<u32>,
    /// How it came.
    pub way: Route,
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

impl Serving {
    /// Of a request that came on the connection `link`, with so many bytes of memory at a place for its
    /// payload or its reply's.
    fn of(link: Key, head: &Head, id: RequestId, (at, bytes): (*mut u8, usize)) -> Self {
        Self {
            link,
            pair: head.pair,
            cost: None,
            way: Route::Connection,
            id,
            skip: head.skip,
            room: head.room,
            asked: false,
            list: libc::iovec {
                iov_base: at.cast(),
                iov_len: bytes,
            },
        }
    }
}

/// Memory of a serving.
enum Memory {
    None,
    Pool(Buffer),
    /// A slot of a queue pair, held as long as a store may work on it.
    QueuePairEndpoint {
        _slots: Arc<Slots>,
    },
}

/// Where the payload lies of what comes by a queue pair.
pub enum Place<'a> {
    /// In the slots.
    Slots(&'a Arc<Slots>),
    /// In a buffer, to and from which it is brought.
    Buffer(Buffer),
}

/// All of a data thread.
pub struct Servings {
    slots: Slab<(Serving, Memory)>,
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
            cost: None,
            way: Route::Connection,
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
            slots: Slab::new(SERVINGS_MAX, || (empty, Memory::None)),
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
        let (request, shape) = checked(head, header)?;
        // It has either.
        let bytes = shape.payload_len.max(shape.room) as usize;
        if self.slots.free() == 0 {
            return Ok(None);
        }
        let memory = match bytes {
            0 => Memory::None,
            bytes => match self.pool.take(bytes) {
                Some(buffer) => Memory::Pool(buffer),
                None => return Ok(None),
            },
        };
        let at = match &memory {
            Memory::Pool(buffer) => buffer.as_ptr(),
            Memory::None | Memory::QueuePairEndpoint { .. } => std::ptr::null_mut(),
        };
        let serving = Serving {
            cost: Some(responder::cost(head)),
            ..Serving::of(link, head, request, (at, bytes))
        };
        Ok(Some(self.place(serving, memory)))
    }

    /// A request has come by a queue pair. Its payload, or its reply's, lies in its slots or in a buffer, as
    /// `place` says.
    ///
    /// # Panics
    /// If there is [no room](Self::has_room), or no place for a payload.
    pub fn begin_on_queue_pair(
        &mut self,
        link: Key,
        (head, header): (&Head, &[u8]),
        way: Route,
        place: Place<'_>,
    ) -> Result<u32, LinkError> {
        let (request, shape) = match checked(head, header) {
            Ok(checked) => checked,
            Err(error) => {
                if let Place::Buffer(buffer) = place {
                    self.pool.give_back(buffer);
                }
                return Err(error);
            }
        };
        let bytes = shape.payload_len.max(shape.room) as usize;
        let (at, memory) = match (place, way) {
            (Place::Buffer(buffer), _) => (buffer.as_ptr(), Memory::Pool(buffer)),
            (
                Place::Slots(slots),
                Route::QueuePairEndpoint {
                    received, reply, ..
                },
            ) => {
                let slot = if shape.payload_len > 0 {
                    Some(received)
                } else {
                    reply
                };
                assert!(
                    bytes == 0 || slot.is_some(),
                    "a place for the reply was taken"
                );
                let at = slot.map_or(std::ptr::null_mut(), |slot| slots.payload(slot));
                let _slots = Arc::clone(slots);
                (at, Memory::QueuePairEndpoint { _slots })
            }
            (Place::Slots(_), Route::Connection) => {
                unreachable!("what comes on the connection has no slots")
            }
        };
        let serving = Serving {
            way,
            ..Serving::of(link, head, request, (at, bytes))
        };
        Ok(self.place(serving, memory))
    }

    /// Opens the memory of payloads to a device.
    pub fn register(&mut self, port: &dyn Port) -> Result<(), String> {
        self.pool.register(port)
    }

    /// Memory for a payload of so many bytes, to be [given back](Self::give_back) or to
    /// [begin](Self::begin_on_queue_pair) a serving with.
    pub fn buffer(&mut self, bytes: usize) -> Option<Buffer> {
        self.pool.take(bytes)
    }

    /// It is not used any more.
    pub fn give_back(&mut self, buffer: Buffer) {
        self.pool.give_back(buffer);
        self.freed = true;
    }

    /// All that are not done with.
    #[cfg(test)]
    pub fn taken(&self) -> usize {
        self.slots.taken()
    }

    /// Buffers that were not given back.
    #[cfg(test)]
    pub fn buffers(&self) -> usize {
        self.pool.in_use()
    }

    /// Whether one more can begin, its memory aside.
    pub fn has_room(&self) -> bool {
        self.slots.free() > 0
    }

    fn place(&mut self, serving: Serving, memory: Memory) -> u32 {
        let slot = self.slots.take().expect("one is free");
        self.slots[slot] = (serving, memory);
        slot
    }

    /// What pairs replies with requests, of those that have come by the queue pair of this number of a
    /// connection.
    pub fn endpoint(&self, link: Key, number: u32) -> impl Iterator<Item = u64> + '_ {
        let slots = (0..self.slots.capacity()).filter(|slot| self.slots.is_taken(*slot));
        let all = slots.map(|slot| &self.slots[slot].0);
        let came_so = move |serving: &&Serving| {
            let of_pair =
                matches!(serving.way, Route::QueuePairEndpoint { number: of, .. } if of == number);
            serving.link == link && of_pair
        };
        all.filter(came_so).map(|serving| serving.pair)
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
        let (serving, _) = &self.slots[slot];
        match serving.list.iov_len {
            0 => NOWHERE,
            _ => IoVecs {
                ptr: &raw const serving.list,
                len: 1,
            },
        }
    }

    /// The slot of a request that was handed out.
    pub fn find(&self, key: Key) -> Option<u32> {
        self.slots.find(key)
    }

    /// It is done with.
    pub fn free(&mut self, slot: u32) {
        match std::mem::replace(&mut self.slots[slot].1, Memory::None) {
            Memory::Pool(buffer) => self.pool.give_back(buffer),
            Memory::None | Memory::QueuePairEndpoint { .. } => {}
        }
        self.slots.give_back(slot);
        self.freed = true;
    }

    /// Whether there may be room now that there was not before; to be asked on behalf of those who wait for
    /// it.
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

/// The name and the shape of a request that begins, if it is what its frame says.
pub fn checked(head: &Head, header: &[u8]) -> Result<(RequestId, Shape), LinkError> {
    let request = shape::decode(header, NOWHERE)?;
    let shape = shape::of(&request.command);
    match (head.payload_len, head.room, head.skip) == (shape.payload_len, shape.room, shape.skip) {
        true => Ok((request.id, shape)),
        false => Err(LinkError::Protocol("a request of another length")),
    }
}
