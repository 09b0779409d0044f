use rustix::event::{PollFd, PollFlags, poll};

use super::*;

fn iov(buf: &mut [u8]) -> libc::iovec {
    libc::iovec {
        iov_base: buf.as_mut_ptr().cast(),
        iov_len: buf.len(),
    }
}

fn request<'a>(tag: u64, op: Op, offset: u64, buffers: &'a [libc::iovec]) -> Request<'a> {
    Request {
        tag: Tag(tag),
        op,
        offset,
        len: buffers.iter().map(|b| b.iov_len as u64).sum(),
        buffers,
    }
}

fn wait_readable(engine: &MemEngine) {
    let fd = engine.wait_fd();
    let mut fds = [PollFd::new(&fd, PollFlags::IN)];
    poll(&mut fds, None).unwrap();
}

#[test]
fn written_bytes_are_read_back_from_several_buffers() {
    let volume = MemVolume::new(8192);
    let mut engine = MemEngine::new(Completion::Inline).unwrap();
    let (mut a, mut b) = (vec![1u8; 512], vec![2u8; 1024]);
    let write = [iov(&mut a), iov(&mut b)];
    let fua = Op::Write { fua: true };
    // SAFETY: the buffers outlive the call.
    let outcome = unsafe { engine.submit(&volume, &request(1, fua, 512, &write)) };
    assert_eq!(outcome, Submit::Done(Ok(())));
    let mut back = vec![9u8; 2048];
    let read = [iov(&mut back)];
    // SAFETY: the buffer outlives the call.
    unsafe { engine.submit(&volume, &request(2, Op::Read, 0, &read)) };
    assert!(back[..512].iter().all(|&x| x == 0));
    assert!(back[512..1024].iter().all(|&x| x == 1));
    assert!(back[1024..].iter().all(|&x| x == 2));
    assert_eq!(volume.done(OpKind::Write), 1);
}

#[test]
fn out_of_range_unaligned_and_read_only_are_refused() {
    let volume = MemVolume::new(4096);
    let mut engine = MemEngine::new(Completion::Queued).unwrap();
    let mut submit = |op, offset, len| {
        let request = Request {
            tag: Tag(0),
            op,
            offset,
            len,
            buffers: &[],
        };
        // SAFETY: no buffers.
        unsafe { engine.submit(&volume, &request) }
    };
    let refused = Submit::Done(Err(IoError::OutOfRange));
    assert_eq!(submit(Op::Discard, 4096, 512), refused);
    assert_eq!(submit(Op::Discard, 1, 512), refused);
    assert_eq!(submit(Op::Discard, u64::MAX - 511, 512), refused);
    volume.set_read_only(true);
    let read_only = Submit::Done(Err(IoError::ReadOnly));
    assert_eq!(submit(Op::Discard, 0, 512), read_only);
    assert_eq!(submit(Op::Flush, 0, 0), Submit::Pending);
}

#[test]
fn held_request_completes_after_release_and_wakes_the_sleeper() {
    let volume = MemVolume::new(4096);
    let mut engine = MemEngine::with_limit(Completion::Queued, 1).unwrap();
    volume.hold();
    let flush = request(7, Op::Flush, 0, &[]);
    // SAFETY: no buffers.
    unsafe {
        assert_eq!(engine.submit(&volume, &flush), Submit::Pending);
        assert_eq!(engine.submit(&volume, &flush), Submit::Busy);
    }
    engine.kick();
    assert_eq!(engine.reap(&mut |_, _| panic!("held")), 0);
    assert_eq!(engine.in_flight(), 1);
    volume.release();
    wait_readable(&engine);
    let mut seen = Vec::new();
    assert_eq!(engine.reap(&mut |tag, result| seen.push((tag, result))), 1);
    assert_eq!(seen, [(Tag(7), Ok(()))]);
    assert_eq!(engine.in_flight(), 0);
}

#[test]
fn a_delayed_request_is_reported_once_its_time_has_come() {
    let volume = MemVolume::new(4096);
    let mut engine = MemEngine::new(Completion::Delayed(Duration::from_millis(5))).unwrap();
    volume.fail_next(OpKind::Flush, IoError::Device(5), 1);
    // SAFETY: no buffers.
    unsafe { engine.submit(&volume, &request(1, Op::Flush, 0, &[])) };
    assert_eq!(engine.reap(&mut |_, _| ()), 0, "not kicked yet");
    engine.kick();
    wait_readable(&engine);
    let mut seen = None;
    engine.reap(&mut |_, result| seen = Some(result));
    assert_eq!(seen, Some(Err(IoError::Device(5))));
}
