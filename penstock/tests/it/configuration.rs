//! `penstock config`, and where a configuration is found.

use std::fs;
use std::path::Path;

use serde_json::{Value, json};

use crate::harness::{Daemon, one_error, penstock, run, temp, text};

/// The entry of a key in what `config show --json` prints.
fn entry(shown: &Value, key: &str) -> Value {
    let entries = shown.as_array().unwrap().iter();
    let mut entries = entries.filter(|entry| entry["key"] == key);
    let entry = entries
        .next()
        .unwrap_or_else(|| panic!("no {key} in {shown}"));
    assert!(entries.next().is_none(), "{key} twice");
    entry.clone()
}

#[test]
fn a_configuration_is_checked_before_a_daemon_reads_it() {
    let dir = temp();
    let file = dir.path().join("p.toml");
    let check = |content: &str| {
        fs::write(&file, content).unwrap();
        run(&["config", "check", text(&file)])
    };
    let good = check("threads = 1\nfilesystem = { cache = \"1.5M\" }\n");
    assert!(good.status.success(), "{good:?}");
    for (content, told) in [
        ("threads = 0\n", "threads = 0 is out of range"),
        ("\nthreats = 1\n", "line 2: unknown key `threats`"),
        ("labels = { row = \"a\" }\n", "unknown key `row`"),
    ] {
        let error = one_error(&check(content), 2);
        assert!(error.contains(told), "{error}");
    }
    let json = ["config", "check", text(&file), "--json"];
    let wrong = check("threads = 0\npoll = 3\nthreats = 1\n");
    assert_eq!(wrong.status.code(), Some(2));
    let told = String::from_utf8(wrong.stderr).unwrap();
    let lines: Vec<&str> = told.lines().collect();
    assert_eq!(lines.len(), 3, "{told}");
    for (line, mistake) in lines
        .iter()
        .zip(["line 2: ", "line 3: unknown key", "threads = 0"])
    {
        let is_told = line.starts_with("penstock: error: ") && line.contains(mistake);
        assert!(is_told, "{line}: not {mistake}");
    }
    let output = run(&json);
    assert_eq!(output.status.code(), Some(2));
    let told: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(
        (&told["ok"], &told["file"]),
        (&json!(false), &json!(text(&file)))
    );
    let mistakes = told["mistakes"].as_array().unwrap();
    assert_eq!(mistakes.len(), 3, "{told}");
    assert!(
        mistakes.iter().all(|one| one["error"].is_string()),
        "{told}"
    );
    fs::write(&file, "").unwrap();
    let told: Value = serde_json::from_slice(&run(&json).stdout).unwrap();
    assert_eq!(
        told,
        json!({ "file": text(&file), "ok": true, "mistakes": [] })
    );
    // Nothing is in the default place of a user without a home.
    let without = penstock()
        .args(["config", "check"])
        .env("PENSTOCK_CONFIG", "")
        .output()
        .unwrap();
    assert!(one_error(&without, 2).contains("config check FILE"));
}

#[test]
fn a_daemon_tells_what_it_goes_by_and_who_said_so() {
    let dir = temp();
    let (data, file) = (dir.path().join("data"), dir.path().join("p.toml"));
    let content = "poll = \"never\"\nthreads = 7\nfilesystem = { cache = \"64M\" }\n";
    fs::write(&file, content).unwrap();
    // By the variable; the daemon is started with an option for its threads.
    let mut command = penstock();
    command.env("PENSTOCK_CONFIG", &file);
    let daemon = Daemon::start_by(command, &data, &[]);
    let shown = daemon.json(&["config", "show"]);
    let of_file = |key: &str, value: Value| {
        let mut entry = json!({ "key": key, "value": value, "origin": "file" });
        entry["file"] = json!(text(&file));
        entry
    };
    let cache = entry(&shown, "filesystem.cache");
    assert_eq!(cache, of_file("filesystem.cache", json!("64M")));
    assert_eq!(entry(&shown, "poll"), of_file("poll", json!("never")));
    let origin = |key: &str| entry(&shown, key)["origin"].clone();
    assert_eq!(entry(&shown, "threads")["value"], 1);
    assert_eq!(
        entry(&shown, "socket_dirs")["value"],
        json!(["/run/penstock"])
    );
    for (key, expected) in [
        ("threads", "option"),
        ("data", "option"),
        ("device_size", "option"),
        ("store", "default"),
        ("socket_mode", "default"),
    ] {
        assert_eq!(origin(key), expected, "{key}");
    }
    // A node of its own has none of these.
    let keys = shown.as_array().unwrap().iter();
    assert!(keys.clone().all(|entry| entry["key"] != "wire"), "{shown}");
    let table = daemon.ok(&["config", "show"]);
    assert!(table.starts_with("KEY"), "{table}");
    assert!(table.contains(text(&file)), "{table}");
    // Text output has the form of a configuration file.
    for shown in ["\"64M\"", "[\"/run/penstock\"]"] {
        assert!(table.contains(shown), "{table}");
    }
}

#[test]
fn a_users_configuration_is_read_from_its_home_and_root_has_its_own() {
    let dir = temp();
    let home = dir.path().join("penstock");
    fs::create_dir(&home).unwrap();
    fs::write(home.join("penstock.toml"), "threads = 0\n").unwrap();
    let data = dir.path().join("data");
    let mut serve = penstock();
    serve
        .env_remove("PENSTOCK_CONFIG")
        .env("XDG_CONFIG_HOME", dir.path())
        .args(["config", "check", "--data", text(&data)]);
    let told = one_error(&serve.output().unwrap(), 2);
    match rustix::process::geteuid().is_root() {
        false => assert!(told.contains("threads = 0"), "{told}"),
        // Unless the package is installed here.
        true if Path::new("/etc/penstock/penstock.toml").exists() => {}
        true => assert!(told.contains("config check FILE"), "{told}"),
    }
}
