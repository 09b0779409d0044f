//! The helper that makes block devices of volumes, as this daemon has it.

use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use api::failure::{Context, Failure, Kind, Result};
use block_device::client::{BlockDeviceError, Client};
use config::registry;
use service::waiting::HelperCalls;

/// The verb by which this program is the helper.
pub const HELPER_VERB: &str = "block-device-helper";
/// Below the directory of daemons: sockets, and what the next helper has to know.
const DIR: &str = "block";
/// There while a kernel can make block devices by VDUSE, and by its nbd client.
const VDUSE: &str = "/dev/vduse/control";
const NBD: &str = "/sys/module/nbd";

/// The helper; none if this process was not started as root.
#[derive(Debug, Clone, Default)]
pub struct BlockDevices {
    client: Option<Arc<Client>>,
    calls: Arc<HelperCalls>,
}

impl BlockDevices {
    /// Starts the helper, while this process has the rights for it. Called before there are other threads.
    pub fn prepare() -> Self {
        if !rustix::process::geteuid().is_root() {
            return Self::default();
        }
        let started = start();
        if let Err(failure) = &started {
            tracing::warn!(%failure, "no block devices can be made of volumes");
        }
        Self {
            client: started.ok().map(Arc::new),
            calls: Arc::default(),
        }
    }

    /// Whether the helper has ended, by a signal or by a mistake: only a new process starts another.
    pub fn has_lost_helper(&self) -> bool {
        self.client
            .as_ref()
            .is_some_and(|client| client.has_ended())
    }

    fn client(&self) -> Result<Arc<Client>> {
        self.client.clone().ok_or_else(|| {
            Failure::new(
                Kind::Denied,
                "this daemon may not make block devices",
                "start it as root: it keeps a helper that may, and gives its own rights up",
            )
        })
    }

    /// Asks the helper, which may take a minute.
    pub async fn ask<T: Send + 'static>(
        &self,
        question: impl FnOnce(&Client) -> std::result::Result<T, BlockDeviceError> + Send + 'static,
    ) -> Result<T> {
        let client = self.client()?;
        let answer = self.calls.ask(move || question(&client)).await?;
        answer.map_err(|error| match error {
            BlockDeviceError::InUse(_) => Failure::new(
                Kind::Conflict,
                error.to_string(),
                "unmount it first; with --yes it is removed all the same, and who uses it gets I/O errors",
            ),
            _ => Failure::plain(Kind::Failed, error),
        })
    }
}

/// How this kernel makes block devices of volumes, for `status`.
pub fn interface() -> String {
    let is_there = |path: &str| Path::new(path).exists();
    match (is_there(VDUSE), is_there(NBD)) {
        (true, _) => "vduse".to_owned(),
        (false, true) => "nbd".to_owned(),
        (false, false) => {
            "none yet: neither the modules vduse and virtio_vdpa nor nbd are loaded".to_owned()
        }
    }
}

fn start() -> Result<Client> {
    let dir = registry::directory().ok_or_else(|| {
        Failure::plain(
            Kind::Failed,
            "this user has no directory for running daemons",
        )
    })?;
    let mut command = Command::new("/proc/self/exe");
    command.arg(HELPER_VERB).arg("--dir").arg(dir.join(DIR));
    Client::start(command).context(|| "start the helper for block devices".into())
}
