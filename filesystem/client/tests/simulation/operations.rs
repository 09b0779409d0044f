//! What each operation answers, to one guest without faults.

use std::time::Duration;

use fs_client::{LookupTarget, OwnedOperation, OwnedReply};
use fuse_codec::{
    Attr, CopyFileRange, DeviceNumber, DirLayout, Errno, FallocateMode, Handle, Kind, NodeId,
    OpenOptions, RenameFlags, SetAttr, SetTime, Timestamp, Whence, XattrMode,
};

use crate::guest::{Guest, RDWR, ROOT, client};
use crate::in_world;
use crate::world::World;

fn guest(world: &World) -> Guest {
    Guest::new(&client(world, 1, None))
}

async fn lookup_as(guest: &Guest, node: u64, name: LookupTarget) -> Result<u64, Errno> {
    let entry = guest.entry(node, OwnedOperation::Lookup { name }).await?;
    Ok(entry.nodeid.0)
}

#[test]
fn names_lead_to_inodes() {
    in_world(|world| async move {
        let guest = guest(&world);
        assert_eq!(guest.lookup(ROOT, "a").await.err(), Some(Errno::ENOENT));
        let dir = guest.mkdir(ROOT, "a").await.unwrap();
        assert_eq!(guest.mkdir(ROOT, "a").await, Err(Errno::EEXIST));
        assert_eq!(guest.lookup(ROOT, "a").await.unwrap().nodeid.0, dir);
        assert_eq!(guest.getattr(ROOT).await.unwrap().nlink, 3);
        assert_eq!(lookup_as(&guest, dir, LookupTarget::Itself).await, Ok(dir));
        assert_eq!(lookup_as(&guest, dir, LookupTarget::Parent).await, Ok(ROOT));
        assert_eq!(
            lookup_as(&guest, ROOT, LookupTarget::Parent).await,
            Ok(ROOT)
        );
        let (file, _) = guest.create(dir, "f", RDWR).await.unwrap();
        assert_eq!(
            lookup_as(&guest, file, LookupTarget::Parent).await,
            Err(Errno::ENOTDIR)
        );
        assert_eq!(guest.lookup(file, "x").await.err(), Some(Errno::ENOTDIR));
        assert_eq!(guest.rmdir(ROOT, "a").await, Err(Errno::ENOTEMPTY));
        assert_eq!(guest.unlink(ROOT, "a").await, Err(Errno::EISDIR));
        assert_eq!(guest.rmdir(dir, "f").await, Err(Errno::ENOTDIR));
        assert_eq!(guest.link(file, ROOT, "g").await.unwrap().attr.nlink, 2);
        assert_eq!(guest.link(dir, ROOT, "h").await.err(), Some(Errno::EPERM));
        let (old, new) = ((dir, "f"), (ROOT, "g"));
        let refused = guest.rename(old, new, RenameFlags::NoReplace).await;
        assert_eq!(refused, Err(Errno::EEXIST));
        guest
            .rename((ROOT, "g"), (ROOT, "i"), RenameFlags::NoReplace)
            .await
            .unwrap();
        guest
            .rename((ROOT, "i"), (dir, "f"), RenameFlags::Replace)
            .await
            .unwrap();
        guest
            .rename((ROOT, "a"), (dir, "b"), RenameFlags::Replace)
            .await
            .unwrap_err();
        assert_eq!(
            guest.list(ROOT).await.unwrap().len(),
            2,
            "two names of one file are left"
        );
        guest.unlink(ROOT, "i").await.unwrap();
        let other = guest.mkdir(ROOT, "other").await.unwrap();
        guest
            .rename((ROOT, "other"), (dir, "f"), RenameFlags::Exchange)
            .await
            .unwrap();
        assert_eq!(guest.list(dir).await.unwrap(), [("f".into(), other)]);
        assert_eq!(
            guest.list(ROOT).await.unwrap(),
            [("a".into(), dir), ("other".into(), file)]
        );
        guest.rmdir(dir, "f").await.unwrap();
        guest.rmdir(ROOT, "a").await.unwrap();
        // Let go of in the background.
        world.runtime.sleep(Duration::from_secs(5)).await;
        assert_eq!(guest.getattr(dir).await.err(), Some(Errno::ESTALE));
        assert_eq!(guest.lookup(dir, "x").await.err(), Some(Errno::ESTALE));
        let long = "n".repeat(256);
        assert_eq!(
            guest.lookup(ROOT, &long).await.err(),
            Some(Errno::ENAMETOOLONG)
        );
    });
}

#[test]
fn inodes_of_every_kind_are_made() {
    in_world(|world| async move {
        let guest = guest(&world);
        let symlink = OwnedOperation::Symlink {
            name: "s".into(),
            target: "over/there".into(),
        };
        let link = guest.entry(ROOT, symlink).await.unwrap();
        assert_eq!((link.attr.kind, link.attr.size), (Kind::Symlink, 10));
        let target = guest.call(link.nodeid.0, OwnedOperation::Readlink).await;
        assert_eq!(target, OwnedReply::Bytes("over/there".into()));
        let target = guest.call(ROOT, OwnedOperation::Readlink).await;
        assert_eq!(target, OwnedReply::Error(Errno::EINVAL));
        let device = DeviceNumber {
            major: 7,
            minor: 300,
        };
        for (kind, device) in [
            (Kind::Regular, DeviceNumber::default()),
            (Kind::Fifo, DeviceNumber::default()),
            (Kind::Socket, DeviceNumber::default()),
            (Kind::CharDevice, device),
            (Kind::BlockDevice, device),
        ] {
            let mknod = OwnedOperation::Mknod {
                name: format!("{kind:?}").into(),
                kind,
                permissions: 0o640,
                device,
            };
            let attr = guest.entry(ROOT, mknod).await.unwrap().attr;
            assert_eq!(
                (attr.kind, attr.permissions, attr.rdev),
                (kind, 0o640, device)
            );
            assert_eq!((attr.uid, attr.gid, attr.nlink), (1000, 1000, 1));
        }
    });
}

#[test]
fn files_are_created_and_opened() {
    in_world(|world| async move {
        let guest = guest(&world);
        let (file, handle) = guest.create(ROOT, "f", RDWR).await.unwrap();
        assert_eq!(guest.write(file, handle, 0, b"hello").await, Ok(5));
        let excl = guest.create(ROOT, "f", RDWR | libc::O_EXCL).await;
        assert_eq!(excl.err(), Some(Errno::EEXIST));
        let (again, other) = guest.create(ROOT, "f", RDWR).await.unwrap();
        assert_eq!(again, file);
        assert_eq!(guest.read(file, other, 0, 100).await.unwrap(), b"hello");
        let truncated = guest.open(file, RDWR | libc::O_TRUNC).await.unwrap();
        assert_eq!(guest.read(file, truncated, 0, 100).await.unwrap(), b"");
        guest.write(file, handle, 0, b"again").await.unwrap();
        guest.create(ROOT, "f", RDWR | libc::O_TRUNC).await.unwrap();
        assert_eq!(guest.getattr(file).await.unwrap().size, 0);
        assert_eq!(guest.open(ROOT, 0).await, Err(Errno::EISDIR));
        guest.mkdir(ROOT, "d").await.unwrap();
        assert_eq!(
            guest.create(ROOT, "d", RDWR).await.err(),
            Some(Errno::EISDIR)
        );
        for (bits, options) in [
            (libc::O_APPEND, OpenOptions::NOFLUSH),
            (libc::O_APPEND | libc::O_WRONLY, OpenOptions::DIRECT_IO),
            (libc::O_RDWR, OpenOptions::NONE),
            (libc::O_RDONLY, OpenOptions::NOFLUSH),
        ] {
            assert_eq!(guest.open_with(file, bits).await.unwrap().options, options);
        }
        let reader = guest.open(file, libc::O_RDONLY).await.unwrap();
        assert_eq!(guest.write(file, reader, 0, b"x").await, Err(Errno::EBADF));
        guest.release(file, reader).await.unwrap();
        assert_eq!(guest.release(file, reader).await, Err(Errno::EBADF));
        assert_eq!(guest.read(file, reader, 0, 1).await, Err(Errno::EBADF));
        for operation in [
            OwnedOperation::Flush { handle },
            OwnedOperation::Fsync { handle },
            OwnedOperation::Syncfs,
            OwnedOperation::Unanswered,
        ] {
            guest.done(file, operation).await.unwrap();
        }
        let access = guest.done(file, OwnedOperation::Unsupported).await;
        assert_eq!(access, Err(Errno::ENOSYS));
        let handle = guest.opendir(ROOT).await.unwrap();
        guest
            .done(ROOT, OwnedOperation::Fsyncdir { handle })
            .await
            .unwrap();
        assert_eq!(guest.opendir(file).await, Err(Errno::ENOTDIR));
    });
}

#[test]
fn attributes_are_changed() {
    in_world(|world| async move {
        let guest = guest(&world);
        let (file, handle) = guest.create(ROOT, "f", RDWR).await.unwrap();
        let set = SetAttr {
            permissions: Some(0o6755),
            ..SetAttr::default()
        };
        assert_eq!(guest.setattr(file, set).await.unwrap().permissions, 0o6755);
        let chown = SetAttr {
            uid: Some(7),
            ..SetAttr::default()
        };
        let attr = guest.setattr(file, chown).await.unwrap();
        assert_eq!((attr.uid, attr.gid, attr.permissions), (7, 1000, 0o755));
        let time = Timestamp { secs: -5, nanos: 3 };
        let times = SetAttr {
            atime: Some(SetTime::At(time)),
            mtime: Some(SetTime::At(time)),
            handle: Some(handle),
            ..SetAttr::default()
        };
        let attr = guest.setattr(file, times).await.unwrap();
        assert_eq!((attr.atime, attr.mtime), (time, time));
        guest.setattr(file, set).await.unwrap();
        let kill = SetAttr {
            size: Some(1),
            kill_suidgid: true,
            ..SetAttr::default()
        };
        let attr = guest.setattr(file, kill).await.unwrap();
        assert_eq!((attr.size, attr.permissions), (1, 0o755));
        assert!(attr.mtime > time);
        let forged = SetAttr {
            handle: Some(Handle(999)),
            ..SetAttr::default()
        };
        assert_eq!(guest.setattr(file, forged).await.err(), Some(Errno::EBADF));
        assert_eq!(guest.truncate(ROOT, 1).await.err(), Some(Errno::EISDIR));
        assert_eq!(guest.truncate(ROOT, 0).await.err(), Some(Errno::EISDIR));
        assert_eq!(
            guest.truncate(file, u64::MAX).await.err(),
            Some(Errno::EFBIG)
        );
        let statx = guest
            .call(
                file,
                OwnedOperation::Statx {
                    handle: Some(handle),
                },
            )
            .await;
        let OwnedReply::Statx(Attr { btime, .. }, _) = statx else {
            panic!("{statx:?}");
        };
        assert!(btime.is_some());
    });
}

#[test]
fn extended_attributes_are_kept() {
    in_world(|world| async move {
        let guest = guest(&world);
        let set = |name: &str, mode| OwnedOperation::Setxattr {
            name: name.into(),
            value: b"value".to_vec(),
            mode,
        };
        let get = |name: &str, size| OwnedOperation::Getxattr {
            name: name.into(),
            size,
        };
        let replaced = guest.done(ROOT, set("user.a", XattrMode::Replace)).await;
        assert_eq!(replaced, Err(Errno::ENODATA));
        guest
            .done(ROOT, set("user.a", XattrMode::Create))
            .await
            .unwrap();
        guest
            .done(ROOT, set("user.b", XattrMode::Set))
            .await
            .unwrap();
        let created = guest.done(ROOT, set("user.a", XattrMode::Create)).await;
        assert_eq!(created, Err(Errno::EEXIST));
        let system = guest
            .done(ROOT, set("system.posix_acl_access", XattrMode::Set))
            .await;
        assert_eq!(system, Err(Errno::EOPNOTSUPP));
        for (operation, reply) in [
            (get("user.a", 0), OwnedReply::XattrSize(5)),
            (get("user.a", 4), OwnedReply::Error(Errno::ERANGE)),
            (get("user.a", 5), OwnedReply::Bytes(b"value".to_vec())),
            (get("user.c", 5), OwnedReply::Error(Errno::ENODATA)),
            (
                OwnedOperation::Listxattr { size: 0 },
                OwnedReply::XattrSize(14),
            ),
            (
                OwnedOperation::Listxattr { size: 14 },
                OwnedReply::Bytes(b"user.a\0user.b\0".to_vec()),
            ),
        ] {
            assert_eq!(guest.call(ROOT, operation).await, reply);
        }
        let remove = |name: &str| OwnedOperation::Removexattr { name: name.into() };
        guest.done(ROOT, remove("user.a")).await.unwrap();
        assert_eq!(
            guest.done(ROOT, remove("user.a")).await,
            Err(Errno::ENODATA)
        );
    });
}

#[test]
fn directories_are_listed_in_pieces_of_any_size() {
    in_world(|world| async move {
        let guest = guest(&world);
        let dir = guest.mkdir(ROOT, "d").await.unwrap();
        let mut expected = Vec::new();
        for number in 0..50 {
            let name = format!("{number:0width$}", width = number % 30 + 2);
            expected.push((name.clone(), guest.mkdir(dir, &name).await.unwrap()));
        }
        expected.sort_unstable();
        assert_eq!(guest.list(dir).await.unwrap(), expected);
        let handle = guest.opendir(dir).await.unwrap();
        assert_eq!(guest.readdir(dir, handle, 0, 20).await, Err(Errno::EINVAL));
        let first = guest.readdir(dir, handle, 0, 64).await.unwrap();
        let first: Vec<_> = first
            .into_iter()
            .map(|(_, name, ino)| (name, ino))
            .collect();
        assert_eq!(first, [(b".".to_vec(), dir), (b"..".to_vec(), ROOT)]);
        for size in [40, 100, 1000, 1 << 20] {
            let (mut behind, mut count) = (0, 0);
            loop {
                let records = guest.readdir(dir, handle, behind, size).await;
                let records = match records {
                    Err(Errno::EINVAL) if size < 64 => break,
                    records => records.unwrap(),
                };
                let Some(last) = records.last() else {
                    assert_eq!(count, 52);
                    break;
                };
                (behind, count) = (last.0, count + records.len());
            }
        }
        let plus = OwnedOperation::Readdir {
            layout: DirLayout::Plus,
            handle,
            cookie: fuse_codec::Cookie::START,
            size: 1000,
        };
        let OwnedReply::Bytes(bytes) = guest.call(dir, plus).await else {
            panic!("no listing");
        };
        // `struct fuse_direntplus`: the node id leads, 0 for what is not counted as a lookup.
        let node = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
        assert_eq!((node(0), node(160)), (0, 0), "dots are not counted");
        assert!(node(320) > dir);
        assert_eq!(guest.readdir(ROOT, handle, 0, 100).await, Err(Errno::EBADF));
    });
}

#[test]
fn data_and_holes_are_found() {
    in_world(|world| async move {
        let guest = guest(&world);
        let (file, handle) = guest.create(ROOT, "f", RDWR).await.unwrap();
        guest.write(file, handle, 8192, &[1; 5000]).await.unwrap();
        guest.truncate(file, 100_000).await.unwrap();
        let seek = |offset, whence| OwnedOperation::Lseek {
            handle,
            offset,
            whence,
        };
        for (offset, whence, found) in [
            (0, Whence::Data, Ok(8192)),
            (9000, Whence::Data, Ok(9000)),
            (16384, Whence::Data, Err(Errno::ENXIO)),
            (0, Whence::Hole, Ok(0)),
            (9000, Whence::Hole, Ok(16384)),
            (50_000, Whence::Hole, Ok(50_000)),
            (100_000, Whence::Hole, Err(Errno::ENXIO)),
            (u64::MAX >> 1, Whence::Data, Err(Errno::ENXIO)),
        ] {
            let reply = guest.call(file, seek(offset, whence)).await;
            let expected = found.map(OwnedReply::Offset);
            assert_eq!(reply, OwnedReply::from(expected), "{offset} {whence:?}");
        }
        guest.truncate(file, 13_000).await.unwrap();
        let reply = guest.call(file, seek(9000, Whence::Hole)).await;
        assert_eq!(
            reply,
            OwnedReply::Offset(13_000),
            "the end counts as a hole"
        );
    });
}

#[test]
fn space_is_told_and_not_allocated_ahead() {
    in_world(|world| async move {
        let guest = guest(&world);
        let (file, handle) = guest.create(ROOT, "f", RDWR).await.unwrap();
        let allocate = FallocateMode::Allocate { keep_size: false };
        guest
            .fallocate(file, handle, (0, 10_000), allocate)
            .await
            .unwrap();
        let attr = guest.getattr(file).await.unwrap();
        assert_eq!((attr.size, attr.allocated_bytes), (10_000, 0));
        let keep = FallocateMode::Allocate { keep_size: true };
        guest
            .fallocate(file, handle, (0, 20_000), keep)
            .await
            .unwrap();
        assert_eq!(guest.getattr(file).await.unwrap().size, 10_000);
        guest.write(file, handle, 0, &[7; 10_000]).await.unwrap();
        let all = (0, 10_000);
        guest
            .fallocate(file, handle, all, FallocateMode::PunchHole)
            .await
            .unwrap();
        let attr = guest.getattr(file).await.unwrap();
        assert_eq!((attr.size, attr.allocated_bytes), (10_000, 0));
        let huge = (u64::MAX >> 1, 2);
        let huge = guest.fallocate(file, handle, huge, allocate).await;
        assert_eq!(huge, Err(Errno::EFBIG));
        let OwnedReply::Stats(stats) = guest.call(ROOT, OwnedOperation::Statfs).await else {
            panic!("no statistics");
        };
        assert!(stats.blocks > stats.blocks_free && stats.inodes - stats.inodes_free == 2);
    });
}

#[test]
fn aligned_copies_share_data() {
    in_world(|world| async move {
        let guest = guest(&world);
        let (from, source) = guest.create(ROOT, "from", RDWR).await.unwrap();
        let (to, target) = guest.create(ROOT, "to", RDWR).await.unwrap();
        let data = world.runtime.bytes(50_000);
        guest.write(from, source, 0, &data).await.unwrap();
        guest.fsync(from, source).await.unwrap();
        let named = || world.statistics().named_bytes;
        let before = named();
        let copy = |from_offset, to_offset, length| {
            OwnedOperation::CopyFileRange(CopyFileRange {
                from: source,
                from_offset,
                to_inode: NodeId(to),
                to: target,
                to_offset,
                length,
            })
        };
        let reply = guest.call(from, copy(0, 0, 1 << 20)).await;
        assert_eq!(reply, OwnedReply::Written(50_000));
        assert_eq!(named(), before, "no data were written");
        assert_eq!(guest.read(to, target, 0, 60_000).await.unwrap(), data);
        let reply = guest.call(from, copy(100, 60_000, 5000)).await;
        assert_eq!(reply, OwnedReply::Written(5000));
        let copied = guest.read(to, target, 60_000, 9000).await.unwrap();
        assert_eq!(copied, data[100..5100]);
        let reply = guest.call(from, copy(60_000, 0, 5000)).await;
        assert_eq!(reply, OwnedReply::Written(0), "behind the end");
        let reader = guest.open(to, libc::O_RDONLY).await.unwrap();
        let mut refused = copy(0, 0, 1);
        if let OwnedOperation::CopyFileRange(copy) = &mut refused {
            copy.to = reader;
        }
        assert_eq!(
            guest.call(from, refused).await,
            OwnedReply::Error(Errno::EBADF)
        );
    });
}

#[test]
fn a_small_file_is_read_by_one_question_and_one_read() {
    in_world(|world| async move {
        let guest = guest(&world);
        let (file, handle) = guest.create(ROOT, "f", RDWR).await.unwrap();
        guest.write(file, handle, 0, &[3; 900_000]).await.unwrap();
        guest.fsync(file, handle).await.unwrap();
        let before = {
            let state = world.state();
            (state.questions, state.data_reads)
        };
        guest.read(file, handle, 0, 1 << 20).await.unwrap();
        let state = world.state();
        assert!(state.questions - before.0 <= 1);
        assert_eq!(state.data_reads - before.1, 1);
    });
}

#[test]
fn a_read_only_mount_needs_no_open() {
    in_world(|world| async move {
        let host = client(&world, 1, None);
        let writer = Guest::new(&host);
        let (file, handle) = writer.create(ROOT, "f", RDWR).await.unwrap();
        writer.write(file, handle, 0, b"data").await.unwrap();
        let reader = Guest::read_only(&host);
        assert_eq!(reader.read(file, Handle(0), 0, 9).await.unwrap(), b"data");
        assert_eq!(
            reader.readdir(ROOT, Handle(0), 0, 500).await.unwrap().len(),
            3
        );
        assert_eq!(
            reader.write(file, Handle(0), 0, b"x").await,
            Err(Errno::EROFS)
        );
        assert_eq!(reader.mkdir(ROOT, "d").await, Err(Errno::EROFS));
        assert_eq!(reader.open(file, RDWR).await, Err(Errno::EROFS));
        reader.open(file, libc::O_RDONLY).await.unwrap();
        assert_eq!(writer.read(file, Handle(0), 0, 9).await, Err(Errno::EBADF));
    });
}

#[test]
fn access_times_follow_reads_as_relatime_has_it() {
    in_world(|world| async move {
        let host = client(&world, 1, None);
        let guest = Guest::new(&host);
        let (file, handle) = guest.create(ROOT, "f", RDWR).await.unwrap();
        let pause = || world.runtime.sleep(Duration::from_secs(1));
        pause().await;
        guest.write(file, handle, 0, b"data").await.unwrap();
        let atime = || async {
            pause().await;
            guest.getattr(file).await.unwrap().atime
        };
        let created = atime().await;
        guest.read(file, handle, 0, 9).await.unwrap();
        let read = atime().await;
        assert!(read > created);
        guest.read(file, handle, 0, 9).await.unwrap();
        assert_eq!(atime().await, read, "read since it was written");
        world.runtime.sleep(Duration::from_secs(90_000)).await;
        let reader = Guest::read_only(&host);
        reader.read(file, Handle(0), 0, 9).await.unwrap();
        assert_eq!(atime().await, read, "by a read-only mount");
        guest.read(file, handle, 0, 9).await.unwrap();
        assert!(atime().await > read, "a day later");
        assert_eq!(host.counters().access_times, 2);
    });
}
