//! What a change of this host touches.

use namespace::{Ino, Operation, Rename};

use super::State;
use super::changes::Part;
use super::store::Named;

/// What a name leads to that is about to change.
enum Target {
    Known(Option<Ino>),
    /// It is not cached, or another change of the name is under way.
    Unknown,
}

#[derive(Default)]
struct Touches {
    parts: Vec<Part>,
    covers: Vec<Ino>,
}

impl State {
    /// The parts that a change touches, and the inodes whose capability covers these. None if it changes
    /// nothing that is cached.
    pub(super) fn touches(&mut self, operation: &Operation) -> Option<(Vec<Part>, Vec<Ino>)> {
        let mut touches = Touches::default();
        match operation {
            Operation::Make(make) => self.name(&mut touches, make.parent, &make.name),
            Operation::Symlink { parent, name, .. } => self.name(&mut touches, *parent, name),
            Operation::Link { ino, parent, name } => {
                self.name(&mut touches, *parent, name);
                self.inode(&mut touches, *ino);
            }
            Operation::Unlink { parent, name, .. } | Operation::Rmdir { parent, name, .. } => {
                self.moved_name(&mut touches, *parent, name);
            }
            Operation::Rename(Rename {
                parent,
                name,
                new_parent,
                new_name,
                ..
            }) => {
                // Both are found before either is touched.
                self.moved_name(&mut touches, *parent, name);
                self.moved_name(&mut touches, *new_parent, new_name);
            }
            Operation::SetAttributes(set) => self.inode(&mut touches, set.ino),
            Operation::SetXattr { ino, .. } | Operation::RemoveXattr { ino, .. } => {
                self.inode(&mut touches, *ino);
            }
            Operation::Commit(commit) => self.inode(&mut touches, commit.ino),
            Operation::Punch(punch) => self.inode(&mut touches, punch.ino),
            Operation::CopyRange(copy) => self.inode(&mut touches, copy.to),
            // An access time is no change. The others are about sessions and segments, and about what has no
            // name, which is not cached.
            Operation::SetAccessTime { .. }
            | Operation::CreateFilesystem { .. }
            | Operation::DropFilesystem { .. }
            | Operation::OpenSession { .. }
            | Operation::EndSession { .. }
            | Operation::ReleaseOrphan { .. }
            | Operation::Reap { .. }
            | Operation::NewSegment
            | Operation::SealSegment { .. }
            | Operation::Reclaimed { .. }
            | Operation::DropSegment { .. }
            | Operation::RaiseNumbers => return None,
        }
        let Touches {
            mut parts,
            mut covers,
        } = touches;
        covers.sort_unstable();
        covers.dedup();
        parts.sort_unstable();
        parts.dedup();
        Some((parts, covers))
    }

    /// A name, and the record of its directory.
    fn name(&self, touches: &mut Touches, dir: Ino, name: &[u8]) {
        let parts = [
            Part::Name(dir, name.to_vec()),
            Part::Names(dir),
            Part::Inode(dir),
        ];
        touches.parts.extend(parts);
        touches.covers.push(dir);
    }

    /// An inode's record, and a file's extents.
    fn inode(&self, touches: &mut Touches, ino: Ino) {
        touches.parts.push(Part::Inode(ino));
        touches.covers.push(ino);
        touches.covers.extend(self.store.cover_of(ino));
        touches.covers.extend(self.promised.cover_of(ino));
    }

    /// A name that leads to another inode afterwards, with that inode.
    fn moved_name(&mut self, touches: &mut Touches, dir: Ino, name: &[u8]) {
        let target = match self.named(self.now, dir, name) {
            Some(Named::Present(ino, _)) => Target::Known(Some(ino)),
            Some(Named::Absent) => Target::Known(None),
            None => Target::Unknown,
        };
        self.name(touches, dir, name);
        #[cfg(feature = "testing")]
        if self.is_mistaken(super::Mistake::KeepTarget) {
            return;
        }
        match target {
            Target::Known(Some(ino)) => self.inode(touches, ino),
            Target::Known(None) => {}
            Target::Unknown => {
                touches.parts.extend([Part::ChildOf(dir), Part::Linked]);
                touches.covers.extend(self.promised.covers_in(dir));
            }
        }
    }
}
