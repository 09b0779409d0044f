//! Commands that name no daemon find it.

use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};

use crate::harness::{DEVICE_SIZE, Daemon, one_error, penstock, temp, text};

/// A command on a machine whose daemons are listed below `dir`, by a user with a home there.
fn on_machine(dir: &Path) -> Command {
    let mut command = penstock();
    command
        .env("PENSTOCK_RUN_DIR", dir.join("run"))
        .env("HOME", dir)
        .env("XDG_DATA_HOME", dir.join("share"));
    command
}

fn start(dir: &Path, data: &str) -> Daemon {
    Daemon::start_by(
        on_machine(dir),
        &dir.join(data),
        &["--preallocation", "off"],
    )
}

fn run(dir: &Path, args: &[&str]) -> Output {
    on_machine(dir).args(args).output().unwrap()
}

fn data_of(output: &Output) -> String {
    assert!(output.status.success(), "{output:?}");
    let status: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    status["data"].as_str().unwrap().to_owned()
}

#[test]
fn a_command_finds_the_only_daemon_of_the_machine() {
    let dir = temp();
    let dir = dir.path();
    one_error(&run(dir, &["status"]), 1);
    let daemon = start(dir, "srv");
    let status = ["status", "--json"];
    assert_eq!(data_of(&run(dir, &status)), text(daemon.data()));
    assert!(
        run(dir, &["volume", "create", "web", "64M"])
            .status
            .success()
    );

    // Whatever a kill leaves behind leads nobody astray.
    daemon.kill();
    assert_eq!(std::fs::read_dir(dir.join("run")).unwrap().count(), 1);
    let told = one_error(&run(dir, &["status"]), 1);
    assert!(told.contains("no daemon answers on"), "{told}");
    let daemon = start(dir, "elsewhere");
    assert_eq!(data_of(&run(dir, &status)), text(daemon.data()));
    assert!(daemon.terminate().success());
    assert_eq!(std::fs::read_dir(dir.join("run")).unwrap().count(), 0);
}

#[test]
fn of_several_daemons_one_has_to_be_named() {
    let dir = temp();
    let dir = dir.path();
    let (a, b) = (start(dir, "a"), start(dir, "b"));
    let told = one_error(&run(dir, &["volume", "list"]), 2);
    for daemon in [&a, &b] {
        let named = format!("{} (process {})", text(daemon.data()), daemon.pid());
        assert!(told.contains(&named), "{told}");
    }
    assert!(told.contains("--data") && told.contains("--api"), "{told}");

    let status = ["status", "--json"];
    let named = run(dir, &[&status[..], &["--data", text(b.data())]].concat());
    assert_eq!(data_of(&named), text(b.data()));
    let by_variable = |name: &str, value: &str, args: &[&str]| {
        let mut command = on_machine(dir);
        command.env(name, value).args(args).output().unwrap()
    };
    let named = by_variable("PENSTOCK_DATA", text(a.data()), &status);
    assert_eq!(data_of(&named), text(a.data()));
    // An option goes before a variable.
    let socket = a.data().join("penstock.sock");
    let args = [&status[..], &["--data", text(b.data())]].concat();
    let named = by_variable("PENSTOCK_API", text(&socket), &args);
    assert_eq!(data_of(&named), text(b.data()));
    assert_eq!(
        by_variable("PENSTOCK_DATA", "", &status).status.code(),
        Some(2)
    );
}

/// Starts a daemon, and does not wait until it is ready.
fn spawn(dir: &Path, data: &Path) -> Child {
    let serve = ["serve", "--preallocation", "off"];
    let mut command = on_machine(dir);
    command
        .args(serve)
        .args(["--device-size", DEVICE_SIZE, "--threads", "1"])
        .args(["--data", text(data)])
        .stderr(Stdio::null());
    command.spawn().unwrap()
}

fn spawn_command(dir: &Path, args: &[&str]) -> Child {
    let mut command = on_machine(dir);
    command
        .args(args)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command.spawn().unwrap()
}

fn signal(process: &Child, signal: Signal) {
    kill_process(Pid::from_child(process), signal).unwrap();
}

#[test]
fn a_command_waits_for_a_daemon_that_starts() {
    let dir = temp();
    let dir = dir.path();
    let data = dir.join("srv");
    for args in [&["status"][..], &["status", "--data", text(&data)]] {
        let mut daemon = spawn(dir, &data);
        let listed = dir.join("run").join(format!("{}.json", daemon.id()));
        while !listed.exists() {
            assert_eq!(
                daemon.try_wait().unwrap(),
                None,
                "it ended before it was listed"
            );
            std::thread::sleep(Duration::from_millis(1));
        }
        // Its start takes longer than a command waits for a daemon that is not listed.
        signal(&daemon, Signal::STOP);
        let command = spawn_command(dir, args);
        std::thread::sleep(Duration::from_millis(1500));
        signal(&daemon, Signal::CONT);
        let status = command.wait_with_output().unwrap();
        daemon.kill().unwrap();
        daemon.wait().unwrap();
        assert!(status.status.success(), "{args:?}: {status:?}");
    }
}

#[test]
fn a_command_waits_a_moment_for_a_daemon_that_is_not_listed_yet() {
    let dir = temp();
    let dir = dir.path();
    let data = dir.join("srv");
    let is_found = || {
        let command = spawn_command(dir, &["status", "--data", text(&data)]);
        // It has looked by now.
        std::thread::sleep(Duration::from_millis(100));
        let mut daemon = spawn(dir, &data);
        let status = command.wait_with_output().unwrap();
        daemon.kill().unwrap();
        daemon.wait().unwrap();
        status.status.success()
    };
    // On a loaded machine the daemon may be listed too late: it is tried again.
    assert!(
        (0..20).any(|_| is_found()),
        "no command waited for its daemon"
    );
}
