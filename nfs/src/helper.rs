//! The helper: the process with the rights. It formats, mounts, exports and sets addresses for the daemon,
//! which may do none of it.
//!
//! It keeps no state that it could lose: what is mounted and exported is asked of the kernel, what an export
//! is lies in notes beside the mount points, and which clients may reclaim lies on the volumes. Another
//! helper goes on where one was killed. An address that nobody renews is removed by the kernel itself
//! ([`address`]), so an NFS node whose processes are all dead serves no stale data.
//!
//! The daemon that it serves is not trusted with more than it needs. Volumes are named, not paths, and must
//! be block devices of Penstock's; names are checked; a volume that holds anything is never formatted.

mod address;
mod command;
mod device;
mod mounts;
mod server;
mod soft_roce;
mod tracker;

use std::io;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::plan::ExportPlan;
use crate::wire::{self, Abilities, Answer, ExportState, Question, State};

use command::is_installed;
use mounts::Mounts;
use server::Server;

/// Where mount points and notes are, unless the helper is told otherwise.
pub const DIR: &str = "/run/penstock-nfs";
/// A daemon that connects and says nothing is let go after this.
const QUESTION_WAIT_MAX: Duration = Duration::from_secs(10);
/// Longest name of an export or a volume: meta's limit.
const NAME_BYTES_MAX: usize = 63;

/// Why something was not done.
#[derive(Debug, thiserror::Error)]
#[error("{error}")]
pub struct HelperError {
    error: String,
    hint: String,
}

impl HelperError {
    fn new(error: impl Into<String>, hint: impl Into<String>) -> Self {
        Self {
            error: error.into(),
            hint: hint.into(),
        }
    }

    fn io(what: impl std::fmt::Display, error: &io::Error) -> Self {
        Self::new(
            format!("cannot {what}: {error}"),
            "look at the kernel's log (dmesg)",
        )
    }
}

type Result<T> = std::result::Result<T, HelperError>;

/// The helper's state.
#[derive(Debug)]
pub struct Helper {
    mounts: Mounts,
    /// Whoever starts, stops or tells the NFS server holds this.
    server: Mutex<Server>,
    /// Whoever changes addresses holds this. It waits for nothing else, so that a renewal is never late.
    addresses: Mutex<()>,
}

impl Helper {
    /// With mount points and notes below `dir`.
    #[must_use]
    pub fn new(dir: &Path) -> Self {
        let mounts = Mounts::below(dir);
        Self {
            server: Mutex::new(Server::new(dir, mounts.clone())),
            mounts,
            addresses: Mutex::default(),
        }
    }

    /// Serves daemons that connect to `listener`, for ever.
    pub fn run(self: &Arc<Self>, listener: &UnixListener) -> io::Result<()> {
        self.server().resume();
        for stream in listener.incoming() {
            let (helper, stream) = (Arc::clone(self), stream?);
            std::thread::Builder::new()
                .name("nfs-ask".into())
                .spawn(move || {
                    // A daemon that has gone needs no answer.
                    if let Err(error) = helper.reply(&stream) {
                        tracing::debug!(%error, "answer a question");
                    }
                })?;
        }
        Ok(())
    }

    /// Takes all exports down, for the machine shuts down.
    pub fn withdraw_all(&self) {
        for note in self.mounts.notes() {
            let name = note.name.as_str();
            let undone = self
                .drop_address(&note)
                .and_then(|()| self.server().unpublish(&note))
                .and_then(|()| self.unmount(name, false));
            if let Err(error) = undone {
                tracing::error!(export = name, %error, "take an export down");
            }
        }
        self.server().stop();
    }

    fn server(&self) -> MutexGuard<'_, Server> {
        // It looks at the kernel before each step.
        self.server.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn reply(&self, stream: &UnixStream) -> io::Result<()> {
        stream.set_read_timeout(Some(QUESTION_WAIT_MAX))?;
        let Some(question) = wire::read::<Question>(stream)? else {
            return Ok(());
        };
        let answer = self
            .carry_out(question)
            .unwrap_or_else(|failed| Answer::Failed {
                error: failed.error,
                hint: failed.hint,
            });
        wire::write(&mut &*stream, &answer)
    }

    fn carry_out(&self, question: Question) -> Result<Answer> {
        match question {
            Question::Probe => return Ok(Answer::Abilities(self.probe())),
            Question::Look => return self.look().map(Answer::State),
            Question::Inspect { volume } => {
                return device::inspect(&device::of(&volume)?).map(Answer::Signature);
            }
            Question::Format { volume } => device::format(&device::of(&volume)?)?,
            Question::CheckAddress { address } => address::check(&address)?,
            Question::Mount { plan } => self.mount(&plan)?,
            Question::Publish { name, scope } => {
                check_name(&scope)?;
                self.server().publish(&self.mounts.note(&name)?, &scope)?;
            }
            Question::SetAddress { name, valid_s } => {
                self.set_address(&self.mounts.note(&name)?, valid_s)?;
            }
            Question::DropAddress { name } => self.drop_address(&self.mounts.note(&name)?)?,
            Question::Unpublish { name } => self.server().unpublish(&self.mounts.note(&name)?)?,
            Question::Unmount { name, fenced } => self.unmount(&name, fenced)?,
        }
        Ok(Answer::Done)
    }

    fn mount(&self, plan: &ExportPlan) -> Result<()> {
        check_name(&plan.name)?;
        check_name(&plan.fsid)?;
        let device = device::of(&plan.volume)?;
        self.mounts.mount(plan, &device)
    }

    /// Unmounts, in spite of clients' open files if need be: then the server starts anew.
    fn unmount(&self, name: &str, fenced: bool) -> Result<()> {
        check_name(name)?;
        if self.mounts.unmount(name)? {
            return Ok(());
        }
        if fenced {
            return self.mounts.take_out_of_sight(name);
        }
        let mut server = self.server();
        server.pause();
        let unmounted = self.mounts.unmount(name);
        server.go_on()?;
        match unmounted? {
            true => Ok(()),
            false => Err(HelperError::new(
                format!("export '{name}' is still in use on this machine"),
                format!(
                    "end the programs that use {}",
                    self.mounts.point(name).display()
                ),
            )),
        }
    }

    fn set_address(&self, plan: &ExportPlan, valid_s: u32) -> Result<()> {
        let _lock = self
            .addresses
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        match &plan.address {
            Some(address) => {
                soft_roce::renew();
                address::set(address, valid_s)
            }
            None => Ok(()),
        }
    }

    fn drop_address(&self, plan: &ExportPlan) -> Result<()> {
        let _lock = self
            .addresses
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        match &plan.address {
            Some(address) => address::give_up(address),
            None => Ok(()),
        }
    }

    fn look(&self) -> Result<State> {
        let notes = self.mounts.notes();
        let set = match notes.iter().any(|plan| plan.address.is_some()) {
            true => address::all()?,
            false => Vec::new(),
        };
        let published = server::Published::read();
        let state = |plan: ExportPlan| ExportState {
            mounted: self.mounts.is_mounted(&plan.name),
            published: published.has(&self.mounts.point(&plan.name), &plan.clients),
            has_address: plan
                .address
                .is_some_and(|address| set.contains(&address.ip)),
            space_bytes: self.mounts.space(&plan.name),
            plan,
        };
        Ok(State {
            exports: notes.into_iter().map(state).collect(),
            server: server::state(),
        })
    }

    /// Loads what the kernel has as modules, and says what is missing.
    fn probe(&self) -> Abilities {
        server::load_modules();
        let mut missing = Vec::new();
        for (file_system, what) in [("nfsd", "an NFS server"), ("xfs", "XFS")] {
            if !server::kernel_has(file_system) {
                missing.push(format!(
                    "the kernel has no {file_system} ({what}): boot Debian's linux-image-amd64, or load \
                     module {file_system}"
                ));
            }
        }
        for (program, package) in [
            ("exportfs", "nfs-kernel-server"),
            ("rpc.mountd", "nfs-kernel-server"),
            ("rpc.nfsd", "nfs-kernel-server"),
            ("mkfs.xfs", "xfsprogs"),
            ("blkid", "util-linux"),
            ("ip", "iproute2"),
        ] {
            if !is_installed(program) {
                missing.push(format!(
                    "program {program} is not installed: apt install {package}"
                ));
            }
        }
        missing.extend(self.server().rival());
        Abilities {
            missing,
            rdma_devices: server::rdma_devices(),
        }
    }
}

/// A name that is a plain file name.
fn check_name(name: &str) -> Result<()> {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.');
    let begins_well = name
        .bytes()
        .next()
        .is_some_and(|byte| byte.is_ascii_alphanumeric());
    match begins_well && name.len() <= NAME_BYTES_MAX && name.bytes().all(is_plain) {
        true => Ok(()),
        false => Err(HelperError::new(
            format!("{name:?} is no name"),
            "use letters, digits, '-', '_' and '.'",
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_lead_nowhere_else() {
        for good in ["data", "a-b_c.d", "0"] {
            assert!(check_name(good).is_ok());
        }
        for bad in [
            "",
            ".",
            "..",
            ".a",
            "a/b",
            "-a",
            "a b",
            "a\n",
            &"x".repeat(64),
        ] {
            assert!(check_name(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_question_about_nothing_is_refused_in_words() {
        let dir = tempfile::tempdir().unwrap();
        let helper = Helper::new(dir.path());
        let name = "data".to_owned();
        let refused = helper
            .carry_out(Question::DropAddress { name })
            .unwrap_err();
        assert!(refused.error.contains("'data'"), "{refused}");
        for volume in ["../sda", "", "nope"] {
            let volume = volume.to_owned();
            assert!(helper.carry_out(Question::Format { volume }).is_err());
        }
        assert_eq!(helper.look().unwrap().exports, []);
    }
}
