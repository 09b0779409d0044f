//! The cluster map's group while the runtime of namespace groups is blocked.

use meta::{FilesystemSpec, Start};
use tokio::runtime::{Builder, Handle, Runtime};
use tokio::sync::oneshot;

use super::*;

/// A runtime with one worker.
fn runtime() -> Runtime {
    let mut builder = Builder::new_multi_thread();
    builder.worker_threads(1).enable_all().build().unwrap()
}

/// Blocks the only worker of a runtime until the result is dropped.
async fn stick(runtime: &Handle) -> std::sync::mpsc::Sender<()> {
    let (release, released) = std::sync::mpsc::channel();
    let (stuck, is_stuck) = oneshot::channel();
    runtime.spawn(async move {
        stuck.send(()).unwrap();
        // This call blocks the thread.
        let _ = released.recv();
    });
    is_stuck.await.unwrap();
    release
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn heartbeats_and_leases_continue_while_the_filesystem_runtime_is_blocked() {
    let (dir, authority) = (tempfile::tempdir().unwrap(), Authority::new(CLUSTER));
    let groups = runtime();
    let on = Some(groups.handle().clone());
    let (path, start) = (dir.path(), Start::NewCluster);
    let (one, _) = Cluster::member_on(path, &authority, 1, start, on.clone()).await;
    let first = one.node().meta();
    first.register_device(device(1)).await.unwrap();
    let cluster = one.node().cluster_uuid();
    let mut members = vec![one];
    for id in [2, 3] {
        let start = Start::Join { cluster };
        let (member, spec) = Cluster::member_on(path, &authority, id, start, on.clone()).await;
        first.register_node(spec).await.unwrap();
        members.push(member);
    }
    until(async || (first.raft_status().voters.len() == 3).then_some(())).await;
    let spec = FilesystemSpec {
        name: "home".to_owned(),
        pool: "default".to_owned(),
    };
    let made = first.create_filesystem(Uuid::from_u128(7), spec).await;
    let made = made.unwrap();
    let leader = first.raft_status().leader.unwrap();
    let others = members.iter().filter(|one| one.node().id() != leader);
    let meta = others.map(|one| one.node().meta()).next().unwrap();
    let query = || vec![(made.id, namespace::Query::Statistics)];
    let answers = meta.filesystems(made.group).read(query()).await;
    assert_eq!(answers.unwrap().len(), 1);
    let term = meta.raft_status().term;

    let release = stick(groups.handle()).await;
    let reading = {
        let group = meta.filesystems(made.group);
        let query = query();
        tokio::spawn(async move { group.read(query).await })
    };
    let spec = VolumeSpec::new("disk", GIB);
    meta.create_volume(spec).await.unwrap();
    let lease = meta.grant_lease("disk", meta.node_id()).await.unwrap();
    for _ in 0..5 {
        let (volume, generation) = (lease.volume, lease.generation);
        let renewed = meta.renew_lease(volume, meta.node_id(), generation).await;
        renewed.unwrap();
        for member in &members {
            let mut heartbeats = member.node().meta().watch_heartbeat();
            heartbeats.mark_unchanged();
            heartbeats.changed().await.unwrap();
        }
    }
    assert!(!reading.is_finished(), "filesystem requests wait");
    let status = meta.raft_status();
    assert_eq!((status.leader, status.term), (Some(leader), term));
    drop(release);
    assert_eq!(reading.await.unwrap().unwrap().len(), 1);
    for mut member in members {
        member.server = None;
        member.node.take().unwrap().shutdown().await.unwrap();
    }
    groups.shutdown_background();
}
