//! How much of a volume is in use.

use std::fs;
use std::os::unix::net::UnixStream;

use crate::front::Front;
use crate::harness::{Daemon, eventually, temp, text};
use crate::metrics::ask;

const MIB: u64 = 1 << 20;
const SECTORS_PER_MIB: u32 = 2048;

fn used(daemon: &Daemon, name: &str) -> u64 {
    let listed = daemon.json(&["volume", "list"]);
    let mut listed = listed.as_array().unwrap().iter();
    let volume = listed.find(|volume| volume["name"] == name).unwrap();
    volume["used_bytes"].as_u64().unwrap()
}

#[test]
fn used_bytes_follow_writes_discards_and_kills() {
    let dir = temp();
    let data = dir.path().join("data");
    let daemon = Daemon::start(&data);
    daemon.ok(&["volume", "create", "empty", "64M"]);
    assert_eq!(used(&daemon, "empty"), 0);
    let image = dir.path().join("image");
    fs::write(&image, vec![0x5a; 10 * MIB as usize]).unwrap();
    daemon.ok(&["volume", "import", "a", text(&image)]);
    eventually(|| used(&daemon, "a") == 10 * MIB);
    let shown = daemon.json(&["volume", "show", "a"]);
    assert_eq!(shown["used_bytes"], 10 * MIB);
    let told = daemon.ok(&["volume", "show", "a"]);
    assert!(told.contains("used        10M (10485760 bytes)"), "{told}");
    let listed = daemon.ok(&["volume", "list"]);
    let columns = |line: &str| {
        line.split_whitespace()
            .map(str::to_owned)
            .collect::<Vec<_>>()
    };
    let lines: Vec<_> = listed.lines().map(columns).collect();
    assert_eq!(lines[0][..4], ["NAME", "SIZE", "USED", "POOL"]);
    assert_eq!(lines[1][..4], ["a", "10M", "10M", "default"]);
    assert_eq!(lines[2][..4], ["empty", "64M", "0", "default"]);

    let socket = dir.path().join("a.sock");
    daemon.ok(&["attach", "volume", "a", "--socket", text(&socket)]);
    let mut guest = Front::start(&socket, 1);
    guest.discard(3 * u64::from(SECTORS_PER_MIB), 4 * SECTORS_PER_MIB);
    // A daemon to which counting seems long does not repeat it at once.
    eventually(|| used(&daemon, "a") == 6 * MIB);
    guest.write(5 * u64::from(SECTORS_PER_MIB), 9);
    eventually(|| used(&daemon, "a") == 6 * MIB + 4096);
    drop(guest);

    daemon.kill();
    let daemon = Daemon::start(&data);
    assert_eq!(used(&daemon, "a"), 6 * MIB + 4096);
    let (_, page) = ask(
        UnixStream::connect(data.join("penstock.sock")).unwrap(),
        "GET /metrics",
    );
    let line = format!(
        "penstock_volume_used_bytes{{volume=\"a\",pool=\"default\"}} {}",
        6 * MIB + 4096
    );
    assert!(page.lines().any(|l| l == line), "{page}");
    daemon.ok(&["detach", "a", "--yes"]);
    daemon.ok(&["volume", "delete", "a", "--yes"]);
    daemon.ok(&["volume", "create", "a", "10M"]);
    eventually(|| used(&daemon, "a") == 0);
}
