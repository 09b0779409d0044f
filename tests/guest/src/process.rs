//! Child processes that never outlive the rig, and commands whose failure says what they printed.

use std::io::Read;
use std::os::fd::AsRawFd;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitCode, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

/// Lines of a log that an error message quotes.
const QUOTED_LINES: usize = 30;
/// Between two looks at something that is waited for.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// A mirror of packages may be out of reach for longer than apt tries by itself.
const FETCH_TRIES: u32 = 3;
const FETCH_PAUSE: Duration = Duration::from_secs(15);

/// By how much longer than alone things may take on a machine that other tests share.
const LOAD_FACTOR: u32 = 4;

/// A child that is killed by its own pid and reaped when dropped, and by the kernel when the thread that
/// started it dies.
#[derive(Debug)]
pub struct Guarded {
    child: Child,
    name: String,
}

impl Guarded {
    /// Starts `command`; `name` is how errors call it.
    pub fn spawn(command: &mut Command, name: &str) -> Result<Self> {
        // SAFETY: between fork and exec only prctl(2) runs, which is async-signal-safe.
        unsafe {
            command.pre_exec(|| {
                if libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) == 0 {
                    Ok(())
                } else {
                    Err(std::io::Error::last_os_error())
                }
            });
        }
        let child = command
            .spawn()
            .with_context(|| format!("start {name} ({:?})", command.get_program()))?;
        Ok(Self {
            child,
            name: name.to_owned(),
        })
    }

    /// The process's id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Its standard input and output, if it was started with pipes and they were not taken before.
    pub fn take_pipes(&mut self) -> Option<(ChildStdin, ChildStdout)> {
        self.child.stdin.take().zip(self.child.stdout.take())
    }

    /// Its exit status, when it has ended.
    pub fn ended(&mut self) -> Result<Option<ExitStatus>> {
        self.child
            .try_wait()
            .with_context(|| format!("wait for {}", self.name))
    }

    /// `kill -9`, and waits for the end.
    pub fn kill(&mut self) -> Result<()> {
        if self.ended()?.is_none() {
            self.child
                .kill()
                .with_context(|| format!("kill {}", self.name))?;
            self.child
                .wait()
                .with_context(|| format!("wait for {}", self.name))?;
        }
        Ok(())
    }

    /// Sends SIGTERM and waits at most `limit` for the end.
    pub fn terminate(&mut self, limit: Duration) -> Result<ExitStatus> {
        let pid = i32::try_from(self.pid())
            .ok()
            .and_then(rustix::process::Pid::from_raw)
            .context("pid out of range")?;
        if self.ended()?.is_none() {
            rustix::process::kill_process(pid, rustix::process::Signal::TERM)
                .with_context(|| format!("signal {}", self.name))?;
        }
        wait_until(limit, || self.ended())
            .with_context(|| format!("{} does not end on SIGTERM", self.name))
    }
}

impl Drop for Guarded {
    fn drop(&mut self) {
        let _ = self.kill();
    }
}

/// Makes `command` run in the network namespace called `name`. Only the network changes, where `ip netns
/// exec` changes the mounts as well, and the process started is the program itself, which dies with whoever
/// started it.
pub fn enter_namespace(command: &mut Command, name: &str) -> Result<()> {
    let path = Path::new("/run/netns").join(name);
    let namespace = std::fs::File::open(&path)
        .with_context(|| format!("open the network namespace {}", path.display()))?;
    // SAFETY: between fork and exec only setns(2) runs, which is async-signal-safe.
    unsafe {
        command.pre_exec(move || {
            if libc::setns(namespace.as_raw_fd(), libc::CLONE_NEWNET) == 0 {
                Ok(())
            } else {
                Err(std::io::Error::last_os_error())
            }
        });
    }
    Ok(())
}

/// Calls `ready` until it yields a value; fails when [`LOAD_FACTOR`] times `limit` has passed. `limit` is
/// what a machine with nothing else to do needs, with room to spare: it ends tests that hang and measures
/// nothing.
pub fn wait_until<T>(limit: Duration, mut ready: impl FnMut() -> Result<Option<T>>) -> Result<T> {
    let limit = limit * LOAD_FACTOR;
    let start = Instant::now();
    loop {
        if let Some(value) = ready()? {
            return Ok(value);
        }
        if start.elapsed() > limit {
            bail!("not within {} s", limit.as_secs());
        }
        std::thread::sleep(POLL_INTERVAL);
    }
}

/// Runs a command to its end and returns its stdout; an error quotes what it wrote to stderr.
pub fn run(command: &mut Command) -> Result<String> {
    let output = command
        .stdin(Stdio::null())
        .output()
        .with_context(|| format!("run {:?}: is the program installed?", command.get_program()))?;
    if !output.status.success() {
        bail!(
            "{:?} {}: {}",
            command,
            describe(output.status),
            last_lines(&String::from_utf8_lossy(&output.stderr), QUOTED_LINES)
        );
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Calls `fetch`, which takes packages from a mirror, again after a pause when it fails: the mirror is not
/// what the tests are about. The last error is returned, the others are told on stderr.
pub fn fetch<T>(fetch: impl FnMut() -> Result<T>) -> Result<T> {
    fetch_with_pauses(FETCH_PAUSE, fetch)
}

fn fetch_with_pauses<T>(pause: Duration, mut fetch: impl FnMut() -> Result<T>) -> Result<T> {
    for _ in 1..FETCH_TRIES {
        match fetch() {
            Ok(value) => return Ok(value),
            Err(error) => eprintln!("rig: trying again in {} s: {error:#}", pause.as_secs()),
        }
        std::thread::sleep(pause);
    }
    fetch()
}

/// Exit code of a program that ended with `result`. Prints an error with its causes on one line of stderr,
/// without a backtrace: the reader is a person at a shell, and many machines set `RUST_BACKTRACE`.
pub fn exit_code(program: &str, result: Result<()>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{}", error_line(program, &error));
            ExitCode::FAILURE
        }
    }
}

fn error_line(program: &str, error: &anyhow::Error) -> String {
    format!("{program}: error: {error:#}")
}

/// "exited with 3" or "was killed by signal 9".
pub fn describe(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("exited with {code}"),
        (None, Some(signal)) => format!("was killed by signal {signal}"),
        (None, None) => "ended".to_owned(),
    }
}

/// The end of a log file, for error messages.
pub fn log_tail(path: &Path) -> String {
    let mut bytes = Vec::new();
    match std::fs::File::open(path).and_then(|mut file| file.read_to_end(&mut bytes)) {
        Ok(_) => last_lines(&String::from_utf8_lossy(&bytes), QUOTED_LINES),
        Err(error) => format!("(no log: {error})"),
    }
}

fn last_lines(text: &str, count: usize) -> String {
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(count)..].join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_is_printed_with_its_causes_and_no_backtrace() {
        let error = anyhow::anyhow!("no such file").context("read the configuration");
        let line = error_line("xtask", &error);
        assert_eq!(line, "xtask: error: read the configuration: no such file");
    }

    #[test]
    fn a_fetch_is_tried_again_and_ends_with_its_last_error() {
        for failures in 0..=FETCH_TRIES {
            let mut tries = 0;
            let fetched = fetch_with_pauses(Duration::ZERO, || {
                tries += 1;
                match tries > failures {
                    true => Ok(tries),
                    false => bail!("try {tries}"),
                }
            });
            match fetched {
                Ok(at) => assert_eq!(at, failures + 1),
                Err(error) => assert_eq!(error.to_string(), format!("try {FETCH_TRIES}")),
            }
            assert_eq!(tries, FETCH_TRIES.min(failures + 1));
        }
    }
}
