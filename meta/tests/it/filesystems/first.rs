//! A node that was alone becomes the first of a cluster, with all that it has.

use meta::{OpenError, first};

use super::*;
use crate::common::{device, until_three_vote};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_made_alone_is_there_on_all_three() {
    let mut cluster = Cluster::empty(Box::new(|transport| transport));
    let dir = cluster.dir_of(1);
    assert_eq!(first::look(&dir).unwrap(), None);
    assert!(!dir.exists(), "nothing is made by looking");
    let alone = open_with_device(&dir).await;
    let meta = alone.meta();
    let volume = meta
        .create_volume(VolumeSpec::new("disk", GIB))
        .await
        .unwrap();
    let lease = meta.grant_lease("disk", NodeId(1)).await.unwrap();
    let tree = create(&meta, "tree").await.unwrap();
    let uuid = alone.cluster_uuid();
    let busy = first::look(&dir);
    assert!(busy.is_err(), "{busy:?}");
    alone.shutdown().await.unwrap();

    let found = first::look(&dir).unwrap().unwrap();
    assert_eq!((found.cluster, found.node), (uuid, NodeId(1)));
    assert_eq!(found.devices.len(), 1);
    // Looking has changed nothing: it still starts alone.
    open(&dir).await.shutdown().await.unwrap();

    cluster.found(uuid, Level::KNOWN).await;
    let one = cluster.nodes[0].meta();
    assert_eq!(one.get_volume("disk").await.unwrap(), volume);
    assert_eq!(one.get_lease(volume.id).await.unwrap(), Some(lease));
    one.register_device(device(1)).await.unwrap();
    for id in [2, 3] {
        let spec = cluster.join(id, Level::KNOWN).await;
        one.register_node(spec).await.unwrap();
    }
    until_three_vote(&cluster.nodes).await;
    let three = cluster.nodes[2].meta();
    until(async || three.get_volume("disk").await.is_ok().then_some(())).await;
    // The pool is as it was: copies are made when somebody says so.
    assert_eq!(
        three.get_pool(meta::DEFAULT_POOL).await.unwrap().replicas,
        1
    );

    // The names of the filesystem get other voters, too.
    let host = Host::open(&three, &tree).await;
    make_many(&host, 1, 1..=5).await;
    until(async || {
        let known = status(&three, &tree)?;
        (known.voters.len() == 3).then_some(())
    })
    .await;

    for id in [1, 2, 3] {
        cluster.stop(id).await;
    }
    let several = first::look(&dir);
    assert!(
        matches!(
            several,
            Err(meta::recovery::RecoveryError::Open(
                OpenError::OneOfSeveral { .. }
            ))
        ),
        "{several:?}"
    );
    // It starts as one of several from now on, and needs the others.
    cluster.found(uuid, Level::KNOWN).await;
    cluster.start_again(2, Level::KNOWN).await;
    let two = cluster.nodes[1].meta();
    until(async || two.get_volume("disk").await.is_ok().then_some(())).await;
    cluster.end().await;
}
