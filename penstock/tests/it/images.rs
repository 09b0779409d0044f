//! Import and export: what goes in comes out, zeroes cost nothing, and a failure leaves nothing.

use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use crate::harness::{Daemon, eventually, one_error, temp, text};

/// Size of the images in these tests.
const IMAGE_BYTES: u64 = 48 << 20;

/// A sparse image with data in odd places: 3 MiB that do not compress to zeroes, the rest holes.
pub fn image(path: &Path) -> Vec<u8> {
    let mut content = vec![0; IMAGE_BYTES as usize];
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    for (from, len) in [
        (0, 700),
        (5_000_001, 1 << 20),
        (20 << 20, 2 << 20),
        (IMAGE_BYTES as usize - 9, 9),
    ] {
        for byte in &mut content[from..from + len] {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            *byte = (state >> 56) as u8 | 1;
        }
    }
    let file = File::create(path).unwrap();
    file.set_len(IMAGE_BYTES).unwrap();
    for (index, block) in content.chunks(4096).enumerate() {
        if block.iter().any(|b| *b != 0) {
            file.write_all_at(block, index as u64 * 4096).unwrap();
        }
    }
    content
}

pub fn used(daemon: &Daemon) -> u64 {
    daemon.json(&["device", "list"])[0]["used_bytes"]
        .as_u64()
        .unwrap()
}

pub fn qemu_img(args: &[&str]) {
    let output = Command::new("qemu-img").args(args).output().unwrap();
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
}

#[test]
fn a_raw_image_comes_out_as_it_went_in() {
    let dir = temp();
    let daemon = Daemon::start(&dir.path().join("data"));
    let (raw, out) = (dir.path().join("in.raw"), dir.path().join("out.raw"));
    let content = image(&raw);
    let empty = used(&daemon);
    let volume = daemon.json(&["volume", "import", "a", text(&raw)]);
    assert_eq!(volume["size_bytes"], IMAGE_BYTES);
    assert!(used(&daemon) - empty < 12 << 20, "zeroes take no space");
    daemon.ok(&["volume", "export", "a", text(&out)]);
    assert!(fs::read(&out).unwrap() == content);
    assert!(
        fs::metadata(&out).unwrap().blocks() * 512 < 12 << 20,
        "the export is sparse"
    );

    let told = daemon.refused(&["volume", "export", "a", text(&out)]);
    assert!(told.contains("--force"), "{told}");
    daemon.ok(&["volume", "export", "a", text(&out), "--force"]);
    // A link stands for its file, and what is no file is left alone.
    let (link, fifo) = (dir.path().join("link"), dir.path().join("fifo"));
    std::os::unix::fs::symlink(&out, &link).unwrap();
    fs::write(&out, b"old").unwrap();
    daemon.ok(&["volume", "export", "a", text(&link), "--force"]);
    assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
    assert!(fs::read(&out).unwrap() == content);
    let mode = rustix::fs::Mode::from_raw_mode(0o600);
    rustix::fs::mknodat(rustix::fs::CWD, &fifo, rustix::fs::FileType::Fifo, mode, 0).unwrap();
    let told = one_error(
        &daemon.run(&["volume", "export", "a", text(&fifo), "--force"]),
        2,
    );
    assert!(told.contains("neither a file nor"), "{told}");
    assert!(!fs::metadata(&fifo).unwrap().is_file());
    for path in [&link, &fifo] {
        fs::remove_file(path).unwrap();
    }
    let piped = daemon.run(&["volume", "export", "a", "-"]);
    assert!(piped.status.success());
    assert!(piped.stdout == content);
    let left: Vec<_> = fs::read_dir(dir.path())
        .unwrap()
        .map(|e| e.unwrap().file_name())
        .collect();
    assert_eq!(left.len(), 3, "only data, in.raw and out.raw: {left:?}");
}

#[test]
fn an_export_leaves_alone_what_a_daemon_holds() {
    let dir = temp();
    let daemon = Daemon::start(&dir.path().join("data"));
    daemon.ok(&["volume", "create", "a", "64M"]);
    let device = daemon.json(&["device", "list"])[0]["path"].clone();
    let lock = daemon.data().join("lock");
    for path in [device.as_str().unwrap(), text(&lock)] {
        let before = fs::metadata(path).unwrap().ino();
        let told = daemon.refused(&["volume", "export", "a", path, "--force"]);
        assert!(told.contains("in use"), "{told}");
        assert_eq!(fs::metadata(path).unwrap().ino(), before);
    }
}

#[test]
fn a_qcow2_image_comes_out_as_it_went_in() {
    let dir = temp();
    let daemon = Daemon::start(&dir.path().join("data"));
    let (raw, qcow2, out) = (
        dir.path().join("in.raw"),
        dir.path().join("in.qcow2"),
        dir.path().join("out.qcow2"),
    );
    let content = image(&raw);
    qemu_img(&[
        "convert",
        "-c",
        "-f",
        "raw",
        "-O",
        "qcow2",
        text(&raw),
        text(&qcow2),
    ]);
    assert_eq!(
        daemon.json(&["volume", "import", "a", text(&qcow2)])["size_bytes"],
        IMAGE_BYTES
    );
    assert!(daemon.run(&["volume", "export", "a", "-"]).stdout == content);
    daemon.ok(&["volume", "export", "a", text(&out), "--format", "qcow2"]);
    qemu_img(&[
        "compare",
        "-f",
        "raw",
        "-F",
        "qcow2",
        text(&raw),
        text(&out),
    ]);
}

#[test]
fn an_image_that_was_cut_off_is_refused() {
    let dir = temp();
    let daemon = Daemon::start(&dir.path().join("data"));
    let raw = dir.path().join("in.raw");
    image(&raw);
    let convert = ["convert", "-f", "raw", "-O", "qcow2"];
    for (name, options) in [("plain", &[][..]), ("packed", &["-c"])] {
        let whole = dir.path().join(name);
        qemu_img(&[&convert, options, &[text(&raw), text(&whole)]].concat());
        let bytes = fs::metadata(&whole).unwrap().len();
        let cut = dir.path().join(format!("{name}.cut"));
        for lost in [1000, 100_000, 1 << 20] {
            // The end of a compressed image may be filling that nobody needs.
            if lost == 1000 && name == "packed" {
                continue;
            }
            fs::copy(&whole, &cut).unwrap();
            let file = File::options().write(true).open(&cut).unwrap();
            file.set_len(bytes - lost).unwrap();
            let told = daemon.refused(&["volume", "import", "a", text(&cut)]);
            assert!(
                told.contains("cut off") && told.contains(text(&cut)),
                "{told}"
            );
        }
        daemon.ok(&["volume", "import", "a", text(&whole)]);
        daemon.ok(&["volume", "delete", "a", "--yes"]);
    }
    assert_eq!(daemon.json(&["volume", "list"]), serde_json::json!([]));
}

#[test]
fn images_of_every_making_are_taken_as_whole() {
    let dir = temp();
    let daemon = Daemon::start(&dir.path().join("data"));
    for option in [
        "preallocation=off",
        "preallocation=metadata",
        "preallocation=falloc",
        "preallocation=full",
        "lazy_refcounts=on",
        "cluster_size=512",
        "cluster_size=2M",
        "extended_l2=on",
        "compat=0.10",
    ] {
        let path = dir.path().join("a.qcow2");
        qemu_img(&["create", "-f", "qcow2", "-o", option, text(&path), "10M"]);
        let io = Command::new("qemu-io")
            .args(["-f", "qcow2", "-c", "write -P 9 10485248 512", text(&path)])
            .output()
            .unwrap();
        assert!(io.status.success(), "{io:?}");
        daemon.ok(&["volume", "import", "a", text(&path), "--yes"]);
        let content = daemon.run(&["volume", "export", "a", "-"]).stdout;
        assert!(content.ends_with(&[9; 512]) && content[..10_485_248].iter().all(|b| *b == 0));
    }
}

#[test]
fn what_has_no_end_is_no_image() {
    let dir = temp();
    let daemon = Daemon::start(&dir.path().join("data"));
    let fifo = dir.path().join("fifo");
    let mode = rustix::fs::Mode::from_raw_mode(0o600);
    rustix::fs::mknodat(rustix::fs::CWD, &fifo, rustix::fs::FileType::Fifo, mode, 0).unwrap();
    for (path, what) in [
        (fifo.as_path(), "a FIFO"),
        (Path::new("/dev/zero"), "a character device"),
        (dir.path(), "a directory"),
        (&daemon.data().join("penstock.sock"), "a socket"),
    ] {
        for format in [&[][..], &["--format", "raw"]] {
            let args = [&["volume", "import", "a", text(path)], format].concat();
            let told = one_error(&daemon.run(&args), 2);
            assert!(told.contains(what), "{told}");
        }
    }
}

#[test]
fn what_a_killed_export_left_goes_with_the_next() {
    let dir = temp();
    let daemon = Daemon::start(&dir.path().join("data"));
    daemon.ok(&["volume", "create", "a", "1M"]);
    let mut ended = Command::new("true").spawn().unwrap();
    ended.wait().unwrap();
    let (dead, alive) = (ended.id(), std::process::id());
    let stale = dir.path().join(format!(".out.raw.part-{dead}"));
    let kept = [
        dir.path().join(format!(".out.raw.part-{alive}")),
        dir.path().join(format!(".other.raw.part-{dead}")),
        dir.path().join(".out.raw.part-"),
        dir.path().join(".out.raw.part-1x"),
        dir.path().join(".out.raw.part--1"),
        dir.path().join(".out.raw.part-0"),
    ];
    for path in kept.iter().chain([&stale]) {
        fs::write(path, "half").unwrap();
    }
    daemon.ok(&["volume", "export", "a", text(&dir.path().join("out.raw"))]);
    assert!(!stale.exists());
    for path in &kept {
        assert!(path.exists(), "{}", path.display());
    }
}

#[test]
fn data_survive_a_kill_of_the_daemon() {
    let dir = temp();
    let data = dir.path().join("data");
    let daemon = Daemon::start(&data);
    let raw = dir.path().join("in.raw");
    let content = image(&raw);
    daemon.ok(&["volume", "import", "a", text(&raw)]);
    daemon.kill();
    let daemon = Daemon::start(&data);
    assert!(
        daemon
            .said
            .iter()
            .any(|l| l.starts_with("penstock: store ")),
        "{:#?}",
        daemon.said
    );
    assert!(daemon.run(&["volume", "export", "a", "-"]).stdout == content);
    assert!(daemon.terminate().success());
    let daemon = Daemon::start(&data);
    assert!(daemon.run(&["volume", "export", "a", "-"]).stdout == content);
}

#[test]
fn import_replaces_a_volume_only_with_consent_and_only_whole() {
    let dir = temp();
    let daemon = Daemon::start(&dir.path().join("data"));
    let raw = dir.path().join("in.raw");
    let content = image(&raw);
    let small = dir.path().join("small.raw");
    fs::write(&small, [7; 8192]).unwrap();
    daemon.ok(&["volume", "import", "a", text(&small)]);
    one_error(&daemon.run(&["volume", "import", "a", text(&raw)]), 2);
    cut_import(&daemon, "a", true);
    assert_eq!(
        daemon.run(&["volume", "export", "a", "-"]).stdout,
        [7; 8192]
    );
    // Until the daemon has noticed that the other one hung up, the volume is being replaced.
    eventually(|| {
        let again = daemon.run(&["volume", "import", "a", text(&raw), "--yes"]);
        again.status.success()
    });
    assert!(daemon.run(&["volume", "export", "a", "-"]).stdout == content);
    assert_eq!(
        daemon.json(&["volume", "list"]).as_array().unwrap().len(),
        1
    );
}

/// Sends the beginning of an import and hangs up.
fn cut_import(daemon: &Daemon, name: &str, replace: bool) {
    let mut stream = UnixStream::connect(daemon.data().join("penstock.sock")).unwrap();
    let mut record = Vec::new();
    record.extend_from_slice(&0_u64.to_le_bytes());
    record.extend_from_slice(&4096_u32.to_le_bytes());
    record.extend_from_slice(&1_u32.to_le_bytes());
    record.extend_from_slice(&[9; 4096]);
    write!(
        stream,
        "PUT /v1/volumes/{name}/data?size_bytes=1048576&replace={replace} HTTP/1.1\r\nhost: penstock\r\n\
         transfer-encoding: chunked\r\n\r\n{:x}\r\n",
        record.len()
    )
    .unwrap();
    stream.write_all(&record).unwrap();
    stream.write_all(b"\r\n").unwrap();
}

#[test]
fn a_cut_import_leaves_no_half_volume() {
    let dir = temp();
    let data = dir.path().join("data");
    let daemon = Daemon::start(&data);
    cut_import(&daemon, "half", false);
    let told = daemon.refused(&["volume", "show", "half"]);
    assert!(told.contains("half"), "{told}");
    assert_eq!(daemon.json(&["volume", "list"]), serde_json::json!([]));
    // Nor does a daemon that dies in the middle of one.
    let mut stream = UnixStream::connect(data.join("penstock.sock")).unwrap();
    let head = "PUT /v1/volumes/half/data?size_bytes=1048576 HTTP/1.1\r\nhost: penstock\r\n\
                transfer-encoding: chunked\r\n\r\n10\r\n";
    stream.write_all(head.as_bytes()).unwrap();
    daemon.kill();
    let daemon = Daemon::start(&data);
    assert_eq!(daemon.json(&["volume", "list"]), serde_json::json!([]));
    daemon.ok(&["volume", "create", "half", "64M"]);
}

#[test]
fn an_image_that_does_not_fit_is_refused_and_leaves_nothing() {
    let dir = temp();
    let daemon = Daemon::start_with(
        &dir.path().join("data"),
        &["--device", &device(dir.path(), "128M")],
    );
    let raw = dir.path().join("big.raw");
    let mut file = File::create(&raw).unwrap();
    let block: Vec<u8> = (0..1 << 20).map(|i: u32| (i / 7) as u8 | 1).collect();
    for _ in 0..160 {
        file.write_all(&block).unwrap();
    }
    let told = daemon.refused(&["volume", "import", "a", text(&raw)]);
    assert!(told.contains("space"), "{told}");
    assert_eq!(daemon.json(&["volume", "list"]), serde_json::json!([]));
    // What it had taken is given back.
    fs::write(&raw, &block).unwrap();
    daemon.ok(&["volume", "import", "a", text(&raw)]);
    assert!(daemon.run(&["volume", "export", "a", "-"]).stdout == block);
}

fn device(dir: &Path, size: &str) -> String {
    format!("{}:{size}", text(&dir.join("small.img")))
}

#[test]
fn images_that_cannot_be_imported_are_named() {
    let dir = temp();
    let daemon = Daemon::start(&dir.path().join("data"));
    let path = |name: &str| dir.path().join(name);
    fs::write(path("empty"), b"").unwrap();
    fs::write(path("base"), [1; 65536]).unwrap();
    qemu_img(&["create", "-f", "vmdk", text(&path("a.vmdk")), "1M"]);
    qemu_img(&[
        "create",
        "-f",
        "qcow2",
        "-b",
        "base",
        "-F",
        "raw",
        text(&path("child.qcow2")),
    ]);
    for (name, told) in [
        ("missing", "no such file"),
        ("a.vmdk", "is a vmdk image"),
        ("child.qcow2", "needs another file"),
    ] {
        let error = daemon.refused(&["volume", "import", "a", text(&path(name))]);
        assert!(error.contains(told) && error.contains(name), "{error}");
    }
    one_error(
        &daemon.run(&["volume", "import", "a", text(&path("empty"))]),
        2,
    );
    qemu_img(&["create", "-f", "qcow2", text(&path("whole.qcow2")), "1M"]);
    let without = daemon
        .command(&["volume", "import", "a", text(&path("whole.qcow2"))])
        .env("PATH", "/nonexistent")
        .output()
        .unwrap();
    let error = one_error(&without, 1);
    assert!(error.contains("qemu-utils"), "{error}");
    assert_eq!(daemon.json(&["volume", "list"]), serde_json::json!([]));
    // A raw image needs no qemu-img.
    let raw = daemon
        .command(&["volume", "import", "a", text(&path("base"))])
        .env("PATH", "/nonexistent")
        .output()
        .unwrap();
    assert!(
        raw.status.success(),
        "{}",
        String::from_utf8_lossy(&raw.stderr)
    );
}

#[test]
fn an_export_is_for_its_owner_alone() {
    let dir = temp();
    let daemon = Daemon::start(&dir.path().join("data"));
    daemon.ok(&["volume", "create", "a", "1M"]);
    for format in ["raw", "qcow2"] {
        let out = dir.path().join(format);
        let export = ["volume", "export", "a", text(&out), "--format", format];
        daemon.ok(&export);
        let mode = || fs::metadata(&out).unwrap().mode() & 0o7777;
        assert_eq!(mode(), 0o600, "{format}");
        // One that is replaced is no more open than a new one.
        fs::set_permissions(&out, fs::Permissions::from_mode(0o644)).unwrap();
        daemon.ok(&[&export[..], &["--force"]].concat());
        assert_eq!(mode(), 0o600, "{format}");
    }
}

/// Imports an image while somebody does something to it, after it was checked and before it is converted.
///
/// It is done here, and not by the program that stands in for qemu-img: that one runs within the rules under
/// test, which would keep it from meddling.
fn import_while(daemon: &Daemon, dir: &Path, image: &Path, meddle: impl FnOnce()) -> Output {
    let (programs, done) = (dir.join("programs"), dir.join("done"));
    fs::create_dir(&programs).unwrap();
    let program = programs.join("qemu-img");
    let waits = format!("while [ ! -e {} ]; do sleep 0.02; done", text(&done));
    let script =
        format!("#!/bin/sh\n[ \"$1\" = convert ] && {waits}\nexec /usr/bin/qemu-img \"$@\"\n");
    fs::write(&program, script).unwrap();
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
    let path = format!("{}:{}", text(&programs), std::env::var("PATH").unwrap());
    let import = daemon
        .command(&["volume", "import", "a", text(image)])
        .env("PATH", path)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    eventually(|| runs(&[text(&program), "convert"]));
    meddle();
    fs::write(&done, b"").unwrap();
    import.wait_with_output().unwrap()
}

/// Whether there is a process of a script that was started with these words.
fn runs(words: &[&str]) -> bool {
    let processes = fs::read_dir("/proc").unwrap().flatten();
    processes
        .filter_map(|process| fs::read(process.path().join("cmdline")).ok())
        .any(|line| {
            let line = String::from_utf8_lossy(&line).into_owned();
            // Behind its interpreter.
            let said: Vec<&str> = line.split('\0').skip(1).take(words.len()).collect();
            said == words
        })
}

#[test]
fn an_image_that_is_swapped_under_the_import_is_not_read() {
    let dir = temp();
    let daemon = Daemon::start(&dir.path().join("data"));
    let path = |name: &str| dir.path().join(name);
    let content = image(&path("in.raw"));
    fs::write(path("secret.raw"), vec![9; IMAGE_BYTES as usize]).unwrap();
    for name in ["in", "secret"] {
        let (raw, qcow2) = (path(&format!("{name}.raw")), path(&format!("{name}.qcow2")));
        qemu_img(&[
            "convert",
            "-f",
            "raw",
            "-O",
            "qcow2",
            text(&raw),
            text(&qcow2),
        ]);
    }
    let (image, secret) = (path("in.qcow2"), path("secret.qcow2"));
    let imported = import_while(&daemon, dir.path(), &image, || {
        fs::rename(&secret, &image).unwrap();
    });
    assert!(imported.status.success(), "{imported:?}");
    assert!(daemon.run(&["volume", "export", "a", "-"]).stdout == content);
}

#[test]
fn a_backing_file_named_under_the_import_is_not_read() {
    let dir = temp();
    let daemon = Daemon::start(&dir.path().join("data"));
    let path = |name: &str| dir.path().join(name);
    fs::write(path("secret"), [9; 1 << 20]).unwrap();
    let image = path("in.qcow2");
    qemu_img(&["create", "-f", "qcow2", text(&image), "1M"]);
    let imported = import_while(&daemon, dir.path(), &image, || {
        let rebase = ["rebase", "-u", "-f", "qcow2", "-F", "raw", "-b"];
        qemu_img(&[&rebase[..], &[text(&path("secret")), text(&image)]].concat());
    });
    assert!(imported.status.success(), "{imported:?}");
    let content = daemon.run(&["volume", "export", "a", "-"]).stdout;
    assert!(content.iter().all(|byte| *byte == 0), "the secret was read");
}

#[test]
fn an_image_whose_data_lie_elsewhere_is_refused() {
    let dir = temp();
    let daemon = Daemon::start(&dir.path().join("data"));
    let (image, secret) = (dir.path().join("in.qcow2"), dir.path().join("secret"));
    let option = format!("data_file={},data_file_raw=on", text(&secret));
    qemu_img(&["create", "-f", "qcow2", "-o", &option, text(&image), "1M"]);
    for format in [&[][..], &["--format", "qcow2"]] {
        let args = [&["volume", "import", "a", text(&image)], format].concat();
        let told = daemon.refused(&args);
        let named = format!("its data file {}", text(&secret));
        assert!(told.contains(&named), "{told}");
    }
}

#[test]
fn the_format_is_detected_once_and_told() {
    let dir = temp();
    let daemon = Daemon::start(&dir.path().join("data"));
    // What a guest may write into its raw disk.
    let disk = dir.path().join("disk");
    qemu_img(&["create", "-f", "qcow2", text(&disk), "1M"]);
    let length = fs::metadata(&disk).unwrap().len().next_multiple_of(4096);
    for (format, word, size) in [
        (&[][..], "is qcow2, as detected", 1 << 20),
        (&["--format", "raw"], "is raw, as specified", length),
    ] {
        let args = [&["volume", "import", "a", text(&disk), "--yes"], format].concat();
        let imported = daemon.run(&args);
        let told = String::from_utf8(imported.stderr).unwrap();
        assert!(imported.status.success() && told.contains(word), "{told}");
        let shown = daemon.json(&["volume", "show", "a"]);
        assert_eq!(shown["size_bytes"], size);
    }
}

#[test]
fn an_image_that_takes_too_much_is_refused_by_the_limit() {
    let dir = temp();
    let daemon = Daemon::start(&dir.path().join("data"));
    let path = dir.path().join("bomb.qcow2");
    let create = ["create", "-f", "qcow2", "-o"];
    // Its tables of clusters take 8 GiB in memory, and it takes no space.
    let option = "cluster_size=4096,refcount_bits=64";
    qemu_img(&[&create[..], &[option, text(&path), "1G"]].concat());
    let file = File::options().write(true).open(&path).unwrap();
    file.set_len(4 << 40).unwrap();
    let told = daemon.refused(&["volume", "import", "a", text(&path)]);
    assert!(told.contains("more memory than its limit, 2G"), "{told}");
    assert!(told.contains(text(&path)), "{told}");

    // A disk that no volume can be.
    qemu_img(&[&create[..], &["cluster_size=2M", text(&path), "2P"]].concat());
    let told = one_error(&daemon.run(&["volume", "import", "a", text(&path)]), 2);
    assert!(told.contains("at most 1P"), "{told}");
    assert_eq!(daemon.json(&["volume", "list"]), serde_json::json!([]));
}
