//! `penstock fs`: filesystems are made, listed and shown, and wrong words are refused with what helps.

use serde_json::json;

use crate::harness::{Daemon, one_error, run, temp};

#[test]
fn filesystems_are_made_listed_and_shown() {
    let dir = temp();
    let daemon = Daemon::start(dir.path());
    assert_eq!(daemon.json(&["fs", "list"]), json!([]));
    let made = daemon.json(&["fs", "create", "home"]);
    assert_eq!(
        (&made["name"], &made["pool"]),
        (&json!("home"), &json!("default"))
    );
    assert_eq!(made["state"], "ready");
    let shown = daemon.json(&["fs", "show", "home"]);
    for field in ["name", "id", "pool", "created_at"] {
        assert_eq!(shown[field], made[field], "{shown}");
    }
    assert_eq!(shown["attachments"], json!([]));
    daemon.ok(&["fs", "create", "second"]);
    let listed = daemon.json(&["fs", "list"]);
    let names = listed.as_array().unwrap().iter().map(|one| &one["name"]);
    assert_eq!(names.collect::<Vec<_>>(), ["home", "second"]);
    let table = daemon.ok(&["fs", "list"]);
    assert!(table.starts_with("NAME"), "{table}");
    assert!(
        daemon
            .ok(&["fs", "show", "home"])
            .contains("attached    -\n")
    );
}

#[test]
fn a_filesystem_is_refused_with_the_culprit_and_what_helps() {
    let dir = temp();
    let daemon = Daemon::start(dir.path());
    daemon.ok(&["fs", "create", "home"]);
    let told = daemon.refused(&["fs", "create", "home"]);
    assert!(told.contains("home") && told.contains("exists"), "{told}");
    let told = daemon.refused(&["fs", "create", "b", "--pool", "nope"]);
    assert!(told.contains("nope"), "{told}");
    one_error(&daemon.run(&["fs", "create", "bad/name"]), 2);
    for verb in [
        &["fs", "show", "nope"][..],
        &["fs", "delete", "nope", "--yes"],
        &["libvirt", "fs-xml", "nope"],
    ] {
        assert!(daemon.refused(verb).contains("nope"));
    }
    // Nobody is there to be asked.
    let told = one_error(&daemon.run(&["fs", "delete", "home"]), 2);
    assert!(told.contains("--yes"), "{told}");
    assert_eq!(daemon.json(&["fs", "show", "home"])["name"], "home");
}

#[test]
fn wrong_words_about_a_filesystem_need_no_daemon() {
    let long = "a".repeat(37);
    let attach = ["attach", "fs", "home", "--socket", "/x"];
    for (more, told) in [
        (&[][..], "--tag"),
        (&["--tag", ""], "1 to 36 bytes"),
        (&["--tag", &long], "37 bytes"),
        (&["--tag", "a\nb"], "newline"),
        (&["--tag", "t", "--queues", "0"], "1..=64"),
        (&["--tag", "t", "--queues", "65"], "1..=64"),
    ] {
        let error = one_error(&run(&[&attach[..], more].concat()), 2);
        assert!(error.contains(told), "{error}");
    }
    for words in [
        &["fs", "create", ""][..],
        &["fs", "frobnicate"],
        &["attach", "fs", "home", "--tag", "t"],
        &["libvirt", "fs-xml", ""],
    ] {
        one_error(&run(words), 2);
    }
}
