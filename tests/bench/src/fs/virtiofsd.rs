//! The peer: virtiofsd, built once into the cache from crates.io.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use guest_rig::Tool;
use guest_rig::process::{Guarded, describe, log_tail, wait_until};

/// Its version.
pub const VERSION: &str = "1.14.0";
/// The program.
const TOOL: Tool = Tool {
    name: "virtiofsd",
    version: VERSION,
    is_static: false,
    needs: "libcap-ng-dev and libseccomp-dev, which `cargo xtask bench fs` installs",
};
/// It opens its socket at once.
const START_LIMIT: Duration = Duration::from_secs(20);

/// A running virtiofsd.
#[derive(Debug)]
pub struct Virtiofsd {
    process: Guarded,
    socket: PathBuf,
}

impl Virtiofsd {
    /// Serves a directory `shared` in `directory`, which is made if need be, on a socket of this name there.
    pub fn start(directory: &Path, name: &str) -> Result<Self> {
        ensure!(
            rustix::process::geteuid().is_root(),
            "virtiofsd has to be root to make files of the guest's users: run this as root, or with \
             `--peers nfs`"
        );
        let binary = TOOL.binary()?;
        let shared = directory.join("shared");
        std::fs::create_dir_all(&shared).context("make virtiofsd's directory")?;
        let (socket, log_path) = (
            directory.join(format!("{name}.sock")),
            directory.join(format!("{name}.log")),
        );
        let log = std::fs::File::create(&log_path).context("create virtiofsd's log")?;
        let mut command = Command::new(binary);
        // Its other sandboxes need namespaces that containers often lack; they cost nothing by request.
        command
            .arg("--socket-path")
            .arg(&socket)
            .arg("--shared-dir")
            .arg(&shared)
            .args(["--cache", "auto", "--sandbox", "none"])
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log);
        let mut process = Guarded::spawn(&mut command, "virtiofsd")?;
        wait_until(START_LIMIT, || {
            if let Some(status) = process.ended()? {
                bail!("virtiofsd {}: {}", describe(status), log_tail(&log_path));
            }
            Ok(socket.exists().then_some(()))
        })?;
        Ok(Self { process, socket })
    }

    /// Its vhost-user socket.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.process.pid()
    }
}
