//! The log of events: what happened, and who did it.

use std::io::{BufRead, BufReader};
use std::process::Stdio;

use serde_json::{Value, json};

use crate::harness::{Daemon, eventually, one_error, temp, text};

/// Whether there is an event of this kind.
fn is_told(daemon: &Daemon, kind: &str) -> bool {
    let events = daemon.ok(&["events", "--json"]);
    events
        .lines()
        .any(|line| line.contains(&format!("\"{kind}\"")))
}

#[test]
fn what_happened_is_listed_and_followed() {
    let dir = temp();
    let daemon = Daemon::start(dir.path());
    let lines = |args: &[&str]| -> Vec<Value> {
        let listed = daemon.ok(&[args, &["--json"]].concat());
        listed
            .lines()
            .map(|line| serde_json::from_str(line).unwrap())
            .collect()
    };
    let all = lines(&["events"]);
    let kinds: Vec<&str> = all
        .iter()
        .map(|event| event["kind"].as_str().unwrap())
        .collect();
    assert!(
        kinds.contains(&"node_joined") && kinds.contains(&"device_added"),
        "{kinds:?}"
    );
    let numbers: Vec<u64> = all
        .iter()
        .map(|event| event["number"].as_u64().unwrap())
        .collect();
    assert!(
        numbers.windows(2).all(|pair| pair[0] + 1 == pair[1]),
        "{numbers:?}"
    );
    let last = numbers.last().unwrap().to_string();
    assert_eq!(lines(&["events", "--limit", "1"]), all[all.len() - 1..]);
    assert_eq!(lines(&["events", "--after", "0", "--limit", "1"]), all[..1]);
    assert_eq!(lines(&["events", "--after", &last]), [] as [Value; 0]);
    one_error(&daemon.run(&["events", "--limit", "0"]), 2);
    let table = daemon.ok(&["events"]);
    assert!(
        table.starts_with("NUMBER  TIME") && table.contains(" joined"),
        "{table}"
    );

    let mut follower = daemon
        .command(&["events", "--after", &last, "--follow", "--json"])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let name = daemon.json(&["node", "list"])[0]["name"].clone();
    let name = name.as_str().unwrap();
    daemon.ok(&["node", "drain", name, "--yes"]);
    daemon.ok(&["node", "drain", name, "--cancel"]);
    let mut told = BufReader::new(follower.stdout.take().unwrap()).lines();
    for kind in ["node_draining", "node_active"] {
        let event: Value = serde_json::from_str(&told.next().unwrap().unwrap()).unwrap();
        assert_eq!((&event["kind"], &event["node"]), (&json!(kind), &json!(1)));
        assert_eq!(event["subject"], json!(format!("node {name}")));
        assert!(event["at"].as_str().unwrap().ends_with('Z'));
    }
    follower.kill().unwrap();
    follower.wait().unwrap();
}

#[test]
fn changes_are_told_with_who_made_them() {
    let dir = temp();
    let daemon = Daemon::start(dir.path());
    let socket = dir.path().join("web.sock");
    let socket = socket.to_str().unwrap();
    daemon.ok(&["volume", "create", "web", "64M"]);
    daemon.ok(&["volume", "resize", "web", "128M"]);
    daemon.ok(&["attach", "volume", "web", "--socket", socket]);
    daemon.ok(&["detach", socket]);
    daemon.ok(&["volume", "rename", "web", "root"]);
    daemon.ok(&["fs", "create", "home"]);
    daemon.ok(&["volume", "delete", "root", "--yes"]);
    let told = daemon.ok(&["events", "--json", "--since", "1h"]);
    let told: Vec<Value> = told
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    let changes = told.iter().filter(|event| !event["by"]["uid"].is_null());
    let changes: Vec<&Value> = changes.collect();
    let kinds: Vec<&str> = changes
        .iter()
        .map(|event| event["kind"].as_str().unwrap())
        .collect();
    let expected = [
        "volume_created",
        "volume_resized",
        "volume_attached",
        "volume_detached",
        "volume_renamed",
        "filesystem_created",
        "volume_deleted",
    ];
    assert_eq!(kinds, expected, "{told:?}");
    let name = daemon.json(&["node", "list"])[0]["name"].clone();
    let uid = rustix::process::getuid().as_raw();
    for event in &changes {
        assert_eq!(event["by"]["uid"], json!(uid));
        assert_eq!(event["by"]["node_name"], name);
    }
    assert_eq!(changes[0]["volume"], json!("web"));
    assert_eq!(changes[4]["subject"], json!("volume root"));
    assert_eq!(changes[5]["filesystem"], json!("home"));
    let author = match uid {
        0 => format!("root@{}", name.as_str().unwrap()),
        uid => format!("{uid}@{}", name.as_str().unwrap()),
    };
    let table = daemon.ok(&["events"]);
    let deleted = "volume root was deleted with all its data";
    let line = table.lines().find(|line| line.contains(deleted));
    assert!(line.is_some_and(|line| line.contains(&author)), "{table}");
    // Nothing happened after now.
    let none = daemon.ok(&["events", "--since", "2999-01-01T00:00:00Z", "--json"]);
    assert_eq!(none, "");
    let told = one_error(&daemon.run(&["events", "--since", "yesterday"]), 2);
    assert!(told.contains("like 2h"), "{told}");
    let told = daemon.run(&["events", "--since", "yesterday", "--json"]);
    assert_eq!(told.status.code(), Some(2));
    let told: Value = serde_json::from_slice(&told.stderr).unwrap();
    assert!(
        told["error"].is_string() && told["hint"].is_string(),
        "{told}"
    );

    // Who names a time is told all since, however much that is.
    daemon.ok(&["volume", "create", "a", "1M"]);
    for pair in 0..60 {
        let (from, to) = match pair % 2 {
            0 => ("a", "b"),
            _ => ("b", "a"),
        };
        daemon.ok(&["volume", "rename", from, to]);
        daemon.ok(&["volume", "resize", to, &format!("{}M", pair + 2)]);
    }
    let count = |args: &[&str]| daemon.ok(args).lines().count();
    assert_eq!(count(&["events", "--json"]), 100);
    assert!(count(&["events", "--json", "--since", "1h"]) > 120);
    assert_eq!(
        count(&["events", "--json", "--since", "1h", "--limit", "7"]),
        7
    );
}

#[test]
fn pools_tell_what_is_promised_and_what_there_is() {
    let dir = temp();
    let daemon = Daemon::start(dir.path());
    daemon.ok(&["volume", "create", "thin", "1T"]);
    let pool = &daemon.json(&["pool", "list"])[0];
    let bytes = |key: &str| pool[key].as_u64().unwrap();
    assert_eq!(bytes("provisioned_bytes"), 1 << 40);
    assert_eq!(bytes("usable_bytes"), bytes("capacity_bytes"));
    let health = daemon.json(&["health"]);
    assert_eq!(health["state"], json!("ok"), "{health}");
    let notices = health["notices"].to_string();
    assert!(notices.contains("its volumes may grow to 1T"), "{notices}");
    let table = daemon.ok(&["health"]);
    assert!(
        table.starts_with("ok\n") && table.contains("\nnotice  "),
        "{table}"
    );
    let table = daemon.ok(&["pool", "list"]);
    for column in ["PROVISIONED", "USABLE", "RAW USED"] {
        assert!(table.contains(column), "{table}");
    }
    let told = |kind: &str| is_told(&daemon, kind);
    eventually(|| told("pool_over_committed"));
    assert!(!told("pool_covered"));
    daemon.ok(&["volume", "delete", "thin", "--yes"]);
    assert_eq!(daemon.ok(&["health"]), "ok\n");
    eventually(|| told("pool_covered"));
}

#[test]
fn a_pool_that_fills_up_is_a_problem_in_time_and_an_event() {
    let dir = temp();
    let (data, config) = (dir.path().join("data"), dir.path().join("penstock.toml"));
    std::fs::write(
        &config,
        "pool_near_full_percent = 2\npool_critical_percent = 4\n",
    )
    .unwrap();
    let daemon = Daemon::start_with(&data, &["--config", text(&config)]);
    assert_eq!(daemon.ok(&["health"]), "ok\n");
    let image = dir.path().join("image");
    let capacity = daemon.json(&["pool", "show", "default"])["capacity_bytes"].clone();
    let twelfth = usize::try_from(capacity.as_u64().unwrap() / 12).unwrap();
    std::fs::write(&image, vec![0x5a; twelfth]).unwrap();
    daemon.ok(&["volume", "import", "big", text(&image)]);
    eventually(|| {
        let health = daemon.json_of(&["health"]);
        let problems = health["problems"].as_array().unwrap();
        problems.iter().any(|one| {
            let what = one["what"].as_str().unwrap();
            what.contains("% full: ") && one["is_warning"] == true
        })
    });
    let told = |kind: &str| is_told(&daemon, kind);
    eventually(|| told("pool_near_full"));
    assert!(!told("pool_has_room"));
    daemon.ok(&["volume", "delete", "big", "--yes"]);
    eventually(|| daemon.run(&["health"]).stdout == b"ok\n");
    eventually(|| told("pool_has_room"));
}
