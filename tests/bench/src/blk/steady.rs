//! Waiting until a back end has put a scattered disk in order. It tells nobody: one that writes nothing has
//! ended.

use std::fmt;
use std::time::{Duration, Instant};

use anyhow::Result;
use serde::Serialize;

use crate::backend::Kind;
use crate::usage::written_bytes;

/// A back end that wrote nothing for so long has completed its compaction.
const QUIET: Duration = Duration::from_secs(4);
/// Time after which it is measured as it is.
const WAIT_MAX: Duration = Duration::from_secs(120);
/// Time between two looks.
const LOOK: Duration = Duration::from_millis(100);

/// How long a back end compacted.
#[derive(Debug, Serialize)]
pub(super) struct Compaction {
    kind: Kind,
    seconds: f64,
    written_bytes: u64,
    gave_up: bool,
}

/// Waits until the process writes nothing any more.
pub(super) fn wait(pid: u32, kind: Kind) -> Result<Compaction> {
    let (start, first) = (Instant::now(), written_bytes(pid)?);
    let (mut last, mut since) = (first, start);
    while since.elapsed() < QUIET && start.elapsed() < WAIT_MAX {
        std::thread::sleep(LOOK);
        let now = written_bytes(pid)?;
        if now != last {
            (last, since) = (now, Instant::now());
        }
    }
    Ok(Compaction {
        kind,
        seconds: (since - start).as_secs_f64(),
        written_bytes: last - first,
        gave_up: since.elapsed() < QUIET,
    })
}

impl fmt::Display for Compaction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (name, mib) = (self.kind.name(), self.written_bytes >> 20);
        if self.gave_up {
            return write!(
                f,
                "{name}: not compacted after {:.0} s, {mib} MiB written",
                self.seconds
            );
        }
        write!(
            f,
            "{name}: compacted after {:.1} s, {mib} MiB written",
            self.seconds
        )
    }
}
