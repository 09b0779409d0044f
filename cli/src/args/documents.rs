//! The commands that the documents tell people to type are commands.

use clap::Parser;
use clap::error::ErrorKind;

use super::Cli;

const DOCUMENTS: [&str; 5] = [
    "README.md",
    "docs/OPERATIONS.md",
    "docs/RUNBOOK.md",
    "docs/LIBVIRT.md",
    "docs/SEMANTICS.md",
];

/// What stands for a number, a size, or an identity.
const PLACEHOLDERS: [(&str, &str); 7] = [
    ("N", "3"),
    ("SIZE", "1G"),
    ("wait:SECONDS", "wait:60"),
    ("TIME", "1h"),
    ("NUMBER", "1"),
    ("ADDRESS", "10.0.0.1"),
    ("HISTORY", "5e1a7a3c-0a9c-4d43-9f5e-7d1f0d9c2b11"),
];

/// What is typed on the lines of blocks behind a prompt, and what stands in a line between backquotes.
fn commands(text: &str) -> (Vec<String>, Vec<String>) {
    let (mut typed, mut named) = (Vec::new(), Vec::new());
    let mut is_block = false;
    // A command in a line may go on in the next.
    let mut prose = String::new();
    for line in text.lines() {
        if line.trim_start().starts_with("```") {
            is_block = !is_block;
        } else if !is_block {
            prose.push_str(line.trim());
            prose.push(' ');
        } else if let Some((_, command)) = line.split_once("$ ") {
            let command = command.split(" #").next().unwrap_or_default();
            let parts = command
                .split("&&")
                .flat_map(|part| part.split([';', '&', '|', '>']));
            typed.extend(parts.map(|part| part.trim().to_owned()));
        }
    }
    let spans = prose.split('`').skip(1).step_by(2);
    named.extend(spans.map(str::to_owned));
    let is_ours = |command: &String| command.starts_with("penstock ");
    typed.retain(is_ours);
    named.retain(is_ours);
    (typed, named)
}

fn parse(command: &str) -> Result<(), clap::Error> {
    let words = command.split_whitespace().map(|word| {
        let given = PLACEHOLDERS.iter().find(|(name, _)| *name == word);
        given.map_or(word, |(_, given)| given)
    });
    Cli::try_parse_from(words).map(drop)
}

#[test]
fn commands_in_the_documents_exist() {
    let mut seen = 0;
    for document in DOCUMENTS {
        let path = format!("{}/../{document}", env!("CARGO_MANIFEST_DIR"));
        let text = std::fs::read_to_string(&path).unwrap();
        let (typed, named) = commands(&text);
        seen += typed.len() + named.len();
        for command in typed {
            if let Err(error) = parse(&command) {
                panic!("{document}: {command}: {error}");
            }
        }
        for command in named {
            // A verb may be named without all that it needs.
            let is_short = |error: &clap::Error| {
                matches!(
                    error.kind(),
                    ErrorKind::MissingRequiredArgument
                        | ErrorKind::MissingSubcommand
                        | ErrorKind::DisplayHelp
                        | ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand
                )
            };
            if let Some(error) = parse(&command).err().filter(|error| !is_short(error)) {
                panic!("{document}: {command}: {error}");
            }
        }
    }
    assert!(seen > 60, "only {seen} commands were found");
}
