//! Changes that an earlier process left unfinished.

use std::path::Path;
use std::sync::Arc;

use api::failure::{Failure, Kind};
use meta::VolumeSpec;
use service::Service;
use service_testing::TestNode;
use volumes::Volumes;

const SIZE_BYTES: u64 = 64 << 20;

/// Opens the node in a directory where the shrink of volume `cut` was interrupted.
async fn interrupted(data: &Path) -> (TestNode, Arc<Volumes>) {
    let node = TestNode::open(data).await;
    let meta = &node.cluster.meta;
    let spec = VolumeSpec::new("cut", SIZE_BYTES);
    meta.create_volume(spec).await.unwrap();
    let cut = meta.resize_volume("cut", SIZE_BYTES / 2, true).await;
    assert!(cut.unwrap().stale_tail_end_bytes.is_some());
    node.close().await;
    let node = TestNode::open(data).await;
    let volumes = node.volumes();
    (node, volumes)
}

#[tokio::test(flavor = "multi_thread")]
async fn an_interrupted_shrink_is_finished_after_the_start() {
    let dir = tempfile::tempdir().unwrap();
    let (node, volumes) = interrupted(dir.path()).await;
    Arc::clone(&volumes).start().await.unwrap();
    assert_eq!(volumes.problems().await, []);
    volumes.finish_leftovers().await;
    let volume = node.cluster.meta.get_volume("cut").await.unwrap();
    assert_eq!(volume.stale_tail_end_bytes, None);
    volumes.stop().await;
    node.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failure_to_finish_is_a_problem_until_it_succeeds() {
    let dir = tempfile::tempdir().unwrap();
    let (node, volumes) = interrupted(dir.path()).await;
    let cut = node.cluster.meta.get_volume("cut").await.unwrap();
    volumes.left_over(&cut, Failure::plain(Kind::Failed, "the device is gone"));
    let problems = volumes.problems().await;
    let whats: Vec<&str> = problems
        .iter()
        .map(|one| one.problem.what.as_str())
        .collect();
    assert!(
        matches!(whats[..], [what] if what.contains("the shrinking of volume 'cut'")
            && what.contains("the device is gone")),
        "{whats:?}"
    );
    volumes.finish_leftovers().await;
    assert_eq!(volumes.problems().await, []);
    node.close().await;
}
