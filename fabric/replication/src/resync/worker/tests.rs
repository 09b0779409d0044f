use fabric_types::block::BLOCK_BYTES;
use fabric_types::checksum::crc32c;
use fabric_types::ids::LayerId;
use zerocopy::IntoBytes;

use super::*;
use crate::resync::unread::Lost;

const NOBODY: Touched = Touched::NOTHING;
const NONE: Unreadable = Unreadable {
    lost: Lost::new(),
    here: BTreeSet::new(),
};
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
    let asked = commands(worker.step(Ok(()), &NOBODY, &NONE, &mut progress));
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
    let _ = worker.step(Ok(()), &NOBODY, &NONE, &mut progress);
    let read = commands(worker.step(Ok(()), &NOBODY, &NONE, &mut progress));
    assert!(matches!(read[..], [(Side::Source, Command::Read { .. })]));
    fill(&read[0].1, &DATA);
    (worker, progress)
}

#[test]
fn what_the_source_has_is_stored_here() {
    let (mut worker, mut progress) = reading();
    let next = commands(worker.step(Ok(()), &NOBODY, &NONE, &mut progress));
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
    let next = commands(worker.step(Ok(()), &discarded, &NONE, &mut progress));
    let inspects = |(_, c): &(Side, Command)| matches!(c, Command::Inspect { .. });
    assert!(next.iter().all(inspects), "{next:?}");
    let _ = worker.step(Ok(()), &discarded, &NONE, &mut progress);
    // It is not known to be executed here yet, and may never be.
    let later = worker.step(Ok(()), &discarded, &NONE, &mut progress);
    assert!(matches!(later, Step::Later(LEAF)), "{later:?}");
    let executed = Touched {
        noted,
        stored: noted,
    };
    // It is, and the source does not seem to have executed it.
    worker.begin(LEAF);
    let _ = commands(worker.step(Ok(()), &executed, &NONE, &mut progress));
    let _ = worker.step(Ok(()), &executed, &NONE, &mut progress);
    let later = worker.step(Ok(()), &executed, &NONE, &mut progress);
    assert!(matches!(later, Step::Later(LEAF)), "{later:?}");
    worker.begin(LEAF);
    let asked = commands(worker.step(Ok(()), &executed, &NONE, &mut progress));
    fill(&asked[0].1, &[0; (BLOCK + 1) * size_of::<BlockStamp>()]);
    let _ = worker.step(Ok(()), &executed, &NONE, &mut progress);
    let done = worker.step(Ok(()), &executed, &NONE, &mut progress);
    assert!(is_done(&done), "{done:?}");
}

#[test]
fn block_written_here_is_not_trusted_if_the_source_is_newer() {
    let stored = Touched {
        noted: [1 << BLOCK, 0, 0, 0],
        stored: [1 << BLOCK, 0, 0, 0],
    };
    let outcome = |source: u64, here: u64| {
        let (mut worker, mut progress) = (Worker::new(), Progress::default());
        worker.begin(LEAF);
        let asked = commands(worker.step(Ok(()), &stored, &NONE, &mut progress));
        for ((_, command), version) in asked.iter().zip([source, here]) {
            let mut stamps = [BlockStamp::default(); BLOCK + 1];
            stamps[BLOCK] = BlockStamp {
                version,
                crc: version as u32,
                holds: Holds::Data as u32,
            };
            fill(command, stamps.as_bytes());
        }
        let _ = worker.step(Ok(()), &stored, &NONE, &mut progress);
        is_done(&worker.step(Ok(()), &stored, &NONE, &mut progress))
    };
    // An older write that came late: the newer one was done before this replica was sent any.
    assert!(!outcome(9, 8));
    // The source is about to get it.
    assert!(outcome(8, 9));
    assert!(outcome(9, 9));
}

/// The page agrees but for these blocks.
fn unread(step: Step) -> Vec<(u32, BlockStamp)> {
    let Step::Compared(page) = step else {
        panic!("{step:?}")
    };
    assert_eq!(page.leaf, LEAF);
    page.unread
}

/// Whether the page agrees.
fn is_done(step: &Step) -> bool {
    matches!(step, Step::Compared(page) if page.leaf == LEAF && page.unread.is_empty())
}

fn stamp_of(content: &[u8; BLOCK_BYTES]) -> BlockStamp {
    BlockStamp {
        version: 1,
        crc: crc32c(content),
        holds: Holds::Data as u32,
    }
}

/// One block of the page is lost.
fn one_lost(stamp: BlockStamp) -> Unreadable {
    Unreadable {
        lost: Lost::from([((LEAF, 1), stamp)]),
        ..NONE
    }
}

/// A worker whose source has three blocks that this side lacks and refuses to read the one in the middle; how
/// it ends, and what it restores: first block and bytes.
fn with_a_bad_block(known: &Unreadable, refusal: Refusal) -> (Step, Vec<(u32, u32)>, Progress) {
    with_a_bad_block_that_changes(known, refusal, 0)
}

/// The same; this side refuses to take its loss over so many times, since the block has changed.
fn with_a_bad_block_that_changes(
    known: &Unreadable,
    refusal: Refusal,
    mut changes: u32,
) -> (Step, Vec<(u32, u32)>, Progress) {
    let (mut worker, mut progress) = (Worker::new(), Progress::default());
    worker.begin(LEAF);
    let mut restored = Vec::new();
    let mut step = worker.step(Ok(()), &NOBODY, known, &mut progress);
    loop {
        let asked = match step {
            Step::Do(asked) => asked,
            Step::Wait => panic!("all was answered"),
            end => return (end, restored, progress),
        };
        step = Step::Wait;
        for (side, command) in asked {
            let mut result = Ok(());
            match command {
                Command::Inspect { .. } if side == Side::Source => {
                    let stamps = [stamp_of(&DATA); 3];
                    fill(&command, stamps.as_bytes());
                }
                Command::Read { offset, len, .. } => {
                    let first = offset as usize / BLOCK_BYTES;
                    let blocks = first..first + len as usize / BLOCK_BYTES;
                    match blocks.contains(&1) {
                        true => result = Err(refusal),
                        false => fill(&command, &DATA.repeat(blocks.len())),
                    }
                }
                Command::Restore { block, len, .. } => {
                    restored.push((block, len));
                    if len == 0 && changes > 0 {
                        changes -= 1;
                        result = Err(Refusal::Changed);
                    }
                }
                _ => {}
            }
            step = worker.step(result, &NOBODY, known, &mut progress);
        }
    }
}

/// What says that a block cannot be read.
const UNREADABLE: [Refusal; 6] = [
    Refusal::Corrupt,
    Refusal::Device(libc::EIO),
    Refusal::Device(libc::ENODATA),
    Refusal::Device(libc::EILSEQ),
    Refusal::Device(libc::EBADMSG),
    Refusal::Device(libc::EUCLEAN),
];

#[test]
fn around_a_block_that_cannot_be_read_everything_is_taken_over() {
    for refusal in UNREADABLE {
        let (end, restored, progress) = with_a_bad_block(&NONE, refusal);
        let unread = unread(end);
        assert_eq!(unread, [(1, stamp_of(&DATA))]);
        let block = BLOCK_BYTES as u32;
        assert_eq!(restored, [(0, block), (2, block)]);
        assert_eq!((progress.blocks, progress.lost), (2, 0));
    }
}

#[test]
fn the_loss_of_a_block_is_taken_over_if_it_is_still_the_same() {
    for refusal in UNREADABLE {
        let lost = one_lost(stamp_of(&DATA));
        let (end, restored, progress) = with_a_bad_block(&lost, refusal);
        assert!(is_done(&end), "{refusal:?}: {end:?}");
        let block = BLOCK_BYTES as u32;
        assert_eq!(restored, [(0, block), (1, 0), (2, block)]);
        assert_eq!(progress.lost, 1);
        let newer = BlockStamp {
            version: 0,
            ..stamp_of(&DATA)
        };
        let lost = one_lost(newer);
        let (end, ..) = with_a_bad_block(&lost, refusal);
        assert!(!unread(end).is_empty());
    }
}

#[test]
fn a_device_that_is_gone_or_slow_has_lost_nothing() {
    let errnos = [
        libc::EROFS,
        libc::ENODEV,
        libc::ENXIO,
        libc::ETIMEDOUT,
        libc::ENOLINK,
        libc::EREMOTEIO,
        libc::EBUSY,
        libc::EAGAIN,
        libc::ENOMEM,
        libc::ENOBUFS,
    ];
    for errno in errnos {
        let lost = one_lost(stamp_of(&DATA));
        let refusal = Refusal::Device(errno);
        let (end, restored, progress) = with_a_bad_block(&lost, refusal);
        let failed = RoundFailure::Source(refusal);
        assert!(matches!(end, Step::Failed(why) if why == failed), "{end:?}");
        assert_eq!((restored.len(), progress.lost), (0, 0));
    }
}

#[test]
fn a_lost_block_counts_once_when_its_loss_is_known_here() {
    let lost = one_lost(stamp_of(&DATA));
    for changes in [1, 3] {
        let (end, restored, progress) =
            with_a_bad_block_that_changes(&lost, Refusal::Corrupt, changes);
        assert!(is_done(&end), "{end:?}");
        let tries = restored.iter().filter(|(_, len)| *len == 0).count();
        assert_eq!((tries, progress.lost), (changes as usize + 1, 1));
    }
    // It changes for ever: the round fails without it.
    let (end, _, progress) = with_a_bad_block_that_changes(&lost, Refusal::Corrupt, u32::MAX);
    assert!(matches!(end, Step::Failed(RoundFailure::Busy)), "{end:?}");
    assert_eq!(progress.lost, 0);
}

/// A worker with a page of which both sides have the same three blocks, and of which this side cannot read
/// these; how it ends, and which it restores: block and bytes. The source cannot read the last of the three,
/// and the store has not met damage there.
fn with_blocks_bad_here(bad: &[u32], touched: &Touched) -> (Step, Vec<(u32, u32)>) {
    let known = Unreadable {
        here: bad.iter().map(|block| (LEAF, *block)).collect(),
        ..NONE
    };
    let (mut worker, mut progress) = (Worker::new(), Progress::default());
    worker.begin(LEAF);
    let mut restored = Vec::new();
    let mut step = worker.step(Ok(()), touched, &known, &mut progress);
    loop {
        let asked = match step {
            Step::Do(asked) => asked,
            Step::Wait => panic!("all was answered"),
            end => return (end, restored),
        };
        step = Step::Wait;
        for (_, command) in asked {
            let mut result = Ok(());
            match command {
                Command::Inspect { .. } => fill(&command, [stamp_of(&DATA); 3].as_bytes()),
                Command::Read { offset, len, .. } => {
                    let end = (offset + len) as usize / BLOCK_BYTES;
                    match end > 2 {
                        true => result = Err(Refusal::Corrupt),
                        false => fill(&command, &DATA.repeat(len as usize / BLOCK_BYTES)),
                    }
                }
                Command::Restore { block, len, .. } => {
                    restored.push((block, len));
                    if len == 0 {
                        result = Err(Refusal::Changed);
                    }
                }
                _ => panic!("{command:?}"),
            }
            step = worker.step(result, touched, &known, &mut progress);
        }
    }
}

#[test]
fn what_cannot_be_read_here_is_taken_over_though_it_agrees() {
    let (end, restored) = with_blocks_bad_here(&[1], &NOBODY);
    assert!(is_done(&end), "{end:?}");
    let block = BLOCK_BYTES as u32;
    assert_eq!(restored, [(1, block)]);
    // What the source cannot read either is not missing here: it is lost on both. Block 9 holds nothing any
    // more.
    let (end, restored) = with_blocks_bad_here(&[0, 1, 2, 9], &NOBODY);
    assert!(is_done(&end), "{end:?}");
    assert_eq!(restored, [(0, block), (1, block), (2, 0)]);
    // A client's write is newer than what is known.
    let written = Touched {
        noted: [1 << 1, 0, 0, 0],
        stored: [1 << 1, 0, 0, 0],
    };
    let (end, restored) = with_blocks_bad_here(&[1], &written);
    assert!(is_done(&end), "{end:?}");
    assert!(restored.is_empty());
}

#[test]
fn only_what_was_restored_is_progress() {
    for (answer, gained) in [(Ok(()), 1), (Err(Refusal::Changed), 0)] {
        let (mut worker, mut progress) = reading();
        commands(worker.step(Ok(()), &NOBODY, &NONE, &mut progress));
        assert_eq!(
            (progress.blocks, progress.dropped),
            (0, 0),
            "it is only tried"
        );
        let _ = worker.step(answer, &NOBODY, &NONE, &mut progress);
        assert_eq!(progress.blocks, gained);
    }
    // To write down once more that neither side can read a block gains nothing.
    let stamp = stamp_of(&DATA);
    let here = BTreeSet::from([(LEAF, 0)]);
    let (_, restored, progress) = compared([stamp; 2], &Unreadable { here, ..NONE });
    assert_eq!((restored, progress.blocks), (vec![[stamp; 2]], 0));
}

/// A worker compares a page whose first block is this at the source and here, and which the source cannot
/// read; how it ends, and what it restores.
fn compared(stamps: [BlockStamp; 2], known: &Unreadable) -> (Step, Vec<[BlockStamp; 2]>, Progress) {
    let (mut worker, mut progress) = (Worker::new(), Progress::default());
    worker.begin(LEAF);
    let mut restored = Vec::new();
    let mut step = worker.step(Ok(()), &NOBODY, known, &mut progress);
    loop {
        let asked = match step {
            Step::Do(asked) => asked,
            Step::Wait => panic!("all was answered"),
            end => return (end, restored, progress),
        };
        step = Step::Wait;
        for (side, command) in asked {
            let mut result = Ok(());
            match command {
                Command::Inspect { .. } => {
                    let stamp = stamps[usize::from(side == Side::Here)];
                    fill(&command, stamp.as_bytes());
                }
                Command::Restore { stamps, len: 0, .. } => restored.push(stamps),
                _ => result = Err(Refusal::Corrupt),
            }
            step = worker.step(result, &NOBODY, known, &mut progress);
        }
    }
}

#[test]
fn that_nobody_knows_a_block_is_recorded_whatever_the_page_of_it_says_one_day() {
    let unknown = BlockStamp::UNKNOWN;
    // Another source may know it.
    let (end, restored, _) = compared([unknown; 2], &NONE);
    assert_eq!((unread(end), restored), (vec![(0, unknown)], vec![]));
    let lost = Lost::from([((LEAF, 0), unknown)]);
    let (end, restored, progress) = compared([unknown; 2], &Unreadable { lost, ..NONE });
    let agreed = PageOutcome {
        leaf: LEAF,
        unread: Vec::new(),
        unknown: vec![0],
    };
    assert!(
        matches!(&end, Step::Compared(page) if *page == agreed),
        "{end:?}"
    );
    assert_eq!((restored, progress.blocks), (vec![[unknown; 2]], 0));
}

#[test]
fn what_is_known_here_is_not_given_up_because_no_source_knows_it() {
    let unknown = BlockStamp::UNKNOWN;
    let discarded = BlockStamp {
        version: 1,
        ..BlockStamp::default()
    };
    let lost = Lost::from([((LEAF, 0), unknown)]);
    for here in [discarded, stamp_of(&DATA)] {
        for known in [
            NONE,
            Unreadable {
                lost: lost.clone(),
                ..NONE
            },
        ] {
            let (end, restored, progress) = compared([unknown, here], &known);
            assert_eq!((unread(end), restored), (vec![(0, unknown)], vec![]));
            assert_eq!(progress.lost, 0);
        }
    }
}
