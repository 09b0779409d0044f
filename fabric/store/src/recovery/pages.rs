//! Reading what lies scattered on the device: neighbours in one piece, and several pieces at a time. A
//! terabyte has thousands of map and bitmap pages, and one after the other each would cost the device's
//! latency.

use std::collections::BTreeSet;

use fabric_types::block::is_media_error;
use fabric_types::checksum::crc32c;

use super::super::arena::AlignedBuf;
use super::super::device::ReadAt;
use super::super::error::OpenError;
use super::super::format::{Page, Ptr, REGION_UNITS, UNIT_BYTES};
use super::{Opening, io_error};

/// Units of one read at most. A wanted range is never longer.
pub(super) const PIECE_UNITS: u32 = REGION_UNITS;
/// Units that nobody wants and that are read along where they lie between two wanted ones: cheaper than one
/// read more.
const GAP_UNITS: u32 = 16;
/// Units read at a time, which bounds the memory.
const TOGETHER_UNITS: u32 = 4 * PIECE_UNITS;
/// Reads at a time, for ranges that lie far apart.
const TOGETHER_READS: usize = 64;

const READ_MAP: &str = "read the map";
const LEAF: &str = "map page";

/// A map page that cannot be read.
#[derive(Debug, Clone, Copy)]
pub(super) struct UnreadLeaf {
    /// What the caller calls it.
    pub(super) name: usize,
    /// The device's error; none if the checksum does not fit.
    pub(super) result: Result<(), i32>,
}

/// The errno of an error that says that the device cannot give what was to be read.
fn media_errno(error: &OpenError) -> Option<i32> {
    let OpenError::Io { source, .. } = error else {
        return None;
    };
    source.raw_os_error().filter(|&errno| is_media_error(errno))
}

/// A wanted range of units, and what the caller calls it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Wanted {
    pub start: u32,
    pub len: u32,
    pub name: usize,
}

/// A read, and which of the wanted ranges it covers.
struct Piece {
    start: u32,
    len: u32,
    covers: std::ops::Range<usize>,
}

impl Opening<'_> {
    /// Reads and proves the units that the pointers name; those that name none are left out. `take` gets the
    /// index of the pointer and the content, in any order.
    pub(super) fn pages(
        &mut self,
        ptrs: &[Ptr],
        what: &'static str,
        mut take: impl FnMut(usize, &[u8]),
    ) -> Result<(), OpenError> {
        let mut wanted = Vec::with_capacity(ptrs.len());
        for (name, ptr) in ptrs.iter().enumerate().filter(|(_, ptr)| ptr.unit != 0) {
            if ptr.unit >= self.geo.units {
                return Err(self.damaged(what, ptr.unit));
            }
            let (start, len) = (ptr.unit, 1);
            wanted.push(Wanted { start, len, name });
        }
        let mut damaged = None;
        self.ranges(wanted, READ_MAP, |name, page| {
            let ptr = ptrs[name];
            if crc32c(page) == ptr.crc {
                take(name, page);
            } else {
                damaged.get_or_insert(ptr.unit);
            }
        })?;
        damaged.map_or(Ok(()), |unit| Err(self.damaged(what, unit)))
    }

    /// The same of map pages. Those that cannot be read, twice, are returned: be it that their checksum does
    /// not fit or that the device refuses. Of those that it refuses more than `refused_max` are an error, and
    /// so is any other error of the device.
    pub(super) fn leaves(
        &mut self,
        ptrs: &[Ptr],
        refused_max: usize,
        mut take: impl FnMut(usize, &[u8]),
    ) -> Result<Vec<UnreadLeaf>, OpenError> {
        let mut named: Vec<usize> = (0..ptrs.len()).filter(|&n| ptrs[n].unit != 0).collect();
        if let Some(&name) = named.iter().find(|&&n| ptrs[n].unit >= self.geo.units) {
            return Err(self.damaged(LEAF, ptrs[name].unit));
        }
        named.sort_unstable_by_key(|&name| ptrs[name].unit);
        let (mut unread, mut refused) = (Vec::new(), 0);
        for names in named.chunks(TOGETHER_UNITS as usize) {
            let wanted = |&name: &usize| Wanted {
                start: ptrs[name].unit,
                len: 1,
                name,
            };
            let mut missing: BTreeSet<usize> = names.iter().copied().collect();
            let wanted = names.iter().map(wanted).collect();
            // An error is met once more below, if it lasts.
            let _ = self.ranges(wanted, READ_MAP, |name, page| {
                if crc32c(page) == ptrs[name].crc {
                    missing.remove(&name);
                    take(name, page);
                }
            });
            for name in missing {
                let result = match self.leaf(ptrs[name]) {
                    Ok(Some(page)) => {
                        take(name, &page.0);
                        continue;
                    }
                    Ok(None) => Ok(()),
                    Err(error) => {
                        refused += 1;
                        let errno = media_errno(&error).filter(|_| refused <= refused_max);
                        Err(errno.ok_or(error)?)
                    }
                };
                unread.push(UnreadLeaf { name, result });
            }
        }
        Ok(unread)
    }

    /// One of them by itself; none if its checksum does not fit.
    fn leaf(&mut self, ptr: Ptr) -> Result<Option<Box<Page>>, OpenError> {
        let mut page = Page::zeroed();
        self.read(ptr.unit, &mut page.0, READ_MAP)?;
        Ok((crc32c(&page.0) == ptr.crc).then_some(page))
    }

    /// Reads ranges of units. `take` gets the name of a range and its content, in the order of the units.
    pub(super) fn ranges(
        &mut self,
        mut wanted: Vec<Wanted>,
        what: &'static str,
        mut take: impl FnMut(usize, &[u8]),
    ) -> Result<(), OpenError> {
        wanted.sort_unstable_by_key(|w| (w.start, w.len));
        let pieces = pieces_of(&wanted);
        let mut left = pieces.as_slice();
        let all: u32 = pieces.iter().map(|p| p.len).sum();
        let mut buf = AlignedBuf::new(all.min(TOGETHER_UNITS) as usize);
        while !left.is_empty() {
            let mut units = 0;
            let fits = |piece: &&Piece| {
                units += piece.len;
                units <= TOGETHER_UNITS
            };
            let count = left.iter().take(TOGETHER_READS).take_while(fits).count();
            let (now, later) = left.split_at(count);
            self.read_pieces(now, &wanted, &mut buf, what)?;
            let mut at = 0;
            for piece in now {
                for range in &wanted[piece.covers.clone()] {
                    take(
                        range.name,
                        buf.blocks(at + range.start - piece.start, range.len),
                    );
                }
                at += piece.len;
            }
            left = later;
        }
        Ok(())
    }

    /// Fills the buffer with the pieces, one behind the other.
    fn read_pieces(
        &mut self,
        pieces: &[Piece],
        wanted: &[Wanted],
        buf: &mut AlignedBuf,
        what: &'static str,
    ) -> Result<(), OpenError> {
        let units: u32 = pieces.iter().map(|p| p.len).sum();
        let mut rest = buf.blocks_mut(0, units);
        let mut reads = Vec::with_capacity(pieces.len());
        for piece in pieces {
            let (head, tail) = rest.split_at_mut(piece.len as usize * UNIT_BYTES);
            let offset = self.geo.offset(piece.start);
            reads.push(ReadAt { offset, buf: head });
            rest = tail;
        }
        self.report.read_bytes += u64::from(units) * UNIT_BYTES as u64;
        if self.dev.read_many(&mut reads).is_ok() {
            return Ok(());
        }
        // The error may be that of a unit which nobody asked for: each range on its own.
        let mut at = 0;
        for piece in pieces {
            for range in &wanted[piece.covers.clone()] {
                let place = buf.blocks_mut(at + range.start - piece.start, range.len);
                let offset = self.geo.offset(range.start);
                self.dev
                    .read_at(offset, place)
                    .map_err(io_error(what, offset))?;
            }
            at += piece.len;
        }
        Ok(())
    }
}

/// Joins sorted ranges that lie close together.
fn pieces_of(wanted: &[Wanted]) -> Vec<Piece> {
    let mut pieces: Vec<Piece> = Vec::new();
    for (at, range) in wanted.iter().enumerate() {
        assert!((1..=PIECE_UNITS).contains(&range.len));
        let end = range.start + range.len;
        if let Some(last) = pieces.last_mut() {
            let near = range.start <= last.start + last.len + GAP_UNITS;
            if near && end - last.start <= PIECE_UNITS {
                last.len = last.len.max(end - last.start);
                last.covers.end = at + 1;
                continue;
            }
        }
        pieces.push(Piece {
            start: range.start,
            len: range.len,
            covers: at..at + 1,
        });
    }
    pieces
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_hold_every_range_and_stay_short() {
        let ranges = [
            (7, 1),
            (8, 1),
            (8, 3),
            (20, 4),
            (60, 1),
            (270, 40),
            (300, 256),
            (556, 1),
        ];
        let wanted: Vec<Wanted> = ranges
            .iter()
            .enumerate()
            .map(|(name, &(start, len))| Wanted { start, len, name })
            .collect();
        let pieces = pieces_of(&wanted);
        let places: Vec<_> = pieces.iter().map(|p| (p.start, p.len)).collect();
        assert_eq!(places, [(7, 17), (60, 1), (270, 40), (300, 256), (556, 1)]);
        let covered: Vec<usize> = pieces.iter().flat_map(|p| p.covers.clone()).collect();
        assert_eq!(covered, (0..ranges.len()).collect::<Vec<_>>());
    }
}
