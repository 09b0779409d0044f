//! Programs of the system, run within a limit.

use std::ffi::OsStr;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};

use super::{HelperError, Result};

/// Where the system's programs are. The environment of whoever started the helper does not count.
pub const PATH: &str = "/usr/sbin:/usr/bin:/sbin:/bin";
/// A program that has not ended by then is killed.
const LIMIT: Duration = Duration::from_secs(90);

/// What a program came to.
#[derive(Debug)]
pub struct Ended {
    /// Its exit status; none after a signal.
    pub code: Option<i32>,
    /// What it printed.
    pub text: String,
    /// What it complained about.
    pub complaint: String,
}

/// Whether a program is there.
pub fn is_installed(program: &str) -> bool {
    PATH.split(':')
        .any(|dir| Path::new(dir).join(program).is_file())
}

/// A program of the system, to be started.
pub fn program(name: &str) -> Command {
    let mut command = Command::new(name);
    command
        .env_clear()
        .env("PATH", PATH)
        .env("LC_ALL", "C")
        .stdin(Stdio::null());
    command
}

/// Runs a program to its end.
pub fn run<S: AsRef<OsStr>>(name: &str, args: impl IntoIterator<Item = S>) -> Result<Ended> {
    let mut command = program(name);
    let child = command
        .args(args)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn();
    let child = child.map_err(|e| HelperError::io(format!("start {name}"), &e))?;
    let pid = Pid::from_child(&child);
    let (sender, ended) = channel();
    std::thread::spawn(move || sender.send(child.wait_with_output()));
    let output = match ended.recv_timeout(LIMIT) {
        Ok(output) => output.map_err(|e| HelperError::io(format!("run {name}"), &e))?,
        Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {
            // One that waits in the kernel ends when the kernel lets it.
            let _ = kill_process(pid, Signal::KILL);
            return Err(HelperError::new(
                format!("{name} has not ended within {} s", LIMIT.as_secs()),
                "look at the kernel's log (dmesg) and at `penstock health`",
            ));
        }
    };
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
    Ok(Ended {
        code: output.status.code(),
        text: text(&output.stdout),
        complaint: text(&output.stderr),
    })
}

/// Runs a program that must succeed; what it printed.
pub fn succeed<S: AsRef<OsStr>>(name: &str, args: impl IntoIterator<Item = S>) -> Result<String> {
    let ended = run(name, args)?;
    if ended.code == Some(0) {
        return Ok(ended.text);
    }
    let complaint = if ended.complaint.is_empty() {
        &ended.text
    } else {
        &ended.complaint
    };
    let first = complaint.lines().next().unwrap_or("no reason given");
    Err(HelperError::new(
        format!("{name} failed: {first}"),
        "look at the kernel's log (dmesg)",
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_that_fails_says_why_in_one_line() {
        let told = succeed("sh", ["-c", "echo first >&2; echo second >&2; exit 3"]).unwrap_err();
        assert_eq!(told.error, "sh failed: first");
        assert_eq!(succeed("sh", ["-c", "echo done"]).unwrap(), "done");
        assert!(succeed("no-such-program", [""]).is_err());
        assert!(is_installed("sh") && !is_installed("no-such-program"));
    }
}
