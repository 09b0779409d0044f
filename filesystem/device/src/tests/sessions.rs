//! INIT, DESTROY, reset, and read-only attachments.

use std::sync::Arc;

use fuse_codec::{Features, NodeId, Opcode, wire};
use vhost_backend::device::Device;
use vhost_backend::testing::QueueOptions;
use zerocopy::IntoBytes;

use super::{Guest, ROOT, guest, guest_with, pattern};
use crate::IO_BYTES_MAX;
use crate::memory_fs::MemoryService;
use crate::testing::{Cut, FsGuest, named, options};

#[test]
fn init_agrees_on_requests_of_a_mebibyte() {
    let (mut guest, _) = guest_with(false, QueueOptions::default());
    assert!(guest.device.agreed().is_none());
    let out = guest.init().unwrap();
    assert_eq!(
        (out.major.get(), out.minor.get()),
        (wire::VERSION_MAJOR, wire::VERSION_MINOR)
    );
    assert_eq!(
        (out.max_write.get(), out.max_pages.get()),
        (IO_BYTES_MAX, 256)
    );
    let agreed = guest.device.agreed().unwrap();
    assert!(!agreed.features().contains(Features::WRITEBACK_CACHE));
    assert!(agreed.features().contains(Features::EXPORT_SUPPORT));
    assert!(!agreed.zero_message_open());
}

#[test]
fn a_kernel_of_another_version_is_told_so() {
    let (mut guest, _) = guest_with(false, QueueOptions::default());
    let mut init = |major: u32, minor: u32| {
        let body = wire::InitIn {
            major: major.into(),
            minor: minor.into(),
            ..wire::InitIn::default()
        };
        guest.call(
            Opcode::Init,
            NodeId(0),
            body.as_bytes(),
            size_of::<wire::InitOut>(),
        )
    };
    assert_eq!(init(7, 30).error, libc::EPROTO);
    let out: wire::InitOut = init(8, 0).get().unwrap();
    assert_eq!((out.major.get(), out.max_write.get()), (7, 0));
    assert!(guest.device.agreed().is_none());
}

#[test]
fn nothing_is_served_before_init_and_after_destroy() {
    let (mut guest, filesystem) = guest_with(false, QueueOptions::default());
    assert_eq!(guest.getattr(ROOT), Err(libc::EIO));
    let forget = guest.request(Opcode::Forget.number(), ROOT, 1u64.as_bytes());
    assert_eq!(guest.send(0, &forget, 0, Cut::Kernel), None);
    guest.init().unwrap();
    guest.create(ROOT, b"file").unwrap();
    assert_eq!(filesystem.open_handles(), 1);
    // On any queue, and for all of them.
    let destroy = guest.request(Opcode::Destroy.number(), NodeId(0), &[]);
    assert_eq!(guest.send(2, &destroy, 16, Cut::Kernel).unwrap().error, 0);
    assert_eq!(filesystem.open_handles(), 0);
    assert_eq!(guest.getattr(ROOT), Err(libc::EIO));
    guest.init().unwrap();
    assert!(guest.getattr(ROOT).is_ok());
}

#[test]
fn a_reset_ends_the_session_and_the_next_driver_begins_anew() {
    for rings in [QueueOptions::default(), QueueOptions::default().packed()] {
        let (mut guest, filesystem) = guest_with(false, rings);
        guest.init().unwrap();
        let (file, handle) = guest.create(ROOT, b"file").unwrap();
        guest.stop_queues();
        guest.device.reset();
        assert!(guest.device.agreed().is_none());
        assert_eq!(filesystem.open_handles(), 0);
        guest.start_queues(QueueOptions {
            size: 1024,
            ..rings
        });
        assert_eq!(guest.getattr(ROOT), Err(libc::EIO));
        guest.init().unwrap();
        assert_eq!(guest.read(file, handle, 0, 1), Err(libc::EBADF));
        assert_eq!(guest.lookup(ROOT, b"file").unwrap().nodeid.get(), file.0);
    }
}

/// QEMU before 8.2 does not tell of a reset.
#[test]
fn init_without_a_reset_ends_the_session_before() {
    let mut guest = guest();
    let (file, handle) = guest.create(ROOT, b"file").unwrap();
    guest.init().unwrap();
    assert_eq!(guest.read(file, handle, 0, 1), Err(libc::EBADF));
    assert_eq!(guest.device.filesystem().open_handles(), 0);
}

#[test]
fn what_was_agreed_holds_on_every_queue() {
    let mut guest = guest();
    for queue in [0, 1, 2, 1] {
        let bytes = guest.request(Opcode::Statfs.number(), ROOT, &[]);
        assert_eq!(guest.send(queue, &bytes, 96, Cut::Kernel).unwrap().error, 0);
    }
}

/// A file that a writer made, on a device that may not change it.
fn read_only() -> (Guest, NodeId) {
    let (mut writer, filesystem) = guest_with(false, QueueOptions::default());
    writer.init().unwrap();
    let (file, handle) = writer.create(ROOT, b"file").unwrap();
    writer.write(file, handle, 0, &pattern(1000)).unwrap();
    let make = |_| MemoryService::new();
    let rings = QueueOptions::default();
    let mut guest = FsGuest::new(&Arc::clone(&filesystem), options(1, true), rings, make);
    guest.init().unwrap();
    (guest, file)
}

#[test]
fn a_read_only_attachment_is_read_without_open() {
    let (mut guest, file) = read_only();
    assert!(guest.device.agreed().unwrap().zero_message_open());
    assert_eq!(
        guest.open(Opcode::Open, file, libc::O_RDONLY),
        Err(libc::ENOSYS)
    );
    assert_eq!(
        guest.open(Opcode::Opendir, ROOT, libc::O_RDONLY),
        Err(libc::ENOSYS)
    );
    let flush = wire::FlushIn::default();
    let flushed = guest.call(Opcode::Flush, file, flush.as_bytes(), 0);
    assert_eq!(flushed.error, libc::ENOSYS);
    assert_eq!(
        guest.read(file, 0, 100, 50).unwrap(),
        pattern(1000)[100..150]
    );
    let names = guest.list(Opcode::Readdirplus, ROOT, 0, 0, 4096).unwrap();
    assert_eq!(names.len(), 3);
    assert_eq!(guest.read(file, 7, 0, 1), Err(libc::EBADF));
}

#[test]
fn nothing_changes_through_a_read_only_attachment() {
    let (mut guest, file) = read_only();
    let before = guest.getattr(file).unwrap();
    assert_eq!(guest.mkdir(ROOT, b"dir"), Err(libc::EROFS));
    assert_eq!(guest.create(ROOT, b"new"), Err(libc::EROFS));
    assert_eq!(guest.write(file, 0, 0, b"data"), Err(libc::EROFS));
    for flags in [libc::O_WRONLY, libc::O_RDWR, libc::O_TRUNC] {
        assert_eq!(guest.open(Opcode::Open, file, flags), Err(libc::EROFS));
    }
    let name = named(&[], b"file");
    let setattr = wire::SetattrIn {
        valid: wire::fattr::SIZE.into(),
        ..wire::SetattrIn::default()
    };
    let symlink = [named(&[], b"link"), named(&[], b"target")].concat();
    let mknod = wire::MknodIn {
        mode: libc::S_IFIFO.into(),
        ..wire::MknodIn::default()
    };
    let mknod = named(mknod.as_bytes(), b"fifo");
    let link = wire::LinkIn {
        oldnodeid: file.0.into(),
    };
    let link = named(link.as_bytes(), b"link");
    let rename = wire::RenameIn {
        newdir: ROOT.0.into(),
    };
    let rename = [named(rename.as_bytes(), b"file"), named(&[], b"other")].concat();
    let setxattr = named(wire::SetxattrIn::default().as_bytes(), b"user.a");
    let fallocate = wire::FallocateIn {
        length: 1.into(),
        ..wire::FallocateIn::default()
    };
    let copy = wire::CopyFileRangeIn {
        nodeid_out: file.0.into(),
        len: 1.into(),
        ..wire::CopyFileRangeIn::default()
    };
    for (opcode, node, body) in [
        (Opcode::Unlink, ROOT, name.as_slice()),
        (Opcode::Rmdir, ROOT, &name),
        (Opcode::Removexattr, file, &name),
        (Opcode::Setattr, file, setattr.as_bytes()),
        (Opcode::Symlink, ROOT, &symlink),
        (Opcode::Mknod, ROOT, &mknod),
        (Opcode::Link, ROOT, &link),
        (Opcode::Rename, ROOT, &rename),
        (Opcode::Setxattr, file, &setxattr),
        (Opcode::Fallocate, file, fallocate.as_bytes()),
        (Opcode::CopyFileRange, file, copy.as_bytes()),
    ] {
        assert_eq!(
            guest.call(opcode, node, body, 200).error,
            libc::EROFS,
            "{opcode:?}"
        );
    }
    assert_eq!(guest.getattr(file).unwrap(), before);
}
