//! What Prometheus reads, and that it is what the documentation lists.

use std::collections::BTreeMap;
use std::fs;
use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;

use crate::harness::{Daemon, greet, one_error, serve_with, temp, text};

/// Asks over HTTP/1.0, and returns status line and body.
pub fn ask(mut stream: impl Read + Write, request: &str) -> (String, String) {
    stream
        .write_all(format!("{request} HTTP/1.0\r\nhost: x\r\n\r\n").as_bytes())
        .unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    (head.to_lowercase(), body.to_owned())
}

/// Kind and labels of each family on a page.
fn families(page: &str) -> BTreeMap<String, (String, String)> {
    let mut found = BTreeMap::new();
    for line in page.lines().filter_map(|line| line.strip_prefix("# TYPE ")) {
        let (name, kind) = line.split_once(' ').unwrap();
        found.insert(name.to_owned(), (kind.to_owned(), String::new()));
    }
    for line in page.lines().filter(|line| !line.starts_with('#')) {
        let (series, value) = line.rsplit_once(' ').unwrap();
        assert!(value.parse::<f64>().unwrap() >= 0.0, "{line}");
        let (name, labels) = series.split_once('{').unwrap_or((series, ""));
        let labels: Vec<&str> = labels
            .split("\",")
            .filter_map(|label| Some(label.split_once('=')?.0))
            .filter(|label| *label != "le")
            .collect();
        let of_histogram = ["_bucket", "_sum", "_count"]
            .iter()
            .filter_map(|suffix| name.strip_suffix(suffix))
            .find(|family| found.get(*family).is_some_and(|f| f.0 == "histogram"));
        let family = of_histogram.unwrap_or(name);
        found.get_mut(family).unwrap().1 = labels.join(", ");
    }
    found
}

/// The same of the documentation.
fn documented() -> BTreeMap<String, (String, String)> {
    let list = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/METRICS.md");
    let list = fs::read_to_string(list).unwrap();
    let entries = list.lines().filter_map(|line| {
        let (name, rest) = line.strip_prefix("- `")?.split_once("` — ")?;
        let (kind, rest) = rest.split_once(", ")?;
        let labels = rest
            .split_once("; labels ")
            .map_or("", |(_, labels)| labels);
        Some((name.to_owned(), (kind.to_owned(), labels.replace('`', ""))))
    });
    entries.collect()
}

#[test]
fn what_is_documented_is_told_and_what_is_told_is_documented() {
    let dir = temp();
    let (data, config) = (dir.path().join("data"), dir.path().join("p.toml"));
    fs::write(&config, "metrics_listen = \"127.0.0.1:0\"").unwrap();
    let daemon = Daemon::start_with(&data, &["--config", text(&config)]);
    let ready = daemon.said.last().unwrap();
    let address = ready
        .split_once("http://")
        .unwrap()
        .1
        .split_once('/')
        .unwrap()
        .0;
    let socket = dir.path().join("a.sock");
    daemon.ok(&["volume", "create", "a", "64M"]);
    daemon.ok(&["attach", "volume", "a", "--socket", text(&socket)]);
    let (_guest, features) = greet(&socket);
    assert_ne!(features, 0);
    let tree = dir.path().join("t.sock");
    daemon.ok(&["fs", "create", "tree"]);
    daemon.ok(&[
        "attach",
        "fs",
        "tree",
        "--socket",
        text(&tree),
        "--tag",
        "t",
    ]);

    let (head, page) = ask(TcpStream::connect(address).unwrap(), "GET /metrics");
    assert!(
        head.contains(" 200 ") && head.contains("text/plain; version=0.0.4"),
        "{head}"
    );
    assert_eq!(families(&page), documented());
    let has = |line: &str| assert!(page.lines().any(|l| l == line), "{line}\n{page}");
    has(&format!(
        "penstock_attachment_connected{{volume=\"a\",socket=\"{}\"}} 1",
        text(&socket)
    ));
    has("penstock_volume_size_bytes{volume=\"a\",pool=\"default\"} 67108864");
    has("penstock_cluster_nodes{state=\"up\"} 1");
    has("penstock_meta_is_leader 1");
    has("penstock_problems 0");

    // Nothing else is there.
    for request in ["GET /v1/volumes", "POST /metrics", "DELETE /v1/volumes/a"] {
        let (head, body) = ask(TcpStream::connect(address).unwrap(), request);
        assert!(
            head.contains(" 404 ") || head.contains(" 405 "),
            "{request}: {head}"
        );
        assert!(body.starts_with("only "), "{request}: {body}");
    }
    // Connections that ask nothing keep nobody from the admin socket, which tells the same.
    let _idle: Vec<TcpStream> = (0..20)
        .map(|_| TcpStream::connect(address).unwrap())
        .collect();
    let admin = UnixStream::connect(data.join("penstock.sock")).unwrap();
    let (head, page) = ask(admin, "GET /metrics");
    assert!(head.contains(" 200 "), "{head}");
    assert_eq!(families(&page), documented());
}

#[test]
fn eight_connections_are_served_until_they_are_cut_off() {
    let dir = temp();
    let (data, config) = (dir.path().join("data"), dir.path().join("p.toml"));
    fs::write(&config, "metrics_listen = \"127.0.0.1:0\"").unwrap();
    let daemon = Daemon::start_with(&data, &["--config", text(&config)]);
    let ready = daemon.said.last().unwrap();
    let (_, address) = ready.split_once("http://").unwrap();
    let (address, _) = address.split_once('/').unwrap();
    let connect = || TcpStream::connect(address).unwrap();
    let mut silent: Vec<TcpStream> = (0..8).map(|_| connect()).collect();
    let (head, _) = ask(connect(), "GET /metrics");
    assert!(head.contains(" 200 "), "{head}");
    // It was served when one of those had been cut off, and not before.
    let mut is_over = |stream: &mut TcpStream| {
        stream.set_nonblocking(true).unwrap();
        let read = stream.read(&mut [0]);
        !matches!(read, Err(error) if error.kind() == ErrorKind::WouldBlock)
    };
    assert!(silent.iter_mut().any(&mut is_over));
}

#[test]
fn an_address_that_cannot_be_listened_on_is_named() {
    let dir = temp();
    let (data, config) = (dir.path().join("data"), dir.path().join("p.toml"));
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    for (address, code) in [(address.as_str(), 1), ("localhost", 2)] {
        fs::write(&config, format!("metrics_listen = \"{address}\"")).unwrap();
        let told = one_error(&serve_with(&data, &["--config", text(&config)]), code);
        assert!(
            told.contains("metrics_listen") && told.contains(address),
            "{told}"
        );
        assert!(told.contains(';'), "no hint: {told}");
    }
}
