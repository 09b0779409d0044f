//! Each class of operations there and back, on either kind of ring, in pieces of several sizes.

use fuse_codec::{NodeId, Opcode, wire};
use vhost_backend::testing::QueueOptions;
use zerocopy::IntoBytes;

use super::{Guest, ROOT, guest, guest_with, pattern};
use crate::testing::{Cut, named};
use crate::{LatencyClass, OpClass};

const CUTS: [Cut; 4] = [Cut::Kernel, Cut::Indirect, Cut::Pieces(5), Cut::Pieces(37)];

fn each_cut(test: impl Fn(&mut Guest)) {
    for rings in [QueueOptions::default(), QueueOptions::default().packed()] {
        for cut in CUTS {
            let (mut guest, _) = guest_with(false, rings);
            guest.cut = cut;
            guest.init().unwrap();
            test(&mut guest);
        }
    }
}

#[test]
fn names_are_made_found_moved_and_removed() {
    each_cut(|guest| {
        let dir = guest.mkdir(ROOT, b"dir").unwrap();
        assert_eq!(guest.mkdir(ROOT, b"dir"), Err(libc::EEXIST));
        let found = guest.lookup(ROOT, b"dir").unwrap();
        assert_eq!(NodeId(found.nodeid.get()), dir);
        assert_eq!(found.attr.mode.get(), libc::S_IFDIR | 0o755);
        assert_eq!((found.attr.uid.get(), found.attr.gid.get()), (1000, 1001));
        let absent = guest.lookup(ROOT, b"none").unwrap();
        assert_eq!((absent.nodeid.get(), absent.entry_valid.get()), (0, 1));

        let (file, _) = guest.create(dir, b"file").unwrap();
        let link = wire::LinkIn {
            oldnodeid: file.0.into(),
        };
        let room = size_of::<wire::EntryOut>();
        let body = named(link.as_bytes(), b"second");
        let linked: wire::EntryOut = guest.call(Opcode::Link, ROOT, &body, room).get().unwrap();
        assert_eq!(linked.attr.nlink.get(), 2);

        let rename = wire::Rename2In {
            newdir: ROOT.0.into(),
            flags: libc::RENAME_NOREPLACE.into(),
            padding: 0.into(),
        };
        let names = [named(rename.as_bytes(), b"file"), named(&[], b"second")].concat();
        assert_eq!(
            guest.call(Opcode::Rename2, dir, &names, 0).error,
            libc::EEXIST
        );
        let names = [named(rename.as_bytes(), b"file"), named(&[], b"moved")].concat();
        assert_eq!(guest.call(Opcode::Rename2, dir, &names, 0).error, 0);
        let found = guest.lookup(ROOT, b"moved").unwrap();
        assert_eq!(NodeId(found.nodeid.get()), file);

        let unlink = |guest: &mut Guest, name: &[u8]| {
            guest.call(Opcode::Unlink, ROOT, &named(&[], name), 0).error
        };
        assert_eq!(unlink(guest, b"dir"), libc::EISDIR);
        assert_eq!(unlink(guest, b"moved"), 0);
        assert_eq!(unlink(guest, b"moved"), libc::ENOENT);
        assert_eq!(guest.getattr(file).unwrap().nlink.get(), 1);
        assert_eq!(
            guest
                .call(Opcode::Rmdir, ROOT, &named(&[], b"dir"), 0)
                .error,
            0
        );
    });
}

#[test]
fn a_rename_leaves_a_whiteout_where_it_is_asked_to() {
    each_cut(|guest| {
        let dir = guest.mkdir(ROOT, b"dir").unwrap();
        let (file, _) = guest.create(dir, b"file").unwrap();
        guest.create(ROOT, b"taken").unwrap();
        let rename = |guest: &mut Guest, flags: u32, to: &[u8]| {
            let rename = wire::Rename2In {
                newdir: ROOT.0.into(),
                flags: flags.into(),
                padding: 0.into(),
            };
            let names = [named(rename.as_bytes(), b"file"), named(&[], to)].concat();
            guest.call(Opcode::Rename2, dir, &names, 0).error
        };
        let (whiteout, no_replace) = (libc::RENAME_WHITEOUT, libc::RENAME_NOREPLACE);
        let exchange = libc::RENAME_EXCHANGE;
        assert_eq!(rename(guest, whiteout | exchange, b"taken"), libc::EINVAL);
        assert_eq!(rename(guest, whiteout | no_replace, b"taken"), libc::EEXIST);
        assert_eq!(rename(guest, whiteout, b"taken"), 0);
        let moved = guest.lookup(ROOT, b"taken").unwrap();
        assert_eq!(NodeId(moved.nodeid.get()), file);
        let left = guest.lookup(dir, b"file").unwrap().attr;
        assert_eq!((left.mode.get(), left.rdev.get()), (libc::S_IFCHR, 0));
        assert_eq!((left.uid.get(), left.gid.get()), (1000, 1001));
        assert_eq!((left.nlink.get(), left.size.get()), (1, 0));
        // A whiteout is an inode like any other.
        assert_eq!(rename(guest, whiteout | no_replace, b"moved"), 0);
        let moved = guest.lookup(ROOT, b"moved").unwrap().attr;
        assert_eq!(moved.mode.get(), libc::S_IFCHR);
    });
}

#[test]
fn a_temporary_file_gets_its_first_name_by_a_link_or_goes() {
    each_cut(|guest| {
        let (file, handle) = guest.tmpfile(ROOT).unwrap();
        assert_eq!(guest.write(file, handle, 0, b"bytes"), Ok(5));
        let attr = guest.getattr(file).unwrap();
        assert_eq!((attr.nlink.get(), attr.size.get()), (0, 5));
        assert_eq!(attr.mode.get(), libc::S_IFREG | 0o600);
        let dots = guest.open(Opcode::Opendir, ROOT, 0).unwrap();
        let listed = guest.list(Opcode::Readdir, ROOT, dots, 0, 4096).unwrap();
        assert_eq!(listed.len(), 2, "it has no name");
        let link = |guest: &mut Guest, node: NodeId, name: &[u8]| {
            let link = wire::LinkIn {
                oldnodeid: node.0.into(),
            };
            let room = size_of::<wire::EntryOut>();
            let body = named(link.as_bytes(), name);
            let linked = guest.call(Opcode::Link, ROOT, &body, room);
            linked
                .get::<wire::EntryOut>()
                .map(|entry| entry.attr.nlink.get())
        };
        assert_eq!(link(guest, file, b"first"), Ok(1));
        let found = guest.lookup(ROOT, b"first").unwrap();
        assert_eq!(NodeId(found.nodeid.get()), file);
        let unlink = named(&[], b"first");
        assert_eq!(guest.call(Opcode::Unlink, ROOT, &unlink, 0).error, 0);
        assert_eq!(link(guest, file, b"second"), Err(libc::ENOENT));
        assert_eq!(guest.read(file, handle, 0, 9).unwrap(), b"bytes");
        let (unnamed, _) = guest.create(ROOT, b"not-a-directory").unwrap();
        assert_eq!(guest.tmpfile(unnamed).err(), Some(libc::ENOTDIR));
    });
}

#[test]
fn attributes_and_symlinks_come_back_as_they_were_set() {
    each_cut(|guest| {
        let target = vec![b't'; 4095];
        let body = [named(&[], b"link"), named(&[], &target)].concat();
        let room = size_of::<wire::EntryOut>();
        let link: wire::EntryOut = guest
            .call(Opcode::Symlink, ROOT, &body, room)
            .get()
            .unwrap();
        assert_eq!(link.attr.size.get(), 4095);
        let node = NodeId(link.nodeid.get());
        assert_eq!(
            guest.call(Opcode::Readlink, node, &[], 4095).ok().unwrap(),
            target
        );

        let (file, _) = guest.create(ROOT, b"file").unwrap();
        let set = wire::SetattrIn {
            valid: (wire::fattr::MODE | wire::fattr::SIZE | wire::fattr::MTIME).into(),
            mode: 0o640.into(),
            size: 5000.into(),
            mtime: 77.into(),
            mtimensec: 88.into(),
            ..wire::SetattrIn::default()
        };
        let room = size_of::<wire::AttrOut>();
        let answer = guest.call(Opcode::Setattr, file, set.as_bytes(), room);
        let attr = answer.get::<wire::AttrOut>().unwrap().attr;
        assert_eq!(
            (attr.mode.get(), attr.size.get()),
            (libc::S_IFREG | 0o640, 5000)
        );
        assert_eq!((attr.mtime.get(), attr.mtimensec.get()), (77, 88));
        assert_eq!(guest.getattr(file).unwrap(), attr);

        let statx = wire::StatxIn::default();
        let room = size_of::<wire::StatxOut>();
        let answer = guest.call(Opcode::Statx, file, statx.as_bytes(), room);
        let stat = answer.get::<wire::StatxOut>().unwrap().stat;
        assert_eq!((stat.ino.get(), stat.size.get()), (file.0, 5000));
        let room = size_of::<wire::StatfsOut>();
        let stats: wire::StatfsOut = guest.call(Opcode::Statfs, ROOT, &[], room).get().unwrap();
        assert_eq!((stats.bsize.get(), stats.namelen.get()), (4096, 255));
    });
}

#[test]
fn data_are_read_as_they_were_written() {
    each_cut(|guest| {
        let (file, handle) = guest.create(ROOT, b"file").unwrap();
        let data = pattern(3000);
        assert_eq!(guest.write(file, handle, 1234, &data), Ok(3000));
        let mut whole = vec![0; 1234];
        whole.extend_from_slice(&data);
        assert_eq!(guest.read(file, handle, 0, 4234).unwrap(), whole);
        assert_eq!(guest.read(file, handle, 4000, 1000).unwrap(), whole[4000..]);
        assert_eq!(guest.read(file, handle, 4234, 100).unwrap(), []);
        assert_eq!(guest.read(file, handle, 0, 0).unwrap(), []);
        assert_eq!(guest.write(file, handle, 9, &[]), Ok(0));

        let flush = wire::FlushIn {
            fh: handle.into(),
            ..wire::FlushIn::default()
        };
        assert_eq!(
            guest.call(Opcode::Flush, file, flush.as_bytes(), 0).error,
            0
        );
        let fsync = wire::FsyncIn {
            fh: handle.into(),
            ..wire::FsyncIn::default()
        };
        assert_eq!(
            guest.call(Opcode::Fsync, file, fsync.as_bytes(), 0).error,
            0
        );
        let sync = wire::SyncfsIn::default();
        assert_eq!(
            guest.call(Opcode::Syncfs, ROOT, sync.as_bytes(), 0).error,
            0
        );
        let release = wire::ReleaseIn {
            fh: handle.into(),
            ..wire::ReleaseIn::default()
        };
        assert_eq!(
            guest
                .call(Opcode::Release, file, release.as_bytes(), 0)
                .error,
            0
        );
        assert_eq!(guest.read(file, handle, 0, 1), Err(libc::EBADF));
    });
}

#[test]
fn holes_are_punched_found_and_copied() {
    let mut guest = guest();
    let (file, handle) = guest.create(ROOT, b"file").unwrap();
    guest.write(file, handle, 0, &pattern(12288)).unwrap();
    let fallocate = wire::FallocateIn {
        fh: handle.into(),
        offset: 4096.into(),
        length: 4096.into(),
        mode: ((libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE) as u32).into(),
        padding: 0.into(),
    };
    assert_eq!(
        guest
            .call(Opcode::Fallocate, file, fallocate.as_bytes(), 0)
            .error,
        0
    );
    let mut seek = |whence: i32, offset: u64| {
        let lseek = wire::LseekIn {
            fh: handle.into(),
            offset: offset.into(),
            whence: (whence as u32).into(),
            padding: 0.into(),
        };
        let answer = guest.call(Opcode::Lseek, file, lseek.as_bytes(), 8);
        answer.get::<wire::LseekOut>().map(|out| out.offset.get())
    };
    assert_eq!(seek(libc::SEEK_HOLE, 0), Ok(4096));
    assert_eq!(seek(libc::SEEK_DATA, 4096), Ok(8192));
    assert_eq!(seek(libc::SEEK_HOLE, 8192), Ok(12288));
    assert_eq!(seek(libc::SEEK_DATA, 12288), Err(libc::ENXIO));

    let (copy, to) = guest.create(ROOT, b"copy").unwrap();
    let range = wire::CopyFileRangeIn {
        fh_in: handle.into(),
        off_in: 100.into(),
        nodeid_out: copy.0.into(),
        fh_out: to.into(),
        off_out: 50.into(),
        len: 9000.into(),
        flags: 0.into(),
    };
    let answer = guest.call(Opcode::CopyFileRange, file, range.as_bytes(), 8);
    assert_eq!(answer.get::<wire::WriteOut>().unwrap().size.get(), 9000);
    let (from, to) = (
        guest.read(file, handle, 100, 9000).unwrap(),
        guest.read(copy, to, 50, 9000).unwrap(),
    );
    assert_eq!(from, to);
}

#[test]
fn extended_attributes_are_set_listed_and_removed() {
    each_cut(|guest| {
        let (file, _) = guest.create(ROOT, b"file").unwrap();
        let value = pattern(2000);
        let set = wire::SetxattrIn {
            size: (value.len() as u32).into(),
            ..wire::SetxattrIn::default()
        };
        let body = [named(set.as_bytes(), b"user.a"), value.clone()].concat();
        assert_eq!(guest.call(Opcode::Setxattr, file, &body, 0).error, 0);

        let get = |size: u32| wire::GetxattrIn {
            size: size.into(),
            padding: 0.into(),
        };
        let body = named(get(0).as_bytes(), b"user.a");
        let size: wire::GetxattrOut = guest.call(Opcode::Getxattr, file, &body, 8).get().unwrap();
        assert_eq!(size.size.get(), 2000);
        for (room, outcome) in [
            (2000, Ok(value.clone())),
            (4000, Ok(value)),
            (1999, Err(libc::ERANGE)),
        ] {
            let body = named(get(room).as_bytes(), b"user.a");
            let answer = guest.call(Opcode::Getxattr, file, &body, room as usize);
            assert_eq!(answer.ok(), outcome);
        }
        let answer = guest.call(Opcode::Listxattr, file, get(100).as_bytes(), 100);
        assert_eq!(answer.ok().unwrap(), b"user.a\0");
        let body = named(&[], b"user.a");
        assert_eq!(guest.call(Opcode::Removexattr, file, &body, 0).error, 0);
        assert_eq!(
            guest.call(Opcode::Removexattr, file, &body, 0).error,
            libc::ENODATA
        );
    });
}

#[test]
fn a_directory_is_listed_in_parts_of_any_size() {
    each_cut(|guest| {
        let dir = guest.mkdir(ROOT, b"dir").unwrap();
        let names: Vec<String> = (0..60).map(|i| format!("name-{i}")).collect();
        for name in &names {
            guest.create(dir, name.as_bytes()).unwrap();
        }
        let handle = guest.open(Opcode::Opendir, dir, 0).unwrap();
        for (opcode, size) in [(Opcode::Readdir, 300), (Opcode::Readdirplus, 4096)] {
            let (mut found, mut cookie) = (Vec::new(), 0);
            loop {
                let part = guest.list(opcode, dir, handle, cookie, size).unwrap();
                let Some((_, _, last)) = part.last() else {
                    break;
                };
                cookie = *last;
                found.extend(
                    part.into_iter()
                        .map(|(name, ..)| String::from_utf8(name).unwrap()),
                );
            }
            assert_eq!(found[..2], [".", ".."]);
            assert_eq!(found[2..], names);
        }
        assert_eq!(
            guest.list(Opcode::Readdirplus, dir, handle, 0, 16),
            Err(libc::EINVAL)
        );
    });
}

#[test]
fn forgets_and_interrupts_have_no_reply() {
    let mut guest = guest();
    let (file, handle) = guest.create(ROOT, b"file").unwrap();
    let inodes = guest.device.filesystem().inodes();
    assert_eq!(
        guest
            .call(Opcode::Unlink, ROOT, &named(&[], b"file"), 0)
            .error,
        0
    );
    let release = wire::ReleaseIn {
        fh: handle.into(),
        ..wire::ReleaseIn::default()
    };
    guest.call(Opcode::Release, file, release.as_bytes(), 0);
    assert_eq!(guest.device.filesystem().inodes(), inodes);
    let interrupt = wire::InterruptIn { unique: 2.into() };
    let one = wire::ForgetOne {
        nodeid: file.0.into(),
        nlookup: 1.into(),
    };
    let batch = wire::BatchForgetIn {
        count: 1.into(),
        dummy: 0.into(),
    };
    let batch = [batch.as_bytes(), one.as_bytes()].concat();
    for (opcode, body, room) in [
        (Opcode::Interrupt, interrupt.as_bytes(), 0),
        (Opcode::Interrupt, interrupt.as_bytes(), 100),
        (Opcode::BatchForget, &batch, 0),
        (Opcode::Forget, 7u64.as_bytes(), 100),
    ] {
        let bytes = guest.request(opcode.number(), ROOT, body);
        // On the hiprio queue, as kernels do.
        assert_eq!(guest.send(0, &bytes, room, Cut::Kernel), None);
    }
    assert_eq!(guest.getattr(file), Err(libc::ESTALE));
    assert_eq!(guest.device.filesystem().inodes(), inodes - 1);
    let hiprio = guest.device.queue_counters(0).unwrap();
    assert_eq!(hiprio.finished(OpClass::Forget), 2);
    assert_eq!(hiprio.finished(OpClass::Other), 2);
    assert_eq!(hiprio.refused, 0);
}

#[test]
fn what_is_not_served_is_answered_enosys() {
    let mut guest = guest();
    let (file, handle) = guest.create(ROOT, b"file").unwrap();
    let poll = wire::PollIn {
        fh: handle.into(),
        ..wire::PollIn::default()
    };
    let lock = wire::LkIn {
        fh: handle.into(),
        ..wire::LkIn::default()
    };
    let ioctl = wire::IoctlIn::default();
    let access = wire::AccessIn::default();
    for (opcode, body) in [
        (Opcode::Poll, poll.as_bytes()),
        (Opcode::Setlk, lock.as_bytes()),
        (Opcode::Ioctl, ioctl.as_bytes()),
        // This one the filesystem in memory does not serve.
        (Opcode::Access, access.as_bytes()),
    ] {
        assert_eq!(guest.call(opcode, file, body, 100).error, libc::ENOSYS);
    }
    for opcode in [37, 48, 53, 4096, u32::MAX] {
        let bytes = guest.request(opcode, file, &[1, 2, 3]);
        let answer = guest.send(1, &bytes, 100, Cut::Kernel).unwrap();
        assert_eq!((answer.error, answer.used), (libc::ENOSYS, 16));
    }
}

#[test]
fn counters_tell_classes_queues_and_bytes_apart() {
    let mut guest = guest();
    let (file, handle) = guest.create(ROOT, b"file").unwrap();
    guest.write(file, handle, 0, &pattern(5000)).unwrap();
    guest.read(file, handle, 0, 4000).unwrap();
    assert_eq!(guest.read(file, 99, 0, 4000), Err(libc::EBADF));
    let request = guest.request(Opcode::Statfs.number(), ROOT, &[]);
    guest.send(2, &request, 96, Cut::Kernel).unwrap();
    let counters = guest.device.queue_counters(1).unwrap();
    assert_eq!((counters.read_bytes, counters.written_bytes), (4000, 5000));
    assert_eq!(
        (
            counters.finished(OpClass::Read),
            counters.failed(OpClass::Read)
        ),
        (2, 1)
    );
    assert_eq!(counters.finished(OpClass::Make), 1);
    assert_eq!(counters.finished(OpClass::Attributes), 0);
    let all = guest.device.counters();
    assert_eq!(all.finished(OpClass::Attributes), 1);
    assert!(guest.device.queue_counters(3).is_none());
    let finished: u64 = OpClass::ALL.iter().map(|class| all.finished(*class)).sum();
    assert_eq!(finished, 6, "with INIT");
}

#[test]
fn each_class_of_operations_has_its_own_histogram() {
    let mut guest = guest();
    let (file, handle) = guest.create(ROOT, b"file").unwrap();
    for _ in 0..3 {
        guest.write(file, handle, 0, &pattern(5000)).unwrap();
    }
    guest.read(file, handle, 0, 4000).unwrap();
    // An error number is an answer, too.
    assert_eq!(guest.read(file, 99, 0, 4000), Err(libc::EBADF));
    let request = guest.request(Opcode::Syncfs.number(), ROOT, &[0; 8]);
    guest.send(1, &request, 16, Cut::Kernel).unwrap();
    // INIT and what is malformed are of no class.
    let request = guest.request(Opcode::Read.number(), ROOT, &[]);
    guest.send(1, &request, 96, Cut::Kernel).unwrap();
    guest.stop_queues();
    let counts = LatencyClass::ALL.map(|class| {
        let latencies = guest.device.latencies(class);
        latencies.buckets().map(|bucket| bucket.count).sum::<u64>()
    });
    assert_eq!(counts, [2, 3, 1, 1], "read, write, sync, metadata");
}
