//! A guest with virtiofs, and what it mounts: a filesystem in memory, or one of a cluster.

pub mod front_end;
pub mod names;
pub mod scripts;

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use fs_device::memory_fs::MemoryFilesystem;
use fs_device::{FsDevice, FsEngine, FsOptions, Service};
use guest_rig::image::{DEBIAN_12, DEBIAN_13};
use guest_rig::process::wait_until;
use guest_rig::{Daemon, GuestImage, Recipe, Tree, Vm, VmConfig};
use vhost_backend::data_thread::{ThreadOptions, Threads};
use vhost_backend::memory::budget::MemoryPolicy;
use vhost_backend::session::Attachment;
use vhost_backend::session::socket::{Endpoint, Listener, SocketOptions};

use front_end::FrontEnd;

/// The guest: Debian's kernel for machines has virtiofs, its flavour for virtual machines has not.
pub const RECIPE: Recipe = Recipe {
    name: "filesystem",
    suite: DEBIAN_12,
    packages: "attr,fio,util-linux,busybox-static",
    kernel_package: "linux-image-amd64",
    modules: &[
        "virtio_ring",
        "virtio",
        "virtio_pci_modern_dev",
        "virtio_pci_legacy_dev",
        "virtio_pci",
        "virtio_console",
        "fuse",
        "virtiofs",
        "overlay",
    ],
    programs: &[
        "bin/cp",
        "bin/ls",
        "bin/mv",
        // One that runs by any name, which busybox does not.
        "bin/sleep",
        "usr/bin/fallocate",
        "usr/bin/fio",
        "usr/bin/getfattr",
        "usr/bin/setfattr",
        "usr/bin/stat",
        "usr/bin/truncate",
    ],
    files: &[
        // What a Rust program needs besides libc.
        "usr/lib/x86_64-linux-gnu/libgcc_s.so.1",
        "usr/lib/x86_64-linux-gnu/libm.so.6",
    ],
    boot_disk: false,
};

/// The same with Linux 6.12, in which most of what the other one loads as modules is built in.
pub const LINUX_6_12: Recipe = Recipe {
    name: "filesystem-6.12",
    suite: DEBIAN_13,
    modules: &["overlay"],
    ..RECIPE
};

/// The name by which guests have this package's program, whose path on the host only its tests know.
pub const PROGRAM_NAME: &str = "filesystem-program";
/// By this name guests mount it.
const TAG: &str = "tree";
/// By this one what can only be read.
pub const READ_ONLY_TAG: &str = "read-only";
/// What is deleted is given back within this.
const BACK_LIMIT: Duration = Duration::from_secs(300);
/// Less than this stays in the segment that is written.
const SEGMENT_FREED_MIN: u64 = 1 << 20;
/// Entries of a queue that takes requests of 1 MiB.
pub const QUEUE_SIZE: u16 = 1024;

/// A filesystem in the memory of this process, served on a socket.
pub struct Served<S: Service<Filesystem = MemoryFilesystem>> {
    device: Arc<FsDevice<MemoryFilesystem>>,
    threads: Arc<Threads<FsEngine<S>>>,
    attachment: Attachment,
    socket: PathBuf,
    queues: u16,
}

impl<S: Service<Filesystem = MemoryFilesystem>> Served<S> {
    /// Serves it below `dir`, with so many request queues, each on a thread of its own. `make` makes what a
    /// thread serves it with.
    pub fn start(
        dir: &Path,
        (queues, read_only): (u16, bool),
        make: impl Fn() -> io::Result<S> + Send + Sync + 'static,
    ) -> Result<Self> {
        let options = FsOptions {
            tag: TAG.to_owned(),
            request_queues: queues,
            read_only,
        };
        let device = FsDevice::new(MemoryFilesystem::new(), options)?;
        let options = ThreadOptions {
            threads: usize::from(queues),
            ..ThreadOptions::default()
        };
        let threads = Threads::start(&options, move |_| make().map(FsEngine::new))?;
        let socket = dir.join("fs.sock");
        let listener = Listener::bind(&SocketOptions::new(&socket))?;
        let attachment = Attachment::start(
            Endpoint::Listening(listener),
            Arc::clone(&device),
            Arc::clone(&threads),
            MemoryPolicy::alone(),
        )?;
        Ok(Self {
            device,
            threads,
            attachment,
            socket,
            queues,
        })
    }

    /// How a guest gets at it.
    pub fn tree(&self) -> Tree {
        Tree::new(&self.socket, TAG).queues(self.queues)
    }

    /// What is served.
    pub fn filesystem(&self) -> &MemoryFilesystem {
        self.device.filesystem()
    }

    /// Ends it.
    pub fn end(self) {
        self.attachment.close();
        self.threads.shutdown();
    }
}

/// Has a daemon serve a filesystem on a socket in its data directory; how a guest gets at it.
pub fn attach(daemon: &Daemon, name: &str, options: &[&str]) -> Result<Tree> {
    attach_at(daemon, name, (name, TAG), options)?;
    Ok(tree_of(daemon, name))
}

/// Attaches the filesystem again, with another tag.
pub fn attach_as(daemon: &Daemon, name: &str, tag: &str) -> Result<Tree> {
    let socket = attach_at(daemon, name, (&format!("{name}-{tag}"), tag), &[])?;
    Ok(Tree::new(&socket, tag).queue_size(QUEUE_SIZE))
}

/// The same once more, read-only and by a tag of its own: [`READ_ONLY_TAG`].
pub fn attach_read_only(daemon: &Daemon, name: &str) -> Result<Tree> {
    let file = format!("{name}-read-only");
    let socket = attach_at(daemon, name, (&file, READ_ONLY_TAG), &["--read-only"])?;
    Ok(Tree::new(&socket, READ_ONLY_TAG).queue_size(QUEUE_SIZE))
}

/// Has a daemon serve a filesystem once more, to a front end without a guest.
pub fn mount(daemon: &Daemon, name: &str) -> Result<FrontEnd> {
    mount_again(daemon, name, 0)
}

/// The same to one more, by its number.
pub fn mount_again(daemon: &Daemon, name: &str, number: usize) -> Result<FrontEnd> {
    let file = format!("{name}-front-end{number}");
    let socket = attach_at(daemon, name, (&file, TAG), &[])?;
    FrontEnd::mount(&socket)
}

/// On the socket of this name, under this tag.
fn attach_at(
    daemon: &Daemon,
    name: &str,
    (file, tag): (&str, &str),
    options: &[&str],
) -> Result<PathBuf> {
    let socket = daemon.data().join(format!("{file}.sock"));
    let path = socket.display().to_string();
    let attach = ["attach", "fs", name, "--socket", &path, "--tag", tag];
    daemon.cli(&[&attach, options].concat())?;
    Ok(socket)
}

/// How a guest gets at what [`attach`] has a daemon serve.
pub fn tree_of(daemon: &Daemon, name: &str) -> Tree {
    let socket = daemon.data().join(format!("{name}.sock"));
    Tree::new(&socket, TAG).queue_size(QUEUE_SIZE)
}

/// Boots a guest with these trees.
pub fn boot(trees: Vec<Tree>) -> Result<Vm> {
    boot_with(trees, &[])
}

/// The same with programs of the host, by where they are here and their names in the guest's `/usr/bin`.
pub fn boot_with(trees: Vec<Tree>, programs: &[(&Path, &str)]) -> Result<Vm> {
    boot_of(&RECIPE, trees, programs)
}

/// The same of another recipe.
pub fn boot_of(recipe: &Recipe, trees: Vec<Tree>, programs: &[(&Path, &str)]) -> Result<Vm> {
    let image = GuestImage::of(recipe, |line| eprintln!("{line}"))?;
    let mut config = VmConfig {
        trees,
        ..VmConfig::new(Vec::new())
    };
    for (source, name) in programs {
        config = config.with_file(*source, &format!("usr/bin/{name}"));
    }
    Vm::boot(&image, &config)
}

/// Waits until nothing but the root is left of the filesystem `tree`, nor any space of files: no more is
/// used than `before`.
pub fn gives_back(daemon: &Daemon, before: u64) -> Result<()> {
    let shown = wait_until(BACK_LIMIT, || {
        let shown = daemon.json(&["fs", "show", "tree"])?;
        let is_empty = shown["inodes"] == 1 && shown["named_bytes"] == 0;
        let freed = shown["freed_bytes"].as_u64();
        let is_back = freed.is_some_and(|bytes| bytes < SEGMENT_FREED_MIN);
        Ok((is_empty && is_back).then_some(shown))
    });
    let shown = shown.with_context(|| format!("{:?}", daemon.cli(&["fs", "show", "tree"])))?;
    // Maps of chunks that were in use are left until a checkpoint.
    let slack = 4 << 20;
    daemon
        .wait_used(BACK_LIMIT, |used| used <= before + slack)
        .with_context(|| format!("{before} bytes were used before: {shown}"))?;
    Ok(())
}

/// A guest that has mounted a filesystem, which a daemon serves to it, at `/mnt`.
pub fn mounted(daemon: &Daemon, name: &str) -> Result<Vm> {
    mounted_with(vec![attach(daemon, name, &[])?], &[])
}

/// A guest that has mounted the first of these trees at `/mnt`, with programs as of [`boot_with`].
pub fn mounted_with(trees: Vec<Tree>, programs: &[(&Path, &str)]) -> Result<Vm> {
    let mut vm = boot_with(trees, programs)?;
    vm.sh(&format!("mount -t virtiofs {TAG} /mnt"))?;
    Ok(vm)
}
