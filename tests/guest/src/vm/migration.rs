//! Live migration: a second QEMU waits for the guest, and the first one sends it there.

use std::os::unix::net::UnixStream;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};
use tempfile::TempDir;

use super::{BOOT_LIMIT, Vm, VmConfig, accept, listen, qemu_command, scratch, with_logs};
use crate::accel::Accel;
use crate::image::GuestImage;
use crate::process::{Guarded, log_tail, wait_until};
use crate::qmp::Qmp;

/// A migration of a small guest takes seconds; machines are busy.
const MIGRATION_LIMIT: Duration = Duration::from_secs(180);

/// Bytes in a second: more than a socket carries.
pub const BANDWIDTH_MAX: u64 = 1 << 40;
/// Time for which a guest may be stopped: QEMU ends a migration as soon as it takes less.
const DOWNTIME_MAX: Duration = Duration::from_secs(1);

/// How a migration ended, or that it goes on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum MigrationState {
    /// It goes on; so often the guest's memory was sent so far, in whole or what was written since.
    Active {
        /// Rounds over the guest's memory.
        rounds: u64,
    },
    /// The guest is at the destination; for so long it did not run.
    Completed {
        /// QEMU's figure, in milliseconds.
        downtime_ms: u64,
    },
    /// The guest is where it was.
    Failed(String),
}

/// A QEMU that waits for a guest. Dropping it kills it.
#[derive(Debug)]
pub struct Destination {
    qemu: Guarded,
    agent: UnixStream,
    qmp: Qmp,
    scratch: TempDir,
}

impl Destination {
    /// Starts a QEMU with the guest's configuration, but disks of its own, and waits until it can be reached.
    pub fn start(image: &GuestImage, config: &VmConfig) -> Result<Self> {
        ensure!(
            config.files.is_empty(),
            "a destination needs the initramfs of the source only for its size"
        );
        let scratch = scratch()?;
        let accel = Accel::probe(image)?;
        let (agent, qmp) = (
            listen(scratch.path(), "agent")?,
            listen(scratch.path(), "qmp")?,
        );
        let log = std::fs::File::create(scratch.path().join("qemu.log"))?;
        let mut command = qemu_command(image, &image.initramfs(), config, accel, scratch.path());
        command
            .args(["-incoming", "defer"])
            .stdin(std::process::Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log);
        let mut qemu = Guarded::spawn(&mut command, "qemu-system-x86_64")?;
        let connected = (|| {
            let mut qmp = Qmp::new(accept(&qmp, &mut qemu)?)?;
            let agent = accept(&agent, &mut qemu)?;
            let uri = format!("unix:{}", scratch.path().join("migration").display());
            qmp.execute("migrate-incoming", json!({ "uri": uri }))?;
            Ok((agent, qmp))
        })();
        match connected {
            Ok((agent, qmp)) => Ok(Self {
                qemu,
                agent,
                qmp,
                scratch,
            }),
            Err(error) => Err(with_logs(error, scratch.path()).context("start the destination")),
        }
    }

    /// Whether its QEMU has ended, as it does when a migration fails.
    pub fn has_ended(&mut self) -> Result<bool> {
        Ok(self.qemu.ended()?.is_some())
    }

    /// Its QEMU's monitor.
    pub fn qmp(&mut self) -> &mut Qmp {
        &mut self.qmp
    }
}

impl Vm {
    /// Begins a migration that sends at most so many bytes in a second.
    pub fn begin_migration(&mut self, to: &Destination, bandwidth: u64) -> Result<()> {
        self.limit_migration(bandwidth)?;
        let uri = format!("unix:{}", to.scratch.path().join("migration").display());
        self.qmp.execute("migrate", json!({ "uri": uri }))?;
        Ok(())
    }

    /// From now on a migration sends at most so many bytes in a second.
    pub fn limit_migration(&mut self, bandwidth: u64) -> Result<()> {
        let millis = u64::try_from(DOWNTIME_MAX.as_millis()).unwrap_or(u64::MAX);
        let arguments = json!({ "downtime-limit": millis, "max-bandwidth": bandwidth });
        self.qmp.execute("migrate-set-parameters", arguments)?;
        Ok(())
    }

    /// Calls a migration off.
    pub fn cancel_migration(&mut self) -> Result<()> {
        self.qmp.execute("migrate_cancel", json!({}))?;
        Ok(())
    }

    /// How the last migration stands.
    pub fn migration(&mut self) -> Result<MigrationState> {
        let told = self.qmp.execute("query-migrate", json!({}))?;
        let number = |value: &Value| value.as_u64().unwrap_or(0);
        match told["status"].as_str() {
            Some("completed") => Ok(MigrationState::Completed {
                downtime_ms: number(&told["downtime"]),
            }),
            Some("failed" | "cancelled") => Ok(MigrationState::Failed(told.to_string())),
            Some(_) => Ok(MigrationState::Active {
                rounds: number(&told["ram"]["dirty-sync-count"]),
            }),
            None => bail!("query-migrate: {told}"),
        }
    }

    /// Waits until the migration is over.
    pub fn wait_migration(&mut self) -> Result<MigrationState> {
        wait_until(MIGRATION_LIMIT, || match self.migration()? {
            MigrationState::Active { .. } => Ok(None),
            ended => Ok(Some(ended)),
        })
        .context("the migration does not end")
    }

    /// The guest is at the destination: goes on with it there. The QEMU that it came from ends.
    pub fn continue_at(&mut self, mut to: Destination) -> Result<()> {
        let running = wait_until(BOOT_LIMIT, || {
            let told = to.qmp.execute("query-status", json!({}))?;
            Ok((told["status"] == "running").then_some(()))
        });
        running.with_context(|| {
            format!(
                "the guest runs at no end\n{}",
                log_tail(&to.scratch.path().join("qemu.log"))
            )
        })?;
        self.agent.replace(to.agent);
        self.qemu = to.qemu;
        self.qmp = to.qmp;
        self.scratch = to.scratch;
        Ok(())
    }

    /// Migrates the guest as fast as it goes. Returns for how long it did not run, in milliseconds.
    pub fn migrate(&mut self, to: Destination) -> Result<u64> {
        self.begin_migration(&to, BANDWIDTH_MAX)?;
        match self.wait_migration()? {
            MigrationState::Completed { downtime_ms } => {
                self.continue_at(to)?;
                Ok(downtime_ms)
            }
            other => {
                let log = log_tail(&to.scratch.path().join("qemu.log"));
                bail!("the migration ended as {other:?}; the destination said:\n{log}")
            }
        }
    }
}
