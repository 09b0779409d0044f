//! The process that makes block devices of volumes: it keeps the rights that the daemon gives up.

use std::path::Path;

use api::failure::{Context, Failure, Result};
use attachments::HELPER_VERB;
use block_device::{HELPER_FD, helper};

/// The helper: serves the daemon that started it until that has gone.
pub fn run_helper(dir: &Path) -> Result<()> {
    super::prepare_process();
    super::log::keep_telling();
    let socket = inherited()?;
    // It was started by a path that says nothing. A name is for people only.
    let _ = rustix::thread::set_name(c"penstock-block");
    // The daemon ends it, by its own end: until then its guests may need their devices.
    // SAFETY: ignoring a signal touches nothing of ours.
    unsafe {
        libc::signal(libc::SIGTERM, libc::SIG_IGN);
        libc::signal(libc::SIGINT, libc::SIG_IGN);
    }
    helper::run(&socket, dir).context(|| "serve the daemon".into())
}

fn inherited() -> Result<std::os::fd::OwnedFd> {
    super::backend_program::inherited(HELPER_FD).map_err(|_| {
        Failure::invalid(
            format!("{HELPER_VERB} is started by the daemon alone"),
            "use `penstock attach volume NAME --block`",
        )
    })
}
