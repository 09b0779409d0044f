//! A tool that knows nothing but QEMU's conventions for vhost-user back ends (docs/interop/vhost-user.rst and
//! vhost-user.json) finds ours, asks what it can do, and starts it.

use std::os::fd::AsRawFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use serde_json::Value;

use crate::harness::{Daemon, greet, greet_on, greet_once_served, penstock, temp, text};

/// The description that the package puts into `/usr/share/qemu/vhost-user/`.
const DESCRIPTION: &str = include_str!("../../../libvirt/assets/50-penstock-blk.json");
/// Kinds of back ends, and features of block ones, as vhost-user.json names them.
const KINDS: [&str; 5] = ["block", "fs", "gpu", "input", "net"];
const BLOCK_FEATURES: [&str; 2] = ["read-only", "blk-file"];

/// The program that the description names, as the package installs it: a link to ours.
fn installed(directory: &Path) -> PathBuf {
    let description: Value = serde_json::from_str(DESCRIPTION).unwrap();
    assert!(description["description"].is_string());
    assert!(
        description["tags"]
            .as_array()
            .unwrap()
            .contains(&"penstock".into())
    );
    let named = Path::new(description["binary"].as_str().unwrap());
    assert!(named.is_absolute());
    let program = directory.join(named.file_name().unwrap());
    std::os::unix::fs::symlink(penstock().get_program(), &program).unwrap();
    program
}

fn command(program: &Path, data: &Path, volume: &str) -> Command {
    let mut command = Command::new(program);
    command
        .args(["--volume", volume, "--threads", "1", "--data", text(data)])
        .stdin(Stdio::null())
        .env_remove("PENSTOCK_API")
        .env_remove("PENSTOCK_DATA");
    command
}

/// A data directory with a volume, and no daemon.
fn data_with_volume(directory: &Path) -> PathBuf {
    let data = directory.join("data");
    let daemon = Daemon::start(&data);
    daemon.ok(&["volume", "create", "a", "64M"]);
    assert!(daemon.terminate().success());
    data
}

fn terminate(child: &mut Child) {
    // SAFETY: a plain system call on a child that has not been waited for.
    unsafe { libc::kill(child.id() as libc::pid_t, libc::SIGTERM) };
    assert!(child.wait().unwrap().success());
}

#[test]
fn a_tool_finds_what_the_back_end_can_do() {
    let dir = temp();
    let description: Value = serde_json::from_str(DESCRIPTION).unwrap();
    let output = Command::new(installed(dir.path()))
        .arg("--print-capabilities")
        .output()
        .unwrap();
    assert!(output.status.success(), "{output:?}");
    let told: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(told["type"], description["type"]);
    assert!(KINDS.contains(&told["type"].as_str().unwrap()));
    for feature in told["features"].as_array().unwrap() {
        assert!(
            BLOCK_FEATURES.contains(&feature.as_str().unwrap()),
            "{told}"
        );
    }
}

#[test]
fn a_tool_starts_the_back_end_on_a_path() {
    let dir = temp();
    let data = data_with_volume(dir.path());
    let socket = dir.path().join("a.sock");
    let mut child = command(&installed(dir.path()), &data, "a")
        .args(["--read-only", &format!("--socket-path={}", text(&socket))])
        .spawn()
        .unwrap();
    let (connection, features) = greet_once_served(&socket);
    const VIRTIO_BLK_F_RO: u64 = 1 << 5;
    assert_ne!(features & VIRTIO_BLK_F_RO, 0);
    drop(connection);
    terminate(&mut child);
    assert!(!socket.exists());
}

/// Starts it with a descriptor that it inherits under its number.
fn start_with_fd(mut command: Command, fd: &impl AsRawFd) -> Child {
    let fd = fd.as_raw_fd();
    command.arg(format!("--fd={fd}"));
    // SAFETY: between fork and exec only fcntl(2) runs, which is async-signal-safe.
    unsafe {
        command.pre_exec(move || match libc::fcntl(fd, libc::F_SETFD, 0) {
            0 => Ok(()),
            _ => Err(std::io::Error::last_os_error()),
        });
    }
    command.spawn().unwrap()
}

#[test]
fn a_tool_hands_the_back_end_a_descriptor() {
    let dir = temp();
    let data = data_with_volume(dir.path());
    let program = installed(dir.path());

    // A connection: with it the program ends.
    let (mut ours, theirs) = UnixStream::pair().unwrap();
    let mut child = start_with_fd(command(&program, &data, "a"), &theirs);
    drop(theirs);
    assert_ne!(greet_on(&mut ours), 0);
    drop(ours);
    assert!(child.wait().unwrap().success());

    // A listening socket: front ends come and go.
    let socket = dir.path().join("listening.sock");
    let listener = UnixListener::bind(&socket).unwrap();
    let mut child = start_with_fd(command(&program, &data, "a"), &listener);
    for _ in 0..2 {
        assert_ne!(greet(&socket).1, 0);
    }
    terminate(&mut child);
}
