//! A machine as far as a person at its shell can tell: its own host name, network, processes, `/srv` and
//! `/run`, and one shell that keeps what is typed into it running. For tests of what the documents tell
//! people to type.

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use guest_rig::process::{Guarded, run, wait_until};

/// Longest command: a start, or an `attach` that waits for a lease, on a busy machine.
const COMMAND_LIMIT: Duration = Duration::from_secs(120);
/// Sparse filesystem behind `/srv`. By default a node takes half of what is free there.
const DISK: u64 = 40 << 30;
/// What the shell prints when a command is done; its status follows.
const DONE: &str = "@@done";
/// What a daemon prints when it serves.
const READY: &str = "penstock: ready:";

/// What a command printed, and how it ended.
#[derive(Debug)]
pub struct Typed {
    /// Its exit status.
    pub status: i32,
    /// Its standard output.
    pub stdout: String,
}

/// The machine. Dropping it kills everything that runs on it, as a loss of power does.
#[derive(Debug)]
pub struct Machine {
    name: String,
    // The first process of the machine's own process namespace: the others end with it.
    shell: Guarded,
    typed: ChildStdin,
    printed: Receiver<String>,
    errors: PathBuf,
}

impl Machine {
    /// Starts a machine called `name`, whose files lie in `scratch` and whose programs are found in
    /// `programs` first. It is in the network namespace `network`, or in one with nothing but a loopback
    /// device.
    pub fn start(
        name: &str,
        scratch: &Path,
        programs: &Path,
        network: Option<&str>,
    ) -> Result<Self> {
        let image = scratch.join(format!("{name}.img"));
        std::fs::File::create(&image)?.set_len(DISK)?;
        run(Command::new("mkfs.ext4")
            .args(["-q", "-E", "nodiscard"])
            .arg(&image))?;
        let errors = scratch.join(format!("{name}.err"));
        let mut command = match network {
            Some(namespace) => {
                let mut command = Command::new("nsenter");
                command.arg(format!("--net=/run/netns/{namespace}"));
                command.arg("unshare");
                command
            }
            None => {
                let mut command = Command::new("unshare");
                command.arg("--net");
                command
            }
        };
        command
            .args([
                "--mount",
                "--uts",
                "--pid",
                "--fork",
                "--kill-child",
                "--mount-proc",
            ])
            .args(["bash", "--noprofile", "--norc"])
            .env("PATH", path_with(programs)?)
            .env_remove("PENSTOCK_API")
            .env_remove("PENSTOCK_DATA")
            .env_remove("PENSTOCK_RUN_DIR")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(std::fs::File::create(&errors)?);
        let mut shell = Guarded::spawn(&mut command, "the machine's shell")?;
        let (typed, output) = shell.take_pipes().context("the shell has no pipes")?;
        let (sender, printed) = channel();
        std::thread::spawn(move || {
            // Ends with the shell, or with the machine that listens.
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                if sender.send(line).is_err() {
                    return;
                }
            }
        });
        let mut machine = Self {
            name: name.to_owned(),
            shell,
            typed,
            printed,
            errors,
        };
        machine.ok(&format!("hostname {name}"))?;
        machine.ok("ip link set lo up")?;
        machine.ok(&format!("mount -o loop {} /srv", image.display()))?;
        machine.ok("mount -t tmpfs -o mode=755 tmpfs /run")?;
        Ok(machine)
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Types a command as it stands and waits for its end. If it leaves a daemon in the background, until
    /// that is ready.
    pub fn type_in(&mut self, command: &str) -> Result<Typed> {
        let before = self.errors().matches(READY).count();
        writeln!(self.typed, "{command}\necho {DONE} $?").context("type into the shell")?;
        let mut stdout = String::new();
        let status = loop {
            let line = self.printed.recv_timeout(COMMAND_LIMIT);
            let line = line
                .with_context(|| format!("{}$ {command}: no end\n{}", self.name, self.errors()))?;
            match line.strip_prefix(DONE) {
                Some(status) => break status.trim().parse()?,
                None => {
                    stdout.push_str(&line);
                    stdout.push('\n');
                }
            }
        };
        if command.contains("penstock serve") {
            wait_until(COMMAND_LIMIT, || {
                Ok((self.errors().matches(READY).count() > before).then_some(()))
            })
            .with_context(|| format!("{}$ {command}: not ready\n{}", self.name, self.errors()))?;
        }
        Ok(Typed { status, stdout })
    }

    /// Types a command that must succeed; returns what it printed.
    pub fn ok(&mut self, command: &str) -> Result<String> {
        let typed = self.type_in(command)?;
        let errors = self.errors();
        ensure!(
            typed.status == 0,
            "{}$ {command}: exit status {}\n{}{errors}",
            self.name,
            typed.status,
            typed.stdout
        );
        Ok(typed.stdout)
    }

    /// Types a command again and again until it succeeds, as a person does who is told to wait for something.
    pub fn until_ok(&mut self, command: &str) -> Result<String> {
        let mut last = String::new();
        let done = wait_until(COMMAND_LIMIT, || {
            let typed = self.type_in(command)?;
            last = typed.stdout;
            Ok((typed.status == 0).then(|| last.clone()))
        });
        done.with_context(|| format!("{}$ {command}: {last}\n{}", self.name, self.errors()))
    }

    /// A program that runs on this machine beside its shell.
    pub fn command(&self, script: &str) -> Result<Command> {
        let pid = self.shell.pid();
        let children = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children"))?;
        let Some(first) = children.split_whitespace().next() else {
            bail!("machine {} has ended", self.name);
        };
        let mut command = Command::new("nsenter");
        // Not into the processes' namespace: whoever starts it could not kill it there.
        command
            .args(["--target", first, "--mount", "--net", "--uts"])
            .args(["bash", "--noprofile", "--norc", "-c", script]);
        Ok(command)
    }

    /// Everything that was written to standard error since the start, daemons' logs among it.
    pub fn errors(&self) -> String {
        std::fs::read_to_string(&self.errors).unwrap_or_default()
    }
}

fn path_with(programs: &Path) -> Result<std::ffi::OsString> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let usual = ["/usr/local/sbin", "/usr/sbin", "/sbin"].map(PathBuf::from);
    let all = std::iter::once(programs.to_owned())
        .chain(std::env::split_paths(&path))
        .chain(usual);
    std::env::join_paths(all).context("put PATH together")
}
