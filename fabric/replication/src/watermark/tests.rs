use std::collections::BTreeSet;

use proptest::prelude::*;

use super::*;

proptest! {
    #[test]
    fn never_passes_an_unresolved_write_and_catches_up(
        steps in prop::collection::vec((0..3usize, any::<bool>(), any::<u16>()), 1..400),
    ) {
        let mark = Watermark::new(Generation(5), 3);
        let mut lanes: [BTreeSet<Version>; 3] = Default::default();
        let mut before = mark.resolved();
        for (lane, write, pick) in steps {
            let open = &mut lanes[lane];
            if write {
                let version = mark.draw(lane, open.is_empty()).unwrap();
                prop_assert!(open.insert(version));
            } else if !open.is_empty() {
                let nth = usize::from(pick) % open.len();
                let version = *open.iter().nth(nth).unwrap();
                open.remove(&version);
                mark.set_oldest(lane, open.first().copied());
            }
            mark.refresh();
            let now = mark.resolved();
            prop_assert!(now >= before);
            before = now;
            if let Some(oldest) = lanes.iter().filter_map(BTreeSet::first).min() {
                prop_assert!(now <= *oldest);
            }
        }
        for lane in 0..3 {
            mark.set_oldest(lane, None);
        }
        mark.refresh();
        prop_assert_eq!(mark.resolved().0, mark.next.load(Ordering::Relaxed));
    }
}

#[test]
fn concurrent_lanes_draw_distinct_versions_above_the_watermark() {
    let mark = Watermark::new(Generation(1), 4);
    let per_lane = 20_000;
    let drawn: Vec<Vec<Version>> = std::thread::scope(|scope| {
        let lanes: Vec<_> = (0..4)
            .map(|lane| {
                let mark = &mark;
                scope.spawn(move || {
                    let mut seen = Vec::with_capacity(per_lane);
                    for _ in 0..per_lane {
                        let version = mark.draw(lane, true).unwrap();
                        mark.refresh();
                        assert!(mark.resolved() <= version, "unresolved write passed");
                        seen.push(version);
                        mark.set_oldest(lane, None);
                    }
                    seen
                })
            })
            .collect();
        lanes.into_iter().map(|l| l.join().unwrap()).collect()
    });
    let distinct: BTreeSet<_> = drawn.iter().flatten().collect();
    assert_eq!(distinct.len(), 4 * per_lane);
    assert!(drawn.iter().all(|lane| lane.is_sorted()));
}

#[test]
fn a_renewed_lease_orders_after_everything_before() {
    let mark = Watermark::new(Generation(1), 1);
    let old = mark.draw(0, true).unwrap();
    assert!(mark.renew(Generation(2)));
    assert!(!mark.renew(Generation(2)), "not newer");
    assert!(!mark.renew(Generation(1)), "older");
    let new = mark.draw(0, true).unwrap();
    assert!(new > old);
    assert_eq!(new.parts(), (Generation(2), Sequence(1)));
}

#[test]
fn a_used_up_generation_draws_nothing_more() {
    let mark = Watermark::new(Generation(1), 1);
    let end = Version::of(Generation(1), Sequence(Sequence::MAX.0 - SEQUENCE_SLACK));
    mark.next.store(end.0 - 1, Ordering::Relaxed);
    assert!(mark.draw(0, true).is_some());
    assert!(mark.draw(0, true).is_none());
    assert_eq!(mark.sequences_left(), 0);
    assert!(mark.renew(Generation(2)));
    assert!(mark.draw(0, true).is_some());
}
