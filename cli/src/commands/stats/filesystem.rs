//! Statistics of filesystems' attachments.

use api::failure::Result;
use api::moment::{Moment, duration};
use api::size::Size;
use api::types::{FilesystemHostStats, FilesystemStats, RequestStats, hit_percent};

use crate::table::Table;

use super::{MIB, Stats, latencies, latency, print, state_word};

impl Stats for FilesystemStats {
    fn since(&self, earlier: &Self) -> Self {
        self.since(earlier)
    }

    fn print_totals(&self) -> Result<()> {
        let mut requests = Table::new(["REQUESTS", ">COUNT", ">FAILED"]);
        for one in &self.requests {
            requests.row([
                one.operation.clone(),
                one.answered.to_string(),
                one.failed.to_string(),
            ]);
        }
        print(|mut out| {
            writeln!(out, "filesystem   {}", self.filesystem)?;
            writeln!(out, "socket       {}", self.socket)?;
            writeln!(out, "state        {}", state_word(self.state))?;
            writeln!(out, "covers       {}", duration(self.period_ms / 1000))?;
            writeln!(out, "in flight    {}", self.in_flight)?;
            writeln!(out, "read         {}", Size(self.read_bytes))?;
            writeln!(out, "written      {}", Size(self.written_bytes))?;
            writeln!(out)?;
            writeln!(out, "All attachments of this filesystem on this node:")?;
            for (name, value) in host_lines(&self.host) {
                writeln!(out, "{name:<12} {value}")?;
            }
            if self.requests.is_empty() {
                return Ok(());
            }
            writeln!(out)?;
            requests.print(&mut out)?;
            writeln!(out)?;
            latencies("LATENCY", &kinds(self)).print(&mut out)
        })
    }

    fn heading() -> String {
        format!(
            "{:<20} {:>7} {:>8} {:>6} {:>7} {:>8} {:>6} {:>7} {:>6} {:>5} {:>6} {:>8} {:>6} {:>6} {:>6}",
            "TIME",
            "R/S",
            "R-MIB/S",
            "R-P99",
            "W/S",
            "W-MIB/S",
            "W-P99",
            "OTHER/S",
            "M-P99",
            "HIT%",
            "DHIT%",
            "BUFFERED",
            "FLIGHT",
            "FAILED",
            "LOST"
        )
    }

    fn line(&self, at: Moment) -> String {
        let seconds = self.period_ms.max(1) as f64 / 1000.0;
        let rate = |count: u64| (count as f64 / seconds).round();
        let mib = |bytes: u64| bytes as f64 / MIB / seconds;
        let (reads, writes) = (self.requests_of("read").0, self.requests_of("write").0);
        let (all, failed) = self.requests_in_all();
        let host = &self.host;
        format!(
            "{at:<20} {:>7} {:>8.1} {:>6} {:>7} {:>8.1} {:>6} {:>7} {:>6} {:>5} {:>6} {:>8} {:>6} {:>6} \
             {:>6}",
            rate(reads),
            mib(self.read_bytes),
            latency(self.reads.p99_ns),
            rate(writes),
            mib(self.written_bytes),
            latency(self.writes.p99_ns),
            rate(all - reads - writes),
            latency(self.metadata.p99_ns),
            percent(host.cache_hits, host.cache_misses),
            percent(host.data_hit_bytes, host.data_miss_bytes),
            Size(host.buffered_bytes),
            self.in_flight,
            failed,
            Size(host.lost_bytes)
        )
    }
}

/// Kinds of requests whose latencies are known, with the words for them.
fn kinds(stats: &FilesystemStats) -> [(&'static str, &RequestStats); 4] {
    [
        ("reads", &stats.reads),
        ("writes", &stats.writes),
        ("syncs", &stats.syncs),
        ("metadata", &stats.metadata),
    ]
}

/// Names and values of what the node did.
fn host_lines(host: &FilesystemHostStats) -> [(&'static str, String); 7] {
    let names = format!(
        "{} of lookups in the cache, {} questions and {} changes to the leader",
        percent(host.cache_hits, host.cache_misses),
        host.questions,
        host.operations
    );
    let capabilities = format!("{}, {} recalled", host.capabilities, host.recalls);
    let data = format!(
        "{} from the cache, {} from the pool, {} read ahead",
        Size(host.data_hit_bytes),
        Size(host.data_miss_bytes),
        Size(host.read_ahead_bytes)
    );
    [
        ("names", names),
        ("capabilities", capabilities),
        ("data", data),
        ("buffered", Size(host.buffered_bytes).to_string()),
        ("written back", Size(host.written_back_bytes).to_string()),
        (
            "failures",
            format!("{} files not written back", host.write_back_failures),
        ),
        ("lost", Size(host.lost_bytes).to_string()),
    ]
}

/// A share of hits, or a dash.
fn percent(hits: u64, misses: u64) -> String {
    hit_percent(hits, misses).map_or_else(|| "-".to_owned(), |percent| format!("{percent}%"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use api::types::{AttachmentState, LatencyBucket, OperationStats};

    #[test]
    fn an_interval_is_a_line_under_its_heading() {
        let requests = [("lookup", 10, 4), ("read", 6, 0), ("write", 2, 1)];
        let requests = requests.map(|(operation, answered, failed)| OperationStats {
            operation: operation.to_owned(),
            answered,
            failed,
        });
        let stats = FilesystemStats {
            filesystem: "home".into(),
            socket: "/s".into(),
            state: AttachmentState::Connected,
            period_ms: 2000,
            in_flight: 5,
            read_bytes: 3 << 20,
            written_bytes: 0,
            requests: requests.to_vec(),
            reads: RequestStats::new(
                3 << 20,
                6 * 1000,
                vec![LatencyBucket {
                    from_ns: 1000,
                    to_ns: Some(2000),
                    count: 6,
                }],
            ),
            writes: RequestStats::default(),
            syncs: RequestStats::default(),
            metadata: RequestStats::default(),
            host: FilesystemHostStats {
                cache_hits: 3,
                cache_misses: 1,
                buffered_bytes: 4096,
                ..FilesystemHostStats::default()
            },
        };
        let (heading, line) = (FilesystemStats::heading(), stats.line(Moment::now()));
        assert_eq!(line.chars().count(), heading.chars().count());
        let words: Vec<&str> = line.split_whitespace().skip(1).collect();
        let expected = [
            "3", "1.5", "2.00us", "1", "0.0", "-", "5", "-", "75%", "-", "4K", "5", "5", "0",
        ];
        assert_eq!(words, expected);
    }
}
