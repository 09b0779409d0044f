//! A virtual machine that is a node: Debian 13's kernel makes block devices of the volumes that `penstock`
//! serves in it.

use std::path::Path;
use std::time::Duration;

use anyhow::{Result, ensure};
use guest_rig::image::DEBIAN_13;
use guest_rig::paths::penstock_binary;
use guest_rig::{GuestImage, Recipe, Vm, VmConfig};

/// The machine.
pub const RECIPE: Recipe = Recipe {
    name: "block",
    suite: DEBIAN_13,
    packages: "fio,iproute2,xfsprogs,util-linux,busybox-static,libibverbs1,libstdc++6",
    kernel_package: "linux-image-amd64",
    modules: &[
        "virtio_blk",
        "crc32c_generic",
        "libcrc32c",
        "xfs",
        "crc16",
        "mbcache",
        "jbd2",
        "ext4",
        "vhost_iotlb",
        "vdpa",
        "vduse",
        "virtio_vdpa",
        "nbd",
    ],
    programs: &[
        "usr/bin/fio",
        "usr/sbin/vdpa",
        "usr/sbin/mkfs.xfs",
        "usr/sbin/xfs_growfs",
        "usr/sbin/xfs_io",
        "usr/sbin/xfs_repair",
        "usr/sbin/blkdiscard",
        "usr/sbin/blockdev",
    ],
    files: &[
        "usr/lib/x86_64-linux-gnu/libibverbs.so.1",
        "usr/lib/x86_64-linux-gnu/libgcc_s.so.1",
        "usr/lib/x86_64-linux-gnu/libm.so.6",
        "usr/lib/x86_64-linux-gnu/libstdc++.so.6",
    ],
    boot_disk: false,
};

/// Memory of the machine: what its node stores is in it, too.
const MEMORY_MIB: u32 = 3072;
/// Until a daemon serves and is well.
const START_LIMIT: Duration = Duration::from_secs(120);
/// The daemon of the machine: as the package runs it, it gives root's rights up.
const SERVE: &str = "penstock serve --data /run/penstock --user 1000 --group 1000 \
                     --sandbox best-effort @MORE@ >> /run/penstock.log 2>&1 & echo $! > /run/penstock.pid";

/// Takes VDUSE out of the kernel.
const UNLOAD_VDUSE: &str = "rmmod virtio_vdpa vduse";
/// It stores in the machine's memory.
const IN_MEMORY: &str = "--device-size 1G";

/// A running machine with a daemon in it. Dropping it kills it.
#[derive(Debug)]
pub struct Machine {
    vm: Vm,
    /// Options of its daemon.
    options: String,
}

impl Machine {
    /// Boots it, and starts its daemon.
    pub fn start() -> Result<Self> {
        Self::start_with(IN_MEMORY, &[])
    }

    /// The same, with these options of `penstock serve`, and with programs: which, and where in the machine.
    pub fn start_with(options: &str, programs: &[(&Path, &str)]) -> Result<Self> {
        let mut machine = Self::boot(options, programs)?;
        machine.serve()?;
        Ok(machine)
    }

    /// The same, with a kernel that has no VDUSE.
    pub fn start_without_vduse() -> Result<Self> {
        let mut machine = Self::boot(IN_MEMORY, &[])?;
        machine.sh(UNLOAD_VDUSE)?;
        machine.serve()?;
        Ok(machine)
    }

    /// Starts the daemon again, with a kernel that has no VDUSE from now on.
    pub fn restart_without_vduse(&mut self) -> Result<()> {
        self.sh("kill $(cat /run/penstock.pid)")?;
        self.until("! kill -0 $(cat /run/penstock.pid) 2> /dev/null")?;
        self.sh(UNLOAD_VDUSE)?;
        self.serve()
    }

    fn boot(options: &str, programs: &[(&Path, &str)]) -> Result<Self> {
        let image = GuestImage::of(&RECIPE, |line| eprintln!("rig: {line}"))?;
        let mut config =
            VmConfig::new(Vec::new()).with_file(penstock_binary()?, "usr/bin/penstock");
        config.memory_mib = MEMORY_MIB;
        for (program, place) in programs {
            config = config.with_file(*program, place.trim_start_matches('/'));
        }
        let mut machine = Self {
            vm: Vm::boot(&image, &config)?,
            options: options.to_owned(),
        };
        machine.sh(
            "echo root:x:0:0::/:/bin/sh > /etc/passwd; echo store:x:1000:1000::/:/bin/sh >> /etc/passwd
             echo root:x:0: > /etc/group; echo store:x:1000: >> /etc/group
             mkdir -p /run/penstock && chown 1000:1000 /run/penstock && chmod 700 /run/penstock",
        )?;
        Ok(machine)
    }

    /// Starts the daemon, and waits until it is well.
    pub fn serve(&mut self) -> Result<()> {
        self.sh(&SERVE.replace("@MORE@", &self.options))?;
        // One that drops what is written is never well.
        let up = match self.options.contains("--store null") {
            true => "penstock --data /run/penstock status > /dev/null",
            false => "penstock --data /run/penstock health",
        };
        let waited = self.vm.sh_until(up, START_LIMIT);
        match waited {
            Ok(_) => Ok(()),
            Err(error) => Err(error.context(self.log()?)),
        }
    }

    fn log(&mut self) -> Result<String> {
        self.vm
            .sh("tail -n 30 /run/penstock.log; dmesg | tail -n 10")
    }

    /// Kills the daemon.
    pub fn kill_daemon(&mut self) -> Result<()> {
        self.sh("kill -9 $(cat /run/penstock.pid); while kill -0 $(cat /run/penstock.pid) 2>/dev/null; do \
                 sleep 0.05; done")
            .map(drop)
    }

    /// Runs a script that must succeed, and returns its output.
    pub fn sh(&mut self, script: &str) -> Result<String> {
        self.vm.sh(script)
    }

    /// Runs `penstock` with these words, which must succeed.
    pub fn ok(&mut self, words: &str) -> Result<String> {
        let done = self
            .vm
            .sh(&format!("penstock --data /run/penstock {words}"));
        match done {
            Ok(text) => Ok(text),
            Err(error) => Err(error.context(self.log()?)),
        }
    }

    /// Runs `penstock`, which must fail with one line, and returns that.
    pub fn refused(&mut self, words: &str) -> Result<String> {
        let output = self.vm.run(
            &format!("penstock --data /run/penstock {words} 2>&1 > /dev/null"),
            START_LIMIT,
        )?;
        let text = output.text.trim_end();
        ensure!(
            output.code != 0 && text.lines().count() == 1,
            "penstock {words} did not fail with one line, but with status {}:\n{text}",
            output.code
        );
        Ok(text.to_owned())
    }

    /// Repeats a script until it succeeds.
    pub fn until(&mut self, script: &str) -> Result<String> {
        self.vm.sh_until(script, START_LIMIT)
    }

    /// The machine itself.
    pub fn vm(&mut self) -> &mut Vm {
        &mut self.vm
    }
}
