//! What an operation of the namespace touches, by the records of the moment.

use std::collections::BTreeSet;

use namespace::{
    Answer, Error, Failure, Ino, Inode, Kind, Namespace, Operation, Query, Rename, RenameMode,
};
use records::ReadError;

use crate::kind::{Access, Touch};

/// What decides about the footprints of other operations: while an operation that changes it is under way,
/// nobody else's footprint may depend on it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Part {
    /// A name of a directory: which inode it leads to.
    Name(Ino, Vec<u8>),
    /// The directory that has a file's only name.
    Place(Ino),
}

/// What an operation touches.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Footprint {
    /// Inodes, and how they are touched. Empty if the operation changes nothing that is cached, or will be
    /// refused.
    pub touches: BTreeSet<Touch>,
    /// Parts that the operation changes.
    pub changes: BTreeSet<Part>,
    /// Parts that `touches` were found by.
    pub depends: BTreeSet<Part>,
}

/// The footprint of an operation by what the records say now. It is right for as long as no other operation
/// is applied that changes a part of it: compute it once more after [`Event::Proceed`], and begin anew if it
/// is another one.
///
/// # Errors
/// The records cannot be read.
///
/// [`Event::Proceed`]: crate::Event::Proceed
pub fn footprint(namespace: &Namespace<'_>, operation: &Operation) -> Result<Footprint, ReadError> {
    let mut finder = Finder {
        namespace,
        found: Footprint::default(),
    };
    match finder.find(operation) {
        // It will be refused, and changes nothing.
        Ok(()) | Err(Failure::Refused(_)) => Ok(finder.found),
        Err(Failure::Records(error)) => Err(error),
    }
}

/// The files whose attributes or extents are in an answer.
pub fn files_told(query: &Query, answer: &Result<Answer, Error>) -> BTreeSet<Ino> {
    let is_file = |inode: &Inode| inode.body.kind() != Kind::Directory;
    match (query, answer) {
        (_, Ok(Answer::Inode(ino, inode))) if is_file(inode) => [*ino].into(),
        (Query::Content { ino, .. }, Ok(Answer::Content(inode, _))) if is_file(inode) => {
            [*ino].into()
        }
        (Query::Extents { ino, .. }, Ok(Answer::Extents(_))) => [*ino].into(),
        (_, Ok(Answer::Names(names))) => {
            let files = names.iter().filter(|(_, inode)| is_file(inode));
            files.map(|(entry, _)| entry.ino).collect()
        }
        _ => BTreeSet::new(),
    }
}

struct Finder<'a> {
    namespace: &'a Namespace<'a>,
    found: Footprint,
}

impl Finder<'_> {
    fn find(&mut self, operation: &Operation) -> Result<(), Failure> {
        match operation {
            Operation::Make(make) => self.add_name(make.parent, &make.name)?,
            Operation::Symlink { parent, name, .. } => self.add_name(*parent, name)?,
            Operation::Link { ino, parent, name } => {
                self.add_name(*parent, name)?;
                if !self.found.touches.is_empty() {
                    self.moves(*ino)?;
                }
            }
            Operation::Unlink { parent, name, .. } | Operation::Rmdir { parent, name, .. } => {
                if let Some(ino) = self.name(*parent, name)? {
                    self.touch(*parent, Access::ChangeDirectory);
                    self.moves(ino)?;
                }
            }
            Operation::Rename(rename) => self.rename(rename)?,
            Operation::SetAttributes(set) => self.changes(set.ino)?,
            Operation::SetXattr { ino, .. } | Operation::RemoveXattr { ino, .. } => {
                self.changes(*ino)?;
            }
            Operation::Commit(commit) => self.changes(commit.ino)?,
            Operation::Punch(punch) => self.changes(punch.ino)?,
            Operation::CopyRange(copy) => {
                self.touch(copy.from, Access::ReadFile);
                self.changes(copy.to)?;
            }
            // Nobody knows a new inode without a name, and its directory stays as it is. Of an orphan that
            // goes, nobody has anything cached but by its number: it got its last change when its name was
            // removed.
            Operation::MakeTemporary(_)
            | Operation::ReleaseOrphan { .. }
            | Operation::Reap { .. }
            | Operation::CreateFilesystem { .. }
            | Operation::OpenSession { .. }
            | Operation::DropFilesystem { .. }
            | Operation::EndSession { .. }
            | Operation::NewSegment
            | Operation::SealSegment { .. }
            | Operation::Reclaimed { .. }
            | Operation::DropSegment { .. }
            | Operation::RaiseNumbers
            | Operation::SetAccessTime { .. } => {}
        }
        Ok(())
    }

    fn touch(&mut self, ino: Ino, access: Access) {
        self.found.touches.insert(Touch { ino, access });
    }

    /// The inode that a name leads to. Nobody else makes, moves or removes the name meanwhile.
    fn name(&mut self, parent: Ino, name: &[u8]) -> Result<Option<Ino>, Failure> {
        self.found.changes.insert(Part::Name(parent, name.to_vec()));
        match self.namespace.lookup(parent, name) {
            Ok((ino, _)) => Ok(Some(ino)),
            Err(Failure::Refused(Error::NotFound)) => Ok(None),
            Err(failure) => Err(failure),
        }
    }

    /// A name is made. If it is there, that is refused.
    fn add_name(&mut self, parent: Ino, name: &[u8]) -> Result<(), Failure> {
        if self.name(parent, name)?.is_none() {
            self.touch(parent, Access::ChangeDirectory);
        }
        Ok(())
    }

    fn inode(&mut self, ino: Ino) -> Result<Inode, Failure> {
        self.namespace.inode(ino)
    }

    /// Attributes or content of an inode change.
    fn changes(&mut self, ino: Ino) -> Result<(), Failure> {
        let inode = self.inode(ino)?;
        if inode.body.kind() == Kind::Directory {
            self.touch(ino, Access::ChangeDirectory);
            return Ok(());
        }
        self.touch(ino, Access::ChangeFile);
        self.found.depends.insert(Part::Place(ino));
        self.changes_child(ino, &inode);
        Ok(())
    }

    /// An inode gets, moves or loses a name.
    fn moves(&mut self, ino: Ino) -> Result<(), Failure> {
        let inode = self.inode(ino)?;
        if inode.body.kind() == Kind::Directory {
            self.touch(ino, Access::ChangeDirectory);
            return Ok(());
        }
        self.touch(ino, Access::MoveFile);
        self.found.changes.insert(Part::Place(ino));
        self.changes_child(ino, &inode);
        Ok(())
    }

    fn changes_child(&mut self, ino: Ino, inode: &Inode) {
        if let Some(parent) = inode.parent {
            self.touch(parent, Access::ChangeChild(ino));
        }
    }

    fn rename(&mut self, rename: &Rename) -> Result<(), Failure> {
        let source = self.name(rename.parent, &rename.name)?;
        let target = self.name(rename.new_parent, &rename.new_name)?;
        let is_possible = match rename.mode {
            RenameMode::NoReplace => target.is_none(),
            RenameMode::Exchange => target.is_some(),
            RenameMode::Whiteout(whiteout) => !whiteout.no_replace || target.is_none(),
            RenameMode::Replace => true,
        };
        let Some(source) = source.filter(|source| is_possible && target != Some(*source)) else {
            return Ok(());
        };
        self.touch(rename.parent, Access::ChangeDirectory);
        self.touch(rename.new_parent, Access::ChangeDirectory);
        self.moves(source)?;
        match target {
            Some(target) => self.moves(target),
            None => Ok(()),
        }
    }
}
