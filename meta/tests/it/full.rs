//! A full file system under the metadata: what is there is read, nothing is half done, and room is all that
//! is needed.

use std::ffi::CString;
use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::time::{Duration, Instant};

use crate::common::{GIB, device, open, open_with_device, until};
use meta::{Meta, MetaError, VolumeSpec};

/// Size of the file system: the database, what RocksDB reserves for its log, and a little.
const SIZE: &str = "size=24m";
/// RocksDB looks for room every five seconds; a service that is not back by then hangs.
const BACK_MAX: Duration = Duration::from_secs(60);
/// More commands than fit what RocksDB has reserved.
const COMMANDS_MAX: u32 = 100_000;

/// Mounts a small file system at `dir` for this thread, and those it starts, only.
fn mount_small(dir: &Path) {
    let path = CString::new(dir.to_str().unwrap()).unwrap();
    let options = CString::new(SIZE).unwrap();
    // SAFETY: plain system calls; all pointers are to strings that live until they return.
    let mounted = unsafe {
        libc::unshare(libc::CLONE_NEWNS) == 0
            && libc::mount(
                std::ptr::null(),
                c"/".as_ptr(),
                std::ptr::null(),
                libc::MS_REC | libc::MS_PRIVATE,
                std::ptr::null(),
            ) == 0
            && libc::mount(
                c"none".as_ptr(),
                path.as_ptr(),
                c"tmpfs".as_ptr(),
                0,
                options.as_ptr().cast(),
            ) == 0
    };
    let error = std::io::Error::last_os_error();
    assert!(
        mounted,
        "cannot mount a tmpfs ({error}): run this test as root"
    );
}

/// Runs on a small file system of its own.
fn on_small_file_system(test: impl AsyncFnOnce(&Path)) {
    let dir = tempfile::tempdir().unwrap();
    mount_small(dir.path());
    // After the mount, so that all threads see it.
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(test(dir.path()));
}

/// What some commands need, and is far below what counts as nearly full.
const LITTLE_BYTES: u64 = 64 << 10;

/// Takes all room that is left but a little.
fn nearly_fill(path: &Path) {
    fill(path);
    let file = File::options().write(true).open(path).unwrap();
    let len = file.metadata().unwrap().len();
    file.set_len(len - LITTLE_BYTES).unwrap();
}

/// Takes all room that is left.
fn fill(path: &Path) {
    let mut file = File::create(path).unwrap();
    for size in [1 << 20, 4096, 1] {
        while file.write_all(&vec![7; size]).is_ok() {}
    }
}

/// Gives commands that make nothing new until one finds no space.
async fn exhaust(meta: &Meta) {
    for _ in 0..COMMANDS_MAX {
        match meta.register_device(device(1)).await {
            Ok(_) => {}
            Err(MetaError::NoSpace { begun: true, .. }) => return,
            Err(error) => panic!("{error}"),
        }
    }
    panic!("there is room for ever");
}

#[test]
fn a_full_file_system_refuses_what_is_new_and_harms_nothing() {
    on_small_file_system(async |dir| {
        let data = dir.join("meta");
        let node = open_with_device(&data).await;
        let meta = node.meta();
        meta.create_volume(VolumeSpec::new("a", GIB)).await.unwrap();
        assert_eq!(meta.problem(), None);
        nearly_fill(&dir.join("full"));
        let refused = meta.create_volume(VolumeSpec::new("b", GIB)).await;
        assert!(matches!(
            refused,
            Err(MetaError::NoSpace { begun: false, .. })
        ));
        let told = refused.unwrap_err().to_string();
        assert!(told.contains("free some space") && told.contains(data.to_str().unwrap()));
        assert!(meta.problem().unwrap().contains("nearly full"));
        // What gives something back still goes.
        meta.delete_volume("a").await.unwrap();
        std::fs::remove_file(dir.join("full")).unwrap();
        assert_eq!(meta.problem(), None);
        meta.create_volume(VolumeSpec::new("b", GIB)).await.unwrap();
        node.shutdown().await.unwrap();
    });
}

#[test]
fn the_service_goes_on_by_itself_when_there_is_room_again() {
    on_small_file_system(async |dir| {
        let data = dir.join("meta");
        let node = open_with_device(&data).await;
        let meta = node.meta();
        meta.create_volume(VolumeSpec::new("a", GIB)).await.unwrap();
        fill(&dir.join("full"));
        exhaust(&meta).await;
        let problem = meta.problem().unwrap();
        assert!(
            problem.contains("waits") && problem.contains("free some space"),
            "{problem}"
        );
        let volumes = meta.list_volumes().await.unwrap();
        assert_eq!(volumes.len(), 1);
        let refused = meta.delete_volume("a").await;
        assert!(matches!(
            refused,
            Err(MetaError::NoSpace { begun: false, .. })
        ));

        std::fs::remove_file(dir.join("full")).unwrap();
        let end = Instant::now() + BACK_MAX;
        while let Some(problem) = meta.problem() {
            assert!(Instant::now() < end, "{problem}");
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        meta.create_volume(VolumeSpec::new("b", GIB)).await.unwrap();
        let before = meta.list_volumes().await.unwrap();
        assert_eq!(before.len(), 2);
        node.shutdown().await.unwrap();
        let node = open(&data).await;
        assert_eq!(node.meta().list_volumes().await.unwrap(), before);
        node.shutdown().await.unwrap();
    });
}

#[test]
fn node_stops_on_a_full_file_system_and_starts_when_it_has_room() {
    on_small_file_system(async |dir| {
        let data = dir.join("meta");
        let node = open_with_device(&data).await;
        let meta = node.meta();
        meta.create_volume(VolumeSpec::new("a", GIB)).await.unwrap();
        fill(&dir.join("full"));
        exhaust(&meta).await;
        // It may say that it could not flush.
        let _ = tokio::time::timeout(BACK_MAX, node.shutdown())
            .await
            .expect("it ends");
        drop(meta);
        std::fs::remove_file(dir.join("full")).unwrap();
        let node = open(&data).await;
        assert_eq!(node.meta().list_volumes().await.unwrap().len(), 1);
        node.shutdown().await.unwrap();
    });
}

/// The space that was kept is for that: without it nobody could delete anything, or vote.
#[test]
fn a_node_starts_votes_and_deletes_on_a_full_file_system() {
    on_small_file_system(async |dir| {
        let data = dir.join("meta");
        let node = open_with_device(&data).await;
        let meta = node.meta();
        meta.create_volume(VolumeSpec::new("a", GIB)).await.unwrap();
        let ballast = data.join("ballast");
        until(async || ballast.exists().then_some(())).await;
        node.shutdown().await.unwrap();
        drop(meta);
        fill(&dir.join("full"));
        let node = open(&data).await;
        assert!(!ballast.exists());
        let meta = node.meta();
        assert!(meta.problem().unwrap().contains("nearly full"));
        let volume = meta.delete_volume("a").await.unwrap().id;
        meta.volume_data_dropped(volume).await.unwrap();
        let refused = meta.create_volume(VolumeSpec::new("b", GIB)).await;
        assert!(matches!(
            refused,
            Err(MetaError::NoSpace { begun: false, .. })
        ));
        std::fs::remove_file(dir.join("full")).unwrap();
        until(async || ballast.exists().then_some(())).await;
        meta.create_volume(VolumeSpec::new("b", GIB)).await.unwrap();
        node.shutdown().await.unwrap();
    });
}
