//! One side's chunks of the group, listed some hundreds at a time.

use std::collections::{BTreeSet, VecDeque};

use fabric_types::Command;
use fabric_types::ids::{ChunkKey, LayerId};
use fabric_types::iov::IoVecs;
use fabric_types::message::{ChunkEntry, chunk_entry};
use zerocopy::{FromBytes, IntoBytes};

/// Entries of one list of chunks.
const LIST_ENTRIES: usize = 256;

/// Where the chunks of one side are being listed.
#[derive(Debug)]
pub(super) struct Listing {
    cursor: u64,
    /// The answer is due.
    pub(super) asked: bool,
    /// There are no more.
    pub(super) ended: bool,
    /// Memory that the answer is written to.
    page: Box<ListingPage>,
}

#[derive(Debug)]
struct ListingPage {
    entries: [ChunkEntry; LIST_ENTRIES],
    iov: libc::iovec,
}

impl Listing {
    /// From the first on.
    pub(super) fn new() -> Self {
        let empty = libc::iovec {
            iov_base: std::ptr::null_mut(),
            iov_len: 0,
        };
        let mut page = Box::new(ListingPage {
            entries: [ChunkEntry::default(); LIST_ENTRIES],
            iov: empty,
        });
        page.iov = libc::iovec {
            iov_base: page.entries.as_mut_ptr().cast(),
            iov_len: size_of_val(&page.entries),
        };
        Self {
            cursor: 0,
            asked: false,
            ended: false,
            page,
        }
    }

    /// Asks for the next ones.
    pub(super) fn command(&mut self) -> Command {
        self.asked = true;
        Command::ListChunks {
            cursor: self.cursor,
            buffers: IoVecs {
                ptr: &raw const self.page.iov,
                len: 1,
            },
            len: size_of_val(&self.page.entries) as u32,
        }
    }

    /// Takes the answer in.
    pub(super) fn take(&mut self, into: &mut VecDeque<ChunkKey>, seen: &mut BTreeSet<ChunkKey>) {
        self.asked = false;
        // Read as bytes: what a peer wrote is any bytes.
        let bytes = self.page.entries.as_bytes();
        for bytes in bytes.chunks_exact(size_of::<ChunkEntry>()) {
            let Ok(entry) = ChunkEntry::read_from_bytes(bytes) else {
                break;
            };
            self.cursor = entry.cursor;
            match entry.kind {
                chunk_entry::CHUNK => {
                    let chunk = ChunkKey {
                        layer: LayerId(entry.layer),
                        index: entry.chunk,
                    };
                    // What a peer told is any bytes, and the last number names no chunk.
                    if chunk.index != u32::MAX && seen.insert(chunk) {
                        into.push_back(chunk);
                    }
                }
                chunk_entry::MORE => return,
                _ => {
                    self.ended = true;
                    return;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_number_that_is_no_chunk_is_not_compared() {
        let mut listing = Listing::new();
        let entry = |chunk, kind| ChunkEntry {
            layer: 5,
            cursor: 1,
            chunk,
            kind,
        };
        let told = [
            entry(u32::MAX, chunk_entry::CHUNK),
            entry(3, chunk_entry::CHUNK),
            entry(0, chunk_entry::END),
        ];
        listing.page.entries[..told.len()].copy_from_slice(&told);
        let (mut chunks, mut seen) = (VecDeque::new(), BTreeSet::new());
        listing.take(&mut chunks, &mut seen);
        let indexes: Vec<u32> = chunks.iter().map(|chunk| chunk.index).collect();
        assert_eq!((indexes, seen.len(), listing.ended), (vec![3], 1, true));
    }
}
