use super::*;
use crate::proto::ids::LayerId;
use zerocopy::IntoBytes;

const NOBODY: Touched = Touched::NOTHING;
const LEAF: LeafKey = LeafKey {
    layer: LayerId(1),
    chunk: 0,
    leaf: 0,
};
/// The block that differs.
const BLOCK: usize = 5;
const DATA: [u8; BLOCK_BYTES] = [7; BLOCK_BYTES];

fn fill(command: &Command, bytes: &[u8]) {
    let (Command::Inspect { buffers, .. } | Command::Read { buffers, .. }) = command else {
        panic!("{command:?}")
    };
    // SAFETY: the worker keeps the memory until the step that ends the command.
    let place = unsafe { buffers.first_mut() };
    place[..bytes.len()].copy_from_slice(bytes);
}

fn commands(step: Step) -> Vec<(Side, Command)> {
    let Step::Do(commands) = step else {
        panic!("{step:?}")
    };
    commands
}

/// A worker that has asked the source for the block that this side lacks.
fn reading() -> (Worker, Progress) {
    let (mut worker, mut progress) = (Worker::new(), Progress::default());
    worker.begin(LEAF);
    let asked = commands(worker.step(Ok(()), &NOBODY, &mut progress));
    let mut stamps = [0; (BLOCK + 1) * size_of::<BlockStamp>()];
    let stamp = BlockStamp {
        version: 1,
        crc: crc32c(&DATA),
        holds: 2,
    };
    assert_eq!(stamp.holds(), Holds::Data);
    let at = BLOCK * size_of::<BlockStamp>();
    stamps[at..at + 8].copy_from_slice(&stamp.version.to_le_bytes());
    stamps[at + 8..at + 12].copy_from_slice(&stamp.crc.to_le_bytes());
    stamps[at + 12..].copy_from_slice(&stamp.holds.to_le_bytes());
    fill(&asked[0].1, &stamps);
    let _ = worker.step(Ok(()), &NOBODY, &mut progress);
    let read = commands(worker.step(Ok(()), &NOBODY, &mut progress));
    assert!(matches!(read[..], [(Side::Source, Command::Read { .. })]));
    fill(&read[0].1, &DATA);
    (worker, progress)
}

#[test]
fn what_the_source_has_is_stored_here() {
    let (mut worker, mut progress) = reading();
    let next = commands(worker.step(Ok(()), &NOBODY, &mut progress));
    assert!(matches!(
        next[..],
        [(Side::Here, Command::Restore { block: 5, .. })]
    ));
}

#[test]
fn a_discard_is_not_undone_by_what_was_read_before_it() {
    let (mut worker, mut progress) = reading();
    let noted = [1 << BLOCK, 0, 0, 0];
    let discarded = Touched {
        noted,
        ..Touched::NOTHING
    };
    // It left no trace where nothing was mapped: only the notes tell.
    let next = commands(worker.step(Ok(()), &discarded, &mut progress));
    let inspects = |(_, c): &(Side, Command)| matches!(c, Command::Inspect { .. });
    assert!(next.iter().all(inspects), "{next:?}");
    let _ = worker.step(Ok(()), &discarded, &mut progress);
    // It is not known to be executed here yet, and may never be.
    let later = worker.step(Ok(()), &discarded, &mut progress);
    assert!(matches!(later, Step::Later(LEAF)), "{later:?}");
    let executed = Touched {
        noted,
        stored: noted,
    };
    // It is, and the source does not seem to have executed it.
    worker.begin(LEAF);
    let _ = commands(worker.step(Ok(()), &executed, &mut progress));
    let _ = worker.step(Ok(()), &executed, &mut progress);
    let later = worker.step(Ok(()), &executed, &mut progress);
    assert!(matches!(later, Step::Later(LEAF)), "{later:?}");
    worker.begin(LEAF);
    let asked = commands(worker.step(Ok(()), &executed, &mut progress));
    fill(&asked[0].1, &[0; (BLOCK + 1) * size_of::<BlockStamp>()]);
    let _ = worker.step(Ok(()), &executed, &mut progress);
    let done = worker.step(Ok(()), &executed, &mut progress);
    assert!(matches!(done, Step::Done(LEAF)), "{done:?}");
}

#[test]
fn a_block_that_was_written_here_is_not_trusted_while_the_source_has_a_newer_version() {
    let stored = Touched {
        noted: [1 << BLOCK, 0, 0, 0],
        stored: [1 << BLOCK, 0, 0, 0],
    };
    let outcome = |source: u64, here: u64| {
        let (mut worker, mut progress) = (Worker::new(), Progress::default());
        worker.begin(LEAF);
        let asked = commands(worker.step(Ok(()), &stored, &mut progress));
        for ((_, command), version) in asked.iter().zip([source, here]) {
            let mut stamps = [BlockStamp::default(); BLOCK + 1];
            stamps[BLOCK] = BlockStamp {
                version,
                crc: version as u32,
                holds: Holds::Data as u32,
            };
            fill(command, stamps.as_bytes());
        }
        let _ = worker.step(Ok(()), &stored, &mut progress);
        matches!(
            worker.step(Ok(()), &stored, &mut progress),
            Step::Done(LEAF)
        )
    };
    // An older write that came late: the newer one was done before this replica was sent any.
    assert!(!outcome(9, 8));
    // The source is about to get it.
    assert!(outcome(8, 9));
    assert!(outcome(9, 9));
}
