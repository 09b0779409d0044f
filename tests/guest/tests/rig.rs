//! The rig itself, against a back end that is not ours: when this fails, the rig is broken, not Penstock.

use anyhow::Result;
use guest_rig::storage_daemon::Backing;
use guest_rig::{Disk, GuestImage, StorageDaemon, Vm, VmConfig};

#[test]
fn guest_runs_scripts_and_sees_a_disk_of_another_back_end() -> Result<()> {
    let image = GuestImage::get(|line| eprintln!("{line}"))?;
    let scratch = tempfile::tempdir()?;
    let file = scratch.path().join("disk");
    std::fs::File::create(&file)?.set_len(128 << 20)?;
    let backend = StorageDaemon::start(scratch.path(), &Backing::File(file), 2, None)?;
    let mut vm = Vm::boot(
        &image,
        &VmConfig::new(vec![Disk::new(backend.socket()).queues(2)]),
    )?;

    assert_eq!(
        vm.sh("blockdev --getsize64 /dev/vda")?,
        (128u64 << 20).to_string()
    );
    assert_eq!(
        vm.run(
            "echo out; echo err >&2; exit 7",
            std::time::Duration::from_secs(60)
        )?
        .code,
        7
    );
    vm.sh("mkfs.ext4 -q /dev/vda && mount /dev/vda /mnt && cp -r /etc /mnt && umount /mnt && e2fsck -fn \
        /dev/vda")?;
    for mode in ["segments", "sectors", "unaligned"] {
        assert_eq!(
            vm.sh(&format!("rigio {mode} /dev/vda 1"))?,
            format!("{mode}: ok")
        );
    }
    assert_eq!(vm.io_errors()?, Vec::<String>::new());
    vm.power_off()
}
