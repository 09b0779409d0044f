//! Operations that overlay filesystems need: whiteouts, and files without a name.

use std::collections::{BTreeMap, BTreeSet};

use super::{Answer, Model, Node, What};
use crate::*;

impl Model {
    /// A new inode, with what it inherits from its directory.
    pub(super) fn insert(&mut self, parent: Ino, mut node: Node) -> Result<u64, Error> {
        let directory = self.node(parent)?;
        if directory.mode & 0o2000 != 0 {
            node.owner.1 = directory.owner.1;
            if let What::Directory(_) = node.what {
                node.mode |= 0o2000;
            }
        }
        let ino = self.next;
        self.next += 1;
        self.nodes.insert(ino, node);
        Ok(ino)
    }

    pub(super) fn make_temporary(
        &mut self,
        make: &MakeTemporary,
        session: u64,
        at: Time,
    ) -> Answer {
        self.children(make.parent)?;
        let file = What::File(BTreeMap::new());
        let node = Node {
            openers: BTreeSet::from([session]),
            is_temporary: true,
            ..Node::new(file, make.mode, (make.uid, make.gid), at)
        };
        let ino = self.insert(make.parent, node)?;
        Ok(Outcome::Inode(self.attributes(ino)))
    }

    /// A file without a name is about to get one, by this session.
    pub(super) fn first_name(&mut self, ino: Ino, session: u64) -> Result<(), Error> {
        let node = self.node(ino)?;
        if !node.is_temporary || !node.openers.contains(&session) {
            return Err(Error::NotFound);
        }
        node.is_temporary = false;
        node.openers.clear();
        Ok(())
    }

    /// A name that was just moved away leads to a whiteout.
    pub(super) fn leave_whiteout(
        &mut self,
        (parent, name): (Ino, &[u8]),
        whiteout: Whiteout,
        at: Time,
    ) -> Result<(), Error> {
        let owner = (whiteout.uid, whiteout.gid);
        let device = What::Other(Kind::CharacterDevice, 0);
        let ino = self.insert(parent, Node::new(device, 0, owner, at))?;
        self.children(parent)?.insert(name.to_vec(), ino);
        Ok(())
    }
}
