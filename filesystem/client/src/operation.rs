//! Operations that own their names, as the guest's buffer is gone by the time they are served.

use fuse_codec::{
    Cookie, CopyFileRange, DeviceNumber, DirLayout, Fallocate, Handle, Kind, LookupName, NodeId,
    OpenFlags, Operation, Read, RenameFlags, SetAttr, Whence, Write, XattrMode,
};

/// [`Operation`], owned, with what serving it needs. Names may be any bytes here; the namespace refuses what
/// cannot be one.
#[derive(Debug, Clone, PartialEq, Eq)]
#[allow(missing_docs, reason = "the fields are those of `Operation`")]
pub enum OwnedOperation {
    Lookup {
        name: LookupTarget,
    },
    /// FORGET, BATCH_FORGET, INTERRUPT: no work to wait for, and no reply.
    /// [`Mount::forget`](crate::Mount::forget) subtracts lookups.
    Unanswered,
    Getattr {
        handle: Option<Handle>,
    },
    Setattr(SetAttr),
    Statx {
        handle: Option<Handle>,
    },
    Readlink,
    Symlink {
        name: Vec<u8>,
        target: Vec<u8>,
    },
    Mknod {
        name: Vec<u8>,
        kind: Kind,
        permissions: u32,
        device: DeviceNumber,
    },
    Mkdir {
        name: Vec<u8>,
        permissions: u32,
    },
    Unlink {
        name: Vec<u8>,
    },
    Rmdir {
        name: Vec<u8>,
    },
    Rename {
        name: Vec<u8>,
        new_parent: NodeId,
        new_name: Vec<u8>,
        flags: RenameFlags,
    },
    Link {
        inode: NodeId,
        name: Vec<u8>,
    },
    Open {
        flags: OpenFlags,
        kill_suidgid: bool,
    },
    Create(OwnedCreate),
    Tmpfile {
        flags: OpenFlags,
        permissions: u32,
    },
    Read(Read),
    Write(Write),
    Flush {
        handle: Handle,
    },
    Release {
        handle: Handle,
    },
    Fsync {
        handle: Handle,
    },
    Opendir,
    Readdir {
        layout: DirLayout,
        handle: Handle,
        cookie: Cookie,
        size: u32,
    },
    Releasedir {
        handle: Handle,
    },
    Fsyncdir {
        handle: Handle,
    },
    Setxattr {
        name: Vec<u8>,
        value: Vec<u8>,
        mode: XattrMode,
    },
    Getxattr {
        name: Vec<u8>,
        size: u32,
    },
    Listxattr {
        size: u32,
    },
    Removexattr {
        name: Vec<u8>,
    },
    Statfs,
    Fallocate(Fallocate),
    Lseek {
        handle: Handle,
        offset: u64,
        whence: Whence,
    },
    CopyFileRange(CopyFileRange),
    Syncfs,
    /// Everything else: ENOSYS. ACCESS is such, as guests check permissions themselves.
    Unsupported,
}

/// What LOOKUP looks for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LookupTarget {
    /// An entry of the directory.
    Name(Vec<u8>),
    /// `.`: the inode itself.
    Itself,
    /// `..`: the directory's parent.
    Parent,
}

/// Arguments of CREATE.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OwnedCreate {
    /// Name of the file.
    pub name: Vec<u8>,
    /// How it is opened.
    pub flags: OpenFlags,
    /// Its permission bits, if it is new.
    pub permissions: u32,
    /// Truncation takes set-user-id and set-group-id away.
    pub kill_suidgid: bool,
}

impl From<Operation<'_>> for OwnedOperation {
    fn from(operation: Operation<'_>) -> Self {
        let kinds = [of_names, of_attributes, of_files];
        let mut owned = kinds.iter().map(|of_kind| of_kind(operation));
        let served = owned.find(|owned| *owned != Self::Unsupported);
        served.unwrap_or(Self::Unsupported)
    }
}

/// Operations on names; all others as if not served.
fn of_names(operation: Operation<'_>) -> OwnedOperation {
    use OwnedOperation as Owned;
    match operation {
        Operation::Lookup { name } => Owned::Lookup {
            name: match name {
                LookupName::Name(name) => LookupTarget::Name(name.as_bytes().to_vec()),
                LookupName::Itself => LookupTarget::Itself,
                LookupName::Parent => LookupTarget::Parent,
            },
        },
        Operation::Forget { .. } | Operation::BatchForget(_) | Operation::Interrupt { .. } => {
            Owned::Unanswered
        }
        Operation::Symlink { name, target } => Owned::Symlink {
            name: name.as_bytes().to_vec(),
            target: target.as_bytes().to_vec(),
        },
        Operation::Mknod {
            name,
            kind,
            permissions,
            device,
            ..
        } => Owned::Mknod {
            name: name.as_bytes().to_vec(),
            kind,
            permissions,
            device,
        },
        Operation::Mkdir {
            name, permissions, ..
        } => Owned::Mkdir {
            name: name.as_bytes().to_vec(),
            permissions,
        },
        Operation::Unlink { name } => Owned::Unlink {
            name: name.as_bytes().to_vec(),
        },
        Operation::Rmdir { name } => Owned::Rmdir {
            name: name.as_bytes().to_vec(),
        },
        Operation::Rename {
            name,
            new_parent,
            new_name,
            flags,
        } => Owned::Rename {
            name: name.as_bytes().to_vec(),
            new_parent,
            new_name: new_name.as_bytes().to_vec(),
            flags,
        },
        Operation::Link { inode, name } => Owned::Link {
            inode,
            name: name.as_bytes().to_vec(),
        },
        _ => Owned::Unsupported,
    }
}

/// Operations on attributes; all others as if not served.
fn of_attributes(operation: Operation<'_>) -> OwnedOperation {
    use OwnedOperation as Owned;
    match operation {
        Operation::Getattr { handle } => Owned::Getattr { handle },
        Operation::Setattr(set) => Owned::Setattr(set),
        Operation::Statx { handle, .. } => Owned::Statx { handle },
        Operation::Readlink => Owned::Readlink,
        Operation::Setxattr(set) => Owned::Setxattr {
            name: set.name.as_bytes().to_vec(),
            value: set.value.to_vec(),
            mode: set.mode,
        },
        Operation::Getxattr { name, size } => Owned::Getxattr {
            name: name.as_bytes().to_vec(),
            size,
        },
        Operation::Listxattr { size } => Owned::Listxattr { size },
        Operation::Removexattr { name } => Owned::Removexattr {
            name: name.as_bytes().to_vec(),
        },
        Operation::Statfs => Owned::Statfs,
        _ => Owned::Unsupported,
    }
}

/// Operations on open files and directories; all others as if not served.
fn of_files(operation: Operation<'_>) -> OwnedOperation {
    use OwnedOperation as Owned;
    match operation {
        Operation::Open {
            flags,
            kill_suidgid,
        } => Owned::Open {
            flags,
            kill_suidgid,
        },
        Operation::Create(create) => Owned::Create(OwnedCreate {
            name: create.name.as_bytes().to_vec(),
            flags: create.flags,
            permissions: create.permissions,
            kill_suidgid: create.kill_suidgid,
        }),
        Operation::Tmpfile(tmpfile) => Owned::Tmpfile {
            flags: tmpfile.flags,
            permissions: tmpfile.permissions,
        },
        Operation::Read(read) => Owned::Read(read),
        Operation::Write(write) => Owned::Write(write),
        Operation::Flush { handle, .. } => Owned::Flush { handle },
        Operation::Release(release) => Owned::Release {
            handle: release.handle,
        },
        Operation::Fsync { handle, .. } => Owned::Fsync { handle },
        Operation::Opendir { .. } => Owned::Opendir,
        Operation::Readdir {
            layout,
            handle,
            cookie,
            size,
        } => Owned::Readdir {
            layout,
            handle,
            cookie,
            size,
        },
        Operation::Releasedir { handle } => Owned::Releasedir { handle },
        Operation::Fsyncdir { handle, .. } => Owned::Fsyncdir { handle },
        Operation::Fallocate(fallocate) => Owned::Fallocate(fallocate),
        Operation::Lseek {
            handle,
            offset,
            whence,
        } => Owned::Lseek {
            handle,
            offset,
            whence,
        },
        Operation::CopyFileRange(copy) => Owned::CopyFileRange(copy),
        Operation::Syncfs => Owned::Syncfs,
        _ => Owned::Unsupported,
    }
}

impl OwnedOperation {
    /// Returns whether the reply may contain inodes, each of which counts as a lookup.
    pub(crate) fn tells_of_inodes(&self) -> bool {
        match self {
            Self::Lookup { .. }
            | Self::Symlink { .. }
            | Self::Mknod { .. }
            | Self::Mkdir { .. }
            | Self::Link { .. }
            | Self::Create(_)
            | Self::Tmpfile { .. } => true,
            Self::Readdir { layout, .. } => *layout == DirLayout::Plus,
            _ => false,
        }
    }

    /// Returns whether the operation finds an inode by its number, which may have no name.
    pub(crate) fn looks_up_by_number(&self) -> bool {
        match self {
            Self::Lookup { name } => !matches!(name, LookupTarget::Name(_)),
            _ => false,
        }
    }

    /// Whether it may change the filesystem. A read-only mount answers EROFS.
    pub(crate) fn changes(&self) -> bool {
        match self {
            Self::Open { flags, .. } => {
                flags.access() != fuse_codec::AccessMode::Read || flags.truncate()
            }
            Self::Setattr(_)
            | Self::Symlink { .. }
            | Self::Mknod { .. }
            | Self::Mkdir { .. }
            | Self::Unlink { .. }
            | Self::Rmdir { .. }
            | Self::Rename { .. }
            | Self::Link { .. }
            | Self::Create(_)
            | Self::Tmpfile { .. }
            | Self::Write(_)
            | Self::Setxattr { .. }
            | Self::Removexattr { .. }
            | Self::Fallocate(_)
            | Self::CopyFileRange(_) => true,
            _ => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use fuse_codec::Name;

    use super::*;

    #[test]
    fn operations_own_what_they_are_about() {
        let name = Name::new(b"a").unwrap();
        let lookup = Operation::Lookup {
            name: LookupName::Name(name),
        };
        let owned = OwnedOperation::from(lookup);
        let expected = LookupTarget::Name(b"a".to_vec());
        assert_eq!(owned, OwnedOperation::Lookup { name: expected });
        for (operation, owned) in [
            (Operation::Statfs, OwnedOperation::Statfs),
            (Operation::Readlink, OwnedOperation::Readlink),
            (Operation::Syncfs, OwnedOperation::Syncfs),
            (Operation::Forget { lookups: 1 }, OwnedOperation::Unanswered),
            (Operation::Destroy, OwnedOperation::Unsupported),
        ] {
            assert_eq!(OwnedOperation::from(operation), owned);
        }
        let write = Write {
            handle: Handle(3),
            offset: 1,
            size: 2,
            lock_owner: None,
            flags: OpenFlags::from_wire(0).unwrap(),
            from_page_cache: true,
            kill_suidgid: false,
        };
        let owned = OwnedOperation::from(Operation::Write(write));
        assert_eq!(owned, OwnedOperation::Write(write));
        assert!(owned.changes());
    }
}
