//! Attributes and content of files, in the model.

use super::{Answer, Model, Place, What, valid_xattr};
use crate::*;

impl Model {
    /// New content or a new owner takes capabilities; set-user-id bits, if asked.
    fn take_privileges(&mut self, ino: Ino, is_new: bool, asked: bool) {
        let node = self.nodes.get_mut(&ino.0).unwrap();
        if let What::Directory(_) = node.what {
            return;
        }
        if is_new {
            node.xattrs.remove(&b"security.capability"[..]);
        }
        if asked {
            let group = if node.mode & 0o10 != 0 { 0o2000 } else { 0 };
            node.mode &= !(0o4000 | group);
        }
    }

    pub(super) fn set_attributes(&mut self, set: &SetAttributes, session: u64, at: Time) -> Answer {
        self.expect(set.ino, set.expected)?;
        if let Some(size) = set.size {
            let old = self.nodes[&set.ino.0].size;
            let blocks = self.file(set.ino)?;
            let last = size / BLOCK;
            let cut = size < old && size % BLOCK != 0 && blocks.contains_key(&last);
            if cut != set.tail.is_some() {
                return Err(Error::Invalid);
            }
            blocks.retain(|block, _| *block < size.div_ceil(BLOCK));
            if let Some(tail) = set.tail {
                let place = (tail.segment.0, tail.address / BLOCK);
                self.claim(place, (1, tail.epoch), session)?;
                self.file(set.ino)?.insert(last, place);
            }
            let node = self.node(set.ino)?;
            node.size = size;
            node.times[1] = at;
        } else if set.tail.is_some() {
            return Err(Error::Invalid);
        }
        let is_new = set.size.is_some() || set.uid.is_some() || set.gid.is_some();
        self.take_privileges(set.ino, is_new, set.clear_privileges);
        let node = self.node(set.ino)?;
        node.mode = set.mode.unwrap_or(node.mode);
        node.owner.0 = set.uid.unwrap_or(node.owner.0);
        node.owner.1 = set.gid.unwrap_or(node.owner.1);
        for (time, set) in node.times.iter_mut().zip([set.atime, set.mtime]) {
            match set {
                Some(SetTime::Now) => *time = at,
                Some(SetTime::To(to)) => *time = to,
                None => {}
            }
        }
        self.touch(set.ino.0, at, false);
        let attributes = self.attributes(set.ino.0);
        Ok(Outcome::Changed {
            attributes,
            done: true,
        })
    }

    pub(super) fn set_xattr(
        &mut self,
        ino: Ino,
        name: &[u8],
        value: Option<(&Vec<u8>, XattrMode)>,
        at: Time,
    ) -> Answer {
        valid_xattr(name)?;
        if value.is_some_and(|(value, _)| value.len() > 65_536) {
            return Err(Error::ValueTooLong);
        }
        let xattrs = &mut self.node(ino)?.xattrs;
        match (value, xattrs.contains_key(name)) {
            (None | Some((_, XattrMode::Replace)), false) => return Err(Error::NoAttribute),
            (Some((_, XattrMode::Create)), true) => return Err(Error::Exists),
            (None, true) => drop(xattrs.remove(name)),
            (Some((value, _)), _) => drop(xattrs.insert(name.to_vec(), value.clone())),
        }
        let list: usize = xattrs.keys().map(|name| name.len() + 1).sum();
        let values: usize = xattrs.values().map(Vec::len).sum();
        if list > 65_536 || values > 131_072 {
            return Err(Error::NoSpace);
        }
        self.touch(ino.0, at, false);
        Ok(Outcome::Done)
    }

    fn claim(
        &mut self,
        (segment, from): Place,
        (count, epoch): (u64, u64),
        session: u64,
    ) -> Result<(), Error> {
        let layer = self.segments.get_mut(&segment).ok_or(Error::Invalid)?;
        let is_straddling = from < layer.end && from + count > layer.end;
        if layer.owner != session || layer.sealed || is_straddling {
            return Err(Error::Invalid);
        }
        for at in from..from + count {
            if layer.claimed.insert(at, epoch).is_some() {
                return Err(Error::Invalid);
            }
        }
        layer.end = layer.end.max(from + count);
        Ok(())
    }

    pub(super) fn commit(&mut self, commit: &Commit, session: u64, at: Time) -> Answer {
        self.expect(commit.ino, commit.expected)?;
        self.file(commit.ino)?;
        let size = commit.size.max(self.nodes[&commit.ino.0].size);
        let mut last = 0;
        for extent in &commit.extents {
            if extent.offset < last || extent.end().div_ceil(BLOCK) > size.div_ceil(BLOCK) {
                return Err(Error::Invalid);
            }
            last = extent.end();
        }
        for extent in &commit.extents {
            let (first, count) = (extent.address / BLOCK, extent.length / BLOCK);
            let blocks = (count, extent.epoch);
            self.claim((extent.segment.0, first), blocks, session)?;
            let blocks = self.file(commit.ino)?;
            for at in 0..count {
                let place = (extent.segment.0, first + at);
                blocks.insert(extent.offset / BLOCK + at, place);
            }
        }
        self.take_privileges(commit.ino, true, commit.clear_privileges);
        let node = self.node(commit.ino)?;
        node.size = size;
        node.times[1] = commit.mtime;
        self.touch(commit.ino.0, at, false);
        Ok(Outcome::Inode(self.attributes(commit.ino.0)))
    }

    pub(super) fn punch(&mut self, punch: &Punch, at: Time) -> Answer {
        self.file(punch.ino)?;
        let (size, end) = (self.nodes[&punch.ino.0].size, punch.offset + punch.length);
        let is_cut = end % BLOCK != 0 && end < size;
        if punch.length == 0 || punch.offset % BLOCK != 0 || is_cut {
            return Err(Error::Invalid);
        }
        let hole = punch.offset / BLOCK..end.div_ceil(BLOCK);
        self.file(punch.ino)?
            .retain(|block, _| !hole.contains(block));
        self.take_privileges(punch.ino, true, punch.clear_privileges);
        if punch.extend {
            self.node(punch.ino)?.size = size.max(end);
        }
        self.touch(punch.ino.0, at, true);
        let attributes = self.attributes(punch.ino.0);
        Ok(Outcome::Changed {
            attributes,
            done: true,
        })
    }

    pub(super) fn copy(&mut self, range: &CopyRange, at: Time) -> Answer {
        self.node(range.from)?;
        self.node(range.to)?;
        let source = self.file(range.from)?.clone();
        self.file(range.to)?;
        let (from_size, to_size) = (self.nodes[&range.from.0].size, self.nodes[&range.to.0].size);
        let left = from_size.saturating_sub(range.from_offset);
        let length = range.length.min(left);
        if length > 0 {
            let ends =
                range.from_offset + length == from_size && range.to_offset + length >= to_size;
            let count = length.div_ceil(BLOCK);
            let (from, to) = (range.from_offset / BLOCK, range.to_offset / BLOCK);
            let is_same = range.from == range.to && from.abs_diff(to) < count;
            let cuts = length % BLOCK != 0 && !ends;
            if cuts || is_same || (range.from_offset | range.to_offset) % BLOCK != 0 {
                return Err(Error::Invalid);
            }
            let blocks = self.file(range.to)?;
            for at in 0..count {
                match source.get(&(from + at)) {
                    Some(place) => blocks.insert(to + at, *place),
                    None => blocks.remove(&(to + at)),
                };
            }
            self.take_privileges(range.to, true, range.clear_privileges);
            self.node(range.to)?.size = to_size.max(range.to_offset + length);
            self.touch(range.to.0, at, true);
        }
        let attributes = self.attributes(range.to.0);
        Ok(Outcome::Copied { length, attributes })
    }
}
