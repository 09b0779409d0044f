//! Groups that cannot be brought up to date are told, and since when.

use super::*;

#[test]
fn groups_that_do_not_get_on_are_told_since_their_last_progress() {
    let mut world = World::new();
    world.pass(1000);
    world.map(5, 5, 5, &[1]);
    assert_eq!(world.rounds.failing(), None, "nothing has failed yet");
    let (mut restored, mut sources) = (Vec::new(), BTreeSet::new());
    let mut compare = |world: &mut World, refusal| {
        let end = world.compare_a_bad_block(refusal, &mut restored, &mut sources);
        world.pass(PAUSE_MAX_US);
        end
    };
    for _ in 0..3 {
        let readonly = Refusal::Device(libc::EROFS);
        assert!(compare(&mut world, readonly).is_none());
        let told = Failing {
            groups: 1,
            since_us: 1000,
        };
        assert_eq!(world.rounds.failing(), Some(told));
    }
    assert!(compare(&mut world, Refusal::Corrupt).is_none());
    let end = compare(&mut world, Refusal::Corrupt);
    assert!(matches!(end, Some(Action::Promote { .. })), "{end:?}");
    assert_eq!(world.rounds.failing(), None);
}
