use std::os::unix::net::{UnixListener, UnixStream};

use rustix::net::{bind as bind_socket, socketpair};

use super::*;

fn options(dir: &tempfile::TempDir) -> SocketOptions {
    SocketOptions::new(dir.path().join("disk.sock"))
}

fn mode(path: &Path) -> u32 {
    fs::symlink_metadata(path).unwrap().mode() & 0o7777
}

#[test]
fn the_socket_has_the_mode_asked_for_and_goes_away_with_its_lock() {
    let dir = tempfile::tempdir().unwrap();
    let mut options = options(&dir);
    let listener = Listener::bind(&options).unwrap();
    assert_eq!(mode(&options.path), DEFAULT_MODE);
    UnixStream::connect(&options.path).unwrap();
    drop(listener);
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    options.mode = 0o660;
    let _listener = Listener::bind(&options).unwrap();
    assert_eq!(mode(&options.path), 0o660);
}

#[test]
fn the_owner_is_set() {
    let dir = tempfile::tempdir().unwrap();
    let mut options = options(&dir);
    let us = rustix::process::getuid().as_raw();
    options.owner = (Some(us), None);
    let _listener = Listener::bind(&options).unwrap();
    assert_eq!(fs::symlink_metadata(&options.path).unwrap().uid(), us);
}

#[test]
fn a_path_on_which_somebody_listens_is_left_alone() {
    let dir = tempfile::tempdir().unwrap();
    let options = options(&dir);
    let theirs = UnixListener::bind(&options.path).unwrap();
    assert!(
        matches!(Listener::bind(&options), Err(SocketError::InUse(path)) if path == options.path)
    );
    UnixStream::connect(&options.path).unwrap();
    drop(theirs);
}

#[test]
fn a_path_with_a_full_backlog_counts_as_used() {
    let dir = tempfile::tempdir().unwrap();
    let options = options(&dir);
    let theirs = stream_socket().unwrap();
    let address = SocketAddrUnix::new(options.path.as_path()).unwrap();
    bind_socket(&theirs, &address).unwrap();
    listen(&theirs, 0).unwrap();
    let _waiting = UnixStream::connect(&options.path).unwrap();
    assert!(matches!(
        Listener::bind(&options),
        Err(SocketError::InUse(_))
    ));
}

#[test]
fn two_of_us_do_not_share_a_path() {
    let dir = tempfile::tempdir().unwrap();
    let options = options(&dir);
    let _first = Listener::bind(&options).unwrap();
    assert!(matches!(
        Listener::bind(&options),
        Err(SocketError::Locked(..))
    ));
    UnixStream::connect(&options.path).unwrap();
}

#[test]
fn a_socket_that_a_killed_process_left_behind_is_replaced() {
    let dir = tempfile::tempdir().unwrap();
    let options = options(&dir);
    // Dropping a standard listener leaves its path behind, as a kill does.
    drop(UnixListener::bind(&options.path).unwrap());
    fs::write(dir.path().join("disk.sock.lock"), "").unwrap();
    let _listener = Listener::bind(&options).unwrap();
    UnixStream::connect(&options.path).unwrap();
}

#[test]
fn a_socket_that_somebody_else_put_in_our_place_is_not_removed() {
    let dir = tempfile::tempdir().unwrap();
    let options = options(&dir);
    let listener = Listener::bind(&options).unwrap();
    fs::remove_file(&options.path).unwrap();
    let _theirs = UnixListener::bind(&options.path).unwrap();
    drop(listener);
    UnixStream::connect(&options.path).unwrap();
}

#[test]
fn what_is_not_a_socket_is_kept() {
    let dir = tempfile::tempdir().unwrap();
    let options = options(&dir);
    fs::write(&options.path, "precious").unwrap();
    assert!(matches!(
        Listener::bind(&options),
        Err(SocketError::NotASocket(_))
    ));
    assert_eq!(fs::read_to_string(&options.path).unwrap(), "precious");
}

#[test]
fn a_directory_that_is_missing_or_a_path_that_is_too_long_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let missing = dir.path().join("missing");
    let error = Listener::bind(&SocketOptions::new(missing.join("disk.sock"))).unwrap_err();
    assert!(
        matches!(&error, SocketError::NoDirectory(path) if *path == missing),
        "{error}"
    );
    let long = dir.path().join("x".repeat(120));
    let error = Listener::bind(&SocketOptions::new(&long)).unwrap_err();
    assert!(matches!(error, SocketError::TooLong(path) if path == long));
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
}

#[test]
fn a_directory_in_which_nothing_can_be_made_is_an_error() {
    // Not even the superuser makes files there.
    let error = Listener::bind(&SocketOptions::new("/proc/disk.sock")).unwrap_err();
    assert!(error.to_string().contains("/proc/disk.sock"), "{error}");
}

#[test]
fn descriptors_that_are_handed_over_are_recognised() {
    let dir = tempfile::tempdir().unwrap();
    let listening = UnixListener::bind(dir.path().join("a")).unwrap();
    assert!(matches!(
        Endpoint::from_fd(listening.into()),
        Ok(Endpoint::Listening(_))
    ));
    let (ours, theirs) = UnixStream::pair().unwrap();
    assert!(matches!(
        Endpoint::from_fd(ours.into()),
        Ok(Endpoint::Connected(_))
    ));
    drop(theirs);
    let unconnected = stream_socket().unwrap();
    assert!(matches!(
        Endpoint::from_fd(unconnected),
        Err(SocketError::WrongDescriptor)
    ));
    let (datagram, _peer) = socketpair(
        AddressFamily::UNIX,
        SocketType::DGRAM,
        SocketFlags::CLOEXEC,
        None,
    )
    .unwrap();
    assert!(matches!(
        Endpoint::from_fd(datagram),
        Err(SocketError::WrongDescriptor)
    ));
    let file = File::open("/dev/null").unwrap();
    assert!(matches!(
        Endpoint::from_fd(file.into()),
        Err(SocketError::WrongDescriptor)
    ));
}
