use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, OFlags, SealFlags, fcntl_add_seals, fcntl_getfl, memfd_create};

use super::*;

fn file(path: &str) -> OwnedFd {
    std::fs::File::open(path).unwrap().into()
}

#[test]
fn memory_comes_from_memory_files_only() {
    let memfd = memfd_create("m", MemfdFlags::CLOEXEC).unwrap();
    assert_eq!(check_memory(&memfd), Ok(()));
    for path in ["/proc/self/maps", "/dev/zero", "/"] {
        assert!(
            matches!(check_memory(&file(path)), Err(FdError::NotMemory { .. })),
            "{path}"
        );
    }
    let event = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
    assert!(matches!(
        check_memory(&event),
        Err(FdError::NotMemory { .. })
    ));
}

#[test]
fn signals_go_to_event_descriptors_and_never_block() {
    let event = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
    let (_, pipe) = rustix::pipe::pipe().unwrap();
    for fd in [&event, &pipe] {
        assert_eq!(check_signal(fd), Ok(()));
        assert!(fcntl_getfl(fd).unwrap().contains(OFlags::NONBLOCK));
    }
    let memfd = memfd_create("m", MemfdFlags::CLOEXEC).unwrap();
    for fd in [memfd, file("/dev/zero"), file("/")] {
        assert_eq!(check_signal(&fd), Err(FdError::NotSignal));
    }
}

#[test]
fn kicks_come_by_eventfds_only() {
    let event = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
    assert_eq!(check_kick(&event), Ok(()));
    let (reader, writer) = rustix::pipe::pipe().unwrap();
    let (socket, _) = std::os::unix::net::UnixStream::pair().unwrap();
    for fd in [reader, writer, socket.into(), file("/dev/zero")] {
        assert_eq!(check_kick(&fd), Err(FdError::NotEvent));
    }
}

#[test]
fn memory_that_can_be_shortened_is_told() {
    let why = |fd: &OwnedFd| why_unsealed(fd).unwrap_or_default();
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let memfd = memfd_create("m", flags).unwrap();
    assert!(why(&memfd).contains("without F_SEAL_SHRINK"));
    fcntl_add_seals(&memfd, SealFlags::SHRINK).unwrap();
    assert_eq!(why_unsealed(&memfd), None);
    let never = memfd_create("m", MemfdFlags::CLOEXEC).unwrap();
    assert!(why(&never).contains("any more"));
    let disk = tempfile::tempfile_in(env!("CARGO_MANIFEST_DIR")).unwrap();
    assert!(why(&disk.into()).contains("cannot be sealed"));
}
