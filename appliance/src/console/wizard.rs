//! The wizard: asks what a seed would have said, and makes a seed of it.

use std::process::Command;

use anyhow::{Context, Result};

use super::{CLEAR, Console, ask, print};
use crate::disks;
use crate::process::run;
use crate::seed::{ALL_EMPTY, Seed};

pub(super) fn guide(console: &Console<'_>) -> Result<()> {
    print(&format!(
        "{CLEAR}Wizard\n\nAn empty answer takes what stands in [ ].\n\n"
    ))?;
    let seed = loop {
        let answers = Answers::ask()?;
        let text = answers.seed();
        match Seed::parse(&text) {
            Ok(seed) => break seed,
            Err(error) => print(&format!("\nThat is refused: {error:#}\n\n"))?,
        }
    };
    if !is_yes(&ask("Make this machine a node so? [no]")?) {
        return Ok(());
    }
    console.machine.keep_seed(&seed)?;
    console.machine.hush();
    let systemctl = |args: &[&str]| run(Command::new("systemctl").args(args));
    let started = systemctl(&[
        "restart",
        "penstock-appliance.service",
        "systemd-networkd.service",
    ])
    .and_then(|_| systemctl(&["restart", "--no-block", "penstock-first-boot.service"]))
    .and_then(|_| systemctl(&["start", "--no-block", "penstock.service", "ssh.service"]));
    started
        .map(drop)
        .context("start what makes this machine a node")
}

/// What was answered.
#[derive(Debug, Default)]
struct Answers {
    hostname: String,
    address: String,
    gateway: String,
    name_server: String,
    token: String,
    takes_disks: bool,
    ssh_key: String,
}

impl Answers {
    fn ask() -> Result<Self> {
        let mut answers = Self {
            hostname: ask("Name of this machine")?,
            ..Self::default()
        };
        answers.address = ask("Address with prefix, like 10.0.0.1/24 [DHCP]")?;
        if !answers.address.is_empty() {
            answers.gateway = ask("Gateway [none]")?;
            answers.name_server = ask("Server of names [none]")?;
        }
        answers.token = ask("Token of a cluster to join [make a new cluster]")?;
        let all = disks::list().unwrap_or_default();
        let empty = disks::all_empty(&all);
        for disk in &empty {
            print(&format!("  {}\n", disks::describe(disk)))?;
        }
        answers.takes_disks = !empty.is_empty() && is_yes(&ask("Take these empty disks? [no]")?);
        answers.ssh_key = ask("Public key for ssh [no ssh]")?;
        Ok(answers)
    }

    /// The answers as a seed's text.
    fn seed(&self) -> String {
        let quoted = |text: &str| serde_json::to_string(text).unwrap_or_default();
        let mut lines = Vec::new();
        if !self.hostname.is_empty() {
            lines.push(format!("hostname: {}", quoted(&self.hostname)));
        }
        if !self.ssh_key.is_empty() {
            lines.push(format!("ssh_authorized_keys: [{}]", quoted(&self.ssh_key)));
        }
        if !self.address.is_empty() {
            let mut card = format!(
                "match: {{name: 'e*'}}, addresses: [{}]",
                quoted(&self.address)
            );
            if !self.gateway.is_empty() {
                card.push_str(&format!(
                    ", routes: [{{to: default, via: {}}}]",
                    quoted(&self.gateway)
                ));
            }
            if !self.name_server.is_empty() {
                card.push_str(&format!(
                    ", nameservers: {{addresses: [{}]}}",
                    quoted(&self.name_server)
                ));
            }
            lines.push(format!(
                "network: {{version: 2, ethernets: {{lan: {{{card}}}}}}}"
            ));
        }
        let entry = match self.token.as_str() {
            "" => "init: {}".to_owned(),
            token => format!("join: {}", quoted(token)),
        };
        let devices = if self.takes_disks {
            format!(", devices: {ALL_EMPTY}")
        } else {
            String::new()
        };
        lines.push(format!("penstock: {{{entry}{devices}}}"));
        lines.join("\n")
    }
}

fn is_yes(answer: &str) -> bool {
    matches!(answer.to_ascii_lowercase().as_str(), "y" | "yes")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::seed::Devices;

    #[test]
    fn answers_become_a_seed() {
        let answers = Answers {
            hostname: "two".into(),
            address: "10.0.0.2/24".into(),
            gateway: "10.0.0.254".into(),
            name_server: "10.0.0.53".into(),
            token: "pst1.abc".into(),
            takes_disks: true,
            ssh_key: "ssh-ed25519 AAAA op".into(),
        };
        let seed = Seed::parse(&answers.seed()).expect("a seed");
        assert_eq!(seed.hostname.as_deref(), Some("two"));
        let node = seed.penstock.expect("a node");
        assert_eq!(node.join.as_deref(), Some("pst1.abc"));
        assert_eq!(node.devices, Devices::Word(ALL_EMPTY.into()));
        let network = seed.network.expect("a network");
        assert_eq!(network.first_address(), "10.0.0.2".parse().ok());
    }

    #[test]
    fn no_answers_make_a_cluster() {
        let seed = Seed::parse(&Answers::default().seed()).expect("a seed");
        assert!(seed.penstock.expect("a node").init.is_some());
        let bad = Answers {
            hostname: "a: b".into(),
            ..Answers::default()
        };
        assert!(Seed::parse(&bad.seed()).is_err());
    }
}
