//! The attachment service on a node without a daemon.

use std::path::Path;
use std::sync::Arc;

use api::types::{Attach, AttachmentState, DetachQuery, VolumeCreate, VolumeResize};
use attachments::{Attachments, BlockDevices, Parts};
use service::Service;
use service_testing::TestNode;
use vhost_backend::memory::budget::MemoryBudget;
use volumes::Volumes;

const SIZE_BYTES: u64 = 64 << 20;

/// A node whose volumes and attachments are served.
struct Serving {
    node: TestNode,
    volumes: Arc<Volumes>,
    attachments: Arc<Attachments>,
}

impl Serving {
    async fn start(data: &Path) -> Self {
        let node = TestNode::open(data).await;
        let volumes = node.volumes();
        let parts = Parts {
            config: node.config.clone(),
            storage: Arc::clone(&node.storage.storage),
            threads: node.storage.threads.clone(),
            memory_budget: MemoryBudget::new(node.config.guest_memory, node.config.pinned_memory),
            block_devices: BlockDevices::default(),
            volumes: Arc::clone(&volumes),
            ending: service::ending::Ending::default(),
        };
        let attachments = Attachments::new(node.cluster.clone(), parts);
        Arc::clone(&volumes).start().await.unwrap();
        Arc::clone(&attachments).start().await.unwrap();
        Self {
            node,
            volumes,
            attachments,
        }
    }

    async fn stop(self) {
        self.attachments.stop().await;
        self.volumes.stop().await;
        self.node.close().await;
    }
}

async fn attach(serving: &Serving, data: &Path) -> String {
    let volume = VolumeCreate {
        name: "disk".to_owned(),
        size_bytes: SIZE_BYTES,
        pool: None,
        on_full_wait_s: None,
    };
    serving.volumes.create(volume).await.unwrap();
    let socket = data.join("disk.sock").to_str().unwrap().to_owned();
    let request = Attach {
        volume: "disk".to_owned(),
        socket: socket.clone(),
        block: false,
        queues: 1,
        queue_size: None,
        read_only: false,
        pin_memory: true,
        incoming: false,
    };
    serving.attachments.attach(request).await.unwrap();
    socket
}

#[tokio::test(flavor = "multi_thread")]
async fn attachment_is_served_after_a_restart_until_it_is_detached() {
    let dir = tempfile::tempdir().unwrap();
    let serving = Serving::start(dir.path()).await;
    let socket = attach(&serving, dir.path()).await;
    serving.stop().await;
    let serving = Serving::start(dir.path()).await;
    let listed = serving.attachments.as_applied().await.unwrap();
    assert_eq!(listed.len(), 1);
    assert_eq!(listed[0].socket, socket);
    assert_eq!(listed[0].state, AttachmentState::Listening);
    assert_eq!(serving.attachments.problems().await, []);
    let larger = VolumeResize {
        size_bytes: 2 * SIZE_BYTES,
        shrink: false,
    };
    let resized = serving.volumes.resize("disk", &larger).await.unwrap();
    assert_eq!(resized.attached, std::slice::from_ref(&socket));
    let query = DetachQuery {
        target: socket,
        force: false,
        forget: false,
        node: None,
    };
    serving.attachments.detach(&query).await.unwrap();
    assert_eq!(serving.attachments.as_applied().await.unwrap(), []);
    serving.stop().await;
}

/// The lock of attachments is never held longer than that of open volumes: else a task that locks both would
/// panic.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn tasks_that_lock_volumes_and_attachments_do_not_meet() {
    let dir = tempfile::tempdir().unwrap();
    let serving = Serving::start(dir.path()).await;
    let tasks = (0..4).map(|_| {
        let attachments = Arc::clone(&serving.attachments);
        tokio::spawn(async move {
            for _ in 0..20_000 {
                attachments.as_applied().await.unwrap();
            }
        })
    });
    for task in tasks.collect::<Vec<_>>() {
        task.await.unwrap();
    }
    serving.stop().await;
}
