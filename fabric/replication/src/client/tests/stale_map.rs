//! A replica's map may be ahead of the client's, and the client's own newer map may overtake the answer that
//! asks for it.

use super::*;

#[test]
fn write_refused_as_stale_continues_if_the_new_map_came_first() {
    let mut bench = Bench::new(set(1, 1, &[IN, IN]));
    bench.discard(1, 0, 4096);
    bench.map(set(2, 1, &[IN, IN]));
    bench.answer(0, Ok(()));
    bench.answer(1, Err(Refusal::StaleEpoch(Epoch(2))));
    assert!(bench.done.is_empty());
    bench.tick();
    assert_eq!(
        bench.nodes(),
        [1, 2, 2],
        "asked again, by the map that it has"
    );
    assert_eq!(bench.script.sent[2].1.epoch, Epoch(2));
    bench.answer(2, Ok(()));
    assert_eq!(bench.done[&1], Ok(()));
    bench.assert_idle();
}
