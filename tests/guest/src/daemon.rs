//! The `penstock` daemon under test: started on a data directory, killed, restarted, and asked through its
//! CLI.

use std::ffi::OsString;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::complaints::{LogMark, complaints};
use crate::paths::penstock_binary;
use crate::process::{Guarded, describe, enter_namespace, log_tail, run, wait_until};
use crate::storage_daemon::pinned;

/// From start to the first answer on the admin socket, recovery included.
const START_LIMIT: Duration = Duration::from_secs(120);
/// SIGTERM drains guests' requests and checkpoints the store.
const STOP_LIMIT: Duration = Duration::from_secs(120);

/// Metrics wait for nobody.
const METRICS_LIMIT: Duration = Duration::from_secs(20);

/// How a daemon is started.
#[derive(Debug, Clone)]
pub struct DaemonOptions {
    /// The `penstock` binary.
    pub binary: PathBuf,
    /// Arguments after `serve --data DIR`.
    pub args: Vec<String>,
    /// The only processor that its threads run on.
    pub cpu: Option<usize>,
    /// Variables added to its environment.
    pub env: Vec<(String, OsString)>,
    /// The network namespace that it lives in, by the name under `/run/netns`.
    pub namespace: Option<String>,
}

impl DaemonOptions {
    /// A daemon of `binary` with `args` after `serve --data DIR`.
    pub fn new(binary: PathBuf, args: &[&str]) -> Self {
        let args = args.iter().map(|arg| (*arg).to_owned()).collect();
        Self {
            binary,
            args,
            cpu: None,
            env: Vec::new(),
            namespace: None,
        }
    }

    /// The same daemon with every thread on `cpu`.
    pub fn cpu(mut self, cpu: usize) -> Self {
        self.cpu = Some(cpu);
        self
    }

    /// The same daemon in a network namespace.
    pub fn namespace(mut self, name: &str) -> Self {
        self.namespace = Some(name.to_owned());
        self
    }

    /// The same daemon with a variable in its environment.
    pub fn env(mut self, name: &str, value: impl Into<OsString>) -> Self {
        self.env.push((name.to_owned(), value.into()));
        self
    }
}

/// A `penstock serve` on a data directory. Dropping it kills the process; the data stay.
#[derive(Debug)]
pub struct Daemon {
    data: PathBuf,
    options: DaemonOptions,
    process: Option<Guarded>,
    starts: u32,
}

impl Daemon {
    /// Starts an embedded node on `data`, with `args` after `serve --data DIR`, and waits until it answers.
    pub fn start(data: &Path, args: &[&str]) -> Result<Self> {
        Self::start_with(data, DaemonOptions::new(penstock_binary()?, args))
    }

    /// As [`Daemon::start`], with all that can be chosen.
    pub fn start_with(data: &Path, options: DaemonOptions) -> Result<Self> {
        let mut daemon = Self::stopped(data, options);
        daemon.start_again()?;
        Ok(daemon)
    }

    /// A daemon that does not run yet: its data directory can be prepared with [`Daemon::cli`] first.
    pub fn stopped(data: &Path, options: DaemonOptions) -> Self {
        Self {
            data: data.to_owned(),
            options,
            process: None,
            starts: 0,
        }
    }

    /// Starts it, once more after [`Daemon::kill`] or [`Daemon::stop`].
    pub fn start_again(&mut self) -> Result<()> {
        self.spawn()?;
        let log = self.log_path();
        wait_until(START_LIMIT, || {
            let process = self
                .process
                .as_mut()
                .context("the daemon was just started")?;
            if let Some(status) = process.ended()? {
                bail!("penstock serve {}: {}", describe(status), log_tail(&log));
            }
            Ok(self.serves().then_some(()))
        })
        .with_context(|| {
            format!(
                "penstock serve does not answer; its log ended with:\n{}",
                log_tail(&log)
            )
        })
    }

    /// Whether it runs and its start is done.
    pub fn serves(&self) -> bool {
        let status = self.try_cli(&["status", "--json"]);
        let status: Option<Value> = status
            .ok()
            .and_then(|text| serde_json::from_str(&text).ok());
        status.is_some_and(|status| status["is_starting"].is_null())
    }

    /// Starts the process and does not wait for it to answer.
    pub fn spawn(&mut self) -> Result<()> {
        let log = std::fs::OpenOptions::new()
            .create(true)
            .append(true)
            .open(self.log_path())
            .context("open the daemon's log")?;
        let mut command = pinned(&self.options.binary, self.options.cpu);
        command
            .args(["serve", "--data"])
            .arg(&self.data)
            .args(&self.options.args)
            // Not by what the machine's own daemon goes by.
            .env("PENSTOCK_CONFIG", "")
            .envs(self.options.env.iter().map(|(name, value)| (name, value)))
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log);
        if let Some(namespace) = &self.options.namespace {
            enter_namespace(&mut command, namespace)?;
        }
        self.process = Some(Guarded::spawn(&mut command, "penstock serve")?);
        self.starts += 1;
        Ok(())
    }

    /// `kill -9`.
    pub fn kill(&mut self) -> Result<()> {
        match self.process.take() {
            Some(mut process) => process.kill(),
            None => bail!("the daemon is not running"),
        }
    }

    /// SIGTERM; returns how it ended.
    pub fn stop(&mut self) -> Result<ExitStatus> {
        let mut process = self.process.take().context("the daemon is not running")?;
        process.terminate(STOP_LIMIT)
    }

    /// Its data directory.
    pub fn data(&self) -> &Path {
        &self.data
    }

    /// Its process id.
    pub fn pid(&self) -> Result<u32> {
        self.process
            .as_ref()
            .map(Guarded::pid)
            .context("the daemon is not running")
    }

    /// Whether it was started and not ended by the rig since.
    pub fn is_started(&self) -> bool {
        self.process.is_some()
    }

    /// How often it was started.
    pub fn starts(&self) -> u32 {
        self.starts
    }

    /// Everything it wrote since the first start.
    pub fn log(&self) -> String {
        std::fs::read_to_string(self.log_path()).unwrap_or_default()
    }

    /// Returns the end of the daemon's log.
    pub fn log_mark(&self) -> LogMark {
        LogMark::end_of(&self.log())
    }

    /// Fails if the daemon has logged a warning or an error since `mark`. For phases without faults: a
    /// warning must need an operator's action.
    pub fn ensure_no_complaints(&self, mark: LogMark) -> Result<()> {
        let found = complaints(&self.log(), mark);
        if !found.is_empty() {
            bail!(
                "a healthy daemon logged warnings or errors ({}):\n{}",
                self.log_path().display(),
                found.join("\n")
            );
        }
        Ok(())
    }

    /// Runs `penstock ARGS --data DIR` and returns its stdout.
    pub fn cli(&self, args: &[&str]) -> Result<String> {
        self.try_cli(args)
            .with_context(|| format!("penstock {}", args.join(" ")))
    }

    /// Runs `penstock ARGS --json --data DIR` and parses its stdout.
    pub fn json(&self, args: &[&str]) -> Result<Value> {
        let mut all = args.to_vec();
        all.push("--json");
        let text = self.cli(&all)?;
        serde_json::from_str(&text)
            .with_context(|| format!("penstock {} --json printed {text:?}", args.join(" ")))
    }

    /// Creates a volume and attaches it; returns the attachment's socket.
    pub fn disk(&self, name: &str, size: &str, queues: u16) -> Result<PathBuf> {
        self.cli(&["volume", "create", name, size])?;
        self.attach(name, queues)
    }

    /// Attaches an existing volume; returns the attachment's socket.
    pub fn attach(&self, name: &str, queues: u16) -> Result<PathBuf> {
        self.attach_with(name, queues, &[])
    }

    /// Attaches an existing volume with further options. Returns the attachment's socket.
    pub fn attach_with(&self, name: &str, queues: u16, options: &[&str]) -> Result<PathBuf> {
        let socket = self.data.join(format!("{name}.sock"));
        let path = socket.to_str().context("the data directory is not UTF-8")?;
        let queues = queues.to_string();
        let attach = [
            "attach", "volume", name, "--socket", path, "--queues", &queues,
        ];
        self.cli(&[&attach, options].concat())?;
        Ok(socket)
    }

    /// Makes the destination of a live migration for a volume that is attached on another node; returns its
    /// socket.
    pub fn attach_incoming(&self, name: &str) -> Result<PathBuf> {
        let socket = self.data.join(format!("{name}.sock"));
        let path = socket.to_str().context("the data directory is not UTF-8")?;
        let attach = ["attach", "volume", name, "--socket", path, "--queues", "1"];
        let mut incoming = attach.to_vec();
        incoming.push("--incoming");
        self.cli(&incoming)?;
        Ok(socket)
    }

    /// The sum of a metric over its labels, as the daemon tells Prometheus on its admin socket. With labels
    /// in its name, as they stand there: of that series.
    pub fn metric(&self, name: &str) -> Result<f64> {
        let socket = self.data.join("penstock.sock");
        let mut stream = UnixStream::connect(&socket)
            .with_context(|| format!("connect to {}", socket.display()))?;
        stream.set_read_timeout(Some(METRICS_LIMIT))?;
        stream.write_all(b"GET /metrics HTTP/1.0\r\nhost: rig\r\n\r\n")?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        let values = answer.lines().filter_map(|line| {
            let (series, value) = line.rsplit_once(' ')?;
            let family = series.split('{').next()?;
            (family == name || series == name).then(|| value.parse::<f64>().ok())?
        });
        let values: Vec<f64> = values.collect();
        if values.is_empty() {
            bail!("the daemon tells no {name}");
        }
        Ok(values.iter().sum())
    }

    /// Bytes in use on all devices, as `penstock device list --json` tells.
    pub fn used_bytes(&self) -> Result<u64> {
        self.device_sum("used_bytes")
    }

    /// Bytes free on all devices, as `penstock device list --json` tells.
    pub fn free_bytes(&self) -> Result<u64> {
        self.device_sum("free_bytes")
    }

    /// Waits until `test` holds for the bytes in use; freed space comes back in the background.
    pub fn wait_used(&self, limit: Duration, test: impl Fn(u64) -> bool) -> Result<u64> {
        let mut last = 0;
        wait_until(limit, || {
            last = self.used_bytes()?;
            Ok(test(last).then_some(last))
        })
        .with_context(|| format!("{last} bytes are in use on the devices"))
    }

    fn device_sum(&self, key: &str) -> Result<u64> {
        let listed = self.json(&["device", "list"])?;
        let devices = listed
            .as_array()
            .context("`device list --json` is not an array")?;
        let values = devices.iter().map(|device| device[key].as_u64());
        values
            .sum::<Option<u64>>()
            .with_context(|| format!("a device has no {key}: {listed}"))
    }

    fn try_cli(&self, args: &[&str]) -> Result<String> {
        let mut command = Command::new(&self.options.binary);
        command.args(args).arg("--data").arg(&self.data);
        if let Some(namespace) = &self.options.namespace {
            enter_namespace(&mut command, namespace)?;
        }
        run(&mut command)
    }

    fn log_path(&self) -> PathBuf {
        self.data.with_extension("log")
    }
}
