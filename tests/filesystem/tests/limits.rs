//! As many names, levels and links as there may be, and a pool without room: with all of it removed, what is
//! stored is as before.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use filesystem_rig::front_end::ROOT;
use filesystem_rig::names::name;
use filesystem_rig::scripts::passes_within;
use filesystem_rig::{PROGRAM_NAME as NAME, attach, gives_back, mount, mounted_with};
use guest_rig::process::wait_until;
use guest_rig::{Daemon, Form, Vm};

const PROGRAM: &str = env!("CARGO_BIN_EXE_filesystem-program");
const MOUNT: &str = "mount -t virtiofs tree /mnt";
/// For each name that is made, listed and removed, on an emulated machine that others use as well.
const NAME_LIMIT: Duration = Duration::from_millis(30);
/// Names that a front end makes at a time.
const NAMES_AT_ONCE: u64 = 10_000;
/// Room that was freed can be written to within this.
const ROOM_LIMIT: Duration = Duration::from_secs(180);

/// A node with a filesystem, and a guest that has mounted it.
struct Rig {
    // Before what serves it.
    vm: Vm,
    daemon: Daemon,
    before: u64,
    _dir: tempfile::TempDir,
}

impl Rig {
    fn start(device_size: &str) -> Result<Self> {
        let dir = tempfile::tempdir()?;
        let args = ["--device-size", device_size, "--preallocation", "off"];
        let daemon = Daemon::start(&dir.path().join("data"), &args)?;
        daemon.cli(&["fs", "create", "tree"])?;
        let before = daemon.used_bytes()?;
        let tree = attach(&daemon, "tree", &[])?;
        let vm = mounted_with(vec![tree], &[(Path::new(PROGRAM), NAME)])?;
        Ok(Self {
            vm,
            daemon,
            before,
            _dir: dir,
        })
    }

    /// Nothing is left, neither in the tree nor on the device.
    fn end(mut self) -> Result<()> {
        ensure!(self.vm.sh("ls -A /mnt")?.is_empty(), "something is left");
        self.vm.sh("umount /mnt")?;
        self.vm.power_off()?;
        gives_back(&self.daemon, self.before)
    }
}

/// Makes something, checks it as a fresh mount sees it, and removes it.
fn goes_through(vm: &mut Vm, verb: &str, count: u64) -> Result<()> {
    let limit = Duration::from_secs(120) + NAME_LIMIT * u32::try_from(count)?;
    for script in [
        format!("{NAME} {verb} make /mnt/{verb} {count}"),
        format!("umount /mnt && {MOUNT} && {NAME} {verb} check /mnt/{verb} {count}"),
        format!("{NAME} {verb} remove /mnt/{verb} {count}"),
    ] {
        let start = std::time::Instant::now();
        passes_within(vm, &script, limit)?;
        eprintln!("{script}: {} s", start.elapsed().as_secs());
    }
    Ok(())
}

/// Names of one directory that no guest makes within hours, as its kernel makes one after the other: made and
/// removed by a front end without a guest, checked in one.
fn a_million_names_go_through(rig: &mut Rig) -> Result<()> {
    const COUNT: u64 = 1_000_000;
    let mut front_end = mount(&rig.daemon, "tree")?;
    let directory = front_end.make_directory(ROOT, b"million")?;
    let batches = || {
        let begins = (0..COUNT).step_by(NAMES_AT_ONCE as usize);
        begins.map(|begin| (begin..begin + NAMES_AT_ONCE).map(name).collect::<Vec<_>>())
    };
    for names in batches() {
        front_end.make_files(directory, &names, &[])?;
    }
    let check = format!("{NAME} names check /mnt/million {COUNT}");
    passes_within(&mut rig.vm, &check, NAME_LIMIT * u32::try_from(COUNT)?)?;
    for names in batches() {
        front_end.remove_files(directory, &names)?;
    }
    // Also that nothing is left in it.
    passes_within(&mut rig.vm, "rmdir /mnt/million", Duration::from_secs(120))
}

#[test]
fn a_directory_has_as_many_names_as_it_may() -> Result<()> {
    let form = Form::of_this_run();
    let mut rig = Rig::start("4G")?;
    goes_through(&mut rig.vm, "names", form.pick(3_000, 20_000))?;
    if form == Form::Long {
        a_million_names_go_through(&mut rig)?;
    }
    rig.end()
}

#[test]
fn a_tree_has_as_many_levels_and_links_as_it_may() -> Result<()> {
    let form = Form::of_this_run();
    let mut rig = Rig::start("4G")?;
    goes_through(&mut rig.vm, "deep", form.pick(300, 4_000))?;
    if form == Form::Long {
        // What it comes to without a guest, the namespace's own tests have.
        let links = format!("{NAME} links /mnt/links 65000");
        passes_within(&mut rig.vm, &links, NAME_LIMIT * 65_000)?;
    }
    rig.end()
}

#[test]
fn a_full_pool_says_so_and_takes_removals() -> Result<()> {
    let mut rig = Rig::start("256M")?;
    let limit = Duration::from_secs(600);
    rig.vm.sh("echo kept > /mnt/kept && sync")?;
    let output = rig.vm.run(&format!("{NAME} fill /mnt/fill"), limit)?;
    ensure!(output.code == 0, "{}", output.text);
    let files: u64 = output.text.trim().parse().context("how many files")?;
    eprintln!("there was room for {files} MiB");
    ensure!(files > 50, "there was room for {files} MiB only");
    // What was there can be read, and names need no room of the pool.
    passes_within(
        &mut rig.vm,
        "[ $(cat /mnt/kept) = kept ]
         if dd if=/dev/urandom of=/mnt/more bs=1M count=64 conv=fsync 2> /run/error; then exit 1; fi
         grep -q 'No space left on device' /run/error
         mkdir /mnt/directory
         mv /mnt/kept /mnt/directory/kept
         ln -s kept /mnt/directory/link
         rm -f /mnt/more
         cd /mnt/fill
         rm $(ls | tail -n 40)
         cd /",
        limit,
    )?;
    let vm = &mut rig.vm;
    wait_until(ROOM_LIMIT, || {
        let write = "dd if=/dev/urandom of=/mnt/again bs=1M count=16 conv=fsync && rm /run/error";
        Ok((vm.run(write, limit)?.code == 0).then_some(()))
    })
    .context("what was freed is no room")?;
    passes_within(
        vm,
        &format!(
            "sum=$(md5sum < /mnt/again)
             umount /mnt
             {MOUNT}
             [ \"$(md5sum < /mnt/again)\" = \"$sum\" ]
             [ $(cat /mnt/directory/link) = kept ]
             rm -r /mnt/*"
        ),
        limit,
    )?;
    rig.end()
}
