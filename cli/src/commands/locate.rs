//! Which daemon a command talks to, and waiting for one that starts.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use api::client::{Client, START_MAX};
use api::failure::{Failure, Result};
use config::registry::{self, Entry};

use crate::args::{Endpoint, Global};

/// How long a command waits for a daemon of which nothing is seen yet: `penstock serve &` may have been typed
/// just before, and a loaded machine begins late.
const APPEAR_MAX: Duration = Duration::from_millis(500);
/// Between two looks.
const LOOK_INTERVAL: Duration = Duration::from_millis(25);

/// The client for the daemon that the options, the environment or the list of running daemons name. It need
/// not answer: the command's first request then says why not.
pub async fn client(global: &Global) -> Result<Client> {
    let begin = Instant::now();
    let mut seen = begin;
    loop {
        let (client, is_seen) = find(global)?;
        let client = client.with_timeout(global.timeout);
        let Err(error) = client.try_connect().await else {
            return Ok(client);
        };
        if is_seen || client.holder().is_some() {
            seen = Instant::now();
        }
        let may_appear = matches!(
            error.kind(),
            std::io::ErrorKind::NotFound | std::io::ErrorKind::ConnectionRefused
        );
        if !may_appear || seen.elapsed() > APPEAR_MAX || begin.elapsed() > START_MAX {
            return Ok(client);
        }
        tokio::time::sleep(LOOK_INTERVAL).await;
    }
}

/// The client, and whether its daemon is on the list of those that run.
fn find(global: &Global) -> Result<(Client, bool)> {
    let running = registry::directory().map(|directory| registry::running(&directory));
    let running = running.unwrap_or_default();
    match global.endpoint() {
        Endpoint::Address(address) => Ok((Client::new(&address)?, false)),
        Endpoint::Data(dir) => Ok((at(&dir), serves(&running, &dir))),
        Endpoint::Any => any(config::default_data_dir(), &running),
    }
}

/// The daemon on the default data directory; if none runs there, the one that runs at all.
fn any(default: Result<PathBuf>, running: &[Entry]) -> Result<(Client, bool)> {
    if let Ok(dir) = &default {
        let client = at(dir);
        if running.is_empty() || serves(running, dir) || client.holder().is_some() {
            return Ok((client, serves(running, dir)));
        }
    }
    match running {
        [] => default.map(|dir| (at(&dir), false)),
        [one] => Ok((Client::at(one.admin_socket.clone()), true)),
        several => Err(ambiguous(several)),
    }
}

fn at(dir: &Path) -> Client {
    Client::at(config::admin_socket_in(dir))
}

fn serves(running: &[Entry], dir: &Path) -> bool {
    let dir = std::path::absolute(dir);
    dir.is_ok_and(|dir| running.iter().any(|entry| entry.data == dir))
}

fn ambiguous(several: &[Entry]) -> Failure {
    let named = several
        .iter()
        .map(|entry| format!("{} (process {})", entry.data.display(), entry.pid));
    let named: Vec<String> = named.collect();
    Failure::invalid(
        format!(
            "{} daemons run on this machine: {}",
            several.len(),
            named.join(", ")
        ),
        "name one by its data directory with --data DIR or PENSTOCK_DATA, or by its socket with --api ADDR",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(pid: u32, data: &Path) -> Entry {
        Entry {
            pid,
            data: data.to_owned(),
            admin_socket: data.join("elsewhere.sock"),
        }
    }

    #[test]
    fn the_default_data_directory_goes_first() {
        let dir = tempfile::tempdir().unwrap();
        let (usual, a, b) = (
            dir.path().join("usual"),
            dir.path().join("a"),
            dir.path().join("b"),
        );
        let found = |running: &[Entry]| {
            let found = any(Ok(usual.clone()), running);
            found.map(|(client, is_seen)| (client.socket().to_owned(), is_seen))
        };
        let socket = usual.join("penstock.sock");
        assert_eq!(found(&[]), Ok((socket.clone(), false)));
        let only = [entry(1, &a)];
        assert_eq!(found(&only), Ok((a.join("elsewhere.sock"), true)));
        let both = [entry(1, &a), entry(2, &usual)];
        assert_eq!(found(&both), Ok((socket, true)));
        let told = found(&[entry(1, &a), entry(2, &b)]).unwrap_err();
        assert_eq!(told.exit_code(), 2);
        assert!(told.error.contains("2 daemons"), "{told}");
        let no_home = any(Err(Failure::invalid("no home", "set it")), &only);
        assert_eq!(no_home.unwrap().0.socket(), a.join("elsewhere.sock"));
    }
}
