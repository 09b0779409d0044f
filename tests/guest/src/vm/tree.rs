//! Filesystems that a guest mounts by virtio-fs.

use std::path::PathBuf;
use std::process::Command;

/// A filesystem on a vhost-user-fs socket.
#[derive(Debug, Clone)]
pub struct Tree {
    socket: PathBuf,
    tag: String,
    queues: u16,
    queue_size: u16,
}

impl Tree {
    /// A filesystem with one request queue of 128 entries, as QEMU makes it.
    pub fn new(socket: impl Into<PathBuf>, tag: impl Into<String>) -> Self {
        Self {
            socket: socket.into(),
            tag: tag.into(),
            queues: 1,
            queue_size: 128,
        }
    }

    /// The same with so many request queues.
    pub fn queues(mut self, queues: u16) -> Self {
        self.queues = queues;
        self
    }

    /// The same with queues of so many entries.
    pub fn queue_size(mut self, entries: u16) -> Self {
        self.queue_size = entries;
        self
    }
}

pub(super) fn add(command: &mut Command, trees: &[Tree]) {
    for (index, tree) in trees.iter().enumerate() {
        let (socket, tag) = (tree.socket.display(), &tree.tag);
        let (queues, size) = (tree.queues, tree.queue_size);
        command
            .args(["-chardev", &format!("socket,id=tree{index},path={socket}")])
            .args([
                "-device",
                &format!(
                    "vhost-user-fs-pci,chardev=tree{index},tag={tag},num-request-queues={queues},\
                     queue-size={size}"
                ),
            ]);
    }
}
