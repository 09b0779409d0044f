//! Groups that move between two devices of this node.

use super::*;

#[test]
fn incoming_device_is_compared_with_the_local_one_it_replaces() {
    let mut world = World::new();
    let coming = Member {
        node: ME.0.incoming(),
        ..member(0, ReplicaState::Syncing, 5)
    };
    let members = vec![
        member(1, ReplicaState::InSync, 1),
        member(0, ReplicaState::InSync, 1),
        coming,
    ];
    world.groups.place(PG, 0, 1, Epoch(1));
    world.groups.set(PG, ReplicaState::InSync, Epoch(1));
    world.groups.place(PG.incoming(), 1, 1, Epoch(5));
    world
        .groups
        .set(PG.incoming(), ReplicaState::Syncing, Epoch(5));
    world.groups.applied(Epoch(5));
    let set = ReplicaSet::new(PG, Epoch(5), 1, members);
    world.rounds.on_map(&[set], 0);
    let (token, source, request) = world.asked();
    assert!(matches!(request.command, Command::Join), "{request:?}");
    assert_eq!((source, request.pg), (ME.0, PG), "no network is needed");
    world.rounds.on_reply(token, Ok(()));
    let mut here = 0;
    let end = loop {
        match world.poll().expect("it goes on") {
            Action::Ask { token, request, .. } => {
                assert_eq!(request.pg, PG);
                list_nothing(&request);
                world.rounds.on_reply(token, Ok(()));
            }
            Action::Local { token, request } => {
                assert_eq!(request.pg, PG.incoming());
                here += 1;
                list_nothing(&request);
                world.rounds.on_local(token, Ok(()));
            }
            end => break end,
        }
    };
    assert!(here > 0);
    assert!(
        matches!(
            end,
            Action::Promote {
                pg: PG,
                since: Epoch(5)
            }
        ),
        "{end:?}"
    );
}
