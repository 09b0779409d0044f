//! A peer that is not a [`Node`] and sends arbitrary requests over an admitted connection.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use fabric_transport::caller::{Caller, shape_of};
use fabric_transport::handshake::Handshake;
use fabric_transport::hello::{CREDIT_BYTES, CREDIT_REQUESTS, Hello, VERSIONS, Wire};
use fabric_transport::shape;
use fabric_types::{Incarnation, NodeId, Refusal, Request};

use super::rig::{Authority, CLUSTER, Node};

/// A peer under the control of a test.
pub struct Peer {
    stream: TcpStream,
    caller: Caller,
}

impl Peer {
    /// Connects to a node under this node number, as [`member`](super::rig::member) describes it, with a
    /// valid certificate.
    pub fn connect(ca: &Authority, node: &Node, number: u64) -> Self {
        let hello = Hello {
            versions: (*VERSIONS.start(), *VERSIONS.end()),
            cluster: CLUSTER,
            node: NodeId(number),
            to: NodeId(node.id),
            incarnation: Incarnation(number * 10),
            wire: Wire::Crc,
            credit_requests: CREDIT_REQUESTS,
            credit_bytes: CREDIT_BYTES,
            key: [3; 16],
            refusal: None,
        };
        let mut stream = TcpStream::connect(node.address()).unwrap();
        stream
            .set_read_timeout(Some(Duration::from_secs(20)))
            .unwrap();
        let mut handshake = Handshake::connect(&ca.good(number), hello).unwrap();
        let mut bytes = [0; 4096];
        while !handshake.is_done() {
            let out = handshake.outgoing().len();
            stream.write_all(handshake.outgoing()).unwrap();
            handshake.sent(out);
            if !handshake.is_done() {
                let got = stream.read(&mut bytes).unwrap();
                handshake.received(&bytes[..got]).unwrap();
            }
        }
        let established = handshake.finish();
        let mut caller = Caller::new(&established.agreed);
        caller.reader().push(&established.rest);
        Self { stream, caller }
    }

    /// Sends a request.
    pub fn send(&mut self, request: &Request) {
        let shape = shape_of(request);
        let mut crcs = Vec::new();
        if let Some(list) = shape.payload {
            // SAFETY: the list and its memory belong to the caller.
            unsafe { shape::sums(&list, shape.skip, shape.payload_len, &mut crcs) };
        }
        // SAFETY: as for the checksums above.
        unsafe { self.caller.send(request, &shape, &crcs) };
        let queue = self.caller.queue();
        while !queue.is_empty() {
            let mut list = Vec::new();
            queue.gather(&mut list, 64);
            for iov in &list {
                // SAFETY: the queued bytes belong to the caller or to the request's payload.
                let piece =
                    unsafe { std::slice::from_raw_parts(iov.iov_base.cast::<u8>(), iov.iov_len) };
                self.stream.write_all(piece).unwrap();
                queue.advance(iov.iov_len);
            }
        }
    }

    /// Sends a request and waits for the answer.
    pub fn ask(&mut self, request: &Request) -> Result<(), Refusal> {
        self.send(request);
        let mut bytes = [0; 4096];
        loop {
            if let Some((reply, _)) = self.caller.poll().unwrap() {
                return reply.result;
            }
            let got = self.stream.read(&mut bytes).unwrap();
            assert!(got > 0, "the node closed the connection: {request:?}");
            self.caller.reader().push(&bytes[..got]);
        }
    }

    /// Returns all further bytes until the node closes the connection.
    pub fn rest(mut self) -> Vec<u8> {
        let mut rest = Vec::new();
        match self.stream.read_to_end(&mut rest) {
            Ok(_) => {}
            Err(error) => assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset),
        }
        rest
    }
}
