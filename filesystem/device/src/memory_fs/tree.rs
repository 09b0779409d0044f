//! The tree: inodes by number, names, and what the kernel holds of them.

use std::collections::HashMap;

use fuse_codec::{AccessMode, DeviceNumber, Errno, Handle, Kind, NodeId, RenameFlags};

use super::content::Content;
use super::directory::Directory;
use super::inode::{Body, Inode, Ownership, SET_GROUP_ID};

/// Most names of an inode, as ext4 has it.
const LINKS_MAX: u32 = 65_000;

/// An open file or directory.
#[derive(Debug, Clone, Copy)]
pub struct Open {
    pub node: NodeId,
    pub access: AccessMode,
}

/// All inodes and handles.
#[derive(Debug)]
pub struct Tree {
    inodes: HashMap<NodeId, Inode>,
    last_node: u64,
    handles: HashMap<Handle, Open>,
    last_handle: u64,
}

impl Default for Tree {
    fn default() -> Self {
        let owner = Ownership {
            permissions: 0o755,
            uid: 0,
            gid: 0,
        };
        let root = Inode::new(Body::Directory(Directory::new(NodeId::ROOT)), owner);
        Self {
            inodes: HashMap::from([(NodeId::ROOT, root)]),
            last_node: NodeId::ROOT.0,
            handles: HashMap::new(),
            last_handle: 0,
        }
    }
}

impl Tree {
    pub fn inode_count(&self) -> usize {
        self.inodes.len()
    }

    pub fn handle_count(&self) -> usize {
        self.handles.len()
    }

    pub fn inode(&self, node: NodeId) -> Result<&Inode, Errno> {
        self.inodes.get(&node).ok_or(Errno::ESTALE)
    }

    pub fn inode_mut(&mut self, node: NodeId) -> Result<&mut Inode, Errno> {
        self.inodes.get_mut(&node).ok_or(Errno::ESTALE)
    }

    pub fn directory(&self, node: NodeId) -> Result<&Directory, Errno> {
        match &self.inode(node)?.body {
            Body::Directory(directory) => Ok(directory),
            _ => Err(Errno::ENOTDIR),
        }
    }

    fn directory_mut(&mut self, node: NodeId) -> Result<&mut Directory, Errno> {
        match &mut self.inode_mut(node)?.body {
            Body::Directory(directory) => Ok(directory),
            _ => Err(Errno::ENOTDIR),
        }
    }

    /// The inode that a name leads to.
    pub fn find(&self, parent: NodeId, name: &[u8]) -> Result<NodeId, Errno> {
        self.directory(parent)?.get(name).ok_or(Errno::ENOENT)
    }

    /// A directory that takes new names: one that still has a name itself.
    fn check_new_name(&self, parent: NodeId, name: &[u8]) -> Result<(), Errno> {
        match self.directory(parent)?.get(name) {
            Some(_) => Err(Errno::EEXIST),
            None if self.inode(parent)?.nlink == 0 => Err(Errno::ENOENT),
            None => Ok(()),
        }
    }

    /// Makes an inode with a name.
    pub fn make(
        &mut self,
        parent: NodeId,
        name: &[u8],
        body: Body,
        owner: Ownership,
    ) -> Result<NodeId, Errno> {
        self.check_new_name(parent, name)?;
        if matches!(body, Body::Directory(_)) {
            self.count_subdirectory(parent, true)?;
        }
        let node = self.insert(parent, body, owner)?;
        self.set_name(parent, name, node)?;
        Ok(node)
    }

    /// Makes a regular file without a name.
    pub fn make_temporary(&mut self, parent: NodeId, owner: Ownership) -> Result<NodeId, Errno> {
        self.directory(parent)?;
        if self.inode(parent)?.nlink == 0 {
            return Err(Errno::ENOENT);
        }
        let node = self.insert(parent, Body::File(Content::default()), owner)?;
        let inode = self.inode_mut(node)?;
        (inode.nlink, inode.is_temporary) = (0, true);
        Ok(node)
    }

    /// Makes an inode that inherits from a directory.
    fn insert(
        &mut self,
        parent: NodeId,
        body: Body,
        mut owner: Ownership,
    ) -> Result<NodeId, Errno> {
        let inherits = self.inode(parent)?.owner;
        let is_directory = matches!(body, Body::Directory(_));
        if inherits.permissions & SET_GROUP_ID != 0 {
            owner.gid = inherits.gid;
            owner.permissions |= if is_directory { SET_GROUP_ID } else { 0 };
        }
        self.last_node += 1;
        let node = NodeId(self.last_node);
        self.inodes.insert(node, Inode::new(body, owner));
        Ok(node)
    }

    fn set_name(&mut self, parent: NodeId, name: &[u8], node: NodeId) -> Result<(), Errno> {
        self.directory_mut(parent)?.set(name, node);
        self.inode_mut(parent)?.modified();
        Ok(())
    }

    fn remove_name(&mut self, parent: NodeId, name: &[u8]) -> Result<(), Errno> {
        self.directory_mut(parent)?.remove(name);
        self.inode_mut(parent)?.modified();
        Ok(())
    }

    /// A subdirectory's `..` is a name of its parent.
    fn count_subdirectory(&mut self, parent: NodeId, is_new: bool) -> Result<(), Errno> {
        let inode = self.inode_mut(parent)?;
        if is_new && inode.nlink >= LINKS_MAX {
            return Err(Errno::EMLINK);
        }
        inode.nlink = if is_new {
            inode.nlink + 1
        } else {
            inode.nlink - 1
        };
        Ok(())
    }

    /// Gives an inode one more name.
    pub fn link(&mut self, node: NodeId, parent: NodeId, name: &[u8]) -> Result<(), Errno> {
        self.check_new_name(parent, name)?;
        let inode = self.inode_mut(node)?;
        if inode.is_directory() {
            return Err(Errno::EPERM);
        }
        if inode.nlink == 0 && !inode.is_temporary {
            return Err(Errno::ENOENT);
        }
        if inode.nlink >= LINKS_MAX {
            return Err(Errno::EMLINK);
        }
        inode.nlink += 1;
        inode.is_temporary = false;
        inode.changed();
        self.set_name(parent, name, node)
    }

    /// Removes a name that is not a directory's.
    pub fn unlink(&mut self, parent: NodeId, name: &[u8]) -> Result<(), Errno> {
        let node = self.find(parent, name)?;
        if self.inode(node)?.is_directory() {
            return Err(Errno::EISDIR);
        }
        self.remove_name(parent, name)?;
        self.drop_name(parent, node)
    }

    /// Removes an empty directory.
    pub fn rmdir(&mut self, parent: NodeId, name: &[u8]) -> Result<(), Errno> {
        let node = self.find(parent, name)?;
        if !self.directory(node)?.is_empty() {
            return Err(Errno::ENOTEMPTY);
        }
        self.remove_name(parent, name)?;
        self.drop_name(parent, node)
    }

    /// An inode has lost its name in `parent`; it goes once nobody holds it.
    fn drop_name(&mut self, parent: NodeId, node: NodeId) -> Result<(), Errno> {
        if self.inode(node)?.is_directory() {
            self.count_subdirectory(parent, false)?;
            self.inode_mut(node)?.nlink = 0;
        } else {
            self.inode_mut(node)?.nlink -= 1;
        }
        self.inode_mut(node)?.changed();
        self.reap(node);
        Ok(())
    }

    /// Moves a name. A whiteout that takes its place belongs to `owner`.
    pub fn rename(
        &mut self,
        (parent, name): (NodeId, &[u8]),
        (new_parent, new_name): (NodeId, &[u8]),
        flags: RenameFlags,
        owner: Ownership,
    ) -> Result<(), Errno> {
        use RenameFlags::{Exchange, NoReplace, Replace, Whiteout};
        let node = self.find(parent, name)?;
        let there = self.directory(new_parent)?.get(new_name);
        if self.inode(new_parent)?.nlink == 0 {
            return Err(Errno::ENOENT);
        }
        self.check_not_below(node, new_parent)?;
        match (there, flags) {
            (Some(_), NoReplace | Whiteout { no_replace: true }) => return Err(Errno::EEXIST),
            (None, Exchange) => return Err(Errno::ENOENT),
            // Two names of one inode: nothing is done.
            (Some(there), _) if there == node => return Ok(()),
            (Some(there), Exchange) => {
                self.check_not_below(there, parent)?;
                self.set_name(parent, name, there)?;
                self.move_parent(there, new_parent, parent)?;
            }
            (Some(there), Replace | Whiteout { no_replace: false }) => {
                self.check_replaceable(node, there)?;
                self.remove_name(parent, name)?;
                self.remove_name(new_parent, new_name)?;
                self.drop_name(new_parent, there)?;
            }
            (None, _) => self.remove_name(parent, name)?,
        }
        self.set_name(new_parent, new_name, node)?;
        self.move_parent(node, parent, new_parent)?;
        if matches!(flags, Whiteout { .. }) {
            let whiteout = Body::Special(Kind::CharDevice, DeviceNumber::default());
            self.make(parent, name, whiteout, owner)?;
        }
        Ok(())
    }

    /// A directory cannot move into itself or what is below it.
    fn check_not_below(&self, node: NodeId, parent: NodeId) -> Result<(), Errno> {
        if !self.inode(node)?.is_directory() {
            return Ok(());
        }
        let mut at = parent;
        while at != NodeId::ROOT {
            if at == node {
                return Err(Errno::EINVAL);
            }
            at = self.directory(at)?.parent;
        }
        Ok(())
    }

    fn check_replaceable(&self, node: NodeId, there: NodeId) -> Result<(), Errno> {
        match (
            self.inode(node)?.is_directory(),
            self.inode(there)?.is_directory(),
        ) {
            (true, false) => Err(Errno::ENOTDIR),
            (false, true) => Err(Errno::EISDIR),
            (true, true) if !self.directory(there)?.is_empty() => Err(Errno::ENOTEMPTY),
            _ => Ok(()),
        }
    }

    /// A directory has another parent.
    fn move_parent(&mut self, node: NodeId, from: NodeId, to: NodeId) -> Result<(), Errno> {
        self.inode_mut(node)?.changed();
        if from != to && self.inode(node)?.is_directory() {
            self.directory_mut(node)?.parent = to;
            self.count_subdirectory(from, false)?;
            self.inode_mut(to)?.nlink += 1;
        }
        Ok(())
    }

    /// Opens an inode.
    pub fn open(&mut self, node: NodeId, access: AccessMode) -> Result<Handle, Errno> {
        self.inode_mut(node)?.handles += 1;
        self.last_handle += 1;
        let handle = Handle(self.last_handle);
        self.handles.insert(handle, Open { node, access });
        Ok(handle)
    }

    /// Closes a handle of an inode.
    pub fn close(&mut self, node: NodeId, handle: Handle) -> Result<(), Errno> {
        self.check_handle(node, handle)?;
        self.handles.remove(&handle);
        self.inode_mut(node)?.handles -= 1;
        self.reap(node);
        Ok(())
    }

    /// The handle, if it is one of the inode's. What the kernel opened without asking has 0, and can be read.
    pub fn check_handle(&self, node: NodeId, handle: Handle) -> Result<Open, Errno> {
        match self.handles.get(&handle) {
            Some(open) if open.node == node => Ok(*open),
            _ => Err(Errno::EBADF),
        }
    }

    /// Counts a lookup of an inode, as each reply with an entry is one.
    pub fn count_lookup(&mut self, node: NodeId) -> Result<(), Errno> {
        self.inode_mut(node)?.lookups += 1;
        Ok(())
    }

    /// Takes lookups back. A guest may say anything here.
    pub fn forget(&mut self, node: NodeId, lookups: u64) {
        if let Ok(inode) = self.inode_mut(node) {
            inode.lookups = inode.lookups.saturating_sub(lookups);
            self.reap(node);
        }
    }

    /// No guest holds anything any more.
    pub fn end_session(&mut self) {
        self.handles.clear();
        self.inodes.retain(|_, inode| {
            inode.lookups = 0;
            inode.handles = 0;
            inode.nlink > 0
        });
    }

    /// Removes an inode that has no name and that nobody holds.
    fn reap(&mut self, node: NodeId) {
        let is_held = self
            .inode(node)
            .is_ok_and(|inode| inode.nlink > 0 || inode.lookups > 0 || inode.handles > 0);
        if !is_held {
            self.inodes.remove(&node);
        }
    }
}
