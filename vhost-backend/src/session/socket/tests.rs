use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::net::{SocketAddrUnix, bind as bind_socket, listen, socketpair};

use super::*;

fn options(dir: &tempfile::TempDir) -> SocketOptions {
    SocketOptions::new(dir.path().join("disk.sock"))
}

fn mode(path: &Path) -> u32 {
    fs::symlink_metadata(path).unwrap().mode() & 0o7777
}

#[test]
fn socket_has_the_requested_mode_and_is_removed_with_its_lock() {
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

/// A user that is not the one of this test, whether it is there or not.
const OTHER: u32 = 65_000;

#[test]
fn the_owner_is_set() {
    let dir = tempfile::tempdir().unwrap();
    let mut options = options(&dir);
    let us = rustix::process::geteuid();
    // Only root gives a socket away; for anybody else this says no more than that nothing fails.
    let owner = match us.is_root() {
        true => (OTHER, OTHER + 1),
        false => (us.as_raw(), rustix::process::getegid().as_raw()),
    };
    options.owner = (Some(owner.0), Some(owner.1));
    let _listener = Listener::bind(&options).unwrap();
    let found = fs::symlink_metadata(&options.path).unwrap();
    assert_eq!((found.uid(), found.gid()), owner);
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
fn two_sessions_do_not_share_a_path() {
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
fn missing_directory_or_too_long_path_is_named() {
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
fn a_path_of_any_length_that_the_kernel_allows_is_served() {
    let mut builder = tempfile::Builder::new();
    let dir = builder
        .prefix("p")
        .rand_bytes(4)
        .tempdir_in("/tmp")
        .unwrap();
    let room = 107 - 1 - dir.path().as_os_str().len();
    for len in 1..=room {
        let mut options = SocketOptions::new(dir.path().join("s".repeat(len)));
        options.mode = 0o660;
        let listener = Listener::bind(&options).unwrap();
        assert_eq!(mode(&options.path), 0o660);
        UnixStream::connect(&options.path).unwrap();
        assert!(listener.accept().unwrap().is_some());
        fs::remove_file(&options.path).unwrap();
        assert!(listener.restore().unwrap());
        UnixStream::connect(&options.path).unwrap();
        drop(listener);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    }
    let long = SocketOptions::new(dir.path().join("s".repeat(room + 1)));
    let error = Listener::bind(&long).unwrap_err();
    assert!(error.to_string().contains("107 bytes"), "{error}");
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

/// Sockets that are made while somebody swaps their name, enough for a few to meet the moment between `bind`
/// and the mode.
const SWAPPED_BINDS: usize = 5000;

#[test]
fn a_link_planted_at_the_path_leads_to_no_other_file() {
    let dir = tempfile::tempdir().unwrap();
    let (victim, mut options) = (dir.path().join("victim"), options(&dir));
    options.mode = 0o666;
    fs::write(&victim, "").unwrap();
    fs::set_permissions(&victim, fs::Permissions::from_mode(0o600)).unwrap();
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let prepared = dir.path().join("prepared");
            while !done.load(Ordering::Relaxed) {
                let _ = symlink(&victim, &prepared);
                while !done.load(Ordering::Relaxed) && !options.path.exists() {
                    std::hint::spin_loop();
                }
                let _ = fs::rename(&prepared, &options.path);
            }
        });
        for _ in 0..SWAPPED_BINDS {
            drop(Listener::bind(&options));
            let _ = fs::remove_file(&options.path);
        }
        done.store(true, Ordering::Relaxed);
    });
    assert_eq!(mode(&victim), 0o600);
}

#[test]
fn a_lock_file_that_is_no_file_is_refused_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let options = options(&dir);
    let lock = dir.path().join("disk.sock.lock");
    // What a link that is followed would have made.
    let elsewhere = dir.path().join("elsewhere");
    let plants: [fn(&Path); 5] = [
        |lock| {
            let mode = Mode::RUSR | Mode::WUSR;
            rustix::fs::mknodat(rustix::fs::CWD, lock, FileType::Fifo, mode, 0).unwrap();
        },
        |lock| drop(UnixListener::bind(lock).unwrap()),
        |lock| symlink("/dev/null", lock).unwrap(),
        |lock| symlink("elsewhere", lock).unwrap(),
        |lock| fs::create_dir(lock).unwrap(),
    ];
    for plant in plants {
        plant(&lock);
        // A thread of its own: to open a FIFO may take for ever.
        let (told, tells) = std::sync::mpsc::channel();
        let asked = options.clone();
        std::thread::spawn(move || drop(told.send(Listener::bind(&asked))));
        let bound = tells.recv_timeout(std::time::Duration::from_secs(10));
        let error = bound.expect("it waits for nobody").unwrap_err();
        assert!(
            matches!(&error, SocketError::LockNotAFile(path) if *path == lock),
            "{error}"
        );
        assert!(lock.symlink_metadata().is_ok(), "it is not ours to remove");
        assert!(!elsewhere.exists(), "the link was followed");
        let _ = fs::remove_file(&lock).or_else(|_| fs::remove_dir(&lock));
    }
}

#[test]
fn a_removed_socket_is_made_again() {
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("run");
    fs::create_dir(&run).unwrap();
    let mut options = SocketOptions::new(run.join("disk.sock"));
    options.mode = 0o660;
    let listener = Listener::bind(&options).unwrap();
    assert!(!listener.restore().unwrap());
    let meet = || {
        let front_end = UnixStream::connect(&options.path).unwrap();
        assert!(listener.accept().unwrap().is_some());
        drop(front_end);
    };
    // The socket alone, with its lock, and with its directory.
    let lock = run.join("disk.sock.lock");
    let removals: [&dyn Fn(); 3] = [
        &|| fs::remove_file(&options.path).unwrap(),
        &|| {
            fs::remove_file(&options.path).unwrap();
            fs::remove_file(&lock).unwrap();
        },
        &|| {
            fs::remove_dir_all(&run).unwrap();
            let error = listener.restore().unwrap_err();
            assert!(matches!(error, SocketError::NoDirectory(_)), "{error}");
            fs::create_dir(&run).unwrap();
        },
    ];
    for remove in removals {
        remove();
        assert!(listener.restore().unwrap());
        assert_eq!(mode(&options.path), 0o660);
        meet();
        assert!(!listener.restore().unwrap());
        assert!(matches!(
            Listener::bind(&options),
            Err(SocketError::Locked(..))
        ));
    }
    // Somebody else's socket is left to them.
    fs::remove_file(&options.path).unwrap();
    let theirs = UnixListener::bind(&options.path).unwrap();
    assert!(matches!(listener.restore(), Err(SocketError::InUse(_))));
    drop(theirs);
    assert!(listener.restore().unwrap());
    drop(listener);
    assert_eq!(fs::read_dir(&run).unwrap().count(), 0);
}
