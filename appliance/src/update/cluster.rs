//! A whole cluster's update: one node after the other, each only while the cluster is well, by ssh.
//!
//! Nothing is remembered here. Which nodes are done is asked of them, so that the same command goes on after
//! it was ended, whoever types it and wherever.

use std::fs::{DirBuilder, File};
use std::net::SocketAddr;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde::Deserialize;

use super::install::signature_of;
use super::{Record, State};

/// Where an update lies on a node until it is installed.
const INCOMING: &str = "/var/tmp/incoming.update";
/// How long a node may take to restart and to be well with the new version: its own check takes ten minutes
/// at most, and its firmware some.
const RESTART_MAX: Duration = Duration::from_secs(1800);
/// How long the cluster may take to be well again: the node gets what it missed.
const WELL_MAX: Duration = Duration::from_secs(7200);
/// Between two looks.
const INTERVAL: Duration = Duration::from_secs(5);

/// A node to update.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct Node {
    /// Its name.
    pub name: String,
    /// Where others reach its metadata service, like `10.0.0.1:7567`: it is called at that address.
    pub control_address: String,
}

impl Node {
    fn address(&self) -> Result<String> {
        let socket: SocketAddr = self
            .control_address
            .parse()
            .with_context(|| format!("node {} is reached by no other machine", self.name))?;
        Ok(socket.ip().to_string())
    }
}

/// What a node says of its versions: `penstock update status --json`.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
struct Status {
    version: String,
    last: Option<Record>,
    #[serde(default)]
    message: Option<String>,
}

/// How commands run on nodes.
pub trait Shell {
    /// Runs `command` on the machine at `address` with `input`, and returns what it prints.
    ///
    /// # Errors
    /// The machine cannot be reached, or the command fails; the error has what it said.
    fn run(&mut self, address: &str, command: &str, input: Option<&Path>) -> Result<String>;

    /// Waits between two looks.
    fn pause(&mut self);
}

/// ssh(1), as root, which asks nothing. All commands for a node go over one connection.
#[derive(Debug)]
pub struct Ssh {
    options: Vec<String>,
    /// Where the sockets of connections lie; `None`: each command makes its own.
    sockets: Option<PathBuf>,
}

impl Ssh {
    /// With these arguments of ssh besides, like `-i FILE`.
    pub fn new(options: Vec<String>) -> Self {
        let sockets = std::env::temp_dir().join(format!("penstock-ssh-{}", std::process::id()));
        // Nobody else may lie in wait there: what exists already is not used.
        let made = DirBuilder::new().mode(0o700).create(&sockets);
        Self {
            options,
            sockets: made.is_ok().then_some(sockets),
        }
    }
}

impl Drop for Ssh {
    fn drop(&mut self) {
        if let Some(sockets) = &self.sockets {
            // The connections end by themselves once nobody uses them.
            let _ = std::fs::remove_dir_all(sockets);
        }
    }
}

impl Shell for Ssh {
    fn run(&mut self, address: &str, command: &str, input: Option<&Path>) -> Result<String> {
        let mut ssh = Command::new("ssh");
        ssh.args([
            "-oBatchMode=yes",
            "-oConnectTimeout=10",
            "-oServerAliveInterval=5",
            "-oServerAliveCountMax=3",
            // A node that was never called is new; one whose key changed is refused.
            "-oStrictHostKeyChecking=accept-new",
            "-oLogLevel=ERROR",
            "-lroot",
        ])
        .args(&self.options);
        if let Some(sockets) = &self.sockets {
            // A login costs more than most commands; on a slow machine it takes seconds of a processor.
            ssh.args(["-oControlMaster=auto", "-oControlPersist=30"])
                .arg(format!("-oControlPath={}/%C", sockets.display()));
        }
        ssh.args([address, command]);
        ssh.stdin(match input {
            Some(path) => File::open(path)
                .with_context(|| format!("open {}", path.display()))?
                .into(),
            None => Stdio::null(),
        });
        let output = ssh
            .output()
            .context("run ssh: is the package openssh-client installed?")?;
        if !output.status.success() {
            let said = [output.stderr, output.stdout].concat();
            bail!("on {address}: {}", String::from_utf8_lossy(&said).trim());
        }
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    fn pause(&mut self) {
        std::thread::sleep(INTERVAL);
    }
}

/// The update of a cluster.
pub struct Rollout<'a> {
    /// How nodes are reached.
    pub shell: &'a mut dyn Shell,
    /// The update; its signature lies beside it.
    pub file: &'a Path,
    /// Its version.
    pub version: &'a str,
    /// Told what is done.
    pub say: &'a dyn Fn(&str),
}

impl std::fmt::Debug for Rollout<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Rollout({} of {})", self.version, self.file.display())
    }
}

impl Rollout<'_> {
    /// The nodes of the cluster that the node at `address` is of, that one last.
    ///
    /// # Errors
    /// It cannot be asked.
    pub fn nodes(&mut self, address: &str) -> Result<Vec<Node>> {
        let listed = self.shell.run(address, "penstock node list --json", None)?;
        let mut nodes: Vec<Node> =
            serde_json::from_str(&listed).context("read the list of nodes")?;
        nodes.sort_by_key(|node| node.address().is_ok_and(|own| own == address));
        Ok(nodes)
    }

    /// Updates `nodes` in their order, but for those that run the version already. Stops at the first that
    /// fails, and leaves the rest as they are.
    ///
    /// # Errors
    /// A node is down, is no appliance, cannot be reached, or went back to the version before; or the cluster
    /// is not well. The error says which nodes are done.
    pub fn run(&mut self, nodes: &[Node]) -> Result<()> {
        let mut left = Vec::new();
        for node in nodes {
            let status = self.status(node)?;
            if status.version == self.version {
                (self.say)(&format!(
                    "{}: runs version {} already",
                    node.name, self.version
                ));
            } else {
                left.push((node, status.version));
            }
        }
        for (done, (node, before)) in left.iter().enumerate() {
            let outcome = self
                .is_well(nodes)
                .and_then(|()| self.update(node, before))
                .and_then(|()| self.becomes_well(nodes));
            if let Err(error) = outcome {
                let names: Vec<&str> = left[done..].iter().map(|(node, _)| &*node.name).collect();
                return Err(error.context(format!(
                    "the update of the cluster stops at {}; not done: {}. The same command goes on",
                    node.name,
                    names.join(", ")
                )));
            }
        }
        Ok(())
    }

    fn status(&mut self, node: &Node) -> Result<Status> {
        let address = &node.address()?;
        let told = self
            .shell
            .run(address, "penstock update status --json", None)
            .with_context(|| format!("ask node {} for its version", node.name))?;
        serde_json::from_str(&told).with_context(|| format!("read what node {} told", node.name))
    }

    /// What any of the nodes says of the cluster's health.
    fn health(&mut self, nodes: &[Node]) -> Result<()> {
        let mut last = None;
        for node in nodes {
            let address = &node.address()?;
            match self.shell.run(address, "penstock health", None) {
                Ok(_) => return Ok(()),
                Err(error) => last = Some(error),
            }
        }
        Err(last.context("there are no nodes")?)
    }

    fn is_well(&mut self, nodes: &[Node]) -> Result<()> {
        self.health(nodes)
            .context("the cluster is not well, and no node is restarted as long as it is not")
    }

    fn becomes_well(&mut self, nodes: &[Node]) -> Result<()> {
        let begin = Instant::now();
        loop {
            match self.health(nodes) {
                Ok(()) => return Ok(()),
                Err(error) if begin.elapsed() > WELL_MAX => {
                    return Err(error.context("the cluster does not become well again"));
                }
                Err(_) => self.shell.pause(),
            }
        }
    }

    fn update(&mut self, node: &Node, before: &str) -> Result<()> {
        let address = &node.address()?;
        (self.say)(&format!(
            "{}: from version {before} to {}",
            node.name, self.version
        ));
        let signature = signature_of(self.file);
        for (file, target) in [
            (self.file, INCOMING.to_owned()),
            (&*signature, format!("{INCOMING}.minisig")),
        ] {
            self.shell
                .run(address, &format!("cat > {target}"), Some(file))
                .with_context(|| format!("copy the update to {}", node.name))?;
        }
        let install = format!("penstock update install {INCOMING} --no-restart --yes");
        let installed = self.shell.run(address, &install, None);
        // It is not needed any more either way; its next boot takes it if this call does not get through.
        let _ = self.shell.run(
            address,
            &format!("rm -f {INCOMING} {INCOMING}.minisig"),
            None,
        );
        installed.with_context(|| format!("install the update on {}", node.name))?;
        // The machine may go before it answers.
        let _ = self.shell.run(address, "systemctl --no-block reboot", None);
        self.comes_back(node)
    }

    /// Waits until the node has restarted and decided.
    fn comes_back(&mut self, node: &Node) -> Result<()> {
        let begin = Instant::now();
        let mut last = "it has not restarted".to_owned();
        loop {
            match self.status(node) {
                Ok(status) => match status.last.as_ref().map(|last| last.state) {
                    Some(State::Good) if status.version == self.version => {
                        (self.say)(&format!("{}: runs version {}", node.name, self.version));
                        return Ok(());
                    }
                    Some(State::FellBack) => bail!(
                        "node {} went back to version {}: {}",
                        node.name,
                        status.version,
                        status.message.unwrap_or_default()
                    ),
                    _ => {}
                },
                Err(error) => last = format!("{error:#}"),
            }
            ensure!(
                begin.elapsed() <= RESTART_MAX,
                "node {} does not come back: {last}",
                node.name
            );
            self.shell.pause();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::collections::BTreeMap;

    use super::*;

    const A: &str = "10.0.0.1";
    const B: &str = "10.0.0.2";
    const C: &str = "fd00::3";

    /// Three nodes that are updated as soon as they restart, unless one is told to go back.
    #[derive(Default)]
    struct Fake {
        versions: BTreeMap<String, String>,
        goes_back: Option<String>,
        is_ill: bool,
        log: Vec<String>,
    }

    impl Shell for Fake {
        fn run(&mut self, address: &str, command: &str, _: Option<&Path>) -> Result<String> {
            self.log.push(format!("{address} {command}"));
            let version = self.versions.get_mut(address).context("no such machine")?;
            match command {
                "penstock health" => {
                    ensure!(!self.is_ill, "2 groups are degraded");
                    Ok("ok".to_owned())
                }
                "systemctl --no-block reboot" => {
                    if self.goes_back.as_deref() != Some(address) {
                        *version = "2".to_owned();
                    }
                    bail!("connection closed")
                }
                "penstock update status --json" => {
                    let state = match &**version {
                        "2" => "good",
                        _ => "fell-back",
                    };
                    Ok(format!(
                        "{{\"version\":\"{version}\",\"message\":\"it did not start\",\"last\":{{\
                         \"version\":\"2\",\"before\":\"1\",\"root_hash\":\"\",\"state\":\"{state}\"}}}}"
                    ))
                }
                _ => Ok(String::new()),
            }
        }

        fn pause(&mut self) {}
    }

    fn nodes() -> Vec<Node> {
        let node = |name: &str, address: &str| Node {
            name: name.to_owned(),
            control_address: SocketAddr::new(address.parse().expect("an address"), 7567)
                .to_string(),
        };
        vec![node("one", A), node("two", B), node("three", C)]
    }

    fn fake() -> Fake {
        let versions = [A, B, C].map(|address| (address.to_owned(), "1".to_owned()));
        Fake {
            versions: versions.into(),
            ..Fake::default()
        }
    }

    fn roll_out(fake: &mut Fake) -> (Result<()>, Vec<String>) {
        let said = RefCell::new(Vec::new());
        let outcome = Rollout {
            shell: fake,
            file: Path::new("/new.update"),
            version: "2",
            say: &|line| said.borrow_mut().push(line.to_owned()),
        }
        .run(&nodes());
        (outcome, said.into_inner())
    }

    #[test]
    fn nodes_are_updated_one_after_the_other_while_the_cluster_is_well() {
        let mut fake = fake();
        roll_out(&mut fake).0.expect("updated");
        let restarts: Vec<&String> = fake
            .log
            .iter()
            .filter(|line| line.contains("reboot"))
            .collect();
        assert_eq!(restarts.len(), 3);
        let at = |text: &str| fake.log.iter().position(|line| line == text).expect(text);
        assert!(
            at(&format!("{A} systemctl --no-block reboot")) < at(&format!("{B} cat > {INCOMING}"))
        );
    }

    #[test]
    fn nothing_is_done_while_the_cluster_is_not_well() {
        let mut fake = Fake {
            is_ill: true,
            ..fake()
        };
        let error = format!("{:#}", roll_out(&mut fake).0.expect_err("ill"));
        assert!(
            error.contains("degraded") && error.contains("not done: one, two, three"),
            "{error}"
        );
        assert!(fake.log.iter().all(|line| !line.contains("install")));
    }

    #[test]
    fn it_stops_at_the_first_node_that_goes_back_and_goes_on_later() {
        let mut fake = Fake {
            goes_back: Some(B.to_owned()),
            ..fake()
        };
        let error = format!("{:#}", roll_out(&mut fake).0.expect_err("went back"));
        for word in ["stops at two", "not done: two, three", "it did not start"] {
            assert!(error.contains(word), "no {word} in {error}");
        }
        assert_eq!(fake.versions[C], "1");
        fake.goes_back = None;
        fake.log.clear();
        let (outcome, said) = roll_out(&mut fake);
        outcome.expect("goes on");
        assert!(
            said.iter()
                .any(|line| line.contains("one: runs version 2 already")),
            "{said:?}"
        );
        assert!(
            !fake
                .log
                .iter()
                .any(|line| line.starts_with(&format!("{A} systemctl"))),
            "{:?}",
            fake.log
        );
    }
}
