//! Verbs on the cluster: pools, nodes, devices, events. The cluster here has one node; of several the
//! machines below are tested.

use std::fs;

use serde_json::{Value, json};

use crate::harness::{Daemon, eventually, greet, is_written_to, one_error, temp, text};

fn names(listing: &Value, field: &str) -> Vec<String> {
    let items = listing.as_array().unwrap().iter();
    items
        .map(|item| item[field].as_str().unwrap().to_owned())
        .collect()
}

#[test]
fn pools_are_made_shown_used_and_deleted() {
    let dir = temp();
    let daemon = Daemon::start(dir.path());
    let made = daemon.json(&[
        "pool",
        "create",
        "fast",
        "--replicas",
        "1",
        "--class",
        "file",
    ]);
    assert_eq!(made["replicas"], 1);
    assert_eq!(made["min_in_sync"], 1);
    assert_eq!(made["failure_domain"], "node");
    assert_eq!(made["class"], "file");
    assert_eq!(
        names(&daemon.json(&["pool", "list"]), "name"),
        ["default", "fast"]
    );

    daemon.ok(&["volume", "create", "a", "64M", "--pool", "fast"]);
    let shown = daemon.json(&["pool", "show", "fast"]);
    assert_eq!(
        (&shown["volumes"], &shown["devices"]),
        (&json!(1), &json!(1))
    );
    let groups = &shown["groups"];
    assert_eq!(groups["total"], groups["in_sync"]);
    for count in ["degraded", "waiting", "syncing", "moving"] {
        assert_eq!(groups[count], 0, "{groups}");
    }
    let bytes = |field: &str| shown[field].as_u64().unwrap();
    assert_eq!(
        bytes("capacity_bytes"),
        bytes("used_bytes") + bytes("free_bytes")
    );
    assert!(bytes("free_bytes") > 512 << 20);
    let text = daemon.ok(&["pool", "show", "fast"]);
    for told in [
        "1 on different nodes",
        "class file",
        "in sync, 0 degraded",
        "volumes    1",
    ] {
        assert!(text.contains(told), "{text}");
    }

    let told = daemon.refused(&["pool", "delete", "fast", "--yes"]);
    assert!(told.contains("volume \"a\""), "{told}");
    one_error(&daemon.run(&["pool", "delete", "fast"]), 2);
    daemon.ok(&["volume", "delete", "a", "--yes"]);
    daemon.ok(&["pool", "delete", "fast", "--yes"]);
    assert_eq!(names(&daemon.json(&["pool", "list"]), "name"), ["default"]);
}

#[test]
fn a_pool_that_cannot_be_is_refused_with_the_reason() {
    let dir = temp();
    let daemon = Daemon::start(dir.path());
    for (args, code, told) in [
        (&["pool", "create", "p", "--replicas", "9"][..], 2, "1 to 7"),
        (&["pool", "create", "p", "--min-in-sync", "4"], 2, "1 to 3"),
        (&["pool", "create", "bad/name"], 2, "bad/name"),
        (
            &["pool", "create", "p", "--failure-domain", "device"],
            2,
            "choose the failure domain node",
        ),
        (
            &["pool", "create", "p", "--failure-domain", "continent"],
            2,
            "continent",
        ),
        (&["pool", "create", "default"], 1, "exists"),
        (&["pool", "delete", "default", "--yes"], 1, "default"),
        (&["pool", "show", "nope"], 1, "nope"),
        (&["pool", "delete", "nope", "--yes"], 1, "nope"),
    ] {
        let error = one_error(&daemon.run(args), code);
        assert!(error.contains(told), "{args:?}: {error}");
    }
    // Three copies have no room on one node: the pool is made, and says so; a volume in it is refused.
    let output = daemon.run(&["pool", "create", "safe"]);
    assert!(output.status.success());
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(
        said.contains("cannot have 3 replicas on different nodes yet"),
        "{said}"
    );
    let told = daemon.refused(&["volume", "create", "a", "64M", "--pool", "safe"]);
    assert!(told.contains("needs 2 on different nodes"), "{told}");
    let health = daemon.run(&["health"]);
    let said = String::from_utf8(health.stdout).unwrap();
    assert!(said.contains("pool safe: no volume can be made"), "{said}");
    daemon.ok(&["pool", "delete", "safe", "--yes"]);
    assert_eq!(daemon.ok(&["health"]), "ok\n");
}

#[test]
fn the_only_node_is_shown_and_stays() {
    let dir = temp();
    let daemon = Daemon::start(dir.path());
    let socket = dir.path().join("a.sock");
    let node = daemon.json(&["node", "list"])[0].clone();
    assert_eq!(
        (&node["id"], &node["state"], &node["admin_state"]),
        (&json!(1), &json!("up"), &json!("active"))
    );
    assert_eq!(node["meta"], "leader");
    assert_eq!(node["devices"][0]["state"], "ok");
    assert_eq!(node["groups"], node["groups_total"]);
    let name = node["name"].as_str().unwrap();
    daemon.ok(&["volume", "create", "a", "64M"]);
    daemon.ok(&["attach", "volume", "a", "--socket", text(&socket)]);
    for by in [name, "1"] {
        let shown = daemon.json(&["node", "show", by]);
        assert_eq!(
            (&shown["name"], &shown["attachments"]),
            (&node["name"], &json!(1))
        );
        assert!(shown["heard_ms_ago"].as_u64().unwrap() < 10_000, "{shown}");
        assert!(shown["since"].is_string() && shown["joined_at"].is_string());
        assert!(daemon.ok(&["node", "show", by]).contains("leader"));
    }
    assert!(daemon.ok(&["node", "list"]).contains(name));

    let told = daemon.refused(&["node", "drain", name, "--yes"]);
    assert!(told.contains("0 of 1 replicas"), "{told}");
    let told = daemon.refused(&["node", "remove", name, "--yes"]);
    assert!(told.contains("the only one"), "{told}");
    for verb in ["show", "drain", "remove"] {
        let told =
            daemon.refused(&["node", verb, "nope", "--yes"][..if verb == "show" { 3 } else { 4 }]);
        assert!(
            told.contains("'nope'") && told.contains("node list"),
            "{told}"
        );
    }
    one_error(&daemon.run(&["node", "drain", name]), 2);

    // Where nothing is stored nothing has to go anywhere; that is told, and is no problem.
    daemon.ok(&["detach", "a"]);
    daemon.ok(&["volume", "delete", "a", "--yes"]);
    let drained = daemon.json(&["node", "drain", name, "--yes"]);
    assert_eq!(
        (&drained["admin_state"], &drained["groups_left"]),
        (&json!("draining"), &json!(0))
    );
    let health = daemon.ok(&["health"]);
    assert!(
        health.starts_with("ok\n")
            && health.contains("\nunder way  ")
            && health.contains("is empty"),
        "{health}"
    );
    assert!(daemon.ok(&["status"]).contains("under way"));
    let told = daemon.refused(&["volume", "create", "a", "64M"]);
    assert!(told.contains("usable device"), "{told}");
    daemon.ok(&["node", "drain", name, "--cancel"]);
    assert_eq!(daemon.ok(&["health"]), "ok\n");
    daemon.ok(&["volume", "create", "a", "64M"]);
}

#[test]
fn a_device_is_added_and_removed_while_the_daemon_serves() {
    let dir = temp();
    let (data, disk) = (dir.path().join("data"), dir.path().join("disk.img"));
    let spec = format!("{}:1G", text(&disk));
    let daemon = Daemon::start(&data);
    let only = daemon.refused(&["device", "remove", "1", "--yes"]);
    assert!(only.contains("the only one"), "{only}");
    let output = daemon.run(&["device", "add", &spec]);
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success(), "{said}");
    assert!(said.contains("in service, with number 2"), "{said}");
    let states = |daemon: &Daemon| names(&daemon.json(&["device", "list"]), "state");
    assert_eq!(states(&daemon), ["ok", "ok"]);
    let told = daemon.refused(&["device", "add", &spec]);
    assert!(told.contains("already"), "{told}");
    let second = daemon.json(&["device", "list"])[1].clone();
    assert_eq!(
        (&second["id"], &second["path"]),
        (&json!(2), &json!(text(&disk)))
    );
    let events = daemon.ok(&["events", "--json"]);
    let mut events = events
        .lines()
        .map(|line| serde_json::from_str::<Value>(line).unwrap());
    let added = events.rfind(|event| event["kind"] == "device_added");
    let added = added.unwrap();
    assert!(added["by"]["uid"].is_u64(), "nobody added it: {added}");

    // Killed, it is still known.
    daemon.kill();
    let daemon = Daemon::start(&data);
    assert_eq!(states(&daemon), ["ok", "ok"]);

    // Nothing is stored: it is empty and goes at once, and the next start leaves it alone.
    let removed = daemon.json(&["device", "remove", "2", "--yes"]);
    assert_eq!(
        (&removed["state"], &removed["path"]),
        (&json!("removed"), &json!(text(&disk)))
    );
    assert_eq!(states(&daemon), ["ok"]);
    eventually(|| !is_written_to(&disk));
    // What is stored from now on does not go there.
    let socket = dir.path().join("a.sock");
    daemon.ok(&["volume", "create", "a", "64M"]);
    daemon.ok(&["attach", "volume", "a", "--socket", text(&socket)]);
    assert_ne!(greet(&socket).1, 0);
    let told = daemon.refused(&["device", "add", text(&disk)]);
    assert!(
        told.contains("was removed") && told.contains("dd if=/dev/zero"),
        "{told}"
    );
    fs::remove_file(&disk).unwrap();
    daemon.ok(&["device", "add", &spec]);
    assert_eq!(states(&daemon), ["ok", "ok"]);
    assert!(daemon.terminate().success());
    let daemon = Daemon::start(&data);
    assert_eq!(states(&daemon), ["ok", "ok"]);
    assert_ne!(greet(&socket).1, 0);
    // Groups move to the device in the background.
    eventually(|| daemon.ok(&["health"]) == "ok\n");
}

#[test]
fn a_device_that_cannot_be_used_is_refused_when_it_is_added() {
    let dir = temp();
    let data = dir.path().join("data");
    let daemon = Daemon::start(&data);
    let (full, small) = (dir.path().join("full"), dir.path().join("small"));
    fs::write(&full, vec![7; 64 << 20]).unwrap();
    fs::File::create(&small).unwrap().set_len(1 << 20).unwrap();
    let missing = dir.path().join("no/such/disk");
    let other = Daemon::start(&dir.path().join("other"));
    let taken = other.data().join("devices/0.img");
    let holder = format!("in use by process {}", other.pid());
    let default = data.join("devices/0.img");
    for (device, code, told) in [
        (text(&full).to_owned(), 1, "not blank"),
        (text(&small).to_owned(), 1, "are needed"),
        (format!("{}:1G", text(&missing)), 1, "there is no directory"),
        (
            format!("{}:1M", text(&dir.path().join("x"))),
            2,
            "too small",
        ),
        (format!("{}:16000P", text(&dir.path().join("x"))), 1, "free"),
        (text(&dir.path().join("x")).to_owned(), 2, "no size"),
        ("/dev/no-such-disk".to_owned(), 1, "does not exist"),
        (text(dir.path()).to_owned(), 2, "is a directory"),
        ("/dev/null".to_owned(), 2, "neither a block device"),
        (text(&full.join("disk")).to_owned(), 1, "is no directory"),
        (text(&taken).to_owned(), 1, &holder),
        (text(&default).to_owned(), 1, "already"),
    ] {
        let error = one_error(&daemon.run(&["device", "add", &device]), code);
        assert!(error.contains(told), "{device}: {error}");
    }
    assert_eq!(
        daemon.json(&["device", "list"]).as_array().unwrap().len(),
        1
    );
    let told = daemon.refused(&["device", "remove", "7", "--yes"]);
    assert!(told.contains("no device '7'"), "{told}");
}

#[test]
fn an_added_device_that_is_gone_stops_no_start_and_is_told() {
    let dir = temp();
    let (data, disk) = (dir.path().join("data"), dir.path().join("disk.img"));
    let daemon = Daemon::start(&data);
    // As an addition leaves it that a crash has cut short.
    let list = json!({"added": [{"path": text(&disk)}]});
    fs::write(data.join("device-list.json"), list.to_string()).unwrap();
    assert!(daemon.terminate().success());
    fs::write(&disk, vec![7; 64 << 20]).unwrap();

    let daemon = Daemon::start(&data);
    let health = daemon.json_of(&["health"]);
    let problem = &health["problems"][0];
    assert!(
        problem["what"].as_str().unwrap().contains(text(&disk)),
        "{health}"
    );
    assert!(
        problem["doing"]
            .as_str()
            .unwrap()
            .contains("penstock device remove"),
        "{health}"
    );
    assert!(problem["since"].is_string(), "{health}");
    let states = || names(&daemon.json(&["device", "list"]), "state");
    assert_eq!(states(), ["ok", "pending"]);
    daemon.ok(&["device", "remove", text(&disk), "--yes"]);
    assert_eq!(states(), ["ok"]);
    eventually(|| daemon.ok(&["health"]) == "ok\n");
    // Or mended and added again.
    fs::remove_file(&disk).unwrap();
    daemon.ok(&["device", "add", &format!("{}:1G", text(&disk))]);
    assert_eq!(states(), ["ok", "ok"]);
}

#[test]
fn standalone_node_empties_a_device_that_is_removed() {
    let dir = temp();
    let (data, disk) = (dir.path().join("data"), dir.path().join("disk.img"));
    let (raw, out) = (dir.path().join("in.raw"), dir.path().join("out.raw"));
    let bytes: Vec<u8> = (0..32 << 20).map(|at: u32| (at >> 9) as u8 | 1).collect();
    fs::write(&raw, &bytes).unwrap();
    let daemon = Daemon::start(&data);
    daemon.ok(&["device", "add", &format!("{}:1G", text(&disk))]);
    daemon.ok(&["volume", "import", "a", text(&raw)]);
    one_error(&daemon.run(&["device", "remove", "2"]), 2);
    assert_eq!(daemon.json(&["device", "list"])[1]["state"], "ok");
    let removed = daemon.json(&["device", "remove", "2", "--yes"]);
    assert_eq!(removed["state"], "draining", "{removed}");
    eventually(|| names(&daemon.json(&["device", "list"]), "state") == ["ok"]);
    let told = daemon.refused(&["device", "remove", "1", "--yes"]);
    assert!(told.contains("only one"), "{told}");
    daemon.ok(&["volume", "export", "a", text(&out)]);
    assert!(fs::read(&out).unwrap() == bytes);
}

#[test]
fn a_volume_that_nobody_uses_is_renamed() {
    let dir = temp();
    let daemon = Daemon::start(dir.path());
    let socket = dir.path().join("a.sock");
    daemon.ok(&["volume", "create", "a", "1.5M"]);
    daemon.ok(&["volume", "create", "b", "10MB"]);
    let before = daemon.json(&["volume", "show", "a"]);
    assert_eq!(before["size_bytes"], 3 << 19);
    let told = daemon.refused(&["volume", "rename", "a", "b"]);
    assert!(told.contains("exists already"), "{told}");
    let renamed = daemon.json(&["volume", "rename", "a", "root"]);
    assert_eq!(renamed["name"], "root");
    // The guest finds the disk by the same serial.
    assert_eq!(renamed["serial"], before["serial"]);
    assert_eq!(
        names(&daemon.json(&["volume", "list"]), "name"),
        ["b", "root"]
    );
    daemon.ok(&["attach", "volume", "root", "--socket", text(&socket)]);
    let told = daemon.refused(&["volume", "rename", "root", "a"]);
    assert!(told.contains("penstock detach root"), "{told}");
    daemon.ok(&["detach", "root"]);
    daemon.ok(&["volume", "rename", "root", "a"]);
    let told = daemon.refused(&["volume", "rename", "root", "c"]);
    assert!(told.contains("no volume"), "{told}");
}
