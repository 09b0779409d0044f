//! Log lines of a machine that is stopped, or whose callers are gone.

use std::io;
use std::sync::Mutex;

use openraft::{SnapshotMeta, Vote};
use tempfile::TempDir;
use tracing::Level;
use tracing::subscriber::DefaultGuard;

use super::*;
use crate::config::RaftTuning;
use crate::network::CallError;
use crate::storage::GroupId;
use crate::testing::Keys;

/// Longest wait for a node that is alone to lead.
const WAIT_MAX: Duration = Duration::from_secs(60);

/// Transport without other nodes.
struct NoPeers;

impl RaftTransport for NoPeers {
    fn call<'a>(
        &'a self,
        _: GroupId,
        _: NodeId,
        _: &'a BasicNode,
        _: RaftMessage,
    ) -> BoxFuture<'a, Result<RaftReply, CallError>> {
        Box::pin(async { Err(CallError::Unreachable("there are no peers".to_owned())) })
    }
}

/// Warnings and errors of this thread, on which all tasks of a test run.
#[derive(Clone, Default)]
struct Complaints(Arc<Mutex<Vec<u8>>>);

impl Complaints {
    fn begin(&self) -> DefaultGuard {
        let lines = self.clone();
        let subscriber = tracing_subscriber::fmt()
            .with_max_level(Level::WARN)
            .with_ansi(false)
            .with_writer(move || lines.clone());
        tracing::subscriber::set_default(subscriber.finish())
    }

    #[track_caller]
    fn assert_none(&self) {
        let lines = String::from_utf8(self.0.lock().unwrap().clone()).unwrap();
        assert_eq!(lines, "");
    }
}

impl io::Write for Complaints {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Starts a group of one, which leads.
async fn open() -> (TempDir, RaftHandle) {
    let dir = tempfile::tempdir().unwrap();
    let config = RaftTuning::default().to_config(256).unwrap();
    let keys = Arc::new(Keys::open(dir.path()).unwrap());
    let raft = RaftHandle::start(NodeId(1), config, Arc::new(NoPeers), keys);
    let raft = raft.await.unwrap();
    let members = BTreeMap::from([(NodeId(1), BasicNode::default())]);
    raft.initialize(members).await.unwrap();
    let leads = raft.wait(WAIT_MAX, "leads", |metrics| {
        metrics.state == ServerState::Leader
    });
    leads.await.unwrap();
    raft.write(command()).await.unwrap();
    (dir, raft)
}

fn command() -> Vec<u8> {
    b"key".to_vec()
}

fn is_stopped<T, E>(outcome: Outcome<T, E>) -> bool {
    matches!(outcome, Err(RaftError::Fatal(Fatal::Stopped)))
}

/// Says whether it ended because the machine has stopped.
type Call<'a> = (&'static str, Pin<Box<dyn Future<Output = bool> + 'a>>);

/// Calls that a machine that leads answers without a change.
fn harmless(raft: &RaftHandle) -> Vec<Call<'_>> {
    let vote = Vote::default();
    let entries = AppendEntriesRequest::<TypeConfig> {
        vote,
        prev_log_id: None,
        entries: Vec::new(),
        leader_commit: None,
    };
    let ballot = VoteRequest {
        vote,
        last_log_id: None,
    };
    let piece = InstallSnapshotRequest::<TypeConfig> {
        vote,
        meta: SnapshotMeta::default(),
        offset: 0,
        data: Vec::new(),
        done: false,
    };
    let voters = ChangeMembers::ReplaceAllVoters([NodeId(1)].into());
    vec![
        (
            "append_entries",
            Box::pin(async move { is_stopped(raft.append_entries(entries).await) }),
        ),
        (
            "vote",
            Box::pin(async move { is_stopped(raft.ask_vote(ballot).await) }),
        ),
        (
            "install_snapshot",
            Box::pin(async move { is_stopped(raft.install_snapshot(piece).await) }),
        ),
        (
            "read_log_id",
            Box::pin(async move { is_stopped(raft.read_log_id().await) }),
        ),
        (
            "write",
            Box::pin(async move { is_stopped(raft.write(command()).await) }),
        ),
        (
            "change_membership",
            Box::pin(async move { is_stopped(raft.change_membership(voters, true).await) }),
        ),
        (
            "with_state",
            Box::pin(async move { raft.with_state(|_| ()).await == Err(Fatal::Stopped) }),
        ),
        (
            "is_initialized",
            Box::pin(async move { raft.is_initialized().await == Err(Fatal::Stopped) }),
        ),
        (
            "trigger_snapshot",
            Box::pin(async move { raft.trigger_snapshot().await == Err(Fatal::Stopped) }),
        ),
    ]
}

fn all(raft: &RaftHandle) -> Vec<Call<'_>> {
    let members = BTreeMap::from([(NodeId(1), BasicNode::default())]);
    let mut calls = harmless(raft);
    calls.push((
        "initialize",
        Box::pin(async move { is_stopped(raft.initialize(members).await) }),
    ));
    calls.push((
        "trigger_election",
        Box::pin(async move { raft.trigger_election().await == Err(Fatal::Stopped) }),
    ));
    calls.push((
        "add_learner",
        Box::pin(
            async move { is_stopped(raft.add_learner(NodeId(2), BasicNode::default()).await) },
        ),
    ));
    calls
}

/// Begins calls, and returns those that wait for an answer.
async fn begun(calls: Vec<Call<'_>>) -> Vec<Call<'_>> {
    let mut waiting = Vec::new();
    for (name, mut call) in calls {
        if poll_fn(|context| Poll::Ready(call.as_mut().poll(context).is_pending())).await {
            waiting.push((name, call));
        }
    }
    waiting
}

#[tokio::test]
async fn a_stopped_machine_is_asked_for_nothing() {
    let complaints = Complaints::default();
    let _lines = complaints.begin();
    let (_dir, raft) = open().await;
    raft.shutdown().await.unwrap();
    for (name, call) in all(&raft) {
        assert!(call.await, "{name}");
    }
    assert!(raft.shutdown().await.is_ok());
    complaints.assert_none();
}

#[tokio::test]
async fn calls_that_a_stop_interrupts_leave_nothing_in_the_log() {
    let complaints = Complaints::default();
    let _lines = complaints.begin();
    let (_dir, raft) = open().await;
    let waiting = begun(all(&raft)).await;
    // Triggers do not wait.
    assert_eq!(waiting.len(), all(&raft).len() - 2);
    raft.shutdown().await.unwrap();
    for (name, call) in waiting {
        assert!(call.await, "{name}");
    }
    raft.shutdown().await.unwrap();
    complaints.assert_none();
}

#[tokio::test]
async fn callers_that_go_away_leave_nothing_in_the_log() {
    let complaints = Complaints::default();
    let _lines = complaints.begin();
    let (_dir, raft) = open().await;
    let waiting = begun(harmless(&raft)).await;
    assert_eq!(waiting.len(), harmless(&raft).len() - 1);
    drop(waiting);
    // The machine does one after the other.
    raft.write(command()).await.unwrap();
    for (name, call) in harmless(&raft) {
        assert!(!call.await, "{name}");
    }
    raft.shutdown().await.unwrap();
    complaints.assert_none();
}
