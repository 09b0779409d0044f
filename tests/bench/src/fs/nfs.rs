//! The other peer: the NFS server of the guest's own kernel, on an ext4 on a virtio disk, and its client over
//! the loopback device.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use guest_rig::storage_daemon::Backing;
use guest_rig::{Recipe, StorageDaemon, Vm};

use super::Options;
use super::peers::Peer;

/// Where the guest has the filesystem that its server exports.
pub const SERVED: &str = "/srv";
/// Making a filesystem and starting a server, under TCG, and the server's grace period.
const LIMIT: Duration = Duration::from_secs(600);

/// The guest: as that of the filesystems' tests, with NFS.
pub const RECIPE: Recipe = Recipe {
    name: "filesystem-bench",
    packages: "nfs-kernel-server,nfs-common,e2fsprogs,util-linux,busybox-static",
    modules: &[
        "virtio_ring",
        "virtio",
        "virtio_pci_modern_dev",
        "virtio_pci_legacy_dev",
        "virtio_pci",
        "virtio_console",
        "virtio_blk",
        "fuse",
        "virtiofs",
        "crc16",
        "crc32c_generic",
        "mbcache",
        "jbd2",
        "ext4",
        "sunrpc",
        "grace",
        "lockd",
        "nfs_acl",
        "auth_rpcgss",
        "nfsd",
        "netfs",
        "fscache",
        "nfs",
        "dns_resolver",
        "nfsv4",
    ],
    programs: &[
        "usr/bin/rigio",
        "sbin/mke2fs",
        "usr/sbin/exportfs",
        "usr/sbin/rpc.mountd",
        "usr/sbin/rpc.nfsd",
        "sbin/mount.nfs",
    ],
    files: &[
        "etc/mke2fs.conf",
        "etc/netconfig",
        "etc/protocols",
        "etc/services",
    ],
    ..filesystem_rig::RECIPE
};

/// Starts what serves the guest's disk: a file of the host past the host's cache, as Penstock's device is.
pub fn disk(options: &Options, directory: &Path) -> Result<StorageDaemon> {
    let file = directory.join("nfs.raw");
    let bytes = (2 << 30) + (options.megabytes << 21) + options.files * 16_384;
    std::fs::File::create(&file)
        .and_then(|file| file.set_len(bytes))
        .context("create the disk of the NFS server")?;
    StorageDaemon::start(directory, &Backing::File(file), 1, None)
}

/// Makes the filesystem, starts the server, and mounts what it exports. It acknowledges what is stable
/// (`sync`, the default of exports).
pub fn mount(vm: &mut Vm) -> Result<()> {
    let at = Peer::Nfs.mount();
    let script = format!(
        "set -e
         ifconfig lo 127.0.0.1 up
         mkdir -p {SERVED} {at} /run/pipes /var/lib/nfs/v4recovery
         mkfs.ext4 -q -i 4096 /dev/vda
         mount -t ext4 -o noinit_itable /dev/vda {SERVED}
         touch /var/lib/nfs/etab /var/lib/nfs/rmtab
         mount -t nfsd nfsd /proc/fs/nfsd
         mount -t rpc_pipefs rpc_pipefs /run/pipes
         rpc.mountd -N 2 -N 3 > /dev/null 2>&1
         exportfs -i -o rw,sync,no_subtree_check,no_root_squash,fsid=0 127.0.0.1:{SERVED}
         rpc.nfsd -N 3 -N 4.0 -N 4.1 -V 4.2 -L 10 -G 10 16
         mount.nfs 127.0.0.1:/ {at} -o vers=4.2,hard,proto=tcp
         touch {at}/first && rm {at}/first
         grep ' {at} nfs4 ' /proc/mounts | grep -q vers=4.2"
    );
    let output = vm.run(&script, LIMIT)?;
    ensure!(output.code == 0, "{}", output.text.trim_end());
    Ok(())
}
