//! The daemon's life: start, stop, kill, start again; what it served before is served again.

use std::fs;
use std::io::Read;
use std::os::unix::fs::PermissionsExt;
use std::process::Stdio;
use std::time::Duration;

use serde_json::json;

use crate::harness::{DEVICE_SIZE, Daemon, greet, greet_once_served, penstock, run, temp, text};

#[test]
fn a_new_node_is_healthy_and_empty() {
    let dir = temp();
    let daemon = Daemon::start(dir.path());
    assert_eq!(daemon.ok(&["health"]), "ok\n");
    let status = daemon.json(&["status"]);
    assert_eq!(status["pid"], daemon.pid());
    assert_eq!(status["store"], "file");
    assert_eq!(status["health"]["state"], "ok");
    assert!(status["capacity_bytes"].as_u64().unwrap() > 512 << 20);
    for listing in [&["volume", "list"][..], &["attachments", "list"]] {
        assert_eq!(daemon.json(listing), json!([]));
    }
    let devices = daemon.json(&["device", "list"]);
    assert_eq!(devices[0]["path"], text(&dir.path().join("devices/0.img")));
    assert_eq!(devices[0]["state"], "ok");
    let sum =
        devices[0]["used_bytes"].as_u64().unwrap() + devices[0]["free_bytes"].as_u64().unwrap();
    assert_eq!(devices[0]["capacity_bytes"], sum);
    assert!(devices[0]["memory_bytes"].as_u64().unwrap() > 0);
    let pools = daemon.json(&["pool", "list"]);
    assert_eq!(pools[0]["replicas"], 1);
    for listing in [
        &["status"][..],
        &["volume", "list"],
        &["device", "list"],
        &["pool", "list"],
    ] {
        assert!(!daemon.ok(listing).is_empty());
    }
    assert!(daemon.terminate().success());
}

#[test]
fn volumes_are_created_listed_resized_and_deleted() {
    let dir = temp();
    let daemon = Daemon::start(dir.path());
    let made = daemon.json(&["volume", "create", "disk", "1G"]);
    assert_eq!(
        (&made["name"], &made["size_bytes"]),
        (&json!("disk"), &json!(1 << 30))
    );
    let table = daemon.ok(&["volume", "list"]);
    assert_eq!(
        table.lines().next().unwrap().split_whitespace().next(),
        Some("NAME")
    );
    assert!(table.contains("disk") && table.contains("1G"), "{table}");
    assert_eq!(
        daemon.json(&["volume", "resize", "disk", "+1G"])["size_bytes"],
        2_u64 << 30
    );
    assert_eq!(
        daemon.json(&["volume", "resize", "disk", "512M", "--yes"])["size_bytes"],
        512 << 20
    );
    assert_eq!(daemon.json(&["volume", "show", "disk"])["id"], made["id"]);
    daemon.ok(&["volume", "delete", "disk", "--yes"]);
    assert_eq!(daemon.json(&["volume", "list"]), json!([]));
    // The name is free again.
    daemon.ok(&["volume", "create", "disk", "64M"]);
}

#[test]
fn attachments_come_back_after_a_clean_stop_and_after_a_kill() {
    let dir = temp();
    let sockets = [dir.path().join("a.sock"), dir.path().join("b.sock")];
    let daemon = Daemon::start(dir.path());
    daemon.ok(&["volume", "create", "a", "64M"]);
    daemon.ok(&["volume", "create", "b", "64M"]);
    daemon.ok(&[
        "attach",
        "volume",
        "a",
        "--socket",
        text(&sockets[0]),
        "--queues",
        "2",
    ]);
    daemon.ok(&[
        "attach",
        "volume",
        "b",
        "--socket",
        text(&sockets[1]),
        "--read-only",
    ]);
    let before = daemon.json(&["attachments", "list"]);
    let greeted: Vec<u64> = sockets.iter().map(|s| greet(s).1).collect();
    assert!(daemon.terminate().success());
    assert!(
        sockets.iter().all(|s| !s.exists()),
        "a stopped daemon leaves no sockets"
    );

    let check = |daemon: &Daemon| {
        let after = daemon.json(&["attachments", "list"]);
        for (then, now) in before
            .as_array()
            .unwrap()
            .iter()
            .zip(after.as_array().unwrap())
        {
            for key in ["volume", "socket", "queues", "read_only"] {
                assert_eq!(then[key], now[key]);
            }
        }
        let again: Vec<u64> = sockets.iter().map(|s| greet(s).1).collect();
        assert_eq!(again, greeted);
    };
    let daemon = Daemon::start(dir.path());
    check(&daemon);
    daemon.kill();
    assert!(sockets[0].exists(), "a killed daemon cannot clean up");
    let daemon = Daemon::start(dir.path());
    check(&daemon);
    daemon.ok(&["detach", text(&sockets[0])]);
    daemon.kill();
    let daemon = Daemon::start(dir.path());
    let left = daemon.json(&["attachments", "list"]);
    assert_eq!(
        left.as_array().unwrap().len(),
        1,
        "a detached one stays away: {left}"
    );
}

#[test]
fn unrestorable_attachment_is_reported_and_blocks_no_other() {
    let dir = temp();
    let gone = dir.path().join("gone");
    fs::create_dir(&gone).unwrap();
    let (bad, good) = (gone.join("a.sock"), dir.path().join("b.sock"));
    let daemon = Daemon::start(dir.path());
    for (volume, socket) in [("a", &bad), ("b", &good)] {
        daemon.ok(&["volume", "create", volume, "64M"]);
        daemon.ok(&["attach", "volume", volume, "--socket", text(socket)]);
    }
    assert!(daemon.terminate().success());
    fs::remove_dir_all(&gone).unwrap();
    let daemon = Daemon::start(dir.path());
    assert_ne!(greet(&good).1, 0);
    let health = daemon.run(&["health"]);
    assert_eq!(health.status.code(), Some(1));
    let told = String::from_utf8(health.stdout).unwrap();
    assert!(
        told.starts_with("degraded\n") && told.contains("\nproblem  ") && told.contains(text(&bad)),
        "{told}"
    );
    daemon.ok(&["detach", "a"]);
    assert_eq!(daemon.ok(&["health"]), "ok\n");
}

#[test]
fn a_volume_is_resized_while_attached() {
    let dir = temp();
    let socket = dir.path().join("a.sock");
    let daemon = Daemon::start(dir.path());
    daemon.ok(&["volume", "create", "a", "64M"]);
    daemon.ok(&["attach", "volume", "a", "--socket", text(&socket)]);
    let (guest, features) = greet(&socket);
    daemon.ok(&["volume", "resize", "a", "128M"]);
    assert_eq!(
        daemon.json(&["volume", "show", "a"])["size_bytes"],
        128 << 20
    );
    drop(guest);
    assert_eq!(greet(&socket).1, features);
}

#[test]
fn several_connections_are_served_in_turn() {
    let dir = temp();
    let socket = dir.path().join("a.sock");
    let daemon = Daemon::start(dir.path());
    daemon.ok(&["volume", "create", "a", "64M"]);
    daemon.ok(&["attach", "volume", "a", "--socket", text(&socket)]);
    for _ in 0..10 {
        assert_ne!(greet(&socket).1, 0);
    }
}

#[test]
fn attachment_sockets_have_the_configured_mode() {
    let dir = temp();
    let config = dir.path().join("penstock.toml");
    fs::write(&config, "socket_mode = \"0660\"\n").unwrap();
    let daemon = Daemon::start_with(dir.path(), &["--config", text(&config)]);
    let socket = dir.path().join("a.sock");
    daemon.ok(&["volume", "create", "a", "64M"]);
    daemon.ok(&["attach", "volume", "a", "--socket", text(&socket)]);
    assert_eq!(
        fs::metadata(&socket).unwrap().permissions().mode() & 0o777,
        0o660
    );
}

#[test]
fn libvirt_gets_the_disk_element_of_an_attached_volume() {
    let dir = temp();
    let daemon = Daemon::start(dir.path());
    let socket = dir.path().join("a.sock");
    daemon.ok(&["volume", "create", "a", "64M"]);
    let told = daemon.refused(&["libvirt", "disk-xml", "a"]);
    assert!(told.contains("penstock attach volume a --socket"), "{told}");
    daemon.ok(&["attach", "volume", "a", "--socket", text(&socket)]);
    let xml = daemon.ok(&["libvirt", "disk-xml", "a"]);
    assert!(
        xml.contains("<disk type=\"vhostuser\" device=\"disk\">"),
        "{xml}"
    );
    assert!(
        xml.contains(&format!("path=\"{}\"", text(&socket))),
        "{xml}"
    );
}

#[test]
fn back_end_program_serves_one_volume_by_path_or_descriptor() {
    let dir = temp();
    let data = dir.path().join("data");
    let daemon = Daemon::start(&data);
    daemon.ok(&["volume", "create", "a", "64M"]);
    let busy = run(&[
        "vhost-user-blk",
        "--volume",
        "a",
        "--socket-path",
        "/dev/null/x",
        "--data",
        text(&data),
    ]);
    let told = crate::harness::one_error(&busy, 1);
    assert!(told.contains("penstock attach volume"), "{told}");
    assert!(daemon.terminate().success());

    let socket = dir.path().join("a.sock");
    let mut child = penstock()
        .args([
            "vhost-user-blk",
            "--volume",
            "a",
            "--threads",
            "1",
            "--data",
            text(&data),
        ])
        .args(["--socket-path", text(&socket)])
        .spawn()
        .unwrap();
    assert_ne!(greet_once_served(&socket).1, 0);
    // SAFETY: a plain system call on a child that has not been waited for.
    unsafe { libc::kill(child.id() as libc::pid_t, libc::SIGTERM) };
    assert!(child.wait().unwrap().success());
    assert!(!socket.exists());
}

#[test]
fn commands_give_a_stopped_daemon_up_and_work_again_when_it_goes_on() {
    let dir = temp();
    let daemon = Daemon::start(dir.path());
    daemon.signal(libc::SIGSTOP);
    for command in [
        &["health"][..],
        &["status"],
        &["volume", "create", "a", "64M"],
    ] {
        let told = daemon.refused(&[command, &["--timeout", "1s"]].concat());
        let process = format!("the daemon (process {})", daemon.pid());
        assert!(
            told.contains(&process) && told.contains("within 1 s"),
            "{told}"
        );
    }
    daemon.signal(libc::SIGCONT);
    // Health may tell for a moment of what stood still.
    crate::harness::eventually(|| daemon.run(&["health"]).status.success());
}

#[test]
fn an_export_ends_when_its_daemon_is_stopped() {
    let dir = temp();
    let daemon = Daemon::start(&dir.path().join("data"));
    let image = dir.path().join("image");
    fs::write(&image, vec![0x5a; 32 << 20]).unwrap();
    daemon.ok(&["volume", "import", "a", text(&image)]);
    let mut export = daemon
        .command(&["volume", "export", "a", "-", "--timeout", "1s"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // It has begun, and nobody reads more of it: most of the data are still to come.
    let mut out = export.stdout.take().unwrap();
    out.read_exact(&mut [0; 4096]).unwrap();
    daemon.signal(libc::SIGSTOP);
    std::io::copy(&mut out, &mut std::io::sink()).unwrap();
    let ended = export.wait_with_output().unwrap();
    daemon.signal(libc::SIGCONT);
    assert_eq!(ended.status.code(), Some(1), "{ended:?}");
    let told = String::from_utf8(ended.stderr).unwrap();
    assert!(told.contains("has not answered within 1 s"), "{told}");
}

#[test]
fn a_first_start_that_is_killed_at_any_moment_can_be_repeated() {
    for delay_ms in 0..30 {
        let dir = temp();
        let mut first = penstock()
            .args(["serve", "--preallocation", "off", "--device-size"])
            .args([DEVICE_SIZE, "--threads", "1", "--data"])
            .arg(dir.path())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        // From when it begins to make its metadata.
        let meta = dir.path().join("meta");
        while !meta.exists() {
            assert_eq!(first.try_wait().unwrap(), None, "it ended by itself");
            std::thread::sleep(Duration::from_millis(1));
        }
        std::thread::sleep(Duration::from_millis(2 * delay_ms));
        first.kill().unwrap();
        first.wait().unwrap();
        let daemon = Daemon::start(dir.path());
        daemon.ok(&["volume", "create", "a", "64M"]);
    }
}
