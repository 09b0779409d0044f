//! The page as text.

use std::fmt;

/// Columns of a console of 80 that are left beside the names.
const VALUE_COLUMNS: usize = 80 - 2 - 12 - 1;

/// What the page shows.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Page {
    /// Of the appliance.
    pub version: String,
    /// Name of the machine.
    pub hostname: String,
    /// Addresses and their cards.
    pub addresses: Vec<String>,
    /// SHA-256 of the certificate of the cluster's authority.
    pub fingerprint: Option<String>,
    /// What `penstock health` says; nothing while the machine is no node.
    pub health: Option<String>,
    /// The machine's line for the console.
    pub message: Option<String>,
    /// What is wrong with the room for state, if something is.
    pub lack_of_room: Option<String>,
    /// Whether anybody may come in by ssh.
    pub has_ssh: bool,
}

impl Page {
    /// What to do next.
    fn next(&self) -> String {
        let address = self
            .addresses
            .first()
            .and_then(|address| address.split('/').next());
        match (&self.health, address, self.has_ssh) {
            (None, ..) => "press w: the wizard makes this machine a node".to_owned(),
            (Some(_), Some(address), true) => {
                format!(
                    "`ssh root@{address} penstock token create --roles meta,storage,host` prints \
                     a token with which another node like this one joins"
                )
            }
            (Some(_), None, _) => "see to the network: this machine has no address".to_owned(),
            (Some(_), _, false) => {
                "no key for ssh was given: commands go to another node".to_owned()
            }
        }
    }
}

/// The line in pieces that fit beside the names, cut between words. A longer word has a piece of its own.
fn wrapped(line: &str) -> Vec<String> {
    let mut pieces = vec![String::new()];
    for word in line.split(' ') {
        let piece = pieces.last_mut().expect("there is always one");
        if !piece.is_empty() && piece.chars().count() + 1 + word.chars().count() > VALUE_COLUMNS {
            pieces.push(word.to_owned());
            continue;
        }
        if !piece.is_empty() {
            piece.push(' ');
        }
        piece.push_str(word);
    }
    pieces
}

impl fmt::Display for Page {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "Penstock appliance {}   {}\n",
            self.version, self.hostname
        )?;
        let mut line = |name: &str, value: &str| -> fmt::Result {
            for (at, text) in value.lines().flat_map(wrapped).enumerate() {
                let name = if at == 0 { name } else { "" };
                writeln!(f, "  {name:<12} {text}")?;
            }
            Ok(())
        };
        match self.addresses.join("\n") {
            none if none.is_empty() => line("Address", "none")?,
            addresses => line("Address", &addresses)?,
        }
        if let Some(fingerprint) = &self.fingerprint {
            line("Fingerprint", &format!("SHA-256 {fingerprint}"))?;
        }
        line(
            "Health",
            self.health
                .as_deref()
                .unwrap_or("this machine is no node yet"),
        )?;
        if let Some(message) = &self.message {
            line("Message", message)?;
        }
        if let Some(lack) = &self.lack_of_room {
            line("State", lack)?;
        }
        line("Next", &self.next())?;
        let wizard = if self.health.is_none() {
            "w wizard   "
        } else {
            ""
        };
        write!(f, "\n  {wizard}s status   d disks   l log   r rescue\n")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_new_machine_names_the_wizard() {
        let page = Page {
            version: "1".into(),
            hostname: "penstock".into(),
            ..Page::default()
        };
        let text = page.to_string();
        assert!(
            text.contains("no node yet")
                && text.contains("press w")
                && text.contains("Address      none")
        );
    }

    #[test]
    fn a_long_line_is_cut_between_words() {
        let long =
            "cannot reach the daemon at /run/penstock/admin.sock: no such file; look at the log";
        let page = Page {
            health: Some(format!("{long}\nsecond line")),
            ..Page::default()
        };
        let text = page.to_string();
        assert!(
            text.lines().all(|line| line.chars().count() <= 80),
            "{text}"
        );
        let words: Vec<&str> = text.split_whitespace().collect();
        assert!(
            words
                .join(" ")
                .contains(&format!("Health {long} second line")),
            "{text}"
        );
    }

    #[test]
    fn a_node_names_its_address_and_the_next_command() {
        let page = Page {
            addresses: vec!["10.0.0.1/24 (eth0)".into()],
            fingerprint: Some("ab:cd".into()),
            health: Some("ok".into()),
            has_ssh: true,
            ..Page::default()
        };
        let text = page.to_string();
        assert!(
            text.contains("ssh root@10.0.0.1 penstock token create"),
            "{text}"
        );
        assert!(
            text.contains("SHA-256 ab:cd") && !text.contains("wizard"),
            "{text}"
        );
    }
}
