//! A host that exceeds the limits of its link loses the link. Other hosts are not affected.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use fs_capabilities::MESSAGES_MAX;
use meta::{GroupCall, GroupReply, GroupRequest, VolumeSpec};
use namespace::FilesystemId;

use super::*;
use crate::common::GIB;

/// Requests of one call, far above the limit.
const FLOOD: u64 = 200_000;

impl Linked {
    /// Sends messages in one call. Returns the reply.
    async fn send_all(&mut self, messages: Vec<ToManager>) -> LinkReply {
        let first = self.sent + 1;
        self.sent += messages.len() as u64;
        let send = LinkCall::Send {
            session: self.host.session,
            link: self.link,
            first,
            messages,
        };
        let sent = self.host.group.link(self.host.filesystem.id, send).await;
        sent.expect("there is a leader")
    }

    /// Returns whether the leader still has the link.
    async fn is_there(&self) -> bool {
        self.look().await.is_some()
    }
}

/// Requests for this number of inodes, whether they exist or not.
fn requests(count: u64) -> Vec<ToManager> {
    let request = |number| ToManager::Request {
        ino: Ino(1 << 32 | number),
        kind: Kind::FileRead,
        parent: None,
    };
    (0..count).map(request).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_session_that_sends_too_much_at_once_loses_its_link() {
    let cluster = Cluster::of(3, Level::KNOWN, Box::new(|way| way)).await;
    let (_, reader, _) = two_hosts(&cluster).await;
    let mut linked = Linked::connect(&reader, 1, Vec::new()).await.unwrap();
    let sent = linked.send_all(requests(MESSAGES_MAX as u64)).await;
    assert!(matches!(sent, LinkReply::Taken), "{sent:?}");
    let mut answers = 0;
    while answers < MESSAGES_MAX {
        answers += linked.receive().await.expect("the link is there").len();
    }
    assert!(linked.is_there().await);
    let sent = linked.send_all(requests(MESSAGES_MAX as u64 + 1)).await;
    assert!(matches!(sent, LinkReply::Gone), "{sent:?}");
    assert!(!linked.is_there().await);
    assert!(linked.receive().await.is_none());
    // The session keeps what it held and claims it on the next link.
    let linked = Linked::connect(&reader, 2, Vec::new()).await;
    assert!(linked.unwrap().is_there().await);
    cluster.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_session_that_fetches_no_answers_loses_its_link() {
    let cluster = Cluster::of(3, Level::KNOWN, Box::new(|way| way)).await;
    let (_, reader, _) = two_hosts(&cluster).await;
    let mut linked = Linked::connect(&reader, 1, Vec::new()).await.unwrap();
    // Each request is refused at once: the file does not exist.
    let refused = ToManager::Request {
        ino: Ino(1 << 40),
        kind: Kind::FileExclusive,
        parent: Some(Ino::ROOT),
    };
    let mut calls = 0;
    loop {
        calls += 1;
        assert!(calls < 100, "the leader stores answers without a limit");
        match linked.send_all(vec![refused.clone(); MESSAGES_MAX]).await {
            LinkReply::Taken => {}
            LinkReply::Gone => break,
            other => panic!("{other:?}"),
        }
    }
    assert!(!linked.is_there().await);
    cluster.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_flood_on_a_link_delays_no_other_node() {
    let cluster = Cluster::of(3, Level::KNOWN, Box::new(|way| way)).await;
    let (writer, reader, _) = two_hosts(&cluster).await;
    let meta = cluster.nodes[1].meta();
    let before = (meta.raft_status().leader, meta.raft_status().term);
    let (stop, closed) = (
        Arc::new(AtomicBool::new(false)),
        Arc::<AtomicU64>::default(),
    );
    let flood = {
        let (stop, closed) = (Arc::clone(&stop), Arc::clone(&closed));
        tokio::spawn(async move {
            let mut round = 0;
            while !stop.load(Ordering::Relaxed) {
                round += 1;
                let linked = Linked::connect(&reader, round, Vec::new()).await;
                let sent = linked.unwrap().send_all(requests(FLOOD)).await;
                assert!(matches!(sent, LinkReply::Gone), "{sent:?}");
                closed.fetch_add(1, Ordering::Relaxed);
            }
        })
    };
    let spec = VolumeSpec::new("disk", GIB);
    meta.create_volume(spec).await.unwrap();
    let lease = meta.grant_lease("disk", meta.node_id()).await.unwrap();
    let mut heartbeats = meta.watch_heartbeat();
    // Leases, heartbeats and operations of others continue between any two calls of the flood.
    for sequence in 1..=5 {
        let (volume, generation) = (lease.volume, lease.generation);
        let renewed = meta.renew_lease(volume, meta.node_id(), generation).await;
        renewed.unwrap();
        heartbeats.mark_unchanged();
        heartbeats.changed().await.unwrap();
        let made = writer.make(0, sequence, &format!("file{sequence}")).await;
        assert!(matches!(made, Ok(Outcome::Inode(_))), "{made:?}");
        let floods = closed.load(Ordering::Relaxed);
        until(async || (closed.load(Ordering::Relaxed) > floods).then_some(())).await;
    }
    stop.store(true, Ordering::Relaxed);
    flood.await.unwrap();
    let after = (meta.raft_status().leader, meta.raft_status().term);
    assert_eq!(after, before, "no node was declared dead");
    assert_eq!(writer.names().await.len(), 5);
    cluster.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_is_led_of_a_filesystem_that_does_not_exist() {
    let cluster = Cluster::of(3, Level::KNOWN, Box::new(|way| way)).await;
    let (writer, _, _) = two_hosts(&cluster).await;
    let (group, known) = (writer.filesystem.group, writer.filesystem.id);
    let term_of = async |filesystem, call: LinkCall| {
        let mut answers = Vec::new();
        for node in &cluster.nodes {
            let request = GroupRequest::Link(filesystem, call.clone());
            let call = GroupCall { group, request };
            let answer = node.peer().handle_group_from(node.id(), call).await;
            answers.push(matches!(answer, GroupReply::Link(Ok(_))));
        }
        answers.contains(&true)
    };
    for call in [LinkCall::Term, LinkCall::Counts] {
        until(async || term_of(known, call.clone()).await.then_some(())).await;
        assert!(!term_of(FilesystemId(4000), call).await);
    }
    cluster.end().await;
}
