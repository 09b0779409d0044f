//! Calls of virsh.

use std::io::Write;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use crate::domain::{AskedFilesystem, AskedVolume, Domain, DomainError, NAMESPACE, metadata_xml};
use crate::xml::{Element, XmlError};

/// virsh translates what it says, and is understood in English.
const LANGUAGE: (&str, &str) = ("LC_ALL", "C");

/// The first version that was seen to pass `<reconnect>` on for a disk that is plugged into a running guest.
/// 9.0 tells QEMU not to connect again, whatever the disk's element says.
pub const HOTPLUG_RECONNECTS: (u32, u32) = (11, 3);

/// virsh, and the hypervisor that it talks to.
#[derive(Debug, Clone)]
pub struct Virsh {
    program: PathBuf,
    uri: Option<String>,
}

/// Why virsh did not do it. What virsh says is told in its own words.
#[derive(Debug, thiserror::Error)]
pub enum VirshError {
    /// There is no virsh.
    #[error("virsh is not installed")]
    Missing,
    /// It did not run.
    #[error("cannot run virsh: {0}")]
    Run(#[source] std::io::Error),
    /// libvirt does not answer.
    #[error("libvirt does not answer: {0}")]
    Unreachable(String),
    /// There is no such domain.
    #[error("there is no domain '{0}'")]
    NoDomain(String),
    /// It refused.
    #[error("virsh {command}: {message}")]
    Refused {
        /// Which command of virsh's.
        command: String,
        /// What it said.
        message: String,
    },
    /// What it printed is not understood.
    #[error(transparent)]
    Domain(#[from] DomainError),
    /// What it printed is not understood.
    #[error("virsh printed what is not read: {0}")]
    Xml(#[from] XmlError),
}

/// Which state of a domain is changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Scope {
    /// The running guest.
    pub is_live: bool,
    /// What the domain has at its next start.
    pub is_config: bool,
}

impl Scope {
    fn options<'a>(self) -> impl Iterator<Item = &'a str> {
        let live = self.is_live.then_some("--live");
        let config = self.is_config.then_some("--config");
        live.into_iter().chain(config)
    }
}

impl Virsh {
    /// The virsh in `PATH`. `uri` names the hypervisor; without it virsh decides, as it does at a prompt.
    pub fn new(uri: Option<String>) -> Self {
        Self {
            program: "virsh".into(),
            uri,
        }
    }

    /// Whether a domain runs: as virsh tells its state, anything but "shut off".
    pub fn is_running(&self, domain: &str) -> Result<bool, VirshError> {
        let state = self.run(&["domstate", "--", domain], None)?;
        Ok(state.trim() != "shut off")
    }

    /// Whether a domain outlives its end.
    pub fn is_persistent(&self, domain: &str) -> Result<bool, VirshError> {
        let info = self.run(&["dominfo", "--", domain], None)?;
        let mut lines = info.lines();
        let line = lines.find_map(|line| line.strip_prefix("Persistent:"));
        Ok(line.is_some_and(|value| value.trim() == "yes"))
    }

    /// A domain, as it runs or, if `inactive`, as it starts next; with its XML.
    pub fn domain(&self, name: &str, inactive: bool) -> Result<(Domain, String), VirshError> {
        let mut args = vec!["dumpxml"];
        args.extend(inactive.then_some("--inactive"));
        args.extend(["--", name]);
        let text = self.run(&args, None)?;
        Ok((Domain::parse(&text)?, text))
    }

    /// Version of the libvirt that answers, like (9, 0); none if virsh does not say.
    pub fn version(&self) -> Result<Option<(u32, u32)>, VirshError> {
        let text = self.run(&["version", "--daemon"], None)?;
        Ok(daemon_version(&text))
    }

    /// What the host and its hypervisor can do.
    pub fn capabilities(&self) -> Result<Element, VirshError> {
        Ok(Element::parse(&self.run(&["capabilities"], None)?)?)
    }

    /// Gives a domain a device.
    pub fn attach_device(&self, domain: &str, xml: &str, scope: Scope) -> Result<(), VirshError> {
        self.change_device("attach-device", domain, xml, scope)
    }

    /// Takes a device from a domain. With a live one this is a request: the guest decides when it lets go.
    pub fn detach_device(&self, domain: &str, xml: &str, scope: Scope) -> Result<(), VirshError> {
        self.change_device("detach-device", domain, xml, scope)
    }

    /// Sets what a domain's metadata ask for, or removes the element if that is nothing.
    pub fn set_asked(
        &self,
        domain: &str,
        asked: &[AskedVolume],
        filesystems: &[AskedFilesystem],
        scope: Scope,
    ) -> Result<(), VirshError> {
        let element = metadata_xml(asked, filesystems);
        let mut args = vec!["metadata"];
        args.extend(scope.options());
        match asked.is_empty() && filesystems.is_empty() {
            true => args.push("--remove"),
            false => args.extend(["--key", "penstock", "--set", &element]),
        }
        args.extend(["--", domain, NAMESPACE]);
        self.run(&args, None).map(drop)
    }

    fn change_device(
        &self,
        command: &str,
        domain: &str,
        xml: &str,
        scope: Scope,
    ) -> Result<(), VirshError> {
        let mut args = vec![command];
        args.extend(scope.options());
        args.extend(["--", domain, "/dev/stdin"]);
        self.run(&args, Some(xml)).map(drop)
    }

    fn run(&self, args: &[&str], input: Option<&str>) -> Result<String, VirshError> {
        let mut command = Command::new(&self.program);
        command
            .args(self.uri.iter().flat_map(|uri| ["--connect", uri.as_str()]))
            .args(args)
            .env(LANGUAGE.0, LANGUAGE.1)
            .stdin(match input {
                Some(_) => Stdio::piped(),
                None => Stdio::null(),
            })
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let mut child = command.spawn().map_err(|error| match error.kind() {
            std::io::ErrorKind::NotFound => VirshError::Missing,
            _ => VirshError::Run(error),
        })?;
        if let (Some(text), Some(mut pipe)) = (input, child.stdin.take()) {
            // A virsh that ends without reading says why itself.
            let _ = pipe.write_all(text.as_bytes());
        }
        let output = child.wait_with_output().map_err(VirshError::Run)?;
        if output.status.success() {
            return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
        }
        let domain = args.iter().skip_while(|arg| **arg != "--").nth(1);
        let stderr = String::from_utf8_lossy(&output.stderr);
        Err(refusal(args[0], domain.copied(), &stderr))
    }
}

fn daemon_version(text: &str) -> Option<(u32, u32)> {
    let mut lines = text.lines();
    let version = lines.find_map(|line| line.strip_prefix("Running against daemon: "))?;
    let mut numbers = version.trim().split('.').map(str::parse);
    Some((numbers.next()?.ok()?, numbers.next()?.ok()?))
}

/// What virsh's standard error means.
fn refusal(command: &str, domain: Option<&str>, stderr: &str) -> VirshError {
    let lines = stderr
        .lines()
        .map(str::trim)
        .filter(|line| !line.is_empty());
    let plain: Vec<&str> = lines
        .map(|line| line.strip_prefix("error: ").unwrap_or(line))
        .collect();
    let says = |words: &str| plain.iter().any(|line| line.starts_with(words));
    // Its first line says which of the commands failed, which we know; the others say why.
    let why = match plain.as_slice() {
        [] => "it failed and said nothing".to_owned(),
        [only] => (*only).to_owned(),
        [_, why @ ..] => why.join(": "),
    };
    match domain {
        _ if says("failed to connect to the hypervisor") => VirshError::Unreachable(why),
        Some(domain) if says("failed to get domain") => VirshError::NoDomain(domain.to_owned()),
        _ => VirshError::Refused {
            command: command.to_owned(),
            message: why,
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn virsh_refusals_are_told_apart() {
        let told = |domain, text: &str| refusal("domstate", domain, text).to_string();
        assert_eq!(
            told(Some("d"), "error: failed to get domain 'd'\n\n"),
            "there is no domain 'd'"
        );
        let down = "error: failed to connect to the hypervisor\nerror: Failed to connect socket to \
                    '/run/x': No such file or directory\n";
        assert_eq!(
            told(None, down),
            "libvirt does not answer: Failed to connect socket to '/run/x': No such file or directory"
        );
        let text = "error: Failed to attach device from /dev/stdin\nerror: Requested operation is not \
                    valid: target vdb already exists\n\n";
        assert_eq!(
            told(Some("d"), text),
            "virsh domstate: Requested operation is not valid: target vdb already exists"
        );
        assert!(told(None, "").contains("said nothing"));
    }

    #[test]
    fn the_version_of_the_daemon_is_read() {
        let text = "Using library: libvirt 9.0.0\nRunning against daemon: 9.0.0\n\n";
        assert_eq!(daemon_version(text), Some((9, 0)));
        assert_eq!(daemon_version("Using library: libvirt 9.0.0\n"), None);
    }

    #[test]
    fn a_missing_virsh_is_told() {
        let virsh = Virsh {
            program: "/nonexistent/virsh".into(),
            uri: None,
        };
        let error = virsh.is_running("d").unwrap_err();
        assert!(matches!(error, VirshError::Missing), "{error}");
    }
}
