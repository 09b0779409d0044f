//! `support bundle`: what somebody needs who shall find out what is wrong, in one file, without secrets.

use std::fs::File;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use api::client::Client;
use api::failure::{Context, Kind, Result};
use flate2::Compression;
use flate2::write::GzEncoder;
use meta::UnixMillis;

use crate::args::{Global, SupportBundleArgs};

use super::{locate, print};

/// What the daemon is asked: the file in the bundle, and the path in the API.
const ASKED: &[(&str, &str)] = &[
    ("status", "/v1/status"),
    ("health", "/v1/health"),
    ("config", "/v1/config"),
    ("nodes", "/v1/nodes"),
    ("devices", "/v1/devices"),
    ("pools", "/v1/pools"),
    ("volumes", "/v1/volumes"),
    ("attachments", "/v1/attachments"),
    ("events", "/v1/events"),
];
/// What is run on this machine. No list of processes with their arguments: a token may be one.
const RUN: &[(&str, &[&str])] = &[
    (
        "log",
        &[
            "journalctl",
            "--no-pager",
            "--output=short-iso-precise",
            "--lines=50000",
            "--unit=penstock*",
        ],
    ),
    (
        "log-kernel",
        &[
            "journalctl",
            "--no-pager",
            "--output=short-iso-precise",
            "--lines=5000",
            "--dmesg",
        ],
    ),
    (
        "units",
        &[
            "systemctl",
            "status",
            "--no-pager",
            "--lines=0",
            "penstock*",
        ],
    ),
    ("failed-units", &["systemctl", "--failed", "--no-pager"]),
    ("kernel", &["uname", "-a"]),
    (
        "disks",
        &[
            "lsblk",
            "--output=NAME,SIZE,TYPE,MODEL,SERIAL,FSTYPE,MOUNTPOINTS,ROTA,SCHED",
        ],
    ),
    ("space", &["df", "--human-readable"]),
    ("memory", &["free", "--mebi"]),
    ("processors", &["lscpu"]),
    (
        "processes",
        &["ps", "-eo", "pid,ppid,user,stat,etime,time,rss,comm"],
    ),
    ("network", &["ip", "-statistics", "address"]),
    ("routes", &["ip", "route", "show", "table", "all"]),
    ("rdma", &["rdma", "link"]),
    (
        "packages",
        &[
            "dpkg-query",
            "--show",
            "penstock",
            "libvirt-daemon",
            "qemu-system-x86",
            "libibverbs1",
        ],
    ),
];
/// Files of this machine, where they are.
const READ: &[&str] = &[
    "/etc/os-release",
    "/etc/penstock/penstock.toml",
    "/proc/cmdline",
    "/proc/meminfo",
    "/proc/mounts",
    "/var/lib/appliance/devices.json",
    "/var/lib/appliance/message",
    "/var/lib/appliance/penstock.toml",
    "/var/lib/appliance/update.json",
];
/// A word this long with the beginning of a join token is one.
const TOKEN_PREFIX: &str = "penstock-";
const TOKEN_CHARS_MIN: usize = 48;

/// Writes the bundle. A part that cannot be had is a line in it that says why: the machine is ill, after all.
pub async fn bundle(args: &SupportBundleArgs, global: &Global) -> Result<()> {
    let name = format!(
        "penstock-support-{}-{}",
        rustix::system::uname().nodename().to_string_lossy(),
        UnixMillis::now().0 / 1000
    );
    let path = args
        .out
        .clone()
        .unwrap_or_else(|| PathBuf::from(format!("{name}.tar.gz")));
    let file = File::options()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(&path)
        .context(|| format!("create {}", path.display()))?;
    let mut bundle = Bundle {
        archive: tar::Builder::new(GzEncoder::new(file, Compression::default())),
        directory: name,
        at: UnixMillis::now().0 / 1000,
    };
    let written = fill(&mut bundle, global).await.and_then(|()| bundle.end());
    if let Err(error) = written {
        // Half a bundle is none; that it cannot be removed is told by what is left.
        let _ = std::fs::remove_file(&path);
        return Err(error);
    }
    print(|out| writeln!(out, "{}", path.display()))?;
    eprintln!(
        "penstock: it has the configuration, names, addresses and logs of this machine, and no keys or \
         tokens; look through it before you hand it on"
    );
    Ok(())
}

async fn fill<W: Write>(bundle: &mut Bundle<W>, global: &Global) -> Result<()> {
    bundle.add(
        "version.txt",
        concat!("penstock ", env!("CARGO_PKG_VERSION"), "\n"),
    )?;
    match locate::client(global).await {
        Ok(client) => ask(bundle, &client).await?,
        Err(failure) => bundle.add("daemon/failure.txt", &format!("{failure}\n"))?,
    }
    for (name, command) in RUN {
        bundle.add(&format!("machine/{name}.txt"), &output(command))?;
    }
    for path in READ.iter().map(Path::new).filter(|path| path.exists()) {
        let text = std::fs::read(path).map_or_else(
            |e| format!("{e}\n"),
            |bytes| String::from_utf8_lossy(&bytes).into_owned(),
        );
        bundle.add(&format!("files{}", path.display()), &text)?;
    }
    Ok(())
}

async fn ask<W: Write>(bundle: &mut Bundle<W>, client: &Client) -> Result<()> {
    for (name, path) in ASKED {
        let text = match client.get::<serde_json::Value>(path).await {
            Ok(value) => format!("{value:#}\n"),
            Err(failure) => format!("{failure}\n"),
        };
        bundle.add(&format!("daemon/{name}.json"), &text)?;
    }
    Ok(())
}

/// All that a command prints, or why it does not run.
fn output(command: &[&str]) -> String {
    match Command::new(command[0]).args(&command[1..]).output() {
        Ok(output) => {
            let [out, err] =
                [&output.stdout, &output.stderr].map(|one| String::from_utf8_lossy(one));
            format!("{out}{err}")
        }
        Err(e) => format!("{}: {e}\n", command[0]),
    }
}

struct Bundle<W: Write> {
    archive: tar::Builder<GzEncoder<W>>,
    /// All is below it.
    directory: String,
    /// Seconds since 1970.
    at: u64,
}

impl<W: Write> Bundle<W> {
    fn add(&mut self, name: &str, text: &str) -> Result<()> {
        let text = without_secrets(text);
        let mut header = tar::Header::new_gnu();
        header.set_size(text.len() as u64);
        header.set_mode(0o600);
        header.set_mtime(self.at);
        self.archive
            .append_data(
                &mut header,
                format!("{}/{name}", self.directory),
                text.as_bytes(),
            )
            .context(|| format!("write {name} into the bundle"))
    }

    fn end(self) -> Result<()> {
        let end = || -> std::io::Result<()> { self.archive.into_inner()?.finish()?.flush() };
        end()
            .map_err(|e| api::failure::Failure::plain(Kind::Failed, format!("end the bundle: {e}")))
    }
}

/// The text without join tokens and private keys. Nothing that is collected should have any; a log of
/// somebody else's may.
fn without_secrets(text: &str) -> String {
    let mut clean = String::with_capacity(text.len());
    let mut is_in_key = false;
    for line in text.split_inclusive('\n') {
        if line.contains("-----BEGIN") && line.contains("PRIVATE KEY-----") {
            is_in_key = true;
            clean.push_str("(a private key was here)\n");
        }
        if !is_in_key {
            clean.push_str(&without_tokens(line));
        }
        if line.contains("-----END") {
            is_in_key = false;
        }
    }
    clean
}

fn without_tokens(line: &str) -> String {
    let mut clean = String::with_capacity(line.len());
    let mut rest = line;
    while let Some(at) = rest.find(TOKEN_PREFIX) {
        clean.push_str(&rest[..at]);
        let word = &rest[at..];
        let end = word
            .find(|c: char| !c.is_ascii_alphanumeric() && !"-_.:+/=".contains(c))
            .unwrap_or(word.len());
        match end >= TOKEN_CHARS_MIN {
            true => clean.push_str("(a token was here)"),
            false => clean.push_str(&word[..end]),
        }
        rest = &word[end..];
    }
    clean.push_str(rest);
    clean
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_and_keys_do_not_get_through() {
        let token = format!("penstock-{}", "0123456789abcdef".repeat(5));
        let text = format!(
            "join {token} --data /x\npenstock-b.service\n-----BEGIN PRIVATE KEY-----\nAAAA\n\
             -----END PRIVATE KEY-----\nafter {token}"
        );
        let clean = without_secrets(&text);
        assert_eq!(
            clean,
            "join (a token was here) --data /x\npenstock-b.service\n(a private key was here)\n\
             after (a token was here)"
        );
    }

    #[test]
    fn a_real_token_is_known_by_its_form() {
        let token = meta::pki::JoinToken::draw();
        let token = token.secret();
        assert!(!without_tokens(token).contains(&token[12..]), "{token}");
    }
}
