use super::*;

pub(super) fn bytes_of(request: &Request) -> Vec<u8> {
    let Command::Write { buffers, .. } = request.command else {
        panic!("a write was sent")
    };
    // SAFETY: the list and its memory are there until the request is done.
    let list = unsafe { std::slice::from_raw_parts(buffers.ptr, buffers.len as usize) };
    let of = |iov: &libc::iovec| {
        // SAFETY: as above.
        unsafe { std::slice::from_raw_parts(iov.iov_base.cast::<u8>(), iov.iov_len) }.to_vec()
    };
    list.iter().flat_map(of).collect()
}

pub(super) fn write_memory(bench: &mut Bench, tag: u64, memory: &mut [u8]) {
    let half = memory.len() / 2;
    let (first, second) = memory.split_at_mut(half);
    let buffers = [first, second].map(|part| libc::iovec {
        iov_base: part.as_mut_ptr().cast(),
        iov_len: part.len(),
    });
    let request = io::Request {
        tag: Tag(tag),
        op: Op::Write { fua: false },
        offset: 0,
        len: 2 * half as u64,
        buffers: &buffers,
    };
    let outcome = bench
        .client
        .submit(&bench.volume, &request, &mut bench.script);
    assert_eq!(outcome, Submit::Pending);
}

#[test]
fn buffer_changed_while_sending_is_resent_to_all_as_a_copy() {
    let mut bench = Bench::new(set(1, 1, &[IN, IN, IN]));
    let mut memory = vec![1; 8192];
    write_memory(&mut bench, 1, &mut memory);
    bench.answer(0, Ok(()));
    memory.fill(2);
    bench.answer(1, Err(Refusal::Mismatch));
    assert_eq!(
        bench.nodes(),
        [1, 2, 3],
        "the third may be reading the buffer"
    );
    bench.answer(2, Err(Refusal::Mismatch));
    assert_eq!(bench.nodes()[3..], [1, 2, 3]);
    let version = |nth: usize| {
        (
            bench.script.sent[nth].1.generation,
            bench.script.sent[nth].1.sequence,
        )
    };
    assert_eq!(version(0), version(3), "it is the same write");
    // Whatever the guest does now.
    memory.fill(3);
    for nth in 3..6 {
        assert!(bytes_of(&bench.script.sent[nth].1) == vec![2; 8192]);
    }
    for nth in 3..6 {
        bench.answer(nth, Ok(()));
    }
    assert_eq!(bench.done[&1], Ok(()));
    assert_eq!(bench.client.poll_action(), None, "no replica has failed");
    bench.assert_idle();
}

#[test]
fn a_write_that_is_sent_once_more_later_is_the_same_everywhere() {
    let mut bench = Bench::new(set(1, 1, &[IN, IN, OUT]));
    let mut memory = vec![1; 4096];
    write_memory(&mut bench, 1, &mut memory);
    bench.answer(0, Ok(()));
    bench.answer(1, Err(Refusal::Unreachable));
    memory.fill(2);
    // The first has what was in the buffer then; whoever comes now would get what is in it now.
    bench.map(set(2, 1, &[IN, OUT, SYNCING]));
    assert_eq!(bench.nodes()[2..], [1, 3]);
    memory.fill(3);
    for nth in 2..4 {
        assert!(bytes_of(&bench.script.sent[nth].1) == vec![2; 4096]);
        assert_eq!(
            bench.script.sent[nth].1.sequence,
            bench.script.sent[0].1.sequence
        );
    }
    bench.answer(2, Ok(()));
    // Now that it is a copy only those who failed are asked again.
    bench.answer(3, Err(Refusal::Behind(Epoch(1))));
    bench.tick();
    assert_eq!(bench.nodes()[4..], [3]);
    bench.answer(4, Ok(()));
    assert_eq!(bench.done[&1], Ok(()));
    bench.assert_idle();
}

#[test]
fn a_write_that_nobody_has_is_sent_again_without_a_copy() {
    let mut bench = Bench::new(set(1, 1, &[IN, IN]));
    let mut memory = vec![1; 4096];
    write_memory(&mut bench, 1, &mut memory);
    bench.answer(0, Err(Refusal::Behind(Epoch(1))));
    bench.answer(1, Err(Refusal::Behind(Epoch(1))));
    memory.fill(2);
    bench.tick();
    assert_eq!(bench.nodes()[2..], [1, 2]);
    memory.fill(3);
    assert!(bytes_of(&bench.script.sent[2].1) == vec![3; 4096]);
    bench.answer(2, Ok(()));
    bench.answer(3, Ok(()));
    assert_eq!(bench.done[&1], Ok(()));
    bench.assert_idle();
}

#[test]
fn a_replica_that_gets_other_bytes_than_a_copy_has_failed() {
    let mut bench = Bench::new(set(1, 1, &[IN, IN]));
    let mut memory = vec![1; 4096];
    write_memory(&mut bench, 1, &mut memory);
    bench.answer(0, Ok(()));
    bench.answer(1, Err(Refusal::Mismatch));
    bench.answer(2, Ok(()));
    bench.answer(3, Err(Refusal::Mismatch));
    assert!(bench.done.is_empty());
    assert_eq!(bench.client.poll_action(), Some(Bench::failed(2, 1)));
    bench.map(set(2, 1, &[IN, OUT]));
    assert_eq!(bench.done[&1], Ok(()));
    bench.assert_idle();
}
