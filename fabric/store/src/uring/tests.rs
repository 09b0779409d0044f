use std::fs::File;
use std::io::Write as _;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::*;

fn iov(bytes: &mut [u8]) -> libc::iovec {
    libc::iovec {
        iov_base: bytes.as_mut_ptr().cast(),
        iov_len: bytes.len(),
    }
}

fn vecs(list: &[libc::iovec]) -> IoVecs {
    IoVecs {
        ptr: list.as_ptr(),
        len: list.len() as u32,
    }
}

fn finish(uring: &mut Uring) -> Vec<Finished> {
    let mut all = Vec::new();
    uring.kick();
    while uring.in_flight() > 0 {
        uring.wait(Duration::from_secs(1)).unwrap();
        uring.reap(|f| all.push(f));
    }
    all.sort_by_key(|f| f.id);
    all
}

fn file(content: &[u8]) -> File {
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(content).unwrap();
    file
}

#[test]
fn writes_reads_flushes_and_discards_are_executed_and_named() {
    let file = file(&[1; 16384]);
    let mut uring = Uring::new(&[file.as_fd()]).unwrap();
    let (mut a, mut b, mut back) = ([2u8; 4096], [3u8; 4096], [0u8; 4096]);
    let write = [iov(&mut a), iov(&mut b)];
    let read = [iov(&mut back)];
    let actions = [
        DeviceAction::Write {
            id: IoId(1),
            offset: 4096,
            iovecs: vecs(&write),
        },
        DeviceAction::Flush { id: IoId(2) },
        DeviceAction::Read {
            id: IoId(3),
            offset: 0,
            iovecs: vecs(&read),
        },
        DeviceAction::Discard {
            id: IoId(4),
            offset: 12288,
            len: 4096,
        },
    ];
    for (owner, action) in actions.iter().enumerate() {
        // SAFETY: the buffers outlive `finish`.
        unsafe { uring.start(owner as u32, 0, action) };
    }
    let done = finish(&mut uring);
    let names: Vec<_> = done.iter().map(|f| (f.owner, f.id.0, f.result)).collect();
    assert_eq!(
        names,
        [
            (0, 1, Ok(())),
            (1, 2, Ok(())),
            (2, 3, Ok(())),
            (3, 4, Ok(()))
        ]
    );
    assert_eq!(back, [1; 4096]);
    let mut all = [9u8; 16384];
    file.read_exact_at(&mut all, 0).unwrap();
    assert!(all[4096..8192].iter().all(|&x| x == 2) && all[8192..12288].iter().all(|&x| x == 3));
    assert!(
        all[12288..].iter().all(|&x| x == 0),
        "the hole reads as zeroes"
    );
}

#[test]
fn registered_buffers_carry_the_same_bytes() {
    let file = file(&[0; 8192]);
    let mut uring = Uring::new(&[file.as_fd()]).unwrap();
    let mut arena = vec![5u8; 8192];
    let range = BufferRange {
        ptr: arena.as_mut_ptr(),
        len: arena.len(),
    };
    // SAFETY: the arena outlives the ring's use.
    assert!(unsafe { uring.register_buffers(&[range]) });
    let list = [iov(&mut arena[4096..])];
    assert_eq!(uring.registered(list[0].iov_base.cast(), 4096), Some(0));
    assert_eq!(uring.registered(list[0].iov_base.cast(), 4097), None);
    let write = DeviceAction::Write {
        id: IoId(1),
        offset: 0,
        iovecs: vecs(&list),
    };
    // SAFETY: as above.
    unsafe { uring.start(0, 0, &write) };
    assert_eq!(finish(&mut uring)[0].result, Ok(()));
    let mut back = [0u8; 4096];
    file.read_exact_at(&mut back, 0).unwrap();
    assert_eq!(back, [5; 4096]);
}

#[test]
fn errors_are_errnos_and_the_end_of_the_device_is_one() {
    let file = file(&[0; 4096]);
    let read_only = File::open(format!("/proc/self/fd/{}", file.as_raw_fd())).unwrap();
    let mut uring = Uring::new(&[read_only.as_fd()]).unwrap();
    let mut buf = [0u8; 8192];
    let list = [iov(&mut buf)];
    let write = DeviceAction::Write {
        id: IoId(1),
        offset: 0,
        iovecs: vecs(&list),
    };
    let beyond = DeviceAction::Read {
        id: IoId(2),
        offset: 0,
        iovecs: vecs(&list),
    };
    // SAFETY: the buffer outlives `finish`.
    unsafe {
        uring.start(0, 0, &write);
        uring.start(0, 0, &beyond);
    }
    let results: Vec<_> = finish(&mut uring).iter().map(|f| f.result).collect();
    assert_eq!(results, [Err(libc::EBADF), Err(libc::EIO)]);
}

#[test]
fn more_elements_than_the_kernel_takes_at_once_are_transferred() {
    let file = file(&[]);
    let mut uring = Uring::new(&[file.as_fd()]).unwrap();
    let mut bytes: Vec<u8> = (0..2500u32).flat_map(|i| [(i % 251) as u8; 16]).collect();
    let expected = bytes.clone();
    let list: Vec<_> = bytes.chunks_mut(16).map(iov).collect();
    let write = DeviceAction::Write {
        id: IoId(1),
        offset: 0,
        iovecs: vecs(&list),
    };
    // SAFETY: the buffers outlive `finish`.
    unsafe { uring.start(0, 0, &write) };
    assert_eq!(finish(&mut uring)[0].result, Ok(()));
    let mut back = vec![0u8; expected.len()];
    file.read_exact_at(&mut back, 0).unwrap();
    assert!(back == expected);
}

#[test]
fn short_transfers_continue_inside_an_element() {
    let mut bytes = [0u8; 100];
    let (a, b) = bytes.split_at_mut(40);
    let list = [iov(a), iov(b)];
    let mut request = KernelRequest {
        owner: 0,
        id: IoId(1),
        kind: Kind::Read,
        device: 0,
        offset: 1000,
        len: 0,
        iovecs: vecs(&list),
        at: 0,
        skip: 0,
        attempts: 0,
    };
    assert_eq!(request.progress(30), None);
    assert_eq!((request.at, request.skip, request.offset), (0, 30, 1030));
    assert_eq!(request.progress(20), None);
    assert_eq!((request.at, request.skip, request.offset), (1, 10, 1050));
    assert_eq!(request.progress(-libc::EINTR), None);
    assert_eq!(request.progress(50), Some(Ok(())));
}

#[test]
fn a_ring_made_on_one_thread_works_on_another() {
    let file = file(&[4; 4096]);
    let mut uring = Uring::new(&[file.as_fd()]).unwrap();
    let result = std::thread::spawn(move || {
        let mut buf = [0u8; 4096];
        let list = [iov(&mut buf)];
        let read = DeviceAction::Read {
            id: IoId(1),
            offset: 0,
            iovecs: vecs(&list),
        };
        // SAFETY: the buffer outlives `finish`.
        unsafe { uring.start(0, 0, &read) };
        let result = finish(&mut uring)[0].result;
        assert_eq!(buf, [4; 4096]);
        result
    });
    assert_eq!(result.join().unwrap(), Ok(()));
}

#[test]
fn all_slots_in_use_leave_no_room_and_all_finish() {
    let file = file(&[7; 4096]);
    let mut uring = Uring::new(&[file.as_fd()]).unwrap();
    let mut bufs = vec![[0u8; 512]; DEPTH as usize];
    let lists: Vec<_> = bufs.iter_mut().map(|b| [iov(b)]).collect();
    for (n, list) in lists.iter().enumerate() {
        let read = DeviceAction::Read {
            id: IoId(n as u64),
            offset: 512,
            iovecs: vecs(list),
        };
        // SAFETY: the buffers outlive `finish`.
        unsafe { uring.start(0, 0, &read) };
    }
    assert_eq!(uring.room(), 0);
    let done = finish(&mut uring);
    assert!(done.len() == DEPTH as usize && done.iter().all(|f| f.result == Ok(())));
    assert_eq!(uring.room(), DEPTH as usize);
    assert!(bufs.iter().all(|b| *b == [7; 512]));
}

#[test]
fn sleeper_on_the_ring_wakes_for_kernel_worker_completions() {
    let file = file(&[0; 4096]);
    let mut uring = Uring::new(&[file.as_fd()]).unwrap();
    for n in 0..20 {
        // A flush runs on a worker of the kernel, so it completes after the submission returned.
        let flush = DeviceAction::Flush { id: IoId(n) };
        // SAFETY: a flush names no memory.
        unsafe { uring.start(0, 0, &flush) };
        uring.kick();
        let mut finished = 0;
        while finished == 0 {
            // SAFETY: the ring is open.
            let fd = unsafe { BorrowedFd::borrow_raw(uring.as_raw_fd()) };
            let mut fds = [PollFd::new(&fd, PollFlags::IN)];
            let hour = Timespec {
                tv_sec: 3600,
                tv_nsec: 0,
            };
            assert_eq!(
                poll(&mut fds, Some(&hour)),
                Ok(1),
                "slept through the completion"
            );
            uring.reap(|_| finished += 1);
        }
    }
}
