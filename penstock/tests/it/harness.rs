//! A daemon in a temporary directory that ends with its test.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use tempfile::TempDir;

/// Size of the device files that tests use.
pub const DEVICE_SIZE: &str = "1G";
/// A daemon that is neither ready nor ended by then hangs.
const READY_MAX: Duration = Duration::from_secs(60);

/// The binary under test.
pub fn penstock() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_penstock"));
    command
        .stdin(Stdio::null())
        // Not on the machine's own list of daemons: nobody finds them there who does not mean them.
        .env("PENSTOCK_RUN_DIR", env!("CARGO_TARGET_TMPDIR"))
        // Nor by what the machine's own daemon goes by.
        .env("PENSTOCK_CONFIG", "")
        .env_remove("PENSTOCK_API")
        .env_remove("PENSTOCK_DATA")
        .env_remove("PENSTOCK_LOG");
    command
}

/// Runs the binary to its end.
pub fn run(args: &[&str]) -> Output {
    penstock().args(args).output().unwrap()
}

/// Starts a daemon that must refuse to run, and returns what it said. One that runs after all is killed.
pub fn serve(data: &Path) -> Output {
    serve_with(data, &[])
}

/// Same, with further options.
pub fn serve_with(data: &Path, options: &[&str]) -> Output {
    let mut child = penstock()
        .args(["serve", "--device-size", DEVICE_SIZE, "--data"])
        .arg(data)
        .args(options)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let end = Instant::now() + READY_MAX;
    while child.try_wait().unwrap().is_none() {
        if Instant::now() > end {
            child.kill().unwrap();
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    child.wait_with_output().unwrap()
}

/// Checks that a command failed with one line on stderr and nothing on stdout, and returns the line.
pub fn one_error(output: &Output, code: i32) -> String {
    let told = String::from_utf8(output.stderr.clone()).unwrap();
    assert_eq!(output.status.code(), Some(code), "{told}");
    assert!(
        output.stdout.is_empty(),
        "{}",
        String::from_utf8_lossy(&output.stdout)
    );
    // A daemon that fails may have logged before; the error is its last line, and its only one of that kind.
    let errors: Vec<&str> = told
        .lines()
        .filter(|l| l.starts_with("penstock: error: "))
        .collect();
    assert_eq!(errors.len(), 1, "{told}");
    assert_eq!(told.lines().last(), Some(errors[0]), "{told}");
    errors[0]
        .strip_prefix("penstock: error: ")
        .unwrap()
        .to_owned()
}

/// A fresh directory for one test.
pub fn temp() -> TempDir {
    tempfile::Builder::new()
        .prefix("penstock-test-")
        .tempdir()
        .unwrap()
}

/// A daemon with volume `a` of 64 MiB, and the socket in its directory at which that is attached.
pub fn attached() -> (TempDir, Daemon, PathBuf) {
    let dir = temp();
    let daemon = Daemon::start(&dir.path().join("data"));
    let socket = dir.path().join("a.sock");
    daemon.ok(&["volume", "create", "a", "64M"]);
    daemon.attach("a", &socket);
    (dir, daemon, socket)
}

/// A running daemon. Killed when dropped.
pub struct Daemon {
    child: Child,
    data: PathBuf,
    /// What it said until it was ready.
    pub said: Vec<String>,
}

impl Daemon {
    /// Attaches a volume at a socket.
    pub fn attach(&self, volume: &str, socket: &Path) {
        self.ok(&["attach", "volume", volume, "--socket", text(socket)]);
    }

    /// Attaches a filesystem at a socket, with its name as the tag.
    pub fn attach_fs(&self, name: &str, socket: &Path) {
        let socket = text(socket);
        self.ok(&["attach", "fs", name, "--tag", name, "--socket", socket]);
    }

    /// Starts a daemon on `data` and waits until it is ready.
    pub fn start(data: &Path) -> Self {
        Self::start_with(data, &[])
    }

    /// Same, with further options.
    pub fn start_with(data: &Path, options: &[&str]) -> Self {
        Self::start_by(penstock(), data, options)
    }

    /// Same, by a command that may prepare more.
    pub fn start_by(command: Command, data: &Path, options: &[&str]) -> Self {
        StartingDaemon::begin(command, data, options).ready()
    }

    /// Its data directory.
    pub fn data(&self) -> &Path {
        &self.data
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// A command that talks to it.
    pub fn command(&self, args: &[&str]) -> Command {
        let mut command = penstock();
        command.args(args).arg("--data").arg(&self.data);
        command
    }

    /// Runs a command that talks to it.
    pub fn run(&self, args: &[&str]) -> Output {
        self.command(args).output().unwrap()
    }

    /// Same; it must succeed. Returns its standard output.
    pub fn ok(&self, args: &[&str]) -> String {
        let output = self.run(args);
        let told = String::from_utf8_lossy(&output.stderr);
        assert!(
            output.status.success(),
            "penstock {}: {told}",
            args.join(" ")
        );
        String::from_utf8(output.stdout).unwrap()
    }

    /// Same; its standard output is JSON.
    pub fn json(&self, args: &[&str]) -> serde_json::Value {
        let mut args = args.to_vec();
        args.push("--json");
        serde_json::from_str(&self.ok(&args)).unwrap()
    }

    /// Same, whatever its exit code.
    pub fn json_of(&self, args: &[&str]) -> serde_json::Value {
        let output = self.run(&[args, &["--json"]].concat());
        serde_json::from_slice(&output.stdout).unwrap()
    }

    /// Runs a command that must fail with exit code 1, and returns its error.
    pub fn refused(&self, args: &[&str]) -> String {
        one_error(&self.run(args), 1)
    }

    /// Sends a signal.
    pub fn signal(&self, signal: i32) {
        // SAFETY: a plain system call on a child that has not been waited for.
        let sent = unsafe { libc::kill(self.pid() as libc::pid_t, signal) };
        assert_eq!(sent, 0);
    }

    /// Sends SIGSTOP and waits until every thread has stopped: a running thread continues for a moment.
    pub fn stop(&self) {
        self.signal(libc::SIGSTOP);
        let tasks = format!("/proc/{}/task", self.pid());
        let is_stopped = |task: std::io::Result<std::fs::DirEntry>| {
            let stat = std::fs::read_to_string(task.unwrap().path().join("stat")).unwrap();
            let (_, state) = stat.rsplit_once(')').unwrap();
            state.trim_start().starts_with('T')
        };
        while !std::fs::read_dir(&tasks).unwrap().all(is_stopped) {
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// SIGTERM, and waits for the end.
    pub fn terminate(mut self) -> ExitStatus {
        self.signal(libc::SIGTERM);
        self.child.wait().unwrap()
    }

    /// Waits for an end that comes by itself.
    pub fn wait(mut self) -> ExitStatus {
        let mut ended = None;
        eventually(|| {
            ended = self.child.try_wait().unwrap();
            ended.is_some()
        });
        ended.unwrap()
    }

    /// SIGKILL, and waits for the end.
    pub fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A daemon that is not ready yet and may wait for others. Killed when dropped.
pub struct StartingDaemon {
    daemon: Daemon,
    lines: mpsc::Receiver<String>,
}

impl StartingDaemon {
    /// Starts a daemon on `data` with a command that may have further preparations.
    pub fn begin(mut command: Command, data: &Path, options: &[&str]) -> Self {
        // SAFETY: between fork and exec only a plain system call is made.
        unsafe {
            // A killed test drops nothing, so the kernel ends its daemon with the thread that started it.
            command.pre_exec(
                || match libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) {
                    0 => Ok(()),
                    _ => Err(std::io::Error::last_os_error()),
                },
            );
        }
        let mut child = command
            .args([
                "serve",
                "--device-size",
                DEVICE_SIZE,
                "--threads",
                "1",
                "--data",
            ])
            .arg(data)
            .args(options)
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let stderr = BufReader::new(child.stderr.take().unwrap()).lines();
        let (sender, lines) = mpsc::channel();
        std::thread::spawn(move || {
            for line in stderr.map_while(Result::ok) {
                // After the daemon is ready no one receives the lines, but the pipe must be emptied.
                let _ = sender.send(line);
            }
        });
        let daemon = Daemon {
            child,
            data: data.into(),
            said: Vec::new(),
        };
        Self { daemon, lines }
    }

    /// Waits until the daemon has printed these words. Returns the line.
    pub fn says(&mut self, words: &str) -> String {
        loop {
            let line = self.lines.recv_timeout(READY_MAX).unwrap_or_else(|e| {
                panic!(
                    "the daemon did not say {words:?} ({e}): {:#?}",
                    self.daemon.said
                )
            });
            self.daemon.said.push(line.clone());
            if line.contains(words) {
                return line;
            }
        }
    }

    /// Waits until the daemon is ready.
    pub fn ready(mut self) -> Daemon {
        self.says("penstock: ready:");
        self.daemon
    }

    /// Sends SIGKILL and waits for the end of the process.
    pub fn kill(self) {
        self.daemon.kill();
    }
}

/// Asks a vhost-user socket for its features, as every front end does first. Returns the connection, still
/// open.
pub fn greet(socket: &Path) -> (UnixStream, u64) {
    let mut stream = UnixStream::connect(socket).unwrap();
    let features = greet_on(&mut stream);
    (stream, features)
}

/// As [`greet`], with a socket that a program is about to serve. The file alone is no sign of it: it is there
/// before it takes connections.
pub fn greet_once_served(socket: &Path) -> (UnixStream, u64) {
    let mut connected = None;
    eventually(|| {
        connected = UnixStream::connect(socket).ok();
        connected.is_some()
    });
    let mut stream = connected.unwrap();
    let features = greet_on(&mut stream);
    (stream, features)
}

/// As [`greet`], on a connection that is there.
pub fn greet_on(stream: &mut UnixStream) -> u64 {
    const GET_FEATURES: u32 = 1;
    const VERSION: u32 = 1;
    let mut request = Vec::new();
    for word in [GET_FEATURES, VERSION, 0] {
        request.extend_from_slice(&word.to_ne_bytes());
    }
    stream.write_all(&request).unwrap();
    let mut answer = [0; 20];
    stream.read_exact(&mut answer).unwrap();
    u64::from_ne_bytes(answer[12..].try_into().unwrap())
}

/// Path as text, for command lines.
pub fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// Whether anybody has a file open to write it, be it the kernel for an io_uring: else it grants a lease for
/// reads.
pub fn is_written_to(path: &Path) -> bool {
    let file = std::fs::File::open(path).unwrap();
    // SAFETY: the descriptor is open, and the call takes a number.
    unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETLEASE, libc::F_RDLCK) != 0 }
}

/// Waits until something has happened; a failing test waits as long as for a daemon that hangs.
pub fn eventually(mut happened: impl FnMut() -> bool) {
    let end = Instant::now() + READY_MAX;
    while !happened() {
        assert!(Instant::now() < end, "it never happened");
        std::thread::sleep(Duration::from_millis(20));
    }
}
