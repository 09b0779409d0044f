//! Blocks that a source does not know, from round to round.

use super::*;

/// Blocks that a side does not know.
type Unknown<'a> = &'a [u32];

/// What is known of a block.
const WRITTEN: BlockStamp = BlockStamp {
    version: 7,
    crc: 0,
    holds: Holds::Zeroes as u32,
};

impl World {
    /// Answers until nothing more is asked, each some time later, and so many times at most: the source and
    /// this side have a chunk, of which they do not know these blocks, or this
    /// side has nothing of it. The end of the round, if it is well.
    fn compare_unknown(
        &mut self,
        (source, here): (Unknown<'_>, Option<Unknown<'_>>),
        answers: u32,
    ) -> Option<Action> {
        for _ in 0..answers {
            self.now_us += 10;
            let (token, request, is_source) = match self.poll()? {
                Action::Ask { token, request, .. } => (token, request, true),
                Action::Local { token, request } => (token, request, false),
                end => return Some(end),
            };
            match request.command {
                Command::ListChunks {
                    cursor, buffers, ..
                } => {
                    let next = |at| match cursor == 0 && at == 0 {
                        true => Listed::Chunk(CHUNK, 1),
                        false => Listed::End,
                    };
                    // SAFETY: the round keeps the list and its memory until it is answered.
                    unsafe { list_chunks(cursor, &buffers, next) };
                }
                Command::Inspect { block, buffers, .. } => {
                    // SAFETY: as above.
                    let stamps = unsafe { buffers.first_mut() };
                    stamps.fill(0);
                    let unknown = if is_source { Some(source) } else { here };
                    if unknown.is_some() {
                        for place in stamps.chunks_mut(size_of::<BlockStamp>()) {
                            place.copy_from_slice(WRITTEN.as_bytes());
                        }
                    }
                    let within = unknown
                        .unwrap_or_default()
                        .iter()
                        .filter_map(|of| of.checked_sub(block));
                    for at in within.filter(|at| *at < LEAF_BLOCKS) {
                        let size = size_of::<BlockStamp>();
                        let place = &mut stamps[at as usize * size..][..size];
                        place.copy_from_slice(BlockStamp::UNKNOWN.as_bytes());
                    }
                }
                _ => {}
            }
            match is_source {
                true => self.rounds.on_reply(token, Ok(())),
                false => self.rounds.on_local(token, Ok(())),
            }
        }
        None
    }
}

#[test]
fn blocks_that_nobody_knows_do_not_take_turns_to_keep_a_replica_out() {
    let mut world = World::new();
    world.map(5, 5, 5, &[1]);
    let here = &[3, 300][..];
    // The second page is lost between two rounds.
    for source in [&[3][..], &[3, 300]] {
        assert!(world.compare_unknown((source, Some(here)), 1000).is_none());
        world.pass(PAUSE_MAX_US);
    }
    let end = world.compare_unknown((here, Some(here)), 1000);
    assert!(matches!(end, Some(Action::Promote { .. })), "{end:?}");
}

#[test]
fn what_is_known_here_keeps_the_replica_out_until_the_source_knows_it_again() {
    let mut world = World::new();
    world.map(5, 5, 5, &[1]);
    for _ in 0..5 {
        assert!(world.compare_unknown((&[3], Some(&[])), 1000).is_none());
        assert!(world.rounds.failing().is_some(), "it is told");
        world.pass(PAUSE_MAX_US);
    }
    let end = world.compare_unknown((&[], Some(&[])), 1000);
    assert!(matches!(end, Some(Action::Promote { .. })), "{end:?}");
}

/// A new replica has nothing that could be lost.
#[test]
fn a_replica_that_has_nothing_takes_over_that_the_source_does_not_know() {
    let mut world = World::new();
    world.map(5, 5, 5, &[1]);
    let mut round = || {
        let end = world.compare_unknown((&[3], None), 1000);
        world.pass(PAUSE_MAX_US);
        end
    };
    let end = (0..5).find_map(|_| round());
    assert!(matches!(end, Some(Action::Promote { .. })), "{end:?}");
}

#[test]
fn round_that_gets_further_than_those_before_is_progress() {
    let mut world = World::new();
    world.map(5, 5, 5, &[1]);
    let (token, ..) = world.asked();
    world.rounds.on_reply(token, Err(Refusal::Unreachable));
    assert!(world.poll().is_none());
    let since_us = |world: &World| world.rounds.failing().map(|failing| failing.since_us);
    assert_eq!(since_us(&world), Some(0));
    world.pass(PAUSE_MAX_US);
    // It is under way, and some pages have been compared.
    let began_us = world.now_us;
    assert!(world.compare_unknown((&[3], Some(&[])), 8).is_none());
    let progress_us = since_us(&world).expect("the last round that ended failed");
    assert!(progress_us > began_us, "{progress_us}");
    // The next ones get no further.
    assert!(world.compare_unknown((&[3], Some(&[])), 1000).is_none());
    let progress_us = since_us(&world).expect("it failed");
    for _ in 0..3 {
        world.pass(PAUSE_MAX_US);
        assert!(world.compare_unknown((&[3], Some(&[])), 1000).is_none());
        assert_eq!(since_us(&world), Some(progress_us));
    }
}
