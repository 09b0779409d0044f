//! The daemon's log. What is told again and again is counted: a full disk must not fill the log, too.
//!
//! Each place in the code that logs may do so ten times at once, and once a second from then on. What it logs
//! beyond that is left out, and told once a second: how often, and the first line of it.

use std::collections::HashMap;
use std::fmt::{self, Write as _};
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tracing::callsite::Identifier;
use tracing::field::{Field, Visit};
use tracing::{Event, Level, Metadata, Subscriber};
use tracing_subscriber::layer::{Context, Filter};

/// Lines of one place in the code that are not left out, if it was quiet before.
const BURST: u32 = 10;
/// One line more is let through after this, and what was left out is told after this.
const TELL_INTERVAL: Duration = Duration::from_secs(1);
/// What tells of lines that were left out. It is never left out.
const TARGET: &str = "penstock::log";

/// The process's own.
pub static LIMITER: LazyLock<Limiter> = LazyLock::new(Limiter::default);

/// From now on a thread tells what is left out. Called once privileges are given up: threads inherit them.
pub fn keep_telling() {
    let told = std::thread::Builder::new()
        .name("log".to_owned())
        .spawn(|| {
            loop {
                std::thread::sleep(TELL_INTERVAL);
                LIMITER.tell();
            }
        });
    if let Err(error) = told {
        tracing::warn!(%error, "repeated lines of the log are left out, and will not be counted");
    }
}

/// Decides which lines are left out.
#[derive(Debug, Default)]
pub struct Limiter {
    places: Mutex<HashMap<Identifier, Place>>,
}

/// What a place in the code has logged.
#[derive(Debug)]
struct Place {
    /// Lines that it may log now.
    credit: u32,
    /// When it got the last of them.
    at: Instant,
    left_out: Option<LeftOut>,
}

/// Lines that were left out, of one place in the code.
#[derive(Debug, Clone, PartialEq, Eq)]
struct LeftOut {
    count: u64,
    level: Level,
    /// The first of them, without its time.
    line: String,
}

impl Place {
    fn new(now: Instant) -> Self {
        Self {
            credit: BURST,
            at: now,
            left_out: None,
        }
    }

    /// Whether a line is let through.
    fn admit(&mut self, now: Instant, event: &Event<'_>) -> bool {
        let earned = now.saturating_duration_since(self.at).as_secs() / TELL_INTERVAL.as_secs();
        if earned > 0 {
            let earned = u32::try_from(earned).unwrap_or(BURST);
            self.credit = self.credit.saturating_add(earned).min(BURST);
            self.at = now;
        }
        // While lines are left out, the one that tells of them is the one of this second.
        if self.credit > 0 && self.left_out.is_none() {
            self.credit -= 1;
            return true;
        }
        let left_out = self.left_out.get_or_insert_with(|| LeftOut::of(event));
        left_out.count += 1;
        false
    }

    fn take_left_out(&mut self, now: Instant) -> Option<LeftOut> {
        let left_out = self.left_out.take()?;
        (self.credit, self.at) = (0, now);
        Some(left_out)
    }
}

impl LeftOut {
    fn of(event: &Event<'_>) -> Self {
        let mut line = Line::default();
        event.record(&mut line);
        Self {
            count: 0,
            level: *event.metadata().level(),
            line: line.0,
        }
    }
}

/// A line's message and fields, as the log shows them.
#[derive(Debug, Default)]
struct Line(String);

impl Visit for Line {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        let space = match self.0.is_empty() {
            true => "",
            false => " ",
        };
        // Writing to a string does not fail.
        let _ = match field.name() {
            "message" => write!(self.0, "{space}{value:?}"),
            name => write!(self.0, "{space}{name}={value:?}"),
        };
    }
}

impl Limiter {
    fn places(&self) -> MutexGuard<'_, HashMap<Identifier, Place>> {
        // Whatever panicked, counts of lines are as good as they were.
        self.places.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn take_left_out(&self, now: Instant) -> Vec<LeftOut> {
        let mut places = self.places();
        let left_out = places
            .values_mut()
            .filter_map(|place| place.take_left_out(now));
        left_out.collect()
    }

    /// Tells what was left out since this was called last; to be called once a second.
    pub fn tell(&self) {
        // The lines come back here, so nothing is locked meanwhile.
        for LeftOut { count, level, line } in self.take_left_out(Instant::now()) {
            // A level is part of the code, so each needs a line of its own.
            match level {
                Level::ERROR => tracing::error!(target: TARGET, count, line, "repeated"),
                Level::WARN => tracing::warn!(target: TARGET, count, line, "repeated"),
                Level::INFO => tracing::info!(target: TARGET, count, line, "repeated"),
                Level::DEBUG => tracing::debug!(target: TARGET, count, line, "repeated"),
                _ => tracing::trace!(target: TARGET, count, line, "repeated"),
            }
        }
    }
}

impl<S: Subscriber> Filter<S> for &'static Limiter {
    fn enabled(&self, _: &Metadata<'_>, _: &Context<'_, S>) -> bool {
        true
    }

    fn event_enabled(&self, event: &Event<'_>, _: &Context<'_, S>) -> bool {
        let metadata = event.metadata();
        if metadata.target() == TARGET {
            return true;
        }
        let now = Instant::now();
        let mut places = self.places();
        let place = places
            .entry(metadata.callsite())
            .or_insert_with(|| Place::new(now));
        place.admit(now, event)
    }
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::sync::Arc;

    use tracing_subscriber::layer::SubscriberExt;
    use tracing_subscriber::{Layer, fmt as lines};

    use super::*;

    #[derive(Clone, Default)]
    struct Written(Arc<Mutex<Vec<u8>>>);

    impl io::Write for Written {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn what_is_told_again_and_again_is_counted() {
        let limiter: &'static Limiter = Box::leak(Box::default());
        let written = Written::default();
        let writer = written.clone();
        let layer = lines::layer()
            .with_ansi(false)
            .with_writer(move || writer.clone());
        let subscriber = tracing_subscriber::registry().with(layer.with_filter(limiter));
        tracing::subscriber::with_default(subscriber, || {
            for nth in 0..1000 {
                tracing::warn!(nth, "it is full");
            }
            tracing::warn!("another thing");
            limiter.tell();
            limiter.tell();
        });
        let text = String::from_utf8(written.0.lock().unwrap().clone()).unwrap();
        let full = text.lines().filter(|line| line.contains("it is full"));
        // The burst, and what tells of the others.
        assert_eq!(full.count() as u32, BURST + 1, "{text}");
        assert_eq!(text.matches("another thing").count(), 1, "{text}");
        let told = text.lines().last().unwrap();
        assert!(
            told.contains("WARN penstock::log: repeated count=990"),
            "{told}"
        );
        assert!(told.contains("it is full nth=10"), "{told}");
    }

    #[test]
    fn one_line_a_second_is_never_left_out() {
        let limiter: &'static Limiter = Box::leak(Box::default());
        let seen = Arc::new(Mutex::new(Vec::new()));
        let (keep, begin) = (Arc::clone(&seen), Instant::now());
        let subscriber = tracing_subscriber::registry().with(Told(limiter, keep, begin));
        tracing::subscriber::with_default(subscriber, || {
            for _ in 0..100 {
                tracing::info!("again");
            }
        });
        assert!(seen.lock().unwrap().iter().all(|is_told| *is_told));
    }

    /// Asks a limiter as if a second passed from line to line.
    struct Told(&'static Limiter, Arc<Mutex<Vec<bool>>>, Instant);

    impl<S: Subscriber> Layer<S> for Told {
        fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
            let mut seen = self.1.lock().unwrap();
            let now = self.2 + TELL_INTERVAL * seen.len() as u32;
            let mut places = self.0.places();
            let place = places
                .entry(event.metadata().callsite())
                .or_insert_with(|| Place::new(now));
            seen.push(place.admit(now, event));
        }
    }
}
