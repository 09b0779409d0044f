//! The command line's contract: exit codes, one-line errors, what goes where.

use std::fs;
use std::os::unix::fs::PermissionsExt;

use crate::harness::{Daemon, attached, greet, one_error, penstock, run, serve, temp, text};

#[test]
fn wrong_usage_is_one_line_and_exit_code_2() {
    for args in [
        &["volume", "create", "a", "10X"][..],
        &["volume", "create", "a"],
        &["volume", "frobnicate"],
        &["attach", "volume", "a"],
        &["--no-such-option", "status"],
        &["status", "--api", "https://elsewhere:1"],
        &["volume", "resize", "a", "+"],
        &["vhost-user-blk", "--socket-path", "/x", "--fd", "3"],
        &["serve", "--data", "/nonexistent/d", "--device-size", "0"],
        &["serve", "--data", "/nonexistent/d", "--device-size", "1K"],
        &["serve", "--data", "/nonexistent/d", "--device", "/x:1M"],
    ] {
        one_error(&run(args), 2);
    }
    let told = one_error(&run(&["volume", "create", "a", "10X"]), 2);
    assert!(
        told.contains("unknown size suffix 'X'; use K, M, G, T or P"),
        "{told}"
    );
}

#[test]
fn the_limits_of_queues_and_sizes_are_told() {
    for queues in ["0", "257", "70000"] {
        let socket = ["attach", "volume", "a", "--socket", "/x", "--queues"];
        let told = one_error(&run(&[&socket[..], &[queues]].concat()), 2);
        assert!(told.contains("1..=256"), "{told}");
        let program = ["vhost-user-blk", "--socket-path", "/x", "--queues", queues];
        assert!(one_error(&run(&program), 2).contains("1..=256"));
    }
    let dir = temp();
    let (data, config) = (dir.path().join("data"), dir.path().join("p.toml"));
    let args = ["serve", "--data", text(&data), "--device-size", "1K"];
    let told = one_error(&run(&args), 2);
    assert!(
        told.contains("1K is too small") && told.contains("4M"),
        "{told}"
    );
    fs::write(&config, "devices = [{ path = \"/x\", size = \"2M\" }]").unwrap();
    let args = ["serve", "--data", text(&data), "--config", text(&config)];
    assert!(one_error(&run(&args), 2).contains("2M is too small"));
    assert!(!data.exists());

    let daemon = Daemon::start_with(
        &data,
        &[
            "--device",
            &format!("{}:4M", text(&dir.path().join("least"))),
        ],
    );
    daemon.ok(&["volume", "create", "a", "1M"]);
    let socket = dir.path().join("a.sock");
    daemon.ok(&[
        "attach",
        "volume",
        "a",
        "--socket",
        text(&socket),
        "--queues",
        "256",
    ]);
}

#[test]
fn socket_path_too_long_is_refused_before_anything_is_created() {
    let dir = temp();
    let data = dir.path().join("d".repeat(100));
    let told = one_error(&serve(&data), 2);
    assert!(
        told.contains("too long") && told.contains("admin_socket"),
        "{told}"
    );
    assert!(!data.exists());
    let socket = dir.path().join("s".repeat(110));
    let data = dir.path().join("data");
    let args = [
        "vhost-user-blk",
        "--volume",
        "a",
        "--socket-path",
        text(&socket),
        "--data",
        text(&data),
    ];
    let told = one_error(&run(&args), 2);
    assert!(told.contains("too long"), "{told}");
    assert!(!data.exists());
}

#[test]
fn sockets_with_long_names_are_made_and_used() {
    let mut builder = tempfile::Builder::new();
    let dir = builder
        .prefix("p")
        .rand_bytes(4)
        .tempdir_in("/tmp")
        .unwrap();
    let longest = |first: &str| {
        let room = 107 - 2 - dir.path().as_os_str().len();
        dir.path().join(format!("{first}{}", "x".repeat(room)))
    };
    let (admin, disk, tree) = (longest("a"), longest("d"), longest("f"));
    let (data, config) = (dir.path().join("data"), dir.path().join("p.toml"));
    // The daemon's sandbox must allow these paths.
    let lines = format!(
        "admin_socket = {:?}\nsandbox = \"best-effort\"\nsocket_dirs = [{:?}]\n",
        text(&admin),
        text(dir.path())
    );
    fs::write(&config, lines).unwrap();
    let daemon = Daemon::start_with(&data, &["--config", text(&config)]);
    let ok = |args: &[&str]| {
        let api = format!("unix:{}", text(&admin));
        let output = run(&[args, &["--api", &api]].concat());
        assert!(output.status.success(), "{output:?}");
    };
    ok(&["volume", "create", "a", "64M"]);
    ok(&["attach", "volume", "a", "--socket", text(&disk)]);
    greet(&disk);
    ok(&["fs", "create", "home"]);
    ok(&[
        "attach",
        "fs",
        "home",
        "--tag",
        "home",
        "--socket",
        text(&tree),
    ]);
    greet(&tree);
    assert!(daemon.terminate().success());
    let left = [&admin, &disk, &tree].map(|socket| socket.exists());
    assert_eq!(left, [false; 3]);
}

#[test]
fn the_back_end_program_makes_no_node() {
    let dir = temp();
    let (data, socket) = (dir.path().join("data"), dir.path().join("a.sock"));
    let program = ["vhost-user-blk", "--volume", "a", "--socket-path"];
    let args = [&program[..], &[text(&socket), "--data", text(&data)]].concat();
    let told = one_error(&run(&args), 1);
    assert!(
        told.contains("no volume") && told.contains("--data"),
        "{told}"
    );
    assert!(!data.exists());
}

#[test]
fn no_colours_go_where_there_is_no_terminal() {
    let dir = temp();
    let mut command = penstock();
    command.env("PENSTOCK_LOG", "info");
    let daemon = Daemon::start_by(command, dir.path(), &[]);
    assert!(daemon.said.len() > 2, "{:#?}", daemon.said);
    let coloured = daemon.said.iter().find(|line| line.contains('\x1b'));
    assert_eq!(coloured, None);
}

#[test]
fn what_is_deleted_and_detached_is_told_as_json() {
    let (_dir, daemon, socket) = attached();
    let detached = daemon.json(&["detach", "a"]);
    let node = &daemon.json(&["node", "list"])[0]["name"];
    assert_eq!(
        detached,
        serde_json::json!({ "volume": "a", "socket": text(&socket), "node": node })
    );
    let shown = daemon.json(&["volume", "show", "a"]);
    assert_eq!(daemon.json(&["volume", "delete", "a", "--yes"]), shown);
}

#[test]
fn an_export_names_its_file_and_size() {
    let dir = temp();
    let daemon = Daemon::start(&dir.path().join("data"));
    let out = dir.path().join("out.raw");
    daemon.ok(&["volume", "create", "a", "64M"]);
    let said = |args: &[&str]| {
        let output = daemon.run(args);
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stderr).unwrap()
    };
    let message = said(&["volume", "export", "a", text(&out)]);
    let expected = format!("penstock: volume a exported to {}, 64M\n", text(&out));
    assert_eq!(message, expected);
    let message = said(&["volume", "export", "a", "-"]);
    assert_eq!(
        message,
        "penstock: volume a exported to standard output, 64M\n"
    );
    let json = daemon.json(&["volume", "export", "a", text(&out), "--force"]);
    assert_eq!(
        json,
        serde_json::json!({
            "volume": "a", "file": text(&out), "format": "raw", "size_bytes": 64 << 20
        })
    );
    // Standard output cannot hold both the volume and JSON.
    let both = daemon.run(&["volume", "export", "a", "-", "--json"]);
    assert_eq!(both.status.code(), Some(2), "{both:?}");
    assert!(both.stdout.is_empty(), "{both:?}");
    let error: serde_json::Value = serde_json::from_slice(&both.stderr).unwrap();
    assert_eq!(error["hint"], "leave --json out");
}

#[test]
fn a_backup_names_its_file_and_size() {
    let dir = temp();
    let daemon = Daemon::start(&dir.path().join("data"));
    let file = dir.path().join("backup");
    let backup = ["meta", "backup", text(&file), "--force"];
    let output = daemon.run(&backup);
    assert!(output.status.success(), "{output:?}");
    assert!(output.stdout.is_empty(), "{output:?}");
    let message = String::from_utf8(output.stderr).unwrap();
    let expected = format!("penstock: metadata backed up to {}, ", text(&file));
    assert!(message.starts_with(&expected), "{message}");
    assert_eq!(message.lines().count(), 1, "{message}");
    let json = daemon.json(&backup);
    assert_eq!(json["file"], text(&file));
    assert_eq!(json["size_bytes"], fs::metadata(&file).unwrap().len());
    assert!(json["cluster"].is_string(), "{json}");
}

#[test]
fn help_and_version_go_to_stdout() {
    for args in [
        &["--help"][..],
        &["--version"],
        &["volume", "import", "--help"],
    ] {
        let output = run(args);
        assert_eq!(output.status.code(), Some(0));
        assert!(!output.stdout.is_empty());
        assert!(output.stderr.is_empty());
    }
}

#[test]
fn completions_and_man_pages_come_without_a_daemon() {
    for shell in ["bash", "zsh", "fish"] {
        let output = run(&["completions", shell]);
        assert!(
            String::from_utf8(output.stdout)
                .unwrap()
                .contains("attachments"),
            "{shell}"
        );
    }
    let page = String::from_utf8(run(&["man"]).stdout).unwrap();
    assert!(page.contains(".TH penstock 1"), "{page}");
    let dir = temp();
    assert!(run(&["man", "--dir", text(dir.path())]).status.success());
    assert!(dir.path().join("penstock-volume-create.1").exists());
}

#[test]
fn rdma_is_checked_without_a_daemon() {
    let output = run(&["rdma", "check", "--json"]);
    let told: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let usable = told["usable"].as_bool().unwrap();
    let whole = told["state"].as_str().unwrap();
    assert_eq!(usable, whole == "ok" || whole == "warn", "{told}");
    assert_eq!(output.status.code(), Some(i32::from(whole == "fail")));
    let findings = told["findings"].as_array().unwrap();
    for finding in findings {
        let state = finding["state"].as_str().unwrap();
        assert!(["ok", "warn", "fail"].contains(&state), "{finding}");
        assert_eq!(finding["hint"].is_null(), state == "ok", "{finding}");
    }
    if !std::path::Path::new("/sys/class/infiniband").exists() {
        assert_eq!((&findings[0]["state"], usable), (&"fail".into(), false));
        let text = String::from_utf8(run(&["rdma", "check"]).stdout).unwrap();
        assert!(
            text.starts_with("fail  devices: the kernel shows none\n"),
            "{text}"
        );
        assert!(
            text.ends_with("\nfail  this machine cannot use RDMA; data go over TCP\n"),
            "{text}"
        );
    }
    let told = one_error(&run(&["rdma", "check", "--address", "elsewhere"]), 2);
    assert!(told.contains("elsewhere"), "{told}");
}

#[test]
fn attachments_have_a_noun_and_its_short_forms() {
    let dir = temp();
    let daemon = Daemon::start(dir.path());
    let socket = dir.path().join("a.sock");
    daemon.ok(&["volume", "create", "a", "64M"]);
    for (create, delete) in [
        (&["attachment", "create"][..], &["attachment", "delete"][..]),
        (&["attach"], &["detach"]),
    ] {
        let create = [create, &["volume", "a", "--socket", text(&socket)]].concat();
        assert_eq!(daemon.json(&create)["volume"], "a");
        let listed = daemon.json(&["attachment", "list"]);
        assert_eq!(listed[0]["socket"], text(&socket));
        assert_eq!(listed, daemon.json(&["attachments", "list"]));
        assert_ne!(greet(&socket).1, 0);
        daemon.ok(&[delete, &["a", "--yes"]].concat());
        assert_eq!(daemon.json(&["attachment", "list"]), serde_json::json!([]));
    }
    for verb in [
        &["attachment", "create", "volume", "a"][..],
        &["attachment"],
    ] {
        assert_eq!(daemon.run(verb).status.code(), Some(2));
    }
}

#[test]
fn without_a_daemon_the_error_says_how_to_start_one() {
    let dir = temp();
    let told = one_error(&run(&["status", "--data", text(dir.path())]), 1);
    assert!(
        told.contains("no daemon answers on") && told.contains("penstock serve"),
        "{told}"
    );
    assert!(told.contains(text(dir.path())), "{told}");
}

#[test]
fn the_admin_endpoint_is_named_by_option_or_environment() {
    let dir = temp();
    let daemon = Daemon::start(dir.path());
    let socket = dir.path().join("penstock.sock");
    let api = format!("unix:{}", text(&socket));
    assert!(run(&["--api", &api, "health"]).status.success());
    assert!(run(&["health", "--api", text(&socket)]).status.success());
    let by_environment = penstock()
        .arg("health")
        .env("PENSTOCK_API", &api)
        .output()
        .unwrap();
    assert_eq!(by_environment.stdout, b"ok\n");
    let mode = fs::metadata(&socket).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    drop(daemon);
}

#[test]
fn a_bad_configuration_is_named_with_its_hint() {
    let dir = temp();
    let config = dir.path().join("penstock.toml");
    let data = dir.path().join("data");
    for (content, told) in [
        (
            "devize_size = \"1G\"\n",
            "line 1: unknown key `devize_size`",
        ),
        (
            "threads = 1\n\ndevice_size = \"1Q\"\n",
            "line 3: unknown size suffix 'Q'",
        ),
        ("threads = 0\n", "threads = 0 is out of range; use 1 to"),
        ("poll = \"sometimes\"\n", "sometimes"),
        ("pin = [100000]\n", "CPU 100000"),
        ("socket_mode = \"rw\"\n", "socket_mode 'rw'"),
        ("not toml at all", "line 1"),
    ] {
        fs::write(&config, content).unwrap();
        let args = ["serve", "--config", text(&config), "--data", text(&data)];
        let error = one_error(&run(&args), 2);
        assert!(error.contains(told), "{content:?}: {error}");
        assert!(error.contains(';'), "no hint: {error}");
    }
    let missing = [
        "serve",
        "--config",
        "/nonexistent.toml",
        "--data",
        text(&data),
    ];
    assert!(one_error(&run(&missing), 2).contains("/nonexistent.toml"));
    assert!(
        !data.exists(),
        "nothing is made before the configuration is good"
    );
}

#[test]
fn two_daemons_on_one_data_directory_are_refused() {
    let dir = temp();
    let daemon = Daemon::start(dir.path());
    let told = one_error(&serve(dir.path()), 1);
    assert!(
        told.contains(&format!(
            "in use by another daemon (process {})",
            daemon.pid()
        )),
        "{told}"
    );
    assert!(told.contains("--data"), "{told}");
    assert_eq!(daemon.ok(&["health"]), "ok\n");
}

#[test]
fn volumes_refuse_what_would_lose_or_confuse() {
    let dir = temp();
    let daemon = Daemon::start(dir.path());
    daemon.ok(&["volume", "create", "a", "64M"]);
    let told = daemon.refused(&["volume", "create", "a", "64M"]);
    assert!(told.contains("\"a\"") || told.contains("'a'"), "{told}");
    assert!(told.contains("exists"), "{told}");
    for args in [
        &["volume", "show", "nope"][..],
        &["volume", "resize", "nope", "1G"],
        &["volume", "delete", "nope", "--yes"],
        &["volume", "export", "nope", "-"],
        &["attach", "volume", "nope", "--socket", "/tmp/x.sock"],
        &["detach", "nope"],
        &["libvirt", "disk-xml", "nope"],
        &["volume", "create", "b", "1G", "--pool", "nope"],
    ] {
        let told = daemon.refused(args);
        assert!(told.contains("nope"), "{told}");
    }
    one_error(&daemon.run(&["volume", "create", "bad/name", "1G"]), 2);
    one_error(&daemon.run(&["volume", "create", "zero", "0"]), 2);
    // Destructive verbs do not act unasked.
    let told = one_error(&daemon.run(&["volume", "delete", "a"]), 2);
    assert!(told.contains("--yes"), "{told}");
    one_error(&daemon.run(&["volume", "resize", "a", "32M"]), 2);
    assert_eq!(
        daemon.json(&["volume", "show", "a"])["size_bytes"],
        64 << 20
    );
}

#[test]
fn a_volume_in_use_is_left_alone() {
    let (dir, daemon, socket) = attached();
    let other = dir.path().join("b.sock");
    daemon.ok(&["volume", "create", "b", "64M"]);
    for args in [
        &["volume", "delete", "a", "--yes"][..],
        &["attach", "volume", "a", "--socket", text(&other)],
        &["attach", "volume", "b", "--socket", text(&socket)],
        &["volume", "import", "a", "/dev/null", "--yes"],
        &["volume", "resize", "a", "32M", "--yes"],
    ] {
        let told = daemon.refused(args);
        assert!(
            told.contains("detach") || told.contains("another path"),
            "{args:?}: {told}"
        );
    }
    // A guest that is connected is not cut off unasked.
    let (guest, _) = greet(&socket);
    let told = one_error(&daemon.run(&["detach", "a"]), 2);
    assert!(told.contains("--yes"), "{told}");
    let told = daemon.refused(&["volume", "export", "a", text(&dir.path().join("out"))]);
    assert!(told.contains("--live"), "{told}");
    daemon.ok(&["detach", "a", "--yes"]);
    drop(guest);
    assert!(!socket.exists());
    daemon.ok(&["volume", "delete", "a", "--yes"]);
}

#[test]
fn a_socket_path_that_cannot_be_used_is_named() {
    let dir = temp();
    let daemon = Daemon::start(dir.path());
    daemon.ok(&["volume", "create", "a", "64M"]);
    let file = dir.path().join("precious");
    fs::write(&file, "precious").unwrap();
    let taken = dir.path().join("taken.sock");
    let _listener = std::os::unix::net::UnixListener::bind(&taken).unwrap();
    let missing = dir.path().join("no/such/dir/a.sock");
    let long = dir.path().join("x".repeat(120));
    for path in [&file, &taken, &missing, &long] {
        let output = daemon.run(&["attach", "volume", "a", "--socket", text(path)]);
        let code = output.status.code().unwrap();
        let told = one_error(&output, code);
        assert!(code == 1 || code == 2, "{told}");
        let culprit = if path == &missing {
            path.parent().unwrap()
        } else {
            path
        };
        assert!(told.contains(text(culprit)), "{told}");
    }
    assert_eq!(fs::read(&file).unwrap(), b"precious");
    assert_eq!(daemon.json(&["attachments", "list"]), serde_json::json!([]));
    daemon.attach("a", &dir.path().join("a.sock"));
}

#[test]
fn the_null_store_says_loudly_that_it_drops_everything() {
    let dir = temp();
    let daemon = Daemon::start_with(dir.path(), &["--store", "null"]);
    assert!(
        daemon.said.iter().any(|l| l.contains("DROPS EVERY WRITE")),
        "{:#?}",
        daemon.said
    );
    daemon.ok(&["volume", "create", "a", "64M"]);
    let socket = dir.path().join("a.sock");
    daemon.attach("a", &socket);
    assert_ne!(greet(&socket).1, 0);
    let health = daemon.run(&["health"]);
    assert_eq!(
        health.status.code(),
        Some(1),
        "a node that stores nothing is not healthy"
    );
}

#[test]
fn back_end_program_prints_its_capabilities() {
    let output = run(&["vhost-user-blk", "--print-capabilities"]);
    assert!(output.status.success());
    let json: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(json["type"], "block");
    assert!(
        json["features"]
            .as_array()
            .unwrap()
            .contains(&"read-only".into())
    );
}
