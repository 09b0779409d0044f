//! A minimal QMP client: one command at a time, events are skipped or waited for.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

/// QEMU answers QMP within milliseconds unless its main loop hangs.
const ANSWER_LIMIT: Duration = Duration::from_secs(60);

/// A QMP session past capability negotiation.
#[derive(Debug)]
pub struct Qmp {
    reader: BufReader<UnixStream>,
}

impl Qmp {
    /// Reads the greeting and leaves negotiation mode.
    pub fn new(stream: UnixStream) -> Result<Self> {
        stream
            .set_read_timeout(Some(ANSWER_LIMIT))
            .context("set a timeout on QMP")?;
        let mut qmp = Self {
            reader: BufReader::new(stream),
        };
        let greeting = qmp.message()?;
        if greeting.get("QMP").is_none() {
            bail!("not a QMP greeting: {greeting}");
        }
        qmp.execute("qmp_capabilities", json!({}))?;
        Ok(qmp)
    }

    /// Runs a command and returns its answer.
    pub fn execute(&mut self, command: &str, arguments: Value) -> Result<Value> {
        let line = json!({ "execute": command, "arguments": arguments }).to_string();
        self.reader
            .get_mut()
            .write_all(line.as_bytes())
            .context("send a QMP command")?;
        loop {
            let message = self.message()?;
            if let Some(answer) = message.get("return") {
                return Ok(answer.clone());
            }
            if let Some(error) = message.get("error") {
                bail!("QMP {command}: {error}");
            }
        }
    }

    fn message(&mut self) -> Result<Value> {
        let mut line = String::new();
        if self.reader.read_line(&mut line).context("read from QMP")? == 0 {
            bail!("QEMU closed the QMP connection");
        }
        serde_json::from_str(&line).with_context(|| format!("parse QMP message {line:?}"))
    }
}
