//! Running a program on content that nobody vouches for: what it may open, and how much memory and time it
//! gets.
//!
//! The program has two files of ours, as its standard input and, where it writes, its standard output. It
//! names them `/proc/self/fd/0` and `/proc/self/fd/1`, which lead to the very files that were opened here,
//! whatever their paths lead to by now. Where the kernel has Landlock the program can open nothing else but
//! what it is made of.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use api::size::Size;
use landlock::{
    ABI, Access, AccessFs, BitFlags, CompatLevel, Compatible, PathBeneath, Ruleset, RulesetAttr,
    RulesetCreatedAttr, RulesetError, path_beneath_rules,
};
use rustix::process::{Resource, Rlimit, setrlimit};

/// Longest text that is kept of what a program says is wrong; the rest is dropped.
const STDERR_BYTES_MAX: u64 = 64 << 10;
/// Longest line that a program may print; a longer one is torn, and its reader then finds it malformed.
const LINE_BYTES_MAX: u64 = 64 << 10;
/// How often is looked whether a program has ended, or goes on.
const POLL: Duration = Duration::from_millis(20);
/// Seconds between SIGXCPU and SIGKILL for a program that does not end at its limit.
const CPU_GRACE_S: u64 = 5;
/// What programs are made of. What is not there is left out.
const PROGRAM_PATHS: [&str; 12] = [
    "/usr",
    "/bin",
    "/sbin",
    "/lib",
    "/lib64",
    "/opt",
    "/nix/store",
    "/gnu/store",
    "/etc/ld.so.cache",
    "/etc/ld.so.preload",
    "/dev/urandom",
    "/sys/devices/system",
];

/// What a program may take. At each limit it is ended, and the error names the limit.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Its address space.
    pub memory_bytes: u64,
    /// Processor time.
    pub cpu: Duration,
    /// Time without using the processor at all: it waits for a disk or network that does not answer.
    pub stall: Duration,
}

/// Which limit a program came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Limit {
    /// [`Limits::memory_bytes`].
    Memory,
    /// [`Limits::cpu`].
    Cpu,
    /// [`Limits::stall`].
    Stall,
}

/// How a program ended.
#[derive(Debug)]
pub struct Ended {
    /// Exit code or signal.
    pub status: ExitStatus,
    /// What it said was wrong.
    pub stderr: String,
    /// The limit that ended it.
    pub limit: Option<Limit>,
}

impl Limits {
    /// Says of a limit that it was reached.
    pub fn describe(&self, limit: Limit) -> String {
        match limit {
            Limit::Memory => format!(
                "it needs more memory than its limit, {}",
                Size(self.memory_bytes)
            ),
            Limit::Cpu => format!(
                "it takes more processor time than its limit, {} s",
                self.cpu.as_secs()
            ),
            Limit::Stall => format!(
                "it made no progress for {} s, its limit",
                self.stall.as_secs()
            ),
        }
    }
}

/// Runs a command on `input` within limits, and gives each line that it prints to `line`. With an `output`
/// its standard output is that file, and no line comes.
pub fn run(
    mut command: Command,
    (input, output): (&File, Option<&File>),
    limits: Limits,
    line: &mut (dyn FnMut(&str) + Send),
) -> io::Result<Ended> {
    command.stdin(input.try_clone()?).stderr(Stdio::piped());
    match output {
        Some(file) => command.stdout(file.try_clone()?),
        None => command.stdout(Stdio::piped()),
    };
    let files = [Some(input), output];
    let rules = rules(Path::new(command.get_program()), files).map_err(io::Error::other)?;
    // SAFETY: between fork and exec only plain system calls are made.
    unsafe {
        command.pre_exec(move || confine(limits, rules.as_ref()));
    }
    let mut child = command.spawn()?;
    let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
    std::thread::scope(|scope| {
        let said = scope.spawn(move || stderr.map(read_bounded).unwrap_or_default());
        let lines = scope.spawn(move || stdout.map_or(Ok(()), |out| read_lines(out, line)));
        let waited = wait(&mut child, limits.stall);
        if waited.is_err() {
            // The error at hand says more than that of ending it.
            let _ = child.kill();
        }
        let (status, is_stalled) = waited?;
        let stderr = said.join().unwrap_or_default();
        lines.join().unwrap_or(Ok(()))?;
        let limit = match is_stalled {
            true => Some(Limit::Stall),
            false => limit_of(status, &stderr),
        };
        Ok(Ended {
            status,
            stderr,
            limit,
        })
    })
}

/// In the child: limits, and the paths that it may open.
fn confine(limits: Limits, rules: Option<&OwnedFd>) -> io::Result<()> {
    let cpu_s = limits.cpu.as_secs().max(1);
    let limit = |current, maximum| Rlimit {
        current: Some(current),
        maximum: Some(maximum),
    };
    let memory = limits.memory_bytes;
    setrlimit(Resource::As, limit(memory, memory))?;
    setrlimit(Resource::Cpu, limit(cpu_s, cpu_s + CPU_GRACE_S))?;
    setrlimit(Resource::Core, limit(0, 0))?;
    rustix::thread::set_no_new_privs(true)?;
    if let Some(rules) = rules {
        // SAFETY: a plain system call on a descriptor that is open.
        let done = unsafe { libc::syscall(libc::SYS_landlock_restrict_self, rules.as_raw_fd(), 0) };
        if done != 0 {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(())
}

/// What a program may open: itself, its libraries, and the files it is given. `None` where the kernel has
/// no Landlock.
fn rules(program: &Path, files: [Option<&File>; 2]) -> Result<Option<OwnedFd>, RulesetError> {
    let read: BitFlags<AccessFs> = AccessFs::Execute | AccessFs::ReadFile | AccessFs::ReadDir;
    let mut ruleset = Ruleset::default()
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(AccessFs::from_all(ABI::V5))?
        .create()?
        .add_rules(path_beneath_rules(PROGRAM_PATHS, read))?
        .add_rules(path_beneath_rules(directory_of(program), read))?
        .add_rules(path_beneath_rules(
            ["/dev/null"],
            AccessFs::ReadFile | AccessFs::WriteFile,
        ))?;
    let own = [
        BitFlags::from(AccessFs::ReadFile),
        AccessFs::ReadFile | AccessFs::WriteFile | AccessFs::Truncate,
    ];
    for (file, access) in files.into_iter().zip(own) {
        if let Some(file) = file {
            // Block devices are asked for their size and sectors.
            let access = access | AccessFs::IoctlDev;
            ruleset = ruleset.add_rule(PathBeneath::new(file.as_fd(), access))?;
        }
    }
    Ok(ruleset.into())
}

/// The directory in PATH where a program is, with what its links lead to.
fn directory_of(program: &Path) -> Vec<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let found = std::env::split_paths(&path)
        .map(|dir| dir.join(program))
        .find(|path| path.is_file());
    let real = found.as_ref().and_then(|path| path.canonicalize().ok());
    let parent = |path: PathBuf| path.parent().map(Path::to_owned);
    found.into_iter().chain(real).filter_map(parent).collect()
}

/// Waits for the end of a child. The second value: whether it was ended because it did nothing.
fn wait(child: &mut Child, stall: Duration) -> io::Result<(ExitStatus, bool)> {
    let (mut used, mut since) = (None, Instant::now());
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok((status, false));
        }
        let now = cpu_ticks(child.id());
        if now != used {
            (used, since) = (now, Instant::now());
        } else if since.elapsed() > stall {
            child.kill()?;
            return Ok((child.wait()?, true));
        }
        std::thread::sleep(POLL);
    }
}

/// Processor time that a process has taken.
fn cpu_ticks(pid: u32) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // Behind the name, which may hold anything: state, ten numbers, then user and system time.
    let (_, rest) = stat.rsplit_once(") ")?;
    let mut times = rest.split(' ').skip(11).take(2);
    Some(times.next()?.parse::<u64>().ok()? + times.next()?.parse::<u64>().ok()?)
}

fn limit_of(status: ExitStatus, stderr: &str) -> Option<Limit> {
    if status.success() {
        return None;
    }
    if status.signal() == Some(libc::SIGXCPU) {
        return Some(Limit::Cpu);
    }
    // Nothing tells but what it says: qemu's own errors, glib's, and those of threads without a stack.
    let said = stderr.to_lowercase();
    let words = [
        "cannot allocate memory",
        "could not allocate",
        "failed to allocate",
        "out of memory",
        "thread_create: resource temporarily unavailable",
    ];
    words
        .iter()
        .any(|word| said.contains(word))
        .then_some(Limit::Memory)
}

fn read_bounded(mut from: impl Read) -> String {
    let mut text = Vec::new();
    // What cannot be read is not told; the rest is drained so that the program does not wait.
    let _ = from.by_ref().take(STDERR_BYTES_MAX).read_to_end(&mut text);
    let _ = io::copy(&mut from, &mut io::sink());
    String::from_utf8_lossy(&text).into_owned()
}

fn read_lines(from: impl Read, line: &mut (dyn FnMut(&str) + Send)) -> io::Result<()> {
    let mut from = BufReader::new(from);
    let mut bytes = Vec::new();
    loop {
        bytes.clear();
        let limited = &mut from.by_ref().take(LINE_BYTES_MAX);
        if limited.read_until(b'\n', &mut bytes)? == 0 {
            return Ok(());
        }
        line(String::from_utf8_lossy(&bytes).trim_end());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: Limits = Limits {
        memory_bytes: 1 << 30,
        cpu: Duration::from_secs(60),
        stall: Duration::from_secs(60),
    };

    /// Runs a shell command; returns how it ended and what it printed.
    fn shell(text: &str, limits: Limits) -> (Ended, Vec<String>) {
        let mut command = Command::new("sh");
        command.args(["-c", text]);
        let input = tempfile::tempfile().unwrap();
        let mut lines = Vec::new();
        let ended = run(command, (&input, None), limits, &mut |line| {
            lines.push(line.to_owned());
        });
        (ended.unwrap(), lines)
    }

    #[test]
    fn a_program_within_its_limits_is_heard() {
        let (ended, lines) = shell("echo one; echo two; echo bad >&2; exit 3", LIMITS);
        assert_eq!(lines, ["one", "two"]);
        assert_eq!((ended.status.code(), ended.limit), (Some(3), None));
        assert_eq!(ended.stderr.trim(), "bad");
    }

    #[test]
    fn a_program_ends_at_its_processor_time() {
        let limits = Limits {
            cpu: Duration::from_secs(1),
            ..LIMITS
        };
        let (ended, _) = shell("while :; do :; done", limits);
        assert_eq!(ended.limit, Some(Limit::Cpu), "{ended:?}");
        assert!(limits.describe(Limit::Cpu).contains("1 s"));
    }

    #[test]
    fn a_program_that_does_nothing_is_ended() {
        let limits = Limits {
            stall: Duration::from_millis(500),
            ..LIMITS
        };
        let (ended, _) = shell("exec sleep 1000", limits);
        assert_eq!(ended.limit, Some(Limit::Stall), "{ended:?}");
    }

    #[test]
    fn a_program_ends_at_its_memory() {
        let limits = Limits {
            memory_bytes: 256 << 20,
            ..LIMITS
        };
        // It takes its buffer whole, and reads nothing.
        let takes = "exec dd if=/dev/null of=/dev/null bs=512M count=1";
        let (ended, _) = shell(takes, LIMITS);
        assert!(ended.status.success(), "{ended:?}");
        let (ended, _) = shell(takes, limits);
        assert!(!ended.status.success(), "{ended:?}");
    }

    #[test]
    fn a_program_opens_its_own_files_and_no_others() {
        let dir = tempfile::tempdir().unwrap();
        let (mine, other) = (dir.path().join("mine"), dir.path().join("other"));
        for path in [&mine, &other] {
            std::fs::write(path, path.as_os_str().as_encoded_bytes()).unwrap();
        }
        let input = File::open(&mine).unwrap();
        // Its path leads elsewhere by now.
        std::fs::rename(&other, &mine).unwrap();
        let read = |what: &str| {
            let mut command = Command::new("cat");
            command.arg(what);
            let mut lines = String::new();
            let mut line = |line: &str| lines.push_str(line);
            let ended = run(command, (&input, None), LIMITS, &mut line).unwrap();
            (ended, lines)
        };
        let (ended, lines) = read("/proc/self/fd/0");
        assert_eq!(lines, mine.to_str().unwrap(), "{ended:?}");
        let (ended, lines) = read(mine.to_str().unwrap());
        assert!(
            ended.stderr.contains("Permission denied") && lines.is_empty(),
            "{ended:?}"
        );
    }
}
