//! Invariant *Verified*: a bad block is read from another replica and repaired.

use fabric_types::block::{BlockStamp, Holds};
use fabric_types::checksum::crc32c;
use zerocopy::IntoBytes;

use super::*;

const DATA: [u8; 4096] = [0x5a; 4096];

fn stamp() -> BlockStamp {
    BlockStamp {
        version: 9,
        crc: crc32c(&DATA),
        holds: Holds::Data as u32,
    }
}

impl Bench {
    /// Fills the memory of the nth request that was sent.
    fn fill(&mut self, nth: usize, bytes: &[u8]) {
        let (Command::Read { buffers, .. } | Command::Inspect { buffers, .. }) =
            self.script.sent[nth].1.command
        else {
            panic!("{:?} fills nothing", self.script.sent[nth]);
        };
        // SAFETY: the repair keeps its memory until the answer.
        unsafe { buffers.first_mut() }.copy_from_slice(bytes);
    }

    /// Two blocks are read; the first replica cannot, the second can.
    fn read_two_blocks(&mut self) {
        self.read_two_blocks_after(Refusal::Corrupt);
    }

    fn read_two_blocks_after(&mut self, refusal: Refusal) {
        assert_eq!(self.submit(1, Op::Read, 8192, 8192), Submit::Pending);
        self.answer(0, Err(refusal));
        assert!(self.done.is_empty());
        self.answer(1, Ok(()));
        assert_eq!(self.done[&1], Ok(()), "the guest does not wait for it");
    }

    fn offset(&self, nth: usize) -> u32 {
        match self.script.sent[nth].1.command {
            Command::Read { offset, .. } => offset,
            other => panic!("{other:?} is no read"),
        }
    }
}

#[test]
fn block_unreadable_on_one_replica_is_rewritten_from_another() {
    written_again_after(Refusal::Corrupt);
    written_again_after(Refusal::Device(libc::EIO));
}

fn written_again_after(refusal: Refusal) {
    let mut bench = Bench::new(set(1, 2, &[IN, IN, IN]));
    bench.read_two_blocks_after(refusal);
    assert_eq!(bench.offset(2), 8192);
    bench.answer(2, Ok(()));
    assert_eq!(bench.offset(3), 8192 + 4096, "the first one is good");
    bench.answer(3, Err(refusal));
    bench.fill(4, stamp().as_bytes());
    bench.answer(4, Ok(()));
    bench.fill(5, &DATA);
    bench.answer(5, Ok(()));
    let (node, request) = bench.script.sent[6];
    let Command::Restore { block, stamps, .. } = request.command else {
        panic!("{request:?}");
    };
    assert_eq!((node, block), (NodeId(1), 3));
    assert_eq!(stamps, [stamp(); 2], "only if it still is that version");
    assert_eq!(request.generation, Generation(3));
    assert_eq!(bench.nodes(), [1, 2, 1, 1, 1, 2, 1]);
    assert_eq!(bench.client.poll_action(), None);
    bench.answer(6, Ok(()));
    let told = ClientAction::Repaired {
        pg: PgId(0),
        node: NodeId(1),
        chunk: ChunkKey {
            layer: LayerId(5),
            index: 0,
        },
        block: 3,
    };
    assert_eq!(bench.client.poll_action(), Some(told));
    bench.assert_idle();
}

#[test]
fn what_has_been_written_since_is_not_repaired() {
    let mut bench = Bench::new(set(1, 2, &[IN, IN]));
    bench.read_two_blocks();
    bench.answer(2, Err(Refusal::Corrupt));
    bench.fill(3, stamp().as_bytes());
    bench.answer(3, Ok(()));
    bench.fill(4, &[0x77; 4096]);
    bench.answer(4, Ok(()));
    assert_eq!(bench.offset(5), 8192 + 4096, "on to the next block");
    bench.answer(5, Err(Refusal::Corrupt));
    bench.fill(6, stamp().as_bytes());
    bench.answer(6, Ok(()));
    bench.fill(7, &DATA);
    bench.answer(7, Ok(()));
    bench.answer(8, Err(Refusal::Changed));
    assert_eq!(bench.client.poll_action(), None);
    bench.assert_idle();
}

#[test]
fn a_repair_ends_with_its_replica_its_lease_or_the_good_copy() {
    let mut bench = Bench::new(set(1, 2, &[IN, IN]));
    bench.read_two_blocks();
    bench.lose(1);
    bench.assert_idle();

    let mut bench = Bench::new(set(1, 2, &[IN, IN]));
    bench.read_two_blocks();
    bench.answer(2, Err(Refusal::Corrupt));
    bench.answer(3, Ok(()));
    assert_eq!(bench.offset(4), 8192 + 4096, "it holds no data there");
    bench.volume.revoke();
    bench.answer(4, Ok(()));
    bench.assert_idle();

    let mut bench = Bench::new(set(1, 2, &[IN, IN]));
    bench.read_two_blocks();
    bench.map(set(2, 1, &[OUT, IN]));
    bench.answer(2, Err(Refusal::Corrupt));
    bench.assert_idle();
}

#[test]
fn who_never_had_a_lease_repairs_nothing() {
    let mut bench = Bench::with_generation(set(1, 2, &[IN, IN]), Generation(0));
    bench.read_two_blocks();
    assert_eq!(bench.nodes(), [1, 2]);
    bench.assert_idle();
}

#[test]
fn a_block_that_nobody_can_read_is_an_error_and_no_repair() {
    let mut bench = Bench::new(set(1, 2, &[IN, IN]));
    assert_eq!(bench.submit(1, Op::Read, 0, 4096), Submit::Pending);
    bench.answer(0, Err(Refusal::Corrupt));
    bench.answer(1, Err(Refusal::Corrupt));
    assert_eq!(bench.done[&1], Err(IoError::Corrupt));
    assert_eq!(bench.nodes(), [1, 2]);
    bench.assert_idle();
}
