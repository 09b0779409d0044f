use std::os::unix::net::UnixListener;

use tokio::io::{AsyncReadExt, AsyncWriteExt};

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

/// A socket that takes connections, as the kernel does for a process that is stopped.
fn silent(dir: &Path, timeout: Duration) -> (UnixListener, Client) {
    let socket = dir.join("admin.sock");
    let listener = UnixListener::bind(&socket).expect("a socket");
    (listener, Client::at(socket).with_timeout(Some(timeout)))
}

#[tokio::test]
async fn silent_daemon_is_given_up_in_time() {
    let dir = tempfile::tempdir().expect("a directory");
    let (_listener, client) = silent(dir.path(), Duration::from_millis(20));
    let told = client.get::<()>("/v1/health").await.unwrap_err();
    assert_eq!(told.kind, Kind::Unreachable);
    assert!(
        told.error.ends_with("has not answered within 0.02 s"),
        "{told}"
    );
    let changed = client.delete("/v1/volumes/a").await.unwrap_err();
    assert!(changed.hint.unwrap().contains("may still be done"));
}

#[tokio::test]
async fn a_stream_is_waited_for_as_long_as_the_daemon_answers() {
    let dir = tempfile::tempdir().expect("a directory");
    let (listener, client) = silent(dir.path(), Duration::from_millis(500));
    let endless = std::future::pending::<()>();
    let told = client.while_it_answers(endless).await.unwrap_err();
    assert_eq!(told.kind, Kind::Unreachable);

    listener.set_nonblocking(true).expect("a socket");
    let listener = tokio::net::UnixListener::from_std(listener).expect("a socket");
    tokio::spawn(async move {
        // The first is that of the command that was given up.
        let _ = listener.accept().await?;
        loop {
            let (mut stream, _) = listener.accept().await?;
            let mut request = Vec::new();
            while !request.ends_with(b"\r\n\r\n") && stream.read_buf(&mut request).await? > 0 {}
            stream
                .write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
                .await?;
        }
        #[expect(unreachable_code, reason = "it says what the errors are")]
        Ok::<(), std::io::Error>(())
    });
    let work = tokio::time::sleep(Duration::from_millis(1200));
    client.while_it_answers(work).await.expect("it answers");
}

#[test]
fn names_are_encoded() {
    assert_eq!(encode("a/b c%"), "a%2Fb%20c%25");
}
