use super::*;

#[test]
fn endpoints_are_unix_sockets() {
    assert_eq!(
        Client::new("unix:/a/b").unwrap().socket(),
        Path::new("/a/b")
    );
    assert_eq!(Client::new("/a/b").unwrap().socket(), Path::new("/a/b"));
    assert_eq!(Client::new("https://host:1").unwrap_err().exit_code(), 2);
    assert_eq!(Client::new("unix:").unwrap_err().exit_code(), 2);
}

#[tokio::test]
async fn silent_daemon_is_given_up_in_time() {
    let dir = tempfile::tempdir().expect("a directory");
    let socket = dir.path().join("admin.sock");
    // Takes connections, as the kernel does for a process that is stopped.
    let _listener = std::os::unix::net::UnixListener::bind(&socket).expect("a socket");
    let client = Client::at(socket).with_timeout(Some(Duration::from_millis(20)));
    let told = client.get::<()>("/v1/health").await.unwrap_err();
    assert_eq!(told.kind, Kind::Unreachable);
    assert!(
        told.error.ends_with("has not answered within 0.02 s"),
        "{told}"
    );
    let changed = client.delete("/v1/volumes/a").await.unwrap_err();
    assert!(changed.hint.unwrap().contains("may still be done"));
}

#[test]
fn names_are_encoded() {
    assert_eq!(encode("a/b c%"), "a%2Fb%20c%25");
}
