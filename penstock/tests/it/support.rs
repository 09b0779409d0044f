//! The support bundle: what is in it, and what is not.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use crate::harness::{Daemon, one_error, penstock, temp, text};

fn listed(bundle: &Path) -> String {
    let output = Command::new("tar")
        .arg("-tzf")
        .arg(bundle)
        .output()
        .unwrap();
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).unwrap()
}

fn all_text(bundle: &Path) -> String {
    let output = Command::new("tar")
        .arg("-xOzf")
        .arg(bundle)
        .output()
        .unwrap();
    String::from_utf8_lossy(&output.stdout).into_owned()
}

#[test]
fn a_bundle_has_what_the_daemon_says_and_no_secret() {
    let dir = temp();
    let daemon = Daemon::start(&dir.path().join("data"));
    daemon.ok(&["volume", "create", "web", "64M"]);
    let bundle = dir.path().join("bundle.tar.gz");
    let printed = daemon.ok(&["support", "bundle", "--out", text(&bundle)]);
    assert_eq!(printed.trim(), text(&bundle));
    let names = listed(&bundle);
    for name in [
        "version.txt",
        "daemon/status.json",
        "daemon/volumes.json",
        "machine/disks.txt",
    ] {
        assert!(
            names.lines().any(|line| line.ends_with(name)),
            "no {name} in\n{names}"
        );
    }
    let told = all_text(&bundle);
    assert!(
        told.contains("\"name\": \"web\""),
        "the volume is not in it"
    );
    for secret in ["PRIVATE KEY", "BEGIN CERTIFICATE"] {
        assert!(!told.contains(secret), "{secret} is in it");
    }
    let mode = std::fs::metadata(&bundle).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600, "logs are not everybody's");

    let again = daemon.refused(&["support", "bundle", "--out", text(&bundle)]);
    assert!(again.contains("bundle.tar.gz"), "{again}");
    assert_eq!(all_text(&bundle), told, "nothing is overwritten");
}

#[test]
fn a_bundle_can_be_had_without_a_daemon() {
    let dir = temp();
    let bundle = dir.path().join("bundle.tar.gz");
    let run = |args: &[&str]| {
        let data = ["--data", text(dir.path())];
        penstock().args(args).args(data).output().unwrap()
    };
    let output = run(&["support", "bundle", "--out", text(&bundle)]);
    assert!(output.status.success(), "{output:?}");
    assert!(
        all_text(&bundle).contains("no daemon answers"),
        "{}",
        all_text(&bundle)
    );
    let missing = dir.path().join("no/such/bundle");
    let told = one_error(&run(&["support", "bundle", "--out", text(&missing)]), 1);
    assert!(told.contains("no/such/bundle"), "{told}");
}
