//! The protocol's structures, as `linux/fuse.h` lays them out (7.31 to 7.40).
//!
//! Fields keep the header's names and widths. Every structure is little-endian and has alignment 1, so that
//! it can be read from bytes at any address. Sizes are asserted against those of the kernel's header; offsets
//! are tested against bytes that a C program made with that header (`fixtures/generate.c`).
//!
//! Big-endian guests are not served: the protocol is in the guest's byte order
//! ([`Malformed::ByteOrder`](crate::Malformed::ByteOrder)).

// The kernel's header says what the fields mean; here they only have its names.
#![allow(missing_docs)]

use zerocopy::little_endian::{I32, I64, U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// A mount of the node itself (`/dev/fuse`) speaks the host's byte order, which must be that of guests.
const _: () = assert!(cfg!(target_endian = "little"));

/// Major version of the protocol.
pub const VERSION_MAJOR: u32 = 7;
/// Newest minor version whose structures are here. A newer kernel goes by this one.
pub const VERSION_MINOR: u32 = 40;
/// Oldest minor version that is served: that of Linux 5.4, the first with virtio-fs.
pub const VERSION_MINOR_MIN: u32 = 31;
/// The first minor version with SYNCFS.
pub const VERSION_MINOR_SYNCFS: u32 = 34;

/// The opcode of INIT as a machine of the other byte order sends it.
pub const INIT_SWAPPED: u32 = 26u32.swap_bytes();

/// Bits of [`SetattrIn::valid`].
pub mod fattr {
    pub const MODE: u32 = 1 << 0;
    pub const UID: u32 = 1 << 1;
    pub const GID: u32 = 1 << 2;
    pub const SIZE: u32 = 1 << 3;
    pub const ATIME: u32 = 1 << 4;
    pub const MTIME: u32 = 1 << 5;
    pub const FH: u32 = 1 << 6;
    pub const ATIME_NOW: u32 = 1 << 7;
    pub const MTIME_NOW: u32 = 1 << 8;
    pub const LOCKOWNER: u32 = 1 << 9;
    pub const CTIME: u32 = 1 << 10;
    pub const KILL_SUIDGID: u32 = 1 << 11;
    /// All of them.
    pub const ALL: u32 = (1 << 12) - 1;
}

/// Bit of [`GetattrIn::getattr_flags`] and [`StatxIn::getattr_flags`]: `fh` is valid.
pub const GETATTR_FH: u32 = 1 << 0;
/// Bit of [`OpenIn::open_flags`] and [`CreateIn::open_flags`].
pub const OPEN_KILL_SUIDGID: u32 = 1 << 0;
/// Bits of [`ReleaseIn::release_flags`].
pub const RELEASE_FLUSH: u32 = 1 << 0;
pub const RELEASE_FLOCK_UNLOCK: u32 = 1 << 1;
/// Bit of [`FsyncIn::fsync_flags`].
pub const FSYNC_FDATASYNC: u32 = 1 << 0;
/// Bits of [`WriteIn::write_flags`].
pub const WRITE_CACHE: u32 = 1 << 0;
pub const WRITE_LOCKOWNER: u32 = 1 << 1;
pub const WRITE_KILL_SUIDGID: u32 = 1 << 2;
/// Bit of [`ReadIn::read_flags`].
pub const READ_LOCKOWNER: u32 = 1 << 1;
/// Bit of [`LkIn::lk_flags`].
pub const LK_FLOCK: u32 = 1 << 0;
/// Bit of [`SetxattrIn::setxattr_flags`].
pub const SETXATTR_ACL_KILL_SGID: u32 = 1 << 0;

/// Structures of the header, each with its size in bytes.
macro_rules! structures {
    ($($(#[$doc:meta])* $name:ident, $bytes:literal { $($field:ident: $type:ty,)* })*) => {$(
        $(#[$doc])*
        #[derive(
            Debug, Clone, Copy, Default, PartialEq, Eq,
            FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
        )]
        #[repr(C)]
        pub struct $name { $(pub $field: $type,)* }

        const _: () = assert!(size_of::<$name>() == $bytes);
    )*};
}

structures! {
    /// `fuse_in_header`
    InHeader, 40 {
        len: U32, opcode: U32, unique: U64, nodeid: U64, uid: U32, gid: U32, pid: U32,
        total_extlen: U16, padding: U16,
    }
    /// `fuse_out_header`
    OutHeader, 16 { len: U32, error: I32, unique: U64, }

    /// `fuse_init_in` up to 7.35: the first fields of every version of it
    InitIn, 16 { major: U32, minor: U32, max_readahead: U32, flags: U32, }
    /// What `fuse_init_in` has behind [`InitIn`] from 7.36 on
    InitInExt, 48 { flags2: U32, unused: [U32; 11], }
    /// `fuse_init_out`
    InitOut, 64 {
        major: U32, minor: U32, max_readahead: U32, flags: U32, max_background: U16,
        congestion_threshold: U16, max_write: U32, time_gran: U32, max_pages: U16, map_alignment: U16,
        flags2: U32, unused: [U32; 7],
    }
    /// `fuse_interrupt_in`
    InterruptIn, 8 { unique: U64, }
    /// `fuse_forget_in`
    ForgetIn, 8 { nlookup: U64, }
    /// `fuse_batch_forget_in`
    BatchForgetIn, 8 { count: U32, dummy: U32, }
    /// `fuse_forget_one`
    ForgetOne, 16 { nodeid: U64, nlookup: U64, }

    /// `fuse_attr`
    Attr, 88 {
        ino: U64, size: U64, blocks: U64, atime: U64, mtime: U64, ctime: U64, atimensec: U32,
        mtimensec: U32, ctimensec: U32, mode: U32, nlink: U32, uid: U32, gid: U32, rdev: U32,
        blksize: U32, flags: U32,
    }
    /// `fuse_entry_out`
    EntryOut, 128 {
        nodeid: U64, generation: U64, entry_valid: U64, attr_valid: U64, entry_valid_nsec: U32,
        attr_valid_nsec: U32, attr: Attr,
    }
    /// `fuse_attr_out`
    AttrOut, 104 { attr_valid: U64, attr_valid_nsec: U32, dummy: U32, attr: Attr, }
    /// `fuse_getattr_in`
    GetattrIn, 16 { getattr_flags: U32, dummy: U32, fh: U64, }
    /// `fuse_setattr_in`
    SetattrIn, 88 {
        valid: U32, padding: U32, fh: U64, size: U64, lock_owner: U64, atime: U64, mtime: U64,
        ctime: U64, atimensec: U32, mtimensec: U32, ctimensec: U32, mode: U32, unused4: U32, uid: U32,
        gid: U32, unused5: U32,
    }
    /// `fuse_sx_time`
    SxTime, 16 { tv_sec: I64, tv_nsec: U32, reserved: I32, }
    /// `fuse_statx`
    Statx, 256 {
        mask: U32, blksize: U32, attributes: U64, nlink: U32, uid: U32, gid: U32, mode: U16, spare0: U16,
        ino: U64, size: U64, blocks: U64, attributes_mask: U64, atime: SxTime, btime: SxTime,
        ctime: SxTime, mtime: SxTime, rdev_major: U32, rdev_minor: U32, dev_major: U32, dev_minor: U32,
        spare2: [U64; 14],
    }
    /// `fuse_statx_in`
    StatxIn, 24 { getattr_flags: U32, reserved: U32, fh: U64, sx_flags: U32, sx_mask: U32, }
    /// `fuse_statx_out`
    StatxOut, 288 {
        attr_valid: U64, attr_valid_nsec: U32, flags: U32, spare: [U64; 2], stat: Statx,
    }

    /// `fuse_mknod_in`
    MknodIn, 16 { mode: U32, rdev: U32, umask: U32, padding: U32, }
    /// `fuse_mkdir_in`
    MkdirIn, 8 { mode: U32, umask: U32, }
    /// `fuse_rename_in`
    RenameIn, 8 { newdir: U64, }
    /// `fuse_rename2_in`
    Rename2In, 16 { newdir: U64, flags: U32, padding: U32, }
    /// `fuse_link_in`
    LinkIn, 8 { oldnodeid: U64, }

    /// `fuse_open_in`
    OpenIn, 8 { flags: U32, open_flags: U32, }
    /// `fuse_create_in`
    CreateIn, 16 { flags: U32, mode: U32, umask: U32, open_flags: U32, }
    /// `fuse_open_out`
    OpenOut, 16 { fh: U64, open_flags: U32, padding: U32, }
    /// `fuse_release_in`
    ReleaseIn, 24 { fh: U64, flags: U32, release_flags: U32, lock_owner: U64, }
    /// `fuse_flush_in`
    FlushIn, 24 { fh: U64, unused: U32, padding: U32, lock_owner: U64, }
    /// `fuse_fsync_in`
    FsyncIn, 16 { fh: U64, fsync_flags: U32, padding: U32, }
    /// `fuse_read_in`
    ReadIn, 40 {
        fh: U64, offset: U64, size: U32, read_flags: U32, lock_owner: U64, flags: U32, padding: U32,
    }
    /// `fuse_write_in`
    WriteIn, 40 {
        fh: U64, offset: U64, size: U32, write_flags: U32, lock_owner: U64, flags: U32, padding: U32,
    }
    /// `fuse_write_out`
    WriteOut, 8 { size: U32, padding: U32, }
    /// `fuse_fallocate_in`
    FallocateIn, 32 { fh: U64, offset: U64, length: U64, mode: U32, padding: U32, }
    /// `fuse_lseek_in`
    LseekIn, 24 { fh: U64, offset: U64, whence: U32, padding: U32, }
    /// `fuse_lseek_out`
    LseekOut, 8 { offset: U64, }
    /// `fuse_copy_file_range_in`
    CopyFileRangeIn, 56 {
        fh_in: U64, off_in: U64, nodeid_out: U64, fh_out: U64, off_out: U64, len: U64, flags: U64,
    }

    /// `fuse_setxattr_in` before `FUSE_SETXATTR_EXT`
    SetxattrInCompat, 8 { size: U32, flags: U32, }
    /// `fuse_setxattr_in`
    SetxattrIn, 16 { size: U32, flags: U32, setxattr_flags: U32, padding: U32, }
    /// `fuse_getxattr_in`, of GETXATTR and LISTXATTR
    GetxattrIn, 8 { size: U32, padding: U32, }
    /// `fuse_getxattr_out`
    GetxattrOut, 8 { size: U32, padding: U32, }

    /// `fuse_kstatfs`, all of `fuse_statfs_out`
    StatfsOut, 80 {
        blocks: U64, bfree: U64, bavail: U64, files: U64, ffree: U64, bsize: U32, namelen: U32,
        frsize: U32, padding: U32, spare: [U32; 6],
    }
    /// `fuse_syncfs_in`
    SyncfsIn, 8 { padding: U64, }
    /// `fuse_access_in`
    AccessIn, 8 { mask: U32, padding: U32, }
    /// `fuse_file_lock`
    FileLock, 24 { start: U64, end: U64, kind: U32, pid: U32, }
    /// `fuse_lk_in`
    LkIn, 48 { fh: U64, owner: U64, lk: FileLock, lk_flags: U32, padding: U32, }
    /// `fuse_ioctl_in`
    IoctlIn, 32 { fh: U64, flags: U32, cmd: U32, arg: U64, in_size: U32, out_size: U32, }
    /// `fuse_poll_in`
    PollIn, 24 { fh: U64, kh: U64, flags: U32, events: U32, }

    /// `fuse_dirent`; the name follows
    Dirent, 24 { ino: U64, off: U64, namelen: U32, kind: U32, }
}
