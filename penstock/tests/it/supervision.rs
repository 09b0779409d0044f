//! What a daemon tells the service manager that started it.

use std::fs::{self, Permissions};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use crate::front::Front;
use crate::harness::{Daemon, eventually, penstock, temp, text};

/// A user that every Debian has and that owns nothing.
const USER: &str = "nobody";
/// How often the service manager wants to hear.
const WATCHDOG_US: &str = "300000";
/// Silence that is longer by far.
const SILENCE: Duration = Duration::from_secs(3);
/// A daemon that says nothing for this long hangs.
const PATIENCE: Duration = Duration::from_secs(60);

fn watched(name: &str) -> Command {
    let mut command = penstock();
    command
        .env("NOTIFY_SOCKET", name)
        .env("WATCHDOG_USEC", WATCHDOG_US)
        .env_remove("WATCHDOG_PID");
    command
}

fn heard(manager: &UnixDatagram, patience: Duration) -> Option<String> {
    let mut bytes = [0; 4096];
    manager.set_read_timeout(Some(patience)).unwrap();
    let length = manager.recv(&mut bytes).ok()?;
    Some(String::from_utf8_lossy(&bytes[..length]).into_owned())
}

/// Waits for a word that begins so.
fn hear(manager: &UnixDatagram, word: &str) {
    let is_word = || heard(manager, PATIENCE).is_some_and(|told| told.starts_with(word));
    eventually(is_word);
}

/// With the user changed and the sandbox on, from its start to its end.
fn told_by_a_confined_daemon(manager: &UnixDatagram, name: &str, data: &Path) {
    let daemon = Daemon::start_by(watched(name), data, &["--user", USER]);
    let first = heard(manager, PATIENCE).unwrap();
    assert!(
        first.starts_with("READY=1\nSTATUS=serves; admin unix:"),
        "{first}"
    );
    for _ in 0..2 {
        assert_eq!(heard(manager, PATIENCE).as_deref(), Some("WATCHDOG=1"));
    }
    daemon.signal(libc::SIGTERM);
    hear(manager, "STOPPING=1\n");
    assert!(daemon.wait().success());
}

#[test]
fn a_confined_daemon_tells_its_service_manager() {
    let dir = temp();
    fs::set_permissions(dir.path(), Permissions::from_mode(0o755)).unwrap();
    let path = dir.path().join("notify");
    let manager = UnixDatagram::bind(&path).unwrap();
    told_by_a_confined_daemon(&manager, text(&path), &dir.path().join("data"));

    let name = format!("penstock-it-{}", std::process::id());
    let address = SocketAddr::from_abstract_name(&name).unwrap();
    let manager = UnixDatagram::bind_addr(&address).unwrap();
    told_by_a_confined_daemon(&manager, &format!("@{name}"), &dir.path().join("data"));
}

#[test]
fn the_watchdog_hears_nothing_while_a_data_thread_hangs() {
    let dir = temp();
    let path = dir.path().join("notify");
    let manager = UnixDatagram::bind(&path).unwrap();
    let daemon = Daemon::start_by(watched(text(&path)), &dir.path().join("data"), &[]);
    let socket = dir.path().join("a.sock");
    daemon.ok(&["volume", "create", "a", "64M"]);
    daemon.ok(&["attach", "volume", "a", "--socket", text(&socket)]);
    let mut guest = Front::start(&socket, 1);
    guest.write(0, 1);
    hear(&manager, "WATCHDOG=1");
    guest.wedge();
    eventually(|| heard(&manager, SILENCE).is_none());
    // All else of it goes on.
    daemon.ok(&["status"]);
    guest.unwedge();
    hear(&manager, "WATCHDOG=1");
}
