//! Hostile bytes, as plain functions: the fuzz target calls them with what the fuzzer finds, the tests with
//! random bytes.
//!
//! A function returns if all is well and panics if the peer got where it must not.

use fabric_types::ids::{ChunkKey, LayerId};
use fabric_types::iov::IoVecs;
use fabric_types::{Command, Incarnation, NodeId, Reply, Request, RequestId};

use super::caller::{Caller, LinkError, shape_of};
use super::frame::Stamp;
use super::handshake::Agreed;
use super::hello::{CREDIT_BYTES, CREDIT_REQUESTS, HELLO_BYTES, Hello, VERSIONS, Wire};
use super::queue::SendQueue;
use super::reader::Reader;
use super::responder::{Answer, ReceivedRequest, Responder, cost};
use super::shape;

/// Takes what is queued, as a socket would that takes `most` bytes.
pub fn drain(queue: &mut SendQueue, most: usize) -> Vec<u8> {
    let mut list = Vec::new();
    queue.gather(&mut list, 64);
    let mut bytes = Vec::new();
    for iov in &list {
        // SAFETY: whoever queued keeps the memory valid.
        let piece = unsafe { std::slice::from_raw_parts(iov.iov_base.cast::<u8>(), iov.iov_len) };
        bytes.extend_from_slice(&piece[..piece.len().min(most - bytes.len())]);
    }
    queue.advance(bytes.len());
    bytes
}

/// Gives bytes as a socket would, as many as there is space for; returns how many.
pub fn fill(reader: &mut Reader, bytes: &[u8]) -> usize {
    let mut list = Vec::new();
    reader.space(&mut list);
    let mut given = 0;
    for iov in &list {
        let piece = &bytes[given..bytes.len().min(given + iov.iov_len)];
        // SAFETY: the reader's own memory, or what its owner placed.
        unsafe {
            iov.iov_base
                .cast::<u8>()
                .copy_from_nonoverlapping(piece.as_ptr(), piece.len());
        }
        given += piece.len();
    }
    reader.received(given);
    given
}

/// A connection between two nodes that has just been agreed upon.
pub fn agreed() -> Agreed {
    Agreed {
        peer: NodeId(2),
        incarnation: Incarnation(20),
        wire: Wire::Crc,
        version: *VERSIONS.end(),
        credit_requests: CREDIT_REQUESTS,
        credit_bytes: CREDIT_BYTES,
        send_key: [0; 16],
        receive_key: [0; 16],
    }
}

fn list_of(memory: &mut [u8]) -> [libc::iovec; 1] {
    [libc::iovec {
        iov_base: memory.as_mut_ptr().cast(),
        iov_len: memory.len(),
    }]
}

/// A request to read or write memory.
pub fn request(id: u64, write: bool, offset: u32, list: &[libc::iovec], len: u32) -> Request {
    let buffers = IoVecs {
        ptr: list.as_ptr(),
        len: list.len() as u32,
    };
    let chunk = ChunkKey {
        layer: LayerId(1),
        index: 0,
    };
    let command = match write {
        true => Command::Write {
            chunk,
            offset,
            buffers,
            len,
            fua: false,
            urgent: false,
        },
        false => Command::Read {
            chunk,
            offset,
            buffers,
            len,
        },
    };
    Request {
        id: RequestId(id),
        command,
        ..Request::NOTHING
    }
}

/// Anything that a peer may send, to either end. With `repair` the first checksum of every frame is made to
/// fit, so that what lies behind it is reached.
pub fn bytes(data: &[u8], repair: bool) {
    if let Some(hello) = data.first_chunk::<HELLO_BYTES>() {
        if let Ok(hello) = Hello::parse(hello) {
            assert_eq!(Hello::parse(&hello.encode()), Ok(hello));
        }
    }
    let data = match repair {
        true => repaired(data),
        false => data.to_vec(),
    };
    asked(&data);
    answered(&data);
}

/// Splits `data` into frames as the input's own lengths say, and puts in the checksums.
fn repaired(data: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    let mut stamp = Stamp::new([0; 16]);
    let mut rest = data;
    while let Some(taken) = super::frame::repair(rest, &mut stamp, &mut out) {
        rest = &rest[taken..];
    }
    out.extend_from_slice(rest);
    out
}

fn asked(data: &[u8]) {
    let mut responder = Responder::<()>::new(&agreed());
    let mut memory = vec![0; 4 << 20];
    let list = list_of(&mut memory);
    let mut rest = data;
    loop {
        let given = fill(responder.reader(), rest);
        rest = &rest[given..];
        if take_requests(&mut responder, &list).is_err() || given == 0 {
            return;
        }
    }
}

fn take_requests(responder: &mut Responder<()>, list: &[libc::iovec]) -> Result<(), LinkError> {
    let place = IoVecs {
        ptr: list.as_ptr(),
        len: 1,
    };
    loop {
        match responder.poll()? {
            ReceivedRequest::Nothing => return responder.tick(),
            // SAFETY: the list outlives the responder.
            ReceivedRequest::Begins(_) => unsafe { responder.admit(place) },
            ReceivedRequest::Complete { .. } => {
                let head = responder.reader().head();
                let parsed = shape::decode(responder.header(), place);
                responder.begun();
                let reply = Reply {
                    id: RequestId(0),
                    incarnation: Incarnation(1),
                    result: Ok(()),
                };
                // A responder that is malformed inside a good frame is answered, and the connection goes on.
                let answer = Answer {
                    pair: head.pair,
                    cost: Some(cost(&head)),
                    payload: None,
                    payload_len: 0,
                    skip: 0,
                    crcs: &[],
                };
                if parsed.is_ok() {
                    // SAFETY: there is no payload.
                    unsafe { responder.reply(&reply, &answer, ()) };
                    drain(responder.queue(), usize::MAX);
                    while responder.next_sent().is_some() {}
                }
            }
        }
    }
}

fn answered(data: &[u8]) {
    let mut memory = vec![0; 8192];
    let list = list_of(&mut memory);
    let mut caller = Caller::new(&agreed());
    for id in 0..4 {
        let request = request(id, false, 0, &list, 8192);
        // SAFETY: the memory outlives the caller.
        unsafe { caller.send(&request, &shape_of(&request), &[]) };
    }
    drain(caller.queue(), usize::MAX);
    let mut rest = data;
    let mut answers = 0;
    loop {
        let given = fill(caller.reader(), rest);
        rest = &rest[given..];
        loop {
            match caller.poll() {
                Ok(Some(_)) => answers += 1,
                Ok(None) => break,
                Err(_) => return,
            }
        }
        assert!(answers + caller.in_flight() == 4, "each is answered once");
        if given == 0 {
            return;
        }
    }
}
