//! Frames, and the bytes of messages in them.

use fs_capabilities::{Claim, GrantId, Kind, Link, ToManager};
use namespace::{FilesystemId, Ino, SessionId};
use openraft::raft::AppendEntriesRequest;
use openraft::{CommittedLeaderId, EntryPayload};
use raft_host::{CommandBytes, Entry, LogId, Vote};

use super::*;
use crate::command::{Command, encode_command};
use crate::groups::{LinkCall, Operations, encode_operations};
use crate::ids::{NamespaceGroupId, VolumeId};

#[tokio::test]
async fn a_frame_arrives_as_it_was_sent_and_no_longer_one_is_taken() {
    let hello = Hello::new(Uuid::from_u128(1), NodeId(2), Incarnation(3));
    let frame = encode(7, &hello).unwrap();
    let (number, found): (u64, Hello) = receive(&mut &frame[..], HELLO_BYTES_MAX).await.unwrap();
    assert_eq!((number, found), (7, hello));
    assert!(receive::<Hello>(&mut &frame[..], 10).await.is_err());
    for cut in 0..frame.len() {
        assert!(
            receive::<Hello>(&mut &frame[..cut], HELLO_BYTES_MAX)
                .await
                .is_err()
        );
    }
    let huge = [0xff; 64];
    assert!(
        receive::<Hello>(&mut &huge[..], FRAME_BYTES_MAX)
            .await
            .is_err()
    );
}

/// Other bytes need another [`GROUPS_VERSION`].
#[test]
fn messages_of_a_session_keep_their_bytes() {
    let call = GroupCall {
        group: NamespaceGroupId(1),
        request: GroupRequest::Link(
            FilesystemId(2),
            LinkCall::Send {
                session: SessionId(3),
                link: Link { term: 4, round: 5 },
                first: 1,
                messages: vec![
                    ToManager::Claims(vec![Claim {
                        ino: Ino(6),
                        grant: GrantId { term: 7, number: 8 },
                        kind: Kind::FileRead,
                    }]),
                    ToManager::Request {
                        ino: Ino(9),
                        kind: Kind::FileExclusive,
                        parent: Some(Ino(10)),
                    },
                    ToManager::Dropped {
                        ino: Ino(9),
                        grant: GrantId { term: 7, number: 8 },
                        kept: None,
                    },
                ],
            },
        ),
    };
    let bytes = [
        1, 1, 4, 2, 1, 3, 4, 5, 1, 3, // the call
        0, 1, 6, 7, 8, 1, // claims
        1, 9, 2, 1, 10, // a request
        2, 9, 7, 8, 0, // what was dropped
    ];
    let mut written = Vec::new();
    call.write(&mut written).unwrap();
    assert_eq!(written, bytes);
    let read = GroupCall::read(&bytes).unwrap();
    let GroupRequest::Link(_, LinkCall::Send { messages, .. }) = read.request else {
        panic!("{read:?}");
    };
    assert!(matches!(&messages[0], ToManager::Claims(claims) if claims.len() == 1));
}

/// Body that says which thread has decoded it.
struct DecodedBy(std::thread::ThreadId);

impl Body for DecodedBy {
    fn write(&self, _: &mut Vec<u8>) -> io::Result<()> {
        Ok(())
    }

    fn read(_: &[u8]) -> io::Result<Self> {
        Ok(Self(std::thread::current().id()))
    }
}

#[tokio::test]
async fn a_long_body_is_not_decoded_by_the_thread_that_answers_heartbeats() {
    let here = std::thread::current().id();
    for (bytes, is_here) in [(INLINE_BYTES_MAX, true), (INLINE_BYTES_MAX + 1, false)] {
        let mut frame = vec![0; 12 + bytes];
        frame[..4].copy_from_slice(&(bytes as u32).to_be_bytes());
        let received = receive(&mut &frame[..], FRAME_BYTES_MAX).await;
        let (_, DecodedBy(thread)) = received.unwrap();
        assert_eq!(thread == here, is_here, "{bytes}");
    }
}

#[test]
fn peers_agree_on_the_newest_version_that_both_speak() {
    let (ours, other) = (Uuid::from_u128(1), Uuid::from_u128(2));
    let mut hello = Hello::new(ours, NodeId(2), Incarnation::default());
    assert_eq!(hello.agree(ours, None), Ok(1));
    assert!(hello.agree(other, None).unwrap_err().contains("cluster"));
    let (history, later) = (Some(Uuid::from_u128(3)), Some(Uuid::from_u128(4)));
    for (theirs, ours_too) in [(history, None), (None, history), (later, history)] {
        hello.history = theirs;
        let text = hello.agree(ours, ours_too).unwrap_err();
        assert!(text.contains("cluster rejoin"), "{text}");
    }
    assert_eq!(hello.agree(ours, later), Ok(1));
    hello.history = None;
    hello.protocols = (1, 9);
    assert_eq!(hello.agree(ours, None), Ok(1));
    hello.protocols = (2, 9);
    assert!(
        hello
            .agree(ours, None)
            .unwrap_err()
            .contains("versions 2 to 9")
    );
    hello.magic = "http".to_owned();
    assert!(hello.agree(ours, None).is_err());
}

/// Message with one log entry.
fn append(command: Vec<u8>) -> RaftMessage {
    let entry = Entry {
        log_id: LogId::new(CommittedLeaderId::new(1, NodeId(1)), 2),
        payload: EntryPayload::Normal(CommandBytes(command)),
    };
    RaftMessage::AppendEntries(AppendEntriesRequest {
        vote: Vote::new(1, NodeId(1)),
        prev_log_id: None,
        entries: vec![entry],
        leader_commit: None,
    })
}

fn append_to_group(command: Vec<u8>) -> GroupCall {
    GroupCall {
        group: NamespaceGroupId(1),
        request: GroupRequest::Raft(append(command)),
    }
}

#[test]
fn a_command_takes_its_own_bytes_in_a_raft_message() {
    let volume = VolumeId(1);
    let command = encode_command(&Command::VolumeDataDropped { volume });
    let mut bytes = Vec::new();
    let request = PeerRequest::Raft(append(command.clone()));
    request.write(&mut bytes).unwrap();
    assert!(bytes.len() < command.len() + 32, "{bytes:?}");
    assert!(bytes.windows(command.len()).any(|part| part == command));
    let PeerRequest::Raft(RaftMessage::AppendEntries(read)) = PeerRequest::read(&bytes).unwrap()
    else {
        panic!("{bytes:?}");
    };
    let payload = &read.entries[0].payload;
    assert_eq!(*payload, EntryPayload::Normal(CommandBytes(command)));
}

#[test]
fn a_command_that_this_program_does_not_know_ends_the_connection() {
    let unknown = br#"{"Unknown":1}"#.to_vec();
    assert!(transcode(&PeerRequest::Raft(append(unknown.clone()))).is_err());
    assert!(transcode(&append_to_group(unknown)).is_err());
    let known = encode_operations(&Operations(Vec::new()));
    assert!(transcode(&append_to_group(known.clone())).is_ok());
    assert!(transcode(&PeerRequest::Raft(append(known))).is_err());
}

#[test]
fn a_raft_message_has_no_json() {
    let message = PeerRequest::Raft(append(Vec::new()));
    assert!(serde_json::to_vec(&message).is_err());
}
