//! `penstock rdma …`. It asks this machine, not a daemon.

use std::net::IpAddr;
use std::process::ExitCode;

use fabric::net::rdma::check::{self, Finding, Verdict};
use serde::Serialize;

use super::{print, print_json};
use crate::cli::RdmaCommand;
use crate::failure::Result;

/// What is printed for programs.
#[derive(Serialize)]
struct Told<'a> {
    /// Whether a port of this machine can carry data.
    usable: bool,
    findings: Vec<ToldFinding<'a>>,
}

#[derive(Serialize)]
struct ToldFinding<'a> {
    about: &'a str,
    state: &'static str,
    told: &'a str,
    #[serde(skip_serializing_if = "str::is_empty")]
    mend: &'a str,
}

/// Runs a verb.
pub fn run(command: RdmaCommand, json: bool) -> Result<ExitCode> {
    match command {
        RdmaCommand::Check(args) => check(args.address, json),
    }
}

fn check(address: Option<IpAddr>, json: bool) -> Result<ExitCode> {
    let checked = check::run(address);
    let usable = checked.usable;
    if json {
        print_json(&Told {
            usable,
            findings: checked.findings.iter().map(told).collect(),
        })?;
    } else {
        print(|out| {
            for finding in &checked.findings {
                let state = state(finding.verdict);
                writeln!(out, "{state:5} {}: {}", finding.about, finding.told)?;
                if !finding.mend.is_empty() {
                    writeln!(out, "      {}", finding.mend)?;
                }
            }
            match usable {
                true => writeln!(out, "RDMA can be used here"),
                false => writeln!(out, "RDMA cannot be used here; data go over TCP"),
            }
        })?;
    }
    Ok(match usable {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    })
}

fn told(finding: &Finding) -> ToldFinding<'_> {
    ToldFinding {
        about: &finding.about,
        state: state(finding.verdict),
        told: &finding.told,
        mend: &finding.mend,
    }
}

fn state(verdict: Verdict) -> &'static str {
    match verdict {
        Verdict::Good => "good",
        Verdict::Poor => "poor",
        Verdict::Bad => "bad",
    }
}
