//! The device in a whole vhost-user session, as a front end drives it.

use std::os::fd::{AsRawFd, FromRawFd, IntoRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use fuse_codec::{Opcode, wire};
use vhost::vhost_user::message::{VhostUserHeaderFlag, VhostUserProtocolFeatures as Features};
use vhost::vhost_user::{Frontend, VhostUserFrontend};
use vhost::{VhostBackend, VhostUserMemoryRegionInfo, VringConfigData};
use vhost_backend::data_thread::{ThreadOptions, Threads};
use vhost_backend::memory::GuestAddr;
use vhost_backend::memory::budget::MemoryPolicy;
use vhost_backend::session::Attachment;
use vhost_backend::session::message::F_PROTOCOL_FEATURES;
use vhost_backend::session::socket::{Endpoint, Listener, SocketOptions};
use vhost_backend::testing::{FakeQueue, GUEST_BASE, QueueOptions, USER_BASE};
use vmm_sys_util::eventfd::EventFd;
use zerocopy::IntoBytes;

use super::{ROOT, eventually, guest_with};
use crate::memory_fs::{MemoryFilesystem, MemoryService};
use crate::testing::{Cut, options};
use crate::{FsDevice, FsEngine};

const RINGS: u64 = 3;

fn event_fd(fd: &OwnedFd) -> EventFd {
    let copy = fd.try_clone().unwrap().into_raw_fd();
    // SAFETY: the descriptor is a fresh copy that nobody else owns.
    unsafe { EventFd::from_raw_fd(copy) }
}

fn user(at: GuestAddr) -> u64 {
    at.0 - GUEST_BASE + USER_BASE
}

fn start_ring(vhost: &mut Frontend, index: usize, queue: &FakeQueue) {
    let config = queue.config(index as u16);
    let addresses = VringConfigData {
        queue_max_size: config.size,
        queue_size: config.size,
        flags: 0,
        desc_table_addr: user(queue.desc),
        used_ring_addr: user(queue.used),
        avail_ring_addr: user(queue.avail),
        log_addr: None,
    };
    vhost.set_vring_num(index, config.size).unwrap();
    vhost.set_vring_base(index, 0).unwrap();
    vhost.set_vring_addr(index, &addresses).unwrap();
    vhost.set_vring_kick(index, &event_fd(&queue.kick)).unwrap();
    vhost.set_vring_call(index, &event_fd(&queue.call)).unwrap();
    vhost.set_vring_enable(index, true).unwrap();
}

/// Negotiates as QEMU 10 does.
fn negotiate(vhost: &mut Frontend) {
    vhost.set_owner().unwrap();
    let features = vhost.get_features().unwrap();
    assert_eq!(features & 1, 0, "no notification queue");
    let ring_features = QueueOptions::default().features;
    vhost
        .set_features(ring_features | 1 << 32 | F_PROTOCOL_FEATURES)
        .unwrap();
    let offered = vhost.get_protocol_features().unwrap();
    assert!(!offered.intersects(Features::CONFIG | Features::INFLIGHT_SHMFD));
    let wanted = Features::MQ
        | Features::LOG_SHMFD
        | Features::REPLY_ACK
        | Features::BACKEND_REQ
        | Features::RESET_DEVICE
        | Features::CONFIGURE_MEM_SLOTS;
    vhost.set_protocol_features(offered & wanted).unwrap();
    vhost.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
    assert_eq!(vhost.get_queue_num().unwrap(), RINGS);
}

#[test]
fn a_front_end_mounts_resets_and_mounts_again() {
    let device = FsDevice::new(MemoryFilesystem::new(), options(2, false)).unwrap();
    let threads = ThreadOptions {
        threads: 2,
        ..ThreadOptions::default()
    };
    let threads = Threads::start(&threads, |_| MemoryService::new().map(FsEngine::new)).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("fs.sock");
    let listener = Listener::bind(&SocketOptions::new(&path)).unwrap();
    let memory = MemoryPolicy::alone();
    let endpoint = Endpoint::Listening(listener);
    let attachment = Attachment::start(endpoint, Arc::clone(&device), threads, memory).unwrap();

    // Its rings are not started: the guest's requests go to the device behind the socket.
    let (mut guest, _) = guest_with(false, QueueOptions::default());
    guest.stop_queues();
    let stream = UnixStream::connect(&path).unwrap();
    let mut vhost = Frontend::from_stream(stream, RINGS);
    negotiate(&mut vhost);
    let region = VhostUserMemoryRegionInfo {
        guest_phys_addr: GUEST_BASE,
        memory_size: guest.guest.size(),
        userspace_addr: USER_BASE,
        mmap_offset: 0,
        mmap_handle: guest.guest.file().as_raw_fd(),
    };
    vhost.set_mem_table(&[region]).unwrap();
    for round in 0..2 {
        let ring = || FakeQueue::new(&guest.guest, QueueOptions::default());
        guest.queues = (0..RINGS).map(|_| ring()).collect();
        for (index, queue) in guest.queues.iter().enumerate() {
            start_ring(&mut vhost, index, queue);
        }
        assert_eq!(guest.getattr(ROOT), Err(libc::EIO));
        guest.init().unwrap();
        assert!(device.agreed().is_some());
        guest
            .mkdir(ROOT, format!("dir-{round}").as_bytes())
            .unwrap();
        let bytes = guest.request(Opcode::Forget.number(), ROOT, 1u64.as_bytes());
        assert_eq!(guest.send(0, &bytes, 0, Cut::Kernel), None);
        let statfs = guest.request(Opcode::Statfs.number(), ROOT, &[]);
        let room = 16 + size_of::<wire::StatfsOut>();
        assert_eq!(
            guest.send(2, &statfs, room, Cut::Indirect).unwrap().error,
            0
        );
        vhost.reset_device().unwrap();
        assert!(device.agreed().is_none());
    }
    assert_eq!(device.filesystem().inodes(), 3);
    drop(vhost);
    eventually("the front end is gone", || !attachment.state().connected);
    attachment.close();
}
