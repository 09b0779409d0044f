//! Verbs on the cluster: nodes, devices, pools, events.

use clap::builder::NonEmptyStringValueParser;
use clap::{Args, Subcommand};

use crate::api::types::{FailureDomain, events_default, replicas_default};
use crate::config::DeviceSpec;

/// `penstock node …`.
#[derive(Debug, Subcommand)]
pub enum NodeCommand {
    /// List nodes
    List,
    /// Show one node
    Show {
        /// Name or number of the node
        #[arg(value_name = "NODE", value_parser = NonEmptyStringValueParser::new())]
        node: String,
    },
    /// Move all data off a node, while I/O goes on
    Drain {
        /// Name or number of the node
        #[arg(value_name = "NODE", value_parser = NonEmptyStringValueParser::new())]
        node: String,
        /// Call it off: the node may hold data again
        #[arg(long)]
        off: bool,
        /// Do not ask
        #[arg(long)]
        yes: bool,
    },
    /// Forget a node for good: an empty one, or one that is down and not the last to hold anything
    Remove {
        /// Name or number of the node
        #[arg(value_name = "NODE", value_parser = NonEmptyStringValueParser::new())]
        node: String,
        /// Of a node that is down and never comes back: give up what only that has. Volumes go on with the newest data that other
        /// nodes have, and what guests wrote since is lost; an event says how much that may concern
        #[arg(long)]
        accept_data_loss: bool,
        /// Do not ask
        #[arg(long)]
        yes: bool,
    },
}

/// `penstock device …`.
#[derive(Debug, Subcommand)]
pub enum DeviceCommand {
    /// List the devices of all nodes
    List,
    /// Add a block device or file to this node, from the daemon's next start on; guests do not notice that start
    Add {
        /// Block device or file; SIZE creates a file
        #[arg(value_name = "PATH[:SIZE]")]
        device: DeviceSpec,
    },
    /// Move all data off a device and then forget it; one that is dead is forgotten at once
    Remove {
        /// Number of the device, or its path on this node
        #[arg(value_name = "DEVICE", value_parser = NonEmptyStringValueParser::new())]
        device: String,
        /// Call it off: the device may hold data again
        #[arg(long)]
        off: bool,
        /// Of a dead device: give up what only that has. Volumes go on with the newest data that other devices have, and what guests
        /// wrote since is lost; an event says how much that may concern
        #[arg(long, conflicts_with = "off")]
        accept_data_loss: bool,
        /// Do not ask
        #[arg(long)]
        yes: bool,
    },
}

/// `penstock pool …`.
#[derive(Debug, Subcommand)]
pub enum PoolCommand {
    /// Make a pool
    Create {
        /// Name of the new pool
        #[arg(value_parser = NonEmptyStringValueParser::new())]
        name: String,
        /// Copies of all data
        #[arg(long, value_name = "N", default_value_t = replicas_default())]
        replicas: u8,
        /// Copies that must be in sync for a write to be acknowledged [default: a majority]
        #[arg(long, value_name = "N")]
        min_in_sync: Option<u8>,
        /// What copies must not share
        #[arg(long, value_name = "DOMAIN", default_value = "node")]
        failure_domain: FailureDomain,
        /// Use devices of this class only, as `penstock device list --json` tells it [default: all]
        #[arg(long, value_name = "CLASS")]
        class: Option<String>,
    },
    /// List pools
    List,
    /// Show one pool
    Show {
        /// Name of the pool
        #[arg(value_parser = NonEmptyStringValueParser::new())]
        name: String,
    },
    /// Delete a pool without volumes
    Delete {
        /// Name of the pool
        #[arg(value_parser = NonEmptyStringValueParser::new())]
        name: String,
        /// Do not ask
        #[arg(long)]
        yes: bool,
    },
}

/// `penstock events`.
#[derive(Debug, Args)]
pub struct EventsArgs {
    /// Only what happened after the event of this number
    #[arg(long, value_name = "NUMBER")]
    pub after: Option<u64>,
    /// At most so many: the newest, or with --after the next ones
    #[arg(long, value_name = "N", default_value_t = events_default())]
    pub limit: usize,
    /// Go on with what happens from now on
    #[arg(long)]
    pub follow: bool,
}
