//! How fast replicas answer: when to ask another one as well (hedged reads), and which of them is grey:
//! alive, and so slow that every write waits for it. After "The Tail at Scale" (Dean, Barroso, 2013).

use fabric_types::NodeId;

/// Least wait before a read is doubled, in microseconds: below that a busy replica would be asked twice for
/// nothing.
const HEDGE_MIN_US: u64 = 2_000;
/// Longest wait before a read is doubled.
const HEDGE_MAX_US: u64 = 100_000;
/// The estimate of the 99th percentile moves by this share of itself with each answer at most.
const STEP_SHARE: f64 = 1.0 / 16.0;
/// Answers are judged over windows of this length.
const WINDOW_US: u64 = 1_000_000;
/// Answers that a window needs to say anything.
const WINDOW_ANSWERS: u64 = 8;
/// A replica is grey if its mean is so many times that of the fastest,
const GREY_FACTOR: u64 = 8;
/// and above this,
const GREY_MIN_US: u64 = 20_000;
/// in so many windows in a row.
const GREY_WINDOWS: u32 = 3;

/// One replica's answers.
#[derive(Debug, Clone, Copy)]
struct Answers {
    node: NodeId,
    /// Estimate of the 99th percentile of reads.
    high_us: f64,
    /// Writes answered in this window, and their time in all.
    writes: u64,
    write_us: u64,
    slow_windows: u32,
}

/// All replicas that this client has asked.
#[derive(Debug, Default)]
pub(super) struct Latency {
    nodes: Vec<Answers>,
    window_ends_us: u64,
}

impl Latency {
    fn of(&mut self, node: NodeId) -> &mut Answers {
        let at = self.nodes.iter().position(|a| a.node == node);
        let at = at.unwrap_or_else(|| {
            self.nodes.push(Answers {
                node,
                high_us: HEDGE_MIN_US as f64,
                writes: 0,
                write_us: 0,
                slow_windows: 0,
            });
            self.nodes.len() - 1
        });
        &mut self.nodes[at]
    }

    /// A read was answered after so long.
    pub(super) fn read(&mut self, node: NodeId, us: u64) {
        let answers = self.of(node);
        // Up by 99 steps for one answer above, down by one for each below: at rest where one in a hundred is
        // above.
        let step = (answers.high_us * STEP_SHARE / 99.0).max(0.1);
        let up = us as f64 > answers.high_us;
        answers.high_us += if up { 99.0 * step } else { -step };
        answers.high_us = answers.high_us.clamp(1.0, HEDGE_MAX_US as f64);
    }

    /// A write was answered after so long.
    pub(super) fn write(&mut self, node: NodeId, us: u64) {
        let answers = self.of(node);
        answers.writes += 1;
        answers.write_us = answers.write_us.saturating_add(us);
    }

    /// How long to wait for a read from this replica before another one is asked as well.
    pub(super) fn hedge_after_us(&mut self, node: NodeId) -> u64 {
        (self.of(node).high_us as u64).clamp(HEDGE_MIN_US, HEDGE_MAX_US)
    }

    /// Ends the window if it is over; the replicas that were slow for long enough, each told once for as long
    /// as it is.
    pub(super) fn grey(&mut self, now_us: u64) -> Vec<NodeId> {
        if now_us < self.window_ends_us {
            return Vec::new();
        }
        self.window_ends_us = now_us + WINDOW_US;
        let mean = |a: &Answers| (a.writes >= WINDOW_ANSWERS).then(|| a.write_us / a.writes);
        let fastest = self.nodes.iter().filter_map(mean).min();
        let mut grey = Vec::new();
        for answers in &mut self.nodes {
            let slow = match (mean(answers), fastest) {
                (Some(mean), Some(fastest)) => {
                    mean > GREY_MIN_US && mean > fastest.saturating_mul(GREY_FACTOR)
                }
                _ => false,
            };
            answers.slow_windows = if slow { answers.slow_windows + 1 } else { 0 };
            if answers.slow_windows == GREY_WINDOWS {
                grey.push(answers.node);
            }
            (answers.writes, answers.write_us) = (0, 0);
        }
        grey
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: NodeId = NodeId(1);
    const B: NodeId = NodeId(2);
    const C: NodeId = NodeId(3);

    #[test]
    fn hedge_delay_follows_the_99th_percentile_of_reads() {
        let mut latency = Latency::default();
        assert_eq!(latency.hedge_after_us(A), HEDGE_MIN_US);
        for i in 0..20_000u64 {
            latency.read(A, if i % 50 == 0 { 30_000 } else { 1_000 });
        }
        let wait = latency.hedge_after_us(A);
        assert!((20_000..=60_000).contains(&wait), "{wait}");
        for _ in 0..20_000 {
            latency.read(A, 500);
        }
        assert_eq!(latency.hedge_after_us(A), HEDGE_MIN_US);
        for _ in 0..20_000 {
            latency.read(B, 10_000_000);
        }
        assert_eq!(latency.hedge_after_us(B), HEDGE_MAX_US);
    }

    fn window(latency: &mut Latency, at: u64, times: [u64; 3]) -> Vec<NodeId> {
        for (node, us) in [A, B, C].into_iter().zip(times) {
            (0..20).for_each(|_| latency.write(node, us));
        }
        latency.grey(at * WINDOW_US)
    }

    #[test]
    fn replica_much_slower_than_its_peers_for_a_while_is_grey() {
        let mut latency = Latency::default();
        assert!(latency.grey(0).is_empty());
        assert!(window(&mut latency, 1, [500, 600, 50_000]).is_empty());
        assert!(window(&mut latency, 2, [500, 600, 50_000]).is_empty());
        assert_eq!(window(&mut latency, 3, [500, 600, 50_000]), [C]);
        assert!(
            window(&mut latency, 4, [500, 600, 50_000]).is_empty(),
            "told once"
        );
        assert!(window(&mut latency, 5, [500, 600, 700]).is_empty());
        for at in 6..8 {
            assert!(window(&mut latency, at, [500, 600, 50_000]).is_empty());
        }
        assert_eq!(window(&mut latency, 8, [500, 600, 50_000]), [C]);
    }

    #[test]
    fn replicas_that_are_all_slow_or_all_fast_are_not_grey() {
        let mut latency = Latency::default();
        for at in 0..10 {
            assert!(window(&mut latency, at, [90_000, 100_000, 200_000]).is_empty());
        }
        for at in 10..20 {
            assert!(
                window(&mut latency, at, [50, 60, 15_000]).is_empty(),
                "fast enough"
            );
        }
    }

    #[test]
    fn a_few_answers_say_nothing() {
        let mut latency = Latency::default();
        for at in 0..10 {
            (0..20).for_each(|_| latency.write(A, 100));
            (0..3).for_each(|_| latency.write(B, 900_000));
            assert!(latency.grey(at * WINDOW_US).is_empty());
        }
    }
}
