//! What the operating system allows this process, and what it gives up.

use api::types::queues_default;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use rustix::thread::{CapabilitySet, CapabilitySets, capabilities, set_capabilities};

/// Guests of one host that must fit.
pub const ATTACHMENTS: u64 = 64;
/// Descriptors of one queue that a guest runs: kick, call and error, each held by the session and by the data
/// thread.
const QUEUE_FILES: u64 = 6;
/// Further descriptors of one attachment: sockets and their directory, lock, wake-up, shared memory.
const ATTACHMENT_FILES: u64 = 9;
/// Descriptors of the daemon itself: database, devices, io_urings, admin connections.
const DAEMON_FILES: u64 = 300;

/// What the daemon needs of root's powers: sockets get the configured owner and mode in directories of other
/// users, block devices are opened whoever they belong to, and memory that an io_uring pins is not counted.
const KEPT: CapabilitySet = CapabilitySet::CHOWN
    .union(CapabilitySet::FOWNER)
    .union(CapabilitySet::DAC_OVERRIDE)
    .union(CapabilitySet::IPC_LOCK);

/// Open files that [`ATTACHMENTS`] guests with the default number of queues take.
pub fn open_files_needed() -> u64 {
    ATTACHMENTS * (u64::from(queues_default()) * QUEUE_FILES + ATTACHMENT_FILES) + DAEMON_FILES
}

/// Open files that are allowed now.
pub fn open_files_max() -> u64 {
    getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX)
}

/// Takes as many open files as are allowed. The usual 1024 are meant for programs that wait with `select`,
/// and fewer than the guests of a host need.
pub fn raise_open_files() {
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    let all = Rlimit {
        current: maximum,
        maximum,
    };
    if let Err(error) = setrlimit(Resource::Nofile, all) {
        tracing::warn!(%error, "raise the limit of open files");
    }
    let (allowed, needed) = (open_files_max(), open_files_needed());
    if allowed < needed {
        tracing::warn!(
            allowed,
            needed,
            "too few open files for {ATTACHMENTS} attachments; raise the hard limit (systemd: LimitNOFILE=)"
        );
    }
}

/// Gives up what the daemon does not need, for this thread and all that it starts; nothing it executes gets
/// it back.
pub fn drop_privileges() {
    if let Err(error) = rustix::thread::set_no_new_privs(true).and_then(|()| keep_capabilities()) {
        tracing::warn!(%error, "give up privileges");
    }
}

fn keep_capabilities() -> rustix::io::Result<()> {
    let now = capabilities(None)?;
    set_capabilities(
        None,
        CapabilitySets {
            effective: now.effective & KEPT,
            permitted: now.permitted & KEPT,
            inheritable: CapabilitySet::empty(),
        },
    )
}
