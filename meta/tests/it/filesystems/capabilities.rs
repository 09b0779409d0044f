//! What sessions may cache: changes wait for it, and new leaders learn of it.

mod limits;

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use fs_capabilities::{Claim, GrantId, Kind, Link, Refusal, ToHolder, ToManager};
use meta::{LinkCall, LinkReply, SessionLink};
use namespace::SetAttributes;

use super::*;

/// Connects to each leader in its turn, and says that the session has nothing cached.
pub(super) async fn claim_nothing(host: Host) {
    let mut round = 0;
    loop {
        round += 1;
        let Some(mut linked) = Linked::connect(&host, round, Vec::new()).await else {
            tokio::time::sleep(Duration::from_millis(20)).await;
            continue;
        };
        while linked.receive().await.is_some() {}
    }
}

/// A session with a link to the leader.
struct Linked {
    host: Host,
    link: Link,
    /// Messages that were sent, and that came.
    sent: u64,
    received: u64,
}

impl Linked {
    /// None if there is no leader, or the session has ended.
    async fn connect(host: &Host, round: u64, claims: Vec<Claim>) -> Option<Self> {
        let id = host.filesystem.id;
        let LinkReply::Term(term) = host.group.link(id, LinkCall::Term).await.ok()? else {
            panic!("a term is answered");
        };
        let mut linked = Self {
            host: host.clone(),
            link: Link { term, round },
            sent: 0,
            received: 0,
        };
        let is_taken = linked.send(ToManager::Claims(claims)).await;
        is_taken.then_some(linked)
    }

    async fn send(&mut self, message: ToManager) -> bool {
        self.sent += 1;
        let send = LinkCall::Send {
            session: self.host.session,
            link: self.link,
            first: self.sent,
            messages: vec![message],
        };
        let sent = self.host.group.link(self.host.filesystem.id, send).await;
        matches!(sent, Ok(LinkReply::Taken))
    }

    /// The next messages; none if the link is gone.
    async fn receive(&mut self) -> Option<Vec<ToHolder>> {
        let receive = LinkCall::Receive {
            session: self.host.session,
            link: self.link,
            behind: self.received,
        };
        let received = self.host.group.link(self.host.filesystem.id, receive).await;
        let Ok(LinkReply::Messages(messages)) = received else {
            return None;
        };
        self.received += messages.len() as u64;
        Some(messages)
    }

    async fn next(&mut self) -> ToHolder {
        loop {
            let mut messages = self.receive().await.expect("the link is there");
            assert!(messages.len() < 2, "{messages:?}");
            if let Some(message) = messages.pop() {
                return message;
            }
        }
    }

    /// Asks for a directory, and gets it.
    async fn acquire(&mut self, ino: Ino) -> GrantId {
        let kind = Kind::DirectoryRead;
        let parent = None;
        assert!(self.send(ToManager::Request { ino, kind, parent }).await);
        match self.next().await {
            ToHolder::Grant {
                ino: granted,
                grant,
                ..
            } if granted == ino => grant,
            other => panic!("{other:?}"),
        }
    }

    /// Asks for a file that is in this directory, to buffer changes of it; what is answered.
    async fn ask_exclusive(&mut self, ino: Ino, parent: Ino) -> ToHolder {
        let request = ToManager::Request {
            ino,
            kind: Kind::FileExclusive,
            parent: Some(parent),
        };
        assert!(self.send(request).await);
        self.next().await
    }

    async fn drop_root(&mut self, grant: GrantId) {
        let dropped = ToManager::Dropped {
            ino: Ino::ROOT,
            grant,
            kept: None,
        };
        assert!(self.send(dropped).await);
    }

    /// Messages that had been sent before the root was looked at.
    async fn look(&self) -> Option<u64> {
        let id = self.host.filesystem.id;
        let reader = SessionLink {
            filesystem: id,
            session: self.host.session,
            link: self.link,
        };
        let queries = vec![(id, Query::Inode(Ino::ROOT))];
        let answers = self.host.group.read_as(reader, queries).await.unwrap();
        assert!(matches!(answers.answers[..], [Ok(Answer::Inode(..))]));
        answers.sent
    }
}

/// Two hosts with a filesystem. The second has no link yet.
async fn two_hosts(cluster: &Cluster) -> (Host, Host, NodeId) {
    let made = create(&cluster.nodes[0].meta(), "home").await.unwrap();
    let leader = until(async || {
        let status = status(&cluster.nodes[0].meta(), &made)?;
        (status.voters.len() == 3).then_some(status.leader)?
    })
    .await;
    let others: Vec<_> = cluster
        .nodes
        .iter()
        .filter(|node| node.id() != leader)
        .collect();
    let writer = Host::open(&others[0].meta(), &made).await;
    let reader = Host::unlinked(&others[1].meta(), &made).await;
    (writer, reader, leader)
}

fn is_recall_of_root(message: &ToHolder, of: GrantId) -> bool {
    matches!(message, ToHolder::Recall { ino: Ino::ROOT, grant, keep: None } if *grant == of)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_change_waits_until_nobody_has_cached_what_it_changes() {
    let cluster = Cluster::of(3, Level::KNOWN, Box::new(|way| way)).await;
    let (writer, reader, _) = two_hosts(&cluster).await;
    let mut linked = Linked::connect(&reader, 1, Vec::new()).await.unwrap();
    assert_eq!(linked.look().await, Some(0));
    let grant = linked.acquire(Ino::ROOT).await;
    assert_eq!(linked.look().await, Some(1));
    let making = {
        let writer = writer.clone();
        tokio::spawn(async move { writer.make(0, 1, "file").await })
    };
    let recall = linked.next().await;
    assert!(is_recall_of_root(&recall, grant), "{recall:?}");
    assert!(!making.is_finished(), "its answer would come after this");
    assert!(reader.names().await.is_empty());
    linked.drop_root(grant).await;
    assert!(matches!(making.await.unwrap(), Ok(Outcome::Inode(_))));

    // What is there already changes nothing, so nobody is asked to give anything up.
    linked.acquire(Ino::ROOT).await;
    assert_eq!(writer.make(0, 2, "file").await, Err(Error::Exists));
    assert_eq!(linked.look().await, Some(3));
    cluster.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_new_leader_learns_what_is_cached_before_anything_changes() {
    let mut cluster = Cluster::of(3, Level::KNOWN, Box::new(|way| way)).await;
    let (writer, reader, leader) = two_hosts(&cluster).await;
    let mut linked = Linked::connect(&reader, 1, Vec::new()).await.unwrap();
    let grant = linked.acquire(Ino::ROOT).await;
    cluster.stop(leader.0).await;
    let making = {
        let writer = writer.clone();
        tokio::spawn(async move { writer.make(0, 1, "file").await })
    };
    while linked.receive().await.is_some() {}
    assert!(
        !making.is_finished(),
        "somebody has not said what it has cached"
    );
    let claim = Claim {
        ino: Ino::ROOT,
        grant,
        kind: Kind::DirectoryRead,
    };
    let mut linked = until(async || Linked::connect(&reader, 2, vec![claim]).await).await;
    let recall = linked.next().await;
    assert!(is_recall_of_root(&recall, grant), "{recall:?}");
    assert!(!making.is_finished());
    linked.drop_root(grant).await;
    assert!(matches!(making.await.unwrap(), Ok(Outcome::Inode(_))));
    cluster.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_leader_that_ends_lets_go_of_operations_that_wait() {
    let mut cluster = Cluster::of(3, Level::KNOWN, Box::new(|way| way)).await;
    let (writer, reader, leader) = two_hosts(&cluster).await;
    let mut linked = Linked::connect(&reader, 1, Vec::new()).await.unwrap();
    let grant = linked.acquire(Ino::ROOT).await;
    let making = {
        let writer = writer.clone();
        tokio::spawn(async move { writer.make(0, 1, "file").await })
    };
    let recall = linked.next().await;
    assert!(is_recall_of_root(&recall, grant), "{recall:?}");
    cluster.stop(leader.0).await;
    // Its database was closed, or could not be opened.
    cluster.start_again(leader.0, Level::KNOWN).await;
    assert!(
        !making.is_finished(),
        "the reader has not said what it has cached"
    );
    until(async || Linked::connect(&reader, 2, Vec::new()).await).await;
    assert!(matches!(making.await.unwrap(), Ok(Outcome::Inode(_))));
    cluster.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_dead_host_had_cached_is_waited_for_until_its_session_has_ended() {
    let mut cluster = Cluster::of(3, Level::KNOWN, Box::new(|way| way)).await;
    let spec = NodeSpec {
        roles: [Role::Host].into(),
        ..cluster.join(4, Level::KNOWN).await
    };
    cluster.nodes[0].meta().register_node(spec).await.unwrap();
    let made = create(&cluster.nodes[0].meta(), "home").await.unwrap();
    let writer = Host::open(&cluster.nodes[0].meta(), &made).await;
    let mounted = cluster.nodes[0]
        .meta()
        .create_filesystem_attachment(upkeep::mount("home", 4))
        .await;
    mounted.unwrap();
    let reader = Host::unlinked(&cluster.nodes[3].meta(), &made).await;
    let mut linked = Linked::connect(&reader, 1, Vec::new()).await.unwrap();
    linked.acquire(Ino::ROOT).await;
    cluster.stop(4).await;
    let making = {
        let writer = writer.clone();
        tokio::spawn(async move { writer.make(0, 1, "file").await })
    };
    let is_there = async || {
        let query = Query::Sessions {
            from: reader.session,
            max: 1,
        };
        match writer.read(query).await {
            Ok(Answer::Sessions(found)) => found
                .iter()
                .any(|(id, one)| *id == reader.session && !one.ending),
            other => panic!("{other:?}"),
        }
    };
    let is_named = AtomicBool::new(false);
    let waited = async || {
        let (is_done, is_there) = (making.is_finished(), is_there().await);
        let problems = cluster.nodes.iter().map(|node| node.meta().problem());
        let mut problems = problems.flatten();
        if problems.any(|problem| problem.contains("changes of filesystem 'home' wait: node")) {
            is_named.store(true, Ordering::Relaxed);
        }
        assert!(!is_done || !is_there, "it went on before the session ended");
        (!is_there).then_some(())
    };
    until(waited).await;
    let is_named = is_named.load(Ordering::Relaxed);
    assert!(is_named, "health says what is waited for");
    assert!(matches!(making.await.unwrap(), Ok(Outcome::Inode(_))));
    cluster.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_host_speaks_for_its_own_sessions_alone() {
    let cluster = Cluster::of(3, Level::KNOWN, Box::new(|way| way)).await;
    let (writer, reader, _) = two_hosts(&cluster).await;
    let mut linked = Linked::connect(&reader, 1, Vec::new()).await.unwrap();
    linked.acquire(Ino::ROOT).await;
    let forged = Host {
        session: reader.session,
        ..writer.clone()
    };
    let claims = LinkCall::Send {
        session: reader.session,
        link: Link {
            round: 9,
            ..linked.link
        },
        first: 1,
        messages: vec![ToManager::Claims(Vec::new())],
    };
    let refused = forged.group.link(forged.filesystem.id, claims).await;
    let refused = refused.unwrap_err().to_string();
    assert!(refused.contains("not its own"), "{refused}");
    assert_eq!(linked.look().await, Some(1), "it holds what it held");
    let nobody = Host {
        session: SessionId(99),
        ..writer.clone()
    };
    assert!(Linked::connect(&nobody, 1, Vec::new()).await.is_none());
    cluster.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_host_may_have_buffered_is_written_back_before_others_are_told() {
    let cluster = Cluster::of(3, Level::KNOWN, Box::new(|way| way)).await;
    let (other, holder, _) = two_hosts(&cluster).await;
    let Ok(Outcome::Inode(file)) = other.make(0, 1, "file").await else {
        panic!("it is made");
    };
    let ino = file.ino;
    let mut linked = Linked::connect(&holder, 1, Vec::new()).await.unwrap();
    let refused = linked.ask_exclusive(ino, Ino(99)).await;
    let moved = Refusal::Moved;
    assert!(
        matches!(refused, ToHolder::Refuse { refusal, .. } if refusal == moved),
        "{refused:?}"
    );
    let granted = linked.ask_exclusive(ino, Ino::ROOT).await;
    let ToHolder::Grant { grant, .. } = granted else {
        panic!("{granted:?}");
    };
    // One looks at the file, one at the directory.
    let (looks, lists) = (other.clone(), other.clone());
    let looking = tokio::spawn(async move { looks.read(Query::Inode(ino)).await });
    let recall = linked.next().await;
    assert!(
        matches!(recall, ToHolder::Recall { grant: of, keep: Some(Kind::FileRead), .. } if of == grant),
        "{recall:?}"
    );
    let listing = tokio::spawn(async move { lists.names().await });
    let write_back = Operation::SetAttributes(SetAttributes {
        ino,
        expected: None,
        mode: Some(0o600),
        uid: None,
        gid: None,
        size: None,
        tail: None,
        atime: None,
        mtime: None,
        clear_privileges: false,
    });
    let written = vec![(
        holder.filesystem.id,
        request(holder.session, (0, 1), write_back),
    )];
    let written = holder.group.apply(written).await.unwrap();
    assert!(matches!(written[..], [Ok(_)]), "{written:?}");
    assert!(!looking.is_finished() && !listing.is_finished());
    let dropped = ToManager::Dropped {
        ino,
        grant,
        kept: Some(Kind::FileRead),
    };
    assert!(linked.send(dropped).await);
    let Ok(Answer::Inode(_, told)) = looking.await.unwrap() else {
        panic!("the file is there");
    };
    assert_eq!(told.mode, 0o600);
    assert_eq!(listing.await.unwrap().len(), 1);
    cluster.end().await;
}
