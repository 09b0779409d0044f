use super::*;

/// One sector, written and read by hand.
struct Bench(Checker);

const A: Tag = Tag(1);
const B: Tag = Tag(2);
const C: Tag = Tag(3);

impl Bench {
    fn new() -> Self {
        let mut checker = Checker::default();
        checker.add_volume(1);
        Self(checker)
    }

    fn begin(&mut self, tag: Tag) {
        let _ = self.0.begin_write(0, 0..1, tag, false);
    }

    fn end(&mut self, tag: Tag) -> Result<(), Violation> {
        self.0.end_write(0, 0..1, tag, false)
    }

    fn write(&mut self, tag: Tag) {
        self.begin(tag);
        self.end(tag).expect("a write after all others");
    }

    fn discard(&mut self, tag: Tag) {
        let _ = self.0.begin_write(0, 0..1, tag, true);
        self.end(tag).expect("a discard after all others");
    }

    fn start_read(&mut self) -> Begun {
        self.0.begin_read(0)
    }

    fn end_read(&mut self, begun: Begun, tag: Tag) -> Result<(), Violation> {
        self.0.end_read(0, begun, 0, &[tag])
    }

    fn read(&mut self, tag: Tag) -> Result<(), Violation> {
        let begun = self.start_read();
        self.end_read(begun, tag)
    }

    fn flush(&mut self) {
        let begun = self.0.begin_flush();
        self.0.end_flush(0, begun).unwrap();
    }

    fn power_loss(&mut self) {
        self.0.rollback(0, |_| true);
    }
}

#[test]
fn old_lease_write_never_appears_after_a_new_leases_first_read() {
    let mut checker = Checker::default();
    let volume = checker.add_volume(1);
    checker.begin_write(volume, 0..1, Tag(1), false);
    checker.abandon_write(volume, 0..1, Tag(1));
    checker.seal(volume);
    let mut shows = |tag| {
        let begun = checker.begin_read(volume);
        checker.end_read(volume, begun, 0, &[tag])
    };
    assert_eq!(shows(ZERO), Ok(()));
    assert!(
        shows(Tag(1)).is_err(),
        "it came after the newer lease had begun"
    );
}

#[test]
fn what_was_written_last_is_read() {
    let mut bench = Bench::new();
    bench.read(ZERO).unwrap();
    bench.write(A);
    bench.read(A).unwrap();
    bench.write(B);
    bench.read(B).unwrap();
    bench.discard(C);
    bench.read(ZERO).unwrap();
}

#[test]
fn an_overwritten_value_is_caught() {
    let mut bench = Bench::new();
    bench.write(A);
    bench.write(B);
    assert!(bench.read(A).is_err());
    let mut bench = Bench::new();
    bench.write(A);
    assert!(bench.read(ZERO).is_err(), "acknowledged and lost");
    let mut bench = Bench::new();
    bench.write(A);
    bench.discard(B);
    assert!(bench.read(A).is_err(), "discarded");
}

#[test]
fn a_value_that_nobody_wrote_is_caught() {
    assert!(Bench::new().read(A).is_err());
    let mut bench = Bench::new();
    bench.write(A);
    assert!(bench.read(B).is_err());
}

#[test]
fn a_value_never_changes_back() {
    let mut bench = Bench::new();
    bench.write(A);
    bench.begin(B);
    bench.read(A).unwrap();
    bench.read(B).unwrap();
    assert!(
        bench.read(A).is_err(),
        "B is not acknowledged, but was read"
    );
}

#[test]
fn concurrent_writes_may_end_either_way_and_then_stay() {
    let mut bench = Bench::new();
    bench.begin(A);
    bench.begin(B);
    bench.end(A).unwrap();
    bench.end(B).unwrap();
    bench.read(A).unwrap();
    bench.read(A).unwrap();
    assert!(bench.read(B).is_err());
}

#[test]
fn two_reads_that_overlap_a_write_may_not_see_it_backwards() {
    let mut bench = Bench::new();
    bench.write(A);
    bench.begin(B);
    let (first, second) = (bench.start_read(), bench.start_read());
    bench.end_read(first, B).unwrap();
    bench.end_read(second, A).unwrap();
    let third = bench.start_read();
    bench.end(B).unwrap();
    assert!(
        bench.end_read(third, A).is_err(),
        "it began after B was seen"
    );
}

#[test]
fn a_write_without_answer_may_take_effect_late_or_never() {
    let mut bench = Bench::new();
    bench.begin(A);
    bench.0.abandon_write(0, 0..1, A);
    bench.write(B);
    bench.read(B).unwrap();
    bench.read(A).unwrap();
    bench.write(C);
    assert!(bench.read(A).is_err(), "once only");
    bench.read(C).unwrap();
}

#[test]
fn flushed_data_survives_power_loss_and_unflushed_data_may_go() {
    let mut bench = Bench::new();
    bench.write(A);
    bench.flush();
    bench.write(B);
    bench.power_loss();
    bench.read(A).unwrap();
    assert!(bench.read(B).is_err(), "the disk has shown that B is lost");
    let mut bench = Bench::new();
    bench.write(A);
    bench.flush();
    bench.write(B);
    bench.power_loss();
    bench.read(B).unwrap();
    assert!(bench.read(A).is_err());
    let mut bench = Bench::new();
    bench.write(A);
    bench.flush();
    bench.power_loss();
    assert!(bench.read(ZERO).is_err(), "flushed");
    let mut bench = Bench::new();
    bench.write(A);
    bench.power_loss();
    bench.read(ZERO).unwrap();
    assert!(bench.read(A).is_err());
}

#[test]
fn what_a_loss_of_power_left_is_there_at_the_next_one() {
    let mut bench = Bench::new();
    bench.write(A);
    bench.flush();
    bench.write(B);
    bench.power_loss();
    bench.read(B).unwrap();
    bench.power_loss();
    assert!(bench.read(A).is_err());
}

#[test]
fn a_write_under_way_outlives_a_loss_of_power() {
    let mut bench = Bench::new();
    bench.write(A);
    bench.flush();
    bench.begin(B);
    bench.power_loss();
    bench.read(A).unwrap();
    bench.end(B).unwrap();
    bench.read(B).unwrap();
    assert!(bench.read(A).is_err());
}

#[test]
fn a_write_that_a_loss_of_power_interrupts_may_go_with_the_next_one() {
    let mut bench = Bench::new();
    bench.write(A);
    bench.flush();
    bench.begin(B);
    bench.power_loss();
    bench.end(B).unwrap();
    bench.read(B).unwrap();
    bench.read(A).expect_err("power was not lost again");
    bench.power_loss();
    bench.read(A).unwrap();
    bench.read(B).expect_err("it has gone");
}

#[test]
fn what_one_device_would_lose_is_told_apart_from_what_it_may() {
    let mut bench = Bench::new();
    bench.write(A);
    bench.flush();
    bench.write(B);
    let left = |bench: &Bench, tag| bench.0.would_be_left(0, 0, tag);
    left(&bench, A).unwrap();
    left(&bench, B).unwrap();
    left(&bench, ZERO).expect_err("A was flushed");
    bench.flush();
    left(&bench, B).unwrap();
    left(&bench, A).expect_err("B was flushed");
    bench.read(B).unwrap();
}

#[test]
fn a_flush_covers_only_what_was_acknowledged_before_it_began() {
    let mut bench = Bench::new();
    bench.write(A);
    bench.flush();
    let flush = bench.0.begin_flush();
    bench.write(B);
    bench.0.end_flush(0, flush).unwrap();
    bench.power_loss();
    bench.read(A).unwrap();
}

#[test]
fn zeroes_of_which_nobody_knows_the_origin_are_no_false_alarm() {
    let mut bench = Bench::new();
    let _ = bench.0.begin_write(0, 0..1, A, true);
    bench.read(ZERO).unwrap();
    bench.write(B);
    bench.read(B).unwrap();
    bench.read(ZERO).unwrap();
    bench.end(A).unwrap();
}

#[test]
fn old_clusters_are_forgotten_once_a_flush_covers_later_ones() {
    let mut bench = Bench::new();
    for tag in 1..1000 {
        bench.write(Tag(tag));
        bench.read(Tag(tag)).unwrap();
        if tag % 10 == 0 {
            bench.flush();
        }
    }
    assert!(bench.0.longest() < 30, "{}", bench.0.longest());
    assert!(bench.read(Tag(500)).is_err());
}

#[test]
fn content_names_its_place_and_its_write() {
    let mut bytes = [0; 1024];
    fill(&mut bytes, 1, 7, A);
    let mut tags = Vec::new();
    assert_eq!(tags_of(&bytes, 1, 7, &mut tags), Ok(()));
    assert_eq!(tags, [A, A]);
    assert_eq!(tags_of(&bytes, 0, 7, &mut tags), Err(7), "another volume's");
    assert_eq!(tags_of(&bytes, 1, 6, &mut tags), Err(6), "another place's");
    bytes[700] ^= 1;
    assert_eq!(tags_of(&bytes, 1, 7, &mut tags), Err(8));
}

#[test]
fn a_flush_after_writes_were_lost_with_the_power_must_fail_once() {
    let mut bench = Bench::new();
    bench.write(A);
    bench.power_loss();
    let flush = bench.0.begin_flush();
    assert!(bench.0.end_flush(0, flush).is_err());
    assert!(bench.0.fail_flush(0, flush), "it was the one");
    let flush = bench.0.begin_flush();
    assert_eq!(bench.0.end_flush(0, flush), Ok(()));
    assert!(!bench.0.fail_flush(0, flush), "nothing is left to tell");
}

#[test]
fn a_flush_after_a_loss_of_what_was_flushed_may_succeed() {
    let mut bench = Bench::new();
    bench.write(A);
    bench.flush();
    bench.power_loss();
    bench.flush();
    // Another holder of the lease knows of nothing.
    bench.write(B);
    bench.power_loss();
    bench.0.open(0);
    bench.flush();
}

#[test]
fn each_flush_that_fails_warns_of_all_writes_acknowledged_before_it() {
    let after_two_losses = |write_later: bool| {
        let mut bench = Bench::new();
        bench.write(A);
        bench.power_loss();
        let first = bench.0.begin_flush();
        bench.write(B);
        let second = bench.0.begin_flush();
        if write_later {
            bench.write(C);
        }
        assert!(bench.0.fail_flush(0, first) && bench.0.fail_flush(0, second));
        bench.power_loss();
        let flush = bench.0.begin_flush();
        bench.0.end_flush(0, flush)
    };
    assert_eq!(after_two_losses(false), Ok(()));
    assert!(after_two_losses(true).is_err(), "no flush has told of C");
}

/// What a log says of a flush is made durable by the next one.
#[test]
fn bad_block_after_power_loss_undoes_at_most_the_last_flush() {
    let read_after_loss = |flushes: usize, of: Tag| {
        let mut bench = Bench::new();
        bench.write(A);
        bench.flush();
        bench.write(B);
        bench.flush();
        bench.write(C);
        (0..flushes).for_each(|_| bench.flush());
        bench.0.lose_unknown(0, true, |_| true);
        bench.power_loss();
        bench.read(of)
    };
    assert!(read_after_loss(1, C).is_ok() && read_after_loss(1, B).is_ok());
    assert!(read_after_loss(1, A).is_err());
    assert!(read_after_loss(2, C).is_ok() && read_after_loss(2, B).is_err());
}
