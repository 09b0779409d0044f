//! Filesystems on Raft groups of their own.

mod capabilities;
mod first;
mod flood;
mod recovery;
mod upkeep;

use std::collections::BTreeSet;
use std::ops::RangeInclusive;

use meta::net::ProposeError;
use meta::refusal::{FilesystemRefusal, MapRefusal, PoolRefusal};
use meta::{
    Filesystem, FilesystemSpec, Filesystems, GroupCall, GroupReply, GroupRequest, Level, Meta,
    MetaError, NodeId, NodeSpec, PoolSpec, RaftMessage, RaftStatus, Refusal, Role, VolumeSpec,
};
use namespace::{
    Answer, Error, Ino, Make, NewNode, Operation, Outcome, Query, Request, SessionId, Time,
};
use openraft::raft::VoteRequest;
use uuid::Uuid;

use crate::common::cluster::Cluster;
use crate::common::{GIB, open, open_with_device, until};

async fn create(meta: &Meta, name: &str) -> Result<Filesystem, MetaError> {
    let spec = FilesystemSpec {
        name: name.to_owned(),
        pool: "default".to_owned(),
    };
    let uuid = Uuid::from_bytes(std::array::from_fn(|at| {
        name.as_bytes().get(at).copied().unwrap_or_default()
    }));
    meta.create_filesystem(uuid, spec).await
}

/// A host's session on a filesystem.
#[derive(Clone)]
struct Host {
    group: Filesystems,
    filesystem: Filesystem,
    session: SessionId,
}

fn request(session: SessionId, (slot, sequence): (u16, u64), operation: Operation) -> Request {
    Request {
        session,
        slot,
        sequence,
        at: Time::default(),
        operation,
    }
}

impl Host {
    async fn open(meta: &Meta, filesystem: &Filesystem) -> Self {
        let host = Self::unlinked(meta, filesystem).await;
        // A new leader waits for what its session has cached.
        tokio::spawn(capabilities::claim_nothing(host.clone()));
        host
    }

    /// Without a link to the leader.
    async fn unlinked(meta: &Meta, filesystem: &Filesystem) -> Self {
        let group = meta.filesystems(filesystem.group);
        let node = meta.node_id().0;
        let incarnation = meta.incarnation().0.into();
        let open = Operation::OpenSession { node, incarnation };
        let opened = vec![(filesystem.id, request(SessionId::NONE, (0, 0), open))];
        let replies = group.apply(opened).await.unwrap();
        let [Ok(Outcome::Session(session))] = replies[..] else {
            panic!("{replies:?}");
        };
        Self {
            group,
            filesystem: filesystem.clone(),
            session,
        }
    }

    /// Makes a file in the root as the request of a slot with this number.
    async fn make(&self, slot: u16, sequence: u64, name: &str) -> Result<Outcome, Error> {
        let make = Operation::Make(Make {
            parent: Ino::ROOT,
            name: name.as_bytes().to_vec(),
            mode: 0o644,
            uid: 0,
            gid: 0,
            node: NewNode::File,
        });
        let made = request(self.session, (slot, sequence), make);
        loop {
            let asked = vec![(self.filesystem.id, made.clone())];
            match self.group.apply(asked).await {
                Ok(mut replies) => return replies.remove(0),
                // It may wait for a session's end for as long. Asked again, it is done once.
                Err(MetaError::NoGroupLeader { .. }) => {}
                Err(error) => panic!("{error}"),
            }
        }
    }

    async fn read(&self, query: Query) -> Result<Answer, Error> {
        let answers = self.group.read(vec![(self.filesystem.id, query)]).await;
        answers.unwrap().remove(0)
    }

    async fn names(&self) -> BTreeSet<String> {
        let mut names = BTreeSet::new();
        let mut behind = 0;
        loop {
            let query = Query::Readdir {
                parent: Ino::ROOT,
                behind,
                max: 1000,
            };
            let Ok(Answer::Names(found)) = self.read(query).await else {
                panic!("the root is there");
            };
            let Some((last, _)) = found.last() else {
                return names;
            };
            behind = last.cookie;
            names.extend(found.iter().map(|(entry, inode)| {
                assert_eq!(inode.nlink, 1);
                String::from_utf8(entry.name.clone()).unwrap()
            }));
        }
    }
}

/// Makes files in each of `slots` slots at the same time, as the requests of these numbers.
async fn make_many(host: &Host, slots: u16, numbers: RangeInclusive<u64>) {
    let slots = (0..slots).map(|slot| {
        let (host, numbers) = (host.clone(), numbers.clone());
        tokio::spawn(async move {
            for sequence in numbers {
                let made = host.make(slot, sequence, &name(slot, sequence)).await;
                assert!(matches!(made, Ok(Outcome::Inode(_))), "{made:?}");
            }
        })
    });
    for task in slots.collect::<Vec<_>>() {
        task.await.unwrap();
    }
}

fn name(slot: u16, sequence: u64) -> String {
    format!("{slot:03}-{sequence:03}")
}

fn status(meta: &Meta, filesystem: &Filesystem) -> Option<RaftStatus> {
    meta.namespace_groups().remove(&filesystem.group)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_filesystem_of_one_node_is_there_after_a_restart() {
    let dir = tempfile::tempdir().unwrap();
    let node = open_with_device(dir.path()).await;
    let made = create(&node.meta(), "home").await.unwrap();
    assert_eq!(
        create(&node.meta(), "home").await.unwrap(),
        made,
        "said twice"
    );
    let host = Host::open(&node.meta(), &made).await;
    make_many(&host, 2, 1..=3).await;
    node.shutdown().await.unwrap();

    let node = open(dir.path()).await;
    let found = node.meta().get_filesystem("home").await.unwrap();
    assert_eq!(found, made);
    let host = Host::open(&node.meta(), &found).await;
    assert_eq!(host.names().await.len(), 6);
    node.shutdown().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn filesystems_spread_over_groups_and_what_cannot_be_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let node = open_with_device(dir.path()).await;
    let meta = node.meta();
    let mut groups = BTreeSet::new();
    for number in 0..9 {
        let made = create(&meta, &format!("fs{number}")).await.unwrap();
        groups.insert(made.group);
    }
    assert_eq!(groups.len(), 8, "and then they share");
    let spec = |name: &str, pool: &str| FilesystemSpec {
        name: name.to_owned(),
        pool: pool.to_owned(),
    };
    let refused = async |spec| {
        let refused = meta.create_filesystem(Uuid::from_u128(9), spec).await;
        refused.unwrap_err().to_string()
    };
    assert!(
        refused(spec("fs1", "default"))
            .await
            .contains("exists already")
    );
    assert!(refused(spec("", "default")).await.contains("name"));
    assert!(
        refused(spec("new", "none"))
            .await
            .contains("no pool \"none\"")
    );
    let unknown = meta.get_filesystem("none").await.unwrap_err();
    assert!(matches!(
        unknown,
        MetaError::Refused(Refusal::Filesystem(FilesystemRefusal::Unknown { .. }))
    ));
    meta.create_pool(PoolSpec::new("fast", 1)).await.unwrap();
    let in_fast = spec("on-fast", "fast");
    meta.create_filesystem(Uuid::from_u128(10), in_fast)
        .await
        .unwrap();
    let refused = meta.delete_pool("fast").await.unwrap_err();
    assert!(matches!(
        refused,
        MetaError::Refused(Refusal::Pool(PoolRefusal::HasFilesystem { .. }))
    ));
    node.shutdown().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_operation_is_done_once_though_the_leader_is_lost() {
    let mut cluster = Cluster::of(3, Level::KNOWN, Box::new(|way| way)).await;
    let made = create(&cluster.nodes[1].meta(), "home").await.unwrap();
    let leader = until(async || {
        let status = status(&cluster.nodes[0].meta(), &made)?;
        (status.voters.len() == 3).then_some(status.leader)?
    })
    .await;
    let other = (1..=3).find(|id| NodeId(*id) != leader).unwrap();
    let position = |cluster: &Cluster, id: u64| {
        let mut nodes = cluster.nodes.iter();
        nodes.position(|node| node.id() == NodeId(id)).unwrap()
    };
    let meta = cluster.nodes[position(&cluster, other)].meta();
    let host = Host::open(&meta, &made).await;
    let making = {
        let host = host.clone();
        tokio::spawn(async move { make_many(&host, 16, 1..=40).await })
    };
    // In the midst of it.
    until(async || (host.names().await.len() > 100).then_some(())).await;
    let leads = status(&meta, &made).and_then(|status| status.leader);
    assert_eq!(leads, Some(leader));
    assert!(!making.is_finished());
    cluster.stop(leader.0).await;
    making.await.unwrap();
    let expected: BTreeSet<String> = (0..16)
        .flat_map(|slot| (1..=40).map(move |sequence| name(slot, sequence)))
        .collect();
    assert_eq!(host.names().await, expected);
    // What was answered is answered again, and done no second time.
    let again = host.make(3, 40, &name(3, 40)).await;
    assert!(matches!(again, Ok(Outcome::Inode(_))), "{again:?}");
    let anew = host.make(3, 41, &name(3, 40)).await;
    assert_eq!(anew, Err(Error::Exists));
    cluster.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_nobody_reaches_leads_no_filesystem() {
    let cluster = Cluster::of(3, Level::KNOWN, Box::new(|way| way)).await;
    let made = create(&cluster.nodes[0].meta(), "home").await.unwrap();
    let leader = until(async || {
        let status = status(&cluster.nodes[0].meta(), &made)?;
        (status.voters.len() == 3).then_some(status.leader)?
    })
    .await;
    let other = cluster.nodes.iter().find(|node| node.id() != leader);
    let meta = other.unwrap().meta();
    let host = Host::open(&meta, &made).await;
    host.make(0, 1, "before").await.unwrap();
    cluster.network.set_unheard(leader, true);
    // It is done once somebody else leads.
    host.make(0, 2, "meanwhile").await.unwrap();
    let leads = status(&meta, &made).and_then(|status| status.leader);
    assert_ne!(leads, Some(leader));
    cluster.network.set_unheard(leader, false);
    host.make(0, 3, "after").await.unwrap();
    assert_eq!(host.names().await.len(), 3);
    cluster.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn operations_that_wait_share_a_log_entry() {
    let dir = tempfile::tempdir().unwrap();
    let node = open_with_device(dir.path()).await;
    let made = create(&node.meta(), "home").await.unwrap();
    let host = Host::open(&node.meta(), &made).await;
    let entries = || status(&node.meta(), &made).unwrap().applied_index;
    let before = entries();
    make_many(&host, 64, 1..=16).await;
    // The last entries are applied before their operations are answered, and are seen a moment later.
    let used = entries() - before;
    assert!(
        used < 64 * 16 / 2,
        "{used} entries for {} operations",
        64 * 16
    );
    node.shutdown().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_group_moves_from_a_node_that_is_emptied_and_from_one_that_is_removed() {
    let mut cluster = Cluster::of(4, Level::KNOWN, Box::new(|way| way)).await;
    let made = create(&cluster.nodes[0].meta(), "home").await.unwrap();
    let host = Host::open(&cluster.nodes[0].meta(), &made).await;
    make_many(&host, 4, 1..=5).await;
    let all: BTreeSet<NodeId> = (1..=4).map(NodeId).collect();
    let first = until(async || Some(voters(&cluster, &made)).filter(|ids| ids.len() == 3)).await;
    // The one that leads.
    let meta = cluster.nodes[0].meta();
    let emptied = until(async || status(&cluster.nodes[1].meta(), &made)?.leader).await;
    assert!(first.contains(&emptied));
    meta.drain_node(emptied, true).await.unwrap();
    let rest: BTreeSet<NodeId> = all.iter().copied().filter(|id| *id != emptied).collect();
    until(async || (voters(&cluster, &made) == rest).then_some(())).await;
    make_many(&host, 4, 6..=8).await;
    let said = async || {
        let map = meta.map();
        let group = map
            .namespace_groups()
            .find(|group| group.id == made.group)?;
        (group.voters.iter().copied().collect::<BTreeSet<_>>() == rest).then_some(())
    };
    until(said).await;

    meta.drain_node(emptied, false).await.unwrap();
    // Not node 1, which leads the cluster map's group.
    let lost = *rest.iter().find(|id| **id != NodeId(1)).unwrap();
    cluster.stop(lost.0).await;
    until(async || meta.remove_node(lost).await.ok()).await;
    let rest: BTreeSet<NodeId> = all.into_iter().filter(|id| *id != lost).collect();
    until(async || (voters(&cluster, &made) == rest).then_some(())).await;
    make_many(&host, 4, 9..=9).await;
    assert_eq!(host.names().await.len(), 36);
    cluster.end().await;
}

/// Who votes in a group, by the word of its leader.
fn voters(cluster: &Cluster, filesystem: &Filesystem) -> BTreeSet<NodeId> {
    let leader = cluster.nodes.iter().find_map(|node| {
        let status = status(&node.meta(), filesystem)?;
        let is_settled = status.leader == Some(node.id()) && !status.is_changing;
        is_settled.then_some(status.voters)
    });
    leader.unwrap_or_default()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_a_group_needs_is_not_removed() {
    let mut cluster = Cluster::of(2, Level::KNOWN, Box::new(|way| way)).await;
    let meta = cluster.nodes[0].meta();
    create(&meta, "one").await.unwrap();
    let made = create(&meta, "two").await.unwrap();
    assert_eq!(voters(&cluster, &made), [NodeId(2)].into());
    let host = Host::open(&meta, &made).await;
    make_many(&host, 4, 1..=2).await;
    let refused = meta.remove_node(NodeId(2)).await.unwrap_err();
    assert!(
        matches!(
            refused,
            MetaError::Refused(Refusal::Map(MapRefusal::GroupNeedsNode { .. }))
        ),
        "{refused}"
    );
    meta.drain_node(NodeId(2), true).await.unwrap();
    until(async || meta.remove_node(NodeId(2)).await.ok()).await;
    cluster.stop(2).await;
    assert_eq!(host.names().await.len(), 8);
    make_many(&host, 4, 3..=3).await;
    cluster.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_has_nothing_of_a_group_does_not_vote_in_it() {
    let cluster = Cluster::of(4, Level::KNOWN, Box::new(|way| way)).await;
    let made = create(&cluster.nodes[0].meta(), "home").await.unwrap();
    let voters = until(async || Some(voters(&cluster, &made)).filter(|ids| ids.len() == 3)).await;
    let ask = async |of_voter: bool| {
        let mut nodes = cluster.nodes.iter();
        let asked = nodes.find(|node| voters.contains(&node.id()) == of_voter);
        let from = *voters
            .iter()
            .find(|id| **id != asked.unwrap().id())
            .unwrap();
        let vote = VoteRequest::new(openraft::Vote::new(1 << 20, from), None);
        let request = GroupRequest::Raft(RaftMessage::Vote(vote));
        let group = made.group;
        let call = GroupCall { group, request };
        asked.unwrap().peer().handle_group_from(from, call).await
    };
    // It knows that the group has had a leader.
    let settled = async || matches!(ask(false).await, GroupReply::Absent).then_some(());
    until(settled).await;
    assert!(matches!(ask(true).await, GroupReply::Raft(_)));
    cluster.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_host_acts_in_its_own_sessions_alone() {
    let mut cluster = Cluster::of(3, Level::KNOWN, Box::new(|way| way)).await;
    let meta = cluster.nodes[0].meta();
    let spec = NodeSpec {
        roles: [Role::Host].into(),
        ..cluster.join(4, Level::KNOWN).await
    };
    let own_start = spec.incarnation.0.into();
    meta.register_node(spec).await.unwrap();
    let made = create(&meta, "home").await.unwrap();
    let other = Host::open(&meta, &made).await;
    let ask = async |operation: Operation, session: SessionId| {
        let asked = vec![(made.id, request(session, (0, 1), operation))];
        // Whoever leads.
        until(async || {
            for node in &cluster.nodes {
                let call = GroupCall {
                    group: made.group,
                    request: GroupRequest::Apply(asked.clone()),
                };
                match node.peer().handle_group_from(NodeId(4), call).await {
                    GroupReply::Apply(Err(
                        ProposeError::NotLeader { .. } | ProposeError::Unknown,
                    )) => {}
                    GroupReply::Apply(answered) => return Some(answered),
                    _ => {}
                }
            }
            None
        })
        .await
    };
    let open = |node| Operation::OpenSession {
        node,
        incarnation: own_start,
    };
    let make = Operation::Make(Make {
        parent: Ino::ROOT,
        name: b"x".to_vec(),
        mode: 0o644,
        uid: 0,
        gid: 0,
        node: NewNode::File,
    });
    let refused = ask(open(4), SessionId::NONE).await.unwrap_err();
    assert!(refused.to_string().contains("not attached"), "{refused}");
    let mounted = meta
        .create_filesystem_attachment(upkeep::mount("home", 4))
        .await;
    mounted.unwrap();
    let refused = ask(open(1), SessionId::NONE).await.unwrap_err();
    assert!(refused.to_string().contains("not its own"), "{refused}");
    assert!(ask(make.clone(), other.session).await.is_err());
    let end = Operation::EndSession {
        session: other.session,
    };
    assert!(ask(end, SessionId::NONE).await.is_err());
    let unknown = ask(make.clone(), SessionId(99)).await.unwrap();
    assert_eq!(unknown, [Err(Error::Stale)]);
    let opened = ask(open(4), SessionId::NONE).await.unwrap();
    let [Ok(Outcome::Session(own))] = opened[..] else {
        panic!("{opened:?}");
    };
    let made = ask(make, own).await.unwrap();
    assert!(matches!(made[..], [Ok(Outcome::Inode(_))]), "{made:?}");
    cluster.end().await;
}
