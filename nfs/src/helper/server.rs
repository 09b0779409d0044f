//! The kernel's NFS server: one for all exports of this machine.
//!
//! It speaks NFS 4.2 alone, on TCP and, where the kernel can, on RDMA. rpc.mountd answers the kernel's
//! questions about exports; it listens nowhere and needs no rpcbind, for that is of older versions. All
//! NFS nodes of a cluster give clients the same scope: without that a client takes the next NFS node for
//! another server, and gives its locks up instead of reclaiming them.
//!
//! The kernel begins a grace period only when its server starts. So the server starts anew here when an
//! export comes whose clients may reclaim something. Clients of other exports of this machine reclaim then,
//! too.

use std::collections::BTreeSet;
use std::fs::OpenOptions;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Child;

use crate::plan::{ExportPlan, Network};
use crate::wire::ServerState;

use super::command::{program, run, succeed};
use super::mounts::{Mounts, is_mount_point, make_dir, mount};
use super::soft_roce;
use super::tracker::Tracker;
use super::{HelperError, Result};

/// Where the kernel takes orders.
const CONTROL: &str = "/proc/fs/nfsd";
/// What exportfs(8) keeps of exports.
const TABLE: &str = "/var/lib/nfs/etab";
const TABLE_DIR: &str = "/var/lib/nfs";
const MOUNTS_TABLE: &str = "/var/lib/nfs/rmtab";
/// Port of NFS over RDMA, as IANA has it.
const RDMA_PORT: u16 = 20049;
/// Threads of the server: each has one request under way.
const THREADS: u32 = 16;
/// How often clients say that they are there, in seconds. A client with nothing to do notices a failover
/// within two thirds of it.
const CLIENT_LEASE_S: u32 = 20;
/// How long clients may reclaim after a start, in seconds. It ends early when all have come back.
const GRACE_S: u32 = 30;
/// Options of the root that leads to exports: its content is their names.
const ROOT_OPTIONS: &str = "ro,fsid=0,no_subtree_check,sec=sys,root_squash";
/// Modules that an NFS node needs; what is built in is there anyway.
const MODULES: &[&str] = &["xfs", "nfsd", "rpcrdma"];

/// The server, as this helper runs it.
#[derive(Debug)]
pub struct Server {
    dir: PathBuf,
    mounts: Mounts,
    tracker: Tracker,
    is_tracking: bool,
    mountd: Option<Child>,
    /// The scope of the last start.
    scope: Option<String>,
}

impl Server {
    pub fn new(dir: &Path, mounts: Mounts) -> Self {
        Self {
            dir: dir.to_owned(),
            mounts,
            tracker: Tracker::default(),
            is_tracking: false,
            mountd: None,
            scope: None,
        }
    }

    /// Goes on with what a helper before this one has left.
    pub fn resume(&mut self) {
        let published = Published::read();
        let notes = self.mounts.notes().into_iter();
        let left: Vec<ExportPlan> = notes
            .filter(|plan| published.has(&self.mounts.point(&plan.name), &plan.clients))
            .collect();
        if left.is_empty() {
            self.clear_table();
            return;
        }
        for plan in left {
            if let Err(error) = self.tracker.add(&plan.name, &self.mounts.point(&plan.name)) {
                tracing::error!(export = plan.name, %error, "read which clients may reclaim");
            }
        }
        if let Err(error) = self.prepare() {
            tracing::error!(%error, "go on with the NFS server");
        }
    }

    /// The table outlives the machine's restart, and the mounts do not.
    fn clear_table(&self) {
        let root = self.mounts.root();
        for (path, client) in Published::table().0 {
            if threads() == 0 && path.starts_with(&root) {
                let export = format!("{client}:{}", path.display());
                // What is left does no harm: nothing is mounted there.
                let _ = run("exportfs", ["-u", &export]);
            }
        }
    }

    /// Exports what is mounted.
    pub fn publish(&mut self, plan: &ExportPlan, scope: &str) -> Result<()> {
        let point = self.mounts.point(&plan.name);
        if !is_mount_point(&point) {
            return Err(HelperError::new(
                format!("export '{}' is not mounted", plan.name),
                "look at `penstock nfs export show`",
            ));
        }
        self.prepare()?;
        soft_roce::renew();
        let added = self.tracker.add(&plan.name, &point);
        let must_start_anew = added.map_err(|e| {
            HelperError::io(
                format!("read which clients of '{}' may reclaim", plan.name),
                &e,
            )
        })?;
        let exported = self.export(plan, &point);
        let started = exported.and_then(|()| match (threads(), must_start_anew) {
            (0, _) => self.begin(scope),
            (_, true) => {
                self.pause();
                self.begin(scope)
            }
            (_, false) => Ok(()),
        });
        if started.is_err() {
            self.tracker.remove(&plan.name);
            self.unexport(plan);
        }
        started
    }

    fn export(&self, plan: &ExportPlan, point: &Path) -> Result<()> {
        for client in &plan.clients {
            let root = format!("{client}:{}", self.mounts.root().display());
            succeed("exportfs", ["-i", "-o", ROOT_OPTIONS, &root])?;
            let export = format!("{client}:{}", point.display());
            succeed("exportfs", ["-i", "-o", &plan.options(), &export])?;
        }
        Ok(())
    }

    fn unexport(&self, plan: &ExportPlan) {
        for client in &plan.clients {
            let export = format!("{client}:{}", self.mounts.point(&plan.name).display());
            if let Err(error) = succeed("exportfs", ["-u", &export]) {
                tracing::warn!(export = plan.name, %error, "unexport");
            }
        }
    }

    /// Forgets an export, and what clients have open there. The last one stops the server.
    pub fn unpublish(&mut self, plan: &ExportPlan) -> Result<()> {
        let point = self.mounts.point(&plan.name);
        // First of all: what the server forgets from here on, clients may still reclaim elsewhere.
        self.tracker.remove(&plan.name);
        self.unexport(plan);
        if is_mount_point(&point) {
            let path = format!("{}\n", point.display());
            // Without it the server alone may keep the mount busy: then that starts anew.
            if let Err(error) = std::fs::write(control("unlock_filesystem"), path) {
                tracing::warn!(export = plan.name, %error, "revoke what clients have open");
            }
        }
        let published = Published::read();
        let notes = self
            .mounts
            .notes()
            .into_iter()
            .filter(|other| other.name != plan.name);
        let mut others =
            notes.filter(|other| published.has(&self.mounts.point(&other.name), &other.clients));
        if others.next().is_none() {
            self.stop();
        }
        match Published::read().has_any(&point) {
            true => Err(HelperError::new(
                format!("export '{}' cannot be taken from the NFS server", plan.name),
                format!("see {TABLE}"),
            )),
            false => Ok(()),
        }
    }

    /// What answers the kernel: mountd, and the tracker of clients.
    fn prepare(&mut self) -> Result<()> {
        make_dir(Path::new(TABLE_DIR), 0o755)?;
        // exportfs(8) fails where the package has not made them.
        for file in [TABLE, MOUNTS_TABLE] {
            let made = OpenOptions::new().create(true).append(true).open(file);
            made.map_err(|e| HelperError::io(format!("make {file}"), &e))?;
        }
        mount_once("nfsd", Path::new(CONTROL))?;
        let pipes = self.dir.join("rpc_pipefs");
        make_dir(&pipes, 0o700)?;
        mount_once("rpc_pipefs", &pipes)?;
        if !self.is_tracking {
            let started = self.tracker.start(pipes.join("nfsd/cld"));
            started.map_err(|e| HelperError::io("start a thread", &e))?;
            self.is_tracking = true;
        }
        let is_running = self
            .mountd
            .as_mut()
            .is_some_and(|child| matches!(child.try_wait(), Ok(None)));
        if !is_running {
            self.mountd = Some(start_mountd()?);
        }
        Ok(())
    }

    fn begin(&mut self, scope: &str) -> Result<()> {
        let (lease, grace, threads) = (
            CLIENT_LEASE_S.to_string(),
            GRACE_S.to_string(),
            THREADS.to_string(),
        );
        let versions = ["-N", "3", "-N", "4.0", "-N", "4.1", "-V", "4.2"];
        let mut args = vec!["--scope", scope, "-L", &lease, "-G", &grace];
        args.extend(versions);
        args.push(&threads);
        succeed("rpc.nfsd", args)?;
        self.scope = Some(scope.to_owned());
        if let Err(error) = std::fs::write(control("portlist"), format!("rdma {RDMA_PORT}\n")) {
            tracing::warn!(%error, "this kernel serves NFS over TCP alone, not over RDMA");
        }
        Ok(())
    }

    /// Stops the server, to go on soon.
    pub fn pause(&mut self) {
        if threads() > 0
            && let Err(error) = run("rpc.nfsd", ["0"])
        {
            tracing::error!(%error, "stop the NFS server");
        }
    }

    /// Goes on if anything is exported.
    pub fn go_on(&mut self) -> Result<()> {
        match self.scope.clone() {
            Some(scope) if Published::table().has_below(&self.mounts.root()) => self.begin(&scope),
            _ => Ok(()),
        }
    }

    /// Stops the server for good.
    pub fn stop(&mut self) {
        self.pause();
        self.scope = None;
        let root = self.mounts.root();
        for client in Published::table().clients_of(&root) {
            let export = format!("{client}:{}", root.display());
            if let Err(error) = succeed("exportfs", ["-u", &export]) {
                tracing::warn!(%error, "unexport the root");
            }
        }
        if let Some(mut mountd) = self.mountd.take() {
            let _ = mountd.kill();
            let _ = mountd.wait();
        }
    }

    /// What else serves NFS on this machine.
    pub fn rival(&self) -> Option<String> {
        let is_ours = Published::read().has_below(&self.mounts.root());
        if threads() > 0 && !is_ours {
            return Some(
                "an NFS server runs on this machine already: systemctl disable --now nfs-server"
                    .into(),
            );
        }
        let tracker = "nfsdcld runs, which would take questions about clients away: systemctl mask \
                       --now nfsdcld";
        is_running("nfsdcld").then(|| tracker.to_owned())
    }
}

fn start_mountd() -> Result<Child> {
    let mut command = program("rpc.mountd");
    command.args(["--foreground", "-N", "2", "-N", "3"]);
    // SAFETY: prctl is async-signal-safe, and nothing else is done between fork and exec.
    unsafe {
        command.pre_exec(
            || match libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGTERM) {
                0 => Ok(()),
                _ => Err(std::io::Error::last_os_error()),
            },
        );
    }
    command
        .spawn()
        .map_err(|e| HelperError::io("start rpc.mountd", &e))
}

fn control(file: &str) -> PathBuf {
    Path::new(CONTROL).join(file)
}

fn mount_once(kind: &str, at: &Path) -> Result<()> {
    if is_mount_point(at) {
        return Ok(());
    }
    mount(kind, at, kind, 0, "").map_err(|e| HelperError::io(format!("mount {kind}"), &e))
}

/// Loads what there is as modules.
pub fn load_modules() {
    for module in MODULES {
        // Where it is built in, or there is no modprobe, nothing is lost.
        let _ = run("modprobe", ["--quiet", module]);
    }
}

/// Whether the kernel knows a file system.
pub fn kernel_has(file_system: &str) -> bool {
    let told = std::fs::read_to_string("/proc/filesystems").unwrap_or_default();
    let mut names = told
        .lines()
        .filter_map(|line| line.split_whitespace().last());
    names.any(|name| name == file_system)
}

/// Names of the RDMA devices of this machine.
pub fn rdma_devices() -> Vec<String> {
    let entries = std::fs::read_dir("/sys/class/infiniband")
        .into_iter()
        .flatten();
    let names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    let mut names: Vec<String> = names.collect();
    names.sort();
    names
}

fn is_running(program: &str) -> bool {
    let entries = std::fs::read_dir("/proc").into_iter().flatten();
    let names =
        entries.filter_map(|entry| std::fs::read_to_string(entry.ok()?.path().join("comm")).ok());
    names.into_iter().any(|name| name.trim_end() == program)
}

fn threads() -> u32 {
    let told = std::fs::read_to_string(control("threads")).unwrap_or_default();
    told.trim().parse().unwrap_or(0)
}

/// How the server is, if it runs.
pub fn state() -> Option<ServerState> {
    let threads = Some(threads()).filter(|threads| *threads > 0)?;
    let ports = std::fs::read_to_string(control("portlist")).unwrap_or_default();
    // One for each family of addresses.
    let ports: BTreeSet<&str> = ports.lines().collect();
    let clients = std::fs::read_dir(control("clients")).map_or(0, Iterator::count);
    let ended = std::fs::read_to_string(control("v4_end_grace")).unwrap_or_default();
    Some(ServerState {
        threads,
        ports: ports.into_iter().map(str::to_owned).collect(),
        clients: u32::try_from(clients).unwrap_or(u32::MAX),
        in_grace: ended.trim() == "N",
    })
}

/// What the server exports, as exportfs(8) has it.
#[derive(Debug, Default)]
pub struct Published(Vec<(PathBuf, String)>);

impl Published {
    /// Nothing while no server runs.
    pub fn read() -> Self {
        match threads() {
            0 => Self::default(),
            _ => Self::table(),
        }
    }

    /// What it exports once it runs.
    fn table() -> Self {
        Self::parse(&std::fs::read_to_string(TABLE).unwrap_or_default())
    }

    fn parse(table: &str) -> Self {
        let entry = |line: &str| {
            let (path, rest) = line.split_once('\t')?;
            let (client, _) = rest.split_once('(')?;
            Some((PathBuf::from(path), client.to_owned()))
        };
        Self(table.lines().filter_map(entry).collect())
    }

    /// Whether it is exported to all these clients.
    pub fn has(&self, path: &Path, clients: &[Network]) -> bool {
        let mut of_path = clients.iter().map(|client| {
            let all = self.clients_of(path);
            let plain = client.to_string();
            // A network of one address is written without its length.
            let short = plain
                .trim_end_matches("/32")
                .trim_end_matches("/128")
                .to_owned();
            all.contains(&plain) || all.contains(&short)
        });
        !clients.is_empty() && of_path.all(|is_there| is_there)
    }

    fn has_any(&self, path: &Path) -> bool {
        self.0.iter().any(|(exported, _)| exported == path)
    }

    fn has_below(&self, root: &Path) -> bool {
        self.0
            .iter()
            .any(|(path, _)| path != root && path.starts_with(root))
    }

    fn clients_of(&self, path: &Path) -> Vec<String> {
        let of_path = self.0.iter().filter(|(exported, _)| exported == path);
        of_path.map(|(_, client)| client.clone()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TABLE_TEXT: &str = "/run/x/exports\t10.9.0.0/24(ro,sync)\n/run/x/exports/data\t10.9.0.0/24(rw)\n\
                              /run/x/exports/data\t10.8.0.1(rw)\nnonsense\n";

    #[test]
    fn the_table_of_exports_is_read() {
        let all = Published::parse(TABLE_TEXT);
        let (root, data) = (
            Path::new("/run/x/exports"),
            Path::new("/run/x/exports/data"),
        );
        let networks = |texts: &[&str]| -> Vec<Network> {
            texts.iter().map(|text| text.parse().unwrap()).collect()
        };
        assert!(all.has(data, &networks(&["10.9.0.0/24", "10.8.0.1"])));
        assert!(!all.has(data, &networks(&["10.9.0.0/24", "10.7.0.0/16"])));
        assert!(!all.has(data, &[]));
        assert!(all.has_below(root) && !all.has_below(data));
        assert_eq!(all.clients_of(root), ["10.9.0.0/24"]);
        assert!(!all.has_any(Path::new("/run/x")));
    }
}
