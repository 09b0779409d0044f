//! A guest in which processes make files, each in a directory of its own, as long as they are let.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use filesystem_rig::{attach, boot};
use guest_rig::{Daemon, Vm};

/// Name of the filesystem.
const NAME: &str = "creators";
/// They make files within this, and end within this.
const LIMIT: Duration = Duration::from_secs(120);

/// How many there are, and what they do.
#[derive(Debug, Clone, Copy)]
pub(super) struct CreatorLoad {
    pub(super) creators: u32,
    /// Files that each makes before it rests for a second. None: they do not rest.
    pub(super) files_per_s: Option<u32>,
}

impl CreatorLoad {
    /// No creators.
    pub(super) const NONE: Self = Self {
        creators: 0,
        files_per_s: None,
    };
}

/// The guest.
pub(super) struct Creators {
    vm: Vm,
    count: u32,
    begin: Instant,
    before: u64,
}

impl Creators {
    /// Makes the filesystem and boots the guest. Returns once all of them have made a file.
    pub(super) fn start(daemon: &Daemon, load: CreatorLoad) -> Result<Self> {
        let listed = daemon.json(&["fs", "list"])?;
        let mut all = listed.as_array().context("`fs list` is no array")?.iter();
        if !all.any(|one| one["name"] == NAME) {
            daemon.cli(&["fs", "create", NAME])?;
        }
        let mut vm = boot(vec![attach(daemon, NAME, &[])?])?;
        vm.sh("mount -t virtiofs tree /mnt && rm -rf /mnt/*")?;
        let count = load.creators;
        // A sleep of its own for each file would take the processor time that it is to spare.
        let rest = load.files_per_s.map_or_else(String::new, |files| {
            format!("[ $((number % {files})) = 0 ] && sleep 1;")
        });
        vm.sh(&format!(
            "for each in $(seq {count}); do
                 mkdir /mnt/$each
                 (number=0
                  while [ ! -e /run/stop ]; do
                      number=$((number + 1)); : > /mnt/$each/$number; {rest}
                  done
                  echo >> /run/ended) > /dev/null 2>&1 &
             done"
        ))?;
        let all_began = format!("[ $(ls -d /mnt/*/1 2> /dev/null | wc -l) = {count} ]");
        vm.sh_until(&all_began, LIMIT)?;
        Ok(Self {
            before: inodes(daemon)?,
            begin: Instant::now(),
            vm,
            count,
        })
    }

    /// Ends it; how many files were made in a second.
    pub(super) fn end(mut self, daemon: &Daemon) -> Result<f64> {
        let made = inodes(daemon)? - self.before;
        let files_per_s = made as f64 / self.begin.elapsed().as_secs_f64();
        ensure!(made > 0, "nothing was made");
        self.vm.sh("touch /run/stop")?;
        let all_ended = format!("[ $(cat /run/ended | wc -l) = {} ]", self.count);
        self.vm.sh_until(&all_ended, LIMIT)?;
        self.vm.sh("umount /mnt")?;
        self.vm.power_off()?;
        daemon.cli(&["detach", NAME])?;
        Ok(files_per_s)
    }
}

fn inodes(daemon: &Daemon) -> Result<u64> {
    let shown = daemon.json(&["fs", "show", NAME])?;
    shown["inodes"].as_u64().context("`fs show` tells inodes")
}
