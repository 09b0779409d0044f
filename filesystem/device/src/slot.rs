//! What is kept of a request from submission to answer: whom the reply goes to, and where.
//!
//! A reply goes into a few pieces: a kernel gives one for the header and one or two for the body, and the
//! data of READ are not the device's to write. Those few are kept in the slot itself. A chain that is cut
//! otherwise is allowed; it takes one of a few lists that each queue has, and a request that finds none
//! waits.

use fabric_types::slab::Slab;
use fuse_codec::Unique;
use vhost_backend::latency::Stamp;
use vhost_backend::ring::MAX_SEGMENTS;

use crate::counters::OpClass;

/// Pieces that a slot has itself.
const INLINE_PIECES: usize = 3;
/// Lists of each queue for replies in more pieces. One request more waits until one of them is answered.
const LISTS: u32 = 8;

const EMPTY: libc::iovec = libc::iovec {
    iov_base: std::ptr::null_mut(),
    iov_len: 0,
};

/// The lists of a queue.
pub(crate) struct Lists(Slab<Vec<libc::iovec>>);

// SAFETY: the pieces lead into guest memory, which stays mapped until the requests are answered; one thread
// uses them.
unsafe impl Send for Lists {}

impl Lists {
    pub(crate) fn new() -> Self {
        Self(Slab::new(LISTS, || Vec::with_capacity(MAX_SEGMENTS)))
    }

    pub(crate) fn has_room(&self) -> bool {
        self.0.free() > 0
    }

    #[cfg(any(test, feature = "fuzzing"))]
    pub(crate) fn taken(&self) -> usize {
        self.0.taken()
    }
}

/// The pieces that a reply is written to.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Room {
    pieces: [libc::iovec; INLINE_PIECES],
    count: u8,
    /// Where the pieces are instead.
    list: Option<u32>,
    /// Bytes of the reply at most.
    pub(crate) bytes: usize,
}

impl Room {
    const NONE: Self = Self {
        pieces: [EMPTY; INLINE_PIECES],
        count: 0,
        list: None,
        bytes: 0,
    };

    /// Keeps the first pieces that have `bytes` bytes together; they have as many. None if there is no list
    /// for them.
    #[inline]
    pub(crate) fn keep(pieces: &[libc::iovec], bytes: usize, lists: &mut Lists) -> Option<Self> {
        let mut left = bytes;
        let needed = pieces.iter().take_while(|piece| {
            let is_needed = left > 0;
            left = left.saturating_sub(piece.iov_len);
            is_needed
        });
        let count = needed.count();
        assert!(left == 0, "a chain with room for the reply");
        let mut room = Self {
            bytes,
            ..Self::NONE
        };
        if count <= INLINE_PIECES {
            room.pieces[..count].copy_from_slice(&pieces[..count]);
            room.count = count as u8;
            return Some(room);
        }
        let list = lists.0.take()?;
        lists.0[list].clear();
        lists.0[list].extend_from_slice(&pieces[..count]);
        room.list = Some(list);
        Some(room)
    }

    #[inline]
    pub(crate) fn pieces<'a>(&'a self, lists: &'a Lists) -> &'a [libc::iovec] {
        match self.list {
            None => &self.pieces[..usize::from(self.count)],
            Some(list) => &lists.0[list],
        }
    }

    /// The reply is written, or never will be.
    #[inline]
    pub(crate) fn give_back(&mut self, lists: &mut Lists) {
        if let Some(list) = self.list.take() {
            lists.0.give_back(list);
        }
    }
}

/// A request between submission and answer.
#[derive(Debug, Clone, Copy)]
pub struct FsSlot {
    pub(crate) unique: Unique,
    pub(crate) class: OpClass,
    /// When it was taken off the ring.
    pub(crate) taken: Stamp,
    pub(crate) has_reply: bool,
    /// READ: bytes that it asks for.
    pub(crate) data_bytes: usize,
    /// DESTROY: the guest's session ends when it is answered.
    pub(crate) ends_session: bool,
    pub(crate) room: Room,
}

// SAFETY: the pieces lead into guest memory, which stays mapped until the request is answered; one thread
// uses them.
unsafe impl Send for FsSlot {}

impl Default for FsSlot {
    fn default() -> Self {
        Self {
            unique: Unique(0),
            class: OpClass::Other,
            taken: Stamp::NONE,
            has_reply: false,
            data_bytes: 0,
            ends_session: false,
            room: Room::NONE,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_pieces_take_a_list_until_there_is_none() {
        let mut lists = Lists::new();
        let one = libc::iovec {
            iov_base: std::ptr::dangling_mut::<u8>().cast(),
            iov_len: 1,
        };
        let pieces = [one; 20];
        let few = Room::keep(&pieces, INLINE_PIECES, &mut lists).unwrap();
        assert_eq!(few.pieces(&lists).len(), INLINE_PIECES);
        assert_eq!(lists.taken(), 0);
        let keep = |lists: &mut Lists| Room::keep(&pieces, 16, lists);
        let mut rooms: Vec<Room> = (0..LISTS).map(|_| keep(&mut lists).unwrap()).collect();
        assert!(keep(&mut lists).is_none() && !lists.has_room());
        for room in &mut rooms {
            assert_eq!(room.pieces(&lists).len(), 16);
            room.give_back(&mut lists);
        }
        assert_eq!(lists.taken(), 0);
        assert!(keep(&mut lists).is_some());
    }
}
