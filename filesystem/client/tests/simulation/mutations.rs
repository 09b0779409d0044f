//! Mistakes made on purpose are noticed by the tests of this program: otherwise those would prove nothing.

use std::panic::{AssertUnwindSafe, catch_unwind};

use std::sync::Arc;

use fs_client::Mistake;

use crate::appends::appends;
use crate::buffering::session_ends;
use crate::coherence::{Plan, coherence, links};
use crate::durability::loses_its_host;
use crate::host::Mutation;
use crate::looked_up::look_up_and_replace;
use crate::orphans::open_and_remove;
use crate::registers::{self, registers};
use crate::temporary::make_link_and_remove;
use crate::world::{Faults, World, Writes};
use crate::writes::disjoint;
use crate::{discards, overwriting, run_unchecked, slow};

/// Seeds that one mistake is looked for with.
const SEEDS: u64 = 200;

/// Whether a run with a mistake fails, or a client did what it must not.
fn is_noticed(seed: u64, writes: Writes, mutation: Mutation) -> bool {
    let some_lost = Faults {
        reply_lost: 0.1,
        ..slow()
    };
    let body = |world: World| async move {
        let mistaken = Some(mutation);
        match mutation {
            Mutation::CommitBeforeFlush | Mutation::AddressTwice | Mutation::NamedReclaimed => {
                disjoint(world, slow(), mistaken).await;
            }
            Mutation::Client(Mistake::DataWithoutSegment) => {
                disjoint(world, slow(), mistaken).await;
            }
            Mutation::NothingExpected => appends(world, slow(), mistaken).await,
            Mutation::DoneTwice => appends(world, some_lost, mistaken).await,
            Mutation::RemovalLeftOut => {
                let plan = Plan {
                    faults: slow(),
                    ..Plan::default()
                };
                coherence(world, plan, mistaken, Arc::default()).await;
            }
            Mutation::OrphanNotKept => open_and_remove(world, mistaken).await,
            Mutation::ToldBeforeWriteBack
            | Mutation::Client(
                Mistake::RecallWithoutWriteBack
                | Mistake::AttributesPastBuffer
                | Mistake::ReadPastBuffer,
            ) => {
                let plan = registers::Plan {
                    faults: slow(),
                    leaders: false,
                };
                registers(world, plan, mistaken).await;
            }
            Mutation::Client(Mistake::SyncBeforeCommit) => {
                loses_its_host(world, slow(), mistaken).await;
            }
            Mutation::Client(Mistake::BufferAfterSession) => session_ends(world, mistaken).await,
            Mutation::Client(Mistake::FreeLookedUp | Mistake::FreeBeforeTold) => {
                look_up_and_replace(world, mistaken).await;
            }
            Mutation::Client(Mistake::FreeNamed) => make_link_and_remove(world, mistaken).await,
            Mutation::Client(Mistake::TakeDiscarded) => {
                discards::overwritten(world, mistaken).await;
            }
            Mutation::Client(Mistake::WaitForNoSpace) => {
                overwriting::overwritten(world, mistaken).await;
            }
            Mutation::Client(mistake) => {
                let plan = Plan {
                    faults: links(),
                    leaders: false,
                    sessions: mistake == Mistake::KeepAfterSession,
                };
                coherence(world, plan, mistaken, Arc::default()).await;
            }
        }
    };
    let run = || run_unchecked(seed, writes, body).check();
    catch_unwind(AssertUnwindSafe(run)).is_err()
}

fn assert_noticed(mutation: Mutation) {
    assert_noticed_with(Writes::Through, mutation);
}

fn assert_noticed_with(writes: Writes, mutation: Mutation) {
    let noticed = (0..SEEDS).find(|seed| is_noticed(*seed, writes, mutation));
    assert!(noticed.is_some(), "{mutation:?} is not noticed");
}

fn assert_noticed_in_buffer(mistake: Mistake) {
    assert_noticed_with(Writes::Buffered, Mutation::Client(mistake));
}

#[test]
fn what_was_buffered_and_named_before_it_is_flushed_is_noticed() {
    assert_noticed_with(Writes::Buffered, Mutation::CommitBeforeFlush);
}

#[test]
fn a_recall_that_is_answered_before_the_write_back_is_noticed() {
    assert_noticed_in_buffer(Mistake::RecallWithoutWriteBack);
}

#[test]
fn a_sync_that_is_answered_before_the_commit_is_noticed() {
    assert_noticed_in_buffer(Mistake::SyncBeforeCommit);
}

#[test]
fn sizes_that_lack_what_is_buffered_are_noticed() {
    assert_noticed_in_buffer(Mistake::AttributesPastBuffer);
}

#[test]
fn reads_that_lack_what_is_buffered_are_noticed() {
    assert_noticed_in_buffer(Mistake::ReadPastBuffer);
}

#[test]
fn what_stays_buffered_beyond_a_session_is_noticed() {
    assert_noticed_in_buffer(Mistake::BufferAfterSession);
}

#[test]
fn what_is_told_while_others_buffer_changes_of_it_is_noticed() {
    assert_noticed_with(Writes::Buffered, Mutation::ToldBeforeWriteBack);
}

#[test]
fn data_named_before_they_are_flushed_are_noticed() {
    assert_noticed(Mutation::CommitBeforeFlush);
}

#[test]
fn changes_of_a_part_that_expect_nothing_are_noticed() {
    assert_noticed(Mutation::NothingExpected);
}

#[test]
fn an_address_that_is_written_twice_is_noticed() {
    assert_noticed(Mutation::AddressTwice);
}

#[test]
fn space_that_is_given_back_while_a_file_names_it_is_noticed() {
    assert_noticed(Mutation::NamedReclaimed);
}

#[test]
fn discarded_space_that_is_taken_for_zeros_of_a_file_is_noticed() {
    assert_noticed(Mutation::Client(Mistake::TakeDiscarded));
    assert_noticed_in_buffer(Mistake::TakeDiscarded);
}

#[test]
fn writers_that_do_not_wait_for_space_to_come_back_are_noticed() {
    assert_noticed(Mutation::Client(Mistake::WaitForNoSpace));
    assert_noticed_in_buffer(Mistake::WaitForNoSpace);
}

#[test]
fn an_open_file_that_goes_with_its_name_is_noticed() {
    assert_noticed(Mutation::OrphanNotKept);
}

#[test]
fn an_inode_that_is_released_before_kernels_forget_it_is_detected() {
    assert_noticed(Mutation::Client(Mistake::FreeLookedUp));
}

#[test]
fn an_inode_that_is_released_during_a_reply_is_detected() {
    assert_noticed(Mutation::Client(Mistake::FreeBeforeTold));
}

#[test]
fn a_file_that_goes_though_it_got_its_first_name_is_noticed() {
    assert_noticed(Mutation::Client(Mistake::FreeNamed));
}

#[test]
fn an_operation_that_is_done_twice_is_noticed() {
    assert_noticed(Mutation::DoneTwice);
}

#[test]
fn a_removal_that_is_answered_and_not_done_is_noticed() {
    assert_noticed(Mutation::RemovalLeftOut);
}

#[test]
fn an_answer_that_is_cached_without_a_grant_before_it_is_noticed() {
    assert_noticed(Mutation::Client(Mistake::CacheWithoutGrant));
}

#[test]
fn an_answer_that_is_cached_during_an_own_change_is_noticed() {
    assert_noticed(Mutation::Client(Mistake::CacheDuringChange));
}

#[test]
fn a_recall_that_is_ignored_is_noticed() {
    assert_noticed(Mutation::Client(Mistake::IgnoreRecall));
}

#[test]
fn a_change_that_does_not_wait_for_guests_is_noticed() {
    assert_noticed(Mutation::Client(Mistake::ChangeDuringPromise));
}

#[test]
fn what_is_cached_beyond_a_session_is_noticed() {
    assert_noticed(Mutation::Client(Mistake::KeepAfterSession));
}

#[test]
fn a_file_that_changes_as_its_directory_is_noticed() {
    assert_noticed(Mutation::Client(Mistake::ChangeOfDirectory));
}

#[test]
fn data_that_are_cached_without_their_segment_are_noticed() {
    assert_noticed(Mutation::Client(Mistake::DataWithoutSegment));
}

#[test]
fn an_inode_that_stays_cached_when_its_name_goes_is_noticed() {
    assert_noticed(Mutation::Client(Mistake::KeepTarget));
}
