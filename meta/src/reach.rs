//! The nodes that were reached when a request failed for lack of a leader, for the operator to fix it.

use std::time::Duration;

/// What to do on a node at which nothing arrives.
pub(crate) const REPAIR: &str =
    "open this node's ports in its firewall, or repair the network towards it";

/// The voters, and which of them a node reaches. Empty where nobody looked.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Reach {
    /// Names of all voters.
    pub voters: Vec<String>,
    /// Names of those that gave no answer.
    pub unreached: Vec<String>,
    /// Nothing that they send arrives, though they answer.
    pub is_unheard: bool,
}

impl Reach {
    /// How many must reach each other.
    fn needed(&self) -> usize {
        self.voters.len() / 2 + 1
    }

    fn has_majority(&self) -> bool {
        self.voters.len() - self.unreached.len() >= self.needed()
    }

    /// Why there was no leader, in one line with a hint.
    pub(crate) fn no_leader(&self, waited: Duration, is_command: bool) -> String {
        let (seconds, needed) = (waited.as_secs(), self.needed());
        let (voters, unreached) = (self.voters.join(", "), self.unreached.join(", "));
        let unchanged = if is_command {
            ", and nothing was changed"
        } else {
            ""
        };
        if self.voters.is_empty() {
            return format!(
                "the metadata service has had no leader for {seconds} s{unchanged}: check that most of its \
                 nodes run"
            );
        }
        if self.is_unheard {
            return format!(
                "nothing that other nodes send arrives at this node{unchanged}, though it reaches the voters \
                 {voters}: {REPAIR}, then repeat"
            );
        }
        if self.has_majority() {
            let but = match unreached.is_empty() {
                true => String::new(),
                false => format!(", all but {unreached}"),
            };
            return format!(
                "the metadata service has had no leader for {seconds} s{unchanged}, though this node reaches \
                 the voters \
                 {voters}{but}: repeat it, and look at their logs if that goes on"
            );
        }
        format!(
            "metadata has no majority{unchanged}: {needed} of the {} voters {voters} must run and reach each \
             other, and this node \
             does not reach {unreached}: start what is down, repair the network, or give `penstock serve \
             --peer` the new address of a node that has moved; then repeat",
            self.voters.len()
        )
    }

    /// What is wrong, to be put into a sentence.
    pub(crate) fn in_brief(&self) -> String {
        if self.is_unheard {
            return format!(" (nothing that other nodes send arrives here: {REPAIR})");
        }
        match self.unreached.is_empty() {
            true => String::new(),
            false => format!(" (this node does not reach {})", self.unreached.join(", ")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(voters: &[&str], unreached: &[&str]) -> String {
        let owned = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
        let reach = Reach {
            voters: owned(voters),
            unreached: owned(unreached),
            is_unheard: false,
        };
        reach.no_leader(Duration::from_secs(5), true)
    }

    #[test]
    fn error_names_unreachable_voters_or_says_there_is_no_leader() {
        let three = ["a (this node)", "b", "c"];
        let none = told(&three, &["b", "c"]);
        assert!(
            none.starts_with(
                "metadata has no majority, and nothing was changed: 2 of the 3 voters a (this \
                node), b, c must"
            ),
            "{none}"
        );
        assert!(none.contains("does not reach b, c: start"), "{none}");
        let most = told(&three, &["c"]);
        assert!(
            most.contains("no leader for 5 s, and nothing was changed"),
            "{most}"
        );
        assert!(
            most.contains("a (this node), b, c, all but c: repeat"),
            "{most}"
        );
        assert!(!told(&three, &[]).contains("all but"));
        let unheard = Reach {
            voters: three.map(str::to_owned).to_vec(),
            unreached: Vec::new(),
            is_unheard: true,
        };
        let unheard = unheard.no_leader(Duration::from_secs(5), true);
        assert!(
            unheard
                .starts_with("nothing that other nodes send arrives at this node, and nothing was")
                && unheard.contains("firewall"),
            "{unheard}"
        );
        assert!(told(&[], &[]).contains("check that most of its nodes run"));
    }
}
