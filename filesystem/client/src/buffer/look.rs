//! What guests of this host see of a file that has something buffered.

use std::sync::Arc;

use namespace::{Attributes, BLOCK, Ino, Inode};

use super::Buffer;
use super::ends::Moment;
use super::file::File;
use super::room::BlockData;
use crate::backend::Backend;
use crate::client::Client;
use crate::read_data::ReadData;
use crate::sync::lock;

/// Bits of a mode.
const SET_USER_ID: u16 = 0o4000;
const SET_GROUP_ID: u16 = 0o2000;
const GROUP_EXECUTES: u16 = 0o010;

/// What is buffered of a file's range, of one moment.
pub(crate) struct Buffered {
    /// Blocks by their offsets.
    blocks: Vec<(u64, Arc<BlockData>)>,
    /// Size of the file, if something of it is buffered.
    size: Option<u64>,
    moment: Moment,
}

impl Buffered {
    /// The size of a file that has this one in its record.
    pub(crate) fn size(&self, recorded: u64) -> u64 {
        self.size.map_or(recorded, |size| size.max(recorded))
    }

    /// The bytes of a range that begins at `from`, with what is buffered.
    pub(crate) fn covered<B: Backend>(
        &self,
        #[cfg_attr(not(feature = "testing"), expect(unused_variables))] client: &Client<B>,
        from: u64,
        data: ReadData,
    ) -> ReadData {
        #[cfg(feature = "testing")]
        if client.options.mistake == Some(crate::cache::Mistake::ReadPastBuffer) {
            return data;
        }
        if self.blocks.is_empty() {
            return data;
        }
        let mut bytes = data.into_vec();
        self.cover(from, &mut bytes);
        bytes.into()
    }

    /// Puts what is buffered over the bytes of a range that begins at `from`.
    fn cover(&self, from: u64, bytes: &mut [u8]) {
        let to = from + bytes.len() as u64;
        for (offset, data) in &self.blocks {
            let (first, last) = (from.max(*offset), to.min(offset + BLOCK));
            if first < last {
                let part = &data[(first - offset) as usize..(last - offset) as usize];
                bytes[(first - from) as usize..(last - from) as usize].copy_from_slice(part);
            }
        }
    }
}

impl Buffer {
    /// Whether nothing is buffered of any file.
    pub(crate) fn is_empty(&self) -> bool {
        lock(&self.state).files.is_empty()
    }

    /// Now: what is written back later was not before.
    pub(crate) fn moment(&self) -> Moment {
        lock(&self.state).ends.now()
    }

    /// Whether something of a file may have been written back since. A record that was looked for meanwhile
    /// may lack what was buffered before.
    pub(crate) fn is_since(&self, ino: Ino, moment: Moment) -> bool {
        lock(&self.state).ends.is_since(ino, moment)
    }

    /// The size of a file that has something buffered.
    pub(super) fn size(&self, ino: Ino) -> Option<u64> {
        let state = lock(&self.state);
        state.files.get(&ino).map(|file| file.size)
    }

    /// The bytes of a block that is buffered.
    pub(super) fn block(&self, ino: Ino, offset: u64) -> Option<Vec<u8>> {
        let state = lock(&self.state);
        let block = state.files.get(&ino)?.blocks.get(&offset)?;
        Some(block.data.to_vec())
    }

    /// What is buffered of a range.
    pub(crate) fn range(&self, ino: Ino, (from, to): (u64, u64)) -> Buffered {
        let state = lock(&self.state);
        let file = state.files.get(&ino);
        let first = from / BLOCK * BLOCK;
        let blocks = file.into_iter().filter(|_| first < to).flat_map(|file| {
            let blocks = file.blocks.range(first..to);
            blocks.map(|(offset, block)| (*offset, Arc::clone(&block.data)))
        });
        Buffered {
            blocks: blocks.collect(),
            size: file.map(|file| file.size),
            moment: state.ends.now(),
        }
    }

    /// Puts what is buffered over attributes.
    pub(crate) fn cover_attributes(&self, attributes: &mut Attributes) {
        let state = lock(&self.state);
        let Some(file) = state.files.get(&attributes.ino) else {
            return;
        };
        attributes.size = attributes.size.max(file.size);
        attributes.mtime = file.mtime;
        attributes.ctime = attributes.ctime.max(file.mtime);
        attributes.mode = mode_of(file, attributes.mode);
        // Programs take a file without space for one that is all hole.
        let buffered = file.blocks.len() as u64 * BLOCK;
        let whole = attributes.size.next_multiple_of(BLOCK);
        let allocated = attributes.allocated.saturating_add(buffered).min(whole);
        attributes.allocated = attributes.allocated.max(allocated);
    }

    /// The same over a record.
    pub(crate) fn cover_inode(&self, ino: Ino, inode: &mut Inode) {
        let mut attributes = Attributes::of(ino, inode);
        self.cover_attributes(&mut attributes);
        inode.size = attributes.size;
        inode.mtime = attributes.mtime;
        inode.ctime = attributes.ctime;
        inode.mode = attributes.mode;
        inode.allocated = attributes.allocated;
    }
}

/// The mode as a commit will leave it.
fn mode_of(file: &File, mut mode: u16) -> u16 {
    if file.clears_privileges {
        mode &= !SET_USER_ID;
        if mode & GROUP_EXECUTES != 0 {
            mode &= !SET_GROUP_ID;
        }
    }
    mode
}

impl<B: Backend> Client<B> {
    /// What is buffered of a file's range, under a lease that has not ended.
    pub(crate) fn buffered(&self, ino: Ino, range: (u64, u64)) -> Buffered {
        self.expire();
        self.buffer.range(ino, range)
    }

    /// Whether what was looked at since may lack something of it that was written back meanwhile.
    pub(crate) fn is_stale(&self, ino: Ino, buffered: &Buffered) -> bool {
        self.expire();
        self.buffer.is_since(ino, buffered.moment)
    }

    /// Loses what is buffered if the session's lease has ended: others may look by now.
    pub(crate) fn expire(&self) {
        if !self.buffer.is_empty() {
            let lease_until = self.backend.lease_until();
            self.cache.expire(self.backend.monotonic(), lease_until);
        }
    }
}
