//! Bodies of requests, operation by operation.

use super::body::Body;
use super::operation::{
    CopyFileRange, Create, DirLayout, Fallocate, Forgets, Ioctl, Lock, Operation, Poll, Read,
    Release, SetXattr, Tmpfile, Write,
};
use super::{HEADER_BYTES, Header};
use crate::attr::{DeviceNumber, Kind, PERMISSIONS_MASK, SetAttr, SetTime, Timestamp};
use crate::ids::{Cookie, Handle, LockOwner, NodeId, Unique};
use crate::init::{Dialect, Features, Offer};
use crate::malformed::Malformed;
use crate::modes::{
    AccessMask, FallocateMode, LockKind, OpenFlags, RenameFlags, Whence, XattrMode, field,
};
use crate::opcode::Opcode;
use crate::wire::{self, fattr};

/// Largest value of an extended attribute in bytes (`XATTR_SIZE_MAX`).
pub const XATTR_BYTES_MAX: u32 = 64 << 10;

/// Parses what follows the header. Of WRITE that is without the payload.
pub fn operation<'a>(
    header: &Header,
    body: &'a [u8],
    dialect: Dialect,
) -> Result<Operation<'a>, Malformed> {
    let Some(opcode) = Opcode::from_number(header.opcode) else {
        return Ok(Operation::Unsupported(header.opcode));
    };
    let body = Body::new(body);
    match opcode {
        Opcode::Init => init(body),
        Opcode::Interrupt => interrupt(body),
        Opcode::Lookup => lookup(body),
        Opcode::Forget => forget(body),
        Opcode::BatchForget => batch_forget(body),
        Opcode::Getattr => getattr(body),
        Opcode::Setattr => setattr(body.take_last()?),
        Opcode::Statx => statx(body.take_last()?),
        Opcode::Symlink => symlink(body),
        Opcode::Mknod => mknod(body),
        Opcode::Mkdir => mkdir(body),
        Opcode::Unlink | Opcode::Rmdir => remove(opcode, body),
        Opcode::Rename | Opcode::Rename2 => rename(opcode, body),
        Opcode::Link => link(body),
        Opcode::Open | Opcode::Opendir => open(opcode, body.take_last()?),
        Opcode::Create => create(body),
        Opcode::Tmpfile => tmpfile(body),
        Opcode::Read => read(body.take_last()?, dialect),
        Opcode::Write => write(header, body.take_last()?, dialect),
        Opcode::Flush => flush(body),
        Opcode::Release | Opcode::Releasedir => release(opcode, body.take_last()?),
        Opcode::Fsync | Opcode::Fsyncdir => fsync(opcode, body.take_last()?),
        Opcode::Readdir => readdir(DirLayout::Plain, body.take_last()?, dialect),
        Opcode::Readdirplus => readdir(DirLayout::Plus, body.take_last()?, dialect),
        Opcode::Setxattr => setxattr(body, dialect),
        Opcode::Getxattr => getxattr(body),
        Opcode::Listxattr => listxattr(body.take_last()?),
        Opcode::Removexattr => removexattr(body),
        Opcode::Access => access(body.take_last()?),
        Opcode::Fallocate => fallocate(body.take_last()?),
        Opcode::Lseek => lseek(body.take_last()?),
        Opcode::CopyFileRange => copy_file_range(body.take_last()?),
        Opcode::Syncfs => body
            .take_last::<wire::SyncfsIn>()
            .map(|_| Operation::Syncfs),
        Opcode::Getlk | Opcode::Setlk | Opcode::Setlkw => lock(opcode, body.take_last()?),
        Opcode::Ioctl => ioctl(body),
        Opcode::Poll => poll(body.take_last()?),
        Opcode::Destroy => body.end().map(|()| Operation::Destroy),
        Opcode::Readlink => body.end().map(|()| Operation::Readlink),
        Opcode::Statfs => body.end().map(|()| Operation::Statfs),
        // An answer to a notification. We send none.
        Opcode::NotifyReply => Ok(Operation::Unsupported(header.opcode)),
    }
}

/// An offset that the kernel can carry.
fn offset(name: &'static str, raw: u64) -> Result<u64, Malformed> {
    if raw > i64::MAX as u64 {
        return Err(field(name, raw));
    }
    Ok(raw)
}

/// A range whose end the kernel can carry; gives its first byte.
fn range(name: &'static str, first: u64, bytes: u64) -> Result<u64, Malformed> {
    let first = offset(name, first)?;
    match first.checked_add(bytes) {
        Some(end) if end <= i64::MAX as u64 => Ok(first),
        _ => Err(Malformed::RangeTooLarge),
    }
}

fn timestamp(name: &'static str, secs: u64, nanos: u32) -> Result<Timestamp, Malformed> {
    if nanos >= Timestamp::NANOS_PER_SEC {
        return Err(field(name, nanos));
    }
    // The kernel casts a signed number.
    Ok(Timestamp {
        secs: secs as i64,
        nanos,
    })
}

fn init(mut body: Body<'_>) -> Result<Operation<'_>, Malformed> {
    let init = body.take::<wire::InitIn>()?;
    let low = u64::from(init.flags.get());
    let mut features = Features::from_bits(low);
    // What a later major version has behind its number is not for this one to judge.
    let ours = init.major.get() == wire::VERSION_MAJOR;
    if ours && features.contains(Features::INIT_EXT) {
        // What later minor versions may add behind it is ignored.
        let ext = body.take::<wire::InitInExt>()?;
        features = Features::from_bits(low | u64::from(ext.flags2.get()) << 32);
    } else if ours {
        body.end()?;
    }
    Ok(Operation::Init(Offer {
        major: init.major.get(),
        minor: init.minor.get(),
        max_readahead_bytes: init.max_readahead.get(),
        features,
    }))
}

fn interrupt(body: Body<'_>) -> Result<Operation<'_>, Malformed> {
    let interrupt = body.take_last::<wire::InterruptIn>()?;
    Ok(Operation::Interrupt {
        unique: Unique(interrupt.unique.get()),
    })
}

fn lookup(mut body: Body<'_>) -> Result<Operation<'_>, Malformed> {
    let name = body.lookup_name()?;
    body.end()?;
    Ok(Operation::Lookup { name })
}

fn forget(body: Body<'_>) -> Result<Operation<'_>, Malformed> {
    let forget = body.take_last::<wire::ForgetIn>()?;
    Ok(Operation::Forget {
        lookups: forget.nlookup.get(),
    })
}

fn batch_forget(mut body: Body<'_>) -> Result<Operation<'_>, Malformed> {
    let count = body.take::<wire::BatchForgetIn>()?.count.get();
    let bytes = u64::from(count) * size_of::<wire::ForgetOne>() as u64;
    Forgets::new(count, body.rest_of(bytes)?).map(Operation::BatchForget)
}

fn getattr(body: Body<'_>) -> Result<Operation<'_>, Malformed> {
    let getattr = body.take_last::<wire::GetattrIn>()?;
    let by_handle = getattr.getattr_flags.get() & wire::GETATTR_FH != 0;
    Ok(Operation::Getattr {
        handle: by_handle.then(|| Handle(getattr.fh.get())),
    })
}

fn statx(statx: &wire::StatxIn) -> Result<Operation<'static>, Malformed> {
    let by_handle = statx.getattr_flags.get() & wire::GETATTR_FH != 0;
    Ok(Operation::Statx {
        handle: by_handle.then(|| Handle(statx.fh.get())),
        flags: statx.sx_flags.get(),
        mask: statx.sx_mask.get(),
    })
}

fn setattr(setattr: &wire::SetattrIn) -> Result<Operation<'static>, Malformed> {
    let valid = setattr.valid.get();
    // A change that this crate does not know must not be lost in silence.
    if valid & !fattr::ALL != 0 {
        return Err(field("valid", valid));
    }
    let has = |bit: u32| valid & bit != 0;
    let set_time = |bit, now_bit, name, secs: u64, nanos: u32| {
        if has(now_bit) {
            Ok(Some(SetTime::Now))
        } else if has(bit) {
            timestamp(name, secs, nanos).map(|time| Some(SetTime::At(time)))
        } else {
            Ok(None)
        }
    };
    let (atime, atimensec) = (setattr.atime.get(), setattr.atimensec.get());
    let (mtime, mtimensec) = (setattr.mtime.get(), setattr.mtimensec.get());
    let ctime = has(fattr::CTIME)
        .then(|| timestamp("ctimensec", setattr.ctime.get(), setattr.ctimensec.get()))
        .transpose()?;
    let size = has(fattr::SIZE)
        .then(|| offset("size", setattr.size.get()))
        .transpose()?;
    Ok(Operation::Setattr(SetAttr {
        permissions: has(fattr::MODE).then(|| setattr.mode.get() & PERMISSIONS_MASK),
        uid: has(fattr::UID).then(|| setattr.uid.get()),
        gid: has(fattr::GID).then(|| setattr.gid.get()),
        size,
        atime: set_time(
            fattr::ATIME,
            fattr::ATIME_NOW,
            "atimensec",
            atime,
            atimensec,
        )?,
        mtime: set_time(
            fattr::MTIME,
            fattr::MTIME_NOW,
            "mtimensec",
            mtime,
            mtimensec,
        )?,
        ctime,
        handle: has(fattr::FH).then(|| Handle(setattr.fh.get())),
        lock_owner: has(fattr::LOCKOWNER).then(|| LockOwner(setattr.lock_owner.get())),
        kill_suidgid: has(fattr::KILL_SUIDGID),
    }))
}

fn symlink(mut body: Body<'_>) -> Result<Operation<'_>, Malformed> {
    let name = body.name()?;
    let target = body.target()?;
    body.end()?;
    Ok(Operation::Symlink { name, target })
}

fn mknod(mut body: Body<'_>) -> Result<Operation<'_>, Malformed> {
    let mknod = body.take::<wire::MknodIn>()?;
    let name = body.name()?;
    body.end()?;
    let mode = mknod.mode.get();
    let kind = Kind::from_mode(mode)
        .filter(|kind| !matches!(kind, Kind::Directory | Kind::Symlink))
        .ok_or(field("mode", mode))?;
    Ok(Operation::Mknod {
        name,
        kind,
        permissions: mode & PERMISSIONS_MASK,
        device: DeviceNumber::from_wire(mknod.rdev.get()),
        umask: mknod.umask.get(),
    })
}

fn mkdir(mut body: Body<'_>) -> Result<Operation<'_>, Malformed> {
    let mkdir = body.take::<wire::MkdirIn>()?;
    let name = body.name()?;
    body.end()?;
    Ok(Operation::Mkdir {
        name,
        permissions: mkdir.mode.get() & PERMISSIONS_MASK,
        umask: mkdir.umask.get(),
    })
}

fn remove(opcode: Opcode, mut body: Body<'_>) -> Result<Operation<'_>, Malformed> {
    let name = body.name()?;
    body.end()?;
    Ok(match opcode {
        Opcode::Rmdir => Operation::Rmdir { name },
        _ => Operation::Unlink { name },
    })
}

fn rename(opcode: Opcode, mut body: Body<'_>) -> Result<Operation<'_>, Malformed> {
    let (new_parent, flags) = match opcode {
        Opcode::Rename2 => {
            let rename = body.take::<wire::Rename2In>()?;
            (rename.newdir.get(), rename.flags.get())
        }
        _ => (body.take::<wire::RenameIn>()?.newdir.get(), 0),
    };
    let name = body.name()?;
    let new_name = body.name()?;
    body.end()?;
    Ok(Operation::Rename {
        name,
        new_parent: NodeId(new_parent),
        new_name,
        flags: RenameFlags::from_wire(flags)?,
    })
}

fn link(mut body: Body<'_>) -> Result<Operation<'_>, Malformed> {
    let inode = NodeId(body.take::<wire::LinkIn>()?.oldnodeid.get());
    let name = body.name()?;
    body.end()?;
    Ok(Operation::Link { inode, name })
}

fn open(opcode: Opcode, open: &wire::OpenIn) -> Result<Operation<'static>, Malformed> {
    let flags = OpenFlags::from_wire(open.flags.get())?;
    Ok(match opcode {
        Opcode::Opendir => Operation::Opendir { flags },
        _ => Operation::Open {
            flags,
            kill_suidgid: open.open_flags.get() & wire::OPEN_KILL_SUIDGID != 0,
        },
    })
}

fn create(mut body: Body<'_>) -> Result<Operation<'_>, Malformed> {
    let create = body.take::<wire::CreateIn>()?;
    let name = body.name()?;
    body.end()?;
    Ok(Operation::Create(Create {
        name,
        flags: OpenFlags::from_wire(create.flags.get())?,
        permissions: create.mode.get() & PERMISSIONS_MASK,
        umask: create.umask.get(),
        kill_suidgid: create.open_flags.get() & wire::OPEN_KILL_SUIDGID != 0,
    }))
}

fn tmpfile(mut body: Body<'_>) -> Result<Operation<'_>, Malformed> {
    let create = body.take::<wire::CreateIn>()?;
    body.skip_name()?;
    body.end()?;
    Ok(Operation::Tmpfile(Tmpfile {
        flags: OpenFlags::from_wire(create.flags.get())?,
        permissions: create.mode.get() & PERMISSIONS_MASK,
        umask: create.umask.get(),
    }))
}

/// A number of bytes that one READ, WRITE or READDIR may move.
fn io_bytes(size: u32, dialect: Dialect) -> Result<u32, Malformed> {
    if size > dialect.io_bytes_max {
        return Err(field("size", size));
    }
    Ok(size)
}

fn read(read: &wire::ReadIn, dialect: Dialect) -> Result<Operation<'static>, Malformed> {
    let size = io_bytes(read.size.get(), dialect)?;
    let by_owner = read.read_flags.get() & wire::READ_LOCKOWNER != 0;
    Ok(Operation::Read(Read {
        handle: Handle(read.fh.get()),
        // The last page of the longest file ends one byte beyond the largest offset.
        offset: offset("offset", read.offset.get())?,
        size,
        lock_owner: by_owner.then(|| LockOwner(read.lock_owner.get())),
        flags: OpenFlags::from_wire(read.flags.get())?,
    }))
}

fn write(
    header: &Header,
    write: &wire::WriteIn,
    dialect: Dialect,
) -> Result<Operation<'static>, Malformed> {
    const _: () = assert!(Write::PAYLOAD_OFFSET == HEADER_BYTES + size_of::<wire::WriteIn>());
    let payload = header.len as usize - Write::PAYLOAD_OFFSET;
    if write.size.get() as usize != payload {
        return Err(Malformed::Count {
            count: write.size.get().into(),
            given: payload,
        });
    }
    let size = io_bytes(write.size.get(), dialect)?;
    let has = |bit: u32| write.write_flags.get() & bit != 0;
    Ok(Operation::Write(Write {
        handle: Handle(write.fh.get()),
        offset: range("offset", write.offset.get(), size.into())?,
        size,
        lock_owner: has(wire::WRITE_LOCKOWNER).then(|| LockOwner(write.lock_owner.get())),
        flags: OpenFlags::from_wire(write.flags.get())?,
        from_page_cache: has(wire::WRITE_CACHE),
        kill_suidgid: has(wire::WRITE_KILL_SUIDGID),
    }))
}

fn flush(body: Body<'_>) -> Result<Operation<'_>, Malformed> {
    let flush = body.take_last::<wire::FlushIn>()?;
    Ok(Operation::Flush {
        handle: Handle(flush.fh.get()),
        lock_owner: LockOwner(flush.lock_owner.get()),
    })
}

fn release(opcode: Opcode, release: &wire::ReleaseIn) -> Result<Operation<'static>, Malformed> {
    let handle = Handle(release.fh.get());
    if opcode == Opcode::Releasedir {
        return Ok(Operation::Releasedir { handle });
    }
    let has = |bit: u32| release.release_flags.get() & bit != 0;
    Ok(Operation::Release(Release {
        handle,
        flags: OpenFlags::from_wire(release.flags.get())?,
        flush: has(wire::RELEASE_FLUSH),
        flock_unlock: has(wire::RELEASE_FLOCK_UNLOCK).then(|| LockOwner(release.lock_owner.get())),
    }))
}

fn fsync(opcode: Opcode, fsync: &wire::FsyncIn) -> Result<Operation<'static>, Malformed> {
    let handle = Handle(fsync.fh.get());
    let data_only = fsync.fsync_flags.get() & wire::FSYNC_FDATASYNC != 0;
    Ok(match opcode {
        Opcode::Fsyncdir => Operation::Fsyncdir { handle, data_only },
        _ => Operation::Fsync { handle, data_only },
    })
}

fn readdir(
    layout: DirLayout,
    read: &wire::ReadIn,
    dialect: Dialect,
) -> Result<Operation<'static>, Malformed> {
    let cookie = read.offset.get();
    Ok(Operation::Readdir {
        layout,
        handle: Handle(read.fh.get()),
        cookie: Cookie::new(cookie).ok_or(field("offset", cookie))?,
        size: io_bytes(read.size.get(), dialect)?,
    })
}

fn setxattr(mut body: Body<'_>, dialect: Dialect) -> Result<Operation<'_>, Malformed> {
    let (size, flags, more_flags) = if dialect.setxattr_ext {
        let setxattr = body.take::<wire::SetxattrIn>()?;
        (setxattr.size, setxattr.flags, setxattr.setxattr_flags.get())
    } else {
        let setxattr = body.take::<wire::SetxattrInCompat>()?;
        (setxattr.size, setxattr.flags, 0)
    };
    let name = body.xattr_name()?;
    let value = body.rest_of(size.get().into())?;
    if size.get() > XATTR_BYTES_MAX {
        return Err(Malformed::XattrTooLarge(size.get()));
    }
    Ok(Operation::Setxattr(SetXattr {
        name,
        value,
        mode: XattrMode::from_wire(flags.get())?,
        kill_sgid: more_flags & wire::SETXATTR_ACL_KILL_SGID != 0,
    }))
}

fn getxattr(mut body: Body<'_>) -> Result<Operation<'_>, Malformed> {
    let size = body.take::<wire::GetxattrIn>()?.size.get();
    let name = body.xattr_name()?;
    body.end()?;
    Ok(Operation::Getxattr { name, size })
}

fn listxattr(list: &wire::GetxattrIn) -> Result<Operation<'static>, Malformed> {
    Ok(Operation::Listxattr {
        size: list.size.get(),
    })
}

fn removexattr(mut body: Body<'_>) -> Result<Operation<'_>, Malformed> {
    let name = body.xattr_name()?;
    body.end()?;
    Ok(Operation::Removexattr { name })
}

fn access(access: &wire::AccessIn) -> Result<Operation<'static>, Malformed> {
    Ok(Operation::Access {
        mask: AccessMask::from_wire(access.mask.get())?,
    })
}

fn fallocate(fallocate: &wire::FallocateIn) -> Result<Operation<'static>, Malformed> {
    let length = fallocate.length.get();
    if length == 0 {
        return Err(field("length", length));
    }
    Ok(Operation::Fallocate(Fallocate {
        handle: Handle(fallocate.fh.get()),
        offset: range("offset", fallocate.offset.get(), length)?,
        length,
        mode: FallocateMode::from_wire(fallocate.mode.get())?,
    }))
}

fn lseek(lseek: &wire::LseekIn) -> Result<Operation<'static>, Malformed> {
    let whence = Whence::from_wire(lseek.whence.get())?;
    // The kernel passes on whatever lseek(2) was given.
    let offset = offset("offset", lseek.offset.get()).map_err(|_| Malformed::NegativeSeek)?;
    Ok(Operation::Lseek {
        handle: Handle(lseek.fh.get()),
        offset,
        whence,
    })
}

fn copy_file_range(copy: &wire::CopyFileRangeIn) -> Result<Operation<'static>, Malformed> {
    let flags = copy.flags.get();
    if flags != 0 {
        return Err(field("flags", flags));
    }
    let length = copy.len.get();
    Ok(Operation::CopyFileRange(CopyFileRange {
        from: Handle(copy.fh_in.get()),
        from_offset: range("off_in", copy.off_in.get(), length)?,
        to_inode: NodeId(copy.nodeid_out.get()),
        to: Handle(copy.fh_out.get()),
        to_offset: range("off_out", copy.off_out.get(), length)?,
        length: length.min(CopyFileRange::MAX_BYTES),
    }))
}

fn lock(opcode: Opcode, request: &wire::LkIn) -> Result<Operation<'static>, Malformed> {
    let start = offset("start", request.lk.start.get())?;
    let end = offset("end", request.lk.end.get())?;
    if end < start {
        return Err(field("end", end));
    }
    let lock = Lock {
        handle: Handle(request.fh.get()),
        owner: LockOwner(request.owner.get()),
        start,
        end,
        kind: LockKind::from_wire(request.lk.kind.get())?,
        pid: request.lk.pid.get(),
        flock: request.lk_flags.get() & wire::LK_FLOCK != 0,
    };
    Ok(match opcode {
        Opcode::Getlk => Operation::Getlk(lock),
        _ => Operation::Setlk {
            lock,
            wait: opcode == Opcode::Setlkw,
        },
    })
}

fn ioctl(mut body: Body<'_>) -> Result<Operation<'_>, Malformed> {
    let ioctl = body.take::<wire::IoctlIn>()?;
    let input = body.rest_of(ioctl.in_size.get().into())?;
    Ok(Operation::Ioctl(Ioctl {
        handle: Handle(ioctl.fh.get()),
        flags: ioctl.flags.get(),
        command: ioctl.cmd.get(),
        argument: ioctl.arg.get(),
        input,
        output_bytes: ioctl.out_size.get(),
    }))
}

fn poll(poll: &wire::PollIn) -> Result<Operation<'static>, Malformed> {
    Ok(Operation::Poll(Poll {
        handle: Handle(poll.fh.get()),
        kernel_handle: poll.kh.get(),
        flags: poll.flags.get(),
        events: poll.events.get(),
    }))
}
