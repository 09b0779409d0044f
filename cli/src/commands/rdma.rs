//! `penstock rdma …`. It asks this machine, not a daemon.

use std::net::IpAddr;
use std::process::ExitCode;

use api::failure::Result;
use fabric_rdma::check::{self, Finding, Verdict};
use serde::Serialize;

use crate::args::RdmaCommand;

use super::{print, print_json};

/// What is printed for programs.
#[derive(Serialize)]
struct CheckReport<'a> {
    /// `ok`, `warn` or `fail`, of the whole machine.
    state: &'static str,
    /// Whether a port of this machine can carry data.
    usable: bool,
    findings: Vec<FindingReport<'a>>,
}

#[derive(Serialize)]
struct FindingReport<'a> {
    about: &'a str,
    state: &'static str,
    text: &'a str,
    #[serde(skip_serializing_if = "str::is_empty")]
    hint: &'a str,
}

/// Runs a verb.
pub fn run(command: RdmaCommand, json: bool) -> Result<ExitCode> {
    match command {
        RdmaCommand::Check(args) => check(args.address, json),
    }
}

fn check(address: Option<IpAddr>, json: bool) -> Result<ExitCode> {
    let checked = check::run(address);
    let verdict = checked.verdict();
    if json {
        print_json(&CheckReport {
            state: state(verdict),
            usable: checked.usable,
            findings: checked.findings.iter().map(report).collect(),
        })?;
    } else {
        print(|out| {
            for finding in &checked.findings {
                let state = state(finding.verdict);
                writeln!(out, "{state:4}  {}: {}", finding.about, finding.text)?;
                if !finding.hint.is_empty() {
                    writeln!(out, "      {}", finding.hint)?;
                }
            }
            let summary = match verdict {
                Verdict::Ok => "this machine can use RDMA",
                Verdict::Warn => "this machine can use RDMA; see the warnings above",
                Verdict::Fail => "this machine cannot use RDMA; data go over TCP",
            };
            writeln!(out, "{:4}  {summary}", state(verdict))
        })?;
    }
    Ok(match verdict {
        Verdict::Ok | Verdict::Warn => ExitCode::SUCCESS,
        Verdict::Fail => ExitCode::FAILURE,
    })
}

fn report(finding: &Finding) -> FindingReport<'_> {
    FindingReport {
        about: &finding.about,
        state: state(finding.verdict),
        text: &finding.text,
        hint: &finding.hint,
    }
}

fn state(verdict: Verdict) -> &'static str {
    match verdict {
        Verdict::Ok => "ok",
        Verdict::Warn => "warn",
        Verdict::Fail => "fail",
    }
}
