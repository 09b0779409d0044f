//! What several tests share.

pub mod cluster;

use std::path::Path;
use std::time::Duration;

use meta::{AttachmentOptions, AttachmentSpec, DeviceSpec, MetaConfig, MetaNode, NodeId};

/// Bounds how long a test waits for what must happen; far beyond what it takes.
pub const WAIT_MAX: Duration = Duration::from_secs(60);

/// 2^30 bytes.
pub const GIB: u64 = 1 << 30;

/// Opens the only node of a cluster.
pub async fn open(dir: &Path) -> MetaNode {
    MetaNode::open(dir, MetaConfig::embedded("test"))
        .await
        .unwrap()
}

/// Opens the only node of a cluster, and gives it a device.
pub async fn open_with_device(dir: &Path) -> MetaNode {
    let node = open(dir).await;
    node.meta().register_device(device(1)).await.unwrap();
    node
}

/// A device of node 1.
pub fn device(number: u64) -> DeviceSpec {
    DeviceSpec {
        uuid: uuid::Uuid::from_u128(u128::from(number)),
        node: NodeId(1),
        path: format!("/dev/test{number}"),
        size_bytes: 100 * GIB,
        class: "ssd".to_owned(),
    }
}

/// An attachment on node 1.
pub fn attachment(volume: &str, socket: &str) -> AttachmentSpec {
    AttachmentSpec {
        volume: volume.to_owned(),
        node: NodeId(1),
        socket: socket.to_owned(),
        queues: 1,
        read_only: false,
        options: AttachmentOptions::default(),
    }
}

/// Copies a directory and what is below.
pub fn copy_tree(from: &Path, to: &Path) {
    std::fs::create_dir(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap().map(Result::unwrap) {
        let to = to.join(entry.file_name());
        match entry.file_type().unwrap().is_dir() {
            true => copy_tree(&entry.path(), &to),
            false => drop(std::fs::copy(entry.path(), to).unwrap()),
        }
    }
}

/// Waits until three nodes vote, and all know it. Before that the one that founded the cluster may be needed.
pub async fn until_three_vote(nodes: &[MetaNode]) {
    let know = |node: &MetaNode| {
        let raft = node.meta().raft_status();
        raft.voters.len() == 3 && !raft.is_changing
    };
    until(async || nodes.iter().all(know).then_some(())).await;
}

/// Waits until a question has an answer.
pub async fn until<T>(ask: impl AsyncFn() -> Option<T>) -> T {
    let wait = async {
        loop {
            if let Some(answer) = ask().await {
                return answer;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(WAIT_MAX, wait)
        .await
        .expect("it never happened")
}
