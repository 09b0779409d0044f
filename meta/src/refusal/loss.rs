//! Why data are not given up.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::RefusalKind;
use crate::ids::DeviceId;
use crate::model::GroupId;

/// Refusals to lose data.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LossRefusal {
    /// Nobody else has it, not even somebody who may come back. (Boxed: refusals are returned everywhere, and
    /// stay small.)
    #[error(
        "only {culprit} has what was written last in {groups} placement groups of {}: bring it back; if it \
         is gone for good, \
         repeat this with --accept-data-loss, which gives those writes up and goes on with what others \
         have{}",
        Stored(.volumes, *.others, .filesystems), Orphans(*.orphans)
    )]
    WouldLose {
        /// What people call the node or device.
        culprit: Box<str>,
        /// Groups whose replicas in sync are all there.
        groups: usize,
        /// Of those, the ones of which no other replica is known to have been in sync.
        orphans: usize,
        /// Volumes in their pools, the first ones.
        volumes: Box<[String]>,
        /// Further ones.
        others: usize,
        /// Filesystems with data there.
        filesystems: Box<[String]>,
    },
    /// One that is away may lack less than any that is there.
    #[error(
        "device {device} of node '{node}' may have newer data in placement group {group} than any that is \
         there: start that \
         node; if it is gone for good, too, remove it first with --accept-data-loss"
    )]
    NewerAway {
        /// The group.
        group: GroupId,
        /// The device that may have them.
        device: DeviceId,
        /// Its node.
        node: String,
    },
    /// The group could not even be made anew.
    #[error(
        "no device that is there can take over placement group {group}: start a node, or add one"
    )]
    NobodyLeft {
        /// The group.
        group: GroupId,
    },
    /// Nothing need be lost.
    #[error(
        "device {device} is served by its node, and nothing on it need be lost: repeat without \
         --accept-data-loss, which moves \
         its data first"
    )]
    Served {
        /// The device.
        device: DeviceId,
    },
}

impl LossRefusal {
    pub(super) fn kind(&self) -> RefusalKind {
        RefusalKind::Conflict
    }
}

/// `volumes "a", "b" and 3 more, and of filesystem "c"`.
struct Stored<'a>(&'a [String], usize, &'a [String]);

impl fmt::Display for Stored<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(named, others, filesystems) = *self;
        let volumes = named.len() + others;
        if volumes > 0 || filesystems.is_empty() {
            fmt_names(f, "volume", volumes, named)?;
            if others > 0 {
                write!(f, " and {others} more")?;
            }
        }
        if filesystems.is_empty() {
            return Ok(());
        }
        f.write_str(if volumes > 0 { ", and of " } else { "" })?;
        fmt_names(f, "filesystem", filesystems.len(), filesystems)
    }
}

fn fmt_names(
    f: &mut fmt::Formatter<'_>,
    what: &str,
    count: usize,
    names: &[String],
) -> fmt::Result {
    write!(f, "{what}{} ", if count == 1 { "" } else { "s" })?;
    for (index, name) in names.iter().enumerate() {
        let comma = if index > 0 { ", " } else { "" };
        write!(f, "{comma}{name:?}")?;
    }
    Ok(())
}

/// What has no replica at all.
struct Orphans(usize);

impl fmt::Display for Orphans {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            0 => Ok(()),
            count => write!(
                f,
                "; of {count} of these groups no other replica is known to have been complete, so all that \
                 these held is lost"
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_would_be_lost_is_named_as_people_know_it() {
        let text = |volumes: &[&str], others, filesystems: &[&str]| {
            let [volumes, filesystems] = [volumes, filesystems]
                .map(|names| names.iter().map(|name| (*name).into()).collect());
            let refusal = LossRefusal::WouldLose {
                culprit: "node 'n1'".into(),
                groups: 2,
                orphans: 0,
                volumes,
                others,
                filesystems,
            };
            let text = refusal.to_string();
            let (_, rest) = text.split_once("2 placement groups of ").unwrap();
            rest.split_once(": ").unwrap().0.to_owned()
        };
        assert_eq!(text(&["a"], 0, &[]), "volume \"a\"");
        assert_eq!(text(&["a", "b"], 3, &[]), "volumes \"a\", \"b\" and 3 more");
        assert_eq!(text(&[], 0, &["c"]), "filesystem \"c\"");
        let both = text(&["a"], 0, &["c", "d"]);
        assert_eq!(both, "volume \"a\", and of filesystems \"c\", \"d\"");
    }
}
