use std::collections::BTreeSet;

use fabric_types::Sequence;
use fabric_types::block::{BlockStamp, Holds, LEAF_BLOCKS};
use fabric_types::ids::{ChunkKey, LayerId, Version};
use fabric_types::message::{FenceEntry, UnresolvedEntry};
use zerocopy::IntoBytes;

use super::*;
use crate::replica::store_op::{Listed, list_chunks, tell_fence};
use crate::unresolved;

mod failing;
mod incoming;
mod unknown;

const PG: PgId = PgId(1);
const CHUNK: ChunkKey = ChunkKey {
    layer: LayerId(1),
    index: 0,
};
const ME: (NodeId, Incarnation) = (NodeId(0), Incarnation(7));

fn member(node: u64, state: ReplicaState, since: u64) -> Member {
    Member {
        node: NodeId(node),
        incarnation: if node == ME.0.0 {
            ME.1
        } else {
            Incarnation(node)
        },
        state,
        since: Epoch(since),
    }
}

/// The map of `epoch`, of one group that changed last at `changed`; this node is syncing in it since `since`.
struct World {
    rounds: Rounds,
    groups: Arc<Groups>,
    now_us: u64,
}

impl World {
    fn new() -> Self {
        let groups = Arc::new(Groups::default());
        let lanes = Arc::new([Arc::default()]);
        let rounds = Rounds::new(ME, Arc::clone(&groups), Arc::default(), lanes);
        Self {
            rounds,
            groups,
            now_us: 0,
        }
    }

    fn map(&mut self, epoch: u64, changed: u64, since: u64, in_sync: &[u64]) {
        let mut members = vec![member(0, ReplicaState::Syncing, since)];
        let sources = in_sync.iter().map(|&n| member(n, ReplicaState::InSync, 1));
        members.extend(sources);
        self.groups.set(PG, ReplicaState::Syncing, Epoch(since));
        self.groups.applied(Epoch(epoch));
        let set = ReplicaSet::new(PG, Epoch(changed), 1, members);
        self.rounds.on_map(&[set], self.now_us);
    }

    fn poll(&mut self) -> Option<Action> {
        self.rounds.poll(self.now_us)
    }

    fn asked(&mut self) -> (Token, NodeId, Request) {
        match self.poll() {
            Some(Action::Ask {
                token,
                source,
                request,
            }) => (token, source.0, request),
            other => panic!("{other:?}"),
        }
    }

    fn pass(&mut self, us: u64) {
        self.now_us += us;
        self.rounds.on_time(self.now_us);
    }

    /// Answers whatever is asked until nothing more is: the source and this side have nothing. The end of it.
    fn compare_nothing(&mut self) -> Action {
        loop {
            match self.poll().expect("it goes on") {
                Action::Ask { token, request, .. } => {
                    list_nothing(&request);
                    self.rounds.on_reply(token, Ok(()));
                }
                Action::Local { token, request } => {
                    list_nothing(&request);
                    self.rounds.on_local(token, Ok(()));
                }
                end => return end,
            }
        }
    }
}

/// A list that has ended.
fn list_nothing(request: &Request) {
    if let Command::ListChunks { buffers, .. } = request.command {
        let nothing = |_| Listed::End;
        // SAFETY: the round keeps the list and its memory until it is answered.
        unsafe { list_chunks(0, &buffers, nothing) };
    }
}

/// A client goes by the epoch of the group's last change. A source that had been joined under a newer one,
/// which other groups' changes brought, would refuse it until this group changes again.
#[test]
fn a_join_goes_under_the_epoch_of_the_group_and_not_of_the_map() {
    let mut world = World::new();
    world.map(9, 5, 5, &[1]);
    let (token, _, join) = world.asked();
    assert!(matches!(join.command, Command::Join));
    assert_eq!(join.epoch, Epoch(5));
    world.rounds.on_reply(token, Ok(()));
    let (_, _, list) = world.asked();
    assert!(matches!(list.command, Command::ListChunks { .. }));
    assert_eq!(list.epoch, Epoch(9), "the newest map that is known");
}

#[test]
fn a_map_that_is_known_changes_nothing_and_wakes_nobody() {
    let mut world = World::new();
    world.map(5, 5, 5, &[1]);
    let (token, _, _) = world.asked();
    for _ in 0..3 {
        world.map(5, 5, 5, &[1]);
        assert!(world.poll().is_none());
        assert_eq!(world.rounds.wake_at(world.now_us), None, "for its answer");
    }
    // The same while a round waits to be begun anew.
    world.rounds.on_reply(token, Err(Refusal::Unreachable));
    assert!(world.poll().is_none());
    let wake = world.rounds.wake_at(world.now_us);
    world.map(5, 5, 5, &[1]);
    assert!(world.poll().is_none());
    assert_eq!(world.rounds.wake_at(world.now_us), wake);
    assert!(wake > Some(world.now_us));
    // And once meta has been asked.
    world.pass(PAUSE_MIN_US);
    let end = world.compare_nothing();
    assert!(matches!(end, Action::Promote { .. }), "{end:?}");
    world.map(5, 5, 5, &[1]);
    assert!(world.poll().is_none());
    let wake = world.rounds.wake_at(world.now_us);
    assert_eq!(wake, Some(world.now_us + ASK_AGAIN_US));
}

#[test]
fn a_round_goes_on_through_a_map_that_does_not_concern_it() {
    let mut world = World::new();
    world.map(5, 5, 5, &[1, 2]);
    let (token, source, _) = world.asked();
    // The other one left.
    world.map(8, 7, 5, &[source.0]);
    assert!(world.poll().is_none(), "it waits for its answer");
    world.rounds.on_reply(token, Ok(()));
    let (_, same, list) = world.asked();
    assert_eq!((same, list.epoch), (source, Epoch(8)));
}

#[test]
fn a_source_that_left_is_not_compared_with() {
    let mut world = World::new();
    world.map(5, 5, 5, &[1, 2]);
    let (token, source, _) = world.asked();
    world.rounds.on_reply(token, Ok(()));
    let (listing, _, list) = world.asked();
    let other = 3 - source.0;
    // It would go on with what it is told.
    world.map(6, 6, 5, &[other]);
    let (_, next, join) = world.asked();
    assert_eq!((next, join.epoch), (NodeId(other), Epoch(6)));
    assert!(matches!(join.command, Command::Join));
    assert!(!world.rounds.is_idle());
    // What the first one still says is nobody's.
    assert_eq!(world.rounds.calls_due(), 2);
    list_nothing(&list);
    world.rounds.on_reply(listing, Ok(()));
    assert!(world.poll().is_none());
    assert_eq!(world.rounds.calls_due(), 1);
}

#[test]
fn a_new_stay_is_compared_from_the_beginning() {
    let mut world = World::new();
    world.map(5, 5, 5, &[1]);
    let (token, _, _) = world.asked();
    world.rounds.on_reply(token, Ok(()));
    let (old, _, _) = world.asked();
    world.map(8, 8, 8, &[1]);
    let (_, _, join) = world.asked();
    assert!(matches!(join.command, Command::Join));
    assert_eq!(join.epoch, Epoch(8));
    world.rounds.on_reply(old, Err(Refusal::Unreachable));
    assert!(world.poll().is_none(), "another round's answer");
    assert_eq!(world.rounds.totals(), Totals::default());
}

#[test]
fn silent_peer_is_retried_with_backoff_after_trying_another() {
    let mut world = World::new();
    world.map(5, 5, 5, &[1, 2]);
    let mut sources = Vec::new();
    let mut pauses = Vec::new();
    for _ in 0..8 {
        let (token, source, _) = world.asked();
        sources.push(source.0);
        world.rounds.on_reply(token, Err(Refusal::Unreachable));
        assert!(world.poll().is_none());
        let wake = world
            .rounds
            .wake_at(world.now_us)
            .expect("it is tried anew");
        pauses.push(wake - world.now_us);
        world.pass(wake - world.now_us - 1);
        assert!(world.poll().is_none(), "not yet");
        world.pass(1);
    }
    assert_eq!(sources[..4], [2, 1, 2, 1]);
    assert!(pauses.is_sorted() && pauses[0] == PAUSE_MIN_US);
    assert_eq!(pauses[7], PAUSE_MAX_US);
    assert_eq!(world.rounds.totals().failed, 8);
}

#[test]
fn meta_is_asked_again_until_the_map_says_so() {
    let mut world = World::new();
    world.map(5, 5, 5, &[1]);
    for _ in 0..3 {
        let end = world.compare_nothing();
        assert!(matches!(end, Action::Promote { pg: PG, since } if since == Epoch(5)));
        assert!(world.poll().is_none());
        world.pass(ASK_AGAIN_US);
    }
    assert_eq!(world.rounds.totals().rounds, 1);
    // Even if the source is gone by then: what was compared is compared.
    world.map(6, 6, 5, &[2]);
    assert!(matches!(world.poll(), Some(Action::Promote { .. })));
    world.groups.set(PG, ReplicaState::InSync, Epoch(5));
    let set = ReplicaSet::new(PG, Epoch(7), 1, vec![member(0, ReplicaState::InSync, 5)]);
    world.rounds.on_map(&[set], world.now_us);
    assert!(world.rounds.is_idle());
    assert_eq!(world.rounds.wake_at(world.now_us), None);
}

#[test]
fn nothing_is_left_of_a_group_that_is_gone() {
    let mut world = World::new();
    world.map(5, 5, 5, &[1]);
    let (token, _, _) = world.asked();
    world.groups.keep(&[]);
    world.rounds.on_map(&[], world.now_us);
    assert!(world.poll().is_none());
    assert!(!world.rounds.is_idle(), "its memory is in use");
    world.rounds.on_reply(token, Ok(()));
    assert!(world.rounds.is_idle());
    assert_eq!(world.rounds.wake_at(world.now_us), None);
}

/// A round that fails has actions that were never sent: no answer to them is due.
#[test]
fn failed_round_ends_when_its_pending_requests_are_answered() {
    let mut world = World::new();
    world.map(5, 5, 5, &[1]);
    let (join, _, _) = world.asked();
    world.rounds.on_reply(join, Ok(()));
    let (listing, _, list) = world.asked();
    let Command::ListChunks { buffers, .. } = list.command else {
        panic!("{list:?}")
    };
    let chunk = ChunkKey {
        layer: LayerId(3),
        index: 0,
    };
    let one = |cursor| match cursor {
        0 => Listed::Chunk(chunk, 1),
        _ => Listed::End,
    };
    // SAFETY: the round keeps the list and its memory until it is answered.
    unsafe { list_chunks(0, &buffers, one) };
    world.rounds.on_reply(listing, Ok(()));
    // Of the first of four pages.
    let (there, _, _) = world.asked();
    let Some(Action::Local { token: here, .. }) = world.poll() else {
        panic!("both sides are looked at")
    };
    world.rounds.on_reply(there, Err(Refusal::Unreachable));
    world.rounds.on_local(here, Ok(()));
    assert!(world.poll().is_none());
    world.groups.keep(&[]);
    world.rounds.on_map(&[], world.now_us);
    assert!(world.rounds.is_idle());
}

/// A device that answers nothing is not asked without end.
#[test]
fn rounds_wait_while_too_many_that_failed_are_not_over() {
    let mut world = World::new();
    let mut open = Vec::new();
    for stay in 1..100 {
        world.map(stay, stay, stay, &[1]);
        if let Some(Action::Ask { token, .. }) = world.poll() {
            open.push(token);
        }
    }
    // One is the last one that began, which was given up, too.
    assert_eq!(open.len(), RETIRED_MAX);
    assert_eq!(world.rounds.wake_at(world.now_us), None);
    world.rounds.on_reply(open[0], Ok(()));
    assert_eq!(world.rounds.wake_at(world.now_us), Some(0));
    world.pass(0);
    let (_, _, join) = world.asked();
    assert_eq!(join.epoch, Epoch(99));
}

#[test]
fn a_fence_holds_in_memory_before_it_is_persisted() {
    let mut world = World::new();
    world.map(5, 5, 5, &[1]);
    let (token, _, _) = world.asked();
    world.rounds.on_reply(token, Ok(()));
    let layer = LayerId(3);
    let write = Request {
        pg: PG,
        epoch: Epoch(5),
        generation: Generation(1),
        command: Command::Zero {
            chunk: ChunkKey { layer, index: 0 },
            offset: 0,
            len: 4096,
            fua: false,
        },
        ..Request::NOTHING
    };
    assert!(world.groups.admit(&write).is_err(), "whose layer is it?");
    let (tell, request) = loop {
        let (token, _, request) = world.asked();
        if let Command::TellFence { .. } = request.command {
            break (token, request);
        }
    };
    let Command::TellFence { buffers, .. } = request.command else {
        unreachable!()
    };
    let told = std::iter::once(fabric_store::api::Fence {
        generation: 4,
        epoch: 2,
    });
    // SAFETY: the round keeps the list and its memory until it is answered.
    unsafe { tell_fence(&buffers, told) };
    // This node has heard of a newer map in the meantime, and takes no fence that is older.
    world.rounds.fences.raise(layer, Generation(3), Epoch(7));
    world.rounds.on_reply(tell, Ok(()));
    let persist = loop {
        match world.poll().expect("the fence is to be persisted") {
            Action::Local { request, .. } => break request,
            Action::Ask { .. } => {}
            other => panic!("{other:?}"),
        }
    };
    assert!(matches!(persist.command, Command::Fence { .. }));
    let newest = (Generation(4), Epoch(7));
    assert_eq!((persist.generation, persist.epoch), newest);
    assert_eq!(world.rounds.fences.of(layer).unwrap().get(), newest);
}

/// Else a takeover would hear of the writes from nobody, once the source is gone: the replica has what the
/// source had of them. And a writer that was fenced out while this replica was away would write here, where
/// nobody has written the layer since.
#[test]
fn what_the_source_remembers_is_remembered_before_the_promotion() {
    let mut world = World::new();
    world.map(5, 5, 5, &[1]);
    let chunk = ChunkKey {
        layer: LayerId(3),
        index: 6,
    };
    let entry = UnresolvedEntry {
        version: Version::of(Generation(2), Sequence(9)).0,
        chunk: chunk.index,
        block: 4,
        count: 2,
        reserved: 0,
    };
    let fence = FenceEntry {
        generation: 3,
        epoch: 4,
    };
    let mut persisted = false;
    loop {
        match world.poll().expect("it goes on") {
            Action::Ask { token, request, .. } => {
                match request.command {
                    Command::ListChunks { buffers, .. } => {
                        let one = |cursor| match cursor {
                            0 => Listed::Chunk(chunk, 1),
                            _ => Listed::End,
                        };
                        // SAFETY: the round keeps the list and its memory until it is answered.
                        unsafe { list_chunks(0, &buffers, one) };
                    }
                    Command::TellFence { layer, buffers, .. } => {
                        assert_eq!(layer, chunk.layer);
                        // SAFETY: as above.
                        let answer = unsafe { buffers.first_mut() };
                        let at = size_of::<FenceEntry>();
                        answer[..at].copy_from_slice(fence.as_bytes());
                        let told = &mut answer[at..at + size_of::<UnresolvedEntry>()];
                        told.copy_from_slice(entry.as_bytes());
                    }
                    _ => {}
                }
                world.rounds.on_reply(token, Ok(()));
            }
            Action::Local { token, request } => {
                list_nothing(&request);
                if let Command::Fence { layer, .. } = request.command {
                    assert_eq!(layer, chunk.layer);
                    assert_eq!(
                        (request.generation, request.epoch),
                        (Generation(3), Epoch(4))
                    );
                    persisted = true;
                }
                world.rounds.on_local(token, Ok(()));
            }
            Action::Promote { .. } => break,
            other => panic!("{other:?}"),
        }
    }
    assert!(persisted);
    let known = world.rounds.fences.of(chunk.layer).unwrap().get();
    assert_eq!(known, (Generation(3), Epoch(4)));
    let lanes = &world.rounds.lanes;
    let remembered = unresolved::list(lanes, chunk.layer, Generation(3), 9);
    assert_eq!(remembered, [entry]);
}

/// Repairs go the ways of rounds: here past fences, with a last look, and to peers under the newest map that
/// is known.
#[test]
fn a_bad_block_is_asked_for_under_the_newest_map_as_no_lease() {
    let mut world = World::new();
    let group = PgId(0);
    let members = Vec::from([
        member(0, ReplicaState::InSync, 1),
        member(1, ReplicaState::InSync, 1),
    ]);
    world.groups.set(group, ReplicaState::InSync, Epoch(1));
    world.groups.applied(Epoch(9));
    let set = ReplicaSet::new(group, Epoch(5), 1, members);
    let bad = BadBlock {
        device: 0,
        chunk: ChunkKey {
            layer: LayerId(5),
            index: 0,
        },
        block: 3,
    };
    assert!(world.rounds.is_idle());
    world.rounds.on_bad_blocks(&[bad], &[set], world.now_us);
    assert!(!world.rounds.is_idle());
    let mut local = |result| match world.rounds.poll(0) {
        Some(Action::Local { token, request }) => {
            assert_eq!((request.generation, request.epoch), (ROUND, Epoch(9)));
            if let Command::Inspect { buffers, .. } = request.command {
                let stamp = BlockStamp {
                    version: 4,
                    crc: 0,
                    holds: Holds::Data as u32,
                };
                // SAFETY: the machine keeps its memory until the answer.
                unsafe { buffers.first_mut() }.copy_from_slice(stamp.as_bytes());
            }
            world.rounds.on_local(token, result);
        }
        other => panic!("{other:?}"),
    };
    local(Err(StoreFailure::Corrupt));
    local(Ok(()));
    let (token, peer, read) = world.asked();
    assert_eq!((peer, read.pg), (NodeId(1), group));
    assert_eq!((read.generation, read.epoch), (ROUND, Epoch(9)));
    assert_eq!(world.rounds.calls_due(), 1);
    world
        .rounds
        .on_reply(token, Err(Refusal::StaleEpoch(Epoch(10))));
    assert!(world.poll().is_none());
    let wake = world.rounds.wake_at(world.now_us);
    world.pass(wake.expect("it is looked at again"));
    assert!(matches!(world.poll(), Some(Action::Local { .. })));
}

impl World {
    /// Runs a round whose source has one block of data, which it refuses to read; its end, or nothing if it
    /// was in vain. What is restored here goes to `restored`, as block and bytes, and who was asked to
    /// `sources`.
    fn compare_a_bad_block(
        &mut self,
        refusal: Refusal,
        restored: &mut Vec<(u32, u32)>,
        sources: &mut BTreeSet<u64>,
    ) -> Option<Action> {
        let stamp = BlockStamp {
            version: 3,
            crc: 4,
            holds: Holds::Data as u32,
        };
        loop {
            let (token, request, is_source) = match self.poll()? {
                Action::Ask {
                    token,
                    source,
                    request,
                } => {
                    sources.insert(source.0.0);
                    (token, request, true)
                }
                Action::Local { token, request } => (token, request, false),
                end => return Some(end),
            };
            let mut answer = Ok(());
            match request.command {
                Command::ListChunks {
                    cursor, buffers, ..
                } => {
                    let there = is_source && cursor == 0;
                    let next = |at| match there && at == 0 {
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
                    if is_source && block == 0 {
                        stamps[..size_of::<BlockStamp>()].copy_from_slice(stamp.as_bytes());
                    }
                }
                Command::Read { .. } => answer = Err(refusal),
                Command::Restore { block, len, .. } => restored.push((block, len)),
                _ => {}
            }
            match is_source {
                true => self.rounds.on_reply(token, answer),
                false => self.rounds.on_local(token, Ok(())),
            }
        }
    }
}

#[test]
fn block_unreadable_everywhere_does_not_keep_a_replica_out() {
    let device = Refusal::Device(libc::EIO);
    for refusals in [
        [Refusal::Corrupt; 2],
        [device; 2],
        [Refusal::Corrupt, device],
    ] {
        let mut world = World::new();
        world.map(5, 5, 5, &[1, 2]);
        let mut restored = Vec::new();
        let mut sources = BTreeSet::new();
        for refusal in refusals {
            let end = world.compare_a_bad_block(refusal, &mut restored, &mut sources);
            assert!(end.is_none(), "{end:?}");
            assert!(restored.is_empty(), "another one may have it");
            world.pass(PAUSE_MAX_US);
        }
        assert_eq!(sources, BTreeSet::from([1, 2]));
        let end = world.compare_a_bad_block(refusals[0], &mut restored, &mut sources);
        assert!(matches!(end, Some(Action::Promote { .. })), "{end:?}");
        assert_eq!(restored, [(0, 0)]);
        assert_eq!(world.rounds.totals().progress.lost, 1);
    }
}

#[test]
fn what_a_replica_in_sync_may_give_later_is_waited_for() {
    let mut world = World::new();
    world.map(5, 5, 5, &[1, 2]);
    let mut restored = Vec::new();
    let mut sources = BTreeSet::new();
    let refusals = [Refusal::Corrupt, Refusal::Device(libc::EROFS)];
    for refusal in refusals.into_iter().cycle().take(8) {
        let end = world.compare_a_bad_block(refusal, &mut restored, &mut sources);
        assert!(end.is_none() && restored.is_empty(), "{end:?}");
        world.pass(PAUSE_MAX_US);
    }
    assert_eq!(sources, BTreeSet::from([1, 2]));
}
