//! Requests that the transport answers inside `send`.

use super::*;

/// Answers at once, as told; done when told nothing.
#[derive(Default)]
struct AtOnce {
    refusals: VecDeque<Refusal>,
    sent: Vec<Request>,
}

impl Transport for AtOnce {
    fn send(&mut self, _node: NodeId, request: &Request) -> Option<Reply> {
        self.sent.push(*request);
        Some(Reply {
            id: request.id,
            incarnation: Incarnation(7),
            result: self.refusals.pop_front().map_or(Ok(()), Err),
        })
    }
}

fn submit(bench: &mut Bench, transport: &mut AtOnce, op: Op, offset: u64, len: u64) -> Submit {
    let buffers = [libc::iovec {
        iov_base: std::ptr::without_provenance_mut(4096),
        iov_len: len as usize,
    }];
    let data = matches!(op, Op::Read | Op::Write { .. });
    let request = io::Request {
        tag: Tag(1),
        op,
        offset,
        len,
        buffers: if data { &buffers } else { &[] },
    };
    bench.client.submit(&bench.volume, &request, transport)
}

const WRITE: Op = Op::Write { fua: false };
const DONE: Submit = Submit::Done(Ok(()));

#[test]
fn every_kind_of_request_is_done_on_return() {
    for states in [&[IN][..], &[IN, IN]] {
        let mut bench = Bench::new(set(1, 1, states));
        let mut transport = AtOnce::default();
        for op in [
            Op::Read,
            WRITE,
            Op::Discard,
            Op::WriteZeroes { unmap: true },
        ] {
            assert_eq!(
                submit(&mut bench, &mut transport, op, CHUNK - 512, 1024),
                DONE
            );
            assert_eq!(submit(&mut bench, &mut transport, op, CHUNK, 4096), DONE);
        }
        assert_eq!(submit(&mut bench, &mut transport, Op::Flush, 0, 0), DONE);
        let counters = bench.volume.counters();
        assert_eq!((counters.reads, counters.writes), (2, 2));
        assert_eq!((counters.discards, counters.flushes), (4, 1));
        assert_eq!((counters.read_bytes, counters.write_bytes), (5120, 5120));
        bench.assert_idle();
    }
}

#[test]
fn writes_are_numbered_in_order_and_resolved() {
    let mut bench = Bench::new(set(1, 1, &[IN]));
    let mut transport = AtOnce::default();
    for _ in 0..200 {
        assert_eq!(submit(&mut bench, &mut transport, WRITE, 0, 4096), DONE);
    }
    assert!(transport.sent.is_sorted_by(|a, b| a.sequence < b.sequence));
    assert!(transport.sent.iter().all(|r| r.watermark <= r.sequence));
    assert!(transport.sent[199].watermark > transport.sent[100].sequence);
}

#[test]
fn a_write_in_flight_holds_the_watermark_back() {
    let mut bench = Bench::new(set(1, 1, &[IN]));
    bench.write(1, 0, 4096);
    let oldest = bench.script.sent[0].1.sequence;
    let mut transport = AtOnce::default();
    for nth in 1..=200 {
        let offset = nth * 4096;
        assert_eq!(
            submit(&mut bench, &mut transport, WRITE, offset, 4096),
            DONE
        );
    }
    assert!(transport.sent.iter().all(|r| r.watermark <= oldest));
}

#[test]
fn a_refusal_is_told_at_once() {
    let mut bench = Bench::new(set(1, 1, &[IN]));
    let stale = Refusal::StaleGeneration(Generation(4));
    let mut transport = AtOnce {
        refusals: [stale].into(),
        ..AtOnce::default()
    };
    let fenced = Submit::Done(Err(IoError::Fenced));
    assert_eq!(submit(&mut bench, &mut transport, WRITE, 0, 4096), fenced);
    transport.refusals = [Refusal::Device(5)].into();
    let failed = Submit::Done(Err(IoError::Device(5)));
    assert_eq!(submit(&mut bench, &mut transport, WRITE, 0, 4096), failed);
    assert_eq!(bench.volume.counters().errors, 2);
    assert_eq!(submit(&mut bench, &mut transport, WRITE, 0, 4096), DONE);
    bench.assert_idle();
}
