//! The command line: what may be typed ([`args`]), and what its verbs do. All but those of the daemon itself
//! talk to a daemon by the admin API, or work on what a stopped one keeps.

pub mod args;
mod commands;
mod image;
mod table;

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use api::failure::{Failure, Kind, Result};
use clap::Parser;
use clap::error::{ContextKind, ContextValue, ErrorKind};

use args::{BackendProgramArgs, Cli, NfsHelperArgs, ServeArgs};

/// Called by this name the program is a vhost-user back end: `vhost-user-blk` is its first argument.
/// Tools that find back ends by their description (QEMU's docs/interop/vhost-user.json) know a file, and no
/// verb.
const BACKEND_NAME: &str = "vhost-user-blk";

/// Asks a back end what it can do.
const CAPABILITIES: &str = "--print-capabilities";

/// Verbs whose work the command line leaves to the daemon.
#[derive(Debug)]
pub enum DaemonVerb {
    /// `penstock serve`.
    Serve {
        /// Its options.
        args: ServeArgs,
        /// The data directory, if one was named.
        data: Option<PathBuf>,
        /// An environment variable named it.
        is_by_variable: bool,
    },
    /// `penstock vhost-user-blk`.
    BackendProgram {
        /// Its options.
        args: BackendProgramArgs,
        /// The data directory, if one was named.
        data: Option<PathBuf>,
    },
    /// The helper that makes block devices.
    BlockDeviceHelper {
        /// Directory of its files.
        dir: PathBuf,
    },
    /// The helper that mounts and exports.
    NfsHelper(NfsHelperArgs),
}

/// Runs a command line, whose first word is the program's name. Prints failures.
pub fn run(
    given: impl Iterator<Item = OsString>,
    daemon: fn(DaemonVerb) -> Result<()>,
) -> ExitCode {
    let arguments = arguments(given);
    let json = wants_json(&arguments);
    let result = match Cli::try_parse_from(arguments) {
        Ok(cli) => commands::run(cli, daemon),
        Err(e) if matches!(e.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion) => {
            // A closed pipe behind `penstock --help | head` is no failure.
            let _ = e.print();
            Ok(ExitCode::SUCCESS)
        }
        Err(e) if e.kind() == ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
            let _ = e.print();
            Ok(ExitCode::from(2))
        }
        Err(e) => Err(usage_failure(&e)),
    };
    result.unwrap_or_else(|failure| {
        match serde_json::to_string(&failure) {
            Ok(line) if json => eprintln!("{line}"),
            _ => eprintln!("penstock: error: {failure}"),
        }
        ExitCode::from(failure.exit_code())
    })
}

/// The command line, with the verb that the program's name stands for.
fn arguments(given: impl Iterator<Item = OsString>) -> Vec<OsString> {
    let mut all: Vec<OsString> = given.collect();
    let name = all.first().map(Path::new).and_then(Path::file_name);
    if name.is_some_and(|name| name == BACKEND_NAME) {
        all.insert(1, BACKEND_NAME.into());
    }
    // The conventions: with this one a back end ignores all others.
    if all.get(1).is_some_and(|verb| verb == BACKEND_NAME)
        && all.iter().any(|one| one == CAPABILITIES)
    {
        all.truncate(2);
        all.push(CAPABILITIES.into());
    }
    all
}

/// Returns true if failures are printed as JSON, also when the command line cannot be parsed.
fn wants_json(arguments: &[OsString]) -> bool {
    let mut words = arguments.iter().skip(1).take_while(|word| *word != "--");
    words.any(|word| word == "--json")
}

/// Joins clap's explanation into an error of one line. Its tips become the hint.
fn usage_failure(e: &clap::Error) -> Failure {
    let text = e.to_string();
    let lines = text
        .lines()
        .map(str::trim)
        .take_while(|line| !line.starts_with("Usage:") && !line.starts_with("For more information"))
        .filter(|line| !line.is_empty());
    let (mut error, mut is_list) = (String::new(), false);
    let mut hints = Vec::new();
    for line in lines {
        if let Some(tip) = line.strip_prefix("tip: ") {
            hints.push(tip.to_owned());
            continue;
        }
        error.push_str(match (error.is_empty(), is_list) {
            (true, _) => "",
            (false, true) => ", ",
            (false, false) => " ",
        });
        is_list |= error.ends_with(": ");
        error.push_str(line.strip_prefix("error: ").unwrap_or(line));
    }
    hints.extend(attach_hint(e, &text));
    if hints.is_empty() {
        hints.push("see `penstock help`".to_owned());
    }
    Failure::new(Kind::Invalid, error, hints.join("; "))
}

/// Suggests commands for `attach NAME`. `None` for any other mistake.
fn attach_hint(e: &clap::Error, text: &str) -> Option<String> {
    let Some(ContextValue::String(name)) = e.get(ContextKind::InvalidSubcommand) else {
        return None;
    };
    let usage = text
        .lines()
        .find_map(|line| line.trim().strip_prefix("Usage: "))?;
    let verbs = ["penstock attach ", "penstock attachment create "];
    let verb = verbs.into_iter().find(|verb| usage.starts_with(verb))?;
    Some(format!(
        "for a volume use `{verb}volume {name} --socket PATH`, for a filesystem `{verb}fs {name} --socket \
         PATH --tag TAG`"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failures_are_json_where_json_was_asked_for() {
        let asked = |words: &[&str]| {
            let words: Vec<OsString> = words.iter().map(OsString::from).collect();
            wants_json(&words)
        };
        assert!(asked(&["penstock", "volume", "show", "x", "--json"]));
        assert!(!asked(&["penstock", "volume", "show", "--", "--json"]));
        assert!(!asked(&["--json"]));
    }

    #[test]
    fn the_program_is_a_back_end_by_its_name() {
        let given = |words: &[&str]| arguments(words.iter().map(OsString::from));
        assert_eq!(
            given(&["/a/vhost-user-blk", "--fd", "3"]),
            ["/a/vhost-user-blk", "vhost-user-blk", "--fd", "3"]
        );
        assert_eq!(given(&["penstock", "status"]), ["penstock", "status"]);
        assert!(given(&[]).is_empty());
        let asked = [
            "/a/vhost-user-blk",
            "--fd",
            "x",
            "--print-capabilities",
            "--new",
        ];
        assert_eq!(
            given(&asked)[1..],
            ["vhost-user-blk", "--print-capabilities"]
        );
    }
}
