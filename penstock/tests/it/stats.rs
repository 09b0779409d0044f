//! `penstock attachment stats`: what a guest did, and how long it took.

use std::fs;
use std::io::{BufRead, BufReader};
use std::process::Stdio;

use serde_json::Value;

use crate::front::Front;
use crate::harness::{Daemon, attached, eventually, one_error, temp, text};

fn requests(stats: &Value) -> [u64; 4] {
    ["reads", "writes", "flushes", "discards"].map(|kind| {
        let told = &stats[kind];
        let buckets = told["buckets"].as_array().unwrap();
        let counts = buckets.iter().map(|b| b["count"].as_u64().unwrap());
        let requests = told["requests"].as_u64().unwrap();
        assert_eq!(counts.sum::<u64>(), requests, "{stats}");
        requests
    })
}

#[test]
fn stats_tell_what_a_guest_did_and_how_long_it_took() {
    let (_dir, daemon, socket) = attached();
    let stats = || daemon.json(&["attachment", "stats", "a"]);

    let idle = stats();
    assert_eq!((requests(&idle), &idle["in_flight"]), ([0; 4], &0.into()));
    assert_eq!(
        (&idle["state"], &idle["queues"]),
        (&"listening".into(), &4.into())
    );
    assert_eq!(idle["reads"].get("p50_ns"), None);
    let told = daemon.ok(&["attachment", "stats", "a"]);
    assert!(told.contains("listening, 0 of 4 queues run"), "{told}");
    assert!(!told.contains("LATENCY"), "{told}");

    let mut guest = Front::start(&socket, 1);
    for sector in 0..10 {
        guest.write(sector, 7);
    }
    for sector in 0..5 {
        guest.read(0, sector);
    }
    // The guest may see its answer a moment before that is counted.
    eventually(|| requests(&stats()) == [5, 10, 0, 0]);
    let busy = stats();
    assert_eq!(busy["writes"]["bytes"], 10 * 512);
    assert_eq!(busy["state"], "connected");
    let writes = |key: &str| busy["writes"][key].as_u64().unwrap();
    let percentiles = ["p50_ns", "p95_ns", "p99_ns", "p999_ns"].map(writes);
    assert!(percentiles.is_sorted() && percentiles[0] > 0, "{busy}");
    assert!(writes("mean_ns") * 10 <= writes("sum_ns"), "{busy}");
    assert!(writes("sum_ns") / 1_000_000 <= busy["period_ms"].as_u64().unwrap());
    assert!(busy["period_ms"].as_u64() >= idle["period_ms"].as_u64());
    let told = daemon.ok(&["attachment", "stats", text(&socket)]);
    let row = told
        .lines()
        .find(|line| line.starts_with("writes"))
        .unwrap();
    assert!(row.contains("10") && row.contains("5K"), "{told}");
    assert!(told.contains("LATENCY"), "{told}");

    // What was counted stays when the guest goes.
    drop(guest);
    eventually(|| stats()["state"] == "listening");
    assert_eq!(requests(&stats()), [5, 10, 0, 0]);
}

#[test]
fn watched_stats_tell_each_interval() {
    let (_dir, daemon, socket) = attached();
    let mut guest = Front::start(&socket, 1);
    guest.write(0, 1);
    let watch = |options: &[&str]| {
        let args = [&["attachment", "stats", "a", "--watch"][..], options].concat();
        let mut command = daemon.command(&args);
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        (child, lines.map(Result::unwrap))
    };

    let (child, mut lines) = watch(&["1", "--json"]);
    let mut next = || serde_json::from_str::<Value>(&lines.next().unwrap()).unwrap();
    let first = next();
    assert_eq!(requests(&first), [0; 4], "what was before is not told");
    assert!(first["at"].is_string());
    let (mut written, mut told) = (0, 0);
    while told == 0 {
        guest.write(written % 8, 2);
        written += 1;
        told = requests(&next())[1];
    }
    assert!(told <= written, "{told} of {written}");
    // The attachment ends, and with it the watch.
    drop(guest);
    eventually(|| daemon.json(&["attachment", "list"])[0]["state"] == "listening");
    daemon.ok(&["detach", "a"]);
    let rest: Vec<String> = lines.collect();
    let ended = child.wait_with_output().unwrap();
    let said = String::from_utf8(ended.stderr).unwrap();
    assert_eq!(ended.status.code(), Some(1), "{said}");
    assert!(
        said.contains("nothing is attached as 'a'"),
        "{said} {rest:?}"
    );

    daemon.attach("a", &socket);
    let (mut child, mut lines) = watch(&[]);
    let heading = lines.next().unwrap();
    assert!(heading.starts_with("TIME") && heading.contains("W-P99"));
    let line = lines.next().unwrap();
    assert_eq!(
        line.split_whitespace().count(),
        heading.split_whitespace().count()
    );
    child.kill().unwrap();
    child.wait().unwrap();
}

#[test]
fn a_filesystem_has_stats_by_its_name_and_its_socket() {
    let dir = temp();
    let daemon = Daemon::start(&dir.path().join("data"));
    let (first, second) = (dir.path().join("a.sock"), dir.path().join("b.sock"));
    daemon.ok(&["fs", "create", "home"]);
    let told = daemon.refused(&["attachment", "stats", "home"]);
    assert!(told.contains("nothing is attached as 'home'"), "{told}");
    daemon.attach_fs("home", &first);
    for target in ["home", text(&first)] {
        let stats = daemon.json(&["attachment", "stats", target]);
        assert_eq!(stats["filesystem"], "home");
        assert_eq!(stats["socket"], text(&first));
        assert_eq!(
            (&stats["state"], &stats["in_flight"]),
            (&"listening".into(), &0.into())
        );
        assert_eq!(stats["requests"], serde_json::json!([]));
        for value in [
            "cache_hits",
            "data_hit_bytes",
            "buffered_bytes",
            "lost_bytes",
        ] {
            assert_eq!(stats["host"][value], 0, "{stats}");
        }
    }
    let told = daemon.ok(&["attachment", "stats", "home"]);
    assert!(told.starts_with("filesystem   home\n"), "{told}");
    let watch = ["attachment", "stats", "home", "--watch"];
    let mut watching = daemon.command(&watch);
    let mut child = watching.stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let mut next = || lines.next().unwrap().unwrap();
    let (heading, line) = (next(), next());
    assert!(
        heading.starts_with("TIME") && heading.contains("LOST"),
        "{heading}"
    );
    assert_eq!(line.len(), heading.len(), "{line}");
    child.kill().unwrap();
    child.wait().unwrap();
    daemon.attach_fs("home", &second);
    let told = daemon.refused(&["attachment", "stats", "home"]);
    assert!(
        told.contains(text(&first)) && told.contains(text(&second)),
        "{told}"
    );
}

#[test]
fn stats_of_what_is_not_served_name_the_fix() {
    let dir = temp();
    let data = dir.path().join("data");
    let daemon = Daemon::start(&data);
    let socket = dir.path().join("a.sock");
    daemon.ok(&["volume", "create", "a", "64M"]);
    for target in ["a", "nope", text(&socket)] {
        let told = daemon.refused(&["attachment", "stats", target]);
        assert!(
            told.contains(target) && told.contains("attachment list"),
            "{told}"
        );
        let told = daemon.refused(&["attachment", "stats", target, "--watch"]);
        assert!(told.contains(target), "{told}");
    }
    for seconds in ["0", "soon", "-1", "100000"] {
        let watch = format!("--watch={seconds}");
        let output = daemon.run(&["attachment", "stats", "a", &watch]);
        let told = one_error(&output, 2);
        assert!(told.contains("1 to 86400 seconds"), "{told}");
    }
    // Read-only, a volume may have several attachments.
    let other = dir.path().join("b.sock");
    for path in [&socket, &other] {
        let args = [
            "attach",
            "volume",
            "a",
            "--read-only",
            "--socket",
            text(path),
        ];
        daemon.ok(&args);
    }
    let told = daemon.refused(&["attachment", "stats", "a"]);
    assert!(
        told.contains("2 attachments") && told.contains("socket"),
        "{told}"
    );
    daemon.ok(&["attachment", "stats", text(&other)]);
    // A socket that could not be made again.
    daemon.kill();
    fs::remove_file(&socket).unwrap();
    fs::write(&socket, "precious").unwrap();
    let daemon = Daemon::start(&data);
    let told = daemon.refused(&["attachment", "stats", text(&socket)]);
    assert!(
        told.contains("not served") && told.contains("penstock health"),
        "{told}"
    );
    daemon.ok(&["attachment", "stats", text(&other)]);
}

#[test]
fn a_volume_tells_the_serial_that_its_guest_sees() {
    let (_dir, daemon, socket) = attached();
    let volume = daemon.json(&["volume", "show", "a"]);
    let (serial, id) = (&volume["serial"], volume["id"].as_str().unwrap());
    let serial = serial.as_str().unwrap();
    assert_eq!(serial.len(), 20);
    assert!(id.replace('-', "").starts_with(serial), "{volume}");
    assert_eq!(Front::start(&socket, 1).serial(), serial);
    let told = daemon.ok(&["volume", "show", "a"]);
    assert!(
        told.contains(&format!("/dev/disk/by-id/virtio-{serial}")),
        "{told}"
    );
}
