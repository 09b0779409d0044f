//! The text that Prometheus reads. What there is to read stands in [`families`]; `docs/METRICS.md` is made
//! from it.
//!
//! The text is written here and not by a library: values live elsewhere (in data threads, stores, metadata)
//! and are looked at when they are asked for, so there is nothing to register, and what remains of such a
//! library is this page.

pub mod families;

use std::fmt::Write;

/// Type of the answer: version 0.0.4 of the format, which every Prometheus reads.
pub const MEDIA_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// How values of a family are to be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Only grows, but for a restart.
    Counter,
    /// Goes up and down.
    Gauge,
    /// Counts by size.
    Histogram,
}

/// Values of one meaning.
#[derive(Debug)]
pub struct Family {
    /// Its name.
    pub name: &'static str,
    /// How its values are to be read.
    pub kind: Kind,
    /// Names of its labels.
    pub labels: &'static [&'static str],
    /// Unit of its values; `1` for counts and truths.
    pub unit: &'static str,
    /// What it means.
    pub help: &'static str,
}

impl Kind {
    /// The word.
    pub fn word(self) -> &'static str {
        match self {
            Kind::Counter => "counter",
            Kind::Gauge => "gauge",
            Kind::Histogram => "histogram",
        }
    }
}

/// A page of values, in the making. All values of a family are put one after the other, as the format wants
/// it.
#[derive(Default)]
pub struct Page {
    text: String,
    last: Option<&'static str>,
}

impl Page {
    /// Adds a value; `labels` are as many as the family has.
    pub fn put(&mut self, family: &'static Family, labels: &[&str], value: u64) {
        self.line(family, labels, format_args!("{value}"));
    }

    /// Adds a value that is no whole number.
    pub fn put_f64(&mut self, family: &'static Family, labels: &[&str], value: f64) {
        self.line(family, labels, format_args!("{value}"));
    }

    /// Adds a histogram. Each of `buckets` is a bound and how many values lie below it, ascending; `count`
    /// values are in all, and `sum` is theirs.
    pub fn put_histogram(
        &mut self,
        family: &'static Family,
        labels: &[&str],
        buckets: &[(f64, u64)],
        sum: f64,
        count: u64,
    ) {
        for (bound, below) in buckets {
            let bound = bound.to_string();
            let value = format_args!("{below}");
            self.series(family, "_bucket", labels, Some(&bound), value);
        }
        let value = format_args!("{count}");
        self.series(family, "_bucket", labels, Some("+Inf"), value);
        self.series(family, "_sum", labels, None, format_args!("{sum}"));
        self.series(family, "_count", labels, None, value);
    }

    fn line(&mut self, family: &'static Family, labels: &[&str], value: std::fmt::Arguments<'_>) {
        self.series(family, "", labels, None, value);
    }

    /// A line; `bound` is the label `le`, which every histogram has besides its own.
    fn series(
        &mut self,
        family: &'static Family,
        suffix: &str,
        labels: &[&str],
        bound: Option<&str>,
        value: std::fmt::Arguments<'_>,
    ) {
        assert_eq!(
            labels.len(),
            family.labels.len(),
            "labels of {}",
            family.name
        );
        let Family {
            name, kind, help, ..
        } = family;
        let text = &mut self.text;
        if self.last != Some(name) {
            self.last = Some(name);
            let word = kind.word();
            // Writing to a string does not fail.
            let _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} {word}");
        }
        let _ = write!(text, "{name}{suffix}");
        let own = family.labels.iter().copied().zip(labels.iter().copied());
        let all = own.chain(bound.map(|bound| ("le", bound)));
        for (index, (label, value)) in all.enumerate() {
            text.push(if index == 0 { '{' } else { ',' });
            let _ = write!(text, "{label}=\"{}\"", escaped(value));
        }
        if !labels.is_empty() || bound.is_some() {
            text.push('}');
        }
        let _ = writeln!(text, " {value}");
    }

    /// The page.
    pub fn into_text(self) -> String {
        self.text
    }
}

fn escaped(value: &str) -> String {
    let mut out = String::with_capacity(value.len());
    for c in value.chars() {
        match c {
            '\\' => out.push_str("\\\\"),
            '"' => out.push_str("\\\""),
            '\n' => out.push_str("\\n"),
            c => out.push(c),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Set to write the committed list anew instead of comparing with it.
    const WRITE: &str = "PENSTOCK_WRITE_METRICS";

    #[test]
    fn a_page_is_as_prometheus_reads_it() {
        let mut page = Page::default();
        page.put(&families::VOLUME_READS, &["a\"b", "/run/\\x\n"], 7);
        page.put(&families::VOLUME_READS, &["c", "/run/c"], 0);
        page.put_f64(&families::START_TIME, &[], 1.5);
        let text = page.into_text();
        let lines: Vec<&str> = text.lines().collect();
        assert!(lines[0].starts_with("# HELP penstock_volume_reads_total "));
        assert_eq!(lines[1], "# TYPE penstock_volume_reads_total counter");
        assert_eq!(
            lines[2],
            r#"penstock_volume_reads_total{volume="a\"b",socket="/run/\\x\n"} 7"#
        );
        assert_eq!(
            lines[3],
            r#"penstock_volume_reads_total{volume="c",socket="/run/c"} 0"#
        );
        assert_eq!(lines[6], "process_start_time_seconds 1.5");
        assert_eq!(lines.len(), 7);
    }

    #[test]
    fn a_histogram_has_buckets_sum_and_count() {
        let mut page = Page::default();
        let buckets = [(0.000016, 2), (1.048576, 3)];
        for operation in ["read", "write"] {
            let labels = ["a", "/a", operation];
            page.put_histogram(&families::VOLUME_LATENCY, &labels, &buckets, 70.5, 4);
        }
        let text = page.into_text();
        let lines: Vec<&str> = text.lines().skip(1).collect();
        assert_eq!(lines[0], "# TYPE penstock_volume_latency_seconds histogram");
        let own = r#"volume="a",socket="/a",operation="read""#;
        let series = |suffix: &str, labels: &str, value: &str| {
            format!("penstock_volume_latency_seconds{suffix}{{{own}{labels}}} {value}")
        };
        assert_eq!(lines[1], series("_bucket", r#",le="0.000016""#, "2"));
        assert_eq!(lines[2], series("_bucket", r#",le="1.048576""#, "3"));
        assert_eq!(lines[3], series("_bucket", r#",le="+Inf""#, "4"));
        assert_eq!(lines[4], series("_sum", "", "70.5"));
        assert_eq!(lines[5], series("_count", "", "4"));
        assert_eq!(lines.len(), 1 + 2 * 5);
    }

    #[test]
    fn names_are_those_of_prometheus_and_distinct() {
        let mut names = std::collections::BTreeSet::new();
        for family in families::ALL {
            let name = family.name;
            assert!(names.insert(name), "{name} twice");
            assert!(
                name.starts_with("penstock_") || name.starts_with("process_"),
                "{name}"
            );
            let is_total = name.ends_with("_total");
            assert_eq!(is_total, family.kind == Kind::Counter, "{name}");
            assert!(
                !family.help.contains('\n') && family.help.ends_with('.'),
                "{name}"
            );
            if family.unit == "bytes" || family.unit == "seconds" {
                assert!(name.contains(family.unit), "{name}");
            }
        }
    }

    #[test]
    fn the_committed_list_is_the_one_of_the_code() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/METRICS.md");
        let list = families::document();
        if std::env::var_os(WRITE).is_some() {
            std::fs::write(path, &list).unwrap();
        }
        let committed = std::fs::read_to_string(path).unwrap();
        assert!(
            committed == list,
            "docs/METRICS.md is out of date: {WRITE}=1 cargo nextest run -p api metrics"
        );
    }
}
