//! Commands that make a cluster and let nodes into it.

use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::builder::NonEmptyStringValueParser;
use clap::{Args, Subcommand};
use config::{RoleName, Transport, Wire};

use super::span;

/// Options of whoever is a node of several.
#[derive(Debug, Default, Clone, Args)]
pub struct PeerArgs {
    /// Address at which other nodes reach this one
    #[arg(long, value_name = "ADDRESS")]
    pub listen: Option<IpAddr>,
    /// Port for metadata [default: 7470]
    #[arg(long, value_name = "PORT")]
    pub control_port: Option<u16>,
    /// Port for data [default: 7471]
    #[arg(long, value_name = "PORT")]
    pub data_port: Option<u16>,
    /// Port at which nodes join [default: 7472]
    #[arg(long, value_name = "PORT")]
    pub enrol_port: Option<u16>,
    /// Protection of data between nodes; `crc` is not encrypted [default: tls]
    #[arg(long, value_name = "HOW")]
    pub wire: Option<Wire>,
    /// Transport of data between nodes; RDMA needs `--wire crc` on all nodes [default: tcp]
    #[arg(long, value_name = "WAY")]
    pub transport: Option<Transport>,
    /// Name of this node [default: the host's]
    #[arg(long, value_name = "NAME")]
    pub name: Option<String>,
    /// The machine that this node runs on, if it carries several
    #[arg(long, value_name = "LABEL")]
    pub host: Option<String>,
    /// The rack or room of this node
    #[arg(long, value_name = "LABEL")]
    pub rack: Option<String>,
    /// Roles of this node, like meta,storage [default: all; for a node that joins, those of its token]
    #[arg(long, value_name = "ROLES", value_delimiter = ',')]
    pub roles: Option<Vec<RoleName>>,
}

/// `penstock init`.
#[derive(Debug, Args)]
pub struct InitArgs {
    /// TOML file; options given here override it [env: PENSTOCK_CONFIG] [default: for root
    /// /etc/penstock/penstock.toml, if it is there]
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Copies of all data in the default pool, each on another node
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = replicas())]
    pub replicas: u8,
    /// This node
    #[command(flatten)]
    pub peers: PeerArgs,
}

/// `penstock join`.
#[derive(Debug, Args)]
pub struct JoinArgs {
    /// Token that `penstock token create` printed on a node of the cluster; `-` reads it from standard input,
    /// where no list of processes shows it
    #[arg(required_unless_present = "token_file", conflicts_with = "token_file")]
    pub token: Option<String>,
    /// File that holds the token
    #[arg(long, value_name = "FILE")]
    pub token_file: Option<PathBuf>,
    /// TOML file; options given here override it [env: PENSTOCK_CONFIG] [default: for root
    /// /etc/penstock/penstock.toml, if it is there]
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// This node
    #[command(flatten)]
    pub peers: PeerArgs,
}

/// `penstock token …`.
#[derive(Debug, Subcommand)]
pub enum TokenCommand {
    /// Print a token that lets one node join, once
    Create {
        /// How long the token is valid, like 30m, 2h or 7d
        #[arg(long, value_name = "TIME", default_value = "1h", value_parser = lifetime)]
        lifetime: Duration,
        /// Roles that the node may have. storage: it keeps data; meta: it keeps metadata, gets the key of the
        /// cluster's authority and can admit other nodes [default: host]
        #[arg(long, value_name = "ROLES", value_delimiter = ',')]
        roles: Option<Vec<RoleName>>,
    },
    /// List the tokens that nobody has used yet
    List,
    /// Revoke a token: nobody can join with it any more
    Revoke {
        /// Id that `penstock token list` prints
        #[arg(value_parser = NonEmptyStringValueParser::new())]
        id: String,
    },
}

/// How many copies a pool may have.
fn replicas() -> clap::builder::RangedI64ValueParser<u8> {
    clap::value_parser!(u8).range(1..=i64::from(meta::refusal::MAX_REPLICAS))
}

fn lifetime(text: &str) -> Result<Duration, String> {
    let span = span::parse(text)?;
    match span <= LIFETIME_MAX {
        true => Ok(span),
        false => Err("give at most 365d".to_owned()),
    }
}

/// A token that can be used for longer is refused: it would be forgotten where it lies.
const LIFETIME_MAX: Duration = Duration::from_secs(365 * 24 * 3600);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lifetimes_are_numbers_with_units() {
        assert_eq!(lifetime("90s"), Ok(Duration::from_secs(90)));
        assert_eq!(lifetime("7d"), Ok(Duration::from_secs(7 * 24 * 3600)));
        for bad in [
            "",
            "h",
            "5",
            "0s",
            "1w",
            "-1h",
            "366d",
            "99999999999999999999h",
        ] {
            assert!(lifetime(bad).is_err(), "{bad}");
        }
    }
}
