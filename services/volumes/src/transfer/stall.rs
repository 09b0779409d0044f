//! Writes wait while too few replicas of their group are in sync, for as long as that takes, and while
//! devices are full, for as long as the volume allows: a guest goes on when it is over. An import has
//! somebody who waits for its end and can begin it again, so it gives up: soon where devices are full, which
//! only people can fix, and else after a while.

use std::time::{Duration, Instant};

use api::failure::{Failure, Kind, Result};
use meta::{DeviceId, Volume};

use storage::{Copier, Handle, MAKE_ROOM};

use crate::volumes::Volumes;

/// Pause between two looks at why a write waits.
const LOOK_PAUSE: Duration = Duration::from_secs(2);
/// Looks in a row that find full devices: one alone may fall into the moment in which room is made.
const FULL_LOOKS: u32 = 2;
/// A write waits so long for whatever else. Nodes that are killed or cut off cost seconds, and their restart
/// less than this.
const WAIT_MAX: Duration = Duration::from_secs(60);

/// A volume that is being filled.
pub struct Filling<'a> {
    volumes: &'a Volumes,
    name: &'a str,
    pool: &'a str,
    handle: &'a Handle,
    copier: &'a Copier,
}

impl<'a> Filling<'a> {
    /// `copier` fills the volume behind `handle`, which nobody else uses and which is to be called `name`.
    pub fn new(
        volumes: &'a Volumes,
        (name, part): (&'a str, &'a Volume),
        handle: &'a Handle,
        copier: &'a Copier,
    ) -> Self {
        Filling {
            volumes,
            name,
            pool: &part.pool,
            handle,
            copier,
        }
    }

    /// Writes `data` at `offset`.
    pub async fn write(&self, offset: u64, data: Vec<u8>) -> Result<()> {
        self.done(self.copier.write(offset, data)).await
    }

    /// Makes what was written durable.
    pub async fn flush(&self) -> Result<()> {
        self.done(self.copier.flush()).await
    }

    /// The outcome of a request that is not waited for without end. When it is given up so is the volume.
    async fn done(&self, request: impl Future<Output = Result<()>>) -> Result<()> {
        tokio::pin!(request);
        tokio::select! {
            done = &mut request => done,
            failure = self.in_vain() => {
                tracing::warn!(volume = self.name, %failure, "an import is given up");
                self.handle.revoke();
                // The copy's thread does one thing at a time, and is waited for when the volume is closed.
                let _ = request.await;
                Err(failure)
            }
        }
    }

    /// Ends when there is no point in waiting on, and tells why.
    async fn in_vain(&self) -> Failure {
        let began = Instant::now();
        let mut full_looks = 0;
        loop {
            tokio::time::sleep(LOOK_PAUSE).await;
            let full = self.full_devices().await.unwrap_or_default();
            full_looks = if full.is_empty() { 0 } else { full_looks + 1 };
            if full_looks >= FULL_LOOKS {
                return Failure::new(
                    Kind::NoSpace,
                    format!("no space left: device {} is full", full.join(", device ")),
                    MAKE_ROOM,
                );
            }
            if began.elapsed() >= WAIT_MAX {
                return Failure::new(
                    Kind::Failed,
                    format!(
                        "a write of the import has waited for {} s",
                        WAIT_MAX.as_secs()
                    ),
                    "see `penstock health` for what is wrong, and import again",
                );
            }
        }
    }

    /// Full devices for which writes to the pool wait.
    async fn full_devices(&self) -> Result<Vec<String>> {
        let cluster = &self.volumes.cluster;
        let view = cluster.applied(cluster.leader_report().await)?;
        let words = self.volumes.devices.reported_space(&view);
        let is_full = |device: DeviceId| words.get(&device).is_some_and(|word| word.is_full);
        let full = view.waits_for_room(self.pool, &is_full);
        Ok(full.into_iter().map(|id| view.device_name(id)).collect())
    }
}
