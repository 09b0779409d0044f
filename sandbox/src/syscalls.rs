//! Which system calls the daemon may make: seccomp.
//!
//! Two filters, of which the stricter answer counts. The first lists what the daemon needs, as traces of
//! its tests show, with what their libraries use in their place on other kernels and processors; any other
//! call fails with `ENOSYS`. That is no death sentence on purpose: a library that is newer than this list
//! tries a new call, sees that the kernel "lacks" it, and takes the old one; guests must not lose their
//! disks over that. The second kills the process for calls that nothing in it ever makes, and that an
//! intruder needs: running programs, looking into other processes, changing who it is, mounting, loading
//! code into the kernel.
//!
//! What io_uring does is no system call. Landlock and the user limit it as they do all else.

use std::collections::BTreeMap;

use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule, TargetArch,
};

/// Calls that are allowed whatever their arguments.
const ALLOWED: &[libc::c_long] = &[
    // Files.
    libc::SYS_read,
    libc::SYS_write,
    libc::SYS_readv,
    libc::SYS_writev,
    libc::SYS_pread64,
    libc::SYS_pwrite64,
    libc::SYS_preadv,
    libc::SYS_pwritev,
    libc::SYS_preadv2,
    libc::SYS_pwritev2,
    libc::SYS_openat,
    libc::SYS_openat2,
    libc::SYS_close,
    libc::SYS_close_range,
    libc::SYS_dup,
    libc::SYS_dup3,
    libc::SYS_fcntl,
    libc::SYS_ioctl,
    libc::SYS_flock,
    libc::SYS_lseek,
    libc::SYS_ftruncate,
    libc::SYS_fallocate,
    libc::SYS_fsync,
    libc::SYS_fdatasync,
    libc::SYS_sync_file_range,
    libc::SYS_syncfs,
    libc::SYS_fadvise64,
    libc::SYS_readahead,
    libc::SYS_copy_file_range,
    libc::SYS_fstat,
    libc::SYS_newfstatat,
    libc::SYS_statx,
    libc::SYS_statfs,
    libc::SYS_fstatfs,
    libc::SYS_getdents64,
    libc::SYS_getcwd,
    libc::SYS_faccessat,
    libc::SYS_faccessat2,
    libc::SYS_readlinkat,
    libc::SYS_mkdirat,
    libc::SYS_unlinkat,
    libc::SYS_renameat,
    libc::SYS_renameat2,
    libc::SYS_linkat,
    libc::SYS_symlinkat,
    libc::SYS_fchmod,
    libc::SYS_fchmodat,
    libc::SYS_fchown,
    libc::SYS_fchownat,
    libc::SYS_utimensat,
    libc::SYS_umask,
    libc::SYS_pipe2,
    libc::SYS_memfd_create,
    // Memory.
    libc::SYS_brk,
    libc::SYS_mmap,
    libc::SYS_munmap,
    libc::SYS_mremap,
    libc::SYS_mprotect,
    libc::SYS_madvise,
    libc::SYS_mincore,
    libc::SYS_msync,
    libc::SYS_mlock,
    libc::SYS_mlock2,
    libc::SYS_munlock,
    libc::SYS_mbind,
    libc::SYS_get_mempolicy,
    libc::SYS_set_mempolicy,
    libc::SYS_membarrier,
    // Threads. `clone` is in `filters`; clone3, whose flags no filter can see, is not there, and the C
    // library takes clone.
    libc::SYS_futex,
    libc::SYS_set_robust_list,
    libc::SYS_get_robust_list,
    libc::SYS_rseq,
    libc::SYS_set_tid_address,
    libc::SYS_gettid,
    libc::SYS_exit,
    libc::SYS_exit_group,
    libc::SYS_sched_yield,
    libc::SYS_sched_getaffinity,
    libc::SYS_sched_setaffinity,
    libc::SYS_sched_getparam,
    libc::SYS_sched_getscheduler,
    libc::SYS_sched_setscheduler,
    libc::SYS_sched_getattr,
    libc::SYS_sched_setattr,
    libc::SYS_sched_get_priority_max,
    libc::SYS_sched_get_priority_min,
    libc::SYS_getpriority,
    libc::SYS_setpriority,
    libc::SYS_ioprio_get,
    libc::SYS_ioprio_set,
    libc::SYS_getcpu,
    // Signals, to itself.
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_rt_sigtimedwait,
    libc::SYS_sigaltstack,
    libc::SYS_signalfd4,
    libc::SYS_tgkill,
    libc::SYS_restart_syscall,
    // Time.
    libc::SYS_clock_gettime,
    libc::SYS_clock_getres,
    libc::SYS_clock_nanosleep,
    libc::SYS_nanosleep,
    libc::SYS_gettimeofday,
    libc::SYS_timerfd_create,
    libc::SYS_timerfd_settime,
    libc::SYS_timerfd_gettime,
    libc::SYS_times,
    // Waiting.
    libc::SYS_eventfd2,
    libc::SYS_epoll_create1,
    libc::SYS_epoll_ctl,
    libc::SYS_epoll_pwait,
    libc::SYS_epoll_pwait2,
    libc::SYS_ppoll,
    libc::SYS_pselect6,
    libc::SYS_io_uring_setup,
    libc::SYS_io_uring_enter,
    libc::SYS_io_uring_register,
    // Sockets. `socket` is in `filters`.
    libc::SYS_socketpair,
    libc::SYS_bind,
    libc::SYS_listen,
    libc::SYS_accept,
    libc::SYS_accept4,
    libc::SYS_connect,
    libc::SYS_shutdown,
    libc::SYS_getsockname,
    libc::SYS_getpeername,
    libc::SYS_getsockopt,
    libc::SYS_setsockopt,
    libc::SYS_sendto,
    libc::SYS_recvfrom,
    libc::SYS_sendmsg,
    libc::SYS_recvmsg,
    libc::SYS_sendmmsg,
    libc::SYS_recvmmsg,
    // Looking at itself and the machine.
    libc::SYS_getpid,
    libc::SYS_getppid,
    libc::SYS_getuid,
    libc::SYS_geteuid,
    libc::SYS_getgid,
    libc::SYS_getegid,
    libc::SYS_getresuid,
    libc::SYS_getresgid,
    libc::SYS_getgroups,
    libc::SYS_capget,
    libc::SYS_prlimit64,
    libc::SYS_getrusage,
    libc::SYS_getrandom,
    libc::SYS_uname,
    libc::SYS_sysinfo,
];

/// Older forms of the same, which only this processor still has.
#[cfg(target_arch = "x86_64")]
const ALLOWED_HERE: &[libc::c_long] = &[
    libc::SYS_open,
    libc::SYS_stat,
    libc::SYS_lstat,
    libc::SYS_access,
    libc::SYS_readlink,
    libc::SYS_mkdir,
    libc::SYS_rmdir,
    libc::SYS_unlink,
    libc::SYS_rename,
    libc::SYS_link,
    libc::SYS_symlink,
    libc::SYS_chmod,
    libc::SYS_chown,
    libc::SYS_lchown,
    libc::SYS_dup2,
    libc::SYS_pipe,
    libc::SYS_poll,
    libc::SYS_select,
    libc::SYS_epoll_wait,
    libc::SYS_epoll_create,
    libc::SYS_eventfd,
    libc::SYS_getrlimit,
    libc::SYS_time,
    libc::SYS_arch_prctl,
];
#[cfg(not(target_arch = "x86_64"))]
const ALLOWED_HERE: &[libc::c_long] = &[];

/// Calls that end the process.
const FATAL: &[libc::c_long] = &[
    // Running another program.
    libc::SYS_execve,
    libc::SYS_execveat,
    // Other processes.
    libc::SYS_ptrace,
    libc::SYS_process_vm_readv,
    libc::SYS_process_vm_writev,
    libc::SYS_pidfd_getfd,
    libc::SYS_kcmp,
    // Who it is.
    libc::SYS_setuid,
    libc::SYS_setgid,
    libc::SYS_setreuid,
    libc::SYS_setregid,
    libc::SYS_setresuid,
    libc::SYS_setresgid,
    libc::SYS_setfsuid,
    libc::SYS_setfsgid,
    libc::SYS_setgroups,
    libc::SYS_capset,
    // What it sees.
    libc::SYS_mount,
    libc::SYS_umount2,
    libc::SYS_move_mount,
    libc::SYS_open_tree,
    libc::SYS_fsopen,
    libc::SYS_fsconfig,
    libc::SYS_fsmount,
    libc::SYS_fspick,
    libc::SYS_mount_setattr,
    libc::SYS_pivot_root,
    libc::SYS_chroot,
    libc::SYS_unshare,
    libc::SYS_setns,
    libc::SYS_open_by_handle_at,
    libc::SYS_fanotify_init,
    // The kernel.
    libc::SYS_bpf,
    libc::SYS_perf_event_open,
    libc::SYS_userfaultfd,
    libc::SYS_keyctl,
    libc::SYS_add_key,
    libc::SYS_request_key,
    libc::SYS_init_module,
    libc::SYS_finit_module,
    libc::SYS_delete_module,
    libc::SYS_kexec_load,
    libc::SYS_reboot,
    libc::SYS_swapon,
    libc::SYS_swapoff,
    libc::SYS_acct,
    libc::SYS_quotactl,
    libc::SYS_syslog,
    libc::SYS_settimeofday,
    libc::SYS_clock_settime,
    libc::SYS_clock_adjtime,
    libc::SYS_adjtimex,
    libc::SYS_sethostname,
    libc::SYS_setdomainname,
];

/// The same, of this processor alone.
#[cfg(target_arch = "x86_64")]
const FATAL_HERE: &[libc::c_long] = &[
    libc::SYS_fork,
    libc::SYS_vfork,
    libc::SYS_iopl,
    libc::SYS_ioperm,
    libc::SYS_modify_ldt,
    libc::SYS_kexec_file_load,
];
#[cfg(not(target_arch = "x86_64"))]
const FATAL_HERE: &[libc::c_long] = &[];

/// Address families of sockets: admin and guests, nodes, and what the kernel tells of network and RDMA
/// devices.
const FAMILIES: [libc::c_int; 4] = [
    libc::AF_UNIX,
    libc::AF_INET,
    libc::AF_INET6,
    libc::AF_NETLINK,
];
/// What `prctl` may do: read what the kernel knows of the process, name threads and memory, tune a timer,
/// give up more.
const PRCTLS: [libc::c_int; 12] = [
    PR_GET_AUXV,
    libc::PR_GET_DUMPABLE,
    libc::PR_GET_KEEPCAPS,
    libc::PR_GET_NO_NEW_PRIVS,
    libc::PR_GET_SECCOMP,
    libc::PR_GET_TIMERSLACK,
    libc::PR_SET_TIMERSLACK,
    libc::PR_SET_NAME,
    libc::PR_GET_NAME,
    libc::PR_SET_VMA,
    libc::PR_CAPBSET_READ,
    libc::PR_SET_NO_NEW_PRIVS,
];
/// Reads the auxiliary vector, since Linux 6.4; the libc crate does not have it yet.
const PR_GET_AUXV: libc::c_int = 0x4155_5856;
/// Ways to type into a terminal.
const FATAL_IOCTLS: [u64; 2] = [libc::TIOCSTI, libc::TIOCLINUX];

/// Limits this thread, and all that it starts, for good.
pub fn restrict() -> Result<(), String> {
    for filter in filters().map_err(|e| e.to_string())? {
        seccompiler::apply_filter(&filter).map_err(|e| e.to_string())?;
    }
    Ok(())
}

type Rules = BTreeMap<i64, Vec<SeccompRule>>;

fn filters() -> Result<[BpfProgram; 2], seccompiler::BackendError> {
    let listed = |calls: &[&[libc::c_long]]| -> Rules {
        let calls = calls.iter().flat_map(|calls| calls.iter());
        calls.map(|call| (*call, Vec::new())).collect()
    };
    let mut allowed = listed(&[ALLOWED, ALLOWED_HERE]);
    // A thread, that is: not a process.
    let thread = SeccompCmpOp::MaskedEq(libc::CLONE_THREAD as u64);
    allowed.insert(
        libc::SYS_clone,
        vec![rule(
            0,
            SeccompCmpArgLen::Qword,
            thread,
            libc::CLONE_THREAD as u64,
        )?],
    );
    allowed.insert(libc::SYS_socket, one_of(0, &FAMILIES.map(|n| n as u64))?);
    allowed.insert(libc::SYS_prctl, one_of(0, &PRCTLS.map(|n| n as u64))?);
    let mut fatal = listed(&[FATAL, FATAL_HERE]);
    fatal.insert(libc::SYS_ioctl, one_of(1, &FATAL_IOCTLS)?);
    let arch = TargetArch::try_from(std::env::consts::ARCH)?;
    let compile = |rules, otherwise, listed| {
        let filter = SeccompFilter::new(rules, otherwise, listed, arch)?;
        BpfProgram::try_from(filter)
    };
    let lacking = SeccompAction::Errno(libc::ENOSYS as u32);
    Ok([
        compile(fatal, SeccompAction::Allow, SeccompAction::KillProcess)?,
        compile(allowed, lacking, SeccompAction::Allow)?,
    ])
}

fn rule(
    argument: u8,
    length: SeccompCmpArgLen,
    operator: SeccompCmpOp,
    value: u64,
) -> Result<SeccompRule, seccompiler::BackendError> {
    SeccompRule::new(vec![SeccompCondition::new(
        argument, length, operator, value,
    )?])
}

/// One rule for each value that an argument may have.
fn one_of(argument: u8, values: &[u64]) -> Result<Vec<SeccompRule>, seccompiler::BackendError> {
    let rule = |value: &u64| rule(argument, SeccompCmpArgLen::Dword, SeccompCmpOp::Eq, *value);
    values.iter().map(rule).collect()
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::{CommandExt, ExitStatusExt};
    use std::process::Command;

    use super::*;

    /// Says to a child of the test below what it is to do once it is limited.
    const CHILD_ENV: &str = "PENSTOCK_TEST_SYSCALL";

    /// Runs the test below in a process of its own, which does `what`.
    fn child(what: &str) -> std::process::Output {
        let test = "syscalls::tests::a_call_that_nothing_makes_ends_the_process";
        Command::new(std::env::current_exe().unwrap())
            .args(["--exact", test, "--nocapture", "--test-threads", "1"])
            .env(CHILD_ENV, what)
            .output()
            .unwrap()
    }

    fn limited(what: &str) {
        restrict().unwrap();
        match what {
            "spawn" => assert!(Command::new("true").status().is_err()),
            "exec" => drop(Command::new("true").exec()),
            // SAFETY: a plain system call, which does not return.
            "setns" => drop(unsafe { libc::syscall(libc::SYS_setns, -1, 0) }),
            "packet" => {
                // SAFETY: a plain system call.
                let made = unsafe { libc::socket(libc::AF_PACKET, libc::SOCK_RAW, 0) };
                let error = std::io::Error::last_os_error().raw_os_error();
                assert_eq!((made, error), (-1, Some(libc::ENOSYS)));
            }
            "work" => {
                let dir = std::env::temp_dir();
                let thread = std::thread::spawn(move || std::fs::read_dir(dir).unwrap().count());
                thread.join().unwrap();
                std::net::TcpListener::bind("127.0.0.1:0").unwrap();
            }
            other => panic!("{other}"),
        }
    }

    #[test]
    fn a_call_that_nothing_makes_ends_the_process() {
        if let Ok(what) = std::env::var(CHILD_ENV) {
            return limited(&what);
        }
        for what in ["packet", "work", "spawn"] {
            let ended = child(what);
            assert!(ended.status.success(), "{what}: {ended:?}");
        }
        for what in ["setns", "exec"] {
            let ended = child(what);
            assert_eq!(
                ended.status.signal(),
                Some(libc::SIGSYS),
                "{what}: {ended:?}"
            );
        }
    }
}
