//! The guest of a domain: the rig's kernel and initramfs, reached through a channel of the domain.

use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use guest_rig::Output;
use guest_rig::agent::Agent;
use guest_rig::process::{log_tail, wait_until};

/// From the domain's start to the guest's greeting, under translation on a busy machine.
const BOOT_LIMIT: Duration = Duration::from_secs(180);
/// A script in the guest.
const SCRIPT_LIMIT: Duration = Duration::from_secs(600);

/// Files that belong to a domain's guest. They are there before the domain starts.
#[derive(Debug)]
pub struct Channel {
    listener: UnixListener,
    console: PathBuf,
}

impl Channel {
    /// Waits in `directory` for the guest of the domain called `name`. QEMU runs as another user.
    pub fn open(directory: &Path, name: &str) -> Result<Self> {
        let (agent, console) = paths(directory, name);
        match std::fs::remove_file(&agent) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                return Err(error).context("remove the channel of an earlier start");
            }
            Ok(()) | Err(_) => {}
        }
        let listener = UnixListener::bind(&agent).context("bind the guest's channel")?;
        std::fs::write(&console, "").context("create the guest's console")?;
        for path in [&agent, &console] {
            std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o666))?;
        }
        Ok(Self { listener, console })
    }

    /// Waits until the guest takes scripts.
    pub fn greet(self) -> Result<Guest> {
        let stream = self.accept()?;
        let agent = Agent::greet(stream, BOOT_LIMIT).map_err(|error| {
            let console = log_tail(&self.console);
            error.context(format!("the guest's console ended with:\n{console}"))
        })?;
        Ok(Guest {
            agent,
            channel: self,
        })
    }

    fn accept(&self) -> Result<UnixStream> {
        self.listener.set_nonblocking(true)?;
        let stream = wait_until(BOOT_LIMIT, || match self.listener.accept() {
            Ok((stream, _)) => Ok(Some(stream)),
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => Ok(None),
            Err(error) => Err(error.into()),
        })?;
        stream.set_nonblocking(false)?;
        Ok(stream)
    }
}

/// The channel's socket, and the console's file.
pub(crate) fn paths(directory: &Path, name: &str) -> (PathBuf, PathBuf) {
    let at = |what: &str| directory.join(format!("{name}.{what}"));
    (at("agent"), at("console"))
}

/// A guest that takes scripts.
#[derive(Debug)]
pub struct Guest {
    agent: Agent,
    channel: Channel,
}

impl Guest {
    /// Goes on with the guest at the host that it was migrated to, whose QEMU has connected to the same
    /// channel.
    pub fn follow(&mut self) -> Result<()> {
        let stream = self.channel.accept();
        self.agent
            .replace(stream.context("the channel of the destination")?);
        Ok(())
    }

    /// Runs a script in the guest.
    pub fn run(&mut self, script: &str) -> Result<Output> {
        self.agent.run(script, SCRIPT_LIMIT).map_err(|error| {
            let console = log_tail(&self.channel.console);
            error.context(format!("in the guest: {script}\nits console:\n{console}"))
        })
    }

    /// Runs a script that must succeed; returns its trimmed output.
    pub fn sh(&mut self, script: &str) -> Result<String> {
        let output = self.run(script)?;
        if output.code != 0 {
            bail!(
                "in the guest, exit status {}: {script}\n{}",
                output.code,
                output.text
            );
        }
        Ok(output.text.trim_end().to_owned())
    }

    /// Repeats a script until it succeeds.
    pub fn sh_until(&mut self, script: &str) -> Result<String> {
        let mut last = String::new();
        wait_until(SCRIPT_LIMIT, || {
            let output = self.run(script)?;
            last.clone_from(&output.text);
            Ok((output.code == 0).then(|| output.text.trim_end().to_owned()))
        })
        .with_context(|| format!("in the guest, never succeeded: {script}\n{last}"))
    }

    /// Fails if the guest's kernel speaks of a failed request.
    pub fn expect_no_io_errors(&mut self) -> Result<()> {
        let found = self.run("dmesg | grep -E 'I/O error|EXT4-fs error|Remounting'")?;
        match found.code {
            1 => Ok(()),
            _ => bail!("the guest's kernel saw errors:\n{}", found.text),
        }
    }
}
