//! Guests on the daemon's disks, and what becomes of them when it is killed, short of something, or told to
//! stop.

use std::fs;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::front::Front;
use crate::harness::{
    Daemon, eventually, greet, greet_once_served, one_error, penstock, temp, text,
};
use crate::metrics::ask;

fn attached(daemon: &Daemon, dir: &Path, volume: &str) -> PathBuf {
    let socket = dir.join(format!("{volume}.sock"));
    daemon.ok(&["volume", "create", volume, "64M"]);
    daemon.ok(&["attach", "volume", volume, "--socket", text(&socket)]);
    socket
}

#[test]
fn write_cache_switched_off_by_a_guest_stays_off_after_a_kill() {
    let dir = temp();
    let data = dir.path().join("data");
    let daemon = Daemon::start(&data);
    let (through, back) = (
        attached(&daemon, dir.path(), "through"),
        attached(&daemon, dir.path(), "back"),
    );
    let mut guest = Front::start(&through, 1);
    assert!(guest.writeback());
    guest.set_writeback(false);
    let mut other = Front::start(&back, 1);
    other.set_writeback(false);
    other.set_writeback(true);
    daemon.kill();
    let daemon = Daemon::start(&data);
    assert!(Front::start(&back, 1).writeback());
    let listed = daemon.json(&["attachments", "list"]);
    assert_eq!(
        (&listed[0]["write_through"], &listed[1]["write_through"]),
        (&true.into(), &false.into())
    );
    let mut guest = Front::start(&through, 1);
    assert!(!guest.writeback());
    // A driver that begins anew begins with the cache, and that lasts as well.
    guest.reset_device();
    assert!(guest.writeback());
    assert!(daemon.terminate().success());
    let _daemon = Daemon::start(&data);
    assert!(Front::start(&through, 1).writeback());
}

/// How often a hostile guest switches its write cache.
const TOGGLES: u32 = 10_000;

#[test]
fn a_guest_that_toggles_its_write_cache_fills_no_log() {
    let dir = temp();
    let data = dir.path().join("data");
    let daemon = Daemon::start(&data);
    let (through, back) = (
        attached(&daemon, dir.path(), "through"),
        attached(&daemon, dir.path(), "back"),
    );
    let entries = || {
        let admin = UnixStream::connect(data.join("penstock.sock")).unwrap();
        let (_, page) = ask(admin, "GET /metrics");
        let line = page
            .lines()
            .find_map(|line| line.strip_prefix("penstock_meta_last_index "));
        line.unwrap().parse::<u64>().unwrap()
    };
    let (before, began) = (entries(), std::time::Instant::now());
    let (mut guest, mut other) = (Front::start(&through, 1), Front::start(&back, 1));
    for toggle in 0..TOGGLES {
        guest.set_writeback(toggle % 2 == 0);
        other.set_writeback(toggle % 2 == 1);
    }
    assert!(!guest.writeback() && other.writeback());
    // Nine at once and one each second, of each guest; some more of the cluster's own.
    let most = 2 * (9 + began.elapsed().as_secs()) + 20;
    let made = entries() - before;
    assert!(made <= most, "{made} entries of at most {most}");
    // A daemon that stops records what each has chosen last.
    assert!(daemon.terminate().success());
    let daemon = Daemon::start(&data);
    assert!(!Front::start(&through, 1).writeback());
    assert!(Front::start(&back, 1).writeback());
    // One that dies breaks no promise either.
    let mut guest = Front::start(&through, 1);
    for _ in 0..20 {
        guest.set_writeback(true);
        guest.set_writeback(false);
    }
    daemon.kill();
    let _daemon = Daemon::start(&data);
    assert!(!Front::start(&through, 1).writeback());
}

/// Files that a daemon may open in the tests below, unless it raises the limit itself.
const FEW_FILES: u64 = 256;

/// A command with few open files, and with `hard` as far as it may raise that.
fn limited(hard: Option<u64>) -> Command {
    let mut command = penstock();
    // SAFETY: between fork and exec only plain system calls are made.
    unsafe {
        command.pre_exec(move || {
            let mut limit = libc::rlimit {
                rlim_cur: 0,
                rlim_max: 0,
            };
            if libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit) != 0 {
                return Err(std::io::Error::last_os_error());
            }
            limit.rlim_cur = FEW_FILES;
            limit.rlim_max = hard.unwrap_or(limit.rlim_max);
            match libc::setrlimit(libc::RLIMIT_NOFILE, &limit) {
                0 => Ok(()),
                _ => Err(std::io::Error::last_os_error()),
            }
        });
    }
    command
}

#[test]
fn a_limit_of_open_files_that_is_too_low_is_told() {
    let dir = temp();
    let daemon = Daemon::start_by(limited(Some(1024)), dir.path(), &[]);
    assert!(daemon.said.iter().any(|line| line.contains("LimitNOFILE")));
    let status = daemon.ok(&["status"]);
    assert!(status.contains("at most 1024, too few"), "{status}");
}

#[test]
fn a_daemon_started_with_few_open_files_takes_all_that_it_may() {
    let dir = temp();
    let daemon = Daemon::start_by(limited(None), &dir.path().join("data"), &[]);
    let max = daemon.json(&["status"])["open_files_max"].as_u64().unwrap();
    assert!(max > FEW_FILES, "{max}");
    let mut guests = Vec::new();
    for index in 0..16 {
        let socket = attached(&daemon, dir.path(), &format!("v{index}"));
        guests.push(Front::start(&socket, 4));
    }
    for guest in &mut guests {
        for queue in 0..4 {
            assert_eq!(guest.read(queue, 0), [0; 512]);
        }
    }
}

#[test]
fn a_daemon_keeps_no_privileges_that_it_does_not_need() {
    let dir = temp();
    let daemon = Daemon::start(dir.path());
    // The first thread and the youngest: all have given them up.
    for task in fs::read_dir(format!("/proc/{}/task", daemon.pid())).unwrap() {
        let status = fs::read_to_string(task.unwrap().path().join("status")).unwrap();
        let field = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name));
            line.unwrap().trim().to_owned()
        };
        assert_eq!(field("NoNewPrivs:"), "1");
        let kept = u64::from_str_radix(&field("CapPrm:"), 16).unwrap();
        // chown, dac_override, fowner, ipc_lock.
        assert_eq!(kept & !(1 | 1 << 1 | 1 << 3 | 1 << 14), 0, "{kept:x}");
    }
}

#[test]
fn a_guest_that_hangs_while_it_is_detached_holds_nobody_else_up() {
    let dir = temp();
    let daemon = Daemon::start(&dir.path().join("data"));
    let socket = attached(&daemon, dir.path(), "a");
    let mut guest = Front::start(&socket, 1);
    guest.wedge();
    let mut detach = daemon.command(&["detach", "a", "--yes"]).spawn().unwrap();
    eventually(|| daemon.json(&["attachments", "list"])[0]["state"] == "detaching");
    assert_eq!(daemon.ok(&["health"]), "ok\n");
    daemon.ok(&["volume", "create", "b", "64M"]);
    let told = daemon.refused(&["detach", "a", "--yes"]);
    assert!(told.contains("being detached"), "{told}");
    // Its last requests may still be written, so nobody else gets the volume.
    let other = dir.path().join("other.sock");
    daemon.refused(&["attach", "volume", "a", "--socket", text(&other)]);
    daemon.refused(&["volume", "delete", "a", "--yes"]);
    assert!(detach.try_wait().unwrap().is_none());
    guest.unwedge();
    assert!(detach.wait().unwrap().success());
    daemon.ok(&["attach", "volume", "a", "--socket", text(&other)]);
}

#[test]
fn a_guest_that_hangs_does_not_keep_the_daemon_from_stopping() {
    let dir = temp();
    let data = dir.path().join("data");
    let daemon = Daemon::start(&data);
    let (hangs, well) = (
        attached(&daemon, dir.path(), "a"),
        attached(&daemon, dir.path(), "b"),
    );
    let mut guest = Front::start(&hangs, 1);
    guest.write(8, 3);
    guest.wedge();
    // The bound is the daemon's own; this waits as long as the test runner lets it.
    assert_eq!(daemon.terminate().code(), Some(1));
    let daemon = Daemon::start(&data);
    assert_eq!(daemon.ok(&["health"]), "ok\n");
    assert_eq!(Front::start(&hangs, 1).read(0, 8), [3; 512]);
    assert_ne!(greet(&well).1, 0);
}

#[test]
fn the_back_end_program_leaves_attachments_alone() {
    let dir = temp();
    let data = dir.path().join("data");
    let daemon = Daemon::start(&data);
    let taken = attached(&daemon, dir.path(), "a");
    daemon.ok(&["volume", "create", "b", "64M"]);
    assert!(daemon.terminate().success());
    let socket = dir.path().join("program.sock");
    let program = |volume: &str, socket: &Path| {
        let mut command = penstock();
        command
            .args(["vhost-user-blk", "--threads", "1", "--volume", volume])
            .args(["--data", text(&data), "--socket-path", text(socket)]);
        command
    };
    let told = one_error(&program("a", &socket).output().unwrap(), 1);
    assert!(
        told.contains(text(&taken)) && told.contains("penstock detach a"),
        "{told}"
    );
    let mut child = program("b", &socket).spawn().unwrap();
    assert_ne!(greet_once_served(&socket).1, 0);
    assert!(!taken.exists(), "another volume's attachment is served");
    // SAFETY: a plain system call on a child that has not been waited for.
    unsafe { libc::kill(child.id() as libc::pid_t, libc::SIGTERM) };
    assert!(child.wait().unwrap().success());
    // A socket that cannot be made is the error, and nothing hangs on it.
    let missing = dir.path().join("no/such/dir/b.sock");
    let output = program("b", &missing).output().unwrap();
    let told = one_error(&output, 1);
    assert!(told.contains(text(missing.parent().unwrap())), "{told}");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!said.contains("a copy is still running"), "{said}");
}

#[test]
fn an_admin_socket_elsewhere_is_found_by_the_data_directory() {
    let dir = temp();
    let (data, socket) = (dir.path().join("data"), dir.path().join("admin.sock"));
    let config = dir.path().join("penstock.toml");
    fs::write(&config, format!("admin_socket = \"{}\"\n", text(&socket))).unwrap();
    let daemon = Daemon::start_with(&data, &["--config", text(&config)]);
    assert_eq!(daemon.ok(&["health"]), "ok\n");
    daemon.kill();
    let daemon = Daemon::start_with(&data, &["--config", text(&config)]);
    assert_eq!(daemon.ok(&["health"]), "ok\n");
    daemon.kill();
    // Back at the usual place, whatever was left there.
    let daemon = Daemon::start(&data);
    assert_eq!(daemon.ok(&["health"]), "ok\n");
    assert!(daemon.terminate().success());
    assert!(!data.join("penstock.sock").is_symlink());
}
