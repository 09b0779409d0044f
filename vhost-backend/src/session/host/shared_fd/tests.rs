use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, OFlags, fcntl_getfl, memfd_create};

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
