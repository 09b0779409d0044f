//! Which paths the daemon may open: Landlock. Descriptors that are open already, those that front ends
//! send, and looking at a path without opening it are not limited; owners and modes count besides.

use std::path::{Path, PathBuf};

use landlock::{
    ABI, Access, AccessFs, BitFlags, CompatLevel, Compatible, LandlockStatus, PathBeneath, PathFd,
    RestrictionStatus, Ruleset, RulesetAttr, RulesetCreated, RulesetCreatedAttr, RulesetError,
    RulesetStatus, Scope, path_beneath_rules,
};

/// Newest rights that are asked for. A kernel that knows fewer limits what it knows: the first version
/// lacks moving files between directories (2), truncating (3), controlling devices (5), signals and
/// abstract sockets (6).
const NEWEST: ABI = ABI::V6;

/// What is read: libraries and what is loaded when a device is found, what the kernel tells, randomness.
/// What is not there is left out.
const READ: [&str; 14] = [
    "/lib",
    "/lib64",
    "/usr/lib",
    "/usr/lib64",
    "/usr/local/lib",
    "/usr/share/zoneinfo",
    "/etc/ld.so.cache",
    "/etc/libibverbs.d",
    "/etc/libnl",
    "/etc/localtime",
    "/proc",
    "/sys",
    "/dev/urandom",
    "/dev/random",
];
/// What is opened for writing, too: nothing, and RDMA devices.
const USED: [&str; 2] = ["/dev/null", "/dev/infiniband"];

/// Paths of this daemon.
pub struct Rules {
    /// Directories in which it may do anything.
    pub own: Vec<PathBuf>,
    /// Directories in which it makes sockets and their locks.
    pub sockets: Vec<PathBuf>,
    /// Devices. Of one that is not there its directory is allowed until the next start, for it is made there.
    pub devices: Vec<PathBuf>,
}

/// Limits this thread, and all that it starts, for good. Returns the version of Landlock in force.
pub fn restrict(rules: &Rules) -> Result<u32, String> {
    let status = try_restrict(rules).map_err(|e| e.to_string())?;
    match (status.ruleset, status.landlock) {
        (RulesetStatus::NotEnforced, _) => {
            Err("this kernel has no Landlock, or it is not switched on".to_owned())
        }
        (_, LandlockStatus::Available { effective_abi, .. }) => {
            Ok(effective_abi.to_string().parse().unwrap_or(0))
        }
        (_, other) => Err(format!("{other:?}")),
    }
}

fn try_restrict(rules: &Rules) -> Result<RestrictionStatus, RulesetError> {
    let read = AccessFs::ReadFile | AccessFs::ReadDir;
    let used = read | AccessFs::WriteFile | AccessFs::Truncate | AccessFs::IoctlDev;
    let made = used | AccessFs::MakeReg | AccessFs::RemoveFile;
    let program = std::env::current_exe().ok();
    Ruleset::default()
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(AccessFs::from_all(NEWEST))?
        .scope(Scope::from_all(NEWEST))?
        .create()?
        .add_rules(path_beneath_rules(READ, read))?
        .add_rules(path_beneath_rules(program, read))?
        .add_rules(path_beneath_rules(USED, used))?
        .add_rules(path_beneath_rules(
            &rules.own,
            AccessFs::from_all(NEWEST) & !AccessFs::Execute,
        ))?
        .add_rules(path_beneath_rules(
            &rules.sockets,
            made | AccessFs::MakeSock,
        ))
        .and_then(|ruleset| add_devices(ruleset, &rules.devices, used, made))?
        .restrict_self()
}

fn add_devices(
    mut ruleset: RulesetCreated,
    devices: &[PathBuf],
    used: BitFlags<AccessFs>,
    made: BitFlags<AccessFs>,
) -> Result<RulesetCreated, RulesetError> {
    let file = AccessFs::from_file(NEWEST);
    for path in devices {
        // What cannot be opened here cannot be opened later either, and is told then.
        if let Ok(device) = PathFd::new(path) {
            ruleset = ruleset.add_rule(PathBeneath::new(device, used & file))?;
        } else if let Ok(dir) = PathFd::new(path.parent().unwrap_or(Path::new("/"))) {
            ruleset = ruleset.add_rule(PathBeneath::new(dir, made))?;
        }
    }
    Ok(ruleset)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_opens_what_the_rules_name_and_nothing_else() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        for name in ["own", "sockets", "elsewhere"] {
            std::fs::create_dir(path(name)).unwrap();
        }
        for name in ["device", "elsewhere/secret"] {
            std::fs::write(path(name), b"x").unwrap();
        }
        let rules = Rules {
            own: vec![path("own")],
            sockets: vec![path("sockets")],
            devices: vec![path("device")],
        };
        // Only the thread that asks for it is limited.
        let tried = std::thread::spawn(move || {
            let abi = restrict(&rules).unwrap();
            assert!(abi >= 1);
            std::fs::write(rules.own[0].join("file"), b"x").unwrap();
            std::fs::create_dir(rules.own[0].join("dir")).unwrap();
            let socket = rules.sockets[0].join("a.sock");
            std::os::unix::net::UnixListener::bind(&socket).unwrap();
            std::fs::remove_file(&socket).unwrap();
            assert_eq!(std::fs::read(&rules.devices[0]).unwrap(), b"x");
            std::fs::write(&rules.devices[0], b"y").unwrap();
            std::fs::read_to_string("/proc/self/status").unwrap();
            let elsewhere = rules.own[0].with_file_name("elsewhere");
            [
                std::fs::read(elsewhere.join("secret")).map(drop),
                std::fs::write(elsewhere.join("new"), b"x"),
                std::fs::remove_file(elsewhere.join("secret")),
                std::fs::create_dir(rules.sockets[0].join("dir")),
                std::fs::read("/etc/passwd").map(drop),
            ]
            .map(|tried| tried.map_err(|e| e.kind()))
        });
        for (index, tried) in tried.join().unwrap().into_iter().enumerate() {
            assert_eq!(tried, Err(std::io::ErrorKind::PermissionDenied), "{index}");
        }
    }
}
