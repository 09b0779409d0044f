//! Copies beside other users of a volume: each is whole and of one point in time, or says that it is not.

use std::fs;
use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::front::Front;
use crate::harness::{Daemon, eventually, temp, text};

/// More than lies in the pipes between the daemon and a client that does not read.
const VOLUME_BYTES: usize = 32 << 20;

/// A volume `a` full of `byte`.
fn filled(daemon: &Daemon, dir: &Path, byte: u8) {
    let raw = dir.join("full.raw");
    fs::write(&raw, vec![byte; VOLUME_BYTES]).unwrap();
    daemon.ok(&["volume", "import", "a", text(&raw)]);
}

/// An export that stands still until its stream is read.
fn export(daemon: &Daemon) -> UnixStream {
    let mut stream = UnixStream::connect(daemon.data().join("penstock.sock")).unwrap();
    let request = "GET /v1/volumes/a/data HTTP/1.1\r\nhost: penstock\r\nconnection: close\r\n\r\n";
    stream.write_all(request.as_bytes()).unwrap();
    let mut begin = [0; 64];
    stream.read_exact(&mut begin).unwrap();
    assert!(begin.starts_with(b"HTTP/1.1 200"));
    stream
}

/// The rest of an export.
fn drained(mut stream: UnixStream) -> Vec<u8> {
    let mut rest = Vec::new();
    stream.read_to_end(&mut rest).unwrap();
    rest
}

/// Head of an extent record.
fn record(at: u64, len: u32, kind: u32) -> Vec<u8> {
    [
        &at.to_le_bytes()[..],
        &len.to_le_bytes(),
        &kind.to_le_bytes(),
    ]
    .concat()
}

fn chunk(stream: &mut UnixStream, bytes: &[u8]) {
    write!(stream, "{:x}\r\n", bytes.len()).unwrap();
    stream.write_all(bytes).unwrap();
    stream.write_all(b"\r\n").unwrap();
}

#[test]
fn an_import_does_not_replace_a_volume_that_is_being_exported() {
    let dir = temp();
    let daemon = Daemon::start(&dir.path().join("data"));
    filled(&daemon, dir.path(), 7);
    let small = dir.path().join("small.raw");
    fs::write(&small, [9; 8192]).unwrap();
    let running = export(&daemon);
    let told = daemon.refused(&["volume", "import", "a", text(&small), "--yes"]);
    assert!(told.contains("being copied"), "{told}");
    drop(running);
    // The export notices at its next record that nobody reads it.
    eventually(|| {
        daemon
            .run(&["volume", "import", "a", text(&small), "--yes"])
            .status
            .success()
    });
}

#[test]
fn import_ending_during_an_export_is_refused_and_harms_nothing() {
    let dir = temp();
    let daemon = Daemon::start(&dir.path().join("data"));
    filled(&daemon, dir.path(), 7);
    let mut import = UnixStream::connect(daemon.data().join("penstock.sock")).unwrap();
    let head = "PUT /v1/volumes/a/data?size_bytes=8192&replace=true HTTP/1.1\r\nhost: penstock\r\n\
                connection: close\r\nexpect: 100-continue\r\ntransfer-encoding: chunked\r\n\r\n";
    import.write_all(head.as_bytes()).unwrap();
    // Said once the import has begun.
    let mut go_on = [0; 25];
    import.read_exact(&mut go_on).unwrap();
    assert_eq!(&go_on, b"HTTP/1.1 100 Continue\r\n\r\n");
    chunk(&mut import, &[record(0, 4096, 1), vec![9; 4096]].concat());
    // What is to be replaced is left alone until then.
    let socket = dir.path().join("a.sock");
    for args in [
        &["volume", "delete", "a", "--yes"][..],
        &["attach", "volume", "a", "--socket", text(&socket)],
        &["volume", "resize", "a", "64M"],
        &[
            "volume",
            "import",
            "a",
            text(&dir.path().join("full.raw")),
            "--yes",
        ],
    ] {
        let told = daemon.refused(args);
        assert!(told.contains("replaced by an import"), "{args:?}: {told}");
    }
    let running = export(&daemon);
    chunk(&mut import, &record(8192, 0, 2));
    import.write_all(b"0\r\n\r\n").unwrap();
    let answer = String::from_utf8(drained(import)).unwrap();
    assert!(
        answer.starts_with("HTTP/1.1 409") && answer.contains("being copied"),
        "{answer}"
    );
    let exported = drained(running);
    let sevens = exported.iter().filter(|byte| **byte == 7).count();
    assert!(
        sevens >= VOLUME_BYTES - 64,
        "only {sevens} bytes of the volume"
    );
    let end = record(VOLUME_BYTES as u64, 0, 2);
    assert!(
        exported.windows(end.len()).any(|window| window == end),
        "no end record"
    );
    // The import is over.
    daemon.ok(&["volume", "delete", "a", "--yes"]);
}

/// Forwards one connection to a daemon. Before an import it makes the volume. True if no more is to come.
fn forward(listener: &UnixListener, daemon: &Daemon, has_ended: &AtomicBool) -> bool {
    let (mut client, _) = listener.accept().unwrap();
    let mut beginning = [0; 4];
    if client.read_exact(&mut beginning).is_err() {
        // The command looks whether somebody listens, first. At its end the test hangs up.
        return has_ended.load(Ordering::SeqCst);
    }
    let is_import = beginning == *b"PUT ";
    if is_import {
        daemon.ok(&["volume", "create", "a", "1M"]);
    }
    let mut server = UnixStream::connect(daemon.data().join("penstock.sock")).unwrap();
    server.write_all(&beginning).unwrap();
    let (mut from_client, mut to_server) =
        (client.try_clone().unwrap(), server.try_clone().unwrap());
    let asking = std::thread::spawn(move || {
        // Either side may hang up first.
        let _ = std::io::copy(&mut from_client, &mut to_server);
        let _ = to_server.shutdown(Shutdown::Write);
    });
    let _ = std::io::copy(&mut server, &mut client);
    let _ = client.shutdown(Shutdown::Both);
    asking.join().unwrap();
    is_import
}

#[test]
fn import_replaces_a_volume_created_meanwhile_only_if_allowed() {
    let dir = temp();
    let daemon = Daemon::start(&dir.path().join("data"));
    let sevens = dir.path().join("sevens.raw");
    fs::write(&sevens, [7; 8192]).unwrap();
    for (options, replaced) in [(&[][..], false), (&["--yes"], true)] {
        let proxy = dir.path().join("proxy.sock");
        let listener = UnixListener::bind(&proxy).unwrap();
        let args = [&["volume", "import", "a", text(&sevens)], options].concat();
        let has_ended = AtomicBool::new(false);
        let import = std::thread::scope(|scope| {
            scope.spawn(|| {
                // What asks and looks before, then the import itself.
                while !forward(&listener, &daemon, &has_ended) {}
            });
            let import = daemon.command(&args).args(["--api", text(&proxy)]).output();
            has_ended.store(true, Ordering::SeqCst);
            drop(UnixStream::connect(&proxy));
            import.unwrap()
        });
        fs::remove_file(&proxy).unwrap();
        if replaced {
            let told = String::from_utf8_lossy(&import.stderr);
            assert!(import.status.success(), "{told}");
        } else {
            let told = String::from_utf8_lossy(&import.stderr);
            assert_eq!(import.status.code(), Some(1));
            assert!(
                told.contains("'a' exists") && told.contains("--yes"),
                "{told}"
            );
        }
        daemon.ok(&["volume", "delete", "a", "--yes"]);
    }
}

#[test]
fn an_export_that_a_guest_writes_under_says_so_at_its_end() {
    let dir = temp();
    let daemon = Daemon::start(&dir.path().join("data"));
    filled(&daemon, dir.path(), 7);
    let socket = dir.path().join("a.sock");
    daemon.ok(&["attach", "volume", "a", "--socket", text(&socket)]);
    let running = export(&daemon);
    let mut guest = Front::start(&socket, 1);
    guest.write(0, 9);
    drop(guest);
    let exported = drained(running);
    let told = String::from_utf8_lossy(&exported[exported.len() - 512..]).into_owned();
    assert!(
        told.contains("wrote to volume 'a'") && told.contains("--live"),
        "{told}"
    );
    // A guest that only looks does no harm.
    eventually(|| daemon.json(&["attachments", "list"])[0]["state"] == "listening");
    let running = export(&daemon);
    let mut guest = Front::start(&socket, 1);
    assert_eq!(guest.read(0, 0), [9; 512]);
    let exported = drained(running);
    let end = record(VOLUME_BYTES as u64, 0, 2);
    assert!(
        exported.windows(end.len()).any(|window| window == end),
        "no end record"
    );
}

#[test]
fn an_import_that_is_refused_hears_why_while_it_still_sends() {
    let dir = temp();
    let daemon = Daemon::start(&dir.path().join("data"));
    daemon.ok(&["volume", "create", "a", "64M"]);
    let mut import = UnixStream::connect(daemon.data().join("penstock.sock")).unwrap();
    let head = "PUT /v1/volumes/a/data?size_bytes=67108864 HTTP/1.1\r\nhost: penstock\r\n\
                transfer-encoding: chunked\r\n\r\n";
    import.write_all(head.as_bytes()).unwrap();
    for at in (0..VOLUME_BYTES).step_by(1 << 20) {
        chunk(&mut import, &record(at as u64, 1 << 20, 1));
        chunk(&mut import, &[9; 1 << 20]);
    }
    let mut answer = [0; 12];
    import.read_exact(&mut answer).unwrap();
    assert_eq!(&answer, b"HTTP/1.1 409");
}
