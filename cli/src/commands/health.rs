//! `penstock health`.

use std::io::{self, Write};
use std::process::ExitCode;

use api::client::Client;
use api::failure::Result;
use api::moment::{Moment, duration};
use api::types::{Health, HealthState, Problem};

use crate::table::Table;

use super::{print, print_json};

/// Runs the verb. Its exit code is 1 when something is wrong.
pub async fn run(client: &Client, json: bool, verbose: bool) -> Result<ExitCode> {
    let health: Health = client.get("/v1/health").await?;
    if json {
        print_json(&health)?;
    } else {
        let width = terminal_width();
        print(|out| tell(out, &health, Moment::now(), verbose, width))?;
    }
    Ok(match health.state {
        HealthState::Ok => ExitCode::SUCCESS,
        HealthState::Degraded => ExitCode::FAILURE,
    })
}

/// One word, and then what is wrong and what goes on: since when, and what is done or to be done about it.
/// Lines have at most `width` characters.
fn tell(
    out: &mut dyn Write,
    health: &Health,
    now: Moment,
    verbose: bool,
    width: Option<usize>,
) -> io::Result<()> {
    writeln!(out, "{}", health_word(health))?;
    let problems = health.problems.iter().map(|one| ("problem", one));
    let jobs = health.background_jobs.iter().map(|one| ("under way", one));
    let notices = health.notices.iter().map(|one| ("notice", one));
    let mut all = problems.chain(jobs).chain(notices).peekable();
    if verbose {
        return all.try_for_each(|(heading, problem)| tell_in_full(out, heading, problem, now));
    }
    if all.peek().is_none() {
        return Ok(());
    }
    let mut table = Table::new(["", "SINCE", "WHAT", "WHAT IS DONE, AND WHAT TO DO"]);
    for (heading, problem) in all {
        let since = problem
            .since
            .map(|since| duration(since.seconds_until(now)));
        let left = problem
            .eta_s
            .map(|eta_s| format!("about {} left", duration(eta_s)));
        let doing = Some(&problem.doing).filter(|doing| !doing.is_empty());
        let doing: Vec<&str> = left.iter().chain(doing).map(String::as_str).collect();
        table.row([
            heading.to_owned(),
            since.unwrap_or_else(|| "-".to_owned()),
            problem.what.clone(),
            doing.join("; "),
        ]);
    }
    table.print_within(width, &mut { out })
}

/// All that is known of a problem, in a block of lines.
fn tell_in_full(
    out: &mut dyn Write,
    heading: &str,
    problem: &Problem,
    now: Moment,
) -> io::Result<()> {
    writeln!(out, "{heading:<9}  {}", problem.what)?;
    if let Some(since) = problem.since {
        let ago = duration(since.seconds_until(now));
        writeln!(out, "  since    {since}, {ago} ago")?;
    }
    if let Some(eta_s) = problem.eta_s {
        writeln!(out, "  left     about {}", duration(eta_s))?;
    }
    writeln!(out, "  runbook  RUNBOOK.md#{}", problem.code)?;
    if problem.doing.is_empty() {
        return Ok(());
    }
    // Each part is a sentence of its own: what is being done, what that waits for, what to do.
    let mut parts = problem.doing.split("; ");
    writeln!(out, "  doing    {}", parts.next().unwrap_or_default())?;
    parts.try_for_each(|part| writeln!(out, "           {part}"))
}

/// Characters in a line of the terminal that this goes to; `None`: it goes elsewhere.
fn terminal_width() -> Option<usize> {
    let size = rustix::termios::tcgetwinsize(io::stdout()).ok()?;
    Some(usize::from(size.ws_col)).filter(|width| *width > 0)
}

/// The state in a word.
pub fn health_word(health: &Health) -> &'static str {
    match health.state {
        HealthState::Ok => "ok",
        HealthState::Degraded => "degraded",
    }
}

#[cfg(test)]
mod tests {
    use meta::UnixMillis;

    use super::*;

    fn told(health: &Health, verbose: bool) -> String {
        let mut out = Vec::new();
        let now = Moment::from(UnixMillis(1_700_000_300_000));
        tell(&mut out, health, now, verbose, None).unwrap();
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn health_is_a_word_and_a_table_of_problems() {
        let well = Health {
            state: HealthState::Ok,
            problems: Vec::new(),
            background_jobs: Vec::new(),
            notices: Vec::new(),
        };
        assert_eq!(told(&well, false), "ok\n");
        let problem = Problem {
            code: "node-down".to_owned(),
            what: "node n3 is down".to_owned(),
            since: Some(UnixMillis(1_700_000_000_000).into()),
            doing: "start it; in 10 min its data are rebuilt elsewhere".to_owned(),
            eta_s: Some(90),
            is_warning: false,
        };
        let job = Problem {
            code: "node-emptying".to_owned(),
            what: "node n1 is empty".to_owned(),
            since: None,
            doing: String::new(),
            eta_s: None,
            is_warning: false,
        };
        let degraded = Health {
            state: HealthState::Degraded,
            problems: vec![problem],
            background_jobs: vec![job.clone()],
            notices: vec![job],
        };
        let expected = "degraded\n\
            \x20          SINCE  WHAT              WHAT IS DONE, AND WHAT TO DO\n\
            problem    5 min  node n3 is down   about 1 min left; start it; in 10 min its data are rebuilt \
            elsewhere\n\
            under way  -      node n1 is empty\n\
            notice     -      node n1 is empty\n";
        assert_eq!(told(&degraded, false), expected);
        let expected = "degraded\n\
                        problem    node n3 is down\n\
                        \x20 since    2023-11-14T22:13:20Z, 5 min ago\n\
                        \x20 left     about 1 min\n\
                        \x20 runbook  RUNBOOK.md#node-down\n\
                        \x20 doing    start it\n\
                        \x20          in 10 min its data are rebuilt elsewhere\n\
                        under way  node n1 is empty\n\
                        \x20 runbook  RUNBOOK.md#node-emptying\n\
                        notice     node n1 is empty\n\
                        \x20 runbook  RUNBOOK.md#node-emptying\n";
        assert_eq!(told(&degraded, true), expected);
    }
}
