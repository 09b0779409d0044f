//! What leaders of namespace groups clear away, and the attachments and segments of filesystems.

use std::time::Instant;

use meta::{AttachmentKey, FilesystemAttachmentSpec, HEARTBEAT_LEASE, MetaNode, VolumeState};
use namespace::{BLOCK, Commit, Extent, FilesystemId, Openers, Orphan, SegmentId};

use super::*;

impl Host {
    /// Has an operation done as the request of a slot with this number.
    async fn apply(&self, number: (u16, u64), operation: Operation) -> Result<Outcome, Error> {
        let asked = vec![(self.filesystem.id, request(self.session, number, operation))];
        self.group.apply(asked).await.unwrap().remove(0)
    }

    async fn sessions(&self) -> Vec<SessionId> {
        let query = Query::Sessions {
            from: SessionId(0),
            max: 100,
        };
        match self.read(query).await {
            Ok(Answer::Sessions(found)) => found.into_iter().map(|(id, _)| id).collect(),
            other => panic!("{other:?}"),
        }
    }

    async fn orphans(&self) -> Vec<(Ino, Orphan)> {
        let query = Query::Orphans {
            from: Ino(0),
            max: 100,
        };
        match self.read(query).await {
            Ok(Answer::Orphans(found)) => found,
            other => panic!("{other:?}"),
        }
    }

    /// Inodes and freed bytes; nothing if the filesystem is not there.
    async fn statistics(&self) -> Option<(u64, u64)> {
        match self.read(Query::Statistics).await {
            Ok(Answer::Statistics(found)) => found.map(|found| (found.inodes, found.freed_bytes)),
            other => panic!("{other:?}"),
        }
    }

    /// Makes a file as a slot's second request, and gives it so many extents by its first and later ones.
    async fn make_sparse(&self, slot: u16, name: &str, extents: u64) -> (Ino, SegmentId) {
        let Ok(Outcome::Segment(segment)) = self.apply((slot, 1), Operation::NewSegment).await
        else {
            panic!("a segment is made");
        };
        let Ok(Outcome::Inode(file)) = self.make(slot, 2, name).await else {
            panic!("a file is made");
        };
        let block = |at: u64| Extent {
            offset: at * 2 * BLOCK,
            length: BLOCK,
            segment,
            address: at * BLOCK,
            epoch: 1,
        };
        let commit = Operation::Commit(Commit {
            ino: file.ino,
            expected: Some(file.change),
            extents: (0..extents).map(block).collect(),
            size: extents * 2 * BLOCK,
            mtime: Time::default(),
            clear_privileges: false,
        });
        self.apply((slot, 3), commit).await.unwrap();
        (file.ino, segment)
    }

    async fn unlink(&self, number: (u16, u64), name: &str, own: bool) {
        let unlink = Operation::Unlink {
            parent: Ino::ROOT,
            name: name.as_bytes().to_vec(),
            openers: Openers::All { own },
        };
        self.apply(number, unlink).await.unwrap();
    }
}

pub(super) fn mount(filesystem: &str, node: u64) -> FilesystemAttachmentSpec {
    FilesystemAttachmentSpec {
        filesystem: filesystem.to_owned(),
        node: NodeId(node),
        socket: format!("/run/{filesystem}"),
        tag: "tree".to_owned(),
        queues: 1,
        read_only: false,
    }
}

fn is_refused(result: Result<impl std::fmt::Debug, MetaError>, words: &str) -> bool {
    let refused = result.unwrap_err();
    assert!(matches!(refused, MetaError::Refused(_)), "{refused}");
    refused.to_string().contains(words)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_deleted_file_that_nobody_has_open_is_emptied_in_the_background() {
    let dir = tempfile::tempdir().unwrap();
    let node = open_with_device(dir.path()).await;
    let made = create(&node.meta(), "home").await.unwrap();
    let host = Host::open(&node.meta(), &made).await;
    let (large, _) = host.make_sparse(0, "large", 3000).await;
    let (open, _) = host.make_sparse(1, "open", 3).await;
    host.unlink((0, 4), "large", false).await;
    host.unlink((1, 4), "open", true).await;
    // The root and the one that is open.
    until(async || {
        let left = host.statistics().await == Some((2, 3000 * BLOCK));
        left.then_some(())
    })
    .await;
    assert_eq!(host.read(Query::Inode(large)).await, Err(Error::Stale));
    let held = Query::Held {
        session: host.session,
        from: Ino(0),
        max: 9,
    };
    assert_eq!(host.read(held).await, Ok(Answer::Held(vec![open])));
    let release = Operation::ReleaseOrphan {
        ino: open,
        session: host.session,
    };
    host.apply((1, 5), release).await.unwrap();
    assert_eq!(host.statistics().await, Some((1, 3003 * BLOCK)));
    node.shutdown().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_session_of_a_former_start_ends_and_lets_go_of_what_it_held() {
    let dir = tempfile::tempdir().unwrap();
    let node = open_with_device(dir.path()).await;
    let made = create(&node.meta(), "home").await.unwrap();
    let former = Host::open(&node.meta(), &made).await;
    former.make_sparse(0, "file", 3).await;
    former.unlink((0, 4), "file", true).await;
    assert!(matches!(former.orphans().await[..], [(_, Orphan::Held(_))]));
    node.shutdown().await.unwrap();

    let node = open(dir.path()).await;
    let host = Host::open(&node.meta(), &made).await;
    assert_ne!(host.session, former.session);
    until(async || (host.sessions().await == [host.session]).then_some(())).await;
    let late = Host {
        session: former.session,
        ..host.clone()
    };
    assert_eq!(late.make(5, 1, "late").await, Err(Error::Stale));
    until(async || (host.statistics().await == Some((1, 3 * BLOCK))).then_some(())).await;
    node.shutdown().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_silent_hosts_session_ends_when_it_cannot_serve_any_more() {
    let mut cluster = Cluster::of(3, Level::KNOWN, Box::new(|way| way)).await;
    let meta = cluster.nodes[0].meta();
    let spec = NodeSpec {
        roles: [Role::Host].into(),
        ..cluster.join(4, Level::KNOWN).await
    };
    meta.register_node(spec).await.unwrap();
    let made = create(&meta, "home").await.unwrap();
    let stays = Host::open(&meta, &made).await;
    let mounted = meta.create_filesystem_attachment(mount("home", 4)).await;
    mounted.unwrap();
    let silent = Host::open(&cluster.nodes[3].meta(), &made).await;
    let (file, _) = stays.make_sparse(0, "file", 2).await;
    stays.unlink((0, 4), "file", false).await;
    let held = Orphan::Held(vec![silent.session]);
    assert_eq!(stays.orphans().await, [(file, held)]);
    let since = Instant::now();
    cluster.stop(4).await;
    until(async || (stays.sessions().await == [stays.session]).then_some(())).await;
    assert!(since.elapsed() >= HEARTBEAT_LEASE, "{:?}", since.elapsed());
    until(async || stays.orphans().await.is_empty().then_some(())).await;
    cluster.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_deleted_filesystem_leaves_nothing_but_what_storage_gives_back() {
    let dir = tempfile::tempdir().unwrap();
    let node = open_with_device(dir.path()).await;
    let meta = node.meta();
    let made = create(&meta, "home").await.unwrap();
    let host = Host::open(&meta, &made).await;
    let (file, segment) = host.make_sparse(20, "file", 500).await;
    make_many(&host, 8, 1..=40).await;
    let volume = meta.create_segment_volume(made.id, segment, GIB).await;
    let volume = volume.unwrap();
    let again = meta.create_segment_volume(made.id, segment, GIB).await;
    assert_eq!(again.unwrap(), volume, "said twice");
    let found = meta.segment_volume(made.id, segment).await.unwrap();
    assert_eq!(found.as_ref(), Some(&volume));
    meta.grant_lease(&volume.name, meta.node_id())
        .await
        .unwrap();
    let mounted = meta.create_filesystem_attachment(mount("home", 1)).await;
    let mounted = mounted.unwrap();
    let in_use = meta.delete_filesystem("home").await;
    assert!(is_refused(in_use, "/run/home"));
    let attachment = AttachmentKey::Id(mounted.id);
    meta.delete_filesystem_attachment(attachment).await.unwrap();

    assert_eq!(meta.delete_filesystem("home").await.unwrap().id, made.id);
    let again = meta.delete_filesystem("home").await;
    assert!(again.is_ok() || is_refused(again, "no filesystem"));
    until(async || {
        let left = meta.list_filesystems().await.unwrap();
        left.is_empty().then_some(())
    })
    .await;
    assert!(meta.map().filesystem("home").is_none());
    assert_eq!(host.statistics().await, None);
    assert_eq!(host.read(Query::Inode(file)).await, Err(Error::Stale));
    assert_eq!(host.make(9, 1, "late").await, Err(Error::Stale));
    let found = meta.segment_volume(made.id, segment).await.unwrap();
    assert_eq!(found.unwrap().state, VolumeState::Deleting);
    // Under its name there is another one, which has nothing of it.
    let next = create(&meta, "home").await.unwrap();
    assert!(next.id > made.id);
    let host = Host::open(&meta, &next).await;
    assert_eq!(host.statistics().await, Some((1, 0)));
    node.shutdown().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_deletion_goes_on_where_a_lost_leader_left_it() {
    let mut cluster = Cluster::of(3, Level::KNOWN, Box::new(|way| way)).await;
    let made = create(&cluster.nodes[1].meta(), "home").await.unwrap();
    let leader = until(async || {
        let status = status(&cluster.nodes[0].meta(), &made)?;
        (status.voters.len() == 3).then_some(status.leader)?
    })
    .await;
    let other = cluster.nodes.iter().find(|node| node.id() != leader);
    let meta = other.map(MetaNode::meta).unwrap();
    let host = Host::open(&meta, &made).await;
    make_many(&host, 64, 1..=40).await;
    for segment in 1..=5 {
        let made = meta.create_segment_volume(made.id, SegmentId(segment), GIB);
        made.await.unwrap();
    }
    meta.delete_filesystem("home").await.unwrap();
    cluster.stop(leader.0).await;
    until(async || {
        let left = meta.list_filesystems().await.ok()?;
        left.is_empty().then_some(())
    })
    .await;
    assert_eq!(host.statistics().await, None);
    let volumes = meta.list_volumes().await.unwrap();
    let is_going = |volume: &meta::Volume| volume.state == VolumeState::Deleting;
    assert!(volumes.len() == 5 && volumes.iter().all(is_going));
    cluster.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_host_reaches_the_segments_of_what_is_attached_to_it() {
    let mut cluster = Cluster::of(2, Level::KNOWN, Box::new(|way| way)).await;
    let meta = cluster.nodes[0].meta();
    let host = NodeId(3);
    let spec = NodeSpec {
        roles: [Role::Host].into(),
        ..cluster.join(3, Level::KNOWN).await
    };
    meta.register_node(spec).await.unwrap();
    let (home, other) = (
        create(&meta, "home").await.unwrap(),
        create(&meta, "other").await.unwrap(),
    );
    let make = async |filesystem: FilesystemId, segment: u64| {
        let segment = SegmentId(segment);
        let made = meta.create_segment_volume(filesystem, segment, GIB).await;
        made.unwrap().layers
    };
    let (first, hidden) = (make(home.id, 1).await, make(other.id, 1).await);
    let open = async || {
        let nodes = [host].into();
        let mut open = meta.applied().open_layers(&nodes).unwrap();
        open.remove(&host).unwrap_or_default()
    };
    assert!(open().await.is_empty());
    let changes = *meta.watch_openings().borrow();
    let mounted = meta.create_filesystem_attachment(mount("home", 3)).await;
    assert!(*meta.watch_openings().borrow() > changes);
    assert!(open().await.iter().eq(&first));
    let second = make(home.id, 2).await;
    let both: BTreeSet<_> = first.iter().chain(&second).copied().collect();
    assert_eq!(open().await, both);
    assert!(hidden.iter().all(|layer| !both.contains(layer)));
    let attachments = meta.list_filesystem_attachments_of(host).await.unwrap();
    assert_eq!(attachments, [mounted.unwrap()]);
    let attachment = AttachmentKey::Socket {
        node: host,
        socket: "/run/home".to_owned(),
    };
    meta.delete_filesystem_attachment(attachment).await.unwrap();
    assert!(open().await.is_empty());
    cluster.end().await;
}
