//! A daemon that is another user than root: what it keeps, what it still does, and what it refuses. These
//! tests are root's.

use std::fs::{self, Permissions};
use std::io::{Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use block_device::wire;
use fabric_store::file::{DeviceFile, OpenedAhead};
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule,
};
use tempfile::TempDir;

use crate::front::Front;
use crate::harness::{Daemon, one_error, penstock, run, serve_with, temp, text};

/// A user that every Debian has and that owns nothing.
const USER: &str = "nobody";
const UID: u32 = 65534;
/// IPC_LOCK.
const IPC_LOCK: &str = "0000000000004000";

/// A directory that the user can look through, and a data directory in it that is not there yet.
fn place() -> (TempDir, PathBuf) {
    let dir = temp();
    fs::set_permissions(dir.path(), Permissions::from_mode(0o755)).unwrap();
    let data = dir.path().join("data");
    (dir, data)
}

/// Fields of the status of all threads of a process.
fn threads(pid: u32) -> Vec<String> {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).unwrap();
    tasks
        .filter_map(|task| fs::read_to_string(task.unwrap().path().join("status")).ok())
        .collect()
}

fn field<'a>(status: &'a str, name: &str) -> &'a str {
    let line = status.lines().find_map(|line| line.strip_prefix(name));
    line.unwrap().trim()
}

/// The binary as root that has more than the machine's own root may have: groups besides its own, and a
/// capability that is inherited. All of that is to be given up.
fn penstock_with_more() -> Command {
    let plain = penstock();
    let mut command = Command::new("setpriv");
    command
        .args(["--groups", "4,27", "--inh-caps", "+net_raw", "--"])
        .arg(plain.get_program())
        .stdin(Stdio::null());
    for (name, value) in plain.get_envs() {
        match value {
            Some(value) => command.env(name, value),
            None => command.env_remove(name),
        };
    }
    command
}

/// Checks every thread of a daemon with all limits.
fn check_given_up(daemon: &Daemon) {
    // Filters.
    check_given_up_but("2", daemon);
}

/// Checks every thread of a daemon whose system calls are limited in this way.
fn check_given_up_but(seccomp: &str, daemon: &Daemon) {
    let all = threads(daemon.pid());
    assert!(all.len() > 4, "threads of control and data: {}", all.len());
    let ids = vec![UID.to_string(); 4].join("\t");
    for status in &all {
        assert_eq!(field(status, "Uid:"), ids, "{status}");
        assert_eq!(field(status, "Gid:"), ids, "{status}");
        assert_eq!(field(status, "Groups:"), "", "{status}");
        for (name, kept) in [
            ("CapEff:", IPC_LOCK),
            ("CapPrm:", IPC_LOCK),
            ("CapInh:", "0000000000000000"),
            ("CapBnd:", "0000000000000000"),
            ("CapAmb:", "0000000000000000"),
            ("NoNewPrivs:", "1"),
            ("Seccomp:", seccomp),
        ] {
            assert_eq!(field(status, name), kept, "{name} of {status}");
        }
    }
}

#[test]
fn a_daemon_of_another_user_serves_guests_and_keeps_ipc_lock() {
    let (_dir, data) = place();
    let daemon = Daemon::start_by(penstock_with_more(), &data, &["--user", USER]);
    check_given_up(&daemon);
    let found = fs::metadata(&data).unwrap();
    assert_eq!((found.uid(), found.mode() & 0o7777), (UID, 0o700));
    daemon.ok(&["volume", "create", "a", "64M"]);
    let socket = data.join("a.sock");
    daemon.ok(&["attach", "volume", "a", "--socket", text(&socket)]);
    let mut guest = Front::start(&socket, 2);
    guest.write(7, 0x5a);
    assert_eq!(guest.read(0, 7), [0x5a; 512]);
    assert_eq!(guest.read(1, 8), [0; 512]);
    check_given_up(&daemon);
    let status = daemon.json(&["status"]);
    let told = &status["privileges"];
    assert_eq!((&told["user"], &told["uid"]), (&USER.into(), &UID.into()));
    assert_eq!(told["capabilities"], serde_json::json!(["ipc_lock"]));
    assert_eq!(told["no_new_privs"], true);
    assert_eq!(told["seccomp"], true);
    assert!(told["landlock_abi"].as_u64() >= Some(1), "{told}");
    let text_form = daemon.ok(&["status"]);
    let line =
        format!("user {USER} ({UID}); capabilities ipc_lock; no_new_privs; seccomp; landlock");
    assert!(text_form.contains(&line), "{text_form}");

    // Killed and started again it serves the same; the guest's connection is replaced.
    drop(guest);
    daemon.kill();
    let daemon = Daemon::start_with(&data, &["--user", USER]);
    check_given_up(&daemon);
    let mut guest = Front::start(&socket, 1);
    assert_eq!(guest.read(0, 7), [0x5a; 512]);
    drop(guest);
    assert_eq!(daemon.ok(&["health"]), "ok\n");
    // What the daemon does for its clients works under its limits, too.
    let image = data.with_file_name("image");
    fs::write(&image, [3; 1 << 20]).unwrap();
    daemon.ok(&["volume", "import", "b", text(&image)]);
    assert_eq!(
        daemon.run(&["volume", "export", "b", "-"]).stdout,
        [3; 1 << 20]
    );
    daemon.ok(&["volume", "resize", "b", "2M"]);
    daemon.ok(&["detach", "a"]);
    daemon.ok(&["volume", "delete", "b", "--yes"]);
    assert!(daemon.terminate().success());
}

#[test]
fn a_daemon_without_a_user_stays_who_it_is() {
    let dir = temp();
    let daemon = Daemon::start(dir.path());
    let told = daemon.json(&["status"])["privileges"].clone();
    assert_eq!((&told["user"], &told["uid"]), (&"root".into(), &0.into()));
    assert_eq!(told["seccomp"], false);
    assert_eq!(told["landlock_abi"], serde_json::Value::Null);
    for status in threads(daemon.pid()) {
        assert_eq!(field(&status, "Seccomp:"), "0");
    }
    drop(daemon);
    // It can be limited without a user.
    let daemon = Daemon::start_with(dir.path(), &["--sandbox", "on"]);
    let told = daemon.json(&["status"])["privileges"].clone();
    assert_eq!(
        (&told["user"], &told["seccomp"]),
        (&"root".into(), &true.into())
    );
    assert!(told["landlock_abi"].as_u64() >= Some(1), "{told}");
}

#[test]
fn a_daemon_that_cannot_become_the_user_does_not_start() {
    let (_dir, data) = place();
    let told = one_error(&serve_with(&data, &["--user", "no-such-user-x"]), 2);
    assert!(
        told.contains("'no-such-user-x' is not in /etc/passwd"),
        "{told}"
    );
    let told = one_error(&serve_with(&data, &["--user", "root"]), 2);
    assert!(told.contains("gives nothing up"), "{told}");
    assert!(!data.exists(), "nothing was made");
}

#[test]
fn a_daemon_may_not_become_the_user_without_the_capabilities() {
    let (_dir, data) = place();
    // Root in name only.
    let output = Command::new("setpriv")
        .args(["--bounding-set", "-setuid", "--inh-caps", "-all", "--"])
        .arg(env!("CARGO_BIN_EXE_penstock"))
        .args(["serve", "--user", USER, "--data"])
        .arg(&data)
        .output()
        .unwrap();
    let told = one_error(&output, 1);
    assert!(
        told.contains("cannot become user nobody") && told.contains("SETUID"),
        "{told}"
    );
    // Somebody else altogether.
    let output = Command::new("setpriv")
        .args(["--reuid", "1", "--regid", "1", "--clear-groups", "--"])
        .arg(env!("CARGO_BIN_EXE_penstock"))
        .args(["serve", "--user", USER, "--data"])
        .arg(&data)
        .output()
        .unwrap();
    let told = one_error(&output, 1);
    assert!(told.contains("start it as root, or as nobody"), "{told}");
}

/// The binary on a kernel that lacks a system call.
fn penstock_without(call: i64) -> Command {
    penstock_refused(call, Vec::new(), libc::ENOSYS)
}

/// The binary on a kernel that answers a system call with an error.
fn penstock_refused(call: i64, rules: Vec<SeccompRule>, errno: i32) -> Command {
    let lacking = SeccompAction::Errno(errno as u32);
    let rules = [(call, rules)].into_iter().collect();
    let arch = std::env::consts::ARCH.try_into().unwrap();
    let filter = SeccompFilter::new(rules, SeccompAction::Allow, lacking, arch).unwrap();
    let filter = BpfProgram::try_from(filter).unwrap();
    let mut command = penstock();
    // SAFETY: between fork and exec only plain system calls are made.
    unsafe {
        command.pre_exec(move || {
            seccompiler::apply_filter(&filter).map_err(|_| std::io::Error::last_os_error())
        });
    }
    command
}

#[test]
fn a_kernel_that_cannot_limit_stops_the_start_unless_told() {
    for (call, name) in [
        (libc::SYS_landlock_create_ruleset, "Landlock"),
        (libc::SYS_seccomp, "seccomp"),
    ] {
        let (_dir, data) = place();
        let output = penstock_without(call)
            .args(["serve", "--user", USER, "--data"])
            .arg(&data)
            .output()
            .unwrap();
        let told = one_error(&output, 1);
        assert!(
            told.contains(name) && told.contains("best-effort"),
            "{told}"
        );
        // Told to go on without, it says so.
        let options = ["--user", USER, "--sandbox", "best-effort"];
        let daemon = Daemon::start_by(penstock_without(call), &data, &options);
        let is_warned = |line: &String| line.contains(name) && line.contains("are not limited");
        assert!(daemon.said.iter().any(is_warned), "{:#?}", daemon.said);
        let told = daemon.json(&["status"])["privileges"].clone();
        assert_eq!(told["user"], USER);
        assert_eq!(told["landlock_abi"].is_null(), name == "Landlock", "{told}");
    }
}

#[test]
fn a_daemon_of_another_user_serves_on_an_older_kernel() {
    let (_dir, data) = place();
    // Before 6.4 there is no PR_GET_AUXV, and the file that tells the same is root's once the user has
    // changed.
    let (length, equal) = (SeccompCmpArgLen::Dword, SeccompCmpOp::Eq);
    let auxv = SeccompCondition::new(0, length, equal, 0x4155_5856).unwrap();
    let rule = SeccompRule::new(vec![auxv]).unwrap();
    let command = penstock_refused(libc::SYS_prctl, vec![rule], libc::EINVAL);
    let daemon = Daemon::start_by(command, &data, &["--user", USER]);
    daemon.ok(&["volume", "create", "a", "64M"]);
    let socket = data.join("a.sock");
    daemon.ok(&["attach", "volume", "a", "--socket", text(&socket)]);
    let mut guest = Front::start(&socket, 1);
    guest.write(7, 0x5a);
    assert_eq!(guest.read(0, 7), [0x5a; 512]);
}

#[test]
fn a_data_directory_of_somebody_else_is_refused_with_the_hint() {
    let (_dir, data) = place();
    drop(Daemon::start(&data));
    let told = one_error(&serve_with(&data, &["--user", USER]), 1);
    assert!(told.contains("belongs to user 0"), "{told}");
    let hint = format!("chown -R {UID}:{UID} {}", text(&data));
    assert!(told.contains(&hint), "{told}");
    let words: Vec<&str> = hint.split(' ').collect();
    let done = Command::new(words[0]).args(&words[1..]).status();
    assert!(done.unwrap().success());
    let daemon = Daemon::start_with(&data, &["--user", USER]);
    assert_eq!(daemon.ok(&["health"]), "ok\n");
    drop(daemon);
    // One file is enough.
    fs::write(data.join("meta/foreign"), b"x").unwrap();
    let told = one_error(&serve_with(&data, &["--user", USER]), 1);
    assert!(told.contains("meta/foreign belongs to user 0"), "{told}");
}

#[test]
fn what_the_sandbox_keeps_out_is_told_with_the_hint() {
    let (dir, data) = place();
    let (allowed, other) = (dir.path().join("allowed"), dir.path().join("other"));
    for path in [&allowed, &other] {
        fs::create_dir(path).unwrap();
        std::os::unix::fs::chown(path, Some(UID), Some(UID)).unwrap();
    }
    let config = dir.path().join("penstock.toml");
    let made = dir.path().join("made");
    let keys = format!("user = \"{USER}\"\nsocket_dirs = [{allowed:?}, {made:?}]\n");
    fs::write(&config, keys).unwrap();
    let daemon = Daemon::start_with(&data, &["--config", text(&config)]);
    assert_eq!(fs::metadata(&made).unwrap().uid(), UID);
    for name in ["a", "b", "c"] {
        daemon.ok(&["volume", "create", name, "64M"]);
    }
    let socket = |dir: &Path| text(&dir.join("a.sock")).to_owned();
    daemon.ok(&["attach", "volume", "a", "--socket", &socket(&allowed)]);
    daemon.ok(&["attach", "volume", "b", "--socket", &socket(&made)]);
    let told = daemon.refused(&["attach", "volume", "c", "--socket", &socket(&other)]);
    assert!(
        told.contains(text(&other)) && told.contains("socket_dirs"),
        "{told}"
    );
    // It is the kernel that keeps it out: another directory in the place of an allowed one is not allowed.
    fs::rename(&made, dir.path().join("moved")).unwrap();
    fs::create_dir(&made).unwrap();
    std::os::unix::fs::chown(&made, Some(UID), Some(UID)).unwrap();
    let name = text(&made.join("c.sock")).to_owned();
    let told = daemon.refused(&["attach", "volume", "c", "--socket", &name]);
    assert!(told.contains("ermission denied"), "{told}");
    assert_eq!(fs::read_dir(&made).unwrap().count(), 0);
    fs::remove_dir(&made).unwrap();
    fs::rename(dir.path().join("moved"), &made).unwrap();
    let device = format!("{}:1G", text(&other.join("more.img")));
    let told = daemon.refused(&["device", "add", &device]);
    assert!(
        told.contains("add ") && told.contains("to devices"),
        "{told}"
    );
    drop(daemon);

    // An attachment that was made while it was not limited is told, and stops nobody else.
    let daemon = Daemon::start_with(&data, &["--config", text(&config), "--sandbox", "off"]);
    // Landlock and seccomp would have set no_new_privs, too: without them it is the daemon's own doing.
    check_given_up_but("0", &daemon);
    daemon.ok(&["attach", "volume", "c", "--socket", &socket(&other)]);
    // Owners and modes count without a sandbox, too.
    daemon.ok(&["volume", "create", "d", "64M"]);
    let closed = dir.path().join("closed");
    fs::create_dir(&closed).unwrap();
    let told = daemon.refused(&["attach", "volume", "d", "--socket", &socket(&closed)]);
    assert!(
        told.contains("user nobody") && told.contains(text(&closed)),
        "{told}"
    );
    drop(daemon);
    let daemon = Daemon::start_with(&data, &["--config", text(&config)]);
    let health = daemon.json_of(&["health"]).to_string();
    assert!(
        health.contains(&socket(&other)) && health.contains("socket_dirs"),
        "{health}"
    );
    assert!(!health.contains(&socket(&allowed)), "{health}");
}

/// Size of a disk. Neither a MiB nor a block divides it.
const DISK_BYTES: u64 = (1 << 30) + (518 << 10);

/// A block device of root's upon a file.
struct LoopDevice(String);

impl LoopDevice {
    fn new(file: &Path) -> Self {
        fs::File::create(file).unwrap().set_len(DISK_BYTES).unwrap();
        let output = Command::new("losetup")
            .args(["--find", "--show", text(file)])
            .output();
        let output = output.unwrap();
        assert!(output.status.success(), "{output:?}");
        LoopDevice(String::from_utf8(output.stdout).unwrap().trim().to_owned())
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        let _ = Command::new("losetup").args(["--detach", &self.0]).status();
    }
}

#[test]
fn block_devices_are_opened_before_the_user_changes() {
    let (dir, data) = place();
    let device = LoopDevice::new(&dir.path().join("disk"));
    assert_eq!(fs::metadata(&device.0).unwrap().uid(), 0);
    let options = ["--user", USER, "--device", &device.0];
    for start in 0..2 {
        let daemon = Daemon::start_with(&data, &options);
        let devices = daemon.json(&["device", "list"]);
        assert_eq!(
            (&devices[0]["path"], &devices[0]["state"]),
            (&device.0.clone().into(), &"ok".into())
        );
        let name = format!("v{start}");
        daemon.ok(&["volume", "create", &name, "1M"]);
        assert_eq!(
            daemon.json(&["volume", "list"]).as_array().unwrap().len(),
            start + 1
        );
        // Nobody else has it meanwhile.
        let other = data.with_file_name("other");
        let told = one_error(&serve_with(&other, &options), 1);
        assert!(told.contains("in use"), "{told}");
        daemon.kill();
    }
}

#[test]
fn a_disk_is_handed_over_that_the_daemon_may_not_open() {
    let (dir, data) = place();
    let disks = ["one", "two"].map(|name| LoopDevice::new(&dir.path().join(name)));
    let config = dir.path().join("penstock.toml");
    let write = |named: &[LoopDevice]| {
        let named: Vec<&str> = named.iter().map(|disk| disk.0.as_str()).collect();
        fs::write(&config, format!("user = {USER:?}\ndevices = {named:?}\n")).unwrap();
    };
    write(&disks[..1]);
    let daemon = Daemon::start_with(&data, &["--config", text(&config)]);
    let second = disks[1].0.as_str();

    // The next start could not open it.
    let told = daemon.refused(&["device", "add", second]);
    assert!(
        told.contains("sandbox") && told.contains(&format!("name {second} under `devices`")),
        "{told}"
    );
    write(&disks);
    // Only somebody who may open the disk can hand it over.
    let told = Command::new("setpriv")
        .args([
            "--reuid",
            USER,
            "--regid",
            "nogroup",
            "--clear-groups",
            "--",
        ])
        .arg(penstock().get_program())
        .args(["device", "add", second, "--data", text(&data)])
        .output()
        .unwrap();
    let told = String::from_utf8(told.stderr).unwrap();
    assert!(told.contains("run this as root"), "{told}");
    daemon.ok(&["device", "add", second]);
    let told = one_error(&run(&["device", "add", second, "--data", text(&data)]), 1);
    assert!(told.contains("already"), "{told}");
    let states = |daemon: &Daemon| {
        let devices = daemon.json(&["device", "list"]);
        let states = devices.as_array().unwrap().iter();
        states
            .map(|one| (one["path"].clone(), one["state"].clone()))
            .collect::<Vec<_>>()
    };
    let both = disks
        .each_ref()
        .map(|disk| (disk.0.clone().into(), "ok".into()));
    assert_eq!(states(&daemon), both);
    // Nobody else has it meanwhile.
    let other = data.with_file_name("other");
    let told = one_error(
        &serve_with(&other, &["--user", USER, "--device", second]),
        1,
    );
    assert!(told.contains("in use"), "{told}");
    daemon.kill();
    let daemon = Daemon::start_with(&data, &["--config", text(&config)]);
    assert_eq!(states(&daemon), both);
    // One that was handed over is closed like any other, and can be handed over again.
    daemon.ok(&["device", "remove", second, "--yes"]);
    drop(DeviceFile::open(Path::new(second)).unwrap());
    let told = daemon.refused(&["device", "add", second]);
    let seek = DISK_BYTES / 4096 - 4096;
    let how = format!("bs=4096 count=4096 conv=notrunc`, and the same with seek={seek};");
    assert!(told.contains(&how), "{told}");
    let behind = fs::File::options().write(true).open(second).unwrap();
    for block in [0, seek] {
        behind
            .write_all_at(&vec![0; 16 << 20], block * 4096)
            .unwrap();
    }
    drop(behind);
    daemon.ok(&["device", "add", second]);
    assert_eq!(states(&daemon).len(), 2);
}

#[test]
fn only_the_open_disk_that_is_named_is_taken() {
    let dir = temp();
    let disks = ["one", "two"].map(|name| LoopDevice::new(&dir.path().join(name)));
    let [one, two] = disks.each_ref().map(|disk| Path::new(&disk.0));
    let opened = OpenedAhead::default();
    let open = |path| OwnedFd::from(DeviceFile::open(path).unwrap());
    let refused = |path, fd| opened.take(path, fd).unwrap_err().to_string();
    // Each lacks one of what is asked for.
    let other = refused(one, open(two));
    assert!(other.contains("was handed over is not /dev/"), "{other}");
    let unfit = |path, flags| {
        let mut options = fs::File::options();
        options.read(true).write(flags != 0).custom_flags(flags);
        refused(path, options.open(path).unwrap().into())
    };
    assert_eq!(unfit(one, 0), other);
    let read_write = fs::File::options().read(true).write(true).open(one);
    assert_eq!(refused(one, read_write.unwrap().into()), other);
    let file = dir.path().join("one");
    assert!(unfit(&file, libc::O_DIRECT).contains("was handed over is not"));

    let first = open(one);
    opened.take(one, first.try_clone().unwrap()).unwrap();
    assert!(refused(one, first).contains("in use"));
    assert!(opened.has(one) && !opened.has(two));
    opened.forget(one);
    opened.take(one, open(one)).unwrap();
}

#[test]
fn what_was_handed_over_is_let_go_with_the_connection() {
    let (dir, data) = place();
    let disk = LoopDevice::new(&dir.path().join("disk"));
    let daemon = Daemon::start_with(&data, &["--user", USER]);
    let mut socket = UnixStream::connect(data.join("penstock.sock")).unwrap();
    let request = "PUT /v1/devices/open HTTP/1.1\r\nHost: penstock\r\nConnection: upgrade\r\n\
                   Upgrade: penstock-device\r\n\r\n";
    socket.write_all(request.as_bytes()).unwrap();
    let mut answer = Vec::new();
    // The daemon's first message is `null`.
    while !answer.ends_with(b"\r\n\r\nnull") {
        let mut byte = [0];
        socket.read_exact(&mut byte).unwrap();
        answer.push(byte[0]);
    }
    let path = PathBuf::from(&disk.0);
    let device = OwnedFd::from(DeviceFile::open(&path).unwrap());
    wire::send(socket.as_fd(), &path, Some(device.as_fd())).unwrap();
    drop(device);
    // It does not wait for the answer.
    drop(socket);
    drop(DeviceFile::open(&path).unwrap());
    daemon.ok(&["status"]);
}

#[test]
fn a_link_that_the_daemon_could_plant_leads_to_no_disk() {
    let (dir, data) = place();
    let disk = LoopDevice::new(&dir.path().join("disk"));
    let link = data.join("disk");
    fs::create_dir(&data).unwrap();
    std::os::unix::fs::symlink(&disk.0, &link).unwrap();
    for path in [&data, &link] {
        std::os::unix::fs::lchown(path, Some(UID), Some(UID)).unwrap();
    }
    let told = one_error(
        &serve_with(&data, &["--user", USER, "--device", text(&link)]),
        1,
    );
    assert!(told.contains("permission denied"), "{told}");
}

#[test]
fn init_as_root_writes_as_the_owner_of_the_directory() {
    let (_dir, data) = place();
    fs::create_dir(&data).unwrap();
    std::os::unix::fs::chown(&data, Some(UID), Some(UID)).unwrap();
    let made = run(&["init", "--data", text(&data), "--listen", "127.0.0.1"]);
    assert!(made.status.success(), "{made:?}");
    let (mut left, mut seen) = (vec![data], 0);
    while let Some(path) = left.pop() {
        let found = fs::symlink_metadata(&path).unwrap();
        assert_eq!(found.uid(), UID, "{}", path.display());
        seen += 1;
        if found.is_dir() {
            left.extend(
                fs::read_dir(&path)
                    .unwrap()
                    .map(|entry| entry.unwrap().path()),
            );
        }
    }
    assert!(seen > 4, "keys and certificates: {seen}");
}
