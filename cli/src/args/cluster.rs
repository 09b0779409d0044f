//! Verbs on the cluster: nodes, devices, pools, events.

use api::moment::Moment;
use api::types::{FailureDomain, replicas_default};
use clap::builder::NonEmptyStringValueParser;
use clap::{Args, Subcommand};
use config::DeviceSpec;

use super::span;

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
    /// Move all data off a node while I/O goes on
    Drain {
        /// Name or number of the node
        #[arg(value_name = "NODE", value_parser = NonEmptyStringValueParser::new())]
        node: String,
        /// Cancel the drain: the node may hold data again
        #[arg(long)]
        cancel: bool,
        /// Do not ask
        #[arg(long)]
        yes: bool,
    },
    /// Remove a node permanently. It must be empty, or down and not the last to hold any data. A node that
    /// serves guests can be evicted
    Remove {
        /// Name or number of the node
        #[arg(value_name = "NODE", value_parser = NonEmptyStringValueParser::new())]
        node: String,
        /// Delete the attachments of a node that runs and cannot be trusted, and shut it out: its guests lose
        /// their disks and filesystems, its certificate is refused. It must not hold data: drain it first
        #[arg(long, conflicts_with = "accept_data_loss")]
        evict: bool,
        /// Discard data that only this node has. It must be down, and never come back. Volumes go on with the
        /// newest data of other nodes; later writes are lost, and an event says how much that may concern
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
    /// Add a block device or file to this node while it runs
    Add {
        /// Block device or file; SIZE creates a file
        #[arg(value_name = "PATH[:SIZE]")]
        device: DeviceSpec,
    },
    /// Read everything on this node's devices and compare it with its checksums, as happens once a day
    #[command(subcommand)]
    Scrub(ScrubCommand),
    /// Move all data off a device, then remove it. A dead device is removed at once
    Remove {
        /// Number of the device, or its path on this node
        #[arg(value_name = "DEVICE", value_parser = NonEmptyStringValueParser::new())]
        device: String,
        /// Cancel the removal: the device may hold data again
        #[arg(long)]
        cancel: bool,
        /// Discard data that only this device has. It must be dead. Volumes go on with the newest data of
        /// other devices; later writes are lost, and an event says how much that may concern
        #[arg(long, conflicts_with = "cancel")]
        accept_data_loss: bool,
        /// Do not ask
        #[arg(long)]
        yes: bool,
    },
}

/// `penstock device scrub …`.
#[derive(Debug, Subcommand)]
pub enum ScrubCommand {
    /// Begin a pass now
    Start {
        /// Number of the device, or its path [default: all devices of this node]
        device: Option<String>,
    },
    /// Show how far the passes are, and what they found
    Status,
    /// End the pass that is under way; the next one begins in its time
    Stop {
        /// Number of the device, or its path [default: all devices of this node]
        device: Option<String>,
    },
}

/// `penstock pool …`.
#[derive(Debug, Subcommand)]
pub enum PoolCommand {
    /// Create a pool
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
        /// Failure domain that copies must not share. `device` needs --replicas 1
        #[arg(long, value_name = "DOMAIN", default_value = "node")]
        failure_domain: FailureDomain,
        /// Use only devices of this class, as `penstock device list --json` shows it [default: all]
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
    /// Change how many copies a pool keeps. New copies are made in the background, while guests work
    Set {
        /// Name of the pool
        #[arg(value_parser = NonEmptyStringValueParser::new())]
        name: String,
        /// Copies of all data
        #[arg(long, value_name = "N", required_unless_present = "min_in_sync")]
        replicas: Option<u8>,
        /// Copies that must be in sync for a write to be acknowledged. Raise it once all are there
        #[arg(long, value_name = "N")]
        min_in_sync: Option<u8>,
        /// Do not ask before copies are dropped
        #[arg(long)]
        yes: bool,
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
    /// Only events after the one with this number
    #[arg(long, value_name = "NUMBER")]
    pub after: Option<u64>,
    /// Only events from then on: how long ago, like 2h, or a time, like 2026-11-24T08:00:00Z
    #[arg(long, value_name = "TIME", value_parser = span::since)]
    pub since: Option<Moment>,
    /// At most this many: the newest, or with --after the next ones [default: 100; all with --since]
    #[arg(long, value_name = "N")]
    pub limit: Option<usize>,
    /// Wait for new events and print them
    #[arg(long)]
    pub follow: bool,
}
