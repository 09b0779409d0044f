//! Lines in a daemon's log that need attention: those at `WARN` and `ERROR`.

/// Position in a log from which it is checked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct LogMark(usize);

impl LogMark {
    /// Returns the end of `log`.
    pub fn end_of(log: &str) -> Self {
        Self(log.len())
    }
}

/// Returns the warnings and errors of `log` after `mark`.
pub fn complaints(log: &str, mark: LogMark) -> Vec<String> {
    let rest = log.get(mark.0..).unwrap_or_default();
    let found = rest.lines().filter(|line| is_complaint(line));
    found.map(str::to_owned).collect()
}

/// A line begins with a time and a level. A warning on stderr beside the log (`penstock: WARNING: …`) is
/// addressed to the person who starts the daemon and counts too.
fn is_complaint(line: &str) -> bool {
    let mut words = line.split_whitespace();
    let (first, second) = (words.next(), words.next());
    match first {
        Some("penstock:") => matches!(second, Some("WARNING:" | "warning:" | "error:")),
        _ => matches!(second, Some("WARN" | "ERROR")) || line.contains("panicked at"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEALTHY: &str = "\
2026-11-29T10:00:00.000000Z  INFO penstock::serve: WARN and ERROR stand in a message
penstock: ready: node one, no error: nothing
";
    const SICK: &str = "\
2026-11-29T10:00:01.000000Z ERROR openraft::engine::engine_impl: Can not initialize last_log_id=None
2026-11-29T10:00:02.000000Z  WARN vhost_backend::memory: guest memory is not sealed
penstock: WARNING: --store null DROPS EVERY WRITE
thread 'control' panicked at serve.rs:1:1:
";

    #[test]
    fn warnings_errors_and_panics_are_found_and_nothing_else() {
        assert_eq!(complaints(HEALTHY, LogMark::default()), [""; 0]);
        let both = format!("{HEALTHY}{SICK}");
        let found = complaints(&both, LogMark::default());
        assert_eq!(found, SICK.lines().collect::<Vec<_>>());
        assert_eq!(complaints(&both, LogMark::end_of(&both)), [""; 0]);
        let errors = complaints(&both, LogMark::end_of(HEALTHY));
        assert_eq!(errors.len(), 4);
    }
}
