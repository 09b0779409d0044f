//! The console: a page on the machine's state, and what can be done without a credential. No shell: whoever
//! stands at the console may restart the machine, and read nothing that is secret.

mod page;
mod rescue;
mod wizard;

use std::io::{BufRead, Read, Write};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use crate::disks;
use crate::first_boot::DATA;
use crate::machine::Machine;
use crate::process::run;

pub use page::Page;

/// Clears the screen and goes to its upper left corner (ECMA-48).
const CLEAR: &str = "\x1b[H\x1b[2J";
/// How often the page is made anew while nobody presses a key, in tenths of a second, as stty(1) has it. Each
/// time costs a start of `penstock` on each console, which a small machine notices.
const REFRESH_DECISECONDS: &str = "100";
/// Lines of the log that are shown.
const LOG_LINES: &str = "20";

/// The console of a machine.
#[derive(Debug)]
pub struct Console<'a> {
    /// What the machine keeps.
    pub machine: &'a Machine,
    /// `penstock`.
    pub program: PathBuf,
    /// Of the authority's certificate, from its text in PEM.
    pub fingerprint: fn(&str) -> Option<String>,
}

impl Console<'_> {
    /// Shows the page and obeys keys, for ever. `is_rescue`: the machine did not come up; it begins with the
    /// rescue menu.
    ///
    /// # Errors
    /// The terminal is gone.
    pub fn run(&self, is_rescue: bool) -> Result<()> {
        if is_rescue {
            rescue::menu(self)?;
        }
        let mut shown = String::new();
        let mut lack_of_room = None;
        loop {
            let page = self.page();
            if page.lack_of_room.is_some() && lack_of_room.is_none() {
                log(page.lack_of_room.as_deref().unwrap_or_default());
            }
            lack_of_room.clone_from(&page.lack_of_room);
            let page = page.to_string();
            // Not written anew while nothing changes: a serial line may be recorded.
            if page != shown {
                print(&format!("{CLEAR}{page}"))?;
                shown = page;
            }
            let Some(key) = key()? else { continue };
            match key.to_ascii_lowercase() {
                's' => self.show("Status", Command::new(&self.program).arg("status"))?,
                'd' => self.show_disks()?,
                'l' => self.show(
                    "Log",
                    Command::new("journalctl").args(["--no-pager", "-n", LOG_LINES]),
                )?,
                'w' if !self.machine.is_node() => wizard::guide(self)?,
                'r' => rescue::menu(self)?,
                _ => continue,
            }
            shown.clear();
        }
    }

    /// What `penstock health` says.
    fn health(&self) -> String {
        let health = Command::new(&self.program).arg("health").output();
        health.map_or_else(
            |e| e.to_string(),
            |output| {
                let bytes = if output.stdout.is_empty() {
                    output.stderr
                } else {
                    output.stdout
                };
                let text = String::from_utf8_lossy(&bytes);
                let text = text.trim();
                text.strip_prefix("penstock: error: ")
                    .unwrap_or(text)
                    .to_owned()
            },
        )
    }

    fn page(&self) -> Page {
        let authority = std::fs::read_to_string(Path::new(DATA).join("cluster/ca.pem")).ok();
        Page {
            version: crate::update::Places::default()
                .running_version()
                .unwrap_or_default(),
            hostname: rustix::system::uname()
                .nodename()
                .to_string_lossy()
                .into_owned(),
            addresses: addresses(),
            fingerprint: authority.and_then(|text| (self.fingerprint)(&text)),
            health: self.machine.is_node().then(|| self.health()),
            message: self.machine.message(),
            lack_of_room: self.machine.lack_of_room(),
            has_ssh: std::fs::metadata(self.machine.path("authorized_keys"))
                .is_ok_and(|file| file.len() > 0),
        }
    }

    fn show_disks(&self) -> Result<()> {
        let listed = disks::list();
        let text = match &listed {
            Ok(disks) => disks
                .iter()
                .map(|disk| disks::describe(disk) + "\n")
                .collect(),
            Err(error) => format!("{error:#}\n"),
        };
        self.show_text("Disks", &text)
    }

    fn show(&self, title: &str, command: &mut Command) -> Result<()> {
        let text = run(command).unwrap_or_else(|error| format!("{error:#}\n"));
        self.show_text(title, &text)
    }

    fn show_text(&self, title: &str, text: &str) -> Result<()> {
        // Control characters in a log would be obeyed by the terminal.
        let text: String = text
            .chars()
            .filter(|c| *c == '\n' || !c.is_control())
            .collect();
        print(&format!(
            "{CLEAR}{title}\n\n{text}\n\nPress any key to go back. "
        ))?;
        while key()?.is_none() {}
        Ok(())
    }
}

/// Writes a line to the machine's log: what this program prints is the console.
fn log(line: &str) {
    // The console shows it in any case.
    let _ = run(Command::new("logger").args(["-t", "penstock", "-p", "daemon.err", line]));
}

fn print(text: &str) -> Result<()> {
    let mut out = std::io::stdout().lock();
    out.write_all(text.as_bytes())
        .and_then(|()| out.flush())
        .context("write to the console")
}

/// A key, or none until it is time to look at the machine again.
fn key() -> Result<Option<char>> {
    stty(&["-icanon", "-echo", "min", "0", "time", REFRESH_DECISECONDS])?;
    let mut byte = [0];
    let read = std::io::stdin()
        .lock()
        .read(&mut byte)
        .context("read from the console")?;
    Ok((read == 1).then(|| char::from(byte[0])))
}

/// The answer to a question, in one line.
fn ask(question: &str) -> Result<String> {
    stty(&["icanon", "echo", "min", "1", "time", "0"])?;
    print(&format!("{question}: "))?;
    let mut line = String::new();
    let read = std::io::stdin()
        .lock()
        .read_line(&mut line)
        .context("read from the console")?;
    anyhow::ensure!(read > 0, "the console is gone");
    Ok(line.trim().to_owned())
}

fn stty(settings: &[&str]) -> Result<()> {
    // Its standard input is ours: that is the terminal which it sets.
    let status = Command::new("stty")
        .args(settings)
        .status()
        .context("start stty")?;
    anyhow::ensure!(status.success(), "the console is no terminal");
    Ok(())
}

/// Names of network cards, and their addresses, as `ip` lists them.
fn addresses() -> Vec<String> {
    let listed = run(Command::new("ip").args(["-brief", "address", "show", "scope", "global"]));
    let lines = listed.unwrap_or_default();
    let of_line = |line: &str| {
        let mut words = line.split_whitespace();
        let (name, _state) = (words.next()?, words.next()?);
        let addresses: Vec<&str> = words.filter(|word| word.contains('/')).collect();
        (!addresses.is_empty()).then(|| format!("{} ({name})", addresses.join(" ")))
    };
    lines.lines().filter_map(of_line).collect()
}
