//! The writes of a volume that a thread has in flight, in the order in which they drew their versions: the
//! oldest of them bounds the watermark.

use fabric_types::ids::Version;
use fabric_types::slab::Slab;

use super::ios::GuestIo;
use super::link::{Link, NONE};

/// The list; its links are in the table of requests.
#[derive(Debug, Clone, Copy)]
pub(super) struct Writes {
    oldest: u32,
    newest: u32,
}

impl Writes {
    pub(super) const EMPTY: Self = Self {
        oldest: NONE,
        newest: NONE,
    };

    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.oldest == NONE
    }

    /// Takes a write in, as the newest.
    #[inline]
    pub(super) fn push(&mut self, io: u32, version: Version, ios: &mut Slab<GuestIo>) {
        let older = std::mem::replace(&mut self.newest, io);
        match older {
            NONE => self.oldest = io,
            older => ios[older].link.newer = io,
        }
        ios[io].link = Link {
            version,
            older,
            newer: NONE,
        };
    }

    /// Takes a write out. `Some` if it was the oldest: the version of the one that is now, if any is left.
    #[inline]
    pub(super) fn remove(&mut self, io: u32, ios: &mut Slab<GuestIo>) -> Option<Option<Version>> {
        let Link { older, newer, .. } = ios[io].link;
        match newer {
            NONE => self.newest = older,
            newer => ios[newer].link.older = older,
        }
        if older != NONE {
            ios[older].link.newer = newer;
            return None;
        }
        self.oldest = newer;
        Some((newer != NONE).then(|| ios[newer].link.version))
    }
}

#[cfg(test)]
mod tests {
    use super::super::ios::NO_IO;
    use super::*;

    #[test]
    fn the_oldest_write_in_flight_is_known_in_whatever_order_they_end() {
        let mut ios = Slab::new(4, || NO_IO);
        let mut writes = Writes::EMPTY;
        for nth in 0..4u64 {
            let io = ios.take().expect("there are four");
            writes.push(io, Version(10 + nth), &mut ios);
        }
        assert_eq!(writes.remove(1, &mut ios), None);
        assert_eq!(writes.remove(0, &mut ios), Some(Some(Version(12))));
        assert_eq!(writes.remove(3, &mut ios), None);
        assert!(!writes.is_empty());
        assert_eq!(writes.remove(2, &mut ios), Some(None));
        assert!(writes.is_empty());
    }
}
