//! What this process may do, as the kernel tells.

use std::fs;
use std::path::Path;

use api::types::Privileges;
use config::User;

use crate::Confinement;

/// Names of capabilities by number; one that a newer kernel has is told by its number.
const CAPABILITIES: [&str; 41] = [
    "chown",
    "dac_override",
    "dac_read_search",
    "fowner",
    "fsetid",
    "kill",
    "setgid",
    "setuid",
    "setpcap",
    "linux_immutable",
    "net_bind_service",
    "net_broadcast",
    "net_admin",
    "net_raw",
    "ipc_lock",
    "ipc_owner",
    "sys_module",
    "sys_rawio",
    "sys_chroot",
    "sys_ptrace",
    "sys_pacct",
    "sys_admin",
    "sys_boot",
    "sys_nice",
    "sys_resource",
    "sys_time",
    "sys_tty_config",
    "mknod",
    "lease",
    "audit_write",
    "audit_control",
    "setfcap",
    "mac_override",
    "mac_admin",
    "syslog",
    "wake_alarm",
    "block_suspend",
    "audit_read",
    "perfmon",
    "bpf",
    "checkpoint_restore",
];

/// What one thread may do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct ThreadReport {
    uid: u32,
    /// Permitted, which it could put into effect.
    capabilities: u64,
    no_new_privs: bool,
    seccomp: bool,
}

/// What is in force for every thread: of several that differ the one that may do most is told.
/// `user` is who the process was to become.
pub fn in_force(user: Option<&User>, confinement: &Confinement) -> Privileges {
    let all = threads(Path::new("/proc/self/task"));
    let uid = all.iter().map(|thread| thread.uid).min();
    let uid = uid.unwrap_or_else(|| rustix::process::geteuid().as_raw());
    let user = user.filter(|user| user.uid == uid);
    let is_in_all = |has: fn(&ThreadReport) -> bool| !all.is_empty() && all.iter().all(has);
    Privileges {
        user: match (user, uid) {
            (Some(user), _) => user.name.clone(),
            (None, 0) => "root".to_owned(),
            (None, uid) => uid.to_string(),
        },
        uid,
        capabilities: names(all.iter().fold(0, |all, thread| all | thread.capabilities)),
        no_new_privs: is_in_all(|thread| thread.no_new_privs),
        seccomp: is_in_all(|thread| thread.seccomp),
        landlock_abi: confinement.landlock_abi,
    }
}

/// The threads of a process. One that ends meanwhile is left out.
fn threads(tasks: &Path) -> Vec<ThreadReport> {
    let tasks = fs::read_dir(tasks).into_iter().flatten().flatten();
    let status = |task: fs::DirEntry| fs::read_to_string(task.path().join("status")).ok();
    tasks
        .filter_map(status)
        .filter_map(|text| parse(&text))
        .collect()
}

fn parse(status: &str) -> Option<ThreadReport> {
    let field = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name));
        Some(line?.split_whitespace().collect::<Vec<_>>())
    };
    let word = |name: &str, index: usize| Some(field(name)?.get(index)?.to_string());
    Some(ThreadReport {
        // Real, effective, saved, and that for files.
        uid: word("Uid:", 1)?.parse().ok()?,
        capabilities: u64::from_str_radix(&word("CapPrm:", 0)?, 16).ok()?,
        no_new_privs: word("NoNewPrivs:", 0)? == "1",
        // 2: filters.
        seccomp: word("Seccomp:", 0)? == "2",
    })
}

fn names(capabilities: u64) -> Vec<String> {
    let set = (0..64).filter(|number| capabilities >> number & 1 != 0);
    set.map(|number| match CAPABILITIES.get(number) {
        Some(name) => (*name).to_owned(),
        None => number.to_string(),
    })
    .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_kernel_says_of_a_thread_is_understood() {
        let status = "Name:\tpenstock\nUid:\t0\t990\t990\t990\nCapPrm:\t0000000000004000\n\
                      NoNewPrivs:\t1\nSeccomp:\t2\n";
        let thread = parse(status).unwrap();
        assert_eq!(
            (thread.uid, thread.no_new_privs, thread.seccomp),
            (990, true, true)
        );
        assert_eq!(names(thread.capabilities), ["ipc_lock"]);
        assert_eq!(
            names(1 | 1 << 40 | 1 << 63),
            ["chown", "checkpoint_restore", "63"]
        );
        assert_eq!(parse("Name:\tx\n"), None);
        assert!(!threads(Path::new("/proc/self/task")).is_empty());
    }
}
