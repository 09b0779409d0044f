//! Usage errors and help: each says what to write instead.

use crate::harness::{Daemon, one_error, run, temp};

#[test]
fn a_usage_error_keeps_the_mistake_and_the_hint_apart() {
    let error = |args: &[&str]| one_error(&run(args), 2);
    assert_eq!(
        error(&["volume", "create", "a", "1G", "--pol", "x"]),
        "unexpected argument '--pol' found; a similar argument exists: '--pool'"
    );
    assert_eq!(
        error(&["volume", "lst"]),
        "unrecognized subcommand 'lst'; a similar subcommand exists: 'list'"
    );
    assert_eq!(
        error(&["attachment", "move"]),
        "the following required arguments were not provided: --to <NODE>, <SOCKET|NAME>; see `penstock help`"
    );
    let json = run(&["volume", "lst", "--json"]);
    let failure: serde_json::Value = serde_json::from_slice(&json.stderr).unwrap();
    assert_eq!(failure["error"], "unrecognized subcommand 'lst'");
    assert_eq!(failure["hint"], "a similar subcommand exists: 'list'");
}

#[test]
fn attaching_a_bare_name_suggests_the_kinds_that_can_be_attached() {
    for verb in [&["attach"][..], &["attachment", "create"]] {
        let command = verb.join(" ");
        let message = one_error(&run(&[verb, &["web", "--socket", "/x"]].concat()), 2);
        assert!(
            message.starts_with("unrecognized subcommand 'web'; "),
            "{message}"
        );
        for kind in ["volume", "fs"] {
            let suggested = format!("`penstock {command} {kind} web --socket PATH");
            assert!(message.contains(&suggested), "{message}");
        }
    }
    let message = one_error(&run(&["detach", "--sock"]), 2);
    assert!(!message.contains("attach volume"), "{message}");
}

#[test]
fn help_says_what_is_refused() {
    let help = |args: &[&str]| {
        let message = String::from_utf8(run(&[args, &["--help"]].concat()).stdout).unwrap();
        message.split_whitespace().collect::<Vec<_>>().join(" ")
    };
    let dir = temp();
    let daemon = Daemon::start(dir.path());
    let pool = [
        "pool",
        "create",
        "p",
        "--failure-domain",
        "device",
        "--replicas",
    ];
    one_error(&daemon.run(&[&pool[..], &["2"]].concat()), 2);
    daemon.ok(&[&pool[..], &["1"]].concat());
    let message = help(&["pool", "create"]);
    assert!(message.contains("`device` needs --replicas 1"), "{message}");
    assert!(
        !message.contains("Copies lie on different devices"),
        "{message}"
    );

    daemon.ok(&["volume", "create", "a", "1M"]);
    let message = help(&["volume", "create"]);
    assert!(message.contains("[default: wait:60]"), "{message}");
    let wait_s = daemon.json(&["volume", "show", "a"])["on_full_wait_s"].clone();
    assert_eq!(wait_s, 60);
}
