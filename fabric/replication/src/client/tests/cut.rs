//! How requests are cut into pieces.

use super::*;

fn range(command: Command) -> (u32, u32, u32) {
    match command {
        Command::Write {
            chunk, offset, len, ..
        } => (chunk.index, offset, len),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_request_is_cut_at_mebibytes_and_keeps_one_version() {
    let mut bench = Bench::new(set(1, 1, &[IN]));
    const MIB: u32 = 1 << 20;
    bench.write(1, CHUNK - 4096, (2 << 20) + 8192);
    let parts: Vec<_> = bench.script.sent.iter().map(|(_, r)| *r).collect();
    let ranges: Vec<_> = parts.iter().map(|r| range(r.command)).collect();
    assert_eq!(
        ranges,
        [
            (0, CHUNK as u32 - 4096, 4096),
            (1, 0, MIB),
            (1, MIB, MIB),
            (1, 2 * MIB, 4096)
        ]
    );
    assert!(parts.iter().all(|r| r.sequence == parts[0].sequence));
    bench.answer(0, Ok(()));
    bench.answer(3, Err(Refusal::Device(5)));
    bench.answer(2, Ok(()));
    assert!(bench.done.is_empty());
    bench.answer(1, Ok(()));
    assert_eq!(bench.done[&1], Err(IoError::Device(5)));
    bench.assert_idle();
}

#[test]
fn a_discard_of_the_whole_disk_goes_in_a_bounded_window() {
    let mut bench = Bench::new(set(1, 1, &[IN]));
    assert_eq!(
        bench.submit(1, Op::Discard, 512, 100 * CHUNK - 512),
        Submit::Pending
    );
    let mut answered = 0;
    while bench.done.is_empty() {
        assert!(bench.script.sent.len() - answered <= RANGE_WINDOW as usize);
        bench.answer(answered, Ok(()));
        answered += 1;
    }
    assert_eq!(answered, 100);
    let bytes: u64 = bench
        .script
        .sent
        .iter()
        .map(|(_, r)| match r.command {
            Command::Zero { len, .. } => u64::from(len),
            other => panic!("{other:?}"),
        })
        .sum();
    assert_eq!(bytes, 100 * CHUNK - 512);
    assert_eq!(bench.done[&1], Ok(()));
    bench.assert_idle();
}

#[test]
fn a_discard_stops_at_the_first_error() {
    let mut bench = Bench::new(set(1, 1, &[IN]));
    assert_eq!(
        bench.submit(1, Op::Discard, 0, 100 * CHUNK),
        Submit::Pending
    );
    for nth in 0..RANGE_WINDOW as usize {
        bench.answer(
            nth,
            if nth == 3 {
                Err(Refusal::Device(5))
            } else {
                Ok(())
            },
        );
    }
    let mut nth = RANGE_WINDOW as usize;
    while bench.done.is_empty() {
        bench.answer(nth, Ok(()));
        nth += 1;
    }
    assert!(nth < 100);
    assert_eq!(bench.done[&1], Err(IoError::Device(5)));
    bench.assert_idle();
}
