use std::path::Path;

use api::types::Attach;
use config::Preallocation;
use meta::VolumeSpec;

use crate::serve::node::Purpose;
use crate::serve::prepared::Prepared;
use crate::serve::starting::Starting;

use super::*;

const SIZE_BYTES: u64 = 64 << 20;

fn configured(data: &Path) -> Prepared {
    let config = config::resolve(config::File {
        data: Some(data.into()),
        device_size: Some("512M".parse().unwrap()),
        device_preallocation: Some(Preallocation::Off),
        threads: Some(1),
        ..config::File::default()
    });
    Prepared::new(config.unwrap())
}

fn copy(from: &Path, to: &Path) {
    std::fs::create_dir(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let to = to.join(entry.file_name());
        if entry.file_type().unwrap().is_dir() {
            copy(&entry.path(), &to);
        } else {
            std::fs::copy(entry.path(), to).unwrap();
        }
    }
}

/// A directory with a volume `cut` whose shrink was cut and a volume `disk` that is attached.
async fn prepared(data: &Path) {
    let node = started(configured(data), Purpose::Daemon).await.unwrap();
    for name in ["cut", "disk"] {
        let spec = VolumeSpec::new(name, SIZE_BYTES);
        node.meta.create_volume(spec).await.unwrap();
    }
    let socket = data.join("disk.sock").to_str().unwrap().to_owned();
    let attach = Attach {
        block: false,
        volume: "disk".to_owned(),
        socket,
        queues: 1,
        queue_size: None,
        read_only: false,
        pin_memory: true,
        incoming: false,
    };
    node.attach(attach).await.unwrap();
    node.meta
        .resize_volume("cut", SIZE_BYTES / 2, true)
        .await
        .unwrap();
    node.close().await;
}

async fn started(config: Prepared, purpose: Purpose) -> Result<Node> {
    let mut starting = Starting::new(&config);
    Node::start(config, purpose, &mut starting).await
}

#[tokio::test(flavor = "multi_thread")]
async fn what_was_cut_is_finished_after_the_start() {
    let dir = tempfile::tempdir().unwrap();
    prepared(dir.path()).await;
    let node = started(configured(dir.path()), Purpose::Daemon)
        .await
        .unwrap();
    assert!(node.leftover_problems().is_empty());
    node.finish_leftovers().await;
    let volume = node.meta.get_volume("cut").await.unwrap();
    assert_eq!(volume.stale_tail_end_bytes, None);
    assert!(node.leftovers.lock().is_empty());
    node.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_be_finished_is_told_and_stops_nobody() {
    let dir = tempfile::tempdir().unwrap();
    let data = dir.path().join("data");
    prepared(&data).await;
    // With an older database the store refuses to open the volume: it knows newer leases.
    let older = dir.path().join("older");
    copy(&data.join("meta"), &older);
    let node = started(configured(&data), Purpose::OneVolume)
        .await
        .unwrap();
    let cut = node.meta.get_volume("cut").await.unwrap();
    for _ in 0..3 {
        drop(node.open_volume(&cut).await.unwrap());
        node.close_volume(&cut).await;
    }
    node.close().await;
    // Its lock on the directory goes with it.
    drop(node);
    std::fs::remove_dir_all(data.join("meta")).unwrap();
    std::fs::rename(&older, data.join("meta")).unwrap();

    let node = started(configured(&data), Purpose::Daemon).await.unwrap();
    assert_eq!(node.health().await.unwrap().problems, []);
    node.finish_leftovers().await;
    let problems = node.health().await.unwrap().problems;
    assert!(
        problems.len() == 1 && problems[0].what.contains("the shrinking of volume 'cut'"),
        "{problems:?}"
    );
    // Each try takes a newer lease, until the store takes it.
    for _ in 0..4 {
        node.finish_leftovers().await;
    }
    assert_eq!(node.health().await.unwrap().problems, []);
    node.close().await;
}
