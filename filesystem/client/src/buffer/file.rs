//! What is buffered of one file.

use std::collections::BTreeMap;
use std::sync::Arc;

use fs_capabilities::Instant;
use namespace::{BLOCK, Ino, SessionId, Time};

use super::BATCH_BYTES_MAX;
use super::room::BlockData;

/// A block that is not committed.
pub(super) struct Block {
    pub(super) data: Arc<BlockData>,
    /// The write that it holds the bytes of.
    write: u64,
    /// The first write whose bytes of it are not committed.
    first: u64,
    is_under_way: bool,
}

/// What is buffered of a file.
pub(super) struct File {
    pub(super) session: SessionId,
    /// The grant under which it is held.
    pub(super) grant: u64,
    pub(super) size: u64,
    pub(super) mtime: Time,
    pub(super) clears_privileges: bool,
    /// The record was changed since by something else: a commit is not to set its time back.
    pub(super) is_moved: bool,
    pub(super) is_orphan: bool,
    pub(super) blocks: BTreeMap<u64, Block>,
    /// Blocks that are not being written back.
    fresh: u64,
    /// Since when there are such. What a commit left out keeps its age.
    pub(super) since: Instant,
    /// Its age in the index.
    pub(super) indexed: Option<Instant>,
    /// Writes up to this one are to be written back at once.
    pub(super) asked: u64,
    /// It is among the urgent ones.
    pub(super) is_queued: bool,
    pub(super) is_recalled: bool,
    pub(super) is_under_way: bool,
    /// Changes of its attributes under way.
    pub(super) pins: usize,
    /// Tries that failed since the last one that did not.
    pub(super) tries: u32,
    pub(super) not_before: Instant,
}

/// A part of a file that is being written back.
pub(super) struct Taken {
    pub(super) ino: Ino,
    pub(super) session: SessionId,
    grant: u64,
    pub(super) blocks: Vec<(u64, Arc<BlockData>)>,
    pub(super) size: u64,
    pub(super) mtime: Time,
    pub(super) clears_privileges: bool,
    pub(super) is_moved: bool,
    pub(super) is_orphan: bool,
    /// Since when there was something to take.
    since: Instant,
}

impl Taken {
    pub(super) fn bytes(&self) -> u64 {
        self.blocks.len() as u64 * BLOCK
    }

    /// Whether a file is the one that this was taken of.
    pub(super) fn is_of(&self, file: &File) -> bool {
        file.grant == self.grant && file.session == self.session
    }
}

impl File {
    pub(super) fn new(session: SessionId, grant: u64, size: u64) -> Self {
        Self {
            session,
            grant,
            size,
            mtime: Time::default(),
            clears_privileges: false,
            is_moved: false,
            is_orphan: false,
            blocks: BTreeMap::new(),
            fresh: 0,
            since: Instant::START,
            indexed: None,
            asked: 0,
            is_queued: false,
            is_recalled: false,
            is_under_way: false,
            pins: 0,
            tries: 0,
            not_before: Instant::START,
        }
    }

    /// Bytes that are not being written back.
    pub(super) fn fresh_bytes(&self) -> u64 {
        self.fresh * BLOCK
    }

    pub(super) fn put(&mut self, now: Instant, write: u64, offset: u64, data: Arc<BlockData>) {
        let before = self.blocks.get(&offset);
        let was_fresh = before.is_some_and(|block| !block.is_under_way);
        let first = before.map_or(write, |block| block.first);
        let block = Block {
            data,
            write,
            first,
            is_under_way: false,
        };
        self.blocks.insert(offset, block);
        if !was_fresh {
            if self.fresh == 0 {
                self.since = now;
            }
            self.fresh += 1;
        }
    }

    /// The first write of which something is not committed.
    pub(super) fn oldest_write(&self) -> u64 {
        let writes = self.blocks.values().map(|block| block.first);
        writes.min().unwrap_or(u64::MAX)
    }

    /// Takes what is to be written back, of at most `bytes_max` bytes. A last block that is filled in part
    /// goes along: without it the last request would be committed in part.
    pub(super) fn take(&mut self, ino: Ino, bytes_max: u64) -> Taken {
        assert!(!self.is_under_way, "one commit of a file at a time");
        let bytes_max = bytes_max.clamp(BLOCK, BATCH_BYTES_MAX);
        let (mut blocks, mut is_rest) = (Vec::new(), false);
        for (offset, block) in &mut self.blocks {
            if blocks.len() as u64 * BLOCK >= bytes_max {
                is_rest = true;
                break;
            }
            block.is_under_way = true;
            blocks.push((*offset, Arc::clone(&block.data)));
        }
        self.fresh -= blocks.len() as u64;
        self.is_under_way = true;
        let end = blocks.last().map_or(0, |(offset, _)| offset + BLOCK);
        Taken {
            ino,
            session: self.session,
            grant: self.grant,
            blocks,
            // What lies behind comes with a later commit.
            size: if is_rest {
                self.size.min(end)
            } else {
                self.size
            },
            mtime: self.mtime,
            clears_privileges: self.clears_privileges,
            is_moved: self.is_moved,
            is_orphan: self.is_orphan,
            since: self.since,
        }
    }

    /// What was taken is committed.
    pub(super) fn committed(&mut self, taken: &Taken) {
        for (offset, data) in &taken.blocks {
            let Some(block) = self.blocks.get_mut(offset) else {
                continue;
            };
            match Arc::ptr_eq(&block.data, data) {
                true => {
                    self.blocks.remove(offset);
                }
                // Written anew meanwhile.
                false => block.first = block.write,
            }
        }
        self.is_under_way = false;
        self.tries = 0;
        self.clears_privileges &= !taken.clears_privileges;
    }

    /// What was taken is not committed, and stays.
    pub(super) fn not_committed(&mut self, taken: &Taken) {
        for (offset, data) in &taken.blocks {
            let block = self.blocks.get_mut(offset);
            if let Some(block) = block.filter(|block| Arc::ptr_eq(&block.data, data)) {
                block.is_under_way = false;
                self.fresh += 1;
            }
        }
        self.is_under_way = false;
        self.since = self.since.min(taken.since);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use futures_util::FutureExt;

    use super::super::room::Room;
    use super::*;

    fn block(room: &Room) -> Arc<BlockData> {
        let reserved = room.reserve(BLOCK, || {}).now_or_never();
        reserved.unwrap().fill(vec![0; BLOCK as usize])
    }

    #[test]
    fn what_a_commit_leaves_out_keeps_its_age() {
        let room = Room::new(4 * BATCH_BYTES_MAX);
        let mut file = File::new(SessionId(1), 1, 0);
        let at = |seconds| Instant::START + Duration::from_secs(seconds);
        let blocks = BATCH_BYTES_MAX / BLOCK + 1;
        for number in 0..blocks {
            file.put(at(1), number, number * BLOCK, block(&room));
        }
        let taken = file.take(Ino(2), BATCH_BYTES_MAX);
        assert_eq!(taken.bytes(), BATCH_BYTES_MAX);
        file.put(at(3), blocks, 0, block(&room));
        file.committed(&taken);
        assert_eq!((file.since, file.fresh_bytes()), (at(1), 2 * BLOCK));
        let taken = file.take(Ino(2), BATCH_BYTES_MAX);
        file.put(at(5), blocks + 1, BLOCK, block(&room));
        assert_eq!(file.since, at(5));
        file.not_committed(&taken);
        assert_eq!((file.since, file.fresh_bytes()), (at(1), 3 * BLOCK));
        let taken = file.take(Ino(2), BATCH_BYTES_MAX);
        file.committed(&taken);
        assert!(file.blocks.is_empty());
    }
}
