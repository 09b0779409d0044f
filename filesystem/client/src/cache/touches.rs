//! What a change of this host touches.

use fs_capabilities::Scope;
use namespace::{Ino, Operation, Rename, RenameMode};

use super::State;
use super::changes::Part;
use super::store::Named;

/// What a name leads to that is about to change.
enum Target {
    Known(Option<Ino>),
    /// It is not cached, or another change of the name is under way.
    Unknown,
}

/// An inode whose capability covers something, and what of it that is.
pub(super) type Cover = (Ino, Scope);

/// What a rename takes elsewhere: what was told there counts as told here afterwards.
pub(super) type Moved = (Cover, Cover);

#[derive(Default)]
struct Touches {
    parts: Vec<Part>,
    covers: Vec<Cover>,
}

/// What an inode's record is of what a capability covers.
pub(super) fn scope_of(cover: Ino, ino: Ino) -> Scope {
    match cover == ino {
        true => Scope::Itself,
        false => Scope::Child(ino),
    }
}

impl State {
    /// The parts that a change touches, and the inodes whose capability covers these, each with what of it
    /// that is. None if it changes nothing that is cached.
    pub(super) fn touches(&mut self, operation: &Operation) -> Option<(Vec<Part>, Vec<Cover>)> {
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
            Operation::MakeTemporary(_)
            | Operation::SetAccessTime { .. }
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

    /// What a change takes elsewhere. Kernels go on using what they were told of it.
    pub(super) fn moves(&mut self, operation: &Operation) -> Vec<Moved> {
        let Operation::Rename(rename) = operation else {
            return Vec::new();
        };
        let from = (rename.parent, rename.name.as_slice());
        let to = (rename.new_parent, rename.new_name.as_slice());
        let mut moves = Vec::new();
        self.move_name(&mut moves, from, to);
        if rename.mode == RenameMode::Exchange {
            self.move_name(&mut moves, to, from);
        }
        moves
    }

    fn move_name(&mut self, moves: &mut Vec<Moved>, from: (Ino, &[u8]), to: (Ino, &[u8])) {
        let name = |(dir, name): (Ino, &[u8])| (dir, Scope::name(name));
        moves.push((name(from), name(to)));
        if from.0 == to.0 {
            return;
        }
        let child = match self.named(self.now, from.0, from.1) {
            Some(Named::Present(ino, _)) => Scope::Child(ino),
            Some(Named::Absent) => return,
            None => Scope::All,
        };
        moves.push(((from.0, child), (to.0, child)));
    }

    /// A name, and the record of its directory.
    fn name(&self, touches: &mut Touches, dir: Ino, name: &[u8]) {
        let parts = [
            Part::Name(dir, name.to_vec()),
            Part::Names(dir),
            Part::Inode(dir),
        ];
        touches.parts.extend(parts);
        touches.covers.push((dir, Scope::name(name)));
        touches.covers.push((dir, Scope::Itself));
    }

    /// An inode's record, and a file's extents.
    fn inode(&self, touches: &mut Touches, ino: Ino) {
        touches.parts.push(Part::Inode(ino));
        touches.covers.extend(self.covers_of(ino));
    }

    /// The inodes whose capability covers a record, or covered it when guests were told.
    pub(super) fn covers_of(&self, ino: Ino) -> Vec<Cover> {
        let others = [self.store.cover_of(ino), self.promised.cover_of(ino)];
        let others = others.into_iter().flatten();
        let others = others.map(|cover| (cover, scope_of(cover, ino)));
        #[cfg(feature = "testing")]
        if self.is_mistaken(super::Mistake::ChangeOfDirectory) {
            let others = others.map(|(cover, _)| (cover, Scope::Itself));
            return std::iter::once((ino, Scope::Itself))
                .chain(others)
                .collect();
        }
        let covers = std::iter::once((ino, Scope::Itself)).chain(others);
        let mut covers: Vec<Cover> = covers.collect();
        covers.sort_unstable();
        covers.dedup();
        covers
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
                touches.covers.push((dir, Scope::All));
                let covers = self.promised.covers_in(dir);
                touches
                    .covers
                    .extend(covers.map(|cover| (cover, Scope::All)));
            }
        }
    }
}
