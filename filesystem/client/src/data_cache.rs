//! A cache of file data in this host's memory, shared by all filesystems of the host.
//!
//! File data lie in segments. An address of a segment is written once, whatever becomes of the write, and
//! never again. So what was read there is true for ever, and needs no capability and no recall: a read takes
//! from `cache.rs` or from the leader *which* addresses a file has now, and from here what is at them. The
//! key names the filesystem, too, as each counts its segments by itself; a client that registers gets a
//! number that is never used again.
//!
//! # What is put
//!
//! - What was read at addresses that an extent names. A read that fails puts nothing.
//! - What this host wrote, once it is flushed. Whether an extent will name it does not matter: if none does,
//!   nobody looks there.
//! - What is likely to be read next by whoever reads a file from front to back ([`Sequences`]).
//!
//! Nothing else is read: what lies beside a small file may be freed, or not be written yet. Kernels read
//! ahead by themselves, so that a page is seldom asked for in small pieces.
//!
//! # Pages
//!
//! The unit is a page of [`PAGE_BYTES`], aligned in its segment, of which any blocks may be there ([`Shard`]
//! says which pages stay). A block is stored in the run that it was put with, so that reading much is seldom
//! more than one copy a page, and a small file takes no more than its blocks.
//!
//! # Bound
//!
//! All that is stored counts, with a generous share for the tables; a page goes before another one comes.
//! Bytes that readers just copy from are beside it for that moment.
//!
//! # Several readers
//!
//! Whoever misses blocks claims them, and others wait for the claim's end ([`Claim`]) instead of asking, too.
//! A claim ends when its data are put, or it is dropped; nobody waits for one longer than [`CLAIM_WAIT`].

mod fetch;
mod pages;
mod plan;
mod read_ahead;
mod shard;
#[cfg(test)]
mod tests;

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use namespace::{BLOCK, SegmentId};

use crate::sync::lock;
pub(crate) use fetch::{Fetched, Span};
pub(crate) use pages::Slice;
use pages::{Blocks, Run};
#[cfg(doc)]
use plan::Claim;
pub(crate) use read_ahead::{ReadAhead, Sequences};
use shard::Shard;

/// Bytes of a page.
const PAGE_BYTES: u64 = 64 << 10;

/// Blocks of a page.
const PAGE_BLOCKS: u32 = (PAGE_BYTES / BLOCK) as u32;

/// Bytes of a shard at least, and the number of shards at most.
const SHARD_BYTES_MIN: u64 = 4 << 20;
const SHARDS_MAX: u64 = 64;

/// How long a reader waits for what another one is reading. Then it reads by itself.
const CLAIM_WAIT: Duration = Duration::from_secs(1);

/// File data that are kept in memory.
pub struct DataCache {
    /// As many as a power of two; the number of a page's shard are its hash's last bits.
    shards: Box<[Mutex<Shard>]>,
    capacity_bytes: u64,
    /// Filesystems that were registered.
    filesystems: AtomicU64,
}

/// A page of a segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct PageKey {
    filesystem: u64,
    segment: SegmentId,
    page: u64,
}

/// A filesystem's part of the cache. Dropping it forgets its data.
pub(crate) struct FilesystemData {
    cache: Arc<DataCache>,
    filesystem: u64,
    #[cfg(feature = "testing")]
    mistake: Option<crate::cache::Mistake>,
}

impl DataCache {
    /// A cache of so many bytes; with 0, nothing is cached.
    pub fn new(capacity_bytes: u64) -> Arc<Self> {
        let shards = (capacity_bytes / SHARD_BYTES_MIN).clamp(1, SHARDS_MAX);
        // Down to a power of two.
        let shards = 1 << shards.ilog2();
        let shard = |_| Mutex::new(Shard::new(capacity_bytes / shards));
        Arc::new(Self {
            shards: (0..shards).map(shard).collect(),
            capacity_bytes,
            filesystems: AtomicU64::new(0),
        })
    }

    /// The bytes that it was made for.
    pub fn capacity_bytes(&self) -> u64 {
        self.capacity_bytes
    }

    /// The bytes that it takes now, with what it needs to find them. Never more than
    /// [`DataCache::capacity_bytes`].
    pub fn used_bytes(&self) -> u64 {
        self.shards.iter().map(|shard| lock(shard).used()).sum()
    }

    /// Takes a filesystem in.
    pub(crate) fn register(
        self: &Arc<Self>,
        #[cfg(feature = "testing")] mistake: Option<crate::cache::Mistake>,
    ) -> FilesystemData {
        FilesystemData {
            cache: Arc::clone(self),
            filesystem: self.filesystems.fetch_add(1, Ordering::Relaxed),
            #[cfg(feature = "testing")]
            mistake,
        }
    }

    fn shard(&self, key: &PageKey) -> &Mutex<Shard> {
        let number = key.hash() as usize & (self.shards.len() - 1);
        &self.shards[number]
    }
}

impl fmt::Debug for DataCache {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut debug = formatter.debug_struct("DataCache");
        debug.field("capacity_bytes", &self.capacity_bytes);
        debug.finish_non_exhaustive()
    }
}

impl FilesystemData {
    /// Whether anything is cached at all.
    pub(crate) fn is_on(&self) -> bool {
        self.cache.capacity_bytes > 0
    }

    pub(crate) fn capacity_bytes(&self) -> u64 {
        self.cache.capacity_bytes
    }

    fn key(&self, segment: SegmentId, page: u64) -> PageKey {
        let key = PageKey {
            filesystem: self.filesystem,
            segment,
            page,
        };
        #[cfg(feature = "testing")]
        match self.mistake {
            Some(crate::cache::Mistake::DataWithoutSegment) => {
                let segment = SegmentId(0);
                return PageKey { segment, ..key };
            }
            Some(crate::cache::Mistake::DataWithoutFilesystem) => {
                return PageKey {
                    filesystem: 0,
                    ..key
                };
            }
            _ => {}
        }
        key
    }

    /// The pages of a range of whole blocks, each with its blocks and where these are in the range.
    fn pages(&self, span: Span) -> impl Iterator<Item = (PageKey, Blocks, u64)> {
        let (first, end) = (span.address, span.address + span.length);
        let pages = first / PAGE_BYTES..end.div_ceil(PAGE_BYTES);
        pages.map(move |page| {
            let begin = page * PAGE_BYTES;
            let (from, to) = (first.max(begin), end.min(begin + PAGE_BYTES));
            let blocks = Blocks::new(
                ((from - begin) / BLOCK) as u32,
                ((to - begin) / BLOCK) as u32,
            );
            (self.key(span.segment, page), blocks, from - first)
        })
    }

    /// Copies data for the cache, which are to be put when they are durable. Nothing if nothing is cached.
    pub(crate) fn copy(&self, segment: SegmentId, address: u64, data: &[u8]) -> Copied {
        if !self.is_on() {
            return Copied(Vec::new());
        }
        let length = data.len() as u64;
        let span = Span {
            segment,
            address,
            length,
        };
        let pages = self.pages(span).map(|(key, blocks, at)| {
            let bytes = &data[at as usize..][..blocks.bytes()];
            (key, Run::new(blocks, bytes))
        });
        Copied(pages.collect())
    }

    /// Puts what was copied, and is durable now.
    pub(crate) fn put(&self, copied: Copied) {
        for (key, run) in copied.0 {
            let displaced = lock(self.cache.shard(&key)).put(key, run, false);
            drop(displaced);
        }
    }
}

impl Drop for FilesystemData {
    fn drop(&mut self) {
        for shard in &self.cache.shards {
            lock(shard).forget(self.filesystem);
        }
    }
}

/// Copies of data that are on their way to a segment.
pub(crate) struct Copied(Vec<(PageKey, Run)>);

impl PageKey {
    /// Spreads pages over shards, the same in each run.
    fn hash(&self) -> u64 {
        // splitmix64.
        let mix = |mut word: u64| {
            word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            word ^ (word >> 31)
        };
        let words = [self.filesystem, self.segment.0, self.page];
        let step = |hash: u64, word| mix(hash.wrapping_add(0x9e37_79b9_7f4a_7c15) ^ word);
        words.into_iter().fold(0, step)
    }
}
