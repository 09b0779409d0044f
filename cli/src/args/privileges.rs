//! Options that say who the daemon is and what it is kept from.

use clap::Args;
use config::Sandbox;

/// Options of `penstock serve`.
#[derive(Debug, Default, Clone, Args)]
pub struct PrivilegeArgs {
    /// User that the daemon becomes after it has opened its devices; it keeps no capability but IPC_LOCK
    #[arg(long, value_name = "NAME")]
    pub user: Option<String>,
    /// Group of that user [default: its own]
    #[arg(long, value_name = "NAME", requires = "user")]
    pub group: Option<String>,
    /// Limit paths (Landlock) and system calls (seccomp) [default: on with --user, else off]
    #[arg(long, value_name = "HOW")]
    pub sandbox: Option<Sandbox>,
}
