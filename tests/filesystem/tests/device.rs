//! The virtio-fs device with Linux as its guest: on a filesystem in memory, so that what fails here is the
//! device or the codec.

use anyhow::{Result, ensure};
use filesystem_rig::scripts::{DATA, LIMIT, TREE, passes};
use filesystem_rig::{QUEUE_SIZE, Served, boot};
use fs_device::Service;
use fs_device::memory_fs::{DeferringService, MemoryFilesystem, MemoryService};

fn uses_a_tree<S: Service<Filesystem = MemoryFilesystem>>(served: Served<S>) -> Result<()> {
    let mut vm = boot(vec![served.tree().queue_size(QUEUE_SIZE)])?;
    vm.sh("mount -t virtiofs tree /mnt")?;
    passes(&mut vm, TREE)?;
    passes(&mut vm, DATA)?;
    let (inodes, handles) = (
        served.filesystem().inodes(),
        served.filesystem().open_handles(),
    );
    ensure!(
        (inodes, handles) == (1, 0),
        "{inodes} inodes and {handles} handles are left"
    );
    vm.power_off()?;
    served.end();
    Ok(())
}

#[test]
fn linux_uses_a_tree_that_is_served_at_once() -> Result<()> {
    let dir = tempfile::tempdir()?;
    uses_a_tree(Served::start(dir.path(), (1, false), MemoryService::new)?)
}

#[test]
fn linux_uses_a_tree_whose_replies_come_in_another_order_on_two_queues() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let make = || DeferringService::new(|waiting| waiting - 1);
    uses_a_tree(Served::start(dir.path(), (2, false), make)?)
}

#[test]
fn a_read_only_tree_is_read_and_not_changed() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let served = Served::start(dir.path(), (1, true), MemoryService::new)?;
    let mut vm = boot(vec![served.tree()])?;
    vm.sh("mount -t virtiofs tree /mnt && ls -la /mnt")?;
    for change in ["mkdir /mnt/a", "touch /mnt/a", "chmod 700 /mnt"] {
        let output = vm.run(change, LIMIT)?;
        ensure!(
            output.code != 0 && output.text.contains("Read-only file system"),
            "{change}: {}",
            output.text
        );
    }
    vm.power_off()?;
    served.end();
    Ok(())
}
