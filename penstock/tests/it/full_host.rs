//! The file system under a daemon is full: its sparse device file, its metadata and its log lie there.

use std::ffi::CString;
use std::fs::{self, File};
use std::path::Path;
use std::process::Command;

use crate::front::Front;
use crate::harness::{Daemon, eventually, one_error, temp, text};

/// Size of the file system: several times that of the sparse device file on it, or `health` never is content.
const SIZE_BYTES: u64 = 4 << 30;
/// Bytes that whoever fills it leaves: less than Penstock keeps for itself.
const LEFT_BYTES: u64 = 4 << 20;
/// More writes than there is space for.
const WRITES_MAX: u64 = 16 << 10;
/// Writes that guests try while there is no space, and the lines that may be logged meanwhile: a line a
/// second of each kind.
const TRIES: u64 = 300;
const LINES_MAX: usize = 60;
/// Keeps what the daemon says, and passes it on to whoever waits until it is ready.
const LOGGED: &str = "exec \"$0\" \"$@\" 2> >(tee -a \"$LOG\" >&2)";

/// Makes a file system in a file, and mounts it for this thread and whatever it starts.
fn mount_small(image: &Path, dir: &Path) {
    let file = File::create(image).unwrap();
    file.set_len(SIZE_BYTES).unwrap();
    fs::create_dir(dir).unwrap();
    let root = CString::new("/").unwrap();
    // SAFETY: plain system calls; the string lives until they return.
    let is_alone = unsafe {
        libc::unshare(libc::CLONE_NEWNS) == 0
            && libc::mount(
                std::ptr::null(),
                root.as_ptr(),
                std::ptr::null(),
                libc::MS_REC | libc::MS_PRIVATE,
                std::ptr::null(),
            ) == 0
    };
    assert!(is_alone, "{}", std::io::Error::last_os_error());
    for (program, options) in [
        ("mkfs.ext4", &["-q", "-F", "-m", "0", text(image)][..]),
        ("mount", &["-o", "loop", text(image), text(dir)]),
    ] {
        let status = Command::new(program).args(options).status().unwrap();
        assert!(status.success(), "{program}: run this test as root");
    }
}

fn start(data: &Path, log: &Path) -> Daemon {
    let mut command = Command::new("bash");
    command
        .args(["-c", LOGGED, env!("CARGO_BIN_EXE_penstock")])
        .env("PENSTOCK_RUN_DIR", env!("CARGO_TARGET_TMPDIR"))
        .env("LOG", log);
    Daemon::start_by(command, data, &["--preallocation", "off"])
}

/// Takes all space but a little.
fn fill(dir: &Path, filler: &Path) {
    let stat = rustix::fs::statvfs(dir).unwrap();
    let bytes = stat.f_bavail * stat.f_frsize - LEFT_BYTES;
    let status = Command::new("fallocate")
        .args(["-l", &bytes.to_string(), text(filler)])
        .status();
    assert!(status.unwrap().success());
}

fn problems(daemon: &Daemon) -> String {
    daemon.json_of(&["health"])["problems"].to_string()
}

#[test]
fn a_full_file_system_is_named_and_costs_no_data_and_few_lines() {
    let dir = temp();
    let (small, log) = (dir.path().join("small"), dir.path().join("log"));
    mount_small(&dir.path().join("image"), &small);
    let (data, filler) = (small.join("data"), small.join("filler"));
    let (raw, out) = (dir.path().join("in.raw"), dir.path().join("out.raw"));
    let bytes: Vec<u8> = (0..16 << 20).map(|at: u32| (at >> 9) as u8 | 1).collect();
    fs::write(&raw, &bytes).unwrap();
    let daemon = start(&data, &log);
    assert_eq!(daemon.ok(&["health"]), "ok\n");
    for volume in ["kept", "disk", "other"] {
        daemon.ok(&["volume", "create", volume, "128M", "--on-full", "error"]);
    }
    daemon.ok(&["volume", "import", "kept", text(&raw), "--yes"]);
    let socket = dir.path().join("disk.sock");
    daemon.ok(&["attach", "volume", "disk", "--socket", text(&socket)]);
    let mut guest = Front::start(&socket, 1);
    guest.write(0, 1);

    fill(&small, &filler);
    // Each is a block of its own. They get no space once it is noticed.
    let mut writes = (1..WRITES_MAX).filter(|at| !guest.try_write(8 * at, 2));
    let first = writes.next().expect("there is no end of space");
    eventually(|| problems(&daemon).contains("host-filesystem-short"));
    let lines = || fs::read_to_string(&log).unwrap().lines().count();
    let before = lines();
    let tries = first..first + TRIES;
    let written = tries.filter(|at| guest.try_write(8 * at, 2)).count();
    assert_eq!(written, 0, "guests leave the last of it to others");
    let refused = daemon.run(&["volume", "import", "other", text(&raw), "--yes"]);
    let told = one_error(&refused, 1);
    assert!(told.contains("space"), "{told}");
    assert!(lines() - before < LINES_MAX, "{} lines", lines() - before);
    assert_eq!(guest.read(0, 0), [1; 512]);
    drop(guest);

    // Deleting works, and so does a start. What the metadata keep for that is in use then.
    eventually(|| !data.join("meta/ballast").exists());
    daemon.ok(&["volume", "delete", "other", "--yes"]);
    let refused = daemon.run(&["volume", "create", "new", "64M"]);
    let told = one_error(&refused, 1);
    assert!(told.contains("space"), "{told}");
    daemon.kill();
    let daemon = start(&data, &log);
    assert!(problems(&daemon).contains("host-filesystem-short"));
    daemon.ok(&["volume", "export", "kept", text(&out)]);
    assert!(fs::read(&out).unwrap()[..bytes.len()] == bytes);
    let mut guest = Front::start(&socket, 1);
    assert_eq!(guest.read(0, 0), [1; 512]);

    fs::remove_file(&filler).unwrap();
    eventually(|| daemon.run(&["health"]).stdout == b"ok\n");
    guest.write(8, 3);
    assert_eq!(guest.read(0, 8), [3; 512]);
    daemon.ok(&["volume", "create", "new", "64M"]);
}
