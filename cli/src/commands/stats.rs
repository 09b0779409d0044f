//! `penstock attachment stats`.

mod filesystem;

use std::io::IsTerminal;
use std::time::Duration;

use api::client::{Client, encode};
use api::failure::Result;
use api::moment::{Moment, duration};
use api::size::Size;
use api::types::{AttachmentStats, FilesystemStats, RequestStats};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::args::StatsArgs;
use crate::table::Table;

use super::attachments::{Attachments, state_word};
use super::{print, print_json, print_to_reader};

/// Lines under a heading on a terminal; then it is printed again.
const LINES_PER_HEADING: u64 = 24;
/// Decimal digits of a bound in the histogram do not matter to people: rows begin at powers of four.
const ROW_FACTOR: u64 = 4;
const MIB: f64 = (1 << 20) as f64;

/// What an attachment of one kind did, for people and programs.
trait Stats: Serialize + DeserializeOwned {
    /// What was done since `earlier`.
    fn since(&self, earlier: &Self) -> Self;

    /// Prints all of it.
    fn print_totals(&self) -> Result<()>;

    /// Heading of the lines of intervals. Widths hold what lines have, for nobody knows the lines to come.
    fn heading() -> String;

    /// The line of an interval that ended then.
    fn line(&self, at: Moment) -> String;
}

/// Runs the verb.
pub async fn run(args: &StatsArgs, client: &Client, json: bool) -> Result<()> {
    let all = Attachments::read(client).await?;
    let target = all.target(&args.target)?;
    match all.filesystem(&target)? {
        Some(attachment) => {
            let path = format!(
                "/v1/filesystem-attachments/{}/stats",
                encode(&attachment.socket)
            );
            show::<FilesystemStats>(args, client, &path, json).await
        }
        None => {
            let path = format!("/v1/attachments/{}/stats", encode(&target));
            show::<AttachmentStats>(args, client, &path, json).await
        }
    }
}

async fn show<S: Stats>(args: &StatsArgs, client: &Client, path: &str, json: bool) -> Result<()> {
    let stats: S = client.get(path).await?;
    match args.watch {
        Some(seconds) => watch(client, path, stats, seconds, json).await,
        None if json => print_json(&stats),
        None => stats.print_totals(),
    }
}

/// An interval, as a line of JSON.
#[derive(Serialize)]
struct Interval<'a, S> {
    at: Moment,
    #[serde(flatten)]
    stats: &'a S,
}

/// A line for each interval, until the reader goes away.
async fn watch<S: Stats>(
    client: &Client,
    path: &str,
    mut last: S,
    seconds: u32,
    json: bool,
) -> Result<()> {
    let interval = Duration::from_secs(seconds.into());
    let mut ticks = tokio::time::interval_at(tokio::time::Instant::now() + interval, interval);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let on_terminal = std::io::stdout().is_terminal();
    for line in 0_u64.. {
        ticks.tick().await;
        let now: S = client.get(path).await?;
        let stats = now.since(&last);
        last = now;
        let is_headed = match on_terminal {
            true => line % LINES_PER_HEADING == 0,
            false => line == 0,
        };
        let at = Moment::now();
        let is_read = print_to_reader(|out| {
            if json {
                let stats = &stats;
                serde_json::to_writer(&mut *out, &Interval { at, stats })?;
                return writeln!(out);
            }
            if is_headed {
                writeln!(out, "{}", S::heading())?;
            }
            writeln!(out, "{}", stats.line(at))
        })?;
        if !is_read {
            break;
        }
    }
    Ok(())
}

impl Stats for AttachmentStats {
    fn since(&self, earlier: &Self) -> Self {
        self.since(earlier)
    }

    fn print_totals(&self) -> Result<()> {
        print_totals(self)
    }

    fn heading() -> String {
        heading()
    }

    fn line(&self, at: Moment) -> String {
        interval_line(at, self)
    }
}

fn heading() -> String {
    format!(
        "{:<20} {:>7} {:>8} {:>6} {:>6} {:>7} {:>8} {:>6} {:>6} {:>6} {:>6} {:>5} {:>6} {:>4}",
        "TIME",
        "R/S",
        "R-MIB/S",
        "R-P50",
        "R-P99",
        "W/S",
        "W-MIB/S",
        "W-P50",
        "W-P99",
        "F/S",
        "F-P99",
        "D/S",
        "FLIGHT",
        "ERRS"
    )
}

fn interval_line(at: Moment, stats: &AttachmentStats) -> String {
    let seconds = stats.period_ms.max(1) as f64 / 1000.0;
    let rate = |requests: &RequestStats| (requests.requests as f64 / seconds).round();
    let mib = |requests: &RequestStats| requests.bytes as f64 / MIB / seconds;
    let (reads, writes, flushes) = (&stats.reads, &stats.writes, &stats.flushes);
    format!(
        "{at:<20} {:>7} {:>8.1} {:>6} {:>6} {:>7} {:>8.1} {:>6} {:>6} {:>6} {:>6} {:>5} {:>6} {:>4}",
        rate(reads),
        mib(reads),
        latency(reads.p50_ns),
        latency(reads.p99_ns),
        rate(writes),
        mib(writes),
        latency(writes.p50_ns),
        latency(writes.p99_ns),
        rate(flushes),
        latency(flushes.p99_ns),
        rate(&stats.discards),
        stats.in_flight,
        stats.errors
    )
}

/// Kinds of requests with the words for them.
fn kinds(stats: &AttachmentStats) -> [(&'static str, &RequestStats); 4] {
    [
        ("reads", &stats.reads),
        ("writes", &stats.writes),
        ("flushes", &stats.flushes),
        ("discards", &stats.discards),
    ]
}

/// Counts, bytes and percentiles of each kind.
fn latencies(heading: &'static str, kinds: &[(&str, &RequestStats)]) -> Table {
    let mut table = Table::new([
        heading, ">COUNT", ">BYTES", ">MEAN", ">P50", ">P95", ">P99", ">P99.9",
    ]);
    for (word, requests) in kinds {
        table.row([
            (*word).to_owned(),
            requests.requests.to_string(),
            Size(requests.bytes).to_string(),
            latency(requests.mean_ns),
            latency(requests.p50_ns),
            latency(requests.p95_ns),
            latency(requests.p99_ns),
            latency(requests.p999_ns),
        ]);
    }
    table
}

fn print_totals(stats: &AttachmentStats) -> Result<()> {
    let totals = latencies("REQUESTS", &kinds(stats));
    print(|mut out| {
        writeln!(out, "volume     {}", stats.volume)?;
        writeln!(out, "socket     {}", stats.socket)?;
        writeln!(
            out,
            "state      {}, {} of {} queues run",
            state_word(stats.state),
            stats.queues_running,
            stats.queues
        )?;
        writeln!(out, "covers     {}", duration(stats.period_ms / 1000))?;
        writeln!(out, "in flight  {}", stats.in_flight)?;
        writeln!(out, "errors     {}", stats.errors)?;
        writeln!(out)?;
        totals.print(&mut out)?;
        let histogram = histogram(stats);
        if histogram.is_empty() {
            return Ok(());
        }
        writeln!(out)?;
        let mut table = Table::new([">LATENCY", ">READS", ">WRITES", ">FLUSHES", ">DISCARDS"]);
        histogram.into_iter().for_each(|row| table.row(row));
        table.print(&mut out)
    })
}

/// Rows of the histogram from the first to the last that hold any requests.
fn histogram(stats: &AttachmentStats) -> Vec<[String; 5]> {
    let kinds = kinds(stats);
    let mut bounds_ns = vec![0, 1000];
    while bounds_ns.len() < 14 {
        bounds_ns.extend(bounds_ns.last().map(|bound| bound * ROW_FACTOR));
    }
    let mut rows = Vec::new();
    let mut empty = Vec::new();
    for (index, from_ns) in bounds_ns.iter().enumerate() {
        let to_ns = bounds_ns.get(index + 1);
        let counts = kinds.map(|(_, requests)| {
            let below = to_ns.map_or(requests.requests, |to_ns| requests.below(*to_ns));
            below - requests.below(*from_ns)
        });
        let name = match to_ns {
            Some(to_ns) => format!("< {}", latency(Some(*to_ns))),
            None => format!(">= {}", latency(Some(*from_ns))),
        };
        let [reads, writes, flushes, discards] = counts.map(|count| count.to_string());
        let row = [name, reads, writes, flushes, discards];
        match counts == [0; 4] {
            true if rows.is_empty() => {}
            true => empty.push(row),
            false => {
                rows.append(&mut empty);
                rows.push(row);
            }
        }
    }
    rows
}

/// Three digits and a unit, or a dash.
fn latency(ns: Option<u64>) -> String {
    let Some(ns) = ns else {
        return "-".to_owned();
    };
    let (value, unit) = match ns {
        0..1_000 => return format!("{ns}ns"),
        1_000..1_000_000 => (ns as f64 / 1e3, "us"),
        1_000_000..1_000_000_000 => (ns as f64 / 1e6, "ms"),
        _ => (ns as f64 / 1e9, "s"),
    };
    match value {
        ..9.995 => format!("{value:.2}{unit}"),
        ..99.95 => format!("{value:.1}{unit}"),
        _ => format!("{value:.0}{unit}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use api::types::{AttachmentState, LatencyBucket};

    fn stats() -> AttachmentStats {
        let bucket = |from_ns, to_ns, count| LatencyBucket {
            from_ns,
            to_ns,
            count,
        };
        AttachmentStats {
            volume: "a".into(),
            socket: "/a".into(),
            state: AttachmentState::Connected,
            queues: 4,
            queues_running: 2,
            period_ms: 2000,
            in_flight: 5,
            errors: 1,
            reads: RequestStats::new(3 << 20, 3 * 20_000, vec![bucket(20_000, Some(22_000), 3)]),
            writes: RequestStats::new(
                0,
                1,
                vec![bucket(900, Some(1000), 1), bucket(1 << 40, None, 2)],
            ),
            flushes: RequestStats::default(),
            discards: RequestStats::default(),
        }
    }

    #[test]
    fn an_interval_is_a_line_under_its_heading() {
        let line = interval_line(Moment::now(), &stats());
        assert_eq!(line.chars().count(), heading().chars().count());
        let words: Vec<&str> = line.split_whitespace().skip(1).collect();
        assert_eq!(words[..4], ["2", "1.5", "21.3us", "22.0us"]);
        assert_eq!(words[8..], ["0", "-", "0", "5", "1"]);
    }

    #[test]
    fn the_histogram_has_each_request_once() {
        let rows = histogram(&stats());
        let names: Vec<&str> = rows.iter().map(|row| row[0].as_str()).collect();
        assert_eq!(names.first(), Some(&"< 1.00us"));
        assert_eq!(names.last(), Some(&">= 16.8s"));
        let sum = |column: usize| {
            let counts = rows.iter().map(|row| row[column].parse::<u64>().unwrap());
            counts.sum::<u64>()
        };
        assert_eq!([sum(1), sum(2), sum(3), sum(4)], [3, 3, 0, 0]);
        let at = names.iter().position(|name| *name == "< 64.0us").unwrap();
        assert_eq!(rows[at][1], "3");
    }

    #[test]
    fn latencies_have_three_digits() {
        let told = [
            7,
            999,
            1000,
            9_994,
            10_000,
            99_960,
            123_456,
            1_000_000,
            67_108_864_000,
        ];
        let told = told.map(|ns| latency(Some(ns)));
        let expected = [
            "7ns", "999ns", "1.00us", "9.99us", "10.0us", "100us", "123us", "1.00ms", "67.1s",
        ];
        assert_eq!(told, expected);
        assert_eq!(latency(None), "-");
    }
}
