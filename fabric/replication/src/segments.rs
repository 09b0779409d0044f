//! Room for scatter lists: a request's list is only borrowed from the guest side, so each piece keeps its own
//! copy.
//!
//! Lists of up to [`INLINE`] elements lie in the piece itself. Longer ones come from pools of fixed arrays;
//! with a pool used up the request is answered busy and comes again.

use fabric_types::iov::IoVecs;

use super::share::may_take;

/// Elements a piece holds without a pool: one 4 KiB-aligned buffer, or a few.
pub const INLINE: usize = 4;

/// Most elements in a guest request; one with more is refused as out of range. The longest descriptor chain
/// of a virtqueue is its size, at most 1024 in practice.
pub const SEGMENTS_MAX: usize = 1024;

/// Array sizes of the pools and how many arrays each has: 0.5 MiB per data thread. A 128 KiB request of
/// single pages fits the first, a 1 MiB request of 256 the second. One more than the round number, for a list
/// cut at a chunk boundary.
const CLASSES: [(usize, usize); 3] = [(34, 256), (258, 64), (SEGMENTS_MAX + 1, 8)];

const EMPTY: libc::iovec = libc::iovec {
    iov_base: std::ptr::null_mut(),
    iov_len: 0,
};

/// A copied scatter list.
pub struct Segments {
    inline: [libc::iovec; INLINE],
    len: u32,
    lease: Option<Lease>,
}

#[derive(Clone, Copy)]
struct Lease {
    class: u8,
    array: u16,
    first: *const libc::iovec,
}

impl Segments {
    /// An empty list.
    pub fn new() -> Self {
        Self {
            inline: [EMPTY; INLINE],
            len: 0,
            lease: None,
        }
    }

    /// Where the list lies now; valid until `self` moves, is cleared or filled again.
    #[inline]
    pub fn as_iovecs(&self) -> IoVecs {
        IoVecs {
            ptr: self.lease.map_or(self.inline.as_ptr(), |l| l.first),
            len: self.len,
        }
    }
}

impl Default for Segments {
    fn default() -> Self {
        Self::new()
    }
}

/// Walks a borrowed scatter list, cutting it at byte counts.
pub struct Cutter<'a> {
    rest: &'a [libc::iovec],
    skip: usize,
}

impl<'a> Cutter<'a> {
    /// Starts at the first byte of `list`.
    pub fn new(list: &'a [libc::iovec]) -> Self {
        Self {
            rest: list,
            skip: 0,
        }
    }

    /// Number of elements that cover the next `bytes`; `None` if the list is shorter.
    fn count(&self, bytes: usize) -> Option<usize> {
        let mut left = bytes;
        let mut skip = self.skip;
        for (count, segment) in self.rest.iter().enumerate() {
            if left == 0 {
                return Some(count);
            }
            left = left.saturating_sub(segment.iov_len - skip);
            skip = 0;
        }
        (left == 0).then_some(self.rest.len())
    }

    /// Puts the next `bytes` into `to`, which has at least `count(bytes)` elements.
    fn cut(&mut self, bytes: usize, to: &mut [libc::iovec]) {
        let mut left = bytes;
        for slot in to {
            let segment = self.rest[0];
            let have = segment.iov_len - self.skip;
            let take = have.min(left);
            *slot = libc::iovec {
                iov_base: segment.iov_base.cast::<u8>().wrapping_add(self.skip).cast(),
                iov_len: take,
            };
            left -= take;
            if take == have {
                self.rest = &self.rest[1..];
                self.skip = 0;
            } else {
                self.skip += take;
            }
        }
        assert_eq!(left, 0);
    }
}

/// Why a list was not copied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ListRefusal {
    /// The pool is used up for now.
    Busy,
    /// The list is shorter than the bytes asked for, or longer than [`SEGMENTS_MAX`].
    Malformed,
}

/// How many arrays of each class somebody holds. Nobody gets more of a class than are left for all others.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ArraysHeld {
    arrays: [u16; CLASSES.len()],
    /// When the last request began.
    before: [u16; CLASSES.len()],
}

impl ArraysHeld {
    /// The lists of a request are about to be copied.
    #[inline]
    pub fn begin_request(&mut self) {
        self.before = self.arrays;
    }

    /// Nothing is held.
    pub fn is_empty(&self) -> bool {
        self.arrays.iter().all(|count| *count == 0)
    }
}

/// The pools of one data thread.
pub struct SegmentPool {
    classes: [Class; CLASSES.len()],
}

struct Class {
    arrays: Box<[libc::iovec]>,
    each: usize,
    free: Vec<u16>,
}

// SAFETY: the iovecs are descriptions of memory that the submitter of a request keeps valid on whatever
// thread.
unsafe impl Send for SegmentPool {}
// SAFETY: as above; the lease's pointer leads into the pool's heap, which moves with neither.
unsafe impl Send for Segments {}

impl SegmentPool {
    /// All pools, filled.
    pub fn new() -> Self {
        Self {
            classes: CLASSES.map(|(each, count)| Class {
                arrays: vec![EMPTY; each * count].into(),
                each,
                free: (0..u16::try_from(count).expect("a small table")).collect(),
            }),
        }
    }

    /// Copies the next `bytes` of `from` into `to`, which must be clear, on the account of `held`.
    #[inline]
    pub fn fill(
        &mut self,
        to: &mut Segments,
        from: &mut Cutter<'_>,
        bytes: usize,
        held: &mut ArraysHeld,
    ) -> Result<(), ListRefusal> {
        assert!(to.lease.is_none());
        if let [one] = from.rest {
            if from.skip == 0 && one.iov_len == bytes {
                to.inline[0] = *one;
                to.len = 1;
                from.rest = &[];
                return Ok(());
            }
        }
        self.fill_many(to, from, bytes, held)
    }

    fn fill_many(
        &mut self,
        to: &mut Segments,
        from: &mut Cutter<'_>,
        bytes: usize,
        held: &mut ArraysHeld,
    ) -> Result<(), ListRefusal> {
        let count = from.count(bytes).ok_or(ListRefusal::Malformed)?;
        if count <= INLINE {
            from.cut(bytes, &mut to.inline[..count]);
        } else {
            let (class, array) = self.lease(count, held)?;
            let pool = &mut self.classes[class];
            let start = usize::from(array) * pool.each;
            let room = &mut pool.arrays[start..start + count];
            from.cut(bytes, room);
            to.lease = Some(Lease {
                class: class as u8,
                array,
                first: room.as_ptr(),
            });
        }
        to.len = u32::try_from(count).expect("bounded by SEGMENTS_MAX");
        Ok(())
    }

    /// An array of at least `count` elements, from the smallest class that fits and has one for this user.
    fn lease(&mut self, count: usize, held: &mut ArraysHeld) -> Result<(usize, u16), ListRefusal> {
        let last = self.classes.last().expect("the table is not empty");
        if count > last.each {
            return Err(ListRefusal::Malformed);
        }
        for (at, class) in self.classes.iter_mut().enumerate() {
            let before = usize::from(held.before[at]);
            let mine = match before {
                // One request of somebody who held none gets what it needs.
                0 => 0,
                _ => usize::from(held.arrays[at]),
            };
            if count > class.each || !may_take(mine, 1, class.free.len()) {
                continue;
            }
            if let Some(array) = class.free.pop() {
                held.arrays[at] += 1;
                return Ok((at, array));
            }
        }
        Err(ListRefusal::Busy)
    }

    /// Empties `list`, which was filled on the account of `held`, and takes its array back.
    #[inline]
    pub fn clear(&mut self, list: &mut Segments, held: &mut ArraysHeld) {
        list.len = 0;
        if let Some(lease) = list.lease.take() {
            held.arrays[usize::from(lease.class)] -= 1;
            self.classes[usize::from(lease.class)]
                .free
                .push(lease.array);
        }
    }
}

impl Default for SegmentPool {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests;
