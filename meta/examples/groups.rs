//! What a flood of operations on names costs changes of the cluster map, and how many operations share a log
//! entry: `cargo run -p meta --example groups -- DIR`. Three nodes in this process keep their metadata below
//! DIR, which is made and removed: put it on the disk that is to be measured.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use meta::net::MemNetwork;
use meta::{
    DeviceSpec, Filesystem, FilesystemSpec, Filesystems, Incarnation, Level, Meta, MetaConfig,
    MetaNode, NodeId, NodeSpec, RaftTuning, Start, VolumeSpec,
};
use namespace::{Ino, Make, NewNode, Operation, Outcome, Request, SessionId, Time};
use uuid::Uuid;

/// How long each number of creators runs.
const ROUND: Duration = Duration::from_secs(8);
/// Creators at a time, each with one operation under way.
const CREATORS: [u16; 5] = [0, 1, 8, 64, 512];

type Failure = Box<dyn std::error::Error + Send + Sync>;

async fn open(
    dir: &Path,
    network: &MemNetwork,
    id: u64,
    start: Start,
) -> Result<(MetaNode, NodeSpec), Failure> {
    let spec = NodeSpec {
        control_address: format!("mem:{id}"),
        incarnation: Incarnation(id),
        level: Level::KNOWN,
        ..NodeSpec::new(NodeId(id), format!("node{id}"))
    };
    let config = MetaConfig {
        node: spec.clone(),
        address: format!("mem:{id}"),
        history: None,
        start,
        tuning: RaftTuning::default(),
        transport: network.transport_of(NodeId(id)),
        group_runtime: None,
    };
    let node = MetaNode::open(dir.join(id.to_string()), config).await?;
    network.connect(NodeId(id), node.peer());
    Ok((node, spec))
}

async fn cluster(dir: &Path) -> Result<Vec<MetaNode>, Failure> {
    let network = MemNetwork::default();
    let (one, _) = open(dir, &network, 1, Start::NewCluster).await?;
    let (meta, cluster) = (one.meta(), one.cluster_uuid());
    let device = DeviceSpec {
        uuid: Uuid::from_u128(1),
        node: NodeId(1),
        path: "/dev/none".to_owned(),
        size_bytes: 1 << 40,
        class: "ssd".to_owned(),
    };
    meta.register_device(device).await?;
    let mut nodes = vec![one];
    for id in [2, 3] {
        let (node, spec) = open(dir, &network, id, Start::Join { cluster }).await?;
        meta.register_node(spec).await?;
        nodes.push(node);
    }
    while meta.raft_status().voters.len() < 3 {
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    Ok(nodes)
}

/// A session that creators share, each with a slot of it.
struct Session {
    group: Filesystems,
    filesystem: Filesystem,
    id: SessionId,
}

impl Session {
    async fn open(meta: &Meta) -> Result<Self, Failure> {
        let spec = FilesystemSpec {
            name: "bench".to_owned(),
            pool: "default".to_owned(),
        };
        let filesystem = meta.create_filesystem(Uuid::from_u128(2), spec).await?;
        let group = meta.filesystems(filesystem.group);
        let open = Operation::OpenSession {
            node: meta.node_id().0,
            incarnation: meta.incarnation().0.into(),
        };
        let mut session = Self {
            group,
            filesystem,
            id: SessionId::NONE,
        };
        match session.apply((0, 0), open).await? {
            Outcome::Session(id) => session.id = id,
            other => return Err(format!("{other:?}").into()),
        }
        Ok(session)
    }

    async fn apply(
        &self,
        (slot, sequence): (u16, u64),
        operation: Operation,
    ) -> Result<Outcome, Failure> {
        let request = Request {
            session: self.id,
            slot,
            sequence,
            at: Time::default(),
            operation,
        };
        let mut replies = self
            .group
            .apply(vec![(self.filesystem.id, request)])
            .await?;
        Ok(replies.remove(0)?)
    }

    async fn create(&self, slot: u16, sequence: u64) -> Result<Outcome, Failure> {
        let make = Operation::Make(Make {
            parent: Ino::ROOT,
            name: format!("{slot}-{sequence}").into_bytes(),
            mode: 0o644,
            uid: 0,
            gid: 0,
            node: NewNode::File,
        });
        self.apply((slot, sequence), make).await
    }
}

/// Median and 99th percentile.
fn quantiles(mut times: Vec<Duration>) -> (Duration, Duration) {
    times.sort_unstable();
    let at = |part: f64| times[((times.len() - 1) as f64 * part) as usize];
    (at(0.5), at(0.99))
}

/// One round: what it prints.
async fn round(
    meta: &Meta,
    session: &Arc<Session>,
    creators: u16,
    next: &mut [u64],
) -> Result<String, Failure> {
    let stop = Arc::new(AtomicBool::new(false));
    let done = Arc::new(AtomicU64::new(0));
    let entries = || {
        let groups = meta.namespace_groups();
        let status = groups.get(&session.filesystem.group);
        status.map_or(0, |status| status.applied_index)
    };
    let before = entries();
    let running: Vec<_> = (0..creators)
        .map(|slot| {
            let (session, stop, done) = (Arc::clone(session), Arc::clone(&stop), Arc::clone(&done));
            let first = next[usize::from(slot)];
            tokio::spawn(async move {
                let mut sequence = first;
                while !stop.load(Ordering::Relaxed) {
                    session.create(slot, sequence).await?;
                    sequence += 1;
                    done.fetch_add(1, Ordering::Relaxed);
                }
                Ok::<u64, Failure>(sequence)
            })
        })
        .collect();
    let (begin, mut times) = (Instant::now(), Vec::new());
    while begin.elapsed() < ROUND {
        let asked = Instant::now();
        let volume = VolumeSpec::new(format!("v{}", Uuid::new_v4()), 1 << 30);
        let made = meta.create_volume(volume).await?;
        times.push(asked.elapsed());
        meta.delete_volume(&made.name).await?;
        meta.volume_data_dropped(made.id).await?;
    }
    let (seconds, done) = (
        begin.elapsed().as_secs_f64(),
        done.load(Ordering::Relaxed) as f64,
    );
    let used = (entries() - before).max(1) as f64;
    stop.store(true, Ordering::Relaxed);
    for (slot, task) in running.into_iter().enumerate() {
        next[slot] = task.await??;
    }
    let (median, slow) = quantiles(times);
    Ok(format!(
        "| {creators} | {:.0} | {:.1} | {:.1} ms | {:.1} ms |",
        done / seconds,
        done / used,
        median.as_secs_f64() * 1e3,
        slow.as_secs_f64() * 1e3
    ))
}

#[tokio::main]
async fn main() -> Result<(), Failure> {
    let dir = std::env::args().nth(1).ok_or("usage: groups DIR")?;
    let dir = PathBuf::from(dir);
    std::fs::create_dir(&dir)?;
    let nodes = cluster(&dir).await?;
    let meta = nodes[0].meta();
    let session = Arc::new(Session::open(&meta).await?);
    let mut next = vec![1; usize::from(CREATORS.into_iter().max().unwrap_or(0))];
    println!(
        "| creators | files/s | per entry | volume made, median | 99 % |\n|---|---|---|---|---|"
    );
    for creators in CREATORS {
        println!("{}", round(&meta, &session, creators, &mut next).await?);
    }
    for node in nodes {
        node.shutdown().await?;
    }
    Ok(std::fs::remove_dir_all(&dir)?)
}
