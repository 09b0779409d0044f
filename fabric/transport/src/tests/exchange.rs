//! Caller and responder joined by a wire that cuts anywhere.

use fabric_types::wire::{FLAG_URGENT, RequestHeader};

use super::*;

/// A responder with a store of one chunk.
struct Replica {
    responder: Responder<Box<[libc::iovec; 1]>>,
    chunk: Vec<u8>,
    place: Box<[libc::iovec; 1]>,
    buffer: Vec<u8>,
    /// Taken over, not answered.
    held: Vec<(u64, u32, Request)>,
}

impl Replica {
    fn new() -> Self {
        let mut buffer = vec![0u8; 4 << 20];
        let place = Box::new([libc::iovec {
            iov_base: buffer.as_mut_ptr().cast(),
            iov_len: buffer.len(),
        }]);
        Self {
            responder: Responder::new(&agreed()),
            chunk: vec![0; 4 << 20],
            place,
            buffer,
            held: Vec::new(),
        }
    }

    fn take(&mut self) -> Result<(), LinkError> {
        let place = IoVecs {
            ptr: self.place.as_ptr(),
            len: 1,
        };
        loop {
            match self.responder.poll()? {
                ReceivedRequest::Nothing => return Ok(()),
                // SAFETY: the buffer lives as long as the responder.
                ReceivedRequest::Begins(_) => unsafe { self.responder.admit(place) },
                ReceivedRequest::Complete { intact } => {
                    let head = self.responder.reader().head();
                    let request = shape::decode(self.responder.header(), place).unwrap();
                    self.responder.begun();
                    assert!(intact);
                    if let Command::Write { offset, len, .. } = request.command {
                        let at = offset as usize;
                        self.chunk[at..at + len as usize]
                            .copy_from_slice(&self.buffer[..len as usize]);
                    }
                    self.held.push((head.pair, cost(&head), request));
                }
            }
        }
    }

    fn answer(&mut self, which: usize) {
        let (pair, cost, request) = self.held.swap_remove(which);
        let reply = Reply {
            id: request.id,
            incarnation: Incarnation(20),
            result: Ok(()),
        };
        let shape = shape_of(&request);
        let mut crcs = Vec::new();
        let offset = match request.command {
            Command::Read { offset, .. } => offset as usize,
            _ => 0,
        };
        let place = Box::new([libc::iovec {
            iov_base: self.chunk.as_mut_ptr().wrapping_add(offset).cast(),
            iov_len: shape.room as usize,
        }]);
        let list = IoVecs {
            ptr: place.as_ptr(),
            len: 1,
        };
        // SAFETY: the chunk lives as long as the responder, the list until it is sent.
        unsafe {
            shape::sums(&list, shape.skip, shape.room, &mut crcs);
            let answer = Answer {
                pair,
                cost: Some(cost),
                payload: Some(list),
                payload_len: shape.room,
                skip: shape.skip,
                crcs: &crcs,
            };
            self.responder.reply(&reply, &answer, place);
        }
    }
}

struct Asking {
    request: Request,
    memory: Vec<u8>,
    _list: Box<[libc::iovec]>,
    answers: u32,
}

fn asking(random: &mut ChaCha8Rng, id: u64, expected: &mut [u8]) -> Asking {
    let offset = random.random_range(0..200u32) * 512;
    let sectors = match random.random_range(0..10) {
        0 => random.random_range(1..400u32),
        _ => random.random_range(1..20),
    };
    let write: bool = random.random();
    let len = (sectors * 512) as usize;
    let mut memory = vec![0u8; len];
    let at = offset as usize;
    if write {
        random.fill(&mut memory[..]);
        expected[at..at + len].copy_from_slice(&memory);
    }
    let mut list = Vec::new();
    let mut from = 0;
    while from < len {
        let piece = random.random_range(1..=(len - from).min(9000));
        list.push(libc::iovec {
            iov_base: memory.as_mut_ptr().wrapping_add(from).cast(),
            iov_len: piece,
        });
        from += piece;
    }
    let list: Box<[_]> = list.into();
    Asking {
        request: request(id, write, offset, &list, len as u32),
        memory,
        _list: list,
        answers: 0,
    }
}

#[test]
fn every_request_is_answered_once_however_the_stream_is_split() {
    for seed in 0..60 {
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        let mut replica = Replica::new();
        let mut caller = Caller::new(&agreed());
        let mut expected = vec![0u8; 4 << 20];
        let mut asked: Vec<Asking> = Vec::new();
        let (mut there, mut back) = (Vec::new(), Vec::new());
        while asked.len() < 60 || caller.in_flight() > 0 {
            // One at a time in the store: order among requests is the client's business, not the wire's.
            if caller.in_flight() == 0 && asked.len() < 60 {
                let one = asking(&mut random, asked.len() as u64, &mut expected);
                let shape = shape_of(&one.request);
                let mut crcs = Vec::new();
                if let Some(list) = shape.payload {
                    // SAFETY: the memory lives in `asked`.
                    unsafe { shape::sums(&list, shape.skip, shape.payload_len, &mut crcs) };
                }
                assert!(caller.has_credit(&shape));
                // SAFETY: as above.
                unsafe { caller.send(&one.request, &shape, &crcs) };
                asked.push(one);
            }
            let most = random.random_range(1..20_000);
            match random.random_range(0..5) {
                0 => there.extend(drain(caller.queue(), most)),
                1 => back.extend(drain(replica.responder.queue(), most)),
                2 => {
                    let given = fill(replica.responder.reader(), &there[..most.min(there.len())]);
                    there.drain(..given);
                    replica.take().unwrap();
                }
                3 => {
                    let most = most.min(back.len()).min(16 << 10);
                    match random.random() {
                        true => {
                            let given = fill(caller.reader(), &back[..most]);
                            back.drain(..given);
                        }
                        false => {
                            caller.reader().push(&back[..most]);
                            back.drain(..most);
                        }
                    }
                    while let Some((reply, _)) = caller.poll().unwrap() {
                        let one = &mut asked[reply.id.0 as usize];
                        assert_eq!(reply.result, Ok(()));
                        one.answers += 1;
                        if let Command::Read { offset, len, .. } = one.request.command {
                            let at = offset as usize;
                            assert_eq!(one.memory, expected[at..at + len as usize]);
                        }
                    }
                }
                _ => {
                    if !replica.held.is_empty() {
                        replica.answer(0);
                    }
                    while replica.responder.next_sent().is_some() {}
                }
            }
        }
        assert!(asked.iter().all(|one| one.answers == 1));
    }
}

/// What a caller sends for one request, and the caller.
fn one_write(memory: &mut [u8], crcs: &[u32]) -> (Caller, Vec<u8>, Box<[libc::iovec; 1]>) {
    let list = Box::new([libc::iovec {
        iov_base: memory.as_mut_ptr().cast(),
        iov_len: memory.len(),
    }]);
    let request = request(1, true, 0, &list[..], memory.len() as u32);
    let mut caller = Caller::new(&agreed());
    // SAFETY: the memory is the test's and outlives the caller.
    unsafe { caller.send(&request, &shape_of(&request), crcs) };
    let bytes = drain(caller.queue(), usize::MAX);
    (caller, bytes, list)
}

#[test]
fn data_that_do_not_match_their_checksums_are_told_apart() {
    let mut memory = vec![1u8; 4096];
    let (_caller, bytes, _list) = one_write(&mut memory, &[0xbad]);
    let mut replica = Replica::new();
    fill(replica.responder.reader(), &bytes);
    assert!(matches!(
        replica.responder.poll(),
        Ok(ReceivedRequest::Begins(_))
    ));
    let place = IoVecs {
        ptr: replica.place.as_ptr(),
        len: 1,
    };
    // SAFETY: the buffer lives as long as the responder.
    unsafe { replica.responder.admit(place) };
    assert!(matches!(
        replica.responder.poll(),
        Ok(ReceivedRequest::Complete { intact: false })
    ));
}

#[test]
fn a_read_whose_data_were_changed_on_the_way_is_a_mismatch() {
    let mut memory = vec![0u8; 4096];
    let list = [libc::iovec {
        iov_base: memory.as_mut_ptr().cast(),
        iov_len: 4096,
    }];
    let request = request(1, false, 0, &list, 4096);
    let mut caller = Caller::new(&agreed());
    // SAFETY: the memory outlives the caller.
    unsafe { caller.send(&request, &shape_of(&request), &[]) };
    let mut replica = Replica::new();
    fill(
        replica.responder.reader(),
        &drain(caller.queue(), usize::MAX),
    );
    replica.take().unwrap();
    replica.answer(0);
    let mut bytes = drain(replica.responder.queue(), usize::MAX);
    *bytes.last_mut().unwrap() ^= 1;
    fill(caller.reader(), &bytes);
    let (reply, _) = caller.poll().unwrap().unwrap();
    assert_eq!(reply.result, Err(Refusal::Mismatch));
    assert_eq!(caller.in_flight(), 0);
}

#[test]
fn a_reply_before_its_request_is_sent_ends_the_connection() {
    // Else the guest would have its buffer back while the socket still reads from it.
    let mut memory = vec![1u8; 4096];
    let crc = fabric_types::checksum::crc32c(&memory);
    let (_first, bytes, _list) = one_write(&mut memory, &[crc]);
    let mut replica = Replica::new();
    fill(replica.responder.reader(), &bytes);
    replica.take().unwrap();
    replica.answer(0);
    let reply = drain(replica.responder.queue(), usize::MAX);
    let list = [libc::iovec {
        iov_base: memory.as_mut_ptr().cast(),
        iov_len: 4096,
    }];
    let request = request(1, true, 0, &list, 4096);
    let mut early = Caller::new(&agreed());
    // SAFETY: the memory outlives the caller.
    unsafe { early.send(&request, &shape_of(&request), &[crc]) };
    drain(early.queue(), 100);
    fill(early.reader(), &reply);
    assert!(matches!(early.poll(), Err(LinkError::Protocol(_))));
}

#[test]
fn tcp_reply_to_an_open_queue_pair_request_ends_the_connection() {
    // Else the guest would have its buffer back while the peer may still write there.
    let mut memory = vec![1u8; 4096];
    let crc = fabric_types::checksum::crc32c(&memory);
    let (_first, bytes, _list) = one_write(&mut memory, &[crc]);
    let mut replica = Replica::new();
    fill(replica.responder.reader(), &bytes);
    replica.take().unwrap();
    replica.answer(0);
    let reply = drain(replica.responder.queue(), usize::MAX);
    let list = [libc::iovec {
        iov_base: memory.as_mut_ptr().cast(),
        iov_len: 4096,
    }];
    let request = request(1, true, 0, &list, 4096);
    let crcs = [crc];
    for is_over in [false, true] {
        let mut caller = Caller::new(&agreed());
        let mut room = [0; shape::REQUEST_BYTES_MAX];
        let sent = caller.send_on_queue_pair(&request, &shape_of(&request), &crcs, &mut room);
        if is_over {
            assert_eq!(caller.leave_queue_pair(), [sent.pair]);
        }
        fill(caller.reader(), &reply);
        match (caller.poll(), is_over) {
            (Ok(Some(_)), true) | (Err(LinkError::Protocol(_)), false) => {}
            (other, _) => panic!("{other:?}"),
        }
    }
}

#[test]
fn a_reply_that_comes_twice_ends_the_connection() {
    let mut memory = vec![1u8; 4096];
    let crc = fabric_types::checksum::crc32c(&memory);
    let (mut caller, bytes, _list) = one_write(&mut memory, &[crc]);
    let mut replica = Replica::new();
    fill(replica.responder.reader(), &bytes);
    replica.take().unwrap();
    let again = replica.held[0];
    replica.answer(0);
    replica.held.push(again);
    let first = drain(replica.responder.queue(), usize::MAX);
    fill(caller.reader(), &first);
    assert!(caller.poll().unwrap().is_some());
    // The bytes once more fail the count of frames; a second answer in a good frame names nothing.
    fill(caller.reader(), &first);
    assert!(matches!(caller.poll(), Err(LinkError::Frame(_))));
}

#[test]
fn a_peer_that_asks_beyond_its_credits_is_cut_off() {
    let mut memory = vec![1u8; 4096];
    let crc = fabric_types::checksum::crc32c(&memory);
    let mut few = agreed();
    few.credit_requests = 1;
    let mut replica = Replica::new();
    replica.responder = Responder::new(&few);
    let list = [libc::iovec {
        iov_base: memory.as_mut_ptr().cast(),
        iov_len: 4096,
    }];
    let mut caller = Caller::new(&agreed());
    for id in 0..2 {
        let request = request(id, true, 0, &list, 4096);
        // SAFETY: the memory outlives the caller.
        unsafe { caller.send(&request, &shape_of(&request), &[crc]) };
    }
    fill(
        replica.responder.reader(),
        &drain(caller.queue(), usize::MAX),
    );
    assert!(matches!(replica.take(), Err(LinkError::Protocol(_))));
}

#[test]
fn credits_bound_what_a_caller_has_under_way() {
    let mut memory = vec![0u8; PAYLOAD_BYTES_MAX as usize];
    let list = [libc::iovec {
        iov_base: memory.as_mut_ptr().cast(),
        iov_len: memory.len(),
    }];
    let mut caller = Caller::new(&agreed());
    let large = request(1, false, 0, &list, PAYLOAD_BYTES_MAX);
    let mut sent = 0;
    while caller.has_credit(&shape_of(&large)) {
        // SAFETY: the memory outlives the caller.
        unsafe { caller.send(&large, &shape_of(&large), &[]) };
        sent += 1;
    }
    assert_eq!(sent, CREDIT_BYTES / PAYLOAD_BYTES_MAX);
}

#[test]
fn peer_that_never_reads_is_cut_off_and_holds_only_its_credits() {
    let mut memory = vec![0u8; 4096];
    let list = [libc::iovec {
        iov_base: memory.as_mut_ptr().cast(),
        iov_len: 4096,
    }];
    let request = request(1, false, 0, &list, 4096);
    let mut caller = Caller::new(&agreed());
    let mut replica = Replica::new();
    for _ in 0..CREDIT_REQUESTS {
        // SAFETY: the memory outlives the caller.
        unsafe { caller.send(&request, &shape_of(&request), &[]) };
    }
    let mut bytes = Vec::new();
    while !caller.queue().is_empty() {
        bytes.extend(drain(caller.queue(), usize::MAX));
    }
    let mut rest = &bytes[..];
    while !rest.is_empty() {
        let given = fill(replica.responder.reader(), rest);
        rest = &rest[given..];
        replica.take().unwrap();
    }
    while !replica.held.is_empty() {
        replica.answer(0);
    }
    for _ in 0..STUCK_TICKS_MAX {
        replica.responder.tick().unwrap();
    }
    assert!(matches!(replica.responder.tick(), Err(LinkError::Silent)));
    assert_eq!(
        replica.responder.into_held().count(),
        CREDIT_REQUESTS as usize
    );
}

#[test]
fn a_slow_store_is_no_lost_peer_and_a_silent_one_is() {
    let mut memory = vec![1u8; 4096];
    let crc = fabric_types::checksum::crc32c(&memory);
    let (mut caller, bytes, _list) = one_write(&mut memory, &[crc]);
    let mut replica = Replica::new();
    fill(replica.responder.reader(), &bytes);
    replica.take().unwrap();
    for _ in 0..10 * QUIET_TICKS_MAX {
        replica.responder.tick().unwrap();
        let alive = drain(replica.responder.queue(), usize::MAX);
        if fill(caller.reader(), &alive) > 0 {
            caller.heard();
        }
        assert!(caller.poll().unwrap().is_none());
        caller.tick().unwrap();
    }
    const { assert!(ALIVE_TICKS * 2 < QUIET_TICKS_MAX) };
    for _ in 0..QUIET_TICKS_MAX {
        caller.heard();
        caller.tick().unwrap();
    }
    for _ in 1..QUIET_TICKS_MAX {
        caller.tick().unwrap();
    }
    assert!(matches!(caller.tick(), Err(LinkError::Silent)));
}

fn every_command(read: Command, buffers: IoVecs) -> [Command; 11] {
    let Command::Read { chunk, .. } = read else {
        unreachable!();
    };
    let stamp = |n| BlockStamp {
        version: n,
        crc: n as u32,
        holds: 2,
    };
    let layer = chunk.layer;
    let (block, len) = (3, 4096);
    [
        read,
        Command::Write {
            chunk,
            offset: 512,
            buffers,
            len,
            fua: true,
            urgent: true,
        },
        Command::Zero {
            chunk,
            offset: 512,
            len: 1024,
            fua: true,
        },
        Command::Flush { layer },
        Command::Inspect {
            chunk,
            block,
            buffers,
            len,
        },
        Command::Restore {
            chunk,
            block,
            stamps: [stamp(1), stamp(2)],
            buffers,
            len,
        },
        Command::Restore {
            chunk,
            block,
            stamps: [stamp(1), stamp(2)],
            buffers,
            len: 0,
        },
        Command::ListChunks {
            cursor: 77,
            buffers,
            len,
        },
        Command::Fence {
            layer,
            buffers,
            len,
        },
        Command::TellFence {
            layer,
            buffers,
            len: 16,
        },
        Command::Join,
    ]
}

#[test]
fn an_urgent_write_comes_over_as_urgent() {
    let mut memory = vec![1u8; 4096];
    let crcs = [fabric_types::checksum::crc32c(&memory)];
    let list = [libc::iovec {
        iov_base: memory.as_mut_ptr().cast(),
        iov_len: 4096,
    }];
    let mut request = request(1, true, 0, &list, 4096);
    if let Command::Write { urgent, .. } = &mut request.command {
        *urgent = true;
    }
    let mut caller = Caller::new(&agreed());
    let mut replica = Replica::new();
    // SAFETY: the memory outlives the caller.
    unsafe { caller.send(&request, &shape_of(&request), &crcs) };
    let bytes = drain(caller.queue(), usize::MAX);
    fill(replica.responder.reader(), &bytes);
    replica.take().unwrap();
    let came = replica.held[0].2.command;
    assert!(matches!(came, Command::Write { urgent: true, .. }));

    let mut room = [0; shape::REQUEST_BYTES_MAX];
    let sent = caller.send_on_queue_pair(&request, &shape_of(&request), &crcs, &mut room);
    let flags = RequestHeader::parse(sent.header).unwrap().flags.get();
    assert_eq!(flags, FLAG_URGENT);
}

#[test]
fn requests_of_every_kind_come_over_as_they_are() {
    let mut memory = vec![1u8; 4096];
    let list = [libc::iovec {
        iov_base: memory.as_mut_ptr().cast(),
        iov_len: 4096,
    }];
    let buffers = IoVecs {
        ptr: list.as_ptr(),
        len: 1,
    };
    let read = request(9, false, 512, &list, 4096);
    for command in every_command(read.command, buffers) {
        let request = Request { command, ..read };
        let mut room = [0; shape::REQUEST_BYTES_MAX];
        let bytes = shape::encode(&request, &mut room);
        let back = shape::decode(bytes, buffers).unwrap();
        assert_eq!(format!("{back:?}"), format!("{request:?}"));
        let (sent, taken) = (shape_of(&request), shape_of(&back));
        assert_eq!(
            (sent.payload_len, sent.room),
            (taken.payload_len, taken.room)
        );
        assert!(shape::decode(&bytes[..bytes.len() - 1], buffers).is_err());
    }
}
